"""Triton kernels of rows.py. Each program holds whole rows of channels in registers: one pass over memory.

Nothing is tuned at run time, so every rank adds in the same order and gets the same bits.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:  # so that machine code can be made without torch (models/ahead)
    from torch import Tensor

NUM_WARPS = 8
MANY_ROWS = 2048
"""From this number of rows, a program takes `ROWS_EACH` rows with the same weights, which it loads once. The
number is no constant: unrolled, each row waits for the stores of the row before it, too."""
ROWS_EACH = 4
FEATURES_EACH = 32
NUM_VALUES, PLACES_EACH, MAX_PARTS = 4096, 16, 256
"""Of a group norm: values that a program holds, and parts of a picture that are added up apart."""


def add_norm(
    x: Tensor, update: Tensor | None, gate: Tensor | None, norm: Any, kinds: Tensor | None,
    total: Tensor, normed: Tensor, scales: Tensor | None,
) -> None:  # fmt: skip
    """x, update, total, normed [.., C] contiguous; gate, weight, bias [C], or [kinds, C] and int32 kinds [N].

    norm: a `rows.RowNorm`, or None. Without an update it writes no total, without a norm nothing to `normed`.
    With scales [N] `normed` is in e4m3.
    """
    assert all(each.is_contiguous() for each in (x, update, total, normed) if each is not None)
    weight, bias = (gate, gate) if norm is None else (norm.weight, norm.bias)
    factors = (weight if gate is None else gate, weight, bias)
    assert all(each.stride(-1) == 1 for each in factors)
    channels = x.shape[-1]
    num_rows = x.numel() // channels
    rows_each = ROWS_EACH if num_rows >= MANY_ROWS else 1
    _add_norm[(triton.cdiv(num_rows, rows_each),)](
        x, x if update is None else update, *factors, x if kinds is None else kinds, total, normed,
        x if scales is None else scales,
        *(each.stride(0) if each.dim() == 2 else 0 for each in factors), num_rows, rows_each,
        0.0 if norm is None else norm.eps,
        CHANNELS=channels, BLOCK=triton.next_power_of_2(channels),
        HAS_KINDS=kinds is not None, HAS_UPDATE=update is not None, HAS_GATE=gate is not None,
        PLUS_ONE=norm is not None and norm.plus_one, HAS_NORM=norm is not None,
        IN_FP8=scales is not None, num_warps=NUM_WARPS,
    )  # fmt: skip


def to_fp8(x: Tensor, out: Tensor, scales: Tensor, *, has_gelu: bool) -> None:
    """x [N, C] rows of any stride, out [.., C] e4m3 contiguous, scales [N, 1]."""
    num_rows, channels = x.shape
    assert x.stride(1) == 1
    assert out.is_contiguous()
    _rows_in_fp8[(num_rows,)](
        x, out, scales, x.stride(0),
        CHANNELS=channels, BLOCK=triton.next_power_of_2(channels), HAS_GELU=has_gelu, num_warps=NUM_WARPS,
    )  # fmt: skip


def int8_layers(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor, out: Tensor) -> None:
    """x [C], weight [N, F, C] int8, scales [N, F, G], bias, out [N, F], all contiguous."""
    num_features, channels = weight.shape[0] * weight.shape[1], weight.shape[2]
    num_groups = scales.shape[2]
    assert all(each.is_contiguous() for each in (x, weight, scales, bias, out))
    _int8_layers[(triton.cdiv(num_features, FEATURES_EACH),)](
        x, weight, scales, bias, out, num_features,
        CHANNELS=channels, GROUPS=num_groups, GROUP=channels // num_groups, FEATURES=FEATURES_EACH,
        num_warps=4,
    )  # fmt: skip


def heads(
    x: Tensor, weights: tuple[Tensor, ...], cos: Tensor | None, sin: Tensor | None, out: Tensor, *,
    head_dim: int, eps: float, copied: float,
) -> None:  # fmt: skip
    """x [N, >= parts C], out [parts, N, C]: rows of any stride; cos, sin [L, D/2] of any strides, or None.

    Each weight normalises one part, over as many channels as the weight has, and the part is turned. Every L
    rows use the same turns. In e4m3 parts without a weight are times `copied`, and all are saturated.
    """
    num_parts, num_rows, channels = out.shape
    width = weights[0].shape[0]
    has_turns = cos is not None
    cos, sin = (cos, sin) if has_turns else (x, x)
    assert cos.stride() == sin.stride()
    _heads[(num_rows, num_parts)](
        x, weights[0], weights[-1], cos, sin, out,
        x.stride(0), out.stride(0), out.stride(1), cos.stride(0), cos.stride(1),
        cos.shape[0], eps,
        CHANNELS=channels, WIDTH=width, PAIRS=head_dim // 2,
        GROUPS_BLOCK=triton.next_power_of_2(channels // width), WIDTH_BLOCK=triton.next_power_of_2(width),
        NUM_NORMED=len(weights), HAS_TURNS=has_turns, IN_FP8=out.element_size() == 1,
        COPIED=copied, num_warps=NUM_WARPS,
    )  # fmt: skip


def group_norm(x: Tensor, float32: Any, norm: Any, out: Tensor, *, activate: bool) -> None:
    """A `torch.nn.GroupNorm`, and SiLU if `activate`; x, out [N, H, W, C] contiguous. float32: torch's."""
    assert x.is_contiguous()
    samples, height, width, channels = x.shape
    num_places, block = height * width, triton.next_power_of_2(channels)
    num_parts = min(MAX_PARTS, triton.cdiv(num_places, PLACES_EACH))
    shape = {"BLOCK": block, "PLACES": max(1, NUM_VALUES // block), "num_warps": NUM_WARPS}
    num_blocks = triton.cdiv(num_places, shape["PLACES"])
    sums = x.new_empty((samples, num_parts, 2, norm.num_groups, channels // norm.num_groups), dtype=float32)
    each = triton.cdiv(num_blocks, num_parts)
    _group_sums[(num_parts, samples)](x, sums, num_places, each, channels, **shape)
    _group_norm[(triton.cdiv(num_blocks, ROWS_EACH), samples)](
        x, sums.sum((1, 4)), norm.weight, norm.bias, out, num_places, norm.eps, channels, norm.num_groups,
        ACTIVATE=activate, EACH=ROWS_EACH, **shape,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_places", "each"])
def _group_sums(x, sums, num_places, each, channels, BLOCK: tl.constexpr, PLACES: tl.constexpr):
    """Grid: parts, samples. The sum and the sum of squares of each channel."""
    columns = tl.arange(0, BLOCK)
    sample = tl.program_id(1).to(tl.int64)
    total = tl.zeros((PLACES, BLOCK), tl.float32)
    squares = tl.zeros((PLACES, BLOCK), tl.float32)
    for idx in range(each):
        place = (tl.program_id(0) * each + idx) * PLACES + tl.arange(0, PLACES)[:, None]
        here = (place < num_places) & (columns < channels)[None, :]
        at = (sample * num_places + place) * channels + columns[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    own = sums + (sample * tl.num_programs(0) + tl.program_id(0)) * 2 * channels + columns
    tl.store(own, tl.sum(total, axis=0), mask=columns < channels)
    tl.store(own + channels, tl.sum(squares, axis=0), mask=columns < channels)


@triton.jit(do_not_specialize=["num_places", "groups"])
def _group_norm(
    x, moments, weight, bias, out, num_places, eps, channels, groups,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, ACTIVATE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Grid: a few blocks of places each, samples."""
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    sample = tl.program_id(1).to(tl.int64)
    own = moments + sample * 2 * groups + columns // (channels // groups)
    count = num_places * (channels // groups) * 1.0
    mean = tl.load(own, mask=inside, other=0.0) / count
    variance = tl.load(own + groups, mask=inside, other=0.0) / count - mean * mean
    scale = tl.rsqrt(tl.maximum(variance, 0.0) + eps) * _values(weight, columns, inside)
    shift = _values(bias, columns, inside) - mean * scale
    for idx in tl.static_range(EACH):
        place = (tl.program_id(0) * EACH + idx) * PLACES + tl.arange(0, PLACES)[:, None]
        here = (place < num_places) & inside[None, :]
        at = (sample * num_places + place) * channels + columns[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if ACTIVATE:
            value = value * tl.sigmoid(value)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def _add_norm(
    x, update, gate, weight, bias, kinds, total, normed, scales,
    gate_stride, weight_stride, bias_stride, num_rows, rows_each, eps,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, HAS_KINDS: tl.constexpr,
    HAS_UPDATE: tl.constexpr, HAS_GATE: tl.constexpr, PLUS_ONE: tl.constexpr, HAS_NORM: tl.constexpr,
    IN_FP8: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < CHANNELS
    if not HAS_KINDS:
        if HAS_GATE:
            gates = _values(gate, columns, inside)
        if HAS_NORM:
            weights = _values(weight, columns, inside)
            biases = _values(bias, columns, inside)
    first = tl.program_id(0) * rows_each
    for idx in range(rows_each):
        row = first + idx
        here = columns < tl.where(row < num_rows, CHANNELS, 0)
        place = row.to(tl.int64) * CHANNELS + columns
        if HAS_KINDS:
            kind = tl.load(kinds + row, mask=row < num_rows, other=0)
            if HAS_GATE:
                gates = _values(gate + kind * gate_stride, columns, inside)
            if HAS_NORM:
                weights = _values(weight + kind * weight_stride, columns, inside)
                biases = _values(bias + kind * bias_stride, columns, inside)
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        if HAS_UPDATE:
            change = tl.load(update + place, mask=here, other=0.0).to(tl.float32)
            if HAS_GATE:
                change *= gates
            rounded = (value + change).to(total.dtype.element_ty)
            tl.store(total + place, rounded, mask=here)
            value = rounded.to(tl.float32)
        if HAS_NORM:
            mean = tl.sum(value, axis=0) / CHANNELS
            centred = tl.where(here, value - mean, 0.0)
            variance = tl.sum(centred * centred, axis=0) / CHANNELS
            scaled = centred * tl.rsqrt(variance + eps)
            result = scaled * (weights + 1.0 if PLUS_ONE else weights) + biases
            if IN_FP8:
                result, scale = _in_fp8(tl.where(here, result, 0.0))
                tl.store(scales + row, scale, mask=row < num_rows)
            tl.store(normed + place, result.to(normed.dtype.element_ty), mask=here)


@triton.jit
def _in_fp8(value):
    """A row times 448 over its largest value, and the reciprocal of this factor."""
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-20)
    return value * (448.0 / largest), largest / 448.0


@triton.jit
def _rows_in_fp8(
    x, out, scales, x_stride,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, HAS_GELU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < CHANNELS
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_GELU:
        # 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    value, scale = _in_fp8(value)
    tl.store(out + row * CHANNELS + columns, value.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _int8_layers(
    x, weight, scales, bias, out, num_features,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    features = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    here = features < num_features
    within = tl.arange(0, GROUP)
    total = tl.zeros((FEATURES, GROUP), tl.float32)
    for group in tl.range(GROUPS):
        columns = group * GROUP + within
        given = tl.load(weight + features[:, None] * CHANNELS + columns[None, :], mask=here[:, None], other=0)
        scale = tl.load(scales + features * GROUPS + group, mask=here, other=0.0).to(tl.float32)
        factor = tl.load(x + columns).to(tl.float32)
        total += given.to(tl.float32) * factor[None, :] * scale[:, None]
    result = tl.sum(total, axis=1) + tl.load(bias + features, mask=here, other=0.0).to(tl.float32)
    tl.store(out + features, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def _values(values, columns, inside):
    return tl.load(values + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_turns"])
def _heads(
    x, weight_0, weight_1, cos, sin, out,
    x_stride, part_stride, out_stride, turn_stride, pair_stride, num_turns, eps,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, NUM_NORMED: tl.constexpr, HAS_TURNS: tl.constexpr,
    IN_FP8: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    groups = tl.arange(0, GROUPS_BLOCK)[:, None]
    within = tl.arange(0, WIDTH_BLOCK)[None, :]
    inside = (groups * WIDTH + within < CHANNELS) & (within < WIDTH)
    columns = groups * WIDTH + within
    source = x + row * x_stride + part * CHANNELS
    target = out + part.to(tl.int64) * part_stride + row * out_stride
    given = tl.load(source + columns, mask=inside, other=0.0)
    if part < NUM_NORMED:
        weight = weight_0
        if part == 1:
            weight = weight_1
        value = given.to(tl.float32)
        mean_square = tl.sum(value * value, axis=1) / WIDTH
        scale = tl.load(weight + within, mask=within < WIDTH, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(mean_square + eps)[:, None] * scale
        if HAS_TURNS:
            even, odd = tl.split(tl.reshape(value, (GROUPS_BLOCK, WIDTH_BLOCK // 2, 2)))
            pair = tl.arange(0, WIDTH_BLOCK // 2)[None, :] % PAIRS
            turn = row % num_turns * turn_stride + pair * pair_stride
            c = tl.load(cos + turn)
            s = tl.load(sin + turn)
            turned = tl.join(even * c - odd * s, even * s + odd * c)
            value = tl.reshape(turned, (GROUPS_BLOCK, WIDTH_BLOCK))
        if IN_FP8:
            value = tl.clamp(value, -448.0, 448.0)
        tl.store(target + columns, value.to(out.dtype.element_ty), mask=inside)
    elif IN_FP8:
        value = tl.clamp(given.to(tl.float32) * COPIED, -448.0, 448.0)
        tl.store(target + columns, value.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(target + columns, given.to(out.dtype.element_ty), mask=inside)
