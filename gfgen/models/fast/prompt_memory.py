"""What models make of prompts, kept: embeddings from job to job, and what a transformer makes of them.

All steps of a job have the same prompt embeddings, and so, in a Wan transformer, the same projections of
them, and the same keys and values in every block. Where a picture has fewer tokens than its prompt has
places, these are most of the work: of a 128x128 picture by the built-in model, 64 tokens beside 512 places,
more than half.

A linear layer or norm that remembers returns what it returned before if it is given the same tensor: the
same object, unchanged since, so nothing is compared and equal bits are certain. Layers behind each other
remember along: what one returns from memory is the same object to the next. Nothing refers to a job:
memory goes with the tensor that it is about, or when other prompts have taken its place.

Transformers remember on processors only. Blocks fused for GPUs go other ways (fused.py), and a recorded
forward would replay what it remembered for the prompt that it was recorded with (recording.py).
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
"""What one transformer may remember on a rank: 8 prompts of the built-in model, which are 4 jobs with
guidance. Models that are so large that 2 prompts need more remember nothing; the share of their work would be
small, too."""


def remember_prompts(transformer: Any) -> None:
    """Let a Wan transformer remember, for good; once for each instance."""
    num_prompts = ROOM_BYTES // prompt_bytes(transformer)
    if num_prompts < 2:
        return
    layers = [transformer.condition_embedder.text_embedder]
    for block in transformer.blocks:
        layers += [block.attn2.to_k, block.attn2.norm_k, block.attn2.to_v]
    for layer in layers:
        layer.forward = Remembering(layer.forward, num_inputs=num_prompts)


def prompt_bytes(transformer: Any) -> int:
    """What is remembered of one prompt: its projection, and keys twice (as norms have them) and values."""
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
    """A function of one tensor that remembers its results for the last tensors. For any thread."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, num_inputs: int) -> None:
        self._function = function
        self._num_inputs = num_inputs
        self._memories: OrderedDict[int, _RememberedResult] = OrderedDict()
        self._lock = threading.RLock()
        """Taken again by a tensor that is freed while it is held."""

    def __call__(self, x: Tensor) -> Tensor:
        """What the function returns; nobody may write to it."""
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

    def _forget(self, key: int) -> None:
        with self._lock:
            self._memories.pop(key, None)
