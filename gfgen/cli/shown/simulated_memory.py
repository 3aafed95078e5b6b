"""The memory that simulations assume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from gfgen.errors import JobFileError
from gfgen.runtime.control.residency import LOAD_BYTES_PER_S, Residency
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CUDA, Devices, parse_memory
from gfgen.session.admission import Admission
from gfgen.system.wording import size_in_words

simulated_memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help='Memory per GPU for weights and jobs, such as "80GB". Models that do not fit take turns. [no limit]',
)


@dataclass(frozen=True, slots=True)
class SimulatedMemory:
    """The memory of these jobs on each GPU; `room_bytes` None: no limit."""

    jobs: Sequence[AdmittedJob]
    weights: Mapping[Path, int]
    room_bytes: int | None = None

    @classmethod
    def of(cls, jobs: Sequence[AdmittedJob], memory: str | None, *, source: str) -> SimulatedMemory:
        room_bytes = None if memory is None else parse_memory(memory)
        admission = _admission(1, room_bytes)
        weights = admission.check({job.checkpoint for job in jobs})
        if room_bytes is not None:
            _, too_large = admission.refuse_large_on_gpus(jobs, weights)
            if too_large:
                raise JobFileError(source, tuple(too_large))
        return cls(jobs, weights, room_bytes)

    def residency(self, num_ranks: int) -> Residency | None:
        """Lets models take turns in one run; None if all of them fit."""
        if self.room_bytes is None:
            return None
        return _admission(num_ranks, self.room_bytes).residency(self.jobs)

    def in_words(self, num_ranks: int) -> str | None:
        """The assumption in words; None with one model, or if all models are known to fit."""
        if len(self.weights) == 1:
            return None
        if self.room_bytes is None:
            sizes = self.weights.values()
            size = f" (weights of {size_in_words(sum(sizes))})" if all(sizes) else ""
            return (
                f"This assumes that all {len(sizes)} models fit into memory at once{size}. "
                "With --memory SIZE, models that do not fit take turns."
            )
        if self.residency(num_ranks) is None:
            return None
        return (
            f"Models take turns in {size_in_words(self.room_bytes)} of each GPU. This assumes that they load "
            f"at {LOAD_BYTES_PER_S / 1e9:g} GB a second, which is an estimate."
        )


def _admission(num_ranks: int, room_bytes: int | None) -> Admission:
    devices = Devices(CUDA, num_ranks, memory_limit=room_bytes)
    return Admission(default_model="", devices=devices, has_random_weights=True)
