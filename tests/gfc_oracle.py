"""What each collective must return, in plain torch: from all members' inputs, all outputs.

Lists are by slot. Slow and obvious on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = Sequence[int]


def all_gather(inputs: Sequence[Tensor], *, dim: int = 0) -> list[Tensor]:
    """Every input behind each other along `dim`, for every slot."""
    return [torch.cat(list(inputs), dim) for _ in inputs]


def gather_tokens(inputs: Sequence[Tensor]) -> list[Tensor]:
    """[B, L, H, D] of each slot -> [B, S, H, D]: the own tokens, then those of the next slots in turn."""
    return [torch.cat([*inputs[slot:], *inputs[:slot]], 1) for slot in range(len(inputs))]


def all_to_all(
    inputs: Sequence[Tensor], *, split_dim: int, concat_dim: int, split_sizes: Sizes
) -> list[Tensor]:
    """Slot t gets part t along `split_dim` of every input, joined along `concat_dim`."""
    parts = [torch.split(x, list(split_sizes), split_dim) for x in inputs]
    return [torch.cat([source[target] for source in parts], concat_dim) for target in range(len(inputs))]


def heads_from_tokens(inputs: Sequence[Tensor], *, head_sizes: Sizes) -> list[Tensor]:
    """[B, L, H, D] of each slot -> [B, S, h, D] of each slot."""
    return all_to_all(inputs, split_dim=2, concat_dim=1, split_sizes=head_sizes)


def tokens_from_heads(inputs: Sequence[Tensor], *, token_sizes: Sizes) -> list[Tensor]:
    """[B, S, h, D] of each slot -> [B, L, H, D] of each slot."""
    return all_to_all(inputs, split_dim=1, concat_dim=2, split_sizes=token_sizes)
