"""Others' tokens and the own ones, for groups whose collectives are over when they return.

On GPUs kernels put tokens in these orders (csrc/gfc/cuda/boxes.h). Here it is done around collectives that
know no such orders: those of CPU ranks, and those of the fake that tests use.

Legend: B batch, S tokens of the whole sequence, H heads, h heads of this rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gfgen.gfc.reshard import Part, Sizes

if TYPE_CHECKING:
    from gfgen.gfc.group import Collectives


def own_tokens_first(tensors: Sequence[Tensor], token_sizes: Sizes, slot: int) -> tuple[Tensor, ...]:
    """Each [B, S, ..] by slot -> the own tokens, then those of the next ranks in turn."""
    start = sum(token_sizes[:slot])
    return tuple(x if start == 0 else torch.cat((x[:, start:], x[:, :start]), 1) for x in tensors)


def send_part(
    group: Collectives, x: Tensor, *, token_sizes: Sizes, head_sizes: Sizes, part: Part, into: Tensor
) -> Tensor:
    """`tokens_from_heads` of a part, by that of all: [B, tokens of the part, h, D] -> `into`."""
    own, num_after = token_sizes[group.slot], sum(token_sizes[group.slot + 1 :])
    if part == "own":
        group.barrier()
        into.narrow(2, sum(head_sizes[: group.slot]), head_sizes[group.slot]).copy_(x)
        return into
    zeros = x.new_zeros((x.shape[0], own, *x.shape[2:]))
    whole = torch.cat((x[:, num_after:], zeros, x[:, :num_after]), 1)
    return into.copy_(group.tokens_from_heads(whole, token_sizes=token_sizes, head_sizes=head_sizes))
