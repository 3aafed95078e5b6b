"""HunyuanVideo without the padding of its texts.

Its pipeline pads each text to 256 tokens and hides the padding from attention by a mask, with which attention
takes a slower kernel. The padding changes nothing else, so here each text is cut to its length, and attention
has no mask: equal up to rounding.

Source: diffusers 0.42 transformer_hunyuan_video.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from diffusers import HunyuanVideoTransformer3DModel
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gfgen.models.fast.kernels import present_choice
from gfgen.models.parallel.plans import TEXT
from gfgen.models.parallel.sequence_parallel import sharing_ranks
from gfgen.models.streaming.turns import CallLocal

TEXT_MASK, MASK = "encoder_attention_mask", "attention_mask"
_MASK_POSITION = 3
"""Of a block's parameters."""
MIN_TOKENS = 2
"""A length of 1 would be a kind of its own for the compiler."""


def cut_texts(transformer: nn.Module) -> bool:
    """Let a transformer cut its texts, permanently, for other than `own` kernels (kernels.py); whether its
    class is one that can. Before `branches.watch`, inside which a forward is asked for twice."""
    if not isinstance(transformer, HunyuanVideoTransformer3DModel):
        return False
    current = CallLocal()  # has_cut: in the present forward
    lengths: Any = WeakTensorKeyDictionary()
    forward, signature = transformer.forward, inspect.signature(transformer.forward)

    @functools.wraps(forward)
    def cut(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        shorter = _cut(given, lengths)
        current.has_cut = bool(shorter)
        return forward(**{**given, **shorter})

    transformer.forward = cut
    for block in [*transformer.transformer_blocks, *transformer.single_transformer_blocks]:
        hook = functools.partial(_without_mask, current=current)
        block.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    return True


def _cut(given: Mapping[str, Any], lengths: Any) -> Mapping[str, Any]:
    """The arguments that are shorter than given; none if the padding stays."""
    mask, text = given.get(TEXT_MASK), given.get(TEXT)
    if present_choice() == "own" or mask is None or text is None:
        return {}
    if mask not in lengths:
        lengths[mask] = _common_length(mask)  # waits for the device, once for each prompt
    length, ranks = lengths[mask], sharing_ranks()
    if length is None or length < (MIN_TOKENS if ranks is None else max(MIN_TOKENS, ranks.size)):
        return {}
    return {TEXT: text[:, :length], TEXT_MASK: mask[:, :length]}


def _common_length(mask: Tensor) -> int | None:
    """The length of all texts of a batch; None if lengths differ, or padding is elsewhere than at the end."""
    rows = mask.bool().tolist()
    length = sum(rows[0])
    return length if all(row == [True] * length + [False] * (len(row) - length) for row in rows) else None


def _without_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, current: CallLocal
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A pre-forward hook of a block."""
    if not current.has_cut:
        return None
    if MASK in kwargs:
        return args, {**kwargs, MASK: None}
    return (*args[:_MASK_POSITION], None, *args[_MASK_POSITION + 1 :]), kwargs
