"""What the pictures of `shapes` show, and how prompts say it.

A scene is one or two coloured shapes on a coloured background, at rest or on a straight way.
`sample_scene` makes one up, `describe` puts it into words in one of many ways; drawing.py draws
it, measures.py finds it again in pixels. Some combinations of shape, colour and background are
never trained on: `is_held_out`.

Units: positions are fractions of width and height, x to the right and y down; a radius is a
       fraction of the shorter side.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

STILL = "still"
MOTIONS: Mapping[str, tuple[int, int]] = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
RELATIONS: Mapping[str, tuple[int, int]] = {
    "above": (0, -1),
    "below": (0, 1),
    "left of": (-1, 0),
    "right of": (1, 0),
}
"""Where the first thing is, seen from the second."""

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


def is_held_out(shape: str, colour: str, background: str) -> bool:
    """Whether this combination never occurs in training.

    How far apart the two colours are in the table decides, for each shape another distance: so each
    shape, each colour and each background has the same share of what is held out.
    """
    colours = list(COLOURS)
    apart = colours.index(colour) - colours.index(background)
    return (2 * apart + SHAPES.index(shape)) % len(colours) == len(SHAPES)


def sample_scene(rng: Random, *, width: int, height: int, held_out: bool = False) -> Scene:
    """A scene made up at random, for pictures of this size.

    held_out: all its combinations are of those that are not trained on; else none is.
    """
    background = rng.choice(list(COLOURS))
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


VERBS = (
    ("moves", "moving"),
    ("slides", "sliding"),
    ("drifts", "drifting"),
    ("glides", "gliding"),
    ("travels", "travelling"),
    ("floats", "floating"),
    ("flies", "flying"),
    ("goes", "going"),
)
WAYS: Mapping[str, Sequence[str]] = {
    "right": (
        "left to right",
        "from left to right",
        "to the right",
        "from the left to the right",
        "rightwards",
    ),
    "left": ("right to left", "from right to left", "to the left", "from the right to the left", "leftwards"),
    "up": ("up", "upwards", "from bottom to top", "from the bottom to the top", "to the top"),
    "down": ("down", "downwards", "from top to bottom", "from the top to the bottom", "to the bottom"),
}
SPECIAL_VERBS: Mapping[str, Sequence[tuple[str, str]]] = {
    "up": (("rises", "rising"),),
    "down": (("falls", "falling"), ("sinks", "sinking")),
    STILL: (
        ("stays still", "staying still"),
        ("rests", "resting"),
        ("stands still", "standing still"),
        ("does not move", "not moving"),
    ),
}
PLACE_WORDS: Mapping[str, Sequence[str]] = {
    "top left": ("at the top left", "in the top left corner", "in the upper left corner", "top left"),
    "top": ("at the top", "near the top", "in the upper part"),
    "top right": ("at the top right", "in the top right corner", "in the upper right corner", "top right"),
    "left": ("on the left", "at the left", "on the left side"),
    "center": ("in the center", "in the middle", "at the center", "in the centre"),
    "right": ("on the right", "at the right", "on the right side"),
    "bottom left": (
        "at the bottom left",
        "in the bottom left corner",
        "in the lower left corner",
        "bottom left",
    ),
    "bottom": ("at the bottom", "near the bottom", "in the lower part"),
    "bottom right": (
        "at the bottom right",
        "in the bottom right corner",
        "in the lower right corner",
        "bottom right",
    ),
}
RELATION_WORDS: Mapping[str, Sequence[str]] = {
    "above": ("above", "over", "above"),
    "below": ("below", "under", "beneath"),
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
}
OPPOSITE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}
SHAPE_WORDS: Mapping[str, Sequence[str]] = {
    "circle": ("circle", "circle", "disc", "ball"),
    "square": ("square", "square", "box"),
    "diamond": ("diamond", "diamond", "rhombus"),
}
SIZE_WORDS: Mapping[str, Sequence[str]] = {
    "small": ("small", "small", "little", "tiny"),
    "large": ("large", "big", "huge"),
}
BACKDROPS = (
    "on a {} background",
    "on a {} background",
    "against a {} background",
    "on {}",
    "over a {} backdrop",
)
SCENERY = ("{} background", "a {} background", "{} backdrop")
OPENINGS = (
    "a video of",
    "an animation of",
    "a picture of",
    "an image of",
    "a drawing of",
    "a clip of",
    "video of",
)
PATTERNS_OF_ONE = (
    "{thing}{does}{place} {on}",
    "{thing}{doing}{place} {on}",
    "{thing}{doing}{place}, {scenery}",
    "{thing}{place}{doing}, {scenery}",
    "{on}, {thing}{does}{place}",
    "{scenery} with {thing}{doing}{place}",
)
PATTERNS_OF_TWO = (
    "{thing}{does} {link} {other} {on}",
    "{thing}{doing} {link} {other} {on}",
    "{thing}{doing} {link} {other}, {scenery}",
    "{thing}{does} {on}, {link} {other}",
    "{on}, {thing}{does} {link} {other}",
    "{scenery} with {thing}{doing} {link} {other}",
)
GLUE = "with that is and , . a an the"
"""Words that no table above has."""


def describe(scene: Scene, rng: Random) -> str:
    """A prompt for this scene; the words differ from call to call, what they say does not."""
    things, relation = scene.things, scene.relation
    if len(things) == 2 and rng.random() < 0.5:
        things, relation = (things[1], things[0]), OPPOSITE[relation] if relation else None
    first = things[0]
    is_clear = len(things) == 1 or things[1].motion == STILL
    does, doing = _motion_words(first.motion, rng, may_omit=relation is not None or is_clear)
    parts = {
        "thing": _noun(first, rng),
        "does": does,
        "doing": doing,
        "on": _with_article(rng.choice(BACKDROPS), scene.background),
        "scenery": _with_article(rng.choice(SCENERY), scene.background),
        "place": f" {rng.choice(PLACE_WORDS[scene.place])}" if scene.place else "",
        "link": "and",
        "other": "",
    }
    if len(things) == 2:
        parts["link"] = rng.choice(RELATION_WORDS[relation]) if relation else "and"
        parts["other"] = _other(things[1], rng, links=relation is not None)
    pattern = rng.choice(PATTERNS_OF_ONE if len(things) == 1 else PATTERNS_OF_TWO)
    text = pattern.format(**parts)
    if pattern.startswith("{thing}{doing}") and rng.random() < 0.5:
        text = f"{rng.choice(OPENINGS)} {text}"
    return text + "." * (rng.random() < 0.15)


def _with_article(pattern: str, colour: str) -> str:
    return pattern.format(colour).replace(
        f"a {colour}", f"an {colour}" if colour[0] in "aeiou" else f"a {colour}"
    )


def _noun(thing: Thing, rng: Random) -> str:
    words = [thing.colour, rng.choice(SHAPE_WORDS.get(thing.shape, (thing.shape,)))]
    if thing.says_size:
        words.insert(0, rng.choice(SIZE_WORDS[thing.size]))
    article = "an" if words[0][0] in "aeiou" else "a"
    return " ".join([*([article] if rng.random() < 0.9 else []), *words])


def _motion_words(motion: str, rng: Random, *, may_omit: bool = True) -> tuple[str, str]:
    """A finite verb and a participle with all that belongs to them, each after a blank.

    Often nothing for a thing at rest, if that may be left out.
    """
    special = SPECIAL_VERBS.get(motion, ())
    if motion == STILL:
        if may_omit and rng.random() < 0.6:
            return "", ""
        does, doing = rng.choice(special)
    elif special and rng.random() < 0.25:
        does, doing = rng.choice(special)
    else:
        way = rng.choice(WAYS[motion])
        does, doing = (f"{verb} {way}" for verb in rng.choice(VERBS))
    return f" {does}", f" {doing}"


def _other(thing: Thing, rng: Random, *, links: bool) -> str:
    """The second thing with its motion; after a link such as "above", so that only it can be meant."""
    does, doing = _motion_words(thing.motion, rng)
    if not does:
        return _noun(thing, rng)
    return _noun(thing, rng) + rng.choice((f" that{does}", f" that is{doing}") if links else (does, doing))


def words() -> tuple[str, ...]:
    """All words and marks that prompts may have, sorted."""
    tables: tuple[Iterable[str], ...] = (
        COLOURS,
        SHAPES,
        BACKDROPS,
        SCENERY,
        OPENINGS,
        (GLUE,),
        *WAYS.values(),
        *PLACE_WORDS.values(),
        *RELATION_WORDS.values(),
        *SHAPE_WORDS.values(),
        *SIZE_WORDS.values(),
        *VERBS,
        *itertools.chain.from_iterable(SPECIAL_VERBS.values()),
    )
    phrases = itertools.chain.from_iterable(tables)
    return tuple(sorted({word for phrase in phrases for word in re.findall(r"[a-z]+|[.,]", phrase)}))
