"""Operations on rows of channels: norms with what comes before and behind them, in one pass each.

On a GPU they are kernels of row_kernels.py, elsewhere what they stand for. Both compute in fp32, and
round to the tensors' dtype where a result is stored.

Legend: B batch (1), L tokens, C channels, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gfgen.errors import ModelError


def try_kernels(device: torch.device) -> None:
    """Compile and run one of a GPU's kernels, so that what is missing shows at the start.

    Raises: ModelError when Triton cannot compile here.
    """
    x, ones = torch.ones(1, 1, 64, device=device, dtype=torch.bfloat16), torch.ones(64, device=device)
    try:
        norm(x, weight=ones, bias=ones, eps=1e-6, plus_one=False)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ModelError(
            f"Triton cannot compile kernels here ({reason}); it needs a C compiler and a writable ~/.triton"
        ) from error


def norm(x: Tensor, *, weight: Tensor, bias: Tensor, eps: float, plus_one: bool) -> Tensor:
    """[1, L, C] -> its layer norm, times weight (or 1 + weight) plus bias, each [C]."""
    return _add_norm(x, None, None, weight, bias, eps=eps, plus_one=plus_one)[1]


def add_norm(
    x: Tensor,
    update: Tensor,
    gate: Tensor | None,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    plus_one: bool,
) -> tuple[Tensor, Tensor]:
    """x + gate * update, [1, L, C] each and [C] or none, and `norm` of that."""
    return _add_norm(x, update, gate, weight, bias, eps=eps, plus_one=plus_one)


def add_gated(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """x + gate * update: [1, L, C], [1, L, C], [C] -> [1, L, C]."""
    if not x.is_cuda:
        return (x.float() + update.float() * gate.float()).type_as(x)
    from gfgen.models import row_kernels

    total = torch.empty_like(x)
    if x.numel():
        row_kernels.add_gated(_rows(x), _rows(update), gate, _rows(total))
    return total


def heads(
    projected: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    weights: Sequence[Tensor],
    eps: float,
    turns: tuple[Tensor, Tensor] | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Queries, keys, values out of one projection: [1, L, >= parts H D] -> [parts, 1, L, H, D].

    As many parts as there are weights are normalised by their root mean square, over all heads or over
    each one, as the weights are long, and turned by `turns`: cosines and sines [L, D/2] of the pairs of
    channels. into: what takes the result, such as a range of tokens of a larger tensor; parts beyond
    the weights are copied to it. Without it there are as many parts as weights.
    """
    length, channels = projected.shape[1], num_heads * head_dim
    if into is None:
        into = projected.new_empty((len(weights), 1, length, num_heads, head_dim))
    if not projected.is_cuda:
        _heads_in_steps(projected, weights, eps, turns, into)
    elif length:
        from gfgen.models import row_kernels

        cos, sin = turns or (None, None)
        row_kernels.heads(
            projected[0], tuple(weights), cos, sin, into[:, 0].flatten(2), head_dim=head_dim, eps=eps
        )
    assert projected.shape[2] >= into.shape[0] * channels
    return into


def _heads_in_steps(
    projected: Tensor,
    weights: Sequence[Tensor],
    eps: float,
    turns: tuple[Tensor, Tensor] | None,
    into: Tensor,
) -> None:
    num_heads, head_dim = into.shape[3:]
    for idx, target in enumerate(into):
        start = idx * num_heads * head_dim
        value = projected[..., start : start + num_heads * head_dim]
        if idx < len(weights):
            weight = weights[idx].float()
            num_groups = num_heads * head_dim // len(weight)
            grouped = value.float().reshape(*value.shape[:2], num_groups, len(weight))
            value = functional.rms_norm(grouped, weight.shape, weight, eps)
            if turns is not None:
                value = _turned(value.reshape(target.shape), *turns)
        target.copy_(value.reshape(target.shape))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of channels, rotated: [1, L, H, D] by [L, D/2]."""
    even, odd = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(3)


def _add_norm(
    x: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    plus_one: bool,
) -> tuple[Tensor, Tensor]:
    if not x.is_cuda:
        total = x
        if update is not None:
            change = update.float() if gate is None else update.float() * gate.float()
            total = (x.float() + change).type_as(x)
        factors = weight.float() + 1 if plus_one else weight.float()
        normed = functional.layer_norm(total.float(), total.shape[-1:], factors, bias.float(), eps)
        return total, normed.type_as(x)
    from gfgen.models import row_kernels

    x = x.contiguous()  # the first block's come from a convolution
    normed = torch.empty_like(x)
    total = x if update is None else torch.empty_like(x)
    if x.numel():
        row_kernels.add_norm(
            _rows(x),
            None if update is None else _rows(update),
            gate,
            weight,
            bias,
            _rows(total),
            _rows(normed),
            eps=eps,
            plus_one=plus_one,
        )
    return total, normed


def _rows(x: Tensor) -> Tensor:
    """[1, L, C] -> [L, C]."""
    assert x.shape[0] == 1, "one prompt per task"
    return x[0]
