"""Texts of prompts as transformers take them: one, or those of several branches of guidance in a batch.

Where prompts are as long as they are (Qwen-Image), every length is another shape, and a forward that is
recorded for one serves no other. So texts are padded to a few lengths where attention that leaves padding out
costs next to nothing (counted_attention.py): then a new prompt is new data and no new shape.

Legend: B batch (1 for each branch), L tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gfgen.models.fast.rows import batched, padded_to
from gfgen.models.parallel.counted_attention import is_fast
from gfgen.models.parallel.sequence_parallel import present_degrees

STEPS = (32, 16, 8, 4, 2, 1)
"""Texts are padded to a multiple of one of these. With 64 there would be half as many shapes, and up to twice
the rows of a short prompt."""
MAX_PICTURE_TOKENS = 4_000
"""Of larger pictures recording is a small part of a job, and attention that counts may take longer: on H200,
with 24 heads, 40 us in place of 39 for 1,088 tokens, 144 of 140 for 2,368, but 409 of 357 for 4,160."""


def common_length(
    transformer: Any, embeds: Sequence[Tensor], *, picture_tokens: int, degrees: tuple[int, int, int]
) -> int | None:
    """What the texts of one forward are padded to, like others of about their lengths; None: they are not.

    degrees: of the layout whose ranks share it.
    """
    if not hasattr(transformer, "modulation") or picture_tokens >= MAX_PICTURE_TOKENS:
        return None  # only fused blocks leave padding out
    _, ulysses, ring = degrees
    if ring > 1 or not is_fast(embeds[0].device, embeds[0].dtype):
        return None  # in a ring keys come in blocks, of which several would end in padding
    return padded_length([branch.shape[1] for branch in embeds], num_shards=ulysses)


def text_shape(
    transformer: Any, embeds: Sequence[Tensor], *, picture_tokens: int, degrees: tuple[int, int, int]
) -> object:
    """What the launches of a forward with these texts know of their lengths."""
    lengths = tuple(branch.shape[1] for branch in embeds)
    common = common_length(transformer, embeds, picture_tokens=picture_tokens, degrees=degrees)
    return lengths if common is None else (common, tuple(length < common for length in lengths))


def padded_length(lengths: Sequence[int], *, num_shards: int) -> int | None:
    """A multiple of the largest step that leaves all padding in the last shard; None if none does.

    Keys are in the order of shards, each with its part of the picture first: so padding is behind all keys.
    """
    for step in STEPS:
        length = -(-max(lengths) // step) * step
        if length - min(lengths) <= length // num_shards:
            return length
    return None


def forward_inputs(transformer: Any, inputs: Mapping[str, Any], embeds: Sequence[Tensor]) -> dict[str, Any]:
    """As `with_texts`, padded where that lets texts of other lengths be of the same shape."""
    length = common_length(
        transformer, embeds, picture_tokens=inputs["hidden_states"].shape[1], degrees=present_degrees()
    )
    return with_texts(inputs, embeds, length=length)


def with_texts(
    inputs: Mapping[str, Any], embeds: Sequence[Tensor], *, length: int | None = None
) -> dict[str, Any]:
    """A transformer's inputs for these branches, from those that the branches share, `hidden_states` and all.

    length: what `common_length` says of them. Timesteps stay as they are, for one sample: those of the others
    are equal. Texts of different lengths are padded with zeros; fused blocks leave them out (fused.py),
    diffusers' own know nothing of it.
    """
    picture, lengths = inputs["hidden_states"], [branch.shape[1] for branch in embeds]
    batch = {**inputs, "encoder_hidden_states": embeds[0]}  # one is itself: what it led to may be remembered
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
