"""Looking at pixels: which shapes are there, in which colours, where, and which way they move.

`look` knows nothing of the prompt. Colours are the nearest ones of the palette; a shape is the one
whose outline, brought to the same centroid and area (moments of order 0 and 1), covers the same
pixels; directions follow centroids from frame to frame. `judge` compares what was seen with a scene.

Legend: T frames, H rows, W columns, C colour channels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.drawing import DISTANCES, SHADING
from training.scenes import (
    CELL,
    COLOURS,
    MOTIONS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    STILL,
    Scene,
    Thing,
)

MIN_AREA = 0.004
"""Share of the picture from which a patch of colour counts as a thing; the smallest ring covers 2%."""
MIN_OVERLAP = 0.75
"""Intersection over union with its template below which a patch has no shape."""
MIN_WAY = 0.12
"""Share of the picture's side from which a change of place is a motion."""
NUM_LOOKS = 6
"""Frames of a video that are looked at; first and last are among them."""
PAPER_DISTANCE = 25
"""Of 255: a pixel that differs less from an empty picture in all its colour channels is background."""
EDGE = 3
"""Pixels around a thing that may be neither its colour nor the background's."""
MAX_STAIN = 0.01
"""Share of the picture that may be neither background nor a thing, in the worst of its frames."""
MARGIN = 0.03
"""By so much of a side the first thing must be beyond the second."""

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]
Scores = Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Track:
    """One thing through the frames that were looked at."""

    shape: str | None
    """None where no shape fits."""
    centres: tuple[tuple[float, float] | None, ...]
    """Fractions of width and height; None where it was not seen."""
    areas: tuple[float, ...]
    """Shares of the picture."""

    @property
    def is_whole(self) -> bool:
        """Whether it was there all the time."""
        return None not in self.centres

    @property
    def motion(self) -> str | None:
        """Its direction, `still`, or None where it cannot be told: it jumps, or disappears."""
        seen = [centre for centre in self.centres if centre is not None]
        if len(seen) < len(self.centres):
            return None
        way = (seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1])
        axis = 0 if abs(way[0]) >= abs(way[1]) else 1
        if abs(way[axis]) < MIN_WAY:
            return STILL if self._reach(seen) < MIN_WAY else None
        sign = 1 if way[axis] > 0 else -1
        steps = [sign * (after[axis] - before[axis]) for before, after in itertools.pairwise(seen)]
        if min(steps) < -0.02 or abs(way[1 - axis]) > 0.5 * abs(way[axis]):
            return None
        return next(name for name, step in MOTIONS.items() if step[axis] == sign)

    @staticmethod
    def _reach(seen: Sequence[tuple[float, float]]) -> float:
        return max(max(abs(x - seen[0][0]), abs(y - seen[0][1])) for x, y in seen)


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen in a video or picture: its background, and its things by colour."""

    background: str
    tracks: Mapping[str, Track]
    stain: float
    """The largest share of a frame that is neither background nor a thing."""


def look(video_THWC: Pixels) -> Sight:
    """What is seen in a video (or a picture, as one frame)."""
    num_frames = len(video_THWC)
    chosen = np.unique(np.linspace(0, num_frames - 1, min(NUM_LOOKS, num_frames)).round().astype(int))
    frames = video_THWC[chosen].astype(np.float32)
    background = _background_of(frames)
    found = [_things_in(frame, background) for frame in frames]
    colours = [name for name in COLOURS if 2 * sum(name in masks for masks in found) > len(found)]
    stains = [_stain(frame, background, masks) for frame, masks in zip(frames, found, strict=True)]
    return Sight(background, {name: _track(name, found) for name in colours}, max(stains))


def judge(scene: Scene, sight: Sight, *, is_video: bool) -> Scores:
    """Which of the things that the scene's prompts tell are so; of each kind, only if it applies.

    clean: nothing but things is on the background. colour: exactly the things' colours are there.
    shape, direction, size: of all things.
    """
    tracks = [sight.tracks.get(thing.colour) for thing in scene.things]
    return dict(_verdicts(scene, sight, tracks, is_video=is_video))


def _verdicts(
    scene: Scene, sight: Sight, tracks: Sequence[Track | None], *, is_video: bool
) -> Iterator[tuple[str, bool]]:
    yield "background", sight.background == scene.background
    yield "clean", sight.stain <= MAX_STAIN
    yield "colour", set(sight.tracks) == {thing.colour for thing in scene.things}
    pairs = list(zip(scene.things, tracks, strict=True))
    yield "shape", all(track is not None and track.shape == thing.shape for thing, track in pairs)
    if is_video:
        same = [track is not None and track.motion == thing.motion for thing, track in pairs]
        moves = [thing.motion != STILL for thing in scene.things]
        if any(moves):
            yield "direction", all(ok for ok, move in zip(same, moves, strict=True) if move)
        if not all(moves):
            yield "rest", all(ok for ok, move in zip(same, moves, strict=True) if not move)
    if scene.place is not None:
        yield "place", tracks[0] is not None and _is_at(tracks[0], scene.place, scene.things[0].motion)
    if scene.relation is not None:
        first, second = tracks
        yield "relation", first is not None and second is not None and _relates(first, second, scene.relation)
    if any(thing.says_size for thing in scene.things):
        yield "size", all(_has_size(thing, track) for thing, track in pairs if thing.says_size)


def _is_at(track: Track, place: str, motion: str) -> bool:
    """Whether it is in that cell, in the middle of its way; a moving thing only across its way."""
    axes = [axis for axis in (0, 1) if motion == STILL or not MOTIONS[motion][axis]]
    centre = track.centres[len(track.centres) // 2]
    edges = ((CELL[0] + CELL[1]) / 2, (CELL[1] + CELL[2]) / 2)
    if centre is None:
        return False
    return all(sum(centre[axis] > edge for edge in edges) == PLACES[place][axis] for axis in axes)


def _relates(first: Track, second: Track, relation: str) -> bool:
    """Whether the first is there, seen from the second, in every frame."""
    axis = 0 if RELATIONS[relation][0] else 1
    sign = RELATIONS[relation][axis]
    if not (first.is_whole and second.is_whole):
        return False
    pairs = zip(first.centres, second.centres, strict=True)
    return all(sign * (one[axis] - other[axis]) > MARGIN for one, other in pairs if one and other)


def _has_size(thing: Thing, track: Track | None) -> bool:
    """Small things are nearer to small than to medium, large ones nearer to large.

    In radii that follow from the area, as a share of the shorter side.
    """
    if track is None or track.shape is None:
        return False
    share = float(np.median(track.areas)) / _unit_area(thing.shape)
    radius: float = share**0.5
    if thing.size == "small":
        return radius < (SIZES["small"] + SIZES["medium"]) / 2
    return radius > (SIZES["medium"] + SIZES["large"]) / 2


def _background_of(frames_THWC: Floats) -> str:
    """The colour that most pixels of the border have."""
    edge = 2
    border = np.concatenate(
        [
            part.reshape(-1, 3)
            for part in (
                frames_THWC[:, :edge],
                frames_THWC[:, -edge:],
                frames_THWC[:, :, :edge],
                frames_THWC[:, :, -edge:],
            )
        ]
    )
    return _NAMES[int(np.bincount(_nearest(border), minlength=len(_NAMES)).argmax())]


def _things_in(frame_HWC: Floats, background: str) -> dict[str, Mask]:
    """The pixels of each colour that has enough of them.

    A pixel between two colours can be nearest to a third; such edges are thin, so only pixels
    whose neighbours all have the same name tell that a colour is there.
    """
    height, width, _ = frame_HWC.shape
    paper_HWC = _paper(background, height, width)
    labels = _nearest(frame_HWC.reshape(-1, 3)).reshape(height, width)
    behind = _NAMES.index(background)
    labels[_is_paper(frame_HWC, paper_HWC)] = behind
    solid = _solid(labels)
    counts = np.bincount(labels[solid], minlength=len(_NAMES))
    present = [
        idx for idx, count in enumerate(counts) if idx != behind and count > MIN_AREA / 2 * height * width
    ]
    away = []
    masks = []
    for idx in present:
        towards = _PALETTE[idx] - paper_HWC
        covered = ((frame_HWC - paper_HWC) * towards).sum(-1) / (towards**2).sum(-1)
        rest = frame_HWC - paper_HWC - np.clip(covered, 0, 1)[..., None] * towards
        masks.append(covered > 0.5)
        away.append((rest**2).sum(-1))
    if not present:
        return {}
    nearest = np.argmin(np.stack(away), axis=0)
    found = {_NAMES[idx]: masks[n] & (nearest == n) for n, idx in enumerate(present)}
    return {name: mask for name, mask in found.items() if mask.mean() > MIN_AREA}


def _is_paper(frame_HWC: Floats, paper_HWC: Floats) -> Mask:
    close: Mask = np.abs(frame_HWC - paper_HWC).max(axis=-1) < PAPER_DISTANCE
    return close


def _stain(frame_HWC: Floats, background: str, masks: Mapping[str, Mask]) -> float:
    """The share of the picture that is neither background nor a thing or its edge."""
    away = ~_is_paper(frame_HWC, _paper(background, *frame_HWC.shape[:2]))
    things = np.zeros_like(away)
    for mask in masks.values():
        things |= mask
    for _ in range(EDGE):
        things = ~_solid(things) | things
    return float((away & ~things).mean())


def _solid(labels_HW: NDArray[Any]) -> Mask:
    """Pixels whose eight neighbours have the same label."""
    padded = np.pad(labels_HW, 1, mode="edge")
    height, width = labels_HW.shape
    same = np.ones((height, width), dtype=bool)
    for dy in range(3):
        for dx in range(3):
            same &= padded[dy : dy + height, dx : dx + width] == labels_HW
    return same


def _track(colour: str, found: Sequence[Mapping[str, Mask]]) -> Track:
    """One colour's thing, and the shape that fits best over all frames."""
    centres: list[tuple[float, float] | None] = []
    areas: list[float] = []
    overlaps = []
    for masks in found:
        if colour not in masks:
            centres.append(None)
            continue
        mask = masks[colour]
        height, width = mask.shape
        rows, columns = np.nonzero(mask)
        x, y = float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
        centres.append((x / width, y / height))
        areas.append(len(rows) / min(height, width) ** 2)
        overlaps.append(_overlaps(mask, x, y))
    mean = np.mean(overlaps, axis=0)
    best = int(mean.argmax())
    return Track(SHAPES[best] if mean[best] >= MIN_OVERLAP else None, tuple(centres), tuple(areas))


