"""What `gfgen run` says, in one line and before anything starts, about jobs that a pipeline cannot run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image
from small_checkpoints import save_checkpoint

from gfgen.cli.main import cli
from gfgen.errors import JobFileError

JOB = {"prompt": "a red cat", "size": "64x64", "frames": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    ltx = save_checkpoint("LTXImageToVideoPipeline", folder / "ltx")
    index = json.loads((ltx / "model_index.json").read_text())
    changes = {
        "lacking": {"_class_name": "FluxNinePipeline"},
        "own": {"transformer": ["my_code", "MyTransformer"]},
        "sound": {"_class_name": "StableAudioPipeline"},
    }
    for name, change in changes.items():
        (folder / name).mkdir()
        for entry in ltx.iterdir():
            (folder / name / entry.name).symlink_to(entry)
        (folder / name / "model_index.json").unlink()
        (folder / name / "model_index.json").write_text(json.dumps({**index, **change}))
    Image.linear_gradient("L").convert("RGB").save(folder / "first.png")
    return folder


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"image": None}, "image: missing; LTXImageToVideoPipeline needs a picture or video"),
        (
            {"args": {"max_sequence_lenght": 8}},
            "args.max_sequence_lenght = 8: is no such argument of LTXImageToVideoPipeline; "
            "did you mean max_sequence_length?",
        ),
        (
            {"args": {"max_sequence_length": "many"}},
            'args.max_sequence_length = "many": a whole number is accepted',
        ),
        ({"args": {"latents": 1}}, "args.latents = 1: is set by gfgen; use seed"),
        (
            {"args": {"image": "first.png"}},
            'args.image = "first.png": is a picture or video; give its path in files: {"image": "..."}',
        ),
        (
            {"model": "lacking"},
            "model = lacking: {folder}/lacking/model_index.json: pipeline class 'FluxNinePipeline' is not in "
            "diffusers {diffusers}; install a diffusers that has it, or use another model",
        ),
        (
            {"model": "own"},
            "model = own: {folder}/own/model_index.json: brings code of its own: transformer "
            "(transformer/my_code.py); if you trust it, run, serve and models check run it with "
            "--trust-remote-code",
        ),
        (
            {"model": "sound"},
            "model = sound: {folder}/sound/model_index.json: StableAudioPipeline makes neither pictures nor "
            "videos",
        ),
    ],
)
def test_one_line_says_it(
    folder: Path, change: Mapping[str, Any], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import diffusers

    monkeypatch.chdir(folder)
    monkeypatch.setattr("gfgen.runtime.processes.pool.WorkerPool", None)  # nothing starts
    job = {"model": "ltx", "image": "first.png", **JOB, **change}
    said = {name: value for name, value in job.items() if value is not None}
    (folder / "jobs.jsonl").write_text(json.dumps(said))
    words = ["run", "jobs.jsonl", "--device", "cpu", "--ranks", "1", "-o", str(tmp_path / "out")]
    with pytest.raises(JobFileError) as refused:
        CliRunner().invoke(cli, words, standalone_mode=False, catch_exceptions=False)
    expected = line.replace("{folder}", str(folder)).replace("{diffusers}", diffusers.__version__)
    assert [str(problem) for problem in refused.value.problems] == [f"line 1: {expected}"]
    assert not (tmp_path / "out" / "journal.jsonl").exists()
