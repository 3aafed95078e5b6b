"""The job file: JSON Lines to `JobSpec`, with every problem reported at once.

    bytes -> raw lines -> objects -> fields (fields.py) -> ids and file names (spec.py)

Line length, file size, jobs and problems are bounded: an endless file, or one that is not a job
file, gives a report and does not fill memory.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, TypeVar

from gfgen.errors import InputError, JobError, Problem
from gfgen.job.fields import FIELDS, RepeatedKeys, parse_fields, printable, shown
from gfgen.job.images import ImageReader
from gfgen.job.shared import MAX_JOBS, check_defaults, is_defaults, over
from gfgen.job.spec import JobSpec, default_id, file_names, name_key
from gfgen.job.variations import variations

MAX_LINE_BYTES = 2**20
MAX_FILE_BYTES = 2**30
MAX_PROBLEMS = 1_000
BAR_FROM = 10_000
"""Lines that are read, or jobs that are admitted, without a progress bar."""
MAX_INT_DIGITS = 1_000
"""Python does not read integers of more than 4,300 digits; no field needs that many."""

BYTE_ORDER_MARK = "\ufeff"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
NOTHING: Mapping[str, Any] = MappingProxyType({})
T = TypeVar("T")
EXAMPLE = '{"prompt": "a red circle falls"}'


@dataclass(frozen=True, slots=True)
class ParsedJobs:
    """The valid jobs of a job file, and all problems.

    `specs` has no job of a line with a problem. `source` is the name of the file in messages.
    """

    source: str
    specs: tuple[JobSpec, ...]
    problems: tuple[Problem, ...]


def read_jobs(
    source: Path | Literal["-"], *, overrides: Mapping[str, Any] = NOTHING, has_bar: bool = False
) -> ParsedJobs:
    """Every job and every problem of a job file, or of standard input for "-".

    `overrides` has fields that replace those of each line (shared.py).

    With `has_bar`, a bar on the terminal counts the lines of a long file.

    Raises: InputError when the file cannot be read at all.
    """
    if source == "-":
        return _read(
            sys.stdin.buffer, "standard input", _JobList(ImageReader(Path()), overrides, Path()), has_bar
        )
    path = Path(source)
    try:
        with path.open("rb") as stream:
            return _read(
                stream, str(path), _JobList(ImageReader(path.parent), overrides, path.parent), has_bar
            )
    except FileNotFoundError:
        raise InputError(
            f"job file {path}: no such file; name a file of JSON lines, or - for standard input"
        ) from None
    except IsADirectoryError:
        raise InputError(f"job file {path}: this is a folder; name a file of JSON lines in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"job file {str(path)!r}: cannot be read ({reason})") from None


def read_job_stream(
    stream: BinaryIO, *, source: str, folder: Path, images: ImageReader | None = None
) -> ParsedJobs:
    """As `read_jobs`, from an open binary stream; relative image paths start at `folder`.

    `images` checks the images; by default an `ImageReader` does. With it, lines cannot vary.
    """
    jobs = _JobList(images or ImageReader(folder), NOTHING, folder if images is None else None)
    return _read(stream, source, jobs, False)


def _read(stream: BinaryIO, source: str, jobs: _JobList, has_bar: bool) -> ParsedJobs:
    lines = with_bar(_raw_lines(stream), "reading", is_shown=has_bar, unit=" lines")
    try:
        for number, content in lines:
            jobs.add_line(number, content)
    except _ReadingEnded as end:
        jobs.problems.append(end.problem)
    if not jobs.specs and not jobs.problems:
        jobs.problems.append(
            Problem(None, None, None, f"no jobs in {source}; write one job per line, such as {EXAMPLE}")
        )
    return ParsedJobs(source, tuple(jobs.specs), tuple(jobs.problems))


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
    return JobSpec(**values, line=line), ()


def to_mapping(spec: JobSpec) -> dict[str, Any]:
    """The job as an object of a job file, without default values; `parse_job` is the inverse."""
    deadline: float | str | None = spec.deadline_s
    if spec.deadline_at is not None:
        deadline = datetime.fromtimestamp(spec.deadline_at, UTC).isoformat()
    times = {"deadline": deadline, "arrival": spec.arrival_s or None, "timeout": spec.timeout_s}
    values = {name: times[name] if name in times else getattr(spec, name, None) for name in FIELDS}
    values["priority"] = spec.priority or None
    return {name: value for name, value in values.items() if value is not None}


def due_at(spec: JobSpec, *, arrived_at: float) -> float | None:
    """Unix time of the deadline of a job that arrived at a Unix time; None without one."""
    if spec.deadline_at is not None:
        return spec.deadline_at
    return None if spec.deadline_s is None else arrived_at + spec.deadline_s


def passed_deadlines(
    specs: Iterable[JobSpec], *, now: float, arrived_at: Mapping[str, float] | None = None
) -> tuple[Problem, ...]:
    """A warning for each job whose deadline has passed before it can start.

    `now` is the Unix time at which the run starts. `arrived_at` has arrivals from the journal of an
    earlier run, by job id; the other jobs arrive `arrival_s` from now.
    """
    journaled = arrived_at or {}
    late = []
    for spec in specs:
        arrival = journaled.get(spec.id, now + spec.arrival_s)
        due = due_at(spec, arrived_at=arrival)
        if due is not None and due <= max(now, arrival):
            moment = datetime.fromtimestamp(due).astimezone().isoformat(sep=" ", timespec="seconds")
            what = "has passed" if due <= now else "is before the job arrives"
            late.append(
                Problem(spec.line, "deadline", moment, f"{what}; {spec.id} runs anyway and counts as late")
            )
    return tuple(late)


@dataclass(slots=True)
class _JobList:
    """Collects jobs line by line, and records which line uses which id and file name."""

    images: ImageReader
    overrides: Mapping[str, Any]
    folder: Path | None
    """Of lists of texts; None for jobs that come from other machines, whose lines cannot vary."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_first: bool = True
    specs: list[JobSpec] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    occurrences: Counter[str] = field(default_factory=Counter)
    id_lines: dict[str, int] = field(default_factory=dict)
    file_lines: dict[str, int] = field(default_factory=dict)

    def add_line(self, line: int, content: bytes) -> None:
        """Add one line of the file, valid or not."""
        if len(self.problems) >= MAX_PROBLEMS:
            raise _ReadingEnded(
                line, f"this line and those below it were not read, after {len(self.problems):,} problems"
            )
        decoded = _decode_line(line, content)
        if isinstance(decoded, Problem):
            self.problems.append(decoded)
        elif decoded is not None and self.is_first and is_defaults(decoded):
            self._take_defaults(line, decoded["defaults"])
        elif decoded is not None:
            self._add_line_of_jobs(line, over(over(self.defaults, decoded), self._overrides_of(decoded)))
        self.is_first = self.is_first and decoded is None

    def _take_defaults(self, line: int, defaults: Any) -> None:
        if problems := check_defaults(defaults):
            self.problems += JobError(*problems).at_line(line)
        else:
            self.defaults = defaults

    def _overrides_of(self, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
        """The overrides; --vary leaves a matrix as it is."""
        matrix = mapping.get("vary", self.defaults.get("vary"))
        if isinstance(matrix, Mapping) and "vary" in self.overrides:
            return {**self.overrides, "vary": matrix}
        return self.overrides

    def _add_line_of_jobs(self, line: int, mapping: Mapping[str, Any]) -> None:
        """Add all jobs of a line, or each distinct problem of its variations once."""
        specs: list[JobSpec] = []
        problems: dict[Problem, None] = {}
        try:
            for job in variations(mapping, fixed=self.overrides, folder=self.folder):
                if len(self.specs) + len(specs) >= MAX_JOBS:
                    raise _ReadingEnded(line, f"a file has at most {MAX_JOBS:,} jobs; split it here")
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
            self.specs += specs

    def _parse(self, line: int, mapping: Mapping[str, object]) -> tuple[JobSpec | None, Sequence[Problem]]:
        values, problems = parse_fields(mapping, images=self.images)
        if not problems and "id" not in values:
            values["id"] = self._next_id(values)
        # Names of a faulty line count as used, so that this report shows its clashes, too.
        problems += self._take_names(line, values.get("id"), values.get("output"))
        if problems:
            return None, JobError(*problems).at_line(line)
        return JobSpec(**values, line=line), ()

    def _next_id(self, values: Mapping[str, Any]) -> str:
        """A default id, which counts equal jobs."""
        base = default_id(values)
        self.occurrences[base] += 1
        number = self.occurrences[base]
        return base if number == 1 else f"{base}-{number}"

    def _take_names(self, line: int, job_id: str | None, output: str | None) -> Iterator[Problem]:
        """Record the names that a line's job uses; yields a problem for each that an earlier line uses."""
        if job_id is not None:
            taken_by = self.id_lines.setdefault(name_key(job_id), line)
            if taken_by != line:
                yield Problem(
                    line,
                    "id",
                    shown(job_id),
                    f"line {taken_by} already uses it (case is ignored); each job needs its own",
                )
                return
        if job_id is None and output is None:
            return
        field_name, value = ("id", job_id) if output is None else ("output", output)
        for name in file_names(job_id or "", output):
            taken_by = self.file_lines.setdefault(name_key(name), line)
            if taken_by != line:
                yield Problem(
                    line,
                    field_name,
                    shown(value),
                    f"line {taken_by} already writes {name}; rename one of them",
                )


class _ReadingEnded(Exception):
    """The rest of the file is not read; the problem says why."""

    def __init__(self, line: int, accepted: str) -> None:
        # A problem of the file, not of a line: sorting by lines puts it first, where everyone sees it.
        self.problem = Problem(None, None, None, f"line {line}: {accepted}")
        super().__init__(accepted)


def _raw_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; if a line is too long, its first MAX_LINE_BYTES + 1 bytes.

    Holds at most two pieces of that size, and stops after MAX_FILE_BYTES.
    """
    num_read = 0
    for number in itertools.count(1):
        content = piece = stream.readline(MAX_LINE_BYTES + 1)
        if not content:
            return
        num_read += len(content)
        while (
            len(content) > MAX_LINE_BYTES
            and piece
            and not piece.endswith(b"\n")
            and num_read <= MAX_FILE_BYTES
        ):
            piece = stream.readline(MAX_LINE_BYTES)
            num_read += len(piece)
        yield number, content
        if num_read > MAX_FILE_BYTES:
            raise _ReadingEnded(
                number, f"the file has more than {MAX_FILE_BYTES:,} bytes; lines below this one were not read"
            )


def _decode_line(line: int, content: bytes) -> Mapping[str, object] | Problem | None:
    """The object on the line, or its problem, or None for a blank line or a comment."""
    if line == 1 and content.startswith(UTF16_MARKS):
        raise _ReadingEnded(line, "the file is UTF-16; save it as UTF-8")
    if len(content) > MAX_LINE_BYTES:
        return Problem(
            line,
            None,
            None,
            f"the line has more than {MAX_LINE_BYTES:,} bytes; write each job on one shorter line",
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} of the line (0x{content[error.start]:02x})"
        return Problem(line, None, None, f"{place} is not UTF-8; save the file as UTF-8")
    text = (text.removeprefix(BYTE_ORDER_MARK) if line == 1 else text).strip()
    return None if not text or text.startswith("#") else _decode_object(line, text)


def _decode_object(line: int, text: str) -> Mapping[str, object] | Problem:
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        reason = f"not JSON ({error.msg} at column {error.colno})"
        return Problem(
            line,
            None,
            printable(text),
            f"{reason}; write each job as one object on one line, such as {EXAMPLE}",
        )
    except RecursionError:
        return Problem(
            line, None, shown(text), "nested too deeply; the fields of a job are strings and numbers"
        )
    if not isinstance(value, dict):
        return Problem(
            line, None, shown(value), f"not an object; write each job as one object, such as {EXAMPLE}"
        )
    return value


def _parse_int(digits: str) -> int | float:
    """The number; one with too many digits becomes infinity, which no field accepts."""
    return int(digits) if len(digits) <= MAX_INT_DIGITS else float(digits)


def _parse_object(pairs: list[tuple[str, Any]]) -> RepeatedKeys:
    decoded = RepeatedKeys(pairs)
    if len(decoded) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        decoded.repeated = tuple(name for name, count in counts.items() if count > 1)
    return decoded


_DECODER = json.JSONDecoder(parse_int=_parse_int, object_pairs_hook=_parse_object)
