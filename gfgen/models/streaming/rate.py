"""How fast a rank reads from the host copy, which bounds its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NUM_BYTES = 1 << 27
"""Of a copy at most: 3 ms at 50 GB/s, 30 ms at the 4 GB/s of memory that is not pinned."""
_NUM_COPIES, _LIMIT_S = 4, 0.04
"""No more copies, and none after this time."""


def read_rate(regions: Sequence[Tensor], device: torch.device) -> float:
    """Bytes per second that the device reads of these, the best of a few large copies; 0 on a CPU."""
    if not regions or device.type != "cuda":
        return 0.0
    source = max(regions, key=len)[:_NUM_BYTES]
    target, lasted_s = torch.empty_like(source, device=device), list[float]()
    target[:1].copy_(source[:1])  # what the first copy of a process costs
    while len(lasted_s) < _NUM_COPIES and sum(lasted_s) < _LIMIT_S:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        lasted_s.append(begun.elapsed_time(ended) / 1e3)
    del target
    torch.cuda.empty_cache()  # tasks have another stream, and could not use it
    return len(source) / max(min(lasted_s), 1e-9)
