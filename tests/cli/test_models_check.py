"""`gfgen models check`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from small_checkpoints import save_checkpoint

from gfgen.cli.listings import _facts, models
from gfgen.errors import JobError
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.call import signature_of
from gfgen.models.geometry.pipeline import PipelineGeometry
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


def test_a_pipeline_without_a_size_is_tried_once_at_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = signature_of("StableDiffusionImg2ImgPipeline")
    geometry = PipelineGeometry(signature, {"steps": 50, "frames": 1, "fps": 16}, "DDIMScheduler")
    tried = []

    def note(adapter: object, spec: JobSpec, *_: object, **__: object) -> verification.Trial:
        tried.append(spec)
        return verification.Trial(spec, 2, None, is_stepped=True)

    monkeypatch.setattr(verification, "load_adapter", lambda *_, **__: SimpleNamespace(geometry=geometry))
    monkeypatch.setattr(verification, "_try", note)
    given = JobSpec(id="check", prompt="a red cat", steps=2)
    trial = verification.try_checkpoint(Path("none"), given, device="cpu")
    assert [(spec.width, spec.height) for spec in tried] == [(None, None)]
    found = _facts("none", geometry, trial)
    assert (found["tried"]["width"], found["ranks_per_step"]["tokens"]) == (None, 1)
    assert geometry.shape_key(trial.job).startswith("auto")
    assert geometry.trajectory(trial.job).frames_bytes == 3 * 1024 * 1024
    assert trial.job.size_text == "auto"
    with pytest.raises(JobError, match="StableDiffusionImg2ImgPipeline takes no size; leave it out"):
        geometry.resolve(replace(given, width=64, height=64, image="a.png"))
