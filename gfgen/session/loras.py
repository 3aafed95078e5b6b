"""LoRAs in admission: which fit their model, and whether there is memory for what they change."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from gfgen.errors import InputError, ModelError, Problem, Warned
from gfgen.job.images import LoraError, LoraFiles
from gfgen.job.spec import JobSpec, Patch
from gfgen.models.geometry.checkpoint import model_name
from gfgen.models.geometry.weights import WHOLE, Placement
from gfgen.models.lora.accounting import KEPT_FILES, LoraFits
from gfgen.runtime.core.admission import AdmittedJob, Judged
from gfgen.runtime.core.devices import Devices
from gfgen.system.wording import counted, size_in_words

logger = logging.getLogger(__name__)

GPU_BYTES = 2
"""Of a parameter on GPUs and of its copy in main memory, in bf16."""


class Room(Protocol):
    """The memory of a run, which models, jobs and LoRAs share (memory.py)."""

    devices: Devices

    @property
    def room_bytes(self) -> int | None: ...
    def weights(self, checkpoints: Collection[Path]) -> Mapping[Path, int]: ...
    def job_bytes(self, job: AdmittedJob) -> int: ...
    def work_bytes(self, job: AdmittedJob) -> int: ...
    def patch_bytes(self, checkpoint: Path, need: PatchNeed) -> int: ...
    def lacks(self, size: int, work: int) -> bool: ...
    def copies_room(self, checkpoints: Collection[Path]) -> float: ...


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


_Lora = tuple[str, str | None]
"""The hash of a LoRA, and the model that a job applies it to."""


@dataclass(frozen=True, slots=True)
class PatchNeed:
    """What patches of a model need: copies of the weights that they change, and their factors."""

    is_on_host: bool = False
    """Main memory has GPUs' copies of the weights that they change; a GPU has one of these at a time."""
    loras: frozenset[_Lora] = frozenset()
    changed: Mapping[str, int] = field(default_factory=dict)
    """Parameters by weight that they change."""
    factors: Mapping[str, int] = field(default_factory=dict)
    """Their own parameters, by hash."""
    copied: Mapping[str, int] = field(default_factory=dict)
    """Bytes of streamed blocks that each rank has copies of (`Placement.copied`)."""
    largest_copied: int = 0
    """Parameters of the largest weight that they change there."""

    @property
    def num_changed(self) -> int:
        return sum(self.changed.values())

    @property
    def num_factors(self) -> int:
        """Parameters of those that stay on a device."""
        return sum(sorted(self.factors.values())[-KEPT_FILES:])

    def copies_bytes(self, num_ranks: int) -> int:
        """Copies in main memory for all ranks on GPUs."""
        base_bytes = GPU_BYTES * self.num_changed if self.is_on_host else 0
        return (base_bytes + sum(self.copied.values())) * num_ranks


