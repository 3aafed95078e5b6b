"""Previews of running jobs, from the latents that ranks leave in shared memory after each step.

They cost neither ranks nor control loop: this process maps a job's slab only when a preview is requested, and
only to read it. The colours of a model's latents come with the model, or are fitted once in a process of low
priority and kept in gfgen's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import math
import mmap
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.system.lifeline import module_command, module_environment
from gfgen.system.machine import cache_dir

logger = logging.getLogger(__name__)

PIPELINES = (
    "WanPipeline",
    "WanImageToVideoPipeline",
    "QwenImagePipeline",
    "FluxPipeline",
    "StableDiffusion3Pipeline",
)
"""Pipelines whose latents colour_fit.py normalises as they do, and `latent_picture` unpacks."""
FIRST_STEP = 1
"""Finished steps from which there is something to see."""
SMALL_SIDE = 320
OWN_COLOURS = "vae/latent_colours.json"
"""In a checkpoint that brings them."""


class Previews:
    """Previews of the open jobs. `run_pid` is the process that owns the slabs; by default, the parent."""

    def __init__(self, *, run_pid: int | None = None) -> None:
        self._fds = Path(f"/proc/{run_pid or os.getppid()}/fd")
        self._jobs: dict[str, AdmittedJob] = {}
        self._pipelines: dict[Path, str | None] = {}
        self._fits: dict[Path, asyncio.Task[None]] = {}
        self._colours: dict[Path, LatentColours] = {}

    def add(self, job: AdmittedJob) -> bool:
        """Know an open job; whether there are previews of it."""
        if self._pipeline(job.checkpoint) not in PIPELINES:
            return False
        self._jobs[job.job_id] = job
        return True

    def forget(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)

    async def picture(self, job_id: str, *, kind: str = "webp", is_small: bool = True) -> bytes | None:
        """The job as it looks now, small or in its size; None if there is nothing to see yet."""
        job = self._jobs.get(job_id)
        colours = None if job is None else await self._colours_of(job.checkpoint)
        if job is None or colours is None:
            return None
        return await asyncio.to_thread(self._draw, job, colours, kind, is_small)

    def _draw(self, job: AdmittedJob, colours: LatentColours, kind: str, is_small: bool) -> bytes | None:
        from PIL import Image

        fd = self._open_slab(job.job_id)
        if fd is None:
            return None
        plan, width, height = SlabPlan.of(job.trajectory), job.spec.width or 1, job.spec.height or 1
        try:
            pixels = latent_picture(fd, plan, colours, width=width, height=height)
        except Exception as error:  # a rank writes at the same time, so anything may be read
            logger.debug("no preview of %s: %s", job.job_id, error)
            return None
        finally:
            os.close(fd)
        if pixels is None:
            return None
        scale = min(1.0, SMALL_SIDE / max(width, height)) if is_small else 1.0
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        content = io.BytesIO()
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(content, kind.upper(), quality=80)
        return content.getvalue()

    def _open_slab(self, job_id: str) -> int | None:
        """A descriptor of the job's slab, which is found by its name; None if it has none now."""
        name = f"/memfd:gfgen-{job_id[:100]} (deleted)"
        try:
            numbers = os.listdir(self._fds)
        except OSError as error:
            logger.debug("the run's slabs cannot be read: %s", error)
            return None
        for number in numbers:
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(self._fds / number) == name:
                    return os.open(self._fds / number, os.O_RDONLY)
        return None

    def _pipeline(self, checkpoint: Path) -> str | None:
        if checkpoint not in self._pipelines:
            try:
                index: dict[str, Any] = json.loads((checkpoint / "model_index.json").read_bytes())
            except (OSError, ValueError):
                index = {}
            self._pipelines[checkpoint] = index.get("_class_name")
        return self._pipelines[checkpoint]

    async def _colours_of(self, checkpoint: Path) -> LatentColours | None:
        """The colours of a model; None while they are fitted, and if that failed."""
        if checkpoint not in self._colours:
            path = next(filter(Path.exists, (checkpoint / OWN_COLOURS, _cached(checkpoint))), None)
            if path is not None:
                self._colours[checkpoint] = LatentColours.of(json.loads(path.read_bytes()))
            elif checkpoint not in self._fits:
                self._fits[checkpoint] = asyncio.create_task(_fit(checkpoint))
        return self._colours.get(checkpoint)


