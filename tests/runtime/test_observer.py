"""What is known of a job and of a run while it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_job

from gfgen.runtime.core.events import PolicyChanged
from gfgen.runtime.core.observer import JobInfo, JobOutcome, RunView

INFO = make_job("fox").info


def rounded(**asked: int | None) -> JobInfo:
    return replace(INFO, asked=replace(INFO.spec, **asked), spec=replace(INFO.spec, width=64, height=32))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"width": 64, "height": 32}, None),
        ({"width": None, "height": None, "frames": None}, None),
        ({"width": 70, "height": 32}, "70x32 -> 64x32"),
        ({"width": 64, "height": 40}, "64x40 -> 64x32"),
        ({"width": None, "height": 40, "frames": 2}, "64x40 -> 64x32, 2 -> 1 frames"),
    ],
)
def test_what_a_model_rounded_is_told(asked: dict[str, int | None], told: str | None) -> None:
    assert rounded(**asked).rounding == told


def test_another_size_than_that_of_the_job_is_told() -> None:
    assert INFO.difference((1, 16, 16)) is None
    assert INFO.difference((2, 16, 24)) == "the model made 24x16 with 2 frames, not 16x16 with 1 frames"
    sizeless = replace(INFO, spec=replace(INFO.spec, width=None, height=None))
    assert sizeless.difference((1, 48, 24)) is None
    video = replace(INFO.spec, frames=1, fps=8)
    of_a_video = replace(INFO, asked=replace(video, frames=None), spec=video)
    assert of_a_video.difference((17, 16, 16)) is None


def test_a_job_with_several_files_names_all_of_them() -> None:
    outcome = JobOutcome(replace(INFO, file="a/fox.png"), "done")
    assert outcome.file_names == ["a/fox.png"]
    outcome.files = (("fox-1.png", 1, None), ("fox-2.png", 1, None))
    assert outcome.file_names == ["a/fox-1.png", "a/fox-2.png"]


def test_the_policy_that_was_chosen_last_decides() -> None:
    view = RunView()
    view.began((INFO,), num_ranks=1, policy="auto")
    assert view.deciding == "auto"
    view.policy_change = PolicyChanged(1.0, "srtf", "it is better")
    assert view.deciding == "srtf"
