"""What the benchmarks of models give to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """A picture (1 frame) or video of a model of the named ones."""

    model: str
    width: int
    height: int
    frames: int

    @property
    def name(self) -> str:
        """As in wan-832x480x49 or qwen-512x512."""
        frames = f"x{self.frames}" if self.frames > 1 else ""
        return f"{self.model.split('2')[0].split('-')[0]}-{self.width}x{self.height}{frames}{self.variant}"

    @property
    def variant(self) -> str:
        """What sets it apart from others of its size, as in "-image"."""
        return ""
