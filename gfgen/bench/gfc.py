"""`gfgen bench gfc`: the fastest kernel per message size on this machine's GPUs (gfc/cuda/measure.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gfgen.errors import InputError
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda import measure
from gfgen.gfc.cuda.driver import driver
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.gfc.cuda.selector import FLAGGED_LIMIT, KernelChoice, Rule, TableKey, store_rules
from gfgen.system.wording import counted

KIB, MIB = 1 << 10, 1 << 20
PAIR_SIZES = [KIB << shift for shift in (0, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)]
CHOICES = [
    KernelChoice("flagged", 32),
    KernelChoice("flagged", 132),
    KernelChoice("threads", 132),
    *(KernelChoice("bulk", 132, tile << 10) for tile in (8, 16, 24, 48)),
    *(KernelChoice("bulk", 132, tile << 10, in_turn=True) for tile in (16, 24, 48)),
]
_log = logging.getLogger(__name__)


def check_num_gpus(num_gpus: int, *, at_least: int = 1) -> None:
    """Raises: InputError for more GPUs than there are, or fewer than the benchmark needs."""
    found = driver().num_devices
    if not at_least <= num_gpus <= found:
        needed = f"this needs {at_least} at least; " if at_least > 1 else ""
        raise InputError(f"--gpus {num_gpus}: {needed}this machine has {counted(found, 'NVIDIA GPU')}")


def tune(num_gpus: int) -> Path:
    """Store the best kernels by message size, for both patterns together, in the table of this device.

    Raises: InputError where there are fewer than two GPUs.
    """
    check_num_gpus(num_gpus, at_least=2)
    data_bytes = int(2.1 * num_gpus * 4 * max(PAIR_SIZES))
    ranks = CudaRanks(num_gpus, ArenaPlan(data_bytes=data_bytes, post_bytes=8 * MIB))
    rules: dict[TableKey, tuple[Rule, ...]] = {}
    try:
        (name,) = ranks.run([0], measure.device_name)
        for degree in range(2, num_gpus + 1):
            members, rows = tuple(range(degree)), []
            for pair_bytes in PAIR_SIZES:
                dispatch = ranks.next_dispatch()
                times = ranks.run(members, measure.tune_cell, members, dispatch, pair_bytes, CHOICES)
                rows.append(
                    [[max(rank[idx][k] for rank in times) for k in range(4)] for idx in range(len(CHOICES))]
                )
            for in_arena, columns in ((True, (0, 1)), (False, (2, 3))):
                rules[degree, in_arena] = _rules(rows, columns)
            _log.info("tuned %d GPUs", degree)
    finally:
        ranks.close()
    return store_rules(name, rules)


def _rules(rows: Sequence[Sequence[Sequence[float]]], columns: tuple[int, int]) -> tuple[Rule, ...]:
    """A rule per message size, neighbours with the same choice joined."""
    rules: list[Rule] = []
    for idx, slowest in enumerate(rows):
        # Flags are not for messages beyond their inboxes: what was timed there is the fallback.
        candidates = [
            (choice, times)
            for choice, times in zip(CHOICES, slowest, strict=True)
            if choice.path != "flagged" or PAIR_SIZES[idx] <= FLAGGED_LIMIT
        ]
        best = [min(times[column] for _, times in candidates) for column in columns]
        scores = [
            sum(times[column] / least for column, least in zip(columns, best, strict=True))
            for _, times in candidates
        ]
        choice = candidates[scores.index(min(scores))][0]
        is_last = idx == len(rows) - 1
        up_to = 1 << 62 if is_last else int((PAIR_SIZES[idx] * PAIR_SIZES[idx + 1]) ** 0.5)
        if rules and rules[-1].choice == choice:
            rules.pop()
        rules.append(Rule(up_to, choice))
    return tuple(rules)
