"""`python -m benchmarks.elasticity`, without workers: what it keeps, and where."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.elasticity import _report, main
from benchmarks.elasticity_rows import ElasticityRow
from gfgen.errors import InputError

ABOUT = {"device": "4 x GPU", "command": "python -m benchmarks.elasticity", "model": "models/wan"}


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "folder")
    result = CliRunner().invoke(main, ["--device", "cpu", "--output", folder])
    assert "cannot be made (Not a directory)" in str(result.exception)


def test_a_pattern_that_fits_no_case_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tiny_models: Mapping[str, Path]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("loading")

    monkeypatch.setattr("benchmarks.elasticity.ready_pool", load)
    arguments = ["--device", "cpu", "--ranks", "2"]
    result = CliRunner().invoke(main, [*arguments, "--only", "chagned*", "--only", "fresh*"])
    assert isinstance(result.exception, InputError)
    assert "--only chagned* fresh*: matches no case; an example is 'unchanged, 1 rank, " in str(
        result.exception
    )
    result = CliRunner().invoke(main, [*arguments, "--only", "changed*"])
    assert str(result.exception) == "loading"


def test_each_model_has_files_of_its_own(tmp_path: Path) -> None:
    for model in ("models/wan", "qwen"):
        _report([ElasticityRow(model, "", "found", 1)], {**ABOUT, "model": model}, tmp_path)
    day = time.strftime("%Y-%m-%d")
    content = json.loads((tmp_path / f"{day}-elasticity-wan.json").read_text())
    assert content["rows"][0]["name"] == "models/wan"
    assert (tmp_path / f"{day}-elasticity-qwen.md").is_file()


def test_nothing_takes_the_place_of_what_was_measured_before(tmp_path: Path) -> None:
    _report([], ABOUT, tmp_path)
    assert list(tmp_path.iterdir()) == []
