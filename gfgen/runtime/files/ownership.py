"""Who owns a file that already has the name of a job's output, and which job file owns an output folder.

gfgen replaces a file only if the folder's manifest says that gfgen made it for a job of the same job file,
whose path counts from the folder, and only if it has not changed since. A job of standard input or of a
program replaces only what the same job (with the same hash) made.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from gfgen.errors import InputError, OutputError, Problem, without_secrets
from gfgen.job.inputs import PROMPTS_NAME, STDIN_NAME, FileLine, is_url
from gfgen.job.spec import (
    FRAME,
    RANDOM_SEED,
    JobSpec,
    drawn,
    filled,
    input_files,
    name_key,
    numbered_name,
    of_frames,
)
from gfgen.runtime.core.admission import AdmittedJob, with_attempt
from gfgen.runtime.core.observer import JobInfo, JobOutcome
from gfgen.runtime.files import resume
from gfgen.runtime.files.index import ManifestIndex
from gfgen.runtime.files.journal import JOURNAL_NAME, arrivals, first_job_file, headers, to_make_again
from gfgen.runtime.files.manifest import (
    MANIFEST_NAME,
    SIMULATED,
    WATCHED_NAME,
    ManifestLine,
    check_own,
    is_finished,
    of_each_file,
    read_files,
    read_manifest,
)
from gfgen.runtime.ipc.content import Content, content_of, read_mark
from gfgen.system.linefile import check_appendable

logger = logging.getLogger(__name__)

STDIN, PROGRAM = "-", "program"  # as job file: jobs of standard input, and those of `gfgen.api`


def job_file_name(source: Path | str | None, output_dir: Path) -> str:
    """The name of a job file or watched folder in manifests and journals; a pipe counts as standard input.

    A text is a URL.
    """
    if isinstance(source, str):
        return without_secrets(source)
    if source is None or (os.path.exists(source) and not source.is_file() and not source.is_dir()):
        return STDIN
    return os.path.relpath(os.path.realpath(source), os.path.realpath(output_dir))


def owner_name(inputs: Sequence[Path], output_dir: Path) -> str:
    """What owns the files of a program's jobs: its first job file, or all programs."""
    return job_file_name(inputs[0], output_dir) if inputs else PROGRAM


def check_records(output_dir: Path) -> None:
    """Raises InputError if another program wrote the lists in the folder, to which gfgen appends lines, or if
    this user may not append to them, before ranks start."""
    for name in (MANIFEST_NAME, WATCHED_NAME):
        check_own(output_dir / name)
    for name in (MANIFEST_NAME, WATCHED_NAME, JOURNAL_NAME, resume.FOLDER):
        check_appendable(output_dir / name)


def is_of_a_run(folder: Path) -> bool:
    """Whether a run wrote to the folder; a stopped simulation leaves an empty manifest, too."""
    if any((folder / name).exists() for name in (JOURNAL_NAME, resume.FOLDER)):
        return True
    return any(not entry.get(SIMULATED) for entry in read_manifest(folder / MANIFEST_NAME).values())


def check_no_run(folder: Path) -> None:
    if is_of_a_run(folder):
        raise InputError(f"--output {folder}: contains files of a run; name another folder")


def check_free(path: Path, option: str, taken: Mapping[str, str] | None = None) -> None:
    """Raises InputError for a path of a record of runs or of a job's file, or one of `taken`, which maps real
    paths to their descriptions."""
    real = Path(os.path.realpath(path))
    what = (taken or {}).get(str(real))
    if path.name in (MANIFEST_NAME, JOURNAL_NAME, WATCHED_NAME):
        what = "a record of runs"
    for folder in real.parents if what is None and os.path.exists(real) else ():
        name = str(real.relative_to(folder))
        with contextlib.suppress(OutputError):  # others may own what is above
            if line := read_files(folder / MANIFEST_NAME, name=name).get(name):
                what = f"a file of job {line.get('id')}"
    if what is not None:
        raise InputError(f"{option} {path}: is {what}; name another file")


def default_folder(parent: Path, name: str, source: Path | str | None) -> Path:
    """The folder of this job file: `parent`/`name`, with a suffix if that belongs to another job file."""
    job_file = job_file_name(source, parent / name)
    digest = hashlib.sha256(job_file.encode("utf-8", "surrogateescape")).hexdigest()
    own = parent / f"{name}-{digest[:6]}"
    owners = {folder: _owner(folder) for folder in (parent / name, own)}
    for folder, owner in owners.items():
        if owner is not None and (owner == job_file or owner.startswith(f"{job_file}/")):
            return folder
    return next((folder for folder, owner in owners.items() if owner is None), own)


