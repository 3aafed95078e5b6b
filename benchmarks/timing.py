"""How long calls take, by the device's clock and by the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def device_ms(run: Callable[[], Any]) -> float:
    """Milliseconds on the GPU, from the launch of a call until it is done."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def host_s(run: Callable[[], Any]) -> float:
    """Seconds from an idle device to an idle device; also without a GPU."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    run()
    if has_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
