"""Calls on pipelines without weights tell what pipelines refuse, and how much of a prompt they read."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.draws import draws_of
from benchmarks.small_checkpoints import save_checkpoint
from gfgen.models.stepping.outlined import answers, read_characters


@functools.cache
def checkpoint(folder: Path, name: str) -> Path:
    return save_checkpoint(name, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outlined")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["LTXPipeline", "PixArtSigmaPipeline", "Lumina2Pipeline"])
def test_a_clean_check_implies_that_the_job_runs(folder, name):
    made = draws_of(name, checkpoint(folder, name), num=40)
    assert made.counts["ran"] >= 10
    assert not made.failed
    assert not made.refused_in_vain


def test_answers_say_what_is_refused_and_what_is_read(folder):
    job: dict[str, Any] = {
        "id": "a",
        "prompt": "a fox",
        "width": 64,
        "height": 64,
        "steps": 2,
        "seed": 0,
        "frames": 1,
    }
    job["args"] = {"use_resolution_binning": False}
    asked = {
        "checkpoint": str(checkpoint(folder, "PixArtSigmaPipeline")),
        "trusts_code": False,
        "calls": {
            "plain": job,
            "odd": job | {"height": 65},
            "sigmas": job | {"scheduler": {"class": "DDIMScheduler"}, "sigmas": [1.0, 0.5]},
            "short": job | {"args": {**job["args"], "max_sequence_length": 8}},
        },
        "texts": {
            "long": ("plain", "fox " * 400),
            "fits": ("plain", "fox " * 50),
            "cut": ("short", "fox " * 50),
        },
    }
    found = answers(asked)
    calls = found["calls"]
    assert (calls["plain"]["unknown"], calls["plain"]["most_bytes"]) == (None, 298)
    assert calls["odd"]["refused"].startswith("`height` and `width` have to be divisible by 8")
    assert "does not support custom sigmas" in calls["sigmas"]["refused"]
    assert found["texts"]["fits"] == 200
    assert found["texts"]["long"] < 1600
    assert found["texts"]["cut"] < 200


def tokenizer_of(per_word):
    return lambda text: {"input_ids": [0] * (per_word * len(text.split()) + 1)}


def test_what_one_of_the_encoders_keeps_is_read():
    text = " one two  three\nfour"
    clip, t5 = tokenizer_of(2), tokenizer_of(1)
    limits = {"clip": ("", 3), "t5": ("template ", 4)}
    assert read_characters(text, limits, {"clip": clip, "t5": t5}) == len(" one two")
    assert read_characters(text, {"t5": ("", 5)}, {"t5": t5}) == len(text)
    assert read_characters(text, {"t5": ("", 1)}, {"t5": t5}) == 0
