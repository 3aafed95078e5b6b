"""Programs that CUDA ranks run in tests: both branches of guidance in every way, beside diffusers' own."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure_forward
from benchmarks.measure_forward import Branches, ForwardShape, forward_of, inputs_of
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.descriptor import Descriptor
from gfgen.layout import Layout
from gfgen.models.fast.fused import fuse
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_component
from gfgen.models.parallel.hooks import install

MEETINGS = 8
"""Dispatches of each layout."""
Meet = Callable[[int], Any]
"""The group of a meeting of a layout's ranks; None for a rank alone."""


def few_layers(model: str, folder: Path, **changes: Any) -> Path:
    """A model as shipped, but with two layers and other changes of its transformer's config."""
    checkpoint = folder / model
    shutil.copytree(CONFIGS / model, checkpoint)
    file = checkpoint / "transformer" / "config.json"
    config = json.loads(file.read_text()) | {"num_layers": 2} | changes
    file.chmod(0o644)
    file.write_text(json.dumps(config))
    return checkpoint


@torch.no_grad()
def compare(
    endpoint: CudaEndpoint, checkpoint: Path, shape: ForwardShape, layouts: Sequence[Layout], first: int
) -> dict[str, float]:
    """By way and layout of this rank: the distance from fp32 over that of diffusers in bf16.

    Infinite where a record does not give the bits of what was launched one by one.
    """
    device = endpoint.torch_device
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    beside = Beside(checkpoint, shape, device)
    found = {}
    for idx, layout in enumerate(layouts):
        if endpoint.rank not in layout.ranks:
            continue

        def meet(number: int, layout: Layout = layout, start: int = first + idx * MEETINGS) -> Any:
            if layout.degree == 1:
                return None
            group = endpoint.group(Descriptor(start + number, layout, (1,) * layout.degree))
            group.enter()
            return group

        found.update(beside.ways(layout, meet))
        torch.cuda.synchronize()
        if layout.degree > 1:
            endpoint.check(endpoint.last_dispatch)
    return found


class Beside:
    """Fused blocks of a transformer, and how near the same blocks of diffusers come to fp32."""

    def __init__(self, checkpoint: Path, shape: ForwardShape, device: torch.device) -> None:
        plain = random_component(checkpoint, "transformer", device=str(device), dtype=torch.bfloat16)
        self._inputs, self._texts = inputs_of(shape, device)
        exact = copy.deepcopy(plain).float()
        in_fp32 = {
            name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in self._inputs.items()
        }
        texts = [text.float() for text in self._texts]
        self._exact = forward_of(exact, in_fp32, texts, "in turn")(None)
        theirs = forward_of(plain, self._inputs, self._texts, "in turn")(None)
        self._bar = [distance(*both) for both in zip(theirs, self._exact, strict=True)]
        install(plain)
        fuse(plain)
        self._fused = plain

    def ways(self, layout: Layout, meet: Meet) -> Iterator[tuple[str, float]]:
        """Each way of this layout."""
        ways: tuple[Branches, ...] = ("in turn", "in batch") if layout.cfg == 1 else ("in turn",)
        for idx, way in enumerate(ways):
            run = forward_of(self._fused, self._inputs, self._texts, way)
            start = idx * MEETINGS // 2
            results = [each.clone() for each in run(meet(start))]
            recorded = measure_forward.captured(run, meet(start + 1))
            replayed = recorded(meet(start + 2))
            is_same = all(map(torch.equal, results, replayed))
            ratios = [
                distance(result, best) / bar
                for result, best, bar in zip(results, self._exact, self._bar, strict=True)
            ]
            yield f"{way} on {layout}", max(ratios) if is_same else float("inf")


def distance(result: Tensor, wanted: Tensor) -> float:
    """Over the norm of what is wanted."""
    return float((result.float() - wanted).norm() / wanted.norm())
