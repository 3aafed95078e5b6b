"""The memory of a run, by its kind of device: how much there is, and what models, jobs and patches take.

CPU ranks need at least the weights (mapped ones count once for all ranks), the job's state in its slab, and
its frames during a decode. Each GPU holds all weights, or as many blocks as fit and buffers for the others,
which main memory holds (geometry/weights.py), and the frames during a decode; slabs and writers use main
memory. Activations come on top, as earlier runs measured them, or by a guess. Placements leave room for them,
and jobs are admitted without: a job that is refused could not have run, one that passes may fail at a task.
Models that do not fit together take turns (residency.py).
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import resource
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gfgen.errors import InputError, ModelError, Problem
from gfgen.graph import Stage
from gfgen.models.families.precision import Precision
from gfgen.models.geometry.checkpoint import model_name, read_checkpoint
from gfgen.models.geometry.weights import (
    TEXT_ENCODER,
    WHOLE,
    Footprint,
    Part,
    Placement,
    count_parts,
    device_parts,
    footprint,
    noted_parts,
    placed,
    quantisation_in,
)
from gfgen.runtime.control.residency import LOAD_BYTES_PER_S, Residency
from gfgen.runtime.core.admission import AdmittedJob, Judged
from gfgen.runtime.core.devices import Devices
from gfgen.runtime.ipc.settings import CONTEXT_BYTES, HOST_PLAN, SIDE_BYTES, default_plan
from gfgen.runtime.ipc.slab import SlabPlan
from gfgen.runtime.predict.profile_file import NO_PROFILE, Profile, peak_key
from gfgen.session.loras import GPU_BYTES, Loras, PatchNeed
from gfgen.system.machine import available_bytes
from gfgen.system.wording import counted, size_in_words

logger = logging.getLogger(__name__)

_FRAME_COPIES = 5
"""Bytes per byte of uint8 frames: 4 as fp32 on their rank, and 1 in the writer's memory."""
_DECODE_BYTES = 100
"""Peak bytes of an fp32 decode per sample of its frames: 704x1280x81, 219 MB, took 23 GB on an H200."""
_CPU_BYTES = 4
"""Of a parameter on CPU ranks, in fp32."""
_SPARE = 10
"""Copies leave a tenth of a GPU free; with less, no graphs are recorded (worker/forwards.py)."""
_ACTIVATION_BYTES = 10**9
"""The least that a placement leaves for activations."""
_TOKEN_BYTES, _PIXEL_BYTES, _FRAME_BYTES = 200_000, 600, 7_500
"""Guesses for each token of a step, of 5,120 channels, and for each byte of a decoded picture, or of one
frame of a video, of which Wan2.2-5B decodes four at once: 6.4 GB at 832x480 in fp32, half as much in
bf16, and pieces of 2 GB beside them are too small to be used."""
_MARGIN = 1.25
"""For pieces of memory that are too small to be used, beside what tasks were measured to take."""
_SHARING_BYTES = 16 * 32 * 2**20
"""For what forwards that share reads keep while they wait (streaming/turns.py), beside activations; a step of
eight guided pictures of Qwen-Image at 1024x1024 took 0.7 GB more than one of a lone picture."""
_READ_BYTES_PER_S = 50e9
"""From pinned memory, where nothing was measured; one H200 reads 55 GB/s, two at once 38 to 48 each."""
_FRESH_S = 0.25
"""For how long a look at main memory serves requests that come together."""
_NEAR_BYTES_PER_S = 300e9
"""From another GPU's memory over NVLink; H200s reach 310 to 330 GB/s."""
_QUANTISING = 7
"""The most memory that a GPU needs to quantise a weight, as a multiple of the weight in bf16
(modulation.in_int8 computes in fp32)."""


