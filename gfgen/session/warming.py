"""Warm-up steps before a run on GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CPU, Devices
from gfgen.runtime.ipc.messages import WarmUp
from gfgen.runtime.processes import starting
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.worker.warming import degrees_at_hand, warm_ups
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)


def warm_up(
    pool: WorkerPool,
    jobs: Sequence[AdmittedJob],
    *,
    devices: Devices,
    policy: NamedPolicy,
    signals: SignalPipe | None = None,
) -> None:
    """Run steps like those of the jobs on all ranks; CPU ranks need none."""
    choose = warm_ups_of(devices, policy)
    jobs = [job for job in jobs if str(job.checkpoint) in pool.models.checkpoints]
    if choose is None or not jobs:
        return
    if not (items := choose(jobs)):
        return
    began_s = time.monotonic()
    logger.info("warming up for %s", counted(len(items), "shape"))
    for number, (item, answer) in enumerate(starting.warm_up(pool, items, signals), start=1):
        if answer.reason is None:
            logger.info("warming up: %d of %d, %s", number, len(items), _name_of(item))
        else:
            logger.warning("warming up: %s: %s; its jobs run anyway", _name_of(item), answer.reason)
    logger.info("warmed up in %.1f s", time.monotonic() - began_s)


def warm_ups_of(
    devices: Devices, policy: NamedPolicy
) -> Callable[[Sequence[AdmittedJob]], Sequence[WarmUp]] | None:
    """The function that chooses warm-up steps for jobs; None on CPU ranks."""
    if devices.kind == CPU:
        return None
    widest = max(map(len, devices.islands))
    degrees = degrees_at_hand(policy.name, policy.options, widest)
    return lambda jobs: warm_ups(jobs, degrees)


def _name_of(item: WarmUp) -> str:
    """Such as 'wan2.2-ti2v-5b 832x480x49'."""
    spec = item.spec
    frames = f"x{spec.frames}" if spec.frames and spec.frames > 1 else ""
    return f"{spec.model or Path(item.checkpoint).name} {spec.width}x{spec.height}{frames}"
