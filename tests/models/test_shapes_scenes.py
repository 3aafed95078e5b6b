"""What prompts of `shapes` say, what is held out, and that measures find in drawings what was drawn."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest
import torch

from training.drawing import draw, sketch
from training.measures import judge, look
from training.parts import new_tokenizer
from training.prompts import describe
from training.scenes import (
    COLOURS,
    MOTIONS,
    SHAPES,
    STILL,
    Scene,
    Thing,
    is_held_out,
    sample_scene,
)
from training.supply import (
    MAX_WORDS,
    SPECIAL,
    some_prompt,
    some_scene,
    token_ids,
    vocabulary,
)

torch.set_num_threads(1)

SIZES = ((128, 128, 17), (192, 128, 17), (128, 192, 9), (128, 128, 1))


def scenes_of(seed: int, count: int, *, held_out: bool = False) -> list[Scene]:
    rng = Random(seed)
    return [sample_scene(rng, width=128, height=128, held_out=held_out) for _ in range(count)]


def combinations(scene: Scene) -> list[tuple[str, str, str]]:
    return [(thing.shape, thing.colour, scene.background) for thing in scene.things]


def pixels_of(scene: Scene, *, width: int = 128, height: int = 128, frames: int = 17):
    video = draw(sketch([scene]), width=width, height=height, frames=frames)[0]
    return (video * 255).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


def moving(colour: str, motion: str, *, background: str = "white", shape: str = "circle") -> Scene:
    step = MOTIONS[motion]
    start, end = ((0.5 - sign * 0.25 * step[0], 0.5 - sign * 0.25 * step[1]) for sign in (1, -1))
    thing = Thing(shape, colour, "medium", motion, start, end, radius=0.15, says_size=False)
    return Scene(background, (thing,))


def test_training_scenes_and_held_out_scenes_have_no_combination_in_common():
    trained = {combination for scene in scenes_of(1, 300) for combination in combinations(scene)}
    held_out = {
        combination for scene in scenes_of(2, 300, held_out=True) for combination in combinations(scene)
    }
    assert not any(is_held_out(*combination) for combination in trained)
    assert all(is_held_out(*combination) for combination in held_out)


def test_every_shape_colour_and_background_has_its_share_of_what_is_held_out():
    every = [(s, c, b) for s, c, b in itertools.product(SHAPES, COLOURS, COLOURS) if c != b]
    held_out = [combination for combination in every if is_held_out(*combination)]
    assert len(held_out) / len(every) == 1 / 8
    for place, values in enumerate((SHAPES, COLOURS, COLOURS)):
        counts = Counter(combination[place] for combination in held_out)
        assert set(counts) == set(values)
        assert len(set(counts.values())) == 1


def test_the_same_seed_gives_the_same_scenes_and_prompts():
    prompts = [[describe(scene, Random(5)) for scene in scenes_of(3, 20)] for _ in range(2)]
    assert prompts[0] == prompts[1]


def test_things_stay_inside_and_never_cover_each_other():
    for scene in scenes_of(4, 300):
        for thing in scene.things:
            for x, y in (thing.start, thing.end):
                assert min(x, y, 1 - x, 1 - y) > 1.2 * thing.radius
        if len(scene.things) == 2:
            one, other = scene.things
            apart = max(abs(one.start[axis] - other.start[axis]) for axis in (0, 1))
            assert apart > 1.2 * (one.radius + other.radius)


def test_prompts_name_each_thing_and_the_background():
    rng = Random(6)
    for scene in scenes_of(5, 100):
        words = describe(scene, rng).replace(",", "").replace(".", "").split()
        assert scene.background in words
        assert all(thing.colour in words for thing in scene.things)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_prompt_may_leave_its_background_out_and_gets_a_plain_one_that_no_thing_has(held_out: bool):
    rng = Random(11)
    backgrounds = Counter()
    for _ in range(300):
        scene = sample_scene(rng, width=128, height=128, held_out=held_out, says_background=False)
        colours = {thing.colour for thing in scene.things}
        assert scene.background == next(name for name in ("white", "black", "blue") if name not in colours)
        assert all(is_held_out(*combination) == held_out for combination in combinations(scene))
        backgrounds[scene.background] += 1
        words = set(describe(scene, rng).replace(",", "").replace(".", "").split())
        assert words & set(COLOURS) == colours
        assert not words & {"background", "backdrop"}
    assert set(backgrounds) >= {"white", "black"}


def test_adjectives_may_follow_their_noun():
    rng = Random(12)
    prompts = set()
    for _ in range(200):
        (scene,) = scenes_of(rng.randrange(10**6), 1)
        prompt = describe(scene, rng, adjectives_after=True)
        assert ",," not in prompt
        assert not prompt.endswith(",")
        assert {thing.colour for thing in scene.things} < set(
            prompt.replace(",", "").replace(".", "").split()
        )
    square = Thing("square", "red", "medium", STILL, (0.5, 0.5), (0.5, 0.5), radius=0.16, says_size=False)
    prompts = {describe(Scene("blue", (square,)), rng, adjectives_after=True) for _ in range(2000)}
    assert "a square, red, on a blue background" in prompts
    assert "a square that is red on a blue background" in prompts


def test_nobody_is_taught_to_draw_something_small_unasked():
    rng = Random(13)
    things = [
        thing
        for _ in range(300)
        for thing in some_scene(rng, width=128, height=128).things
        if thing.size == "small"
    ]
    assert all(thing.says_size for thing in things)
    assert min(thing.radius for thing in things) == 0.125


def test_the_tokenizer_knows_every_word_of_every_prompt():
    rng, tokenizer, unknown = Random(7), new_tokenizer(), SPECIAL.index("<unk>")
    for _ in range(300):
        prompt = some_prompt(some_scene(rng, width=128, height=128), rng)
        ids = token_ids(prompt)
        assert unknown not in ids
        assert len(ids) <= MAX_WORDS
        assert tokenizer(prompt).input_ids == ids
    assert tokenizer("A Red CIRCLE").input_ids == tokenizer("a red circle").input_ids
    assert tokenizer("a zebra").input_ids == token_ids("a zebra") == [vocabulary()["a"], unknown, 1]


@pytest.mark.parametrize(("width", "height", "frames"), SIZES)
def test_measures_agree_with_what_was_drawn(width: int, height: int, frames: int) -> None:
    rng = Random(width + height + frames)
    for _ in range(6):
        scene = sample_scene(rng, width=width, height=height, held_out=True)
        sight = look(pixels_of(scene, width=width, height=height, frames=frames))
        scores = judge(scene, sight, is_video=frames > 1)
        assert all(scores.values()), (scene, scores)


@pytest.mark.parametrize("motion", MOTIONS)
def test_measures_see_the_direction_of_motion(motion: str) -> None:
    video = pixels_of(moving("red", motion))
    assert look(video).tracks["red"].motion == motion
    opposite = next(name for name, step in MOTIONS.items() if step == tuple(-x for x in MOTIONS[motion]))
    assert look(video[::-1]).tracks["red"].motion == opposite
    assert look(video[:1]).tracks["red"].motion == STILL


def test_measures_tell_a_thing_of_another_colour_shape_or_background():
    scene = moving("red", "right")
    wrong = {
        "colour": moving("blue", "right"),
        "shape": moving("red", "right", shape="star"),
        "background": moving("red", "right", background="green"),
    }
    for kind, other in wrong.items():
        assert not judge(scene, look(pixels_of(other)), is_video=True)[kind]


def test_an_empty_picture_has_its_background_and_nothing_else():
    empty = pixels_of(Scene("green", moving("red", "up").things))
    empty[:] = empty[:, :1, :1]
    sight = look(empty)
    assert (sight.background, dict(sight.tracks)) == ("green", {})
    scores = judge(moving("red", "up", background="green"), sight, is_video=True)
    assert [kind for kind, right in scores.items() if right] == ["background", "clean"]


def test_measures_tell_a_mottled_background_from_the_smear_of_what_moves():
    scene = moving("red", "right")
    video = pixels_of(scene)
    assert look(video).stain == 0
    smeared, mottled = video.copy(), video.copy()
    smeared[:, 60:70, 10:18] = (230, 150, 170)
    mottled[-1, ::4, 96:] = (150, 180, 160)
    assert judge(scene, look(smeared), is_video=True)["clean"]
    assert not judge(scene, look(mottled), is_video=True)["clean"]


def test_a_video_begins_with_the_picture_and_edges_are_smooth():
    scene = moving("red", "right")
    video, picture = pixels_of(scene), pixels_of(scene, frames=1)
    assert (video[0] == picture[0]).all()
    assert len({tuple(pixel) for pixel in picture[0].reshape(-1, 3)}) > 50


def test_drawing_many_scenes_is_drawing_each_of_them():
    scenes = scenes_of(8, 12)
    together = draw(sketch(scenes), width=64, height=48, frames=3)
    for scene, video in zip(scenes, together, strict=True):
        assert torch.equal(draw(sketch([scene]), width=64, height=48, frames=3)[0], video)
