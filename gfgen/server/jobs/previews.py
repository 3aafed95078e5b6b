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
import os
from pathlib import Path
from typing import Any

from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.ipc.slab import SlabPlan
from gfgen.server.jobs.latents import LatentColours, latent_picture
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
"""Pipelines whose latents colour_fit.py normalises as they do, and latents.py unpacks."""
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
            for path in (checkpoint / OWN_COLOURS, _cached(checkpoint)):
                if path.exists():
                    self._colours[checkpoint] = LatentColours.of(json.loads(path.read_bytes()))
                    break
            else:
                if checkpoint not in self._fits:
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