async def _fit(checkpoint: Path) -> None:
    command = module_command("gfgen.models.loading.colour_fit", str(checkpoint), str(_cached(checkpoint)))
    logger.info("fitting the colours of previews of %s", checkpoint.name)
    process = await asyncio.create_subprocess_exec(
        *command, env=module_environment(), stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    _, errors = await process.communicate()
    if process.returncode:
        reason = (errors.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        logger.warning("no previews of %s: %s", checkpoint.name, reason)


def _cached(checkpoint: Path) -> Path:
    """Where the colours of a checkpoint are kept: another place whenever the files of its VAE change."""
    mark = hashlib.sha256(str(checkpoint.resolve()).encode())
    for path in sorted((checkpoint / "vae").glob("*")):
        stat = path.stat()
        mark.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return cache_dir() / "previews" / f"{mark.hexdigest()[:24]}.json"


_SAMPLE = "sample"
"""As `SAMPLE` in models/families/adapter.py, which imports torch."""
_PREDICTED = "model_output_"
"""UniPC keeps its last predictions of the finished latents under this name and a number, which rises."""
_NUM_BANKS = 3
_NUM_TRIES = 3
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class LatentColours:
    """RGB in [-1, 1] of a latent pixel: latents_C @ matrix_C3 + offset_3.

    Source: models/loading/colour_fit.py.
    """

    matrix_C3: np.ndarray
    offset_3: np.ndarray

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> LatentColours:
        return cls(np.array(content["matrix"], np.float32), np.array(content["offset"], np.float32))


class _Unpickler(pickle.Unpickler):
    """Reads the metas of a slab: plain values and torch's dtypes, which become their names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            return name
        raise pickle.UnpicklingError(f"{module}.{name} in the meta of a slab")


def latent_picture(
    fd: int, plan: SlabPlan, colours: LatentColours, *, width: int, height: int
) -> np.ndarray | None:
    """uint8 [H, W, 3] of what the latents in a job's slab will become; None if they cannot be shown yet.

    A linear map makes a pixel of each latent pixel. Of a video it is the middle frame. `width` and `height`
    are those of the job.
    """
    states = [
        {name: _middle(x, colours.matrix_C3.shape[0], aspect=height / width) for name, x in each.items()}
        for each in _latest_states(fd, plan)
    ]
    latents_CHW = _expected(states)
    if latents_CHW is None:
        return None
    rgb_HW3 = np.einsum("chw,ck->hwk", latents_CHW, colours.matrix_C3) + colours.offset_3
    return np.asarray(np.clip(np.nan_to_num(rgb_HW3), -1, 1) * 127.5 + 127.5, dtype=np.uint8)


def _expected(states: list[dict[str, np.ndarray | None]]) -> np.ndarray | None:
    """An estimate of the finished latents from the last two states, the latest first; None if there is none.

    Some solvers keep predictions of the finished latents. Others go along a line from noise to latents: the
    estimate continues the last step to where least noise is left, that is, where neighbours differ least.
    """
    if not states:
        return None
    if predicted := sorted(name for name in states[0] if name.startswith(_PREDICTED)):
        return states[0][predicted[-1]]
    samples = [state.get(_SAMPLE) for state in states]
    if len(samples) < 2 or samples[0] is None or samples[1] is None:
        return None
    latest, step = samples[0], samples[0] - samples[1]
    rough, rough_step = _differences(latest), _differences(step)
    further = -float(rough @ rough_step) / max(float(rough_step @ rough_step), 1e-9)
    return np.asarray(latest + max(0.0, further) * step)


def _differences(x_CHW: np.ndarray) -> np.ndarray:
    return np.concatenate([np.diff(x_CHW, axis=1).ravel(), np.diff(x_CHW, axis=2).ravel()])


def _latest_states(fd: int, plan: SlabPlan) -> list[dict[str, np.ndarray]]:
    """Copies of the last two complete latents in a slab, the latest first.

    A rank may begin to overwrite the older one before its word changes; then a preview may look torn.
    """
    slab = Slab(
        fd, plan, access=mmap.ACCESS_READ, loads=lambda content: _Unpickler(io.BytesIO(content)).load()
    )
    for _ in range(_NUM_TRIES):
        words = [slab.producer("latents", bank) for bank in range(_NUM_BANKS)]
        banks = sorted(filter(words.__getitem__, range(_NUM_BANKS)), key=words.__getitem__, reverse=True)[:2]
        states = [_arrays(slab, bank) for bank in banks]
        if words == [slab.producer("latents", bank) for bank in range(_NUM_BANKS)]:
            return states
    return []


def _arrays(slab: Slab, bank: int) -> dict[str, np.ndarray]:
    """Copies of the sample and the predictions of one bank, as in worker/jobs.py `fetch`."""
    (layout, _), memory, position = slab.fetch("latents", bank)
    found = {}
    for name, dtype, shape in layout:
        kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        count = math.prod(shape)
        if name == _SAMPLE or name.startswith(_PREDICTED):
            x = np.frombuffer(memory, kind, count, position)
            if dtype == "bfloat16":  # which numpy lacks: it is the upper half of a float32
                x = (x.astype(np.uint32) << 16).view(np.float32)
            found[name] = x.astype(np.float32).reshape(shape)
        position += -(-count * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    return found


def _middle(x: np.ndarray, channels: int, *, aspect: float) -> np.ndarray | None:
    """The middle frame [C, H, W] of latents [1, C, T, H, W], [1, C, H, W] or, in tokens, [1, S, 4 * C]."""
    if x.ndim == 3 and x.shape[2] == 4 * channels:
        rows = round(math.sqrt(x.shape[1] * aspect))
        if rows * (x.shape[1] // max(1, rows)) != x.shape[1]:
            return None
        tokens = x[0].reshape(rows, -1, channels, 2, 2)
        return np.asarray(tokens.transpose(2, 0, 3, 1, 4).reshape(channels, 2 * rows, -1))
    if x.ndim in (4, 5) and x.shape[1] == channels:
        return np.asarray(x[0] if x.ndim == 4 else x[0, :, x.shape[2] // 2])
    return None