def _owner(folder: Path) -> str | None:
    """The job file that used the folder first, according to its journal or manifest."""
    if job_file := first_job_file(folder / JOURNAL_NAME):
        return job_file
    return next(
        (name for line in read_files(folder / MANIFEST_NAME).values() if (name := line.get("job_file"))), None
    )


def with_names(
    jobs: Sequence[AdmittedJob], *, output_dir: Path, named_at: float | None = None
) -> Sequence[AdmittedJob]:
    """The jobs, with random seeds and file names as their folder has them, or as it will have them.

    {date} is that of a job's first arrival, {time} that of `named_at`, or of the first run of the folder. A
    job whose {index} another job has used gets the next free one; a finished job keeps its name.
    """
    if not any(map(_is_named_there, jobs)):
        return jobs
    journal, entries = output_dir / JOURNAL_NAME, read_manifest(output_dir / MANIFEST_NAME)
    arrived, seeds, now = dict[tuple[str, str], float](), dict[object, Any](), named_at or time.time()
    for started_at, each in arrivals(journal):
        key = each["job_id"], each["spec_hash"]
        arrived.setdefault(key, started_at + each["time_s"])
        seeds[key] = each.get("seed")
    began_at = next((each["named_at"] for each in headers(journal) if "named_at" in each), now)
    values = {"time": time.strftime("%H-%M-%S", time.localtime(began_at))}
    owners = {name_key(_unnumbered(entry)): each for each, entry in entries.items() if entry.get("file")}

    def named(job: AdmittedJob) -> AdmittedJob:
        info, spec, entry = job.info, job.info.spec, entries.get(job.job_id, {})
        key, entry = (job.job_id, info.spec_hash), entry if entry.get("spec_hash") == info.spec_hash else {}
        if spec.seed == RANDOM_SEED:
            spec = replace(spec, seed=seeds.get(key) or entry.get("seed") or drawn(spec.seed))
        day = time.strftime("%Y-%m-%d", time.localtime(arrived.get(key, now + spec.arrival_s)))
        known: dict[str, Any] = {**values, "date": day, "seed": spec.seed, "model": spec.model}
        file, place = filled(info.file, **known), spec.place
        if entry.get("file") is not None:  # it may have arrived around midnight, or had another place
            file = _unnumbered(entry)
        while place is not None and owners.setdefault(name_key(file), job.job_id) != job.job_id:
            place += 1
            output = spec.output or ""
            file = filled(of_frames(output) if FRAME in file else output, **known, index=place)
        return replace(job, info=replace(info, file=file, spec=spec))

    return [named(job) if _is_named_there(job) else job for job in jobs]


def _unnumbered(entry: ManifestLine) -> str:
    """The name of a finished job's file; of several files the one that they have numbers of."""
    first = str(entry["file"])
    if "outputs" not in entry:
        return first
    return re.sub(r"(?<=/)0001(?=\.\w+$)", FRAME, re.sub(r"-1(\.\w+)$", r"\1", first))


def _is_named_there(job: AdmittedJob) -> bool:
    asked = job.info.asked
    return asked.seed == RANDOM_SEED or asked.place is not None or "{" in job.info.file.replace(FRAME, "")


_PLAIN_NAME = re.compile(r"[\w./-]{1,140}", re.ASCII)
"""What every file system takes."""
STATUSES = ("new", "left", "done", "changed", "again")


