"""How prompts of `shapes` say what a scene shows: the language that the model learns.

`describe` puts a scene into words in one of many ways.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from training.scenes import COLOURS, OPPOSITE, SHAPES, STILL, Scene, Thing

Noun = Callable[[Thing, Random], str]
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
BACKDROPS_AFTER = ("on a background that is {}", *BACKDROPS)
SCENERY_AFTER = ("the background is {}", *SCENERY)
"""With adjectives after their nouns; the usual ones go with them, too."""
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
PATTERNS_WITHOUT_BACKGROUND: Mapping[int, Sequence[str]] = {
    1: ("{thing}{does}{place}", "{thing}{doing}{place}", "{thing}{place}{doing}"),
    2: ("{thing}{does} {link} {other}", "{thing}{doing} {link} {other}"),
}
"""By the number of things."""
NOUNS_AFTER = ("{shape}, {colour},", "{shape}, {colour}", "{shape} that is {colour}", "{shape} in {colour}")
SIZED_NOUNS_AFTER = (
    "{shape}, {size} and {colour},",
    "{shape}, {colour}, {size},",
    "{size} {shape}, {colour},",
    "{colour} {shape}, {size}",
    "{shape} that is {size} and {colour}",
    "{size} {shape} in {colour}",
)
"""How adjectives may follow their nouns."""
GLUE = "with that is and , . a an the"
"""Words that no table above has."""


def describe(scene: Scene, rng: Random, *, adjectives_after: bool = False) -> str:
    """A prompt for this scene; the words differ from call to call, what they say does not.

    adjectives_after: "a square, red, on a blue background".
    """
    things, relation = scene.things, scene.relation
    if len(things) == 2 and rng.random() < 0.5:
        things, relation = (things[1], things[0]), OPPOSITE[relation] if relation else None
    first = things[0]
    is_clear = len(things) == 1 or things[1].motion == STILL
    does, doing = _motion_words(first.motion, rng, may_omit=relation is not None or is_clear)
    noun: Noun = _noun_with_adjectives_after if adjectives_after else _noun
    backdrops, sceneries = (BACKDROPS_AFTER, SCENERY_AFTER) if adjectives_after else (BACKDROPS, SCENERY)
    parts = {
        "thing": noun(first, rng),
        "does": does,
        "doing": doing,
        "on": _with_article(rng.choice(backdrops), scene.background),
        "scenery": _with_article(rng.choice(sceneries), scene.background),
        "place": f" {rng.choice(PLACE_WORDS[scene.place])}" if scene.place else "",
        "link": "and",
        "other": "",
    }
    if len(things) == 2:
        parts["link"] = rng.choice(RELATION_WORDS[relation]) if relation else "and"
        parts["other"] = _other(things[1], noun, rng, links=relation is not None)
    pattern = rng.choice(_patterns(scene))
    text = pattern.format(**parts)
    if pattern.startswith("{thing}{doing}") and rng.random() < 0.5:
        text = f"{rng.choice(OPENINGS)} {text}"
    # A comma that closes an adjective goes where another one follows, or nothing.
    return re.sub(r",(?=,|$)", "", text) + "." * (rng.random() < 0.15)


def _patterns(scene: Scene) -> Sequence[str]:
    if not scene.says_background:
        return PATTERNS_WITHOUT_BACKGROUND[len(scene.things)]
    return PATTERNS_OF_ONE if len(scene.things) == 1 else PATTERNS_OF_TWO


def _with_article(pattern: str, colour: str) -> str:
    return pattern.format(colour).replace(
        f"a {colour}", f"an {colour}" if colour[0] in "aeiou" else f"a {colour}"
    )


def _noun(thing: Thing, rng: Random) -> str:
    words = [thing.colour, rng.choice(SHAPE_WORDS.get(thing.shape, (thing.shape,)))]
    if thing.says_size:
        words.insert(0, rng.choice(SIZE_WORDS[thing.size]))
    return _perhaps_with_article(" ".join(words), rng)


def _noun_with_adjectives_after(thing: Thing, rng: Random) -> str:
    shape = rng.choice(SHAPE_WORDS.get(thing.shape, (thing.shape,)))
    if not thing.says_size:
        words = rng.choice(NOUNS_AFTER).format(shape=shape, colour=thing.colour)
    else:
        size = rng.choice(SIZE_WORDS[thing.size])
        words = rng.choice(SIZED_NOUNS_AFTER).format(shape=shape, colour=thing.colour, size=size)
    return _perhaps_with_article(words, rng)


def _perhaps_with_article(words: str, rng: Random) -> str:
    article = "an" if words[0] in "aeiou" else "a"
    return f"{article} {words}" if rng.random() < 0.9 else words


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


def _other(thing: Thing, noun: Noun, rng: Random, *, links: bool) -> str:
    """The second thing with its motion; after a link such as "above", so that only it can be meant."""
    does, doing = _motion_words(thing.motion, rng)
    if not does:
        return noun(thing, rng)
    return noun(thing, rng) + rng.choice((f" that{does}", f" that is{doing}") if links else (does, doing))


def words() -> tuple[str, ...]:
    """All words and marks that prompts may have, sorted."""
    tables: tuple[Iterable[str], ...] = (
        COLOURS,
        SHAPES,
        BACKDROPS_AFTER,
        SCENERY_AFTER,
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
