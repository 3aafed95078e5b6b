"""Between runs: wait until ranks have started, and let them prepare steps of the jobs at hand.

Both turn the pool's loop until no rank has anything left to do.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from gfgen.errors import InterruptedRunError, WorkerError
from gfgen.models.geometry.checkpoint import model_name
from gfgen.runtime.ipc.messages import WarmedUp, WarmUp
from gfgen.runtime.processes.child import STARTS, TRANSITIONS, Lost, Phase, RankProcess
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
"""While ranks start, the log says this often how far they are."""


def wait_ready(
    pool: WorkerPool,
    signals: SignalPipe | None = None,
    *,
    patience_s: float | None = None,
    log_every_s: float = LOG_EVERY_S,
) -> None:
    """Wait until all workers know each other and have loaded their models.

    Models that no rank can load are left out (`HeldModels.unloadable`). A worker that fails is started again.
    A rank that fails too often, or is not ready in time, is retired unless all are needed.

    Raises: WorkerError with the reason when no rank, no model or not all needed ranks are left;
    InterruptedRunError when a signal comes first.
    """
    patience_s = pool.patience.starting_s if patience_s is None else patience_s
    began_s = time.monotonic()
    deadline_s, logged_s = began_s + patience_s, began_s
    pool.begin_start()
    found = heard(
        pool,
        signals,
        doing="the models were loading; nothing was started",
        left_s=lambda: min(deadline_s, logged_s + log_every_s) - time.monotonic(),
    )
    with contextlib.closing(found):
        while any(worker.phase in STARTS for worker in pool.living):
            what = next(found)
            if what is not None:
                _note(pool, *what, doing="started")
            elif (now_s := time.monotonic()) < deadline_s:
                logger.info("still starting after %.0f s: %s", now_s - began_s, _how_far(pool))
                logged_s = now_s
            else:
                leave_behind(pool, f"the models are not loaded after {patience_s:g} s")


def warm_up(
    pool: WorkerPool,
    items: Sequence[WarmUp],
    signals: SignalPipe | None = None,
    *,
    patience_s: float | None = None,
) -> Iterator[tuple[WarmUp, WarmedUp]]:
    """Prepare steps on all workers; yields each item when all of them have it, or when one cannot.

    A worker that dies is started again, as in `wait_ready`, without these steps.

    Raises: WorkerError when no rank or not all needed ranks are left, or when none answers in time;
    InterruptedRunError at a signal.
    """
    patience_s = pool.patience.warm_up_s if patience_s is None else patience_s
    ready = [worker for worker in pool.living if Phase.WARMING in TRANSITIONS[worker.phase]]
    awaited = {item.number: {worker.rank for worker in ready} for item in items}
    for worker in ready if items else ():
        worker.warm_up(items)
    found = heard(pool, signals, doing="ranks were warmed up; nothing was started", left_s=lambda: patience_s)
    with contextlib.closing(found):
        while awaited:
            what = next(found)
            if what is None:
                raise WorkerError(f"no rank has run a step within {patience_s:g} s of the last one")
            worker, message = what
            _note(pool, worker, message, doing="was warmed up")
            answers = [message] if isinstance(message, WarmedUp) and message.number in awaited else []
            if isinstance(message, Lost):
                answers = [WarmedUp(number, 0.0) for number in awaited]
            for answer in answers:
                awaited[answer.number].discard(worker.rank)
                if answer.reason is not None or not awaited[answer.number]:
                    del awaited[answer.number]
                    yield next(item for item in items if item.number == answer.number), answer
    wait_ready(pool, signals)


def heard(
    pool: WorkerPool, signals: SignalPipe | None, *, doing: str, left_s: Callable[[], float]
) -> Generator[tuple[RankProcess, Any] | None, None, None]:
    """What the pool's loop brings of workers, without end; None when nothing comes within `left_s()`.

    Raises: InterruptedRunError when a signal comes.
    """
    with contextlib.ExitStack() as stack:
        if signals is not None:
            pool.listen(signals)
            stack.callback(pool.ignore, signals)
        while True:
            pool.meeting.let_in()
            began_s, wait_s, is_quiet = time.monotonic(), left_s(), True
            for source, what in pool.turn(wait_s):
                is_quiet = False
                if source is signals and signals is not None:
                    if numbers := signals.take():
                        raise InterruptedRunError(f"stopped while {doing}", signal_number=numbers[0])
                elif isinstance(source, RankProcess):
                    yield source, what
            if is_quiet and time.monotonic() >= began_s + wait_s:
                yield None


def leave_behind(pool: WorkerPool, reason: str) -> None:
    """Retire the ranks that are not ready.

    Raises: WorkerError when no rank or not all needed ranks are left.
    """
    late = [worker for worker in pool.living if not worker.has_started]
    late = late or [pool.workers[rank] for each in pool.living for rank in each.unknown_to]
    late = list(dict.fromkeys(late))  # several may wait for the same one
    reason = f"{', '.join(worker.name for worker in late)}: {reason}"
    if pool.settings.are_all_needed or len(late) == len(pool.living):
        raise WorkerError(reason)
    for worker in late:
        pool.retire(worker)
    logger.error("%s; the others go on without", reason)


def _note(pool: WorkerPool, worker: RankProcess, happened: Any, *, doing: str) -> None:
    """Judge the death of a worker that ran no tasks.

    Raises: WorkerError when no rank, no model or not all needed ranks are left.
    """
    if not isinstance(happened, Lost):
        return
    how = "cannot start" if happened.was_told else f"died while it {doing}"
    reason = f"{worker.name} {how}: {happened.reason}"
    pool.models.unloadable |= dict.fromkeys(happened.unloadable, reason)
    is_missing = happened.is_retired and (pool.settings.are_all_needed or not pool.living)
    if is_missing or (happened.unloadable and not pool.models.checkpoints):
        raise WorkerError(reason)
    logger.warning("%s; %s", reason, "it stays away" if happened.is_retired else "a new worker is started")


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
