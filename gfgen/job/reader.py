"""The job file: its bytes become `JobSpec`s, with every problem, within bounds, reported at once.

bytes -> objects (inputs.py) -> fields (fields.py) -> ids and file names (spec.py)
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from gfgen.errors import GfgenError, InputError, JobError, Problem, at, in_one_line, without_secrets
from gfgen.job.fields import FIELDS, MAX_DURATION_S, MAX_OUTPUT_BYTES, parse_fields, parse_moment, shown
from gfgen.job.images import ImageReader
from gfgen.job.inputs import (
    EXAMPLE,
    JSON_LINES,
    PARQUET,
    PARQUET_SUFFIX,
    PROGRAM_NAME,
    PROMPTS_NAME,
    STDIN_NAME,
    Entry,
    FileLine,
    PromptLines,
    ReadingEnded,
    array_entries,
    decoded_object,
    entries_of,
    is_url,
    rows_of,
    with_loras,
)
from gfgen.job.packed import FEW, SPECS, Packed
from gfgen.job.recipes import Recipes
from gfgen.job.shared import MAX_JOBS, VARIATION_FIELDS, check_defaults, over, variations
from gfgen.job.spec import (
    RANDOM_SEED,
    JobSpec,
    default_id,
    file_names,
    filled,
    name_key,
    numbered_names,
    with_own_name,
)
from gfgen.job.weighted import AUTO

MAX_PROBLEMS = 1_000
SHORT_DAY_S = 23 * 3_600
BAR_FROM = 10_000  # lines that are read, or jobs that are admitted, without a progress bar

KEY_BYTES = 17
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParsedJobs:
    """The valid jobs of the lines without a problem, and all problems; `source` is the file in messages."""

    source: str
    specs: Sequence[JobSpec]
    problems: tuple[Problem, ...]
    kinds: tuple[tuple[str, str], ...] = ()  # each file that is not JSON Lines, and what it is
    defaults: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    num_varied: int = 0
    num_done: int = 0  # further jobs, on lines that a `LineIndex` knows
    keys: bytes | bytearray = b""
    """With a `LineIndex`, KEY_BYTES for each of `specs`: its line's, and whether it has the id; or zeros."""


class DoneJob(NamedTuple):
    id: str
    output: str | None
    format: str | None
    has_own_id: bool  # the line gives it


class LineIndex(Protocol):
    def done(self, key: bytes) -> DoneJob | None:
        """The job of the line with this key, which is a hash of all that decides what the line means."""


def _name_of(file: str) -> str:
    return STDIN_NAME if file == "-" else without_secrets(file)


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    name = _name_of(file)
    try:
        with contextlib.ExitStack() as stack:
            if is_url(file):
                import fsspec

                raw = stack.enter_context(fsspec.open(file, "rb"))
                yield io.BufferedReader(raw)  # which reads lines up to a length
            else:
                yield stack.enter_context(Path(file).open("rb"))
    except FileNotFoundError:
        raise InputError(
            f"job file {name}: no such file; name a file of JSON lines, - for standard input, or -p PROMPT"
        ) from None
    except IsADirectoryError:
        raise InputError(f"job file {name}: this is a folder; name a file of JSON lines in it") from None
    except Exception as error:
        of_store = is_url(file) and not isinstance(error, (GfgenError, _ListEnded))
        if not (isinstance(error, OSError) or of_store):
            raise
        reason = getattr(error, "strerror", None) or without_secrets(in_one_line(error))
        raise InputError(f"job file {name!r}: cannot be read ({reason})") from None


def _of_file(entries: Iterable[Entry], name: str, file_idx: int) -> Iterator[Entry]:
    try:
        for number, entry in entries:
            line = FileLine(number, name, file_idx)
            yield line, replace(entry, line=line) if isinstance(entry, Problem) else entry
    except ReadingEnded as end:
        if end.line is None:
            raise ReadingEnded(None, f"{name}: {end.accepted}") from None
        raise ReadingEnded(FileLine(end.line, name, file_idx), end.accepted) from None


