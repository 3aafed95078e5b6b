"""Scenes and their prompts for training, made up by processes beside the one that trains."""

from __future__ import annotations

import functools
import multiprocessing
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from training.prompts import describe, words
from training.scenes import Scene, sample_scene

SPECIAL = ("<pad>", "</s>", "<unk>")
MAX_WORDS = 55
"""Tokens of the longest prompt, its end included, with room."""
EMPTY_SHARE = 0.1
"""Prompts left empty, so that guidance works too."""
STRANGE_SHARE = 0.08
"""Prompts with a word that is not in the vocabulary, which changes nothing."""
NO_BACKGROUND_SHARE = 0.25
"""Scenes whose prompts name no background."""
AFTER_SHARE = 0.2
"""Prompts with adjectives after their nouns."""
MIN_RADIUS = 0.125
AHEAD = 3
"""Batches of an order that are made before they are asked for."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to make up: so many scenes for pictures of this size."""

    width: int
    height: int
    count: int
    seed: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Scenes, and the tokens of a prompt for each."""

    scenes: tuple[Scene, ...]
    tokens: tuple[tuple[int, ...], ...]


class Supply(AbstractContextManager["Supply"]):
    """Batches without end, in an order that follows from their seeds alone."""

    def __init__(self, *, num_processes: int) -> None:
        self._executor: ProcessPoolExecutor | None = None
        if num_processes:
            # Forked before there is a GPU context: they need nothing of torch.
            context = multiprocessing.get_context("fork")
            self._executor = ProcessPoolExecutor(num_processes, mp_context=context)
            self._executor.submit(int).result()

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def each(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Results of a function for each of these, in their order."""
        if self._executor is None:
            return list(map(function, items))
        return list(self._executor.map(function, items, chunksize=4))

    def stream(self, *, width: int, height: int, count: int, seed: str) -> Iterator[Batch]:
        waiting: deque[Future[Batch]] = deque()
        number = 0
        while True:
            if self._executor is None:
                yield make_batch(Order(width, height, count, f"{seed}-{number}"))
                number += 1
                continue
            while len(waiting) < AHEAD:
                order = Order(width, height, count, f"{seed}-{number}")
                waiting.append(self._executor.submit(make_batch, order))
                number += 1
            yield waiting.popleft().result()


def make_batch(order: Order) -> Batch:
    rng = Random(order.seed)
    scenes = tuple(some_scene(rng, width=order.width, height=order.height) for _ in range(order.count))
    return Batch(scenes, tuple(tuple(_prompt_tokens(scene, rng)) for scene in scenes))


def some_scene(rng: Random, *, width: int, height: int, held_out: bool = False) -> Scene:
    """A scene whose prompts name its background, or not, as often as in training.

    Small things come out less well: so nobody gets one unasked, and none is smaller than need be.
    """
    scene = sample_scene(
        rng,
        width=width,
        height=height,
        held_out=held_out,
        says_background=rng.random() >= NO_BACKGROUND_SHARE,
    )
    things = (
        replace(thing, says_size=True, radius=max(thing.radius, MIN_RADIUS))
        if thing.size == "small"
        else thing
        for thing in scene.things
    )
    return replace(scene, things=tuple(things))


def some_prompt(scene: Scene, rng: Random) -> str:
    """A prompt whose adjectives go before or after their nouns, as often as in training."""
    return describe(scene, rng, adjectives_after=rng.random() < AFTER_SHARE)


def _prompt_tokens(scene: Scene, rng: Random) -> list[int]:
    if rng.random() < EMPTY_SHARE:
        return token_ids("")
    tokens = token_ids(some_prompt(scene, rng))
    if rng.random() < STRANGE_SHARE:
        tokens.insert(rng.randrange(len(tokens)), SPECIAL.index("<unk>"))
    return tokens


def token_ids(text: str) -> list[int]:
    """What the tokenizer makes of a prompt (parts.new_tokenizer), without loading it."""
    ids, unknown = vocabulary(), SPECIAL.index("<unk>")
    pieces = re.findall(r"\w+|[^\w\s]+", text.lower())
    return [*(ids.get(piece, unknown) for piece in pieces), SPECIAL.index("</s>")]


@functools.cache
def vocabulary() -> Mapping[str, int]:
    """Every token with its number."""
    return {token: idx for idx, token in enumerate((*SPECIAL, *words()))}
