"""Which Triton kernels a model uses, by the list that comes with gfgen. Imports neither torch nor Triton.

`python -m benchmarks.kernel_list` makes kernels.json:

    kernels   module:name, arguments, keywords. An argument is a tensor's dtype, with its address modulo 16 if
              that is not 0, or a number that Triton specialises in the same way as the real one
    parts     parts of pipelines, by values of their config files: for each use, the numbers of its kernels
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.weights import component_dtypes

LIST = Path(__file__).with_name("kernels.json")
Call = tuple[str, Sequence[str | int | float], Mapping[str, Any]]
"""A kernel, its arguments and its keywords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """What jobs do with a model; by default everything."""

    layers: Sequence[str] = ("auto", "fp8")
    attention: Sequence[str] = ("auto", "fp8")
    """As --precision and --attention take them."""
    vae_dtypes: Sequence[str] = ("float32", "bfloat16")
    """As --vae-dtype takes them."""
    outputs: Collection[str] = ("picture", "video")
    has_images: bool = True
    """Jobs give pictures to begin with."""
    has_loras: bool = True

    def names(self, pipeline_class: str) -> Iterator[str]:
        """Names in the list, in the order in which a run needs them."""
        yield "start"
        if self.has_loras:
            yield "lora"
        dtypes = [component_dtypes(pipeline_class, each).get("vae", "bfloat16") for each in self.vae_dtypes]
        yield from (encode(dtype) for dtype in dtypes if self.has_images)
        for has_image in (False, True)[: 1 + self.has_images]:
            for layers, attention in product(self.layers, self.attention):
                yield denoise(layers, attention, has_image=has_image)
        yield from (decode(dtype, output) for dtype in dtypes for output in self.outputs)


def encode(dtype: str) -> str:
    """The name of this use; likewise below."""
    return f"encode {dtype}"


def denoise(layers: str, attention: str, *, has_image: bool = False) -> str:
    return f"denoise {layers} {attention}{' image' if has_image else ''}"


def decode(dtype: str, output: str) -> str:
    return f"decode {dtype} {output}"


def needed(models: Mapping[Path, Uses]) -> Sequence[Call]:
    """The kernels that these models take on GPUs, each once. The list knows full-size models only."""
    listed = json.loads(LIST.read_text())
    numbers: dict[int, None] = {}
    for checkpoint, uses in models.items():
        files = read_checkpoint(checkpoint, with_weights=False)
        parts = [
            part for part in listed["parts"] if any(_has(x, part["config"]) for x in files.configs.values())
        ]
        for name in uses.names(files.pipeline_class):
            numbers |= dict.fromkeys(number for part in parts for number in part["uses"].get(name, ()))
    return [listed["kernels"][number] for number in numbers]


def all_calls() -> Sequence[Call]:
    """The whole list."""
    calls: Sequence[Call] = json.loads(LIST.read_text())["kernels"]
    return calls


def _has(config: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(config.get(name) == value for name, value in values.items())
