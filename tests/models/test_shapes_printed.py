"""The built-in model draws every prompt that README, docs, jobs and hints show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shapes_prompts import PRINTED, Frames

from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.fast.texts import keep_text_results
from training.measures import judge, look
from training.parts import STEPS, load
from training.prompts import SHAPE_WORDS
from training.sampling import Recipe, sample_videos
from training.scenes import COLOURS, SHAPES, STILL
from training.supply import SPECIAL, token_ids

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
SUFFIXES = (".md", ".py", ".html", ".js", ".jsonl")
NOUNS = {*SHAPES, *(word for words in SHAPE_WORDS.values() for word in words)}
QUOTED = re.compile(r"""(?<=["'`])[A-Za-z][A-Za-z ,.\n]{8,150}(?=["'`])""")
FIELD = re.compile(r"""\bprompt["']?[:=] ?["']([^"']+)["']""")
FRAMES = 17
"""Of what moves, as a job gets that says nothing."""
VIDEO_STEPS = 3
"""Half of what such a job gets: enough for what is judged here, and a step of all videos takes long."""
SEEDS = (1, 2)
"""Of a prompt without a background; the others have the first."""


def shown_texts() -> Iterator[str]:
    """What users read: documents, examples, the page, and the messages of the program."""
    folders = ("docs", "jobs", "gfgen/cli", "gfgen/job", "gfgen/server")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    weights = ROOT / "gfgen/models/weights/README.md"
    for path in (*ROOT.glob("*.md"), *files, weights):
        yield path.read_text(encoding="utf-8")


def says_a_shape(text: str) -> bool:
    found = set(re.findall("[a-z]+", text.lower()))
    return len(found) > 2 and bool(found & NOUNS) and bool(found & set(COLOURS))


def test_every_printed_prompt_is_one_that_is_drawn_here() -> None:
    """Add a prompt that you print to PRINTED, with what it says."""
    quoted = {" ".join(quote.split()) for text in shown_texts() for quote in QUOTED.findall(text)}
    printed = {text for text in quoted if says_a_shape(text)}
    assert len(printed) > 20
    assert printed <= set(PRINTED)


def test_documents_show_no_prompt_that_the_built_in_model_does_not_understand() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "gfgen/job/reader.py"]
    lines = [line for path in documents for line in path.read_text(encoding="utf-8").splitlines()]
    others = ('"model"', "files[")  # lines of jobs that the built-in model does not take
    prompts = {each for line in lines if not any(x in line for x in others) for each in FIELD.findall(line)}
    prompts = {prompt for prompt in prompts if "{" not in prompt}  # choices in prompts (docs/job-file.md)
    assert len(prompts) > 5
    unknown = SPECIAL.index("<unk>")
    assert [prompt for prompt in prompts if unknown in token_ids(prompt)] == []


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Frames]]:
    """What the model makes of each prompt."""
    parts = load(resolve_checkpoint("shapes"))
    keep_text_results(parts.transformer)
    found: dict[str, list[Frames]] = {}
    for frames, steps in ((1, STEPS), (FRAMES, VIDEO_STEPS)):
        asked = [
            (prompt, seed)
            for prompt, scene in PRINTED.items()
            for seed in (SEEDS if "on " not in prompt and "back" not in prompt else SEEDS[:1])
            if (frames > 1) == any(thing.motion != STILL for thing in scene.things)
        ]
        prompts, seeds = zip(*asked, strict=True)
        videos = sample_videos(parts, prompts, Recipe(frames=frames, steps=steps), seeds=seeds).numpy()
        for prompt, video in zip(prompts, videos, strict=True):
            found.setdefault(prompt, []).append(video)
    return found


@pytest.mark.parametrize("prompt", PRINTED)
def test_a_printed_prompt_is_drawn_as_it_says(drawn: dict[str, list[Frames]], prompt: str) -> None:
    for video in drawn[prompt]:
        scores = judge(PRINTED[prompt], look(video), is_video=len(video) > 1)
        assert all(scores.values()), scores