def read_job_stream(
    stream: BinaryIO,
    *,
    source: str,
    folder: Path,
    images: ImageReader | None = None,
    suffix: str = ".jsonl",
    max_jobs: int = MAX_JOBS,
) -> ParsedJobs:
    """The jobs of a binary stream; with `images` from elsewhere, lists of texts are refused."""
    jobs = _JobList(JobSource(), max_jobs)
    kind, entries = entries_of(stream, suffix=suffix)
    with contextlib.suppress(_ListEnded):
        jobs.add_file(entries, source, folder=folder, images=images)
    kinds = () if kind == JSON_LINES else ((source, kind),)
    return ParsedJobs(source, jobs.specs, tuple(jobs.problems), kinds)


def with_bar(
    items: Iterable[T], what: str, *, is_shown: bool, unit: str, total: int | None = None
) -> Iterator[T]:
    """The items; if it is shown, a bar on standard error counts them once there are more than BAR_FROM."""
    iterator = iter(items)
    yield from itertools.islice(iterator, BAR_FROM if is_shown else None)
    for item in iterator:
        from tqdm import tqdm  # 20 ms that only long files pay

        tqdm.monitor_interval = 0  # workers are forked later: no thread
        tqdm.set_lock(threading.RLock())
        rest = itertools.chain([item], iterator)
        yield from tqdm(rest, what, initial=BAR_FROM, total=total, unit=unit, leave=False, mininterval=0.2)


def to_mapping(spec: JobSpec) -> dict[str, Any]:
    """The job as an object of a job file, without default values."""
    deadline: float | str | None = spec.deadline_s
    if spec.deadline_at is not None:
        deadline = datetime.fromtimestamp(spec.deadline_at, UTC).isoformat()
    times = {"deadline": deadline, "arrival": spec.arrival_s or None, "timeout": spec.timeout_s}
    values = {name: times[name] if name in times else getattr(spec, name, None) for name in FIELDS}
    values["priority"] = spec.priority or None
    if spec.lora is not None and spec.lora_files is not None:
        values["lora"] = [
            {"path": path} | {name: value for name, value in each.items() if name != "sha256"}
            for path, each in zip(spec.lora_files, spec.lora, strict=True)
        ]
    return {name: value for name, value in values.items() if value is not None}


def due_at(spec: JobSpec, *, arrived_at: float) -> float | None:
    """Unix time of the deadline of a job that first arrived then."""
    due = spec.deadline_at
    if due is None:
        return None if spec.deadline_s is None else arrived_at + spec.deadline_s
    if spec.deadline_clock and SHORT_DAY_S < due - arrived_at < MAX_DURATION_S:
        clock = parse_moment(spec.deadline_clock, now=arrived_at)
        due = min(due, due if clock is None else clock.timestamp())
    return due


def passed_deadlines(
    specs: Iterable[JobSpec], *, now: float, arrived_at: Mapping[str, float] | None = None
) -> tuple[Problem, ...]:
    """A warning for each deadline that passes before its job can start; `now` is the run's start."""
    late = []
    for spec in specs:
        arrival = (arrived_at or {}).get(spec.id, now + spec.arrival_s)
        due = due_at(spec, arrived_at=arrival)
        if due is not None and due <= max(now, arrival):
            moment = datetime.fromtimestamp(due).astimezone().isoformat(sep=" ", timespec="seconds")
            what = "has passed" if due <= now else "is before the job arrives"
            late.append(
                Problem(spec.line, "deadline", moment, f"{what}; {spec.id} runs anyway and counts as late")
            )
    return tuple(late)


class _ListEnded(Exception):
    """No further line is read; the last problem says why."""


