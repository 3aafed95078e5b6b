"""A rough picture of a job's latents, without torch: each latent pixel becomes a pixel by a linear map.

Legend: C channels, T frames, H W rows and columns of the latents; S tokens of 2x2 latent pixels.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gfgen.runtime.ipc.slab import Slab, SlabPlan

_SAMPLE = "sample"
"""As `SAMPLE` in models/families/adapter.py, which imports torch."""
_PREDICTED = "model_output_"
"""UniPC keeps its last predictions of the finished latents under this name and a number, which rises."""
_NUM_BANKS = 3
_NUM_TRIES = 3
_ALIGNMENT = 64

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LatentColours:
    """RGB in [-1, 1] of a latent pixel: latents_C @ matrix_C3 + offset_3.

    Source: models/loading/colour_fit.py.
    """

    matrix_C3: np.ndarray
    offset_3: np.ndarray

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> LatentColours:
        return cls(np.array(content["matrix"], np.float32), np.array(content["offset"], np.float32))


class _Unpickler(pickle.Unpickler):
    """Reads the metas of a slab: plain values and torch's dtypes, which become their names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            return name
        raise pickle.UnpicklingError(f"{module}.{name} in the meta of a slab")


def latent_picture(
    fd: int, plan: SlabPlan, colours: LatentColours, *, width: int, height: int
) -> np.ndarray | None:
    """uint8 [H, W, 3] of what the latents in a job's slab will become; None if they cannot be shown yet.

    Of a video it is the middle frame. `width` and `height` are those of the job.
    """
    states = [
        {name: _middle(x, colours.matrix_C3.shape[0], aspect=height / width) for name, x in each.items()}
        for each in _latest_states(fd, plan)
    ]
    latents_CHW = _expected(states)
    if latents_CHW is None:
        return None
    rgb_HW3 = np.einsum("chw,ck->hwk", latents_CHW, colours.matrix_C3) + colours.offset_3
    return np.asarray(np.clip(np.nan_to_num(rgb_HW3), -1, 1) * 127.5 + 127.5, dtype=np.uint8)


def _expected(states: list[dict[str, np.ndarray | None]]) -> np.ndarray | None:
    """An estimate of the finished latents from the last two states, the latest first; None if there is none.

    Some solvers keep predictions of the finished latents. Others go along a line from noise to latents: the
    estimate continues the last step to where least noise is left, that is, where neighbours differ least.
    """
    if not states:
        return None
    if predicted := sorted(name for name in states[0] if name.startswith(_PREDICTED)):
        return states[0][predicted[-1]]
    samples = [state.get(_SAMPLE) for state in states]
    if len(samples) < 2 or samples[0] is None or samples[1] is None:
        return None
    latest, step = samples[0], samples[0] - samples[1]
    rough, rough_step = _differences(latest), _differences(step)
    further = -float(rough @ rough_step) / max(float(rough_step @ rough_step), 1e-9)
    return np.asarray(latest + max(0.0, further) * step)


def _differences(x_CHW: np.ndarray) -> np.ndarray:
    return np.concatenate([np.diff(x_CHW, axis=1).ravel(), np.diff(x_CHW, axis=2).ravel()])


def _latest_states(fd: int, plan: SlabPlan) -> list[dict[str, np.ndarray]]:
    """Copies of the last two complete latents in a slab, the latest first.

    A rank may begin to overwrite the older one before its word changes; then a preview may look torn.
    """
    slab = Slab(
        fd, plan, access=mmap.ACCESS_READ, loads=lambda content: _Unpickler(io.BytesIO(content)).load()
    )
    for _ in range(_NUM_TRIES):
        words = [slab.producer("latents", bank) for bank in range(_NUM_BANKS)]
        banks = sorted(filter(words.__getitem__, range(_NUM_BANKS)), key=words.__getitem__, reverse=True)[:2]
        states = [_arrays(slab, bank) for bank in banks]
        if words == [slab.producer("latents", bank) for bank in range(_NUM_BANKS)]:
            return states
    return []


def _arrays(slab: Slab, bank: int) -> dict[str, np.ndarray]:
    """The sample and the predictions of one bank, as in worker/jobs.py `fetch`."""
    (layout, _), memory, position = slab.fetch("latents", bank)
    found = {}
    for name, dtype, shape in layout:
        kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        count = math.prod(shape)
        if name == _SAMPLE or name.startswith(_PREDICTED):
            found[name] = _floats(np.frombuffer(memory, kind, count, position), dtype).reshape(shape)
        position += -(-count * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    return found


def _floats(x: np.ndarray, dtype: str) -> np.ndarray:
    """A copy as float32; numpy has no bfloat16, which is the upper half of a float32."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def _middle(x: np.ndarray, channels: int, *, aspect: float) -> np.ndarray | None:
    """The middle frame [C, H, W] of latents [1, C, T, H, W], [1, C, H, W] or, in tokens, [1, S, 4 * C]."""
    if x.ndim == 3 and x.shape[2] == 4 * channels:
        rows = round(math.sqrt(x.shape[1] * aspect))
        if rows * (x.shape[1] // max(1, rows)) != x.shape[1]:
            return None
        tokens = x[0].reshape(rows, -1, channels, 2, 2)
        return np.asarray(tokens.transpose(2, 0, 3, 1, 4).reshape(channels, 2 * rows, -1))
    if x.ndim in (4, 5) and x.shape[1] == channels:
        return np.asarray(x[0] if x.ndim == 4 else x[0, :, x.shape[2] // 2])
    return None
