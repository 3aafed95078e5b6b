"""Drawing scenes: many at a time, on any device, with clean edges.

Each shape is a signed distance (negative inside, in radii); a pixel takes the shape's colour as far
as the edge leaves it covered. So edges are smooth over one pixel, at any place between pixels.

Legend: B scenes, N things of a scene, T frames, H rows, W columns.
Source: the distances of star and heart are those of https://iquilezles.org/articles/distfunctions2d
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.scenes import COLOURS, Scene

MAX_THINGS = 2
SHADING = 0.06
"""A background is so much lighter at the top than its colour, and darker at the bottom."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The numbers of many scenes, ready for a device. A thing that is not there has radius 0."""

    background_BC: Tensor
    colour_BNC: Tensor
    radius_BN: Tensor
    start_BNX: Tensor
    end_BNX: Tensor
    rows: tuple[tuple[int, str, Tensor], ...]
    """n, shape, and the scenes whose n-th thing has it: told here, so that drawing waits for no device."""

    def to(self, device: str | torch.device) -> Sketch:
        moved = {
            name: to_device(value, device)
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Tensor)
        }
        rows = tuple((n, shape, to_device(rows, device)) for n, shape, rows in self.rows)
        return Sketch(**moved, rows=rows)


def to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A small tensor's copy, which the host does not wait for."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def sketch(scenes: Sequence[Scene]) -> Sketch:
    """The numbers of these scenes."""
    values: dict[str, list[list[object]]] = {
        name: [] for name in ("colour_BNC", "radius_BN", "start_BNX", "end_BNX")
    }
    members: dict[tuple[int, str], list[int]] = {}
    for number, scene in enumerate(scenes):
        things = (scene.things * MAX_THINGS)[:MAX_THINGS]
        values["colour_BNC"].append([COLOURS[thing.colour] for thing in things])
        values["radius_BN"].append([t.radius if n < len(scene.things) else 0.0 for n, t in enumerate(things)])
        values["start_BNX"].append([thing.start for thing in things])
        values["end_BNX"].append([thing.end for thing in things])
        for n, thing in enumerate(scene.things):
            members.setdefault((n, thing.shape), []).append(number)
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    tensors["colour_BNC"] = tensors["colour_BNC"] / 255
    background_BC = torch.tensor([COLOURS[scene.background] for scene in scenes]) / 255
    rows = tuple((n, shape, torch.tensor(numbers)) for (n, shape), numbers in sorted(members.items()))
    return Sketch(background_BC=background_BC, **tensors, rows=rows)


def draw(sketch: Sketch, *, width: int, height: int, frames: int, line: float | None = None) -> Tensor:
    """Videos of scenes, on the sketch's device. With `line`, in radii, only outlines of this width.

    Shapes: -> [B, 3, T, H, W] float32 in [0, 1]; frame 0 shows the start, the last one the end.
    """
    device = sketch.radius_BN.device
    y_H = torch.arange(height, device=device) + 0.5
    x_W = torch.arange(width, device=device) + 0.5
    sides = torch.tensor([width, height], device=device)
    time_T = torch.linspace(0, 1, frames, device=device) if frames > 1 else torch.zeros(1, device=device)
    start_BNX, end_BNX = sketch.start_BNX * sides, sketch.end_BNX * sides
    centre_BNTX = torch.lerp(start_BNX[:, :, None], end_BNX[:, :, None], time_T[:, None])
    radius_BN = sketch.radius_BN * min(width, height)
    video_BCTHW = shaded(sketch.background_BC, y_H / height)[:, :, None, :, None]
    video_BCTHW = video_BCTHW.expand(-1, -1, frames, -1, width).contiguous()
    for n, shape, rows in sketch.rows:
        radius = radius_BN[rows, n][:, None, None, None]
        centre = centre_BNTX[rows, n][:, :, None, None]
        x = (x_W - centre[..., 0]) / radius
        y = (y_H[:, None] - centre[..., 1]) / radius
        distance = DISTANCES[shape](x, y)
        if line is not None:
            distance = (distance + line / 2).abs() - line / 2
        covered_BTHW = (0.5 - distance * radius).clamp(0, 1)
        colour = sketch.colour_BNC[rows, n][:, :, None, None, None]
        video_BCTHW[rows] = torch.lerp(video_BCTHW[rows], colour, covered_BTHW[:, None])
    return video_BCTHW


def shaded(colour_BC: Tensor, y_H: Tensor) -> Tensor:
    """Background colours down the rows of a picture ([B, C, H]); y_H: from 0 at the top to 1."""
    return (colour_BC[:, :, None] * (1 + SHADING * (1 - 2 * y_H))).clamp(0, 1)


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 1


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - 0.76).abs() - 0.27


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.9


def _diamond(x: Tensor, y: Tensor) -> Tensor:
    wide, high = 0.85, 1.2
    return (x.abs() / wide + y.abs() / high - 1) * (wide * high / math.hypot(wide, high))


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    """Equilateral, point up."""
    sides = x.abs() * math.cos(math.pi / 6) - y * math.sin(math.pi / 6)
    return torch.maximum(sides, y) - 0.6


def _star(x: Tensor, y: Tensor) -> Tensor:
    """Five points, one of them up."""
    cos, sin = math.cos(math.pi / 5), math.sin(math.pi / 5)
    px, py = x.abs(), -y
    for sign in (1, -1):
        over = 2 * (sign * cos * px - sin * py).clamp(min=0)
        px, py = px - over * sign * cos, py + over * sin
    px, py = px.abs(), py - 1.2
    side_x, side_y = 0.47 * sin, 0.47 * cos - 1
    along = ((px * side_x + py * side_y) / (side_x**2 + side_y**2)).clamp(0, 1.2)
    return torch.hypot(px - side_x * along, py - side_y * along) * torch.sign(py * side_x - px * side_y)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    scale = 1.8
    px, py = x.abs() / scale, 0.58 - y / scale
    lobe = torch.hypot(px - 0.25, py - 0.75) - math.sqrt(2) / 4
    diagonal = 0.5 * (px + py).clamp(min=0)
    body = torch.minimum(torch.hypot(px, py - 1), torch.hypot(px - diagonal, py - diagonal))
    return torch.where(px + py > 1, lobe, body * torch.sign(px - py)) * scale


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "diamond": _diamond,
    "ring": _ring,
}
"""Signed distance to each shape, in radii, at points given in radii from its centre, y down."""