@dataclass(slots=True)
class _JobList:
    source: JobSource
    max_jobs: int = MAX_JOBS
    images: ImageReader = field(default_factory=lambda: ImageReader(Path()))
    folder: Path | None = None  # of lists of texts; None refuses these, for jobs of other machines
    defaults: Mapping[str, Any] = field(default_factory=dict)
    specs: list[JobSpec] | Packed[JobSpec] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    occurrences: Counter[str] = field(default_factory=Counter)
    num_varied: int = 0
    index: LineIndex | None = None  # lines that it knows are not decoded
    context: str = ""  # of keys, beside the line and its defaults
    keys: bytearray = field(default_factory=bytearray)
    num_done: int = 0
    place: int = 0  # of the last job in its file, faulty ones included
    id_takers: dict[str, int] = field(default_factory=dict)
    file_takers: dict[str, int] = field(default_factory=dict)

    def add_file(
        self, entries: Iterable[Entry], source: str, *, folder: Path, images: ImageReader | None = None
    ) -> None:
        self.images, self.folder = images or ImageReader(folder), folder if images is None else None
        self.defaults, self.place = {}, 0
        num_before = len(self.specs) + len(self.problems) + self.num_done
        try:
            for place, (line, entry) in enumerate(entries):
                self._add(line, entry, is_first=place == 0)
        except ReadingEnded as end:
            # A problem of the file, not of a line: sorting by lines puts it first, where everyone sees it.
            where = "" if end.line is None else f"{at(end.line)}: "
            self.problems.append(Problem(None, None, None, f"{where}{end.accepted}"))
            if len(self.problems) > MAX_PROBLEMS or len(self.specs) + self.num_done >= self.max_jobs:
                raise _ListEnded from None
        if len(self.specs) + len(self.problems) + self.num_done == num_before:
            accepted = f"no jobs in {source}; write one job per line, such as {EXAMPLE}"
            self.problems.append(Problem(None, None, None, accepted))

    def _add(self, line: int, entry: Mapping[str, object] | Problem | str, *, is_first: bool) -> None:
        if len(self.problems) >= MAX_PROBLEMS:
            raise ReadingEnded(
                line, f"this line and those below it were not read, after {len(self.problems):,} problems"
            )
        key = b""
        if isinstance(entry, str):
            if self.index is not None:
                text = f"{self.context}{self.defaults or ''}\n{entry}"
                key = hashlib.blake2b(text.encode(errors="replace"), digest_size=KEY_BYTES - 1).digest()
                if (done := self.index.done(key)) is not None and self._skip(line, done):
                    return
            entry = decoded_object(line, entry)
        if isinstance(entry, Problem):
            self.problems.append(entry)
            self.place += 1
        elif is_first and list(entry) == ["defaults"]:
            if problems := check_defaults(entry["defaults"]):
                self.problems += JobError(*problems).at_line(line)
            else:
                self.defaults = entry["defaults"]  # type: ignore[assignment]
        else:
            given = over(over(self.source.fallbacks, self.defaults), entry)
            matrix, overrides = entry.get("vary", self.defaults.get("vary")), self.source.overrides
            if isinstance(matrix, Mapping) and "vary" in overrides:
                overrides = {**overrides, "vary": matrix}  # --vary leaves a matrix as it is
            given, num_before = over(given, overrides), len(self.specs)
            self._add_line_of_jobs(line, given)
            if self.index is not None:
                num_new = len(self.specs) - num_before
                is_kept = key and num_new == 1 and self._is_plain(self.specs[-1], given)
                has_own_id = given.get("id") is not None
                self.keys += key + bytes([has_own_id]) if is_kept else bytes(KEY_BYTES * num_new)

    def _skip(self, line: int, job: DoneJob) -> bool:
        """Count a job that is done, with the names that it takes; False if the line may stand for another."""
        if not job.has_own_id and self.occurrences[job.id]:
            return False
        self.occurrences[job.id] += not job.has_own_id
        self.place += 1
        self.num_done += 1
        names = {"id": job.id, "output": job.output, "format": job.format}
        self.problems += JobError(*self._take_names(line, names)).at_line(line)
        return True

    def _is_plain(self, spec: JobSpec, given: Mapping[str, Any]) -> bool:
        """Whether its line means this job whatever other lines and files there are."""
        is_first = given.get("id") is not None or self.occurrences[spec.id] == 1
        own = (spec.image, spec.files, spec.lora, spec.args, spec.recipe, spec.place)
        is_drawn = spec.seed == RANDOM_SEED or "{" in (spec.output or "")
        return is_first and given.keys().isdisjoint(VARIATION_FIELDS) and not any(own) and not is_drawn

    def _add_line_of_jobs(self, line: int, mapping: Mapping[str, Any]) -> None:
        """Add all jobs of a line, or each distinct problem of its variations once."""
        specs: list[JobSpec] = []
        problems: dict[Problem, None] = {}
        try:
            for job in variations(mapping, fixed=self.source.overrides, folder=self.folder):
                if len(self.specs) + len(specs) + self.num_done >= self.max_jobs:
                    raise ReadingEnded(line, f"a file has at most {self.max_jobs:,} jobs; split it here")
                spec, found = self._parse(line, job)
                problems |= dict.fromkeys(found)
                if spec is not None:
                    specs.append(spec)
                if len(self.problems) + len(problems) >= MAX_PROBLEMS:
                    break
        except JobError as error:
            problems = dict.fromkeys(error.at_line(line))
        if problems:
            self.problems += problems
        else:
            self.specs.extend(specs)
            if isinstance(self.specs, list) and len(self.specs) >= FEW:
                self.specs = Packed(SPECS, self.specs)
            self.num_varied += len(specs) > 1

    def _parse(self, line: int, mapping: Mapping[str, object]) -> tuple[JobSpec | None, Sequence[Problem]]:
        if isinstance(name := mapping.get("recipe"), str) and name in self.source.own_recipes:
            mapping = {**mapping, "recipe": self.source.own_recipes[name]}
        if (loras := self.source.lora_folder) is not None:
            mapping = with_loras(mapping, loras, usual=self.source.fallbacks.get("lora"))
        values, problems = parse_fields(mapping, images=self.images)
        self.place += 1
        if "{index" in values.get("output", ""):
            values["place"] = self.place
        if not problems and "id" not in values:
            values["id"] = base = default_id(values)
            self.occurrences[base] += 1
            if (number := self.occurrences[base]) > 1:
                values["id"] = f"{base}-{number}"
        # Names of a faulty line count as used, so that this report shows its clashes, too.
        if "id" in values:
            with_own_name(values)
        problems += self._take_names(line, values)
        if problems:
            return None, JobError(*problems).at_line(line)
        return JobSpec(**values, line=line), ()

    def _take_names(self, line: int, values: Mapping[str, Any]) -> Iterator[Problem]:
        """Record the names that an entry's job uses; yields a problem for each that an earlier one uses."""
        job_id, output = values.get("id"), values.get("output")
        if job_id is not None:
            taken_by = self.id_takers.setdefault(name_key(job_id), line)
            if taken_by != line:
                accepted = f"{at(taken_by)} already uses it (case is ignored); each job needs its own"
                yield Problem(line, "id", shown(job_id), accepted)
                return
        if job_id is None and output is None:
            return
        if output is not None:
            output = filled(output, index=self.place)
            if (longest := max(len(part.encode()) for part in output.split("/"))) > MAX_OUTPUT_BYTES:
                accepted = f"with its placeholders filled in, at most {MAX_OUTPUT_BYTES} bytes, not {longest}"
                yield Problem(line, "output", shown(output), accepted)
        field_name, value = ("id", job_id) if output is None else ("output", output)
        names = file_names(job_id or "", output, values.get("format"))
        for name in numbered_names(names, values.get("args")):
            taken_by = self.file_takers.setdefault(name_key(name), line)
            if taken_by != line:
                accepted = f"{at(taken_by)} already writes {name}; rename one of them"
                yield Problem(line, field_name, shown(value), accepted)


