"""The Triton kernel of causal_vae.py: what lies between two convolutions, in one pass over memory.

Each program holds some places of a frame with all their channels, and goes through the frames. Nothing is
tuned at run time, so every rank adds in the same order and gets the same bits.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:  # so that machine code can be made without torch (models/ahead)
    from torch import Tensor

NUM_VALUES = 2048
"""Of a program, for each frame: 16 for each of 128 threads."""


def add_frames(
    frames: Any, gamma: Tensor | None, activate: bool, total: Tensor | None, padded: Tensor | None,
    kept: Tensor | None,
) -> None:  # fmt: skip
    """As `causal_vae.added`; total [T, H, W, C], padded [2 or 0 + T, H or H + 2, W, C], kept [2, H, W, C]."""
    parts, shortcut, repeats = frames.parts, frames.shortcut, frames.repeats
    others = (frames.bias, shortcut, gamma, total, padded, kept)
    assert all(each.is_contiguous() for each in (*parts, *others) if each is not None)
    first = parts[0]
    num_frames, height, width, channels = frames.shape
    scale = 2 if len(parts) == 4 else 1
    block = triton.next_power_of_2(channels)
    places = max(1, NUM_VALUES // block)
    num_places = (height // scale) * (width // scale)
    y = parts * 4 if scale == 1 else parts
    _add_frames[(triton.cdiv(num_places, places), scale * scale)](
        *y[:4], *(first if each is None else each for each in others),
        num_frames, height, width,
        0 if padded is None else padded.shape[1] * width,
        0 if padded is None else (padded.shape[1] - height) // 2 * width,
        0 if shortcut is None else shortcut.shape[-1],
        0 if repeats is None else repeats.skip, channels**0.5,
        CHANNELS=channels, BLOCK=block, PLACES=places, SCALE=scale,
        FRONT=0 if padded is None else padded.shape[0] - num_frames,
        HAS_BIAS=frames.bias is not None, HAS_SHORTCUT=shortcut is not None,
        REPEAT_FRAMES=1 if repeats is None else repeats.frames,
        REPEAT_CHANNELS=0 if repeats is None else repeats.channels,
        HAS_NORM=gamma is not None, ACTIVATE=activate,
        HAS_TOTAL=total is not None, HAS_PADDED=padded is not None, HAS_KEPT=kept is not None,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_frames", "height", "width", "padded_frame", "padded_start", "skip"])
def _add_frames(
    y_00, y_01, y_10, y_11, bias, shortcut, gamma, total, padded, kept,
    num_frames, height, width, padded_frame, padded_start, shortcut_channels, skip, scale,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, SCALE: tl.constexpr,
    FRONT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHORTCUT: tl.constexpr,
    REPEAT_FRAMES: tl.constexpr, REPEAT_CHANNELS: tl.constexpr,
    HAS_NORM: tl.constexpr, ACTIVATE: tl.constexpr,
    HAS_TOTAL: tl.constexpr, HAS_PADDED: tl.constexpr, HAS_KEPT: tl.constexpr,
):  # fmt: skip
    phase = tl.program_id(1)
    below = phase // 2
    right = phase % 2
    y = y_00
    if SCALE == 2:
        if phase == 1:
            y = y_01
        elif phase == 2:
            y = y_10
        elif phase == 3:
            y = y_11
    low_width = width // SCALE
    low_places = (height // SCALE) * low_width
    low = tl.program_id(0) * PLACES + tl.arange(0, PLACES)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (low < low_places) & (columns < CHANNELS)
    row = low // low_width
    column = low % low_width
    place = (row * SCALE + below) * width + column * SCALE + right
    place = place.to(tl.int64) * CHANNELS + columns
    frame_size = height.to(tl.int64) * width * CHANNELS
    padded_size = padded_frame.to(tl.int64) * CHANNELS
    padded_place = place + padded_start * CHANNELS
    if SCALE == 2:
        read = ((row + below) * (low_width + 1) + column + right).to(tl.int64) * CHANNELS + columns
        read_size = (height // 2 + 1).to(tl.int64) * (low_width + 1) * CHANNELS
    else:
        read = place
        read_size = frame_size
    if HAS_BIAS:
        biases = tl.load(bias + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
    if HAS_NORM:
        gammas = tl.load(gamma + columns, mask=columns < CHANNELS, other=0.0).to(tl.float32)
    if FRONT == 2:
        before = tl.load(kept + place, mask=inside, other=0.0)
        last = tl.load(kept + frame_size + place, mask=inside, other=0.0)
        tl.store(padded + padded_place, before, mask=inside)
        tl.store(padded + padded_size + padded_place, last, mask=inside)
        if num_frames == 1:
            tl.store(kept + place, last, mask=inside)
    for idx in range(num_frames):
        value = tl.load(y + idx * read_size + read, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += biases
        if HAS_SHORTCUT:
            if REPEAT_CHANNELS == 0:
                value += tl.load(shortcut + idx * frame_size + place, mask=inside, other=0.0).to(tl.float32)
            else:
                source = (idx + skip) // REPEAT_FRAMES
                copy = (idx + skip) % REPEAT_FRAMES
                channel = ((columns * REPEAT_FRAMES + copy) * 4 + phase) // REPEAT_CHANNELS
                from_low = (source * low_places.to(tl.int64) + low) * shortcut_channels + channel
                value += tl.load(shortcut + from_low, mask=inside, other=0.0).to(tl.float32)
        if HAS_TOTAL:
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + idx * frame_size + place, rounded, mask=inside)
            value = rounded.to(tl.float32)
        if HAS_PADDED:
            if HAS_NORM:
                squares = tl.sum(tl.where(inside, value * value, 0.0), axis=1)
                length = tl.maximum(tl.sqrt(squares), 1e-12)[:, None]
                value = value / length * scale * gammas
            if ACTIVATE:
                value = value * tl.sigmoid(value)
            result = value.to(padded.dtype.element_ty)
            tl.store(padded + (idx + FRONT) * padded_size + padded_place, result, mask=inside)
            if HAS_KEPT:  # noqa: SIM102 (the compiler decides this one)
                if idx >= num_frames - 2:
                    tl.store(kept + (idx - num_frames + 2) * frame_size + place, result, mask=inside)
