"""Measures a core of this machine by fixed work similar to a step and a decode of the built-in model.

`python -m gfgen.models.families.calibration NUM` prints JSON: the seconds for the work on one core while the
others idle (`alone_s`), and while NUM of them work (`together_s`). Both are CPU time, which other programs on
the machine hardly change.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import functional

HIDDEN, FFN, HEADS, TOKENS = 288, 576, 24, 320
"""Of the built-in model's transformer; the tokens are those of 128x128x17."""
CHANNELS, FRAMES, SIDE = 32, 3, 48
"""Of a convolution as in its decoder."""
NUM_BLOCKS, REPEATS = 6, 8
_BUDGET_S = 1.0


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    num_threads = int(sys.argv[1])
    _work_s()  # allocates
    alone_s = median_s()
    together_s = alone_s
    if num_threads > 1:
        with ThreadPoolExecutor(num_threads) as pool:
            found = [pool.submit(median_s) for _ in range(num_threads)]
            together_s = statistics.median(each.result() for each in found)
    print(json.dumps({"alone_s": alone_s, "together_s": together_s}))


def median_s() -> float:
    end_s = time.monotonic() + _BUDGET_S
    times: list[float] = []
    while len(times) < REPEATS and (len(times) < 2 or time.monotonic() < end_s):
        times.append(_work_s())
    return statistics.median(times)


@torch.no_grad()
def _work_s() -> float:
    """Seconds of this thread's CPU time for the work, once."""
    torch.set_num_threads(1)  # of this thread
    x_LD = torch.full((TOKENS, HIDDEN), 0.5)
    weights = [torch.full((HIDDEN, HIDDEN), 1e-3)] * 4
    up, down = torch.full((FFN, HIDDEN), 1e-3), torch.full((HIDDEN, FFN), 1e-3)
    picture = torch.full((1, CHANNELS, FRAMES, SIDE, SIDE), 0.5)
    kernel = torch.full((CHANNELS, CHANNELS, 3, 3, 3), 1e-3)
    began_s = time.thread_time()
    for _ in range(NUM_BLOCKS):
        x_LD = _block(x_LD, weights, up, down)
    functional.silu(functional.conv3d(picture, kernel, padding=1))
    return time.thread_time() - began_s


def _block(x_LD: Tensor, weights: list[Tensor], up: Tensor, down: Tensor) -> Tensor:
    normed = functional.layer_norm(x_LD, (HIDDEN,))
    q, k, v = (functional.linear(normed, w).reshape(TOKENS, HEADS, -1).transpose(0, 1) for w in weights[:3])
    attended = functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    x_LD = x_LD + functional.linear(attended.transpose(0, 1).flatten(1), weights[3])
    hidden = functional.gelu(functional.linear(functional.layer_norm(x_LD, (HIDDEN,)), up))
    return x_LD + functional.linear(hidden, down)


if __name__ == "__main__":
    main()
