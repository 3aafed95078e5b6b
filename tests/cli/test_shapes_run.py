"""`gfgen run` with the built-in model: files show what their prompts say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import read_jobs
from commands import gfgen
from PIL import Image
from shapes_prompts import ANIMATED, EVERY, VIDEOS, Asked, scene, thing

from gfgen.models.families.registry import find_configs
from gfgen.runtime.files.outputs import write_output
from training.scenes import is_held_out
from training.supply import SPECIAL, token_ids

ROOT = Path(__file__).parents[2]
PLAIN = "a green circle goes up on a yellow background"
ASKED = EVERY | {PLAIN: Asked(PLAIN, scene("yellow", thing("green circle", motion="up")))}
FILES = ("circle", "corner", "wide", PLAIN)
MOVED = ("from-two",)
"""What else there is, tests/runtime/test_shapes_elastic.py has in files, too, and
tests/models/test_shapes_printed.py in other words, without files."""


@dataclass(frozen=True)
class Made:
    """What a run has left."""

    folder: Path
    manifest: Mapping[str, Mapping[str, Any]]

    def file(self, name: str) -> Path:
        (found,) = (entry for entry in self.manifest.values() if name in (entry["id"], entry["prompt"]))
        return self.folder / found["file"]


def few_steps(asked: Asked) -> dict[str, Any]:
    """Half of the steps for a video: enough for what is judged here. What says nothing has all of them."""
    return {"steps": 3} if asked.frames > 1 else {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One run of these prompts; nowhere is a model named."""
    folder = tmp_path_factory.mktemp("shapes")
    lines = [ASKED[name].job(name, **few_steps(ASKED[name])) for name in FILES if name != PLAIN]
    for name in MOVED:
        asked = ANIMATED[name]
        Image.fromarray(asked.drawn(frames=1)[0]).save(folder / f"{name}.png")
        lines.append(asked.job(name, image=f"{name}.png", **few_steps(asked)))
    lines.append({"prompt": PLAIN})
    (folder / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = gfgen(folder, "run", "jobs.jsonl", "--ranks", "2", "--device", "cpu", "--output", "out")
    assert code == 0, err
    entries = map(json.loads, (folder / "out/manifest.jsonl").read_text().splitlines())
    return Made(folder / "out", {entry["id"]: entry for entry in entries})


@pytest.mark.parametrize("name", EVERY)
def test_prompts_are_of_the_models_language_and_what_they_say_is_seen_in_a_file(
    tmp_path: Path, name: str
) -> None:
    """The tests below ask for what can be had: a drawing of each scene passes."""
    asked = EVERY[name]
    assert SPECIAL.index("<unk>") not in token_ids(asked.prompt)
    trained = [(thing.shape, thing.colour, asked.scene.background) for thing in asked.scene.things]
    assert not any(is_held_out(*combination) for combination in trained)
    path = tmp_path / f"drawn{asked.suffix}"
    write_output(asked.drawn(), path, fps=8, metadata={})
    assert asked.wrong(asked.read(path)) == asked.misplaced(asked.read(path)) == []
    assert asked.frames == 1 or "direction" in VIDEOS["up"].wrong(VIDEOS["up"].drawn()[::-1])


@pytest.mark.parametrize("file", ["batch.jsonl", "images.jsonl"])
def test_examples_that_name_no_model_speak_its_language(file: str) -> None:
    for spec in read_jobs(ROOT / "jobs" / file).specs:
        assert SPECIAL.index("<unk>") not in token_ids(spec.prompt), spec.prompt


@pytest.mark.parametrize("name", FILES)
def test_a_file_shows_what_its_prompt_says(made: Made, name: str) -> None:
    asked = ASKED[name]
    assert asked.wrong(asked.read(made.file(name))) == []


@pytest.mark.parametrize("name", MOVED)
def test_a_given_picture_begins_to_move_as_the_prompt_says(made: Made, name: str) -> None:
    asked = ANIMATED[name]
    frames = asked.read(made.file(name))
    assert asked.wrong(frames) == []
    assert np.abs(frames[0].astype(int) - asked.drawn(frames=1)[0]).mean() < 4
    assert asked.misplaced(frames) == []


def test_the_first_picture_of_the_readme_is_made_from_what_a_run_has_left(made: Made, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/examples/contact_sheet.py"), str(made.folder)]
    subprocess.run([*command, str(tmp_path / "sheet.png")], check=True)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 1000


def test_a_job_that_is_nothing_but_a_prompt_is_a_short_video_by_the_built_in_model(made: Made) -> None:
    (entry,) = (entry for entry in made.manifest.values() if entry["prompt"] == PLAIN)
    assert (entry["status"], entry["model"]) == ("done", "shapes")
    assert entry["shape"] == {"width": 128, "height": 128, "frames": 17, "fps": 8}
    defaults = json.loads((find_configs("shapes") / "gfgen.json").read_text())["defaults"]
    expected = (defaults["steps"], defaults["guidance_scale"])
    assert (entry["steps"], entry["scales"]["guidance_scale"]) == expected
    assert entry["file"].endswith(".mp4")
