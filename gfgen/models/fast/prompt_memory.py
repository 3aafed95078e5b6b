"""Cached results for prompts: a Wan transformer's projections, keys and values.

All steps of a job have the same prompt embeddings. So a Wan transformer computes the same projections of
them, and the same keys and values in every block. If a picture has fewer tokens than its prompt, that is
most of the work: more than half for a 128x128 picture by the built-in model, with 64 tokens of the picture
and 512 of the prompt.

A linear layer or norm with a cache returns its earlier result for the same tensor: the same object,
unchanged since. So nothing is compared, and results are bitwise equal. The cached result is again the same
object for the next layer, whose cache then applies, too. Entries do not refer to jobs: they are dropped
with their tensor, or when other prompts take their place.

Transformers cache on CPUs only. Blocks fused for GPUs work differently (fused.py), and a recorded forward
would always replay the results of the prompt that it was recorded with (recording.py).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gfgen.models.geometry.wan import TEXT_TOKENS

NUM_TEXTS = 8
"""Texts whose embeddings an adapter keeps: jobs often share a negative prompt, or differ only in seeds."""
ROOM_BYTES = 96 * 2**20
"""Cache of one transformer on a rank: 8 prompts of the built-in model, or 4 jobs with guidance. A model
whose 2 prompts need more has no cache; it would save only a small share of its work."""


def remember_prompts(transformer: Any) -> None:
    """Give a Wan transformer its caches, permanently; once for each instance."""
    num_prompts = ROOM_BYTES // prompt_bytes(transformer)
    if num_prompts < 2:
        return
    layers = [transformer.condition_embedder.text_embedder]
    for block in transformer.blocks:
        layers += [block.attn2.to_k, block.attn2.norm_k, block.attn2.to_v]
    for layer in layers:
        layer.forward = Remembering(layer.forward, num_inputs=num_prompts)


def forget_prompts(transformer: Any) -> None:
    """Drop all cached results, when weights have changed."""
    for module in transformer.modules():
        if isinstance(module.forward, Remembering):
            module.forward.clear()


def prompt_bytes(transformer: Any) -> int:
    """Bytes cached for one prompt: its projection, and per block keys (before and after norms) and values."""
    config = transformer.config
    width: int = config.num_attention_heads * config.attention_head_dim
    num_tensors = 1 + 3 * len(transformer.blocks)
    itemsize: int = transformer.dtype.itemsize
    return TEXT_TOKENS * width * num_tensors * itemsize


class _RememberedResult(NamedTuple):
    of: weakref.ref[Tensor]
    version: int
    """How often the tensor had been written to."""
    result: Tensor


class Remembering:
    """A function of one tensor with a cache for its last inputs. Thread-safe."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, num_inputs: int) -> None:
        self._function = function
        self._num_inputs = num_inputs
        self._memories: OrderedDict[int, _RememberedResult] = OrderedDict()
        self._lock = threading.RLock()
        """Taken again by a tensor that is freed while it is held."""

    def __call__(self, x: Tensor) -> Tensor:
        """The function's result; do not write to it."""
        with self._lock:
            memory = self._memories.get(id(x))
            if memory is not None and memory.of() is x and memory.version == x._version:
                self._memories.move_to_end(id(x))
                return memory.result
        result = self._function(x)
        with self._lock:
            key = id(x)
            self._memories[key] = _RememberedResult(
                weakref.ref(x, lambda _: self._forget(key)), x._version, result
            )
            self._memories.move_to_end(key)
            while len(self._memories) > self._num_inputs:
                self._memories.popitem(last=False)
        return result

    def clear(self) -> None:
        with self._lock:
            self._memories.clear()

    def _forget(self, key: int) -> None:
        with self._lock:
            self._memories.pop(key, None)