def _overlaps(mask_HW: Mask, x: float, y: float) -> list[float]:
    """Intersection over union of a mask with each shape of the same centroid and area."""
    area = int(mask_HW.sum())
    scale = _TEMPLATE_SIDE / _TEMPLATE_REACH / 2 / area**0.5
    reach = math.ceil(_TEMPLATE_REACH * area**0.5)
    top, left = max(0, int(y) - reach), max(0, int(x) - reach)
    seen = mask_HW[top : int(y) + reach, left : int(x) + reach]
    height, width = seen.shape
    rows = ((np.arange(top, top + height) + 0.5 - y) * scale + _TEMPLATE_SIDE / 2).astype(int)
    columns = ((np.arange(left, left + width) + 0.5 - x) * scale + _TEMPLATE_SIDE / 2).astype(int)
    grid = np.ix_(rows.clip(0, _TEMPLATE_SIDE - 1), columns.clip(0, _TEMPLATE_SIDE - 1))
    overlaps = []
    for shape in SHAPES:
        common = int((_template(shape)[grid] & seen).sum())
        # What lies outside of the picture's borders is in neither, and the template has the mask's area.
        overlaps.append(common / (2 * area - common))
    return overlaps


_TEMPLATE_SIDE = 192
_TEMPLATE_REACH = 1.6
"""Half a template's side; its shape has area 1."""


