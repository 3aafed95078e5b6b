"""Operations on rows of channels: norms with the operations before and after them, in one pass each.

On a CPU they are the plain operations, elsewhere kernels of row_kernels.py; on the meta device a trace notes
which (models/ahead). Both compute in fp32 and round to the tensors' dtype where a result is stored.

Legend: B batch, L tokens, N = B L tokens of all samples, C channels, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gfgen.errors import ModelError
from gfgen.models.parallel.cudnn_attention import E4M3, LARGEST, VALUE_SCALE, in_fp8

FP8_SMALLEST = 1e-20
"""The largest value of a row counts as at least this, so that rows of zeros have a scale."""


def try_kernels(device: torch.device) -> None:
    """Compile and run one of a GPU's kernels, so that a missing compiler shows at the start.

    Raises: ModelError when Triton cannot compile here.
    """
    x, ones = torch.ones(1, 1, 64, device=device, dtype=torch.bfloat16), torch.ones(64, device=device)
    try:
        norm(x, RowNorm(ones, ones, eps=1e-6, plus_one=False))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ModelError(
            f"Triton cannot compile kernels here ({reason}); it needs a C compiler and a writable ~/.triton"
        ) from error


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A layer norm times weight (or 1 + weight) plus bias, each [C] or [kinds, C]."""

    weight: Tensor
    bias: Tensor
    eps: float
    plus_one: bool


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows as `values * scales`: the largest value of each row is the largest number of e4m3.

    Shapes: values [.., C] e4m3, scales [N, 1] fp32 for the N rows.
    """

    values: Tensor
    scales: Tensor


def norm(x: Tensor, of: RowNorm, *, kinds_N: Tensor | None = None, in_fp8: bool = False) -> Any:
    """The norm of x, as in `add_norm`."""
    return add_norm(x, None, None, of, kinds_N=kinds_N, in_fp8=in_fp8)[1]


def add_norm(
    x: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    norm: RowNorm,
    *,
    kinds_N: Tensor | None = None,
    in_fp8: bool = False,
) -> tuple[Tensor, Any]:
    """x + gate * update (both optional), and the norm of this sum, as `Fp8Rows` if `in_fp8`.

    kinds_N: for tokens of several kinds, int32: which row of gate, weight and bias each token takes.
    Shapes: x, update [B, L, C]; gate [C] or [kinds, C] -> [B, L, C] twice.
    """
    if x.is_cpu:
        total = x if update is None else _sum(x, update, gate, kinds_N)
        factors = _by_token(norm.weight, kinds_N, x) + (1 if norm.plus_one else 0)
        normed = functional.layer_norm(total.float(), total.shape[-1:], eps=norm.eps)
        normed = normed * factors + _by_token(norm.bias, kinds_N, x)
        return total, _fp8_in_steps(normed) if in_fp8 else normed.type_as(x)
    from gfgen.models.fast import row_kernels

    x = x.contiguous()  # the input of the first block comes from a convolution
    update = None if update is None else update.contiguous()  # that of a batch may be part of a larger tensor
    result = _empty_fp8(x) if in_fp8 else torch.empty_like(x)
    total = x if update is None else torch.empty_like(x)
    if x.numel():
        normed, scales = (result.values, result.scales) if isinstance(result, Fp8Rows) else (result, None)
        row_kernels.add_norm(x, update, gate, norm, kinds_N, total, normed, scales)
    return total, result


def to_fp8(x: Tensor, *, has_gelu: bool = False) -> Fp8Rows:
    """x [.., C] in e4m3, or its tanh GELU."""
    if x.is_cpu:
        return _fp8_in_steps(functional.gelu(x.float(), approximate="tanh") if has_gelu else x.float())
    from gfgen.models.fast import row_kernels

    result = _empty_fp8(x)
    if x.numel():
        row_kernels.to_fp8(x.reshape(-1, x.shape[-1]), result.values, result.scales, has_gelu=has_gelu)
    return result


def _empty_fp8(x: Tensor) -> Fp8Rows:
    num_rows = x.numel() // x.shape[-1]
    return Fp8Rows(
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty((num_rows, 1), dtype=torch.float32, device=x.device),
    )


def _fp8_in_steps(x: Tensor) -> Fp8Rows:
    """x is fp32."""
    scales = x.abs().amax(dim=-1, keepdim=True).clamp(min=FP8_SMALLEST) / LARGEST
    return Fp8Rows((x / scales).to(torch.float8_e4m3fn), scales.view(-1, 1))


def add_gated(x: Tensor, update: Tensor, gate: Tensor, *, kinds_N: Tensor | None = None) -> Tensor:
    """x + gate * update; shapes and kinds as in `add_norm`."""
    if x.is_cpu:
        return _sum(x, update, gate, kinds_N)
    from gfgen.models.fast import row_kernels

    total = torch.empty_like(x)
    if x.numel():
        row_kernels.add_norm(x.contiguous(), update.contiguous(), gate, None, kinds_N, total, total, None)
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
    """Queries, keys, values out of one projection: [B, L, >= parts H D] -> [parts, B, L, H, D].

    Each weight normalises one part by its root mean square, over all heads or over each one, depending on
    the weight's length. The part is turned by `turns`: cosines and sines [L, D/2] of the pairs of channels,
    the same for all samples. into: takes the result, such as a range of tokens of a larger tensor of one
    sample; parts without a weight are copied to it. By default there is one part per weight. In e4m3 it
    takes queries, keys and values of cudnn_attention.py.
    """
    batch, length, channels = *projected.shape[:2], num_heads * head_dim
    if into is None:
        into = projected.new_empty((len(weights), batch, length, num_heads, head_dim))
    if projected.is_cpu:
        _heads_in_steps(projected, weights, eps, turns, into)
    elif length:
        from gfgen.models.fast import row_kernels

        cos, sin = turns or (None, None)
        rows = into.view(len(into), batch * length, channels)
        given = projected.view(batch * length, *projected.shape[2:])
        weights = tuple(weights)
        row_kernels.heads(given, weights, cos, sin, rows, head_dim=head_dim, eps=eps, copied=VALUE_SCALE)
    assert projected.shape[2] >= into.shape[0] * channels
    return into


def padded_to(length: int, x: Tensor) -> Tensor:
    """[B, L, C] -> [B, length, C], with zeros at the end; the same memory if the length is right."""
    num_missing = length - x.shape[1]
    return functional.pad(x, (0, 0, 0, num_missing)) if num_missing else x


def batched(samples: Sequence[Tensor]) -> Tensor:
    """[1, ..] each -> [B, ..]; a single sample is not copied."""
    return samples[0] if len(samples) == 1 else torch.cat(list(samples))


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
        value = value.reshape(target.shape)
        if target.dtype == E4M3:
            value = in_fp8(value, scale=1.0 if idx < len(weights) else VALUE_SCALE)
        target.copy_(value)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of channels, rotated: [B, L, H, D] by [L, D/2]."""
    even, odd = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(3)


def _sum(x: Tensor, update: Tensor, gate: Tensor | None, kinds_N: Tensor | None) -> Tensor:
    change = update.float() if gate is None else update.float() * _by_token(gate, kinds_N, x)
    return (x.float() + change).type_as(x)


def _by_token(values: Tensor, kinds_N: Tensor | None, x: Tensor) -> Tensor:
    """[C] unchanged, [kinds, C] as [B, L, C]; in fp32."""
    values = values.float()
    return values if kinds_N is None or values.dim() == 1 else values[kinds_N].view(x.shape)