@dataclass(kw_only=True)
class HostMemory:
    """Main memory, which CPU ranks share."""

    devices: Devices
    has_random_weights: bool = False
    is_loaded: bool = False
    """The ranks hold the models of all jobs, so what is available of main memory is without them."""
    patches: Loras = field(default_factory=Loras)
    profile: Profile = NO_PROFILE  # what was measured of such devices
    _seen: tuple[float, int | None] = (-math.inf, None)
    """The room for new jobs, and when it was read: from twenty files."""

    @property
    def room_bytes(self) -> int | None:
        """For models and jobs; None if unknown."""
        rooms = (self.devices.memory_bytes, available_bytes())
        return min((room for room in rooms if room is not None), default=None)

    def weights(self, checkpoints: Collection[Path]) -> Mapping[Path, int]:
        """What each of these models takes of the room.

        Raises: InputError if one takes more than there is; it says what would fit.
        """
        if self.is_loaded:
            return dict.fromkeys(checkpoints, 0)
        measure = _random_footprint if self.has_random_weights else footprint
        prints, num_ranks = {path: measure(path) for path in sorted(checkpoints)}, self.devices.num_ranks
        needs = {path: found.on(num_ranks) for path, found in prints.items()}
        available = self.room_bytes
        for path, need in needs.items():
            if available is None or need <= available:
                continue
            fitting = [ranks for ranks in range(1, num_ranks) if prints[path].on(ranks) <= available]
            help_ = "free memory, raise --memory, or run smaller models"
            raise InputError(
                f"{model_name(path)} on {counted(num_ranks, 'rank')}: at least {size_in_words(need)} of "
                f"memory needed, {size_in_words(available)} available; "
                + (f"--ranks {fitting[-1]} would fit" if fitting else help_)
            )
        return needs

    def job_bytes(self, job: AdmittedJob) -> int:
        """State and frames of one job."""
        known = tuple(replace(artifact, room_bytes=0) for artifact in job.trajectory.artifacts)
        slab = SlabPlan.of(replace(job.trajectory, artifacts=known))
        return slab.size_bytes + _FRAME_COPIES * job.trajectory.frames_bytes

    def work_bytes(self, job: AdmittedJob) -> int:
        """A job's peak memory, for choosing the models that stay resident with it."""
        return self.job_bytes(job)

    def check_together(self, checkpoints: Collection[Path]) -> None:
        """Raises: InputError if all of these models at once take more than is available."""
        needs, available = self.weights(checkpoints), self.room_bytes
        if available is not None and (need := sum(needs.values())) > available:
            names = ", ".join(model_name(path) for path in sorted(needs))
            raise InputError(
                f"{names}: at least {size_in_words(need)} of memory needed for all of them at once, "
                f"{size_in_words(available)} available; use one after the other"
            )

    def check_waiting(self, checkpoints: Collection[Path]) -> int:
        """Bytes of main memory for what GPUs do not hold. Raises: InputError when they are not available."""
        return 0

    def placement(self, checkpoint: Path) -> Placement:
        """Which blocks of a model are on its devices. Raises: InputError when it does not fit."""
        return WHOLE

    def reads_s(self, models: Mapping[str, Path]) -> Mapping[str, float]:
        """As `RunStart.reads_s`: how long a forward reads streamed blocks at least, of models by name."""
        return {}

    def streaming(self, checkpoints: Collection[Path]) -> Mapping[str, Placement]:
        """The placements of the models that have streamed blocks, by path."""
        found = {path: each for path in sorted(checkpoints) if (each := self.placement(path)).streamed}
        for path in found:
            logger.info("%s: %s", model_name(path), self.in_words(path))
        return {str(path): each for path, each in found.items()}

    def in_words(self, checkpoint: Path) -> str:
        """Where the weights of a model are, and what that costs."""
        placement, size = self.placement(checkpoint), size_in_words(self.weights([checkpoint])[checkpoint])
        if not placement.streamed:
            return f"each GPU holds all of its weights, {size}"
        places = "main memory and from other GPUs" if placement.shared else "main memory"
        if placement.is_on_disk:
            share_s = placement.streamed_bytes / self.devices.num_ranks / LOAD_BYTES_PER_S
            places = "other GPUs, and those of a rank that has ended from a file, because main memory has no "
            places += f"room (a forward would take about {share_s:.2g} s longer)"
        times_s = self.reads_s({"": checkpoint}).values()
        pace = "".join(f", which takes a forward at least {seconds:.2g} s" for seconds in times_s)
        streamed = size_in_words(placement.streamed_bytes)
        return f"each GPU holds {size} of its weights; {streamed} are streamed from {places}{pace}"

    def fit(self, jobs: Sequence[AdmittedJob], *, is_new: bool = True) -> Judged:
        """The jobs for which there is room, with their model and their patches, and problems for the others.

        Jobs that are not new were admitted before and may be running. For them only counts what does not
        change while a server lives, such as --memory and the memory of GPUs: if main memory is short now,
        these very jobs may be the reason.

        Raises: InputError when a model does not fit.
        """
        jobs, unfit = self.patches.fitting(jobs)
        checkpoints = {job.checkpoint for job in jobs}
        weights = self.weights(checkpoints)
        if not self.is_loaded:
            self.check_waiting(checkpoints)
        jobs, too_large = self._with_room(jobs, weights, is_new=is_new)
        jobs, without_copies = self.patches.with_copies(jobs, weights, self) if is_new else (jobs, ())
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        limit = None if most == resource.RLIM_INFINITY else most
        jobs, unmade = split(jobs, _largest_file_bytes, limit, where="in one file (ulimit -f)")
        return jobs, (*unfit, *too_large, *without_copies, *unmade)

    def _with_room(self, jobs: Sequence[AdmittedJob], weights: Mapping[Path, int], *, is_new: bool) -> Judged:
        now_s = time.monotonic()
        if is_new and now_s - self._seen[0] > _FRESH_S:
            self._seen = now_s, self.room_bytes
        available = self._seen[1] if is_new else self.devices.memory_bytes
        return split(jobs, lambda job: weights[job.checkpoint] + self.job_bytes(job), available)

    def residency(
        self, jobs: Sequence[AdmittedJob], *, names: Mapping[str, Path] | None = None
    ) -> Residency | None:
        """Lets the models of these jobs take turns; None if all of them always fit together.

        `names` are models that must be loaded although no job uses them yet. Their jobs may be too large for
        all models to stay.
        """
        room_bytes = self.room_bytes
        if room_bytes is None:
            return None
        weights = self.with_patches({job.checkpoint for job in jobs} | set((names or {}).values()))
        found = Residency(
            jobs,
            weights=weights,
            streamed={path: self.placement(path).streamed_bytes for path in weights},
            work_bytes=self.work_bytes,
            room_bytes=room_bytes,
            jobs_at_once=self._jobs_at_once,
            names=names,
        )
        if not found.is_needed:
            return found if len(found.checkpoints) > 1 and names else None
        logger.info(
            "not all models fit together: they take turns, %s first", ", ".join(sorted(found.resident))
        )
        return found

    def kept(self, checkpoints: Collection[Path]) -> Mapping[Path, int]:
        """The models that take turns and stay in main memory when they leave their devices, with bytes."""
        return {}

    @property
    def _jobs_at_once(self) -> int:
        return self.devices.num_ranks

    # Patches: copies of the weights that they change, and their factors -----------------------

    def with_patches(self, checkpoints: Collection[Path]) -> Mapping[Path, int]:
        """What each of these models and its patches take of the room. Raises: as `weights`."""
        weights = self.weights(checkpoints)
        return {path: size + self.patch_bytes(path, self.patches.of(path)) for path, size in weights.items()}

    def patch_bytes(self, checkpoint: Path, need: PatchNeed) -> int:
        """What patches take of the room."""
        # A mapped weight that changes becomes private to its rank.
        num_base = need.num_changed * (2 if need.changed and _is_mapped(checkpoint) else 1)
        return _CPU_BYTES * (num_base + need.num_factors) * self.devices.num_ranks

    def copies_on_host(self, checkpoints: Collection[Path]) -> Collection[Path]:
        """The models of which main memory has the copies of the weights that patches change on GPUs."""
        return ()

    def copies_room(self, checkpoints: Collection[Path]) -> float:
        """Main memory for copies of GPUs' weights."""
        if (available := available_bytes()) is None:
            return math.inf
        return available - (0 if self.is_loaded else self.check_waiting(checkpoints) + self.arenas_on_host)

    @property
    def arenas_on_host(self) -> int:
        """Main memory that exchanges of GPUs pin when ranks start."""
        return 0

    def lacks(self, size: int, work: int) -> bool:
        """Whether GPUs lack room for models and copies of this size, and for this work."""
        return False