@functools.cache
def _template(shape: str) -> Mask:
    """The shape with its centroid in the middle and area 1."""
    inside, step = _unit_mask(shape)
    rows, columns = np.nonzero(inside)
    centroid = np.array([columns.mean(), rows.mean()])
    centroid = (centroid + 0.5) * step - _UNIT_REACH
    ticks = ((np.arange(_TEMPLATE_SIDE) + 0.5) / _TEMPLATE_SIDE * 2 - 1) * _TEMPLATE_REACH
    ticks = ticks * _unit_area(shape) ** 0.5
    return _is_inside(shape, ticks + centroid[0], ticks + centroid[1])


@functools.cache
def _unit_area(shape: str) -> float:
    """Area of the shape of radius 1."""
    inside, step = _unit_mask(shape)
    return float(inside.sum() * step**2)


_UNIT_REACH = 1.3


def _unit_mask(shape: str) -> tuple[Mask, float]:
    """The shape of radius 1 on a grid, and the grid's step."""
    side = 400
    step = 2 * _UNIT_REACH / side
    ticks = (np.arange(side) + 0.5) * step - _UNIT_REACH
    return _is_inside(shape, ticks, ticks), step


def _is_inside(shape: str, x_W: NDArray[Any], y_H: NDArray[Any]) -> Mask:
    distance = DISTANCES[shape](torch.from_numpy(x_W)[None, :], torch.from_numpy(y_H)[:, None])
    inside: Mask = (distance < 0).numpy()
    return inside


_NAMES = tuple(COLOURS)
_PALETTE = np.array(list(COLOURS.values()), dtype=np.float32)


def _nearest(pixels_PC: Floats) -> NDArray[np.intp]:
    """The palette's nearest colour of each pixel."""
    distance = (_PALETTE**2).sum(-1) - 2 * pixels_PC @ _PALETTE.T
    nearest: NDArray[np.intp] = distance.argmin(-1)
    return nearest


def _paper(background: str, height: int, width: int) -> Floats:
    """An empty picture with this background. Source: drawing.shaded."""
    y_H = (np.arange(height, dtype=np.float32) + 0.5) / height
    shaded = _PALETTE[_NAMES.index(background)] * (1 + SHADING * (1 - 2 * y_H))[:, None]
    rows: Floats = np.broadcast_to(shaded.clip(0, 255)[:, None], (height, width, 3)).astype(np.float32)
    return rows
