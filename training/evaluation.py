"""How well a model draws what held-out prompts say: figures, and a sheet to look at.

python -m training.evaluation DIR
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from gfgen.models.fast.texts import keep_text_results
from training.drawing import draw, sketch
from training.measures import Scores, Sight, judge, look
from training.parts import FLOW_SHIFT, GUIDANCE_SCALE, STEPS, Parts, load
from training.prompts import describe
from training.sampling import Recipe, sample_videos
from training.scenes import Point, Scene, sample_scene
from training.supply import Supply
from training.vae_training import reconstruction_db

SEED = 20261121

SHARES = (
    ((128, 128, 17), 52),
    ((192, 128, 17), 12),
    ((128, 192, 17), 12),
    ((128, 128, 33), 10),
    ((128, 128, 1), 14),
)
"""Sizes of the held-out prompts, in percent."""
PART = 5
"""One prompt without a background is asked, and one with adjectives after nouns, for so many others."""
CORRECT = ("background", "clean", "colour", "direction", "rest", "shape")
"""What has to be right for an answer to be called correct."""
START_DISTANCE = 0.04
"""Of the picture's sides: as far as a thing may be from where the given first frame has it."""
SHEET_FRAMES = 5
SHEET_CELLS = 16
SHEET_EXTRA = 6
"""Cells for prompts without a background, and for such with adjectives after nouns."""
BATCH = {"cuda": 64, "cpu": 8}
"""Questions answered at once; what is seen does not depend on it."""
RECONSTRUCTED = 64
"""Videos that are encoded and decoded for the mean signal-to-noise ratio."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out prompt, what it should show, at which size, and from which noise."""

    seed: int
    scene: Scene
    prompt: str
    width: int
    height: int
    frames: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares of right answers by kind, and how many answers there were."""

    right: Mapping[str, float]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, scores: Sequence[Scores]) -> Figures:
        kinds = sorted({kind for one in scores for kind in one})
        given = {kind: [one[kind] for one in scores if kind in one] for kind in kinds}
        right = {kind: round(sum(values) / len(values), 4) for kind, values in given.items()}
        return cls(right, {kind: len(values) for kind, values in given.items()})


def questions(
    count: int, *, seed: int = SEED, says_background: bool = True, adjectives_after: bool = False
) -> list[Question]:
    """Held-out prompts of all sizes."""
    rng = Random(seed)
    found: list[Question] = []
    for (width, height, frames), percent in SHARES:
        for _ in range(round(count * percent / 100)):
            scene = sample_scene(
                rng, width=width, height=height, held_out=True, says_background=says_background
            )
            prompt = describe(scene, rng, adjectives_after=adjectives_after)
            found.append(Question(len(found), scene, prompt, width, height, frames))
    return found


def write_report(
    parts: Parts, folder: Path, *, count: int, recipe: Recipe | None = None, each: Map = map
) -> Mapping[str, Any]:
    """figures.json and sheet.png: so many held-out prompts, the videos among them also with a given image."""
    asked = questions(count)
    fewer = max(1, count // PART)
    without = questions(fewer, says_background=False)
    after = questions(fewer, adjectives_after=True)
    recipe = recipe or Recipe()
    with_images = [question for question in asked if question.frames > 1]
    figures = {
        "from_text": evaluate(parts, asked, recipe, each=each),
        "from_images": evaluate(parts, with_images, recipe, with_images=True, each=each),
        "without_background": evaluate(parts, without, recipe, each=each),
        "adjectives_after": evaluate(parts, after, recipe, each=each),
    }
    device = next(parts.vae.parameters()).device
    decibels = reconstruction_db(parts.vae, device, num_videos=min(count, RECONSTRUCTED))
    report = {
        "questions": len(asked),
        "steps": recipe.steps,
        "flow_shift": recipe.flow_shift,
        "guidance_scale": recipe.guidance_scale,
        "reconstruction_db": round(decibels, 2),
        **{name: {"right": found.right, "of": found.counts} for name, found in figures.items()},
    }
    (folder / "figures.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    shown = [*_pick(asked, count=SHEET_CELLS), *_pick(without, count=SHEET_EXTRA)]
    write_sheet(folder / "sheet.png", parts, [*shown, *_pick(after, count=SHEET_EXTRA)], recipe)
    return report


def evaluate(
    parts: Parts,
    asked: Sequence[Question],
    recipe: Recipe,
    *,
    with_images: bool = False,
    each: Map = map,
) -> Figures:
    """Figures over all questions. with_images: the first frame is given, as it should be."""
    scores: list[Scores] = []
    batch = BATCH[parts.transformer.device.type]
    for first in range(0, len(asked), batch):
        for group in _of_one_size(asked[first : first + batch]):
            videos = answer(parts, group, recipe, with_images=with_images).cpu().numpy()
            scores += each(_judged, [(q, video, with_images) for q, video in zip(group, videos, strict=True)])
    return Figures.of(scores)


def answer(parts: Parts, group: Sequence[Question], recipe: Recipe, *, with_images: bool = False) -> Tensor:
    """Videos for questions of one size ([B, T, H, W, 3] uint8)."""
    one = group[0]
    recipe = replace(recipe, width=one.width, height=one.height, frames=one.frames)
    images = first_frames(group) if with_images else None
    prompts, seeds = [question.prompt for question in group], [question.seed for question in group]
    return sample_videos(parts, prompts, recipe, seeds=seeds, images_BCHW=images)


def first_frames(group: Sequence[Question]) -> Tensor:
    """[B, 3, H, W] in [0, 1], as drawn."""
    one = group[0]
    return draw(sketch([q.scene for q in group]), width=one.width, height=one.height, frames=1)[:, :, 0]


def _of_one_size(asked: Sequence[Question]) -> list[list[Question]]:
    groups: dict[tuple[int, int, int], list[Question]] = {}
    for question in asked:
        groups.setdefault((question.width, question.height, question.frames), []).append(question)
    return list(groups.values())


def _judged(item: tuple[Question, NDArray[np.uint8], bool]) -> Scores:
    question, video, has_image = item
    sight = look(video)
    scores = dict(judge(question.scene, sight, is_video=question.frames > 1))
    if has_image:
        scores["start"] = not misplaced(question.scene, sight)
    scores["correct"] = all(scores.get(kind, True) for kind in CORRECT)
    return scores


def misplaced(scene: Scene, sight: Sight) -> list[str]:
    """Colours of things that are not at first where the scene has them."""
    return [
        thing.colour
        for thing in scene.things
        if thing.colour not in sight.tracks
        or not _is_near(sight.tracks[thing.colour].centres[0], thing.start)
    ]


def _is_near(centre: Point | None, start: Point) -> bool:
    return centre is not None and all(
        abs(one - other) < START_DISTANCE for one, other in zip(centre, start, strict=True)
    )


def write_sheet(
    path: Path, parts: Parts, asked: Sequence[Question], recipe: Recipe, *, columns: int = 2
) -> None:
    """A picture of what a model makes of some prompts: each with frames from first to last."""
    cells = []
    for group in _of_one_size(asked):
        for question, video in zip(group, answer(parts, group, recipe).cpu().numpy(), strict=True):
            cells.append(_cell(question.prompt, video))
    rows = [cells[first : first + columns] for first in range(0, len(cells), columns)]
    heights = [max(cell.height for cell in row) for row in rows]
    width = max(cell.width for cell in cells)
    sheet = Image.new("RGB", (columns * width, sum(heights)), "white")
    for number, row in enumerate(rows):
        for column, cell in enumerate(row):
            sheet.paste(cell, (column * width, sum(heights[:number])))
    sheet.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def _cell(prompt: str, video_THWC: NDArray[np.uint8]) -> Image.Image:
    count = min(SHEET_FRAMES, len(video_THWC))
    chosen = np.linspace(0, len(video_THWC) - 1, count).round().astype(int)
    gap = ((0, 0), (2, 2), (0, 0))
    strip = np.concatenate([np.pad(video_THWC[idx], gap, constant_values=255) for idx in chosen], axis=1)
    top, width = 34, SHEET_FRAMES * 132 + 12
    cell = Image.new("RGB", (width, video_THWC.shape[1] + top + 10), "white")
    font = ImageFont.load_default(size=12)
    text = "\n".join(textwrap.wrap(prompt, 100)[:2])
    ImageDraw.Draw(cell).multiline_text((6, 2), text, fill="black", font=font, spacing=2)
    picture = Image.fromarray(strip)
    if picture.width > width - 12:
        picture = picture.resize((width - 12, picture.height * (width - 12) // picture.width))
    cell.paste(picture, (6, top))
    return cell


def _pick(asked: Sequence[Question], *, count: int) -> list[Question]:
    """Some of the questions, of all sizes: for a sheet."""
    return [asked[idx] for idx in np.linspace(0, len(asked) - 1, min(count, len(asked))).astype(int)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.evaluation", description=__doc__)
    parser.add_argument("model", type=Path, metavar="DIR", help="the pipeline")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for figures.json and sheet.png")
    parser.add_argument("--questions", type=int, default=500, help="held-out prompts (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of denoising (%(default)s)")
    parser.add_argument("--flow-shift", type=float, default=FLOW_SHIFT, help="of their times (%(default)s)")
    parser.add_argument("--guidance-scale", type=float, default=GUIDANCE_SCALE, help="1: none (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=0, help="that look at pixels beside this one")
    options = parser.parse_args(arguments)
    with Supply(num_processes=options.processes) as supply:
        parts = load(options.model, device=options.device)
        if options.device == "cpu":
            keep_text_results(parts.transformer)
        recipe = Recipe(
            steps=options.steps, flow_shift=options.flow_shift, guidance_scale=options.guidance_scale
        )
        report = write_report(parts, options.output, count=options.questions, recipe=recipe, each=supply.each)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
