"""`gfgen models check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks.small_checkpoints import save_checkpoint
from gfgen.cli.listings import models
from gfgen.models.stepping import check as verification
from gfgen.models.stepping.program import NotSteppableError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("LTXImageToVideoPipeline", tmp_path_factory.mktemp("ltx"))


def check(*words: object) -> Result:
    job = json.dumps({"size": "64x64", "steps": 2})
    words = ("check", *map(str, words), "--device", "cpu", "--job", job)
    return CliRunner().invoke(models, words, standalone_mode=False)


def facts(result: Result) -> Any:
    return json.loads(result.stdout)


def test_a_checkpoint_that_runs_in_steps(folder: Path) -> None:
    found = facts(check(folder, "--json"))
    assert (found["family"], found["output"], found["in_steps"]) == ("LTXImageToVideoPipeline", "video", True)
    assert found["tried"] == {"width": 64, "height": 64, "frames": 9, "steps": 2}
    assert found["num_iterations"] == 2
    assert found["files"] == ["image"]
    assert found["args"]["max_sequence_length"] == "a whole number"
    assert found["ranks_per_step"] == {"guidance": 2, "tokens": 8}
    assert found["memory_bytes"]["peak"] > 1 << 28
    assert found["memory_bytes"]["cpu"] == 2 * found["memory_bytes"]["cuda"] > 0


def test_a_person_gets_a_line_for_each_fact(folder: Path) -> None:
    text = check(folder).stdout
    assert "in steps      yes; 2 steps at 64x64x9 on cpu give the bits of the pipeline's own call\n" in text
    assert "ranks a step  up to 2 for guidance x 8 for tokens\n" in text


def test_a_model_with_an_adapter_of_its_own(tiny_models: Any) -> None:
    found = facts(check(tiny_models["tiny-wan-moe-i2v"], "--json"))
    assert (found["family"], found["adapter"], found["in_steps"]) == ("wan-moe-i2v", "own", True)


def test_a_pipeline_that_cannot_be_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise NotSteppableError("pipeline.py:1: has no loop over timesteps")

    monkeypatch.setattr(verification, "Stepper", refuse)
    result = check(folder)
    assert result.return_value == 0
    assert "in steps      no, each job runs as one task: pipeline.py:1: has no loop" in result.stdout


def test_results_that_differ_are_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = verification.Stepper.step

    def another(*args: Any) -> Any:
        state = step(*args)
        state.tensors["sample"] = state.tensors["sample"] + 1
        return state

    monkeypatch.setattr(verification.Stepper, "step", another)
    result = check(folder)
    assert result.return_value == 1
    assert "in steps      no; 2 steps at 64x64x9 on cpu: output.frames: largest difference" in result.stdout