@dataclass(frozen=True, slots=True)
class Loras:
    """The LoRAs of admitted jobs and of a server. Copies add up over the run; their place is decided once."""

    fits: LoraFits = field(default_factory=LoraFits)
    by_model: dict[Path, PatchNeed] = field(default_factory=dict)
    served: dict[str, ServedLora] = field(default_factory=dict)
    placements: dict[Path, Placement] = field(default_factory=dict)
    """Of models on GPUs. Streamed weights need no copies, since their changes are made after each read, but
    those in 8 bits, of which each rank copies whole blocks."""

    def of(self, checkpoint: Path, loras: Set[_Lora] = frozenset()) -> PatchNeed:
        """What a model's LoRAs and these need together."""
        need = self.by_model.get(checkpoint, PatchNeed())
        if loras <= need.loras:
            return need
        changed, factors, copied = dict(need.changed), dict(need.factors), dict(need.copied)
        placement, largest = self.placements.get(checkpoint, WHOLE), need.largest_copied
        for sha256, target in loras:
            fit = self.fits.of(checkpoint, sha256)
            for name, size in fit.changed_in(target).items():
                if (block := placement.copies(name)) is not None:
                    copied[block], largest = placement.copied[block], max(largest, size)
                elif not placement.streams(name):
                    changed[name] = size
            factors[sha256] = fit.num_factors
        return PatchNeed(need.is_on_host, need.loras | loras, changed, factors, copied, largest)

    def named(self, specs: Iterable[JobSpec]) -> tuple[Sequence[JobSpec], Sequence[Problem]]:
        """The jobs with files in place of names, and problems for names that are not served."""
        kept, problems, served = list[JobSpec](), list[Problem](), self.served
        for spec in specs:
            if spec.lora is None or spec.lora_files is not None:
                kept.append(spec)
            elif unknown := [entry["name"] for entry in spec.lora if entry["name"] not in served]:
                there = f"there are {', '.join(served)}" if served else "start it with --lora NAME=PATH"
                problem = Problem.of("lora", unknown[0], f"is no LoRA of this server; {there}")
                problems.append(replace(problem, line=spec.line))
            else:
                files = [served[entry["name"]] for entry in spec.lora]
                used: list[Mapping[str, Any]] = [
                    {"sha256": file.sha256} | {key: entry[key] for key in entry if key != "name"}
                    for file, entry in zip(files, spec.lora, strict=True)
                ]
                kept.append(replace(spec, lora=used, lora_files=[str(file.path) for file in files]))
        return kept, problems

    def fitting(self, jobs: Sequence[AdmittedJob]) -> Judged:
        """The jobs whose LoRAs fit their models, and problems for the others."""
        asked = [(job, patch) for job in jobs for patch in job.spec.patches]
        if not asked:
            return jobs, ()
        try:
            self.fits.look((job.checkpoint, patch.sha256, Path(patch.path)) for job, patch in asked)
        except ModelError as error:
            refused = [Problem(job.spec.line, "lora", None, str(error)) for job in jobs if job.spec.patches]
            return [job for job in jobs if not job.spec.patches], refused
        kept, problems, known = [], list[Problem](), dict[object, Problem | tuple[Warned, ...]]()
        for job in jobs:
            found = []
            for patch in job.spec.patches:
                if (key := (job.checkpoint, job.spec.model, patch.path, patch)) not in known:
                    known[key] = self._judged(job, patch)
                found.append(known[key])
            refused = [replace(each, line=job.spec.line) for each in found if isinstance(each, Problem)]
            if not refused:
                kept.append(job.warned(*(text for each in found if isinstance(each, tuple) for text in each)))
            problems += refused
        return kept, problems

    def _judged(self, job: AdmittedJob, patch: Patch) -> Problem | tuple[Warned, ...]:
        """What is wrong with a LoRA for a model, or what jobs with it are warned of."""
        fit, target = self.fits.of(job.checkpoint, patch.sha256), patch.target
        if fit.error is not None:
            return Problem.of("lora", None, fit.error)
        if fit.lacking is not None and not patch.is_partial:
            return Problem.of("lora", None, f'{fit.lacking}; "partial": true leaves them out')
        if target is not None and target not in fit.components:
            return Problem.of(
                "lora.target", target, f"{' or '.join(fit.components)} is accepted for {job.spec.model}"
            )
        if not fit.changed_in(target):
            return Problem.of("lora.target", target, f"{patch.path} changes no layer of it; leave it out")
        left_out = () if fit.lacking is None else (Warned("LoRA left out in part", fit.lacking),)
        return (*left_out, *(Warned("LoRA", f"{patch.path}: {text}") for text in fit.warnings))

    def with_copies(self, jobs: Sequence[AdmittedJob], weights: Mapping[Path, int], room: Room) -> Judged:
        """The jobs with room for their LoRAs in addition to the model and the LoRAs of earlier jobs."""
        asking = [job for job in jobs if job.spec.patches]
        if not asking or (room_bytes := room.room_bytes) is None:
            return jobs, ()
        needs, refused, num_ranks = self.by_model, dict[str, Problem](), room.devices.num_ranks
        checkpoints = {job.checkpoint for job in asking}
        news = {path for path in checkpoints if not self.of(path).loras}
        for path in checkpoints - needs.keys():
            own = [job for job in asking if job.checkpoint == path]
            loras = set[_Lora]().union(*map(_loras_of, own))
            self._place(path, loras, weights[path], room, work=max(map(room.work_bytes, own)))
        copies_room = room.copies_room(checkpoints)
        for job in asking:
            path = job.checkpoint
            need, own_bytes = self.of(path, _loras_of(job)), weights[path] + room.job_bytes(job)
            on_device, on_host = room.patch_bytes(path, need), need.copies_bytes(num_ranks)
            before = self.of(path).copies_bytes(num_ranks)
            if on_device + own_bytes > room_bytes:
                refused[job.job_id] = _no_copies(job, on_device, beside=own_bytes, available=room_bytes)
            elif on_host - before > copies_room:
                available = int(copies_room) + before
                refused[job.job_id] = _no_copies(job, on_host, beside=None, available=available)
            else:
                needs[path] = need
                copies_room -= on_host - before
        self._tell_of_copies(news, num_ranks)
        return [job for job in jobs if job.job_id not in refused], tuple(refused.values())

    def serve(self, served: Mapping[str, ServedLora], checkpoints: Sequence[Path], room: Room) -> None:
        """Let requests name these. Raises: InputError for one that fits no model, and for lack of room."""
        self.served.update(served)
        self.fits.look((path, lora.sha256, lora.path) for lora in served.values() for path in checkpoints)
        for name, lora in served.items():
            found = [self.fits.of(path, lora.sha256) for path in checkpoints]
            errors = [fit.error or fit.lacking for fit in found]
            if all(errors):
                raise InputError(f"--lora {name}={errors[0]}")
        if not served or (room_bytes := room.room_bytes) is None:
            return
        needs, num_ranks = self.by_model, room.devices.num_ranks
        for path, size in room.weights(checkpoints).items():
            shas = {lora.sha256 for lora in served.values()}
            loras = {(sha, None) for sha in shas if self.fits.of(path, sha).error is None}
            self._place(path, loras, size, room)
            needs[path] = self.of(path, loras)
            needed = size + room.patch_bytes(path, needs[path])
            _check_copies(f"memory needed for {model_name(path)} and", needed, room_bytes)
        on_host = sum(need.copies_bytes(num_ranks) for need in needs.values())
        _check_copies("main memory needed for", on_host, room.copies_room(checkpoints))
        self._tell_of_copies(checkpoints, num_ranks)

    def _place(self, checkpoint: Path, loras: Set[_Lora], size: int, room: Room, *, work: int = 0) -> None:
        size += room.patch_bytes(checkpoint, self.of(checkpoint, loras))
        self.by_model.setdefault(checkpoint, PatchNeed(room.lacks(size, work)))

    def _tell_of_copies(self, checkpoints: Iterable[Path], num_ranks: int) -> None:
        for path in sorted(checkpoints):
            need = self.of(path)
            if need.copies_bytes(1):
                text = (
                    "%s: GPUs lack room for copies of the weights that LoRAs change, so main memory has them "
                )
                text += "(%s for %s); a switch of LoRAs copies up to %s to a GPU"
                text += ", of streamed blocks in fp8 from the model's files" if need.copied else ""
                logger.info(
                    text,
                    model_name(path),
                    size_in_words(need.copies_bytes(num_ranks)),
                    counted(num_ranks, "rank"),
                    size_in_words(need.copies_bytes(1) + sum(need.copied.values())),  # files have bf16
                )


def _loras_of(job: AdmittedJob) -> Set[_Lora]:
    return {(patch.sha256, patch.target) for patch in job.spec.patches}


def _no_copies(job: AdmittedJob, size: int, *, beside: int | None, available: int) -> Problem:
    """The problem of a job whose LoRAs need too much; `beside` None: main memory lacks room for copies."""
    kind, others = "main memory needed for", "which do not fit on GPUs"
    if beside is not None:
        kind = "memory needed for LoRAs and"
        others = f"beside {size_in_words(beside)} for the model and the job"
    accepted = (
        f"at least {size_in_words(size)} of {kind} copies of the weights that LoRAs change, "
        f"{others}, {size_in_words(available)} available; fewer --ranks, or LoRAs of fewer layers would help"
    )
    return Problem(job.spec.line, "lora", None, accepted)


def _check_copies(what: str, need: int, available: float) -> None:
    if need > available:
        raise InputError(
            f"--lora: at least {size_in_words(need)} of {what} copies of the weights that LoRAs change, "
            f"{size_in_words(int(available))} available; name fewer LoRAs"
        )
