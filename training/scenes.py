"""What the pictures of `shapes` show.

A scene is one or two coloured shapes on a coloured background, at rest or on a straight way.
`sample_scene` makes one up; prompts.py puts it into words, drawing.py draws it, measures.py finds it
again in pixels. Some combinations of shape, colour and background are never trained on: `is_held_out`.

Units: positions are fractions of width and height, x to the right and y down; a radius is a
       fraction of the shorter side.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from random import Random

COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 45, 45),
    "orange": (245, 140, 35),
    "yellow": (250, 215, 60),
    "green": (50, 165, 80),
    "blue": (50, 100, 215),
    "purple": (135, 65, 185),
    "pink": (245, 150, 190),
    "white": (245, 245, 245),
    "black": (30, 30, 35),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "ring")
SIZES: Mapping[str, float] = {"small": 0.12, "medium": 0.16, "large": 0.20}
"""Radii. Moving rings and stars that are smaller get lost in the VAE: a latent is 8 x 8 pixels."""
EXTENT = 1.2
"""How far a shape reaches from its centre, in radii: the tips of the star and the triangle."""

PLAIN_BACKGROUNDS = ("white", "black", "blue")
"""Of a prompt that names none: the first of these that none of its things has."""
STILL = "still"
MOTIONS: Mapping[str, tuple[int, int]] = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
RELATIONS: Mapping[str, tuple[int, int]] = {
    "above": (0, -1),
    "below": (0, 1),
    "left of": (-1, 0),
    "right of": (1, 0),
}
"""Where the first thing is, seen from the second."""
OPPOSITE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}

PLACES: Mapping[str, tuple[int, int]] = {
    "top left": (0, 0),
    "top": (1, 0),
    "top right": (2, 0),
    "left": (0, 1),
    "center": (1, 1),
    "right": (2, 1),
    "bottom left": (0, 2),
    "bottom": (1, 2),
    "bottom right": (2, 2),
}
"""Column and row of a 3 x 3 grid. A moving thing has only the one that its way keeps."""
CELL = (0.22, 0.5, 0.78)
"""Where the cells' centres are."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Thing:
    """One coloured shape; its way is straight and takes the whole video."""

    shape: str
    colour: str
    size: str
    motion: str
    start: Point
    end: Point
    radius: float
    says_size: bool
    """Whether prompts tell the size; else any size will do."""


@dataclass(frozen=True, slots=True)
class Scene:
    """All that a picture or video shows. What prompts do not tell is None."""

    background: str
    things: tuple[Thing, ...]
    place: str | None = None
    """Of a single thing."""
    relation: str | None = None
    """Of the first thing to the second."""
    says_background: bool = True
    """Whether prompts tell it; else it is the plain one."""


def is_held_out(shape: str, colour: str, background: str) -> bool:
    """Whether this combination never occurs in training.

    How far apart the two colours are in the table decides, for each shape another distance: so each
    shape, each colour and each background has the same share of what is held out.
    """
    colours = list(COLOURS)
    apart = colours.index(colour) - colours.index(background)
    return (2 * apart + SHAPES.index(shape)) % len(colours) == len(SHAPES)


def plain_background(colours: Collection[str]) -> str:
    """The background of things with these colours where a prompt names none."""
    return next(name for name in PLAIN_BACKGROUNDS if name not in colours)


def sample_scene(
    rng: Random, *, width: int, height: int, held_out: bool = False, says_background: bool = True
) -> Scene:
    """A scene made up at random, for pictures of this size.

    held_out: all its combinations are of those that are not trained on; else none is.
    """
    while True:
        background = rng.choice(list(COLOURS) if says_background else PLAIN_BACKGROUNDS)
        scene = _scene_on(background, rng, width=width, height=height, held_out=held_out)
        if says_background:
            return scene
        if background == plain_background([thing.colour for thing in scene.things]):
            return replace(scene, says_background=False)


