"""Texts of prompts as inputs of transformers: one, or a batch with one for each branch of guidance.

Qwen-Image does not pad prompts, so every length is another shape, and a recorded forward serves one length
only. Where attention can ignore padding at almost no cost (cudnn_attention.py), texts are therefore padded
to a few lengths: a new prompt is then new data, not a new shape.

Legend: B batch (1 for each branch), L tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gfgen.layout import Degrees
from gfgen.models.fast.rows import batched, padded_to
from gfgen.models.geometry.wan import TEXT_TOKENS
from gfgen.models.parallel.cudnn_attention import is_fast

NUM_TEXTS = 8
"""Texts whose embeddings an adapter keeps: jobs often share a negative prompt, or differ only in seeds."""
MAX_KEPT_BYTES = 48 * 2**20
"""What a Wan transformer may keep of one prompt; the built-in model keeps 11 MB."""
STEPS = (32, 16, 8, 4, 2, 1)
"""Texts are padded to a multiple of one of these. A step of 64 would halve the number of shapes, but up to
double the rows of a short prompt."""
MAX_PICTURE_TOKENS = 4_000
"""For larger pictures recording is a small part of a job, and attention that ignores padding takes longer: on
H200, with 24 heads, 40 us instead of 39 for 1,088 tokens, 144 instead of 140 for 2,368, but 409 instead of
357 for 4,160."""
FEW_STEPS = 8
"""In fp8 also larger pictures of so few steps are padded: padding takes 3 ms of a forward of 4,096 tokens,
and a record 230 to 330 ms."""


def is_padded(transformer: Any, *, picture_tokens: int, num_steps: int) -> bool:
    """Whether texts of such jobs are padded. Only fused blocks ignore padding."""
    if (modulation := getattr(transformer, "modulation", None)) is None:
        return False
    is_in_fp8 = modulation.in_int8 is not None
    return picture_tokens < MAX_PICTURE_TOKENS or (is_in_fp8 and num_steps <= FEW_STEPS)


def common_length(embeds: Sequence[Tensor], *, degrees: Degrees) -> int | None:
    """The length to which the texts of a forward are padded on these degrees; None: no padding."""
    _, ulysses, *others = degrees
    if max(others) > 1 or not is_fast(embeds[0].device, embeds[0].dtype):
        return None  # in a ring or torus keys come in blocks, and several of them would end in padding
    return padded_length([branch.shape[1] for branch in embeds], num_shards=ulysses)


def text_shape(embeds: Sequence[Tensor], *, is_padded: bool, degrees: Degrees) -> object:
    """How the launches of a forward depend on the lengths of these texts."""
    lengths = tuple(branch.shape[1] for branch in embeds)
    common = common_length(embeds, degrees=degrees) if is_padded else None
    return lengths if common is None else (common, tuple(length < common for length in lengths))


def padded_length(lengths: Sequence[int], *, num_shards: int) -> int | None:
    """A multiple of the largest step that leaves all padding in the last shard; None if none does.

    Keys are in the order of shards, each with its part of the picture first, so padding follows all keys.
    """
    for step in STEPS:
        length = -(-max(lengths) // step) * step
        if length - min(lengths) <= length // num_shards:
            return length
    return None


def with_texts(
    inputs: Mapping[str, Any], embeds: Sequence[Tensor], *, length: int | None = None
) -> dict[str, Any]:
    """A transformer's inputs for these texts, from the inputs that they share.

    `hidden_states` is one sample for all texts. length: from `common_length`. Timesteps stay those of one
    sample. Texts of different lengths are padded with zeros, which only fused blocks ignore (fused.py).
    """
    picture, lengths = inputs["hidden_states"], [branch.shape[1] for branch in embeds]
    batch = {**inputs, "encoder_hidden_states": embeds[0]}  # the same object: its results may be cached
    if len(embeds) > 1:
        batch["hidden_states"] = picture.repeat(len(embeds), *[1] * (picture.dim() - 1))
    if len(embeds) > 1 or length is not None:
        texts = [padded_to(length or max(lengths), each) for each in embeds]
        batch["encoder_hidden_states"] = batched(texts)
    if length is not None:
        counts = tuple(picture.new_full((1,), picture.shape[1] + each, dtype=torch.int32) for each in lengths)
        batch["attention_kwargs"] = {**inputs["attention_kwargs"], "num_tokens": counts}
    elif len(embeds) > 1 and "attention_kwargs" in inputs:
        batch["attention_kwargs"] = {**inputs["attention_kwargs"], "text_lengths": tuple(lengths)}
    else:
        assert min(lengths) == max(lengths), "texts of different lengths"
    return batch


def keep_text_results(transformer: Any) -> None:
    """Let a small Wan transformer compute once for each prompt what is the same in all steps, permanently.

    For fp32 on CPUs: this is a third of the time of a 128x128 picture by the built-in model. Results stay
    bitwise equal. They are dropped with the tensor that they are for.
    """
    config, layers = transformer.config, [transformer.condition_embedder.text_embedder]
    for block in transformer.blocks:
        layers += [block.attn2.to_k, block.attn2.norm_k, block.attn2.to_v]
    width = config.num_attention_heads * config.attention_head_dim
    if TEXT_TOKENS * width * len(layers) * transformer.dtype.itemsize <= MAX_KEPT_BYTES:
        transformer.kept_texts = list(map(_keep_results, layers))


def forget_text_results(model: Any) -> None:
    """Drop what a model keeps, when its weights have changed."""
    for kept in getattr(model, "kept_texts", ()):
        kept.clear()


def _keep_results(layer: Any) -> Any:
    kept: Any = WeakTensorKeyDictionary()
    forward = layer.forward

    def kept_or_computed(x: Tensor) -> Tensor:
        found = kept.get(x)
        if found is None or found[0] != x._version:
            if len(kept) >= NUM_TEXTS:
                kept.clear()
            found = kept[x] = x._version, forward(x)
        result: Tensor = found[1]
        return result

    layer.forward = kept_or_computed
    return kept
