"""LoRAs of jobs and of a server: which fit their model, and the memory that they take."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gfgen.errors import InputError, JobError, ModelError, Problem
from gfgen.job.images import LoraError, LoraFiles
from gfgen.job.spec import JobSpec
from gfgen.models.families.precision import FP8, precision_of
from gfgen.models.geometry.checkpoint import model_name
from gfgen.models.geometry.weights import TEXT_ENCODER, footprint
from gfgen.models.lora.fit import KEPT_FILES, LoraFits
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CUDA, Devices
from gfgen.runtime.core.memory_check import refuse_lora
from gfgen.system.wording import counted, size_in_words

logger = logging.getLogger(__name__)


def split_by_loras(
    jobs: Sequence[AdmittedJob], fits: LoraFits, *, is_offloaded: bool = False
) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
    """The jobs whose LoRAs fit their models, and problems for the others."""
    asking = [job for job in jobs if job.spec.lora]
    if not asking:
        return jobs, ()
    try:
        fits.look(wanted for job in asking for wanted in _wanted(job))
    except ModelError as error:
        why = Problem.of("lora", None, str(error))
        problems = {job.job_id: [replace(why, line=job.spec.line)] for job in asking}
    else:
        problems = {job.job_id: list(_problems(job, fits, is_offloaded=is_offloaded)) for job in asking}
    kept = [job for job in jobs if not problems.get(job.job_id)]
    return kept, [problem for found in problems.values() for problem in found]


@dataclass(frozen=True, slots=True)
class ServedLora:
    path: Path
    sha256: str


def find_loras(options: Sequence[str]) -> Mapping[str, ServedLora]:
    """The LoRAs of --lora NAME=PATH, by name. Raises: InputError for a file that is none."""
    files, found = LoraFiles(Path()), dict[str, ServedLora]()
    for option in options:
        name, _, path = option.partition("=")
        if name in found:
            raise InputError(f"--lora {option}: the name is given twice; give each LoRA its own")
        try:
            found[name] = ServedLora(*files.check(path, None))
        except LoraError as error:
            raise InputError(f"--lora {option}: {error}") from None
    return found


def check_fit(served: Mapping[str, ServedLora], checkpoints: Sequence[Path], fits: LoraFits) -> None:
    """Raises: InputError for a LoRA that fits none of these models."""
    fits.look((path, lora.sha256, lora.path) for lora in served.values() for path in checkpoints)
    for name, lora in served.items():
        errors = [fits.of(path, lora.sha256).error for path in checkpoints]
        if all(errors):
            raise InputError(f"--lora {name}={errors[0]}")


def with_served_loras(spec: JobSpec, served: Mapping[str, ServedLora]) -> JobSpec:
    """The job with files in place of names. Raises: JobError for a name that is not served."""
    if spec.lora is None or spec.lora_files is not None:
        return spec
    used: list[Mapping[str, Any]] = []
    paths: list[str] = []
    for entry in spec.lora:
        if (lora := served.get(entry["name"])) is None:
            there = f"there are {', '.join(served)}" if served else "start it with --lora NAME=PATH"
            raise JobError(Problem.of("lora", entry["name"], f"is no LoRA of this server; {there}"))
        used.append({"sha256": lora.sha256, **{name: entry[name] for name in entry if name != "name"}})
        paths.append(str(lora.path))
    return replace(spec, lora=used, lora_files=paths)


def _wanted(job: AdmittedJob) -> Iterator[tuple[Path, str, Path]]:
    for lora, path in zip(job.spec.lora or (), job.spec.lora_files or (), strict=True):
        yield job.checkpoint, lora["sha256"], Path(path)


def _is_of_text_encoder(weight: str) -> bool:
    return TEXT_ENCODER.fullmatch(weight.partition(".")[0]) is not None


def _problems(job: AdmittedJob, fits: LoraFits, *, is_offloaded: bool) -> Iterator[Problem]:
    for lora, path in zip(job.spec.lora or (), job.spec.lora_files or (), strict=True):
        fit, target = fits.of(job.checkpoint, lora["sha256"]), lora.get("target")
        problem = None
        if fit.error is not None:
            problem = Problem.of("lora", None, fit.error)
        elif target is not None and target not in fit.components:
            accepted = f"{' or '.join(fit.components)} is accepted for {job.spec.model}"
            problem = Problem.of("lora.target", target, accepted)
        elif not fit.changed_in(target):
            problem = Problem.of("lora.target", target, f"{path} changes no layer of it; leave it out")
        elif is_offloaded and any(map(_is_of_text_encoder, fit.changed_in(target))):
            problem = Problem.of("lora", None, f"{path} changes a text encoder; run it without --offload")
        if problem is not None:
            yield replace(problem, line=job.spec.line)


CPU_BYTES, GPU_BYTES = 4, 2
"""Of a parameter: fp32 on CPU ranks, bf16 on GPUs."""
_SPARE = 10
"""Copies leave a tenth of a GPU free; with less, no graphs are recorded (recorder.py)."""
_QUANTISING = 7
"""The most memory that a GPU needs to quantise a weight, as a multiple of the weight in bf16
(modulation.in_int8 computes in fp32)."""

Lora = tuple[str, str | None]
"""The hash of a LoRA, and the model that a job applies it to."""


def loras_of(job: AdmittedJob) -> Set[Lora]:
    return {(lora["sha256"], lora.get("target")) for lora in job.spec.lora or ()}


@dataclass(frozen=True, slots=True)
class LoraNeed:
    """What LoRAs need beside their model."""

    is_on_host: bool = False
    """Main memory has GPUs' copies of the weights that they change; a GPU has one of these at a time."""
    loras: frozenset[Lora] = frozenset()
    changed: Mapping[str, int] = field(default_factory=dict)
    """Parameters by weight that they change."""
    factors: Mapping[str, int] = field(default_factory=dict)
    """Their own parameters, by hash."""


