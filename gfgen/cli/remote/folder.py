"""A run by its output folder, or by the folder that it watches, and what it tells (`RunStatus`)."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gfgen.errors import InputError, JobFileError, RunError
from gfgen.job.reader import JobSource, ParsedJobs, to_mapping
from gfgen.runtime.core.admission import tell_of_warnings, warnings_of_texts
from gfgen.runtime.files.inbox import REPORT_SUFFIX, SETTLED_S, read_taken
from gfgen.runtime.files.index import ManifestIndex
from gfgen.runtime.files.journal import JOURNAL_NAME, left_ids, to_make_again
from gfgen.runtime.files.lock import holder_of
from gfgen.runtime.files.manifest import SIMULATED, WATCHED_NAME
from gfgen.session.live import read_live, send_request
from gfgen.system.wording import counted, in_words, on_clock

ENDED = ("ended", "stopped", "killed")
"""States of a run that does not live any more."""
COUNTS = ("jobs", "done", "dropped", "skipped", "failed", "cancelled", "running", "waiting")
MIN_ID, MAX_ID, COLUMNS_BEHIND = 12, 40, 56
"""Columns of a job's id, and of what stands behind it."""
MAX_RECENT = 5
BAR = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    target: str
    kind: str
    """run or server"""
    state: str
    """Of a run: loading, running, stopping, or one of ENDED. Of a server: loading, ready or draining."""
    pid: int | None = None
    started_at: float | None = None
    written_at: float | None = None
    policy: str | None = None
    watched: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Some of COUNTS. Those of a run that has ended are of all runs in its folder."""
    ends_at: float | None = None
    ranks: Sequence[Mapping[str, Any]] = ()
    jobs: Sequence[Mapping[str, Any]] = ()
    """Open jobs, running ones first; not all of many."""
    recent: Sequence[Mapping[str, Any]] = ()
    """The last jobs that ended, oldest first."""

    @property
    def is_live(self) -> bool:
        return self.state not in ENDED

    def lines(self, *, now: float, columns: int = 80, rows: int | None = None) -> list[str]:
        """The text, on at most `rows` lines: the ranks, then as many jobs as there is room for."""
        room = 10**6 if rows is None else rows
        lines = [self._headline(now), *self._counts(now)]
        lines += [f"takes job files from {self.watched}"] if self.watched and self.is_live else []
        ranks = list(_rank_lines(self.ranks))
        lines += _cut(ranks, room - len(lines) - 6, "rank")
        recent = [_recent_line(row, now) for row in self.recent[-MAX_RECENT:]]
        num_jobs = room - len(lines) - len(recent) - 3
        if self.jobs and num_jobs > 0:
            lines += ["", *self._job_lines(now, num_jobs, columns)]
        if recent and len(lines) + 2 < room:
            lines += ["", *recent[-max(1, room - len(lines) - 1) :]]
        return [line if len(line) <= columns else f"{line[: columns - 1]}~" for line in lines[:room]]

    def _headline(self, now: float) -> str:
        parts = [f"{self.target}: {self.state}"]
        if not self.is_live:
            when = "" if self.written_at is None else f" at {_clock(self.written_at, now)}"
            how = {"ended": "its last run ended", "stopped": "its last run was stopped"}
            parts = [f"{self.target}: nothing runs; {how.get(self.state, 'its last run was killed')}{when}"]
        elif self.started_at is not None:
            parts = [f"{parts[0]} for {in_words(max(0.0, now - self.started_at))}"]
        parts += [f"process {self.pid}"] if self.pid is not None and self.is_live else []
        parts += [f"policy {self.policy}"] if self.policy and self.is_live else []
        return ", ".join(parts)

    def _counts(self, now: float) -> Iterator[str]:
        counts = self.counts
        if not counts:
            return
        named = [f"{counts[name]:,} {name}" for name in COUNTS[1:] if counts.get(name)]
        num_ended = sum(counts.get(name, 0) for name in ("done", "dropped", "failed", "cancelled"))
        num_jobs = counts.get("jobs")
        texts = [", ".join(named) or "no jobs"]
        if self.ends_at is not None and self.is_live and self.ends_at > now:
            texts.append(f"{on_clock(self.ends_at - now)} left, until {_clock(self.ends_at, now)}")
        if num_jobs:
            filled = round(BAR * num_ended / num_jobs)
            yield f"[{'#' * filled}{'.' * (BAR - filled)}] {num_ended:,}/{num_jobs:,}  {'; '.join(texts)}"
        else:
            yield "; ".join(texts)
        num_left = counts.get("running", 0) + counts.get("waiting", 0)
        if not self.is_live and num_left:
            yield f"{counted(num_left, 'job')} left: run the same command again to go on"

    def _job_lines(self, now: float, most: int, columns: int) -> Iterator[str]:
        room = min(MAX_ID, max(MIN_ID, columns - COLUMNS_BEHIND))
        width = min(room, max(len("job"), *(len(_name(row)) for row in self.jobs)))
        yield f"{'job':<{width}} {'state':<7} {'stage':<7} {'step':>7} {'ranks':<7} {'left':>7}  deadline"
        num_open = self.counts.get("running", 0) + self.counts.get("waiting", 0)
        shown = self.jobs[: most - 1] if most <= len(self.jobs) or num_open > len(self.jobs) else self.jobs
        for row in shown:
            yield _job_line(row, width, now)
        if num_open > len(shown):
            yield f"and {num_open - len(shown):,} more"


def _name(row: Mapping[str, Any]) -> str:
    """The id in the job file, by which people know the job of a batch; otherwise its own."""
    return str(row.get("name") or row["id"])


def _job_line(row: Mapping[str, Any], width: int, now: float) -> str:
    name, ranks = _name(row), ",".join(map(str, row["ranks"]))
    name = name if len(name) <= width else f"{name[: width - 1]}~"
    step = f"{row['step']}/{row['steps']}" if row["step"] or row["state"] == "running" else ""
    left = "" if row["ends_at"] is None else on_clock(row["ends_at"] - now)
    due = "" if row["deadline_at"] is None else on_clock(row["deadline_at"] - now)
    if row["deadline_at"] is not None and row["deadline_at"] < now:
        due = "passed"
    elif row["is_late"]:
        due += " late"
    stage = row["stage"] or ""
    return f"{name:<{width}} {row['state']:<7} {stage:<7} {step:>7} {ranks:<7} {left:>7}  {due}".rstrip()


def _rank_lines(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for node, its_ranks in itertools.groupby(ranks, lambda rank: rank.get("node")):
        if node is not None:
            yield f"node {node}"
        for rank in its_ranks:
            what = f" {rank['stage']} of {rank.get('name') or rank['job']}" if rank["job"] else ""
            yield f"rank {rank['rank']:<3} {rank['state']}{what}"


def _recent_line(row: Mapping[str, Any], now: float) -> str:
    reason = f": {row['error']}" if row["error"] and row["status"] == "failed" else ""
    latency = "" if row["latency_s"] is None else f" after {in_words(row['latency_s'])}"
    return f"{_clock(row['ended_at'], now)} {row['status']} {_name(row)}{latency}{reason}"


def _cut(lines: list[str], most: int, noun: str) -> list[str]:
    if len(lines) <= max(1, most):
        return lines
    kept = lines[: max(0, most - 1)]
    return [*kept, f"and {counted(len(lines) - len(kept), f'more {noun}')}"]


def _clock(moment: float, now: float) -> str:
    """The time of day, with the date if that is another one."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)


