"""Check at admission, before a model is loaded, whether there is enough memory.

CPU ranks need at least the weights (mapped ones count once for all ranks), the job's state in its slab, and
its frames during a decode. Each GPU holds all weights (with --offload neither text encoders nor idle experts,
which main memory then holds), and the frames during a decode; slabs and writers use main memory. Activations
come on top but are unknown: a job that is refused here could not have run, and a job that passes may still
fail at a task. Models that do not fit together take turns (residency.py).
"""

from __future__ import annotations

import re
import resource
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gfgen.errors import InputError, ModelError, Problem
from gfgen.models.families.precision import FP8, precision_of, saved_bytes
from gfgen.models.geometry.checkpoint import model_name, read_checkpoint
from gfgen.models.geometry.weights import Footprint, count_parameters, device_bytes, footprint, offloaded
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.ipc.slab import SlabPlan
from gfgen.system.wording import counted, size_in_words

_FRAME_COPIES = 5
"""Bytes per byte of uint8 frames: 4 as fp32 on their rank, and 1 in the writer's memory."""
_DECODE_BYTES = 100
"""Peak bytes of an fp32 decode per byte of its frames: 704x1280x81, 219 MB, took 23 GB on an H200."""
_MAX_CGROUP_DEPTH = 32
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups writes a number near 2**63 where there is no limit."""
LEAST_ADDRESSES_BYTES = 1_500_000_000
"""For a CPU rank with the built-in model: with 1.0 GB it does not start, with 1.3 GB its tasks fail."""
CONTEXT_BYTES = 600_000_000
"""GPU memory of CUDA and its libraries; a low estimate, like all others here."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can still get, within its cgroups' limits; None if the system does not say.

    Page cache that can be dropped counts as available.
    """
    rooms = [_machine_room(root / "proc/meminfo"), *_cgroup_rooms(root)]
    return min((room for room in rooms if room is not None), default=None)


def check_addresses() -> None:
    """Raises: InputError if `ulimit -v` is below the address space that any rank needs."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and most < LEAST_ADDRESSES_BYTES:
        raise InputError(
            f"a process may take {size_in_words(most)} of memory here (ulimit -v); each rank needs at least "
            f"{size_in_words(LEAST_ADDRESSES_BYTES)}, and more for larger models: raise the limit"
        )


def check_models(
    checkpoints: Collection[Path],
    *,
    num_ranks: int,
    available: int | None,
    has_random_weights: bool = False,
) -> dict[Path, int]:
    """Bytes that each of these models takes on all ranks.

    Raises: InputError if one takes more than is available; it says how many ranks would fit.
    """
    measure = _random_footprint if has_random_weights else footprint
    prints = {checkpoint: measure(checkpoint) for checkpoint in sorted(checkpoints)}
    needs = {checkpoint: found.on(num_ranks) for checkpoint, found in prints.items()}
    for checkpoint, need in needs.items():
        if available is None or need <= available:
            continue
        fitting = [ranks for ranks in range(1, num_ranks) if prints[checkpoint].on(ranks) <= available]
        help_ = (
            f"--ranks {fitting[-1]} would fit"
            if fitting
            else "free memory, raise --memory, or run smaller models"
        )
        raise InputError(
            f"{model_name(checkpoint)} on {counted(num_ranks, 'rank')}: at least {size_in_words(need)} of "
            f"memory needed, {size_in_words(available)} available; {help_}"
        )
    return needs


def check_together(needs: Mapping[Path, int], *, available: int | None) -> None:
    """Raises: InputError if all models at once take more than is available."""
    need = sum(needs.values())
    if available is not None and need > available:
        names = ", ".join(model_name(checkpoint) for checkpoint in sorted(needs))
        raise InputError(
            f"{names}: at least {size_in_words(need)} of memory needed for all of them at once, "
            f"{size_in_words(available)} available; use one after the other"
        )