MAX_IDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    files: tuple[str, ...] = ()  # job files; "-" is standard input
    prompts: tuple[str, ...] = ()
    given: tuple[object, ...] | None = None  # jobs of a program, prompts or mappings, in place of files
    overrides: Mapping[str, Any] = field(default_factory=dict)  # fields of all jobs, whatever the files say
    fallbacks: Mapping[str, Any] = field(default_factory=dict)  # where neither line nor defaults have a value
    columns: Mapping[str, str] = field(default_factory=dict)  # of Parquet, by field: the only ones read
    own_recipes: Recipes = field(default_factory=dict)  # those of a user, by name
    lora_folder: Path | None = None  # of the LoRAs that prompts name
    is_plain: bool = False  # whether lines of prompts are taken as they are
    only: tuple[str, ...] = ()  # patterns of ids; a job needs to match one
    tags: tuple[str, ...] = ()
    limit: int | None = None  # the most jobs, the first ones of those that match
    index: LineIndex | None = field(default=None, compare=False)
    context: str = ""  # what else decides what the lines of an index mean, as a text

    def __post_init__(self) -> None:
        if "" in self.files:
            raise InputError("JOBS is empty; name a job file, or - for standard input")
        if any(len(Path(file).name) > 255 and not is_url(file) for file in self.files):
            raise InputError("JOBS is too long for a file's name; give a prompt with -p")
        suffixes = [Path(_name_of(file)).suffix.lower() for file in self.files]
        if self.columns and PARQUET_SUFFIX not in suffixes:
            kind = f"job files whose name ends in {PARQUET_SUFFIX}"
            raise InputError(f"--column goes with {kind}; there is none")
        files = [file if file == "-" or is_url(file) else os.path.realpath(file) for file in self.files]
        twice = next((x for x, file in zip(self.files, files, strict=True) if files.count(file) > 1), None)
        if twice is not None:
            raise InputError(f"JOBS names {_name_of(twice)} twice; name each job file once")

    @property
    def name(self) -> str:
        if self.given is not None:
            return PROGRAM_NAME
        return f"{len(self.files)} job files" if self.files[1:] else _name_of((*self.files, PROMPTS_NAME)[0])

    @property
    def paths(self) -> Sequence[Path]:
        """Of the job files on this machine."""
        return [Path(file) for file in self.files if file != "-" and not is_url(file)]

    def read(self, *, has_bar: bool = False) -> ParsedJobs:
        """The selected jobs, and the problems of all. Raises: InputError for no file or no job."""
        parsed = self._read_all(has_bar=has_bar)
        if not (self.only or self.tags or self.limit):
            return parsed
        specs = [spec for spec in parsed.specs if self._has(spec)]
        if not specs and not parsed.problems:
            raise InputError(f"{parsed.source}: {self._mismatch(parsed.specs)}")
        return replace(parsed, specs=tuple(specs[: self.limit]))

    def _read_all(self, *, has_bar: bool) -> ParsedJobs:
        files = [file if file == "-" or is_url(file) else str(Path(file)) for file in self.files]
        syntax = {**self.fallbacks, **self.overrides}.get("prompt_syntax") or AUTO
        jobs = _JobList(self)
        if not (self.only or self.tags or self.limit):
            jobs.index, jobs.context = self.index, f"{self.context}{self.overrides}{self.fallbacks}"
        kinds: list[tuple[str, str]] = []
        defaults: list[tuple[str, Mapping[str, Any]]] = []
        are_several = len(files) + bool(self.prompts) > 1
        with contextlib.suppress(_ListEnded):
            if self.given is not None:
                jobs.add_file(array_entries(self.given), PROGRAM_NAME, folder=Path())
            for file_idx, file in enumerate(files):
                with _opened(file) as stream:
                    name, is_local = _name_of(file), not (file == "-" or is_url(file))
                    suffix, folder = Path(name).suffix, Path(file).parent if is_local else Path()
                    lines = PromptLines(self.is_plain, syntax)
                    if suffix.lower() == PARQUET_SUFFIX:
                        kind, entries = PARQUET, rows_of(stream, self.columns)
                    else:
                        kind, entries = entries_of(stream, suffix=suffix, prompts=lines)
                    entries = _of_file(entries, name, file_idx) if are_several else entries
                    entries = with_bar(entries, "reading", is_shown=has_bar, unit=" lines")
                    try:
                        jobs.add_file(entries, name, folder=folder)
                    finally:
                        kinds += [] if kind == JSON_LINES else [(name, lines.told(kind))]
                    defaults += [(name, jobs.defaults)] if jobs.defaults else []
            if self.prompts:
                prompts = ((number, {"prompt": text}) for number, text in enumerate(self.prompts, start=1))
                entries = _of_file(prompts, PROMPTS_NAME, len(files)) if are_several else prompts
                jobs.add_file(entries, PROMPTS_NAME, folder=Path())
        own = (jobs.specs, tuple(jobs.problems), tuple(kinds), tuple(defaults), jobs.num_varied)
        return ParsedJobs(self.name, *own, num_done=jobs.num_done, keys=jobs.keys)

    def _has(self, spec: JobSpec) -> bool:
        has_id = not self.only or any(fnmatchcase(spec.id, pattern) for pattern in self.only)
        return has_id and (not self.tags or spec.tag in self.tags)

    def _mismatch(self, specs: Sequence[JobSpec]) -> str:
        asked = [f"--only {pattern}" for pattern in self.only] + [f"--tag {tag}" for tag in self.tags]
        more = f" and {len(specs) - MAX_IDS:,} more" if len(specs) > MAX_IDS else ""
        ids = ", ".join(spec.id for spec in specs[:MAX_IDS]) + more
        tags = ", ".join(sorted({spec.tag for spec in specs if spec.tag}))
        return f"no job matches {' '.join(asked)}; ids are {ids}; tags are {tags or 'not given'}"