@dataclass(kw_only=True)
class Claims:
    """Which jobs an output folder has, and which of its files jobs may replace."""

    output_dir: Path
    job_file: str  # of jobs whose lines do not say
    inputs: Sequence[Path] = ()
    overwrite: bool = False
    force: bool = False  # finished jobs run again
    only_failed: bool = False  # jobs that have not failed before are left out
    done_ids: set[str] = field(default_factory=set)
    named_at: float | None = None
    published: Mapping[str, str] = field(default_factory=dict)  # hashes of jobs in a store, by id
    forced_from: int | None = None  # with `force`: bytes of the manifest when the runs of this --force began

    index: ManifestIndex | None = None  # in place of the whole manifest in memory
    num_known: int = 0  # finished jobs that were not admitted, because the index knows their lines

    @functools.cached_property
    def entries(self) -> Any:
        """By id, the latest line of each job."""
        return self.index or read_manifest(self.output_dir / MANIFEST_NAME)

    def outcome(self, job: AdmittedJob) -> JobOutcome:
        """That of a job whose files the folder already has, or a filter has dropped."""
        entry = self.entries.get(job.job_id)
        error = "a filter has dropped it" if entry["status"] == "dropped" else None
        files = of_each_file(entry) if "outputs" in entry else []
        named = [(PurePath(each["file"]).name, each["size_bytes"], each["sha256"]) for each in files]
        return JobOutcome(job.info, "skipped", error=error, files=tuple(named), entry=entry)

    def _named(self, jobs: Sequence[AdmittedJob]) -> Sequence[AdmittedJob]:
        jobs = [with_attempt(job, self.entries.get(job.job_id, {})) for job in jobs]
        return with_names(jobs, output_dir=self.output_dir, named_at=self.named_at)

    def done(self, jobs: Sequence[AdmittedJob]) -> Collection[str]:
        infos, folder = [job.info for job in self._named(jobs)], self.output_dir
        entries = self._made_by_force(infos, folder / MANIFEST_NAME) if self.force else self.entries
        if not self.force and (left := to_make_again(folder)):
            logger.warning("the last run had --force and %d left: give --force to go on with it", len(left))
        self.done_ids |= {
            each.job_id
            for each in infos
            if self.published.get(each.job_id) == each.spec_hash
            or is_finished(each, entries.get(each.job_id), folder)
        }
        return self.done_ids

    def _made_by_force(self, infos: Sequence[JobInfo], path: Path) -> Mapping[str, ManifestLine]:
        """The lines of jobs that stopped runs of this --force have ended; none if it begins."""
        before = [header.get("forced_from") for header in headers(self.output_dir / JOURNAL_NAME)]
        self.forced_from = before[-1] if before else None
        lines = {} if self.forced_from is None else read_manifest(path, start=self.forced_from)
        lines = {job_id: line for job_id, line in lines.items() if line.get("status") != "again"}
        has_ended = (lines.get(info.job_id, {}).get("spec_hash") == info.spec_hash for info in infos)
        if self.forced_from is None or all(has_ended):
            self.forced_from = path.stat().st_size if path.exists() else 0
            return {}
        return lines

    def depend_on_all(self, specs: Iterable[JobSpec]) -> bool:
        """Whether a claim may depend on other jobs, beyond names that the job file gives them."""
        if self.force or self.only_failed:
            return True
        named = ((spec, {"{", "/"}.intersection(spec.output or "")) for spec in specs)
        return any(spec.seed == RANDOM_SEED or spec.image or spec.files or parts for spec, parts in named)

    def claim(self, jobs: Sequence[AdmittedJob]) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """The jobs with the files that they may replace, and problems for those whose file name is taken."""
        jobs = self._named(jobs)
        if self.only_failed:
            jobs = [job for job in jobs if self.entries.get(job.job_id, {}).get("status") == "failed"]
            if not jobs:
                logger.warning("--failed: none of these jobs has failed in %s", self.output_dir)
        done = self.done(jobs)
        changed = "is in the store with other fields, and nothing there is replaced; give it another id"
        is_other = [job.job_id in self.published and job.job_id not in done for job in jobs]
        others = itertools.compress(jobs, is_other)
        claimed: list[AdmittedJob] = []
        problems = [Problem(job.spec.line, "id", job.job_id, changed) for job in others]
        jobs = [job for job, is_changed in zip(jobs, is_other, strict=True) if not is_changed]
        groups: dict[str | None, list[AdmittedJob]] = {}
        for job in jobs:
            line = job.spec.line
            groups.setdefault(line.file if isinstance(line, FileLine) else None, []).append(job)
        for file, group in groups.items():
            job_file = self.job_file
            if file is not None:
                named = None if file in (STDIN_NAME, PROMPTS_NAME) else file if is_url(file) else Path(file)
                job_file = job_file_name(named, self.output_dir)
            found, taken = claim_files(
                group,
                output_dir=self.output_dir,
                job_file=job_file,
                done=done,
                inputs=dict.fromkeys(self.inputs, "the job file"),
                overwrite=self.overwrite,
            )
            claimed, problems = claimed + found, problems + taken
        return claimed, problems

    def status(self, job: AdmittedJob) -> tuple[str, str]:
        """One of STATUSES, and for a job that is made again the reason."""
        entry = self.entries.get(job.job_id)
        if job.job_id in self.done_ids:
            return "done", ""
        if entry is None or entry.get(SIMULATED):
            return "new", ""
        has_name = entry.get("file") is None or _unnumbered(entry) == job.info.file
        if entry.get("spec_hash") != job.info.spec_hash or not has_name:
            return "changed", ""
        if entry.get("status") != "done":
            reasons = {"failed": "it failed", "again": "a filter wants another seed", "dropped": "--force"}
            return "again", reasons.get(str(entry.get("status")), "it was cancelled")
        if not all((self.output_dir / str(each["file"])).exists() for each in of_each_file(entry)):
            return "again", "its file is gone"
        return "again", "--force" if self.force else "its file has changed"