def refuse_large(
    jobs: Sequence[AdmittedJob], *, models_bytes: Mapping[Path, int], available: int | None
) -> tuple[tuple[AdmittedJob, ...], tuple[Problem, ...]]:
    """The jobs that fit in memory with their models, and a problem for each of the others."""
    if available is None:
        return tuple(jobs), ()
    needs = {job.job_id: models_bytes.get(job.checkpoint, 0) + job_bytes(job) for job in jobs}
    problems = tuple(
        _problem(job, needs[job.job_id], available) for job in jobs if needs[job.job_id] > available
    )
    return tuple(job for job in jobs if needs[job.job_id] <= available), problems


def check_models_on_gpu(
    checkpoints: Collection[Path],
    *,
    memory_bytes: int | None,
    beside_bytes: int,
    has_random_weights: bool = False,
    vae_dtype: str = "auto",
    precision: Sequence[str] = (),
    is_offloaded: bool = False,
    where: str = "on each GPU",
) -> dict[Path, int]:
    """Bytes of a rank's GPU that each model's weights take, in addition to `beside_bytes`.

    Raises: InputError if one takes more than the `memory_bytes` of each rank.
    """
    sizes: dict[Path, int] = {}
    for path in sorted(checkpoints):
        parts = _gpu_bytes(path, has_random_weights=has_random_weights, vae_dtype=vae_dtype)
        if precision_of(precision, path) == FP8:
            saved = saved_bytes(path)
            parts = {name: size - saved.get(name, 0) for name, size in parts.items()}
        can_leave = offloaded(parts).on(1)
        size = sizes[path] = sum(parts.values()) - (can_leave if is_offloaded else 0)
        need = size + beside_bytes
        if memory_bytes is not None and need > memory_bytes:
            would_fit = not is_offloaded and need - can_leave <= memory_bytes
            raise InputError(
                f"{model_name(path)} ({size_in_words(size)}): at least {size_in_words(need)} needed {where}, "
                f"{size_in_words(memory_bytes)} there; "
                + ("--offload would fit" if would_fit else "run a smaller model")
            )
    return sizes


def check_offloaded(
    checkpoints: Collection[Path],
    *,
    num_ranks: int,
    available: int | None,
    has_random_weights: bool = False,
) -> int:
    """Bytes of main memory that `--offload` takes for all of these models.

    Raises: InputError if one takes more than is available.
    """
    total = 0
    for path in sorted(checkpoints):
        parts = _gpu_bytes(path, has_random_weights=has_random_weights, vae_dtype="auto")
        need = offloaded(parts).on(num_ranks)
        total += need
        if available is not None and need > available:
            raise InputError(
                f"--offload: {model_name(path)} on {counted(num_ranks, 'rank')} needs at least "
                f"{size_in_words(need)} of main memory, {size_in_words(available)} available; fewer --ranks "
                "or no --offload would help"
            )
    return total


def refuse_large_on_gpu(
    jobs: Sequence[AdmittedJob],
    *,
    models_bytes: Mapping[Path, int],
    beside_bytes: int,
    memory_bytes: int | None,
    where: str = "on each GPU",
) -> tuple[tuple[AdmittedJob, ...], tuple[Problem, ...]]:
    """The jobs that fit on a GPU with their models, and a problem for each of the others.

    The layout does not matter: each of its ranks holds all weights and all of the job's state.
    """
    if memory_bytes is None:
        return tuple(jobs), ()
    needs = {job.job_id: beside_bytes + models_bytes[job.checkpoint] + gpu_job_bytes(job) for job in jobs}
    problems = tuple(
        _problem(job, needs[job.job_id], memory_bytes, where=where)
        for job in jobs
        if needs[job.job_id] > memory_bytes
    )
    return tuple(job for job in jobs if needs[job.job_id] <= memory_bytes), problems