@dataclass(frozen=True, slots=True)
class Cancelled:
    ids: Sequence[str]
    num_cancelled: int
    unmatched: Sequence[str]


@dataclass(frozen=True, slots=True)
class Submitted:
    num_jobs: int
    text: str
    problems: Sequence[str] = ()
    answer: Any = None


class Target(Protocol):
    def status(self) -> RunStatus:
        """Raises: InputError if there is no run or server."""

    def cancel(self, patterns: Sequence[str]) -> Cancelled:
        """Cancel the open jobs whose id is one of these, or matches a pattern."""

    def submit(self, source: JobSource) -> Submitted: ...


ANSWER_S = 10.0
"""How long a run may take to answer; its loop turns several times a second."""
LOOK_S = 0.1
MAX_REQUEST_BYTES = 3_500
"""Of the patterns of one request, which is one write to a pipe."""


class RunFolder:
    def __init__(self, folder: Path, *, name: str) -> None:
        self._folder, self._name = folder, name

    def status(self) -> RunStatus:
        holder, record = holder_of(self._folder), read_live(self._folder)
        if holder is None:
            with closing(ManifestIndex(self._folder)) as lines:
                return self._past(record, lines)
        is_its_own = record is not None and record.get("pid") == holder.pid
        if record is None or not is_its_own or record.get("state") not in ("running", "stopping"):
            return RunStatus(target=self._name, kind="run", state="loading", pid=holder.pid)
        deciding = record["deciding"]
        policy = record["policy"] if deciding == record["policy"] else f"{record['policy']} ({deciding})"
        names = ("state", "pid", "started_at", "written_at", "watched", "counts", "ends_at")
        kept = {name: record[name] for name in (*names, "ranks", "jobs", "recent")}
        return RunStatus(target=self._name, kind="run", policy=policy, **kept)

    def _past(self, record: Mapping[str, Any] | None, lines: ManifestIndex) -> RunStatus:
        last: Mapping[str, Any] = record or {"state": "ended"}
        of_run, begun_at = last.get("counts", {}), float(last.get("started_at", math.inf))
        journal = self._folder / JOURNAL_NAME
        ended, counts = lines.counts(since=begun_at - 1), lines.counts()
        is_open = record is not None and last["state"] != "ended"
        num_later = lines.counts(since=begun_at).total()  # certainly in this run
        may_differ = counts.total() > num_later or last.get("watched") is not None
        left_here = (
            left_ids(journal, lines, is_last=True) if is_open and may_differ else lines.ids_with("again")
        )
        left = max(len(left_here), of_run.get("jobs", 0) - ended.total() + ended["again"])
        left_here.update(to_make_again(self._folder))
        counts -= Counter(line["status"] for job_id in left_here if (line := lines.get(job_id)) is not None)
        counts.pop(SIMULATED, None)
        if record is None and not counts:
            if journal.exists():
                return RunStatus(target=self._name, kind="run", state="ended", counts={"jobs": 0})
            raise InputError(f"{self._name}: gfgen never ran there; name the output folder of a run")
        state = last["state"] if last["state"] in ("ended", "stopped") else "killed"
        known = {name: counts[name] for name in ("done", "dropped", "failed", "cancelled")}
        return RunStatus(
            target=self._name,
            kind="run",
            state=state,
            counts={"jobs": sum(known.values()) + left, **known, "waiting": left},
            started_at=last.get("started_at"),
            written_at=last.get("written_at"),
            watched=last.get("watched"),
            recent=last.get("recent", ()),
        )

    def cancel(self, patterns: Sequence[str]) -> Cancelled:
        self._check_lives()
        if len(json.dumps(list(patterns))) > MAX_REQUEST_BYTES:
            raise InputError(f"{len(patterns)} ids are too long for one request; give a pattern, or fewer")
        answer = self._ask(patterns)
        return Cancelled(answer["cancelled"], answer["num_cancelled"], answer["unmatched"])

    def _check_lives(self) -> None:
        if holder_of(self._folder) is None:
            raise InputError(
                f"{self._name}: nothing runs there; 'gfgen status {self._name}' shows the last run"
            )

    def _ask(self, patterns: Sequence[str]) -> Mapping[str, Any]:
        key, deadline_s = secrets.token_hex(8), time.monotonic() + ANSWER_S
        send_request(self._folder, {"cancel": list(patterns), "request": key})
        while time.monotonic() < deadline_s:
            for answer in (read_live(self._folder) or {}).get("answers", ()):
                if answer["request"] == key:
                    found: Mapping[str, Any] = answer
                    return found
            self._check_lives()
            time.sleep(LOOK_S)
        raise RunError(f"{self._name}: its run took the request and did not answer within {ANSWER_S:g} s")

    def submit(self, source: JobSource) -> Submitted:
        self._check_lives()
        record = read_live(self._folder) or {}
        inbox = record.get("watched")
        if inbox is None and record.get("state") in ("running", "stopping"):
            raise InputError(
                f"{self._name}: its run does not watch a folder, so it takes no more jobs; start "
                "'gfgen run --watch DIR', or run the job file on its own"
            )
        if inbox is None:
            raise RunError(
                f"{self._name}: its run is loading models; submit when 'gfgen status' says running"
            )
        jobs = selected_jobs(source)
        content = "".join(
            json.dumps(to_mapping(spec), ensure_ascii=False) + "\n" for spec in jobs.specs
        ).encode()
        path = _placed(Path(inbox), _file_name(source), content)
        return self._taken(path, content, num_jobs=len(jobs.specs))

    def _taken(self, path: Path, content: bytes, *, num_jobs: int) -> Submitted:
        report = path.with_name(path.name + REPORT_SUFFIX)
        key, deadline_s = hashlib.sha256(content).hexdigest(), time.monotonic() + ANSWER_S
        while time.monotonic() < deadline_s:
            if (path.name, key) in read_taken(self._folder / WATCHED_NAME):
                text = f"{self._name} took {counted(num_jobs, 'job')} as {path}"
                return Submitted(num_jobs, text, _report_of(report)[1:])
            if "no job was started" in "".join(_report_of(report)[:1]):
                time.sleep(LOOK_S)  # until it is complete
                problems = _report_of(report)
                for each in (path, report):
                    each.unlink(missing_ok=True)
                raise InputError("\n  ".join([f"{self._name}: {problems[0]}", *problems[1:]]))
            self._check_lives()
            time.sleep(LOOK_S)
        return Submitted(num_jobs, f"{counted(num_jobs, 'job')} are in {path}; the run has not taken it yet")


def selected_jobs(source: JobSource) -> ParsedJobs:
    parsed = source.read()
    if parsed.problems:
        raise JobFileError(parsed.source, parsed.problems)
    tell_of_warnings((spec, warnings_of_texts(spec)) for spec in parsed.specs)
    return parsed


def _file_name(source: JobSource) -> str:
    first = next((Path(file).stem for file in source.files if file != "-"), "submitted")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", first).strip(".-") or "submitted"


def _placed(inbox: Path, stem: str, content: bytes) -> Path:
    for number in itertools.count(1):
        path = inbox / (f"{stem}.jsonl" if number == 1 else f"{stem}-{number}.jsonl")
        if path.with_name(path.name + REPORT_SUFFIX).exists():
            continue
        try:
            with path.open("xb") as file:
                file.write(content)
            complete_at = time.time() - SETTLED_S - 1  # the run does not wait whether it grows
            os.utime(path, (complete_at, complete_at))
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{inbox}: cannot write there ({error.strerror})") from None
        return path
    raise AssertionError


def _report_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