def claim_files(
    jobs: Sequence[AdmittedJob],
    *,
    output_dir: Path,
    job_file: str,
    done: Collection[str] = (),
    inputs: Mapping[Path, str] | None = None,
    overwrite: bool = False,
) -> tuple[list[AdmittedJob], list[Problem]]:
    """The jobs with the files that they may replace, and a problem for each job whose file name is taken.

    Jobs in `done` write nothing. No job may replace the image of a job or one of `inputs`, which maps paths
    to their descriptions in messages. With `overwrite` a job may replace files that others made.
    """
    read = {path: f"the {name} of job {job.job_id}" for job in jobs for name, path in input_files(job.spec)}
    folder = _Folder(output_dir, _inodes({**read, **(inputs or {})}), overwrite=overwrite)
    owners: dict[str, str] = {}
    for job in sorted(jobs, key=lambda job: job.job_id not in done):
        owners.setdefault(name_key(job.info.file), job.job_id)
    claimed, problems = [], []
    for job in jobs:
        job = replace(job, info=replace(job.info, job_file=job_file))
        if job.job_id in done:
            claimed.append(job)
            continue
        path = output_dir / job.info.file
        found: str | Content | None = _clash(job, owners, output_dir)
        if found is None and os.path.lexists(path):
            found = folder.use_of(path) or folder.replaceable(path, job)
        if isinstance(found, str):
            shown = path.parent if FRAME in path.name else path
            if job_file == PROGRAM:  # whose folder may be a temporary one
                shown = shown.relative_to(output_dir)
            problems.append(Problem(job.spec.line, None, str(shown), found))
            continue
        if job.trajectory.frames_shape is None or FRAME in path.name:
            numbered = folder.numbered(path, job)
            if isinstance(numbered, Problem):
                problems.append(numbered)
                continue
            job = replace(job, replaces_numbered=numbered)
        claimed.append(job if found is None else replace(job, replaces=found))
    return claimed, problems


def _clash(job: AdmittedJob, owners: Mapping[str, str], output_dir: Path) -> str | None:
    """Why the job cannot have its name, whatever is there; `owners` has ids by `name_key`."""
    try:
        if not _PLAIN_NAME.fullmatch(job.info.file):  # plain ones cost no look: on a network it takes long
            (output_dir / job.info.file).lstat()
    except UnicodeEncodeError:
        return "this locale cannot write such a name; set LC_ALL=C.UTF-8, or give the job another output"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # encrypted folders have shorter names
        return f"the output folder cannot have such a name ({error.strerror}); name another output"
    if (owner := owners[name_key(job.info.file)]) != job.job_id:
        return f"job {owner} already writes this file; rename one of them"
    folders = Path(job.info.file).parents[:-1]
    lowest = next((each for each in folders if (output_dir / each).is_dir()), None)
    for folder in folders:
        key, path = name_key(str(folder)), output_dir / folder
        if key in owners:
            return f"{folder} is the file of job {owners[key]}, not a folder; rename one of them"
        if key in (MANIFEST_NAME, JOURNAL_NAME) or (os.path.lexists(path) and not path.is_dir()):
            return f"{folder} is a file, not a folder; name another output"
        if not path.resolve().is_relative_to(output_dir.resolve()):
            return f"{folder} is a link out of the output folder; name another output"
        if folder == lowest and not os.access(path, os.W_OK | os.X_OK):
            return f"you may not write into {folder} (its owner can, chmod g+w); name another output"
    return None