@dataclass(kw_only=True)
class GpuMemory(HostMemory):
    """The memory of each GPU; slabs and writers use main memory."""

    vae_dtype: str = "auto"
    precision: Precision = Precision()
    parts: dict[Path, Mapping[str, Part]] = field(default_factory=dict)
    """Bytes of the components of models that were asked for."""
    work: dict[Path, int] = field(default_factory=dict)
    """The most that one of the jobs of a model may need besides weights."""

    @property
    def arenas_on_host(self) -> int:
        from gfgen.gfc.cuda.device_arena import arena_bytes

        return self.devices.num_ranks * arena_bytes(HOST_PLAN) if self.devices.over_host else 0

    @property
    def beside_bytes(self) -> int:
        """Memory of each GPU that is used before any model is loaded."""
        from gfgen.gfc.cuda.device_arena import arena_bytes

        devices = self.devices
        plan = default_plan(num_ranks=devices.num_ranks, are_on_gpus=True, over_host=devices.over_host)
        is_apart = devices.over_host and max(map(len, devices.near)) == 1
        return (0 if is_apart else arena_bytes(plan)) + SIDE_BYTES + CONTEXT_BYTES

    @property
    def room_bytes(self) -> int | None:
        limit = self.devices.memory_bytes
        return None if limit is None else limit - self.beside_bytes

    def weights(self, checkpoints: Collection[Path]) -> Mapping[Path, int]:
        return {
            path: sum(part.total for part in self._parts(path).values()) - self.placement(path).saved_bytes
            for path in sorted(checkpoints)
        }

    def placement(self, checkpoint: Path) -> Placement:
        placements = self.patches.placements
        if checkpoint not in placements:
            placements[checkpoint] = self._placed(checkpoint)
        return placements[checkpoint]

    def reads_s(self, models: Mapping[str, Path]) -> Mapping[str, float]:
        found, rate = dict[str, float](), self.profile.read_bytes_per_s or _READ_BYTES_PER_S
        for model, path in models.items():
            placement, parts = self.placement(path), self._parts(path)
            for name, keys in placement.streamed.items():
                if TEXT_ENCODER.fullmatch(name) is None:
                    near = placement.shared.get(name, frozenset())
                    sizes = [sum(parts[name].blocks[key] for key in each) for each in (near, keys - near)]
                    seconds = sizes[0] / _NEAR_BYTES_PER_S + sizes[1] / rate
                    found[model] = max(found.get(model, 0.0), seconds)
        return found

    def _placed(self, checkpoint: Path) -> Placement:
        parts, room_bytes = self._parts(checkpoint), self.room_bytes
        if room_bytes is None:
            return WHOLE
        work_bytes = max(_ACTIVATION_BYTES, self.work.get(checkpoint, 0))
        is_alone = self.work.keys() <= {checkpoint}  # models with shards do not take turns
        # Blocks of other ranks are read from their GPUs' memory.
        num_sharing = min(map(len, self.devices.near)) if is_alone else 1
        if (found := placed(parts, room_bytes - work_bytes)).streamed:
            left_bytes, available = room_bytes - work_bytes - _SHARING_BYTES, available_bytes()
            found = placed(parts, left_bytes, num_sharing=num_sharing)
            if found.shared and available is not None and found.streamed_bytes > available:
                alone = placed(parts, left_bytes)  # main memory or a file holds what is shared, too
                is_worse = alone.streamed_bytes > available and found.shared == found.streamed
                found = replace(found, is_on_disk=True) if is_worse else alone
        total, beside = sum(part.total for part in parts.values()), self.beside_bytes
        if (least := total - found.saved_bytes) > room_bytes:
            fewer = ", or --ranks 1, which exchanges nothing" if self.devices.num_ranks > 1 else ""
            raise InputError(
                f"{model_name(checkpoint)} ({size_in_words(total)}): at least {size_in_words(least + beside)}"
                f" needed {self.devices.where} even if all of its blocks are streamed, "
                f"{size_in_words(room_bytes + beside)} there; run a smaller model{fewer}"
            )
        in_8_bits = found.streamed.keys() & self.precision.saved_bytes(checkpoint).keys()
        blocks = [(name, key) for name in in_8_bits for key in found.streamed[name]]
        return replace(found, copied={f"{name}.{key}": parts[name].blocks[key] for name, key in blocks})

    def fit(self, jobs: Sequence[AdmittedJob], *, is_new: bool = True) -> Judged:
        self.note(() if self.is_loaded else jobs)
        return super().fit(jobs, is_new=is_new)

    def note(self, jobs: Sequence[AdmittedJob]) -> None:
        """Placements leave room for jobs like these."""
        for job in jobs:
            if (need := self.work_bytes(job)) > self.work.get(job.checkpoint, 0):
                if job.checkpoint not in self.work:
                    self.patches.placements.clear()
                self.work[job.checkpoint] = need
                self.patches.placements.pop(job.checkpoint, None)

    def _parts(self, checkpoint: Path) -> Mapping[str, Part]:
        if checkpoint not in self.parts:
            self.parts[checkpoint] = device_parts(
                checkpoint,
                counted=_random_parts(checkpoint) if self.has_random_weights else None,
                vae_dtype=self.vae_dtype,
                saved=self.precision.saved_bytes(checkpoint),
            )
        return self.parts[checkpoint]

    def job_bytes(self, job: AdmittedJob) -> int:
        """State before and after a step, or frames during a decode."""
        frames_bytes = _FRAME_COPIES * job.trajectory.frames_bytes
        return job.state_bytes + max(job.state_bytes, frames_bytes)

    def work_bytes(self, job: AdmittedJob) -> int:
        """With activations as they were measured, or guesses."""
        frames_bytes, vae_dtype = job.trajectory.frames_bytes, self.vae_dtype
        half, num_frames = 2 if vae_dtype == "bfloat16" else 1, job.spec.frames or 1
        decode_bytes = _DECODE_BYTES // half // job.spec.sample_bytes
        frame_bytes = _PIXEL_BYTES if num_frames == 1 else _FRAME_BYTES // half
        work = {
            Stage.DENOISE: _TOKEN_BYTES * job.limits.max_sequence_degree,
            Stage.DECODE: max(decode_bytes * frames_bytes, frame_bytes * frames_bytes // num_frames),
        }
        if job.trajectory.num_refined:
            share = job.flops[Stage.REFINE] / job.flops[Stage.DENOISE]
            work[Stage.REFINE] = int(work[Stage.DENOISE] * share)
        for name, stage in itertools.product((job.twin, job.spec.model), Stage):
            peak = self.profile.peaks.get(peak_key(name, job.shape, stage, vae_dtype))
            work[stage] = work.get(stage, 0) if peak is None else int(_MARGIN * peak)
        return max(self.job_bytes(job), job.state_bytes + max(work.values()))

    def check_waiting(self, checkpoints: Collection[Path]) -> int:
        available, total, arenas = available_bytes(), 0, 0 if self.is_loaded else self.arenas_on_host
        for path in sorted(checkpoints):
            placement = self.placement(path)  # models that take turns keep their copies
            total += 0 if placement.is_on_disk else placement.streamed_bytes
            if available is not None and total + arenas > available:
                exchanges = f"{size_in_words(arenas)} for exchanges (none with --transport peer)"
                of_arenas = f" and {exchanges}" if arenas else ""
                names = ", ".join(model_name(each) for each in sorted(checkpoints))
                raise InputError(
                    f"{names}: {size_in_words(total)} of main memory needed for weights that GPUs "
                    f"lack room for{of_arenas}, {size_in_words(available)} available; free some, or run a "
                    "smaller model"
                )
        return total

    def kept(self, checkpoints: Collection[Path]) -> Mapping[Path, int]:
        room, found = self.copies_room(checkpoints) * (1 - 1 / _SPARE), dict[Path, int]()
        room -= sum(need.copies_bytes(self.devices.num_ranks) for need in self.patches.by_model.values())
        for path, size in sorted(self.weights(checkpoints).items(), key=lambda each: each[1]):
            is_plain = {quantisation_in(each) for each in path.glob("*/")} <= {None, "GGUF"}
            if is_plain and not self.placement(path).streamed and size <= room - sum(found.values()):
                found[path] = size
        names = [f"{model_name(path)} ({size_in_words(size)})" for path, size in found.items()]
        stay = f"main memory keeps copies of {', '.join(names)}" if names else "main memory has room for none"
        logger.info("models that leave GPUs come back from main memory or from their files: %s", stay)
        return found

    def _with_room(self, jobs: Sequence[AdmittedJob], weights: Mapping[Path, int], *, is_new: bool) -> Judged:
        kept, too_large = self.on_gpus(jobs, weights)
        kept, too_much = split(kept, super().job_bytes, available_bytes()) if is_new else (kept, ())
        return kept, (*too_large, *too_much)

    def on_gpus(self, jobs: Sequence[AdmittedJob], weights: Mapping[Path, int]) -> Judged:
        """The jobs that fit on GPUs with their models, and problems for the others.

        The layout does not matter: each of its ranks holds all weights and all of the job's state.
        """
        beside, devices = self.beside_bytes, self.devices

        def need(job: AdmittedJob) -> int:
            return beside + weights[job.checkpoint] + self.job_bytes(job)

        return split(jobs, need, devices.memory_bytes, where=devices.where)

    @property
    def _jobs_at_once(self) -> int:
        return 1

    def patch_bytes(self, checkpoint: Path, need: PatchNeed) -> int:
        largest = max((need.largest_copied, *need.changed.values()))
        num_base = largest if need.is_on_host else need.num_changed + need.largest_copied
        num_base += _QUANTISING * largest if self.precision.quantised(checkpoint).layers else 0
        return GPU_BYTES * (num_base + need.num_factors)

    def copies_on_host(self, checkpoints: Collection[Path]) -> Collection[Path]:
        """Decides it for models without patches, too, of which any weight may be changed later."""
        if self.room_bytes is None:
            return ()
        needs = self.patches.by_model
        for path, size in self.weights(set(checkpoints) - needs.keys()).items():
            with_copies = size * (3 if self.precision.quantised(path).layers else 2)  # copies are in bf16
            needs[path] = PatchNeed(bool(self.placement(path).streamed) or self.lacks(with_copies, 0))
        return [path for path in checkpoints if needs[path].is_on_host]

    def lacks(self, size: int, work: int) -> bool:
        return (room := self.room_bytes) is not None and size + max(work, room // _SPARE) > room


def _largest_file_bytes(job: AdmittedJob) -> int:
    """Of its shared memory, which is files to the system: its frames take more than their file."""
    return max(SlabPlan.of(job.trajectory).size_bytes, job.trajectory.frames_bytes)


def split(
    jobs: Sequence[AdmittedJob],
    need: Callable[[AdmittedJob], int],
    available: int | None,
    *,
    where: str = "of memory",
) -> Judged:
    """The jobs that need at most what is available, and a problem for each of the others."""
    if available is None:
        return jobs, ()
    kept, problems = list[AdmittedJob](), list[Problem]()
    for job in jobs:
        if (size := need(job)) <= available:
            kept.append(job)
        else:
            problems.append(_too_large(job, size, available, where))
    return kept, problems


def _too_large(job: AdmittedJob, need: int, available: int, where: str) -> Problem:
    spec = job.spec
    size = spec.size_text + (f", {spec.frames} frames" if (spec.frames or 1) > 1 else "")
    less = "a smaller size, fewer frames or fewer --ranks" if (spec.frames or 1) > 1 else "a smaller size"
    sizes = f"at least {size_in_words(need)} {where} needed, {size_in_words(available)} available"
    return Problem(spec.line, "size", size, f"{sizes}; {less} would help")


@functools.cache
def _is_mapped(checkpoint: Path) -> bool:
    try:
        return footprint(checkpoint).shared_bytes > 0
    except ModelError:  # random weights have no files
        return False


def _random_footprint(checkpoint: Path) -> Footprint:
    """Each rank draws its own weights, in fp32."""
    return Footprint(0, 4 * sum(part.total for part in _random_parts(checkpoint).values()))


def _random_parts(checkpoint: Path) -> Mapping[str, Part]:
    """Parameters by component; empty if neither gfgen.json nor weight files give the counts."""
    if found := noted_parts(read_checkpoint(checkpoint, with_weights=False).settings):
        return found
    try:
        return count_parts(checkpoint)
    except ModelError:
        return {}
