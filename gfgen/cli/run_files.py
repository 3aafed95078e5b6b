"""Check the files that `gfgen run` reads and writes: each has one purpose, and foreign files stay."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gfgen.cli.shown.board import has_cursor
from gfgen.errors import InputError, Problem
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.files import resume
from gfgen.runtime.files.inbox import WATCHED_NAME
from gfgen.runtime.files.journal import JOURNAL_NAME
from gfgen.runtime.files.lock import LOCK_NAME
from gfgen.runtime.files.manifest import MANIFEST_NAME, check_own, finished_jobs
from gfgen.runtime.files.ownership import claim_files
from gfgen.session.admission import Admission, admit_file, check_source

if TYPE_CHECKING:
    from gfgen.cli.run import RunOptions

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".mp4")
"""Of outputs, and of images that jobs begin with."""


def check_written(jobs: str | None, output_dir: Path, written: Mapping[str, Path | None]) -> None:
    """Check the job file, and that no option names a file that has another purpose."""
    named: dict[Path, str] = {}
    if jobs is not None and jobs != "-":
        check_source(jobs)
        if _is_record(Path(jobs), output_dir):
            raise InputError(f"{jobs}: is a record of the runs in {output_dir}, not a job file")
        named[Path(jobs)] = "the job file itself"
    for option, path in written.items():
        if path is None:
            continue
        what = next((what for other, what in named.items() if _is_same(path, other)), None)
        what = what or ("a file of the run itself" if _is_record(path, output_dir) else None)
        what = what or (
            "a picture or a video by its name" if resolved(path).suffix.lower() in _SUFFIXES else None
        )
        if what is not None:
            raise InputError(f"{option} {path}: is {what}; name another file")
        named[path] = f"the file of {option}, too"


def check_watched(folder: Path, output_dir: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"--watch {folder}: there is no such folder; make it, then put job files into it")
    if _is_same(folder, output_dir):
        raise InputError(f"--watch {folder}: this is also the output folder; name another with --output")


def check_records(output_dir: Path) -> None:
    """Raises InputError if another program wrote the lists in the folder, to which gfgen appends lines."""
    for name in (MANIFEST_NAME, WATCHED_NAME):
        check_own(output_dir / name)


def admit_jobs(
    source: str, admission: Admission, options: RunOptions
) -> tuple[Sequence[AdmittedJob], Collection[str], Sequence[Problem]]:
    """The jobs of a file, the ids of the finished ones, and the problems of the others.

    Raises: as `admit_file`.
    """
    done: set[str] = set()

    def find_done(jobs: Sequence[AdmittedJob]) -> Collection[str]:
        done.update(finished_jobs(options.output_dir / MANIFEST_NAME, [job.info for job in jobs]))
        return done

    admitted, problems = admit_file(
        source,
        admission,
        skip_invalid=options.skip_invalid,
        overrides=options.overrides,
        has_bar=has_cursor(sys.stderr) and not (options.logs.quiet or options.logs.log_json),
        done=find_done,
        claim=lambda jobs: _claim(jobs, source, options, done=find_done(jobs)),
    )
    return admitted, done, problems


def _claim(
    jobs: Sequence[AdmittedJob], source: str, options: RunOptions, *, done: Collection[str]
) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
    """The jobs with the files that they may replace, and problems for those whose file name is taken."""
    return claim_files(
        jobs,
        output_dir=options.output_dir,
        job_file=options.job_file,
        done=done,
        inputs={} if source == "-" else {Path(source): "the job file"},
        overwrite=options.overwrite,
    )


def _is_record(path: Path, output_dir: Path) -> bool:
    """Whether runs keep this file in their output folder."""
    kept = [output_dir / name for name in (MANIFEST_NAME, JOURNAL_NAME, WATCHED_NAME, LOCK_NAME)]
    if any(_is_same(path, record) for record in kept):
        return True
    return resolved(output_dir / resume.FOLDER) in (resolved(path), *resolved(path).parents)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of them is not there yet
        return resolved(path) == resolved(other)


def resolved(path: Path) -> Path:
    """The absolute path without links; the path itself if links form a loop."""
    try:
        return path.resolve()
    except RuntimeError:
        return path
