"""Which card runs what, as the planner predicts it: the tables of docs/memory.md.

    python -m benchmarks.which_card

Memory comes from the models' configs, as in a run. Times are those of the profile of an H200, scaled by what
a card computes at most, with reads at the rate of its link to main memory. Nothing here is measured on such
cards. It needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.measured import head, row
from gfgen.errors import InputError
from gfgen.job.spec import JobSpec
from gfgen.models.families.precision import Precision
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob, admit
from gfgen.runtime.core.devices import CUDA, Devices, Gpu
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.predict.profile_store import shipped_profiles
from gfgen.runtime.predict.scaling import of_another_gpu
from gfgen.runtime.simulate.simulation import simulate
from gfgen.session.admission import find_weightless
from gfgen.session.memory import GpuMemory

JOBS_A_CARD = 8


@dataclass(frozen=True)
class Card:
    memory_gb: int
    name: str
    """As profiles and `scaling.TFLOPS` name it."""
    link: str
    read_bytes_per_s: float


CARDS = (
    Card(16, "NVIDIA GeForce RTX 5080", "PCIe 5", 50e9),
    Card(24, "NVIDIA GeForce RTX 4090", "PCIe 4", 25e9),
    Card(48, "NVIDIA L40S", "PCIe 4", 25e9),
    Card(80, "NVIDIA H100 80GB HBM3", "PCIe 5", 50e9),
)
NUM_CARDS = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    title: str
    model: str
    fields: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def job(self, number: int = 0) -> AdmittedJob:
        spec = JobSpec(id=f"job-{number}", prompt="a red fox", model=self.model, line=1, **self.fields)
        (job,), _ = admit([spec], default_model=self.model, find_model=find_weightless)
        return job


PICTURE = {"width": 1024, "height": 1024, "steps": 20}
SHORT = {"width": 832, "height": 480, "frames": 49}
CASES = (
    Case("Qwen-Image, 1024x1024, 20 steps", "qwen-image", PICTURE),
    Case("the same, `--precision fp8`", "qwen-image", PICTURE, {"precision": Precision(("fp8",))}),
    Case("Wan2.2-TI2V-5B, 832x480x49, 50 steps", "wan2.2-ti2v-5b", SHORT),
    Case("the same, `--vae-dtype bfloat16`", "wan2.2-ti2v-5b", SHORT, {"vae_dtype": "bfloat16"}),
    Case("Wan2.2-A14B, 832x480x81", "wan2.2-t2v-a14b", SHORT | {"frames": 81}),
)
TIMED = (CASES[0], CASES[2])
"""Those of which the profile has the times."""


def memory_of(case: Case, card: Card) -> GpuMemory | None:
    """The memory of such a card with room for such a job; None if the model does not fit."""
    gpu = Gpu(card.name, card.memory_gb * 10**9)
    devices = Devices(CUDA, 1, (gpu,))
    profile = Profile(card.name, "", "", 1, (), read_bytes_per_s=card.read_bytes_per_s)
    memory = GpuMemory(devices=devices, has_random_weights=True, profile=profile, **case.options)
    memory.note([case.job()])
    try:
        memory.weights([case.job().checkpoint])
    except InputError:
        return None
    return memory


def memory_cell(case: Case, card: Card) -> str:
    if (memory := memory_of(case, card)) is None:
        return "no"
    checkpoint = case.job().checkpoint
    size, placement = memory.weights([checkpoint])[checkpoint] / 1e9, memory.placement(checkpoint)
    if not placement.streamed:
        return f"all {size:.1f}"
    read_s = sum(memory.reads_s({"": checkpoint}).values())
    return f"{size:.1f}, {placement.streamed_bytes / 1e9:.1f} ({read_s:.2g})"


def time_cell(case: Case, card: Card, profile: Profile) -> str:
    """Of a lone job; of each of many on one card, on two and so on."""
    if (memory := memory_of(case, card)) is None:
        return "no"
    reads_s = memory.reads_s({case.model: case.job().checkpoint})

    def makespan_s(num_jobs: int, num_cards: int) -> float:
        jobs = [case.job(number) for number in range(num_jobs)]
        options: dict[str, Any] = dict(profile=profile, num_ranks=num_cards, reads_s=reads_s)
        return simulate(jobs, policy=load_policy("fcfs"), **options).summary.makespan_s

    numbers = [(JOBS_A_CARD * number, number) for number in NUM_CARDS]
    each_s = [makespan_s(num_jobs, number) / num_jobs for num_jobs, number in numbers]
    return f"{makespan_s(1, 1):.0f}; {', '.join(f'{seconds:.3g}' for seconds in each_s)}"


def rows(title: str, cells: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    yield from head(title, *(f"{card.memory_gb} GB" for card in CARDS)).splitlines()
    for name, values in cells:
        yield row(name, *values)


def memory_lines() -> Iterator[str]:
    cells = [(case.title, [memory_cell(case, card) for card in CARDS]) for case in CASES]
    return rows("on each GPU, in main memory (s to read a forward)", cells)


def time_lines() -> Iterator[str]:
    shipped = shipped_profiles()[0]
    alone = replace(shipped, num_ranks=max(NUM_CARDS))
    profiles = {card: of_another_gpu(alone, card.name) for card in CARDS}
    cells = [(case.title, [time_cell(case, card, profiles[card]) for card in CARDS]) for case in TIMED]
    return rows(
        f"s: a lone job; each of {JOBS_A_CARD} for each of {', '.join(map(str, NUM_CARDS))} cards", cells
    )


if __name__ == "__main__":
    print("\n".join(memory_lines()), end="\n\n")
    print("\n".join(time_lines()))
