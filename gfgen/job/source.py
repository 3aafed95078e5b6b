"""Which jobs a command takes: files and prompts, fields of all of their jobs, and a selection of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gfgen.errors import InputError
from gfgen.job.reader import ParsedJobs, read_jobs, source_name
from gfgen.job.spec import JobSpec

MAX_IDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    files: tuple[str, ...] = ()
    """Job files; "-" is standard input."""
    prompts: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of all jobs, whatever the files say."""
    fallbacks: Mapping[str, Any] = field(default_factory=dict)
    """Fields of jobs where neither a line nor the defaults of its file have a value."""
    only: tuple[str, ...] = ()
    """Patterns of ids; a job needs to match one."""
    tags: tuple[str, ...] = ()
    limit: int | None = None
    """The most jobs, the first ones of those that match."""

    def __post_init__(self) -> None:
        if "" in self.files:
            raise InputError("JOBS is empty; name a job file, or - for standard input")
        files = [file if file == "-" else os.path.realpath(file) for file in self.files]
        named = zip(self.files, files, strict=True)
        twice = next((name for name, file in named if files.count(file) > 1), None)
        if twice is not None:
            raise InputError(f"JOBS names {twice} twice; name each job file once")

    @property
    def name(self) -> str:
        return source_name(self.files)

    @property
    def paths(self) -> Sequence[Path]:
        return [Path(file) for file in self.files if file != "-"]

    def read(self, *, has_bar: bool = False) -> ParsedJobs:
        """The selected jobs, and the problems of all.

        Raises: InputError when a file cannot be read, or when no job is selected.
        """
        files = ["-" if file == "-" else Path(file) for file in self.files]
        parsed = read_jobs(
            *files,  # type: ignore[arg-type]
            prompts=self.prompts,
            overrides=self.overrides,
            fallbacks=self.fallbacks,
            has_bar=has_bar,
        )
        if not (self.only or self.tags or self.limit):
            return parsed
        specs = [spec for spec in parsed.specs if self._has(spec)]
        if not specs and not parsed.problems:
            raise InputError(f"{parsed.source}: {self._mismatch(parsed.specs)}")
        return replace(parsed, specs=tuple(specs[: self.limit]))

    def _has(self, spec: JobSpec) -> bool:
        has_id = not self.only or any(fnmatchcase(spec.id, pattern) for pattern in self.only)
        return has_id and (not self.tags or spec.tag in self.tags)

    def _mismatch(self, specs: Sequence[JobSpec]) -> str:
        asked = [f"--only {pattern}" for pattern in self.only] + [f"--tag {tag}" for tag in self.tags]
        more = f" and {len(specs) - MAX_IDS:,} more" if len(specs) > MAX_IDS else ""
        ids = ", ".join(spec.id for spec in specs[:MAX_IDS]) + more
        tags = ", ".join(sorted({spec.tag for spec in specs if spec.tag}))
        return f"no job matches {' '.join(asked)}; ids are {ids}; tags are {tags or 'not given'}"
