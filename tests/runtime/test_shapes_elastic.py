"""The built-in model on layouts that change at every step: nothing else is seen."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from shapes_prompts import ANIMATED, EVERY
from test_elastic import assert_nothing_failed, following
from test_workers import run

from gfgen.job.spec import JobSpec

ONE = [(0,)]
WANDER = [(2, 3), (0,), (1, 3, 0, 2), (2, 0, 1), (3,), (1, 0), (3, 2, 1, 0), (1,)]
"""A degree for each step, never the same twice running; the first is also that of the decode."""
STEPS = 4
"""They have every degree."""
NAMES = ("above", "two", "from-circle")


def job_of(name, folder):
    asked, image = EVERY[name], None
    if name in ANIMATED:
        image = str(folder / f"{name}.png")
        Image.fromarray(asked.drawn(frames=1)[0]).save(image)
    shape = {"width": asked.width, "height": asked.height, "frames": asked.frames}
    return JobSpec(id=name, prompt=asked.prompt, model="shapes", seed=7, steps=STEPS, image=image, **shape)


@pytest.fixture(scope="module")
def made(pool, tmp_path_factory):
    """Frames in files, and final latents: by one rank, and by ranks whose number changes at every step."""
    folder, results = tmp_path_factory.mktemp("shapes"), {}
    jobs = [job_of(name, folder) for name in NAMES]
    for way, layouts in {"one": ONE, "wander": WANDER}.items():
        recorder = run(pool, folder / way, *jobs, policy=following(*layouts))
        assert_nothing_failed(recorder)
        for name in NAMES:
            file = folder / way / f"{name}{EVERY[name].suffix}"
            results[way, name] = EVERY[name].read(file), recorder.latents[name]["sample"]
            _, _, *degrees, _ = [len(ranks) for ranks in recorder.ranks_of(name)]
            assert degrees == [len(layouts[step % len(layouts)]) for step in range(len(degrees))]
    return results


@pytest.mark.parametrize("name", NAMES)
def test_what_a_prompt_says_is_seen_however_ranks_change(made, name):
    frames, _ = made["wander", name]
    assert EVERY[name].wrong(frames) == []


@pytest.mark.parametrize("name", NAMES)
def test_latents_are_those_of_one_rank(made, name):
    (frames, many), (alone, one) = made["wander", name], made["one", name]
    assert (many - one).abs().max() <= 1e-5 * one.abs().max()
    if EVERY[name].frames == 1:  # what is compressed cannot be compared by the grey level
        assert np.abs(frames.astype(int) - alone).max() <= 1
