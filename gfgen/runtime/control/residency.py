"""Which models are resident where not all of them fit, and when others' turn comes.

Jobs of models that are not resident are out of the policies' sight (state.py). The resident ones are changed,
on all ranks, each after its present task, when nothing of them can run any more and jobs of others wait, or
when the last change was so long ago that changes take a hundredth of the time at most; a tenth for a job
whose deadline or priority comes before those of all jobs that can run. First comes the model of the most
urgent job, or of one that has waited for a hundred times what a change takes.

A change is an event in the journal, so that a replay needs none of this. A model that no rank can load
(`LoadFailed`) is resident no more; its jobs fail.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.events import Clock, Event, LoadFailed, ModelsChanged, RankLoaded, RankReady
from gfgen.runtime.core.observer import Observer

SHARE, URGENT_SHARE = 0.01, 0.1  # of the time: for changes for the sake of jobs that wait
LOAD_BYTES_PER_S = 1e9  # until ranks have loaded something: a disk that is neither slow nor fast
COPY_BYTES_PER_S = 50e9  # the same for models that come back from main memory

_CROWDED = "they do not fit together beside the jobs that have come"
RETRY_LOAD_S = 600.0  # a model that no rank could load is tried again for jobs that arrive this much later

Urgency = tuple[float, float]  # minus the priority, and the deadline


class _Parked(NamedTuple):
    urgency: Urgency
    model: str
    since_s: float


class ModelTurns:
    """The resident models, and the parked jobs of others, which policies do not see; `is_limited`: any."""

    def __init__(self, resident: Collection[str], *, is_limited: bool, clock: Clock) -> None:
        self._clock = clock
        self.resident = frozenset(resident)
        self.is_limited = is_limited
        self.parked: dict[str, _Parked] = {}  # by job, the longest first
        self.urgent: set[str] = set()
        self._unloadable: dict[str, tuple[float, str]] = {}  # by model: until when its jobs fail, and why

    def wanted(self) -> list[str]:
        """Models that jobs wait for, the most urgent first."""
        by_urgency = sorted(self.parked.values(), key=lambda job: job.urgency)
        return list(dict.fromkeys([job.model for job in by_urgency]))

    def admit(self, job_id: str, model: str, urgency: Urgency, *, can_run: bool) -> bool:
        """Whether a job can run and its model is resident; if only that is missing, the job is parked."""
        if not can_run or model in self.resident:
            self.unpark(job_id)
            return can_run
        if job_id not in self.parked:
            self.parked[job_id] = _Parked(urgency, model, self._clock.turn_s)
            if urgency[0] < 0 or urgency[1] < math.inf:
                self.urgent.add(job_id)
        return False

    def unpark(self, job_id: str) -> None:
        """The job does not wait for its model, or has ended."""
        self.parked.pop(job_id, None)
        self.urgent.discard(job_id)

    def change(self, models: Collection[str]) -> None:
        """Ranks hold these models from now on, each once it has loaded them."""
        self.resident = frozenset(models)

    def give_up(self, models: Collection[str], reason: str, *, now_s: float) -> str:
        """No rank can load these models, which are one; the reason for which their jobs fail."""
        self.resident -= set(models)
        doom = f"model {' and '.join(models)} cannot be loaded: {reason}"
        # Where all models fit, ranks load only at the start.
        until_s = now_s + RETRY_LOAD_S if self.is_limited else math.inf
        self._unloadable |= dict.fromkeys(models, (until_s, doom))
        return doom

    def failure_of(self, model: str, *, now_s: float) -> str | None:
        """Why a job of this model that arrives now fails; None if its model can be loaded, or tried again."""
        until_s, doom = self._unloadable.get(model, (-math.inf, None))
        return doom if now_s < until_s else None

    def check(self) -> None:
        assert self.is_limited or not self.parked, "jobs are parked although all models fit"
        assert self.urgent <= self.parked.keys(), "an urgent job waits that is not parked"
        waiting = {job.model for job in self.parked.values()}
        assert not waiting & self.resident, f"jobs wait for models that are resident: {waiting}"


@dataclass(slots=True)
class _Need:
    checkpoint: Path
    work_bytes: list[int] = field(default_factory=list)  # of its largest jobs that may run at once, each


class Residency(Observer):
    """Watches a run whose models do not fit together, and says when to change the resident ones.

    `weights` are bytes by checkpoint, `work_bytes` is what a job takes beside them, `room_bytes` what
    there is for both: of each rank, or of all ranks together, which then run `jobs_at_once`. `names` has the
    checkpoints of models that may have no jobs yet, and `streamed` bytes that are loaded besides weights. The
    models of the most urgent jobs come first.
    """

    def __init__(
        self,
        jobs: Sequence[AdmittedJob],
        *,
        weights: Mapping[Path, int],
        work_bytes: Callable[[AdmittedJob], int],
        room_bytes: int,
        jobs_at_once: int = 1,
        names: Mapping[str, Path] | None = None,
        streamed: Mapping[Path, int] | None = None,
    ) -> None:
        self._weights = weights
        self._loaded = {path: size + (streamed or {}).get(path, 0) for path, size in weights.items()}
        self._work_bytes = work_bytes
        self._room_bytes = room_bytes
        self._jobs_at_once = jobs_at_once
        self._needs = {model: _Need(checkpoint) for model, checkpoint in (names or {}).items()}
        self.note(jobs)
        self.kept: Mapping[Path, int] = {}  # bytes of models that come back from main memory, once held
        self._copied: set[Path] = set()  # those of them that ranks have held
        self._bytes_per_s = {False: LOAD_BYTES_PER_S, True: COPY_BYTES_PER_S}  # from files, and main memory
        self._changed_s = 0.0  # when the last change was over
        by_urgency = sorted(jobs, key=lambda job: (job.spec.arrival_s, -job.spec.priority))
        self.resident = self.choose([*(job.spec.model or "" for job in by_urgency), *self._needs])
        self._lacked: set[Path] = set()
        self._returning: set[Path] = set()  # of which ranks should have a copy

    @property
    def is_needed(self) -> bool:
        """Not all models fit together."""
        return self.resident != self._needs.keys()

    @property
    def held(self) -> dict[str, Path]:
        return {model: self._needs[model].checkpoint for model in sorted(self.resident)}

    @property
    def load_times(self) -> Mapping[str, float]:
        """Predicted seconds to load each model that ranks do not hold."""
        return {model: self._load_s([model]) for model in self._needs.keys() - self.resident}

    @property
    def checkpoints(self) -> list[Path]:
        return sorted(set(self.held.values()))

    def choose(self, wanted: Sequence[str], *, kept: Collection[str] = ()) -> frozenset[str]:
        """The first wanted model, and of the others, in order, those that fit beside; kept ones last."""
        chosen = {wanted[0]}
        for model in (*wanted, *sorted(kept)):
            if self._fits({*chosen, model}):
                chosen.add(model)
        return frozenset(chosen)

    def note(self, jobs: Iterable[AdmittedJob]) -> None:
        """There are these jobs, too; they may be larger than those before."""
        for job in jobs:
            need = self._needs.setdefault(job.spec.model or "", _Need(job.checkpoint))
            sizes = [*need.work_bytes, self._work_bytes(job)]
            need.work_bytes = heapq.nlargest(self._jobs_at_once, sizes)

    def change(self, state: Any, *, now_s: float) -> ModelsChanged | None:
        """The change of models that is due in this `State`."""
        turns: ModelTurns = state.models
        is_crowded = len(self.resident) > 1 and not self._fits(self.resident)
        if any(rank.is_loading for rank in state.ranks.records) or not (is_crowded or turns.parked):
            return None
        reason = _CROWDED if is_crowded else self._reason(state, now_s)
        if reason is None:
            return None
        wanted, at_work = turns.wanted(), sorted(state.jobs.models_at_work & turns.resident)
        if is_crowded:
            models = self.choose([*at_work, *wanted, *sorted(self.resident)])
        else:
            longest = next(iter(turns.parked.values()))
            is_overdue = now_s >= longest.since_s + self._longest_s / SHARE
            first = longest.model if is_overdue else wanted[0]
            models = self.choose([first, *at_work, *wanted], kept=self.resident)
        if models == self.resident:
            return None
        return ModelsChanged(now_s, tuple(sorted(models)), self._load_s(models), reason)

    def applied(self, event: Event) -> None:
        match event:
            case ModelsChanged():
                self._lacked = self._checkpoints_of(event.models) - self._checkpoints_of(self.resident)
                self._returning = self._lacked & self._copied
                self.resident = frozenset(event.models)
                self._changed_s = event.time_s
            case LoadFailed():
                self.resident -= set(event.models)
            case RankLoaded():
                self._changed_s = event.time_s
                copied = self._checkpoints_of(self._needs.keys() & set(event.copied))
                if self._lacked in (copied, self._lacked - copied):
                    self._observe(self._lacked, event.load_s, are_copied=bool(copied))
                # A rank that has no room refuses a copy, so the model comes from the disk from now on.
                refused = self._returning - copied
                self.kept = {path: size for path, size in self.kept.items() if path not in refused}
                self._copied |= self._checkpoints_of(self.resident)
                self._copied &= self.kept.keys()
            case RankReady():
                self._observe(self._checkpoints_of(self.resident), event.startup_s)
                self._copied |= self.kept.keys() & self._checkpoints_of(self.resident)

    def _reason(self, state: Any, now_s: float) -> str | None:
        if state.is_at_rest:
            return "nothing is left to do with the others"
        share = URGENT_SHARE if self._is_first(state) else SHARE
        return "its jobs have waited long" if now_s >= self._changed_s + self._longest_s / share else None

    def _is_first(self, state: Any) -> bool:
        """Whether a job that waits has a deadline or a raised priority, and comes before all that can run."""
        turns = state.models
        waiting = [turns.parked[job_id].urgency for job_id in turns.urgent]
        running = [
            (-each.job.spec.priority, each.deadline_s)
            for each in (state.jobs.records.values() if waiting else ())
            if each.arrived and each.model in turns.resident and not each.is_writing
        ]
        return bool(waiting) and (not running or min(waiting) < min(running))

    @property
    def _longest_s(self) -> float:
        return max(self._load_s([model]) for model in self._needs)

    def _load_s(self, models: Collection[str]) -> float:
        """How long ranks take to load what they lack of these."""
        lacked = self._checkpoints_of(set(models) - self.resident)
        return sum(self._loaded[path] / self._bytes_per_s[path in self._copied] for path in lacked)

    def _observe(self, checkpoints: Collection[Path], load_s: float, *, are_copied: bool = False) -> None:
        num_bytes = sum(self._loaded[path] for path in checkpoints)
        if load_s > 0 and num_bytes:
            self._bytes_per_s[are_copied] = num_bytes / load_s

    def _fits(self, models: Collection[str]) -> bool:
        sizes = itertools.chain.from_iterable(self._needs[model].work_bytes for model in models)
        work_bytes = sum(heapq.nlargest(self._jobs_at_once, sizes))
        weight_bytes = sum(self._weights[checkpoint] for checkpoint in self._checkpoints_of(models))
        return weight_bytes + work_bytes <= self._room_bytes

    def _checkpoints_of(self, models: Iterable[str]) -> set[Path]:
        return {self._needs[model].checkpoint for model in models}