def refuse_lora(job: AdmittedJob, lora_bytes: int, *, beside: int | None, available: int) -> Problem:
    """The problem of a job whose LoRAs need too much.

    `beside` is for its model and its state; None: GPUs have these, and main memory lacks room for copies.
    """
    kind, others = "main memory", "which do not fit on GPUs"
    if beside is not None:
        kind, others = "memory", f"beside {size_in_words(beside)} for the model and the job"
    accepted = (
        f"at least {size_in_words(lora_bytes)} of {kind} needed for copies of the weights that LoRAs change, "
        f"{others}, {size_in_words(available)} available; fewer --ranks, or LoRAs of fewer layers would help"
    )
    return Problem(job.spec.line, "lora", None, accepted)


def gpu_work_bytes(job: AdmittedJob) -> int:
    """A job's peak memory, for choosing the models that stay resident with it."""
    return max(gpu_job_bytes(job), job.state_bytes + _DECODE_BYTES * job.trajectory.frames_bytes)


def gpu_job_bytes(job: AdmittedJob) -> int:
    """State before and after a step, or frames during a decode."""
    return max(2 * job.state_bytes, job.state_bytes + _FRAME_COPIES * job.trajectory.frames_bytes)


def job_bytes(job: AdmittedJob) -> int:
    """State and frames of one job."""
    known = tuple(replace(artifact, room_bytes=0) for artifact in job.trajectory.artifacts)
    slab = SlabPlan.of(replace(job.trajectory, artifacts=known))
    return slab.size_bytes + _FRAME_COPIES * job.trajectory.frames_bytes


def _gpu_bytes(checkpoint: Path, *, has_random_weights: bool, vae_dtype: str) -> Mapping[str, int]:
    """By component."""
    num_parameters = _random_parameters(checkpoint) if has_random_weights else None
    return device_bytes(checkpoint, num_parameters=num_parameters, vae_dtype=vae_dtype)


def _random_footprint(checkpoint: Path) -> Footprint:
    """Each rank draws its own weights, in fp32."""
    return Footprint(0, 4 * sum(_random_parameters(checkpoint).values()))


def _random_parameters(checkpoint: Path) -> Mapping[str, int]:
    """By component; empty if neither gfgen.json nor weight files give the counts."""
    settings = read_checkpoint(checkpoint, with_weights=False).settings
    if "num_parameters" in settings:
        return dict(settings["num_parameters"])
    try:
        return count_parameters(checkpoint)
    except ModelError:
        return {}


def _problem(job: AdmittedJob, need: int, available: int, *, where: str = "of memory") -> Problem:
    spec = job.spec
    size = f"{spec.width}x{spec.height}" + (f", {spec.frames} frames" if (spec.frames or 1) > 1 else "")
    less = "a smaller size, fewer frames or fewer --ranks" if (spec.frames or 1) > 1 else "a smaller size"
    sizes = f"at least {size_in_words(need)} {where} needed, {size_in_words(available)} available"
    accepted = f"{sizes}; {less} would help"
    return Problem(spec.line, "size", size, accepted)


def _machine_room(meminfo: Path) -> int | None:
    room = _number(_text(meminfo), "MemAvailable:")
    return None if room is None else room * 1024


def _cgroup_rooms(root: Path) -> list[int | None]:
    """The rest of the limit of each memory cgroup of this process (versions 1 and 2)."""
    rooms: list[int | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = Path(path.lstrip("/")).parts[:_MAX_CGROUP_DEPTH]
        rooms += [_room(base.joinpath(*parts[:depth]), *names) for depth in range(len(parts) + 1)]
    return rooms


def _room(folder: Path, limit_name: str, used_name: str) -> int | None:
    limit = _text(folder / limit_name).strip()
    if not limit.isdigit() or int(limit) >= _NO_LIMIT:
        return None
    used = _text(folder / used_name).strip()
    if not used.isdigit():
        return None
    stat = _text(folder / "memory.stat")
    cache = (_number(stat, "inactive_file") or 0) + (_number(stat, "active_file") or 0)
    return max(0, int(limit) - int(used) + cache)


def _number(text: str, name: str) -> int | None:
    """The number behind this name in a text with a name and a number per line."""
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
