"""Parses single jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gfgen.errors import JobError, Problem
from gfgen.job.fields import parse_fields
from gfgen.job.images import ImageReader
from gfgen.job.spec import JobSpec, default_id, with_own_name


def parse_job(
    mapping: Mapping[str, object], *, line: int | None = None, folder: Path | None = None
) -> tuple[JobSpec | None, tuple[Problem, ...]]:
    """One job from a decoded JSON object, or None and all of its problems.

    A job without an id gets the default id of a first occurrence; use `default_id` to tell equal jobs
    apart. Relative image paths start at `folder`, by default the current one.
    """
    values, problems = parse_fields(mapping, images=ImageReader(folder or Path()))
    if problems:
        return None, JobError(*problems).at_line(line)
    values.setdefault("id", default_id(values))
    with_own_name(values)
    return JobSpec(**values, line=line), ()