class _Folder:
    """The files of an output folder that a job may replace; `in_use` says, by inode, which it may not."""

    def __init__(self, path: Path, in_use: Mapping[tuple[int, int], str], *, overwrite: bool) -> None:
        self._path, self._in_use, self._overwrite = path, in_use, overwrite

    @functools.cached_property
    def _lines(self) -> Mapping[str, ManifestLine]:
        return read_files(self._path / MANIFEST_NAME)

    def _line_of(self, path: Path) -> ManifestLine | None:
        return self._lines.get(str(path.relative_to(self._path)))

    def use_of(self, path: Path) -> str | None:
        """Why the file is never replaced; None if it is not in use."""
        what = next((self._in_use[inode] for inode in _inodes({path: ""}) if inode in self._in_use), None)
        return None if what is None else f"is {what}, too; name another output"

    def numbered(self, path: Path, job: AdmittedJob) -> dict[str, Content] | Problem:
        """The files that an earlier run of this job left, with several pictures, that it may replace."""
        is_video, found = FRAME in path.name, dict[str, Content]()
        for number in itertools.count(1):
            each = path.with_name(numbered_name(path.name, number))
            if not os.path.lexists(each):
                if is_video and number < (job.spec.frames or 1):
                    continue
                break
            content, line = self.replaceable(each, job), self._line_of(each) or read_mark(each) or {}
            is_own, used = line.get("id") == job.job_id, self.use_of(each) if is_video else None
            if isinstance(content, Content) and used is None and (is_own or (is_video and self._overwrite)):
                found[each.name] = content
            elif is_video:
                taken = f"is there already: job {line.get('id')} made it; {_what_to_do(job)}"
                reason = used or (content if isinstance(content, str) else taken)
                return Problem(job.spec.line, None, str(each), reason)
        return found

    def replaceable(self, path: Path, job: AdmittedJob) -> Content | str:
        """The content of the file if the job may replace it, otherwise the reason why not."""
        otherwise = "move it away, or name another output"
        if path.is_symlink() or not path.is_file():
            kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "not a file"
            return f"is {kind}; {otherwise}"
        try:
            content = content_of(path)
        except OSError as error:
            return f"cannot be read ({error.strerror}), so it is not replaced; {otherwise}"
        lines = [line for line in (read_mark(path), self._line_of(path)) if line is not None]
        if self._overwrite or any(_is_own(line, job) and _is_of(content, line) for line in lines):
            return content
        if not lines:
            unknown = f"is there already, and {MANIFEST_NAME} there does not say that gfgen made it"
            return f"{unknown}; {_what_to_do(job)}"
        what = "has changed since" if _is_own(lines[-1], job) else "is there already:"
        return f"{what} {_who(lines[-1], self._path)} made it; {_what_to_do(job)}"


def _inodes(paths: Mapping[Path, str]) -> dict[tuple[int, int], str]:
    """Descriptions by device and inode: links and other spellings of a name are the same file."""
    found = {}
    for path, what in paths.items():
        with contextlib.suppress(OSError):
            stat = path.stat()
            found[stat.st_dev, stat.st_ino] = what
    return found


def _what_to_do(job: AdmittedJob) -> str:
    if job.info.job_file == PROGRAM:  # which has no such option
        return "move it away, or name another output"
    return "move it away, name another output, or replace it with --overwrite"


def _is_own(line: ManifestLine, job: AdmittedJob) -> bool:
    made_for, job_file = line.get("job_file"), job.info.job_file
    if made_for is not None and not {STDIN, PROGRAM}.isdisjoint((made_for, job_file)):
        return made_for == job_file and line.get("spec_hash") == job.info.spec_hash
    return made_for is None or made_for == job_file


def _is_of(content: Content, line: ManifestLine) -> bool:
    return content.size_bytes == line.get("size_bytes") and line.get("sha256") in (None, content.sha256)


def _who(line: ManifestLine, folder: Path) -> str:
    job_file = line.get("job_file")
    if job_file is None:
        return f"job {line.get('id')}"
    named = {STDIN: "an earlier standard input", PROGRAM: "a program"}
    return f"job {line.get('id')} of {named.get(job_file) or os.path.normpath(folder / job_file)}"
