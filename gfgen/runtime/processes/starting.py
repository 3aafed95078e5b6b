"""Between runs: turn the pool's loop until ranks have started, and prepared steps of the jobs."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.models.geometry.checkpoint import model_name
from gfgen.runtime.ipc.messages import WarmedUp, WarmUp
from gfgen.runtime.processes.child import STARTS, Lost, RankProcess
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0  # while ranks start, the log says this often how far they are


def wait_ready(pool: WorkerPool, signals: SignalPipe | None = None) -> None:
    """Wait until all workers know each other and have loaded models, except those that none can load.

    A rank that fails too often, or is not ready in time, is retired.
    Raises: WorkerError when no rank, no model or not all needed ranks are left; InterruptedRunError.
    """
    began_s = waited_since_s = logged_s = pool.clock.now_s
    pool.begin_start()
    while any(worker.phase in STARTS for worker in pool.living):
        if (now_s := pool.clock.now_s) > waited_since_s + pool.patience.starting_s:
            leave_behind(pool, f"the models are not loaded after {pool.patience.starting_s:g} s")
            waited_since_s = now_s
        elif now_s > logged_s + LOG_EVERY_S:
            logger.info("still starting after %.0f s: %s", now_s - began_s, _how_far(pool))
            logged_s = now_s
        hear(pool, signals, doing="the models were loading")


def warm_up(
    pool: WorkerPool, items: Sequence[WarmUp], signals: SignalPipe | None = None
) -> Iterator[tuple[WarmUp, WarmedUp]]:
    """Prepare steps on all workers; yields each item when all are done. Raises: as `hear`; WorkerError."""
    for worker in pool.living:
        worker.prepare(items)
    left, heard_s = list(items), pool.clock.now_s
    answers: dict[int, WarmedUp] = {}
    while left:
        for _, message in hear(pool, signals, doing="ranks were warmed up"):
            heard_s = pool.clock.now_s
            if isinstance(message, WarmedUp) and (message.reason or message.number not in answers):
                answers[message.number] = message
        for item in left.copy():
            if not any(item in worker.requests for worker in pool.living):
                left.remove(item)
                yield item, answers.get(item.number, WarmedUp(item.number, 0.0))
        if left and pool.clock.now_s > heard_s + pool.patience.warm_up_s:
            raise WorkerError(f"no rank has run a step within {pool.patience.warm_up_s:g} s of the last one")
    wait_ready(pool, signals)


def hear(pool: WorkerPool, signals: SignalPipe | None, *, doing: str) -> list[tuple[RankProcess, Any]]:
    """One turn of the pool's loop. Raises: InterruptedRunError; WorkerError without all that is needed."""
    pool.meeting.held_back.clear()
    found = []
    with contextlib.ExitStack() as stack:
        if signals is not None:
            pool.listen(signals)
            stack.callback(pool.ignore, signals)
        for source, what in pool.turn():
            if source is signals and signals is not None and (numbers := signals.take()):
                message = f"stopped while {doing}; nothing was started"
                raise InterruptedRunError(message, signal_number=numbers[0])
            if isinstance(source, RankProcess):
                found.append((source, what))
    for worker, what in found:
        if isinstance(what, Lost):
            reason = f"{worker.name}: {what.reason}"
            is_missing = what.is_retired and (pool.settings.are_all_needed or not pool.living)
            if is_missing or (pool.models.unloadable and not pool.models.checkpoints):
                raise WorkerError(reason)
            text = "it stays away" if what.is_retired else "a new worker is started"
            logger.warning("%s; %s", reason, text)
    return found


def leave_behind(pool: WorkerPool, reason: str) -> None:
    """Retire ranks that are not ready. Raises: WorkerError when none, or not all needed ones, are left."""
    late = [worker for worker in pool.living if not worker.has_started]
    late = late or [pool.workers[rank] for each in pool.living for rank in each.unknown_to]
    late = list(dict.fromkeys(late))  # several may wait for the same one
    reason = f"{', '.join(worker.name for worker in late)}: {reason}"
    if pool.settings.are_all_needed or len(late) == len(pool.living):
        raise WorkerError(reason)
    for worker in late:
        pool.retire(worker)
    logger.error("%s; the others go on without", reason)


def _how_far(pool: WorkerPool) -> str:
    """Such as '1 of 4 ranks ready, 3 loading qwen-image'."""
    num_ready = sum(worker.has_started for worker in pool.living)
    others = Counter(
        "not loading yet" if worker.loading is None else f"loading {model_name(Path(worker.loading))}"
        for worker in pool.living
        if not worker.has_started
    )
    parts = [f"{num_ready} of {counted(pool.num_ranks, 'rank')} ready"]
    return ", ".join([*parts, *(f"{number} {doing}" for doing, number in others.items())])