def _scene_on(background: str, rng: Random, *, width: int, height: int, held_out: bool) -> Scene:
    pairs = [
        (shape, colour)
        for shape, colour in itertools.product(SHAPES, COLOURS)
        if colour != background and is_held_out(shape, colour, background) == held_out
    ]
    first, second = rng.choice(pairs), rng.choice(pairs)
    while second[1] == first[1]:
        second = rng.choice(pairs)
    canvas = _Canvas(rng, width=width, height=height)
    if rng.random() < 0.5:
        return canvas.with_one(background, first)
    return canvas.with_two(background, first, second)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Places things so that all of them are seen whole, and none covers another."""

    rng: Random
    width: int
    height: int

    def with_one(self, background: str, look: tuple[str, str]) -> Scene:
        size = self.rng.choice(list(SIZES))
        radius = self._radius(size)
        motion = STILL if self.rng.random() < 0.35 else self.rng.choice(list(MOTIONS))
        names = [name for name in PLACES if motion == STILL or _keeps(name, motion)]
        place = self.rng.choice(names) if self.rng.random() < 0.5 else None
        cell = PLACES[place] if place else (None, None)
        at = [self._coordinate(axis, cell[axis], radius) for axis in (0, 1)]
        thing = self._moving(look, size, motion, (at[0], at[1]), radius)
        return Scene(background, (thing,), place=place)

    def with_two(self, background: str, *looks: tuple[str, str]) -> Scene:
        """Side by side along one axis; each may move along the other."""
        relation = self.rng.choice(list(RELATIONS))
        axis = 0 if RELATIONS[relation][0] else 1
        order = (0.25, 0.75) if sum(RELATIONS[relation]) < 0 else (0.75, 0.25)
        motions = [name for name, step in MOTIONS.items() if not step[axis]]
        things: list[Thing] = []
        for idx, look in enumerate(looks):
            # Two large ones would not fit beside each other.
            size = self.rng.choice(
                [name for name in SIZES if not (things and name == things[0].size == "large")]
            )
            radius = self._radius(size)
            still = self.rng.random() < (0.3 if idx == 0 else 0.6)
            motion = STILL if still else self.rng.choice(motions)
            at = [0.0, 0.0]
            low, high = self._bounds(axis, radius)
            at[axis] = min(max(order[idx] + self.rng.uniform(-0.02, 0.02), low), high)
            at[1 - axis] = 0.5 + self.rng.uniform(-0.18, 0.18)
            things.append(self._moving(look, size, motion, (at[0], at[1]), radius))
        told = relation if self.rng.random() < 0.75 else None
        return Scene(background, tuple(things), relation=told)

    def _moving(self, look: tuple[str, str], size: str, motion: str, at: Point, radius: float) -> Thing:
        start, end = list(at), list(at)
        if motion != STILL:
            axis = 0 if MOTIONS[motion][0] else 1
            low, high = self._bounds(axis, radius)
            length = min(self.rng.uniform(0.45, 0.6), high - low)
            begin = self.rng.uniform(low, high - length)
            ways = (begin, begin + length)
            start[axis], end[axis] = ways if sum(MOTIONS[motion]) > 0 else reversed(ways)
        says_size = size != "medium" and self.rng.random() < 0.6
        return Thing(
            *look, size, motion, (start[0], start[1]), (end[0], end[1]), radius=radius, says_size=says_size
        )

    def _radius(self, size: str) -> float:
        return SIZES[size] * self.rng.uniform(0.94, 1.06)

    def _coordinate(self, axis: int, cell: int | None, radius: float) -> float:
        low, high = self._bounds(axis, radius)
        if cell is None:
            return self.rng.uniform(low, high)
        return min(max(CELL[cell] + self.rng.uniform(-0.03, 0.03), low), high)

    def _bounds(self, axis: int, radius: float) -> tuple[float, float]:
        """Between which a centre may lie, so that 2 pixels stay free at the border."""
        sides = (self.width, self.height)
        margin = (EXTENT * radius * min(sides) + 2) / sides[axis]
        return margin, 1 - margin


def _keeps(place: str, motion: str) -> bool:
    """Whether a way in this direction has this place: one of the middle column or row, across the way."""
    column, row = PLACES[place]
    return column == 1 if MOTIONS[motion][0] else row == 1
