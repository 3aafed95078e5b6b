"""Records of forwards as CUDA graphs (models/fast/recording.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gfgen.gfc.cuda.captured import Captured, CapturedAlone, SharedPool
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.models.fast.recording import Replay
from gfgen.models.parallel.parallel import Parallel

MIN_FREE_SHARE = 0.1
"""Share of the memory that torch may use. With less free nothing is recorded: tasks need it."""


class CudaRecorder:
    """Captures on one device, in memory that all its graphs share; see `recording.LaunchRecorder`.

    That memory is about as large as the working memory of the largest recorded forward, in addition to what
    the same forward takes when it is launched; each graph adds its inputs and its result.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: SharedPool | None = None

    def record(self, function: Callable[[Parallel | None], Tensor], parallel: Parallel | None) -> Replay:
        if self._pool is None:
            self._pool = SharedPool(self._device)
        if parallel is None:
            alone = CapturedAlone(lambda: function(None), capturing=self._pool.capturing)
            return lambda _: alone.replay()
        captured = Captured(_group_of(parallel), lambda _: function(parallel), capturing=self._pool.capturing)

        def replay(parallel: Parallel | None) -> Tensor:
            assert parallel is not None
            group = _group_of(parallel)
            assert not captured.unmatched(group), "a barrier that ranks without this record would not have"
            return captured.replay(group)

        return replay

    def align(self, parallel: Parallel) -> None:
        _group_of(parallel).align_banks()

    def has_room(self) -> bool:
        if not (is_enough := self._is_enough_free()):
            torch.cuda.empty_cache()  # a graph's memory is not taken from what is kept for tasks
            is_enough = self._is_enough_free()
        return is_enough

    def _is_enough_free(self) -> bool:
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = total * torch.cuda.get_per_process_memory_fraction(self._device)  # less under --memory
        return min(free, allowed - torch.cuda.memory_reserved(self._device)) >= MIN_FREE_SHARE * allowed

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def _group_of(parallel: Parallel) -> CudaGroup:
    """The ranks that share the tokens; captures count the exchanges of all groups in its dispatch."""
    assert isinstance(parallel.sequence, CudaGroup)
    return parallel.sequence