@dataclass(frozen=True, slots=True)
class LoraMemory:
    """Bytes that LoRAs take beside the models: copies of the weights that they change, and their factors.

    Copies stay until the run ends, so `needs` of models add up over jobs. Where a model's copies are is
    decided once, with its first LoRAs, and changes no bits. `room_bytes` is for models and jobs.
    """

    fits: LoraFits
    devices: Devices
    needs: dict[Path, LoraNeed]
    room_bytes: int
    precision: Sequence[str] = ()

    def place(self, checkpoint: Path, loras: Set[Lora], *, weights: int, work: int = 0) -> None:
        """Decide where copies are: in main memory if GPUs have no room for those of these LoRAs."""
        if checkpoint not in self.needs:
            size = self.device_bytes(checkpoint, self.with_loras(checkpoint, loras))
            self.needs[checkpoint] = LoraNeed(self.devices.kind == CUDA and self._lack(weights + size, work))

    def place_rest(self, weights: Mapping[Path, int], *, on_host: bool) -> None:
        """Decide it for other models, of which any weight may be changed later; `on_host` for all of them."""
        for path, size in weights.items():
            with_copies = size * (3 if self._is_in_fp8(path) else 2)  # copies are in bf16
            self.needs.setdefault(path, LoraNeed(on_host or self._lack(with_copies, 0)))

    def _is_in_fp8(self, checkpoint: Path) -> bool:
        return precision_of(self.precision, checkpoint) == FP8

    def _lack(self, size: int, work: int) -> bool:
        return size + max(work, self.room_bytes // _SPARE) > self.room_bytes

    def with_loras(self, checkpoint: Path, loras: Set[Lora]) -> LoraNeed:
        """What a model's LoRAs and these need together."""
        need = self.needs.get(checkpoint, LoraNeed())
        if loras <= need.loras:
            return need
        changed, factors = dict(need.changed), dict(need.factors)
        for sha256, target in loras:
            fit = self.fits.of(checkpoint, sha256)
            changed.update(fit.changed_in(target))
            factors[sha256] = fit.num_factors
        return LoraNeed(need.is_on_host, need.loras | loras, changed, factors)

    def device_bytes(self, checkpoint: Path, need: LoraNeed) -> int:
        """On each GPU, or in main memory on all CPU ranks."""
        largest = max(need.changed.values(), default=0)
        num_base = largest if need.is_on_host else sum(need.changed.values())
        num_base += _QUANTISING * largest if self._is_in_fp8(checkpoint) else 0
        num_factors = sum(sorted(need.factors.values())[-KEPT_FILES:])
        if self.devices.kind == CUDA:
            return GPU_BYTES * (num_base + num_factors)
        # A mapped weight that changes becomes private to its rank.
        num_base *= 2 if _is_mapped(checkpoint) else 1
        return CPU_BYTES * (num_base + num_factors) * self.devices.num_ranks

    def host_bytes(self, need: LoraNeed) -> int:
        """In main memory, for all ranks on GPUs."""
        return GPU_BYTES * sum(need.changed.values()) * self.devices.num_ranks if need.is_on_host else 0

    def by_model(self) -> Mapping[Path, int]:
        return {checkpoint: self.device_bytes(checkpoint, need) for checkpoint, need in self.needs.items()}

    def refuse(
        self,
        jobs: Sequence[AdmittedJob],
        *,
        beside: Callable[[AdmittedJob], int],
        host_room_bytes: float,
    ) -> Iterator[tuple[str, Problem]]:
        """Add the LoRAs of these jobs, except those without room: their ids and problems.

        beside: what a job needs without its LoRAs.
        host_room_bytes: the most main memory for more copies.
        """
        for job in jobs:
            path = job.checkpoint
            before, need = self.needs.get(path, LoraNeed()), self.with_loras(path, loras_of(job))
            on_device, on_host = self.device_bytes(path, need), self.host_bytes(need)
            more = on_host - self.host_bytes(before)
            if on_device + beside(job) > self.room_bytes:
                yield job.job_id, refuse_lora(job, on_device, beside=beside(job), available=self.room_bytes)
            elif more > host_room_bytes:
                available = int(host_room_bytes) + self.host_bytes(before)
                yield job.job_id, refuse_lora(job, on_host, beside=None, available=available)
            else:
                self.needs[path] = need
                host_room_bytes -= more

    def add_served(self, weights: Mapping[Path, int], shas: Set[str], *, host_room_bytes: float) -> None:
        """Add the LoRAs of a server to its models, if they fit. Raises: InputError where there is no room."""
        before = sum(map(self.host_bytes, self.needs.values()))
        for path, size in weights.items():
            loras = {(sha, None) for sha in shas if self.fits.of(path, sha).error is None}
            self.place(path, loras, weights=size)
            need = self.needs[path] = self.with_loras(path, loras)
            needed = size + self.device_bytes(path, need)
            _check_room(f"memory needed for {model_name(path)} and", needed, self.room_bytes)
        on_host = sum(map(self.host_bytes, self.needs.values())) - before
        _check_room("main memory needed for", on_host, host_room_bytes)
        self.tell_of_copies(weights)

    def tell_of_copies(self, checkpoints: Iterable[Path]) -> None:
        """Log for which of these models main memory has the copies."""
        for path in sorted(checkpoints):
            need = self.needs.get(path, LoraNeed())
            if need.is_on_host and need.loras:
                logger.info(
                    "%s: GPUs lack room for copies of the weights that LoRAs change, so main memory has them "
                    "(%s for %s); a switch of LoRAs copies up to %s to a GPU",
                    model_name(path),
                    size_in_words(self.host_bytes(need)),
                    counted(self.devices.num_ranks, "rank"),
                    size_in_words(GPU_BYTES * sum(need.changed.values())),
                )


def _check_room(what: str, need: int, available: float) -> None:
    if need > available:
        raise InputError(
            f"--lora: at least {size_in_words(need)} of {what} copies of the weights that LoRAs change, "
            f"{size_in_words(int(available))} available; name fewer LoRAs"
        )


@functools.cache
def _is_mapped(checkpoint: Path) -> bool:
    try:
        return footprint(checkpoint).shared_bytes > 0
    except ModelError:  # random weights have no files
        return False
