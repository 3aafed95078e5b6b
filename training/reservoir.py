"""Latents to train the transformer on: drawn, encoded, and used several times each.

Encoding costs as much as training on the result, so each drawn clip is used several times, with other
noise each time: latents wait in a reservoir per size, where the oldest make room for new ones.

Legend: N clips in a reservoir, B of a batch; C channels, T H W frames, rows, columns; L words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.codec import LatentScale, encode_moments
from training.drawing import draw, sketch, to_device
from training.graphs import Recorder
from training.parts import Parts
from training.supply import MAX_WORDS, Batch, Supply

REUSE = 16
"""How often a clip is trained on."""
CHUNK = 48
"""Clips that are drawn and encoded at a time."""
FIRST_FILL = 4
"""Batches' worth of clips that are there from the start."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Videos or pictures of one size."""

    width: int
    height: int
    frames: int
    batch: int
    share: float
    """Of the steps."""
    room: int
    """Clips that its reservoir holds."""

    @property
    def name(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"


BUCKETS = (
    Bucket(128, 128, 17, batch=192, share=0.48, room=49_152),
    Bucket(128, 128, 1, batch=768, share=0.16, room=24_576),
    Bucket(192, 128, 17, batch=128, share=0.09, room=6_144),
    Bucket(128, 192, 17, batch=128, share=0.09, room=6_144),
    Bucket(128, 128, 33, batch=96, share=0.07, room=4_096),
    Bucket(192, 128, 33, batch=64, share=0.03, room=2_048),
    Bucket(128, 128, 9, batch=320, share=0.04, room=4_096),
    Bucket(192, 128, 1, batch=512, share=0.02, room=4_096),
    Bucket(128, 192, 1, batch=512, share=0.02, room=4_096),
)
"""All batches cost about the same: some 50,000 to 60,000 tokens."""
MINIATURE_BUCKETS = (
    Bucket(64, 64, 5, batch=2, share=0.5, room=8),
    Bucket(64, 64, 1, batch=2, share=0.5, room=8),
)


class Reservoir:
    """The latents of one bucket's clips, with their prompts; with `line`, of outlines (drawing.py)."""

    def __init__(
        self,
        bucket: Bucket,
        parts: Parts,
        supply: Supply,
        *,
        recorder: Recorder,
        device: torch.device,
        seed: str,
        line: float | None = None,
    ) -> None:
        self.bucket = bucket
        self._line = line
        self._vae = parts.vae
        self._scale = LatentScale(parts.vae, device)
        self._device = device
        self._chunk = min(CHUNK, bucket.room)
        self._batches = supply.stream(width=bucket.width, height=bucket.height, count=self._chunk, seed=seed)
        first = self._drawn(next(self._batches))
        self._encode = recorder.capture(self._encoded, first)
        (latents,) = self._encode(first)
        self._latents_NCTHW = latents.new_empty((bucket.room, *latents.shape[1:]), dtype=torch.float16)
        self._tokens_NL = torch.zeros(bucket.room, MAX_WORDS, dtype=torch.int16, device=device)
        self._size = self._next = 0
        self._owed = float(min(bucket.room, FIRST_FILL * bucket.batch))

    def take(self) -> tuple[Tensor, Tensor]:
        """Latents and tokens of clips at random; draws and encodes as many new ones as are due."""
        while self._owed > 0:
            self._add(next(self._batches))
        self._owed += self.bucket.batch / REUSE
        rows = torch.randint(self._size, (self.bucket.batch,), device=self._device)
        return self._latents_NCTHW[rows].float(), self._tokens_NL[rows].long()

    def _add(self, batch: Batch) -> None:
        (latents,) = self._encode(self._drawn(batch))
        rows = torch.arange(self._next, self._next + self._chunk, device=self._device) % self.bucket.room
        self._latents_NCTHW[rows] = latents.half()
        self._tokens_NL[rows] = to_device(padded(batch.tokens), self._device)
        self._next = (self._next + self._chunk) % self.bucket.room
        self._size = min(self._size + self._chunk, self.bucket.room)
        self._owed -= self._chunk

    def _drawn(self, batch: Batch) -> Tensor:
        bucket = self.bucket
        strokes = sketch(batch.scenes).to(self._device)
        drawn = draw(strokes, width=bucket.width, height=bucket.height, frames=bucket.frames, line=self._line)
        return drawn * 2 - 1

    @torch.no_grad()
    def _encoded(self, video_BCTHW: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda"):
            mean, _ = encode_moments(self._vae, video_BCTHW)
        return (self._scale.normalize(mean.float()),)


def padded(tokens: Sequence[Sequence[int]]) -> Tensor:
    """[B, L] int16, with 0 (<pad>) behind each prompt."""
    rows = [[*row[:MAX_WORDS], *[0] * (MAX_WORDS - len(row))] for row in tokens]
    return torch.tensor(rows, dtype=torch.int16)
