"""`gfgen models prove`: pictures and times of gfgen against diffusers' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from gfgen.bench import prove
from gfgen.bench.prove import Row, compared, proof, table
from gfgen.cli import listings
from gfgen.cli.listings import models
from gfgen.errors import InputError, InterruptedRunError, ModelError, WorkerError
from gfgen.layout import Limits
from gfgen.models.families import registry
from gfgen.runtime.core.devices import CPU, CUDA, Devices, Gpu
from gfgen.session.ranks import Ranks

ON_CPU = Ranks(Devices(CPU, 2))
ON_GPUS = Ranks(Devices(CUDA, 8, (Gpu("H100", 80 * 10**9, capability=(9, 0)),) * 8))


def command(*words: object) -> Result:
    words = ("prove", "--device", "cpu", "--ranks", "2", *words)
    return CliRunner().invoke(models, list(map(str, words)), standalone_mode=False)


def cells(text: str) -> list[list[str]]:
    """Of the rows behind the head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_a_video_has_the_bytes_of_diffusers(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "proof.md"
    result = command("tiny-wan", tmp_path, "-o", file)
    assert result.return_value == 0, result
    assert file.read_text() == result.stdout
    rows = cells(result.stdout)
    stock, one, two, in_eight = (row for row in rows if row[0] == "tiny-wan")
    assert stock[1:5] == ["128x128x17", "diffusers", "1", ""]
    assert one[1:5] == ["128x128x17", "gfgen, fp32", "1", "the same bytes"]
    assert two[2:4] == ["gfgen, fp32", "2"]
    assert all(float(cell) > 0 for row in (stock, one, two) for cell in row[5:])
    assert stock[7:] == ["1.00", "1.00"]
    assert "cannot compute in fp8" in in_eight[4]
    assert rows[-1][0] == str(tmp_path)
    assert "model_index.json: no such file" in rows[-1][4]
    with pytest.raises(InputError, match=r"proof.md: a new file in an existing folder is accepted"):
        raise command("tiny-wan", "-o", file).exception or AssertionError


@pytest.mark.parametrize("file", ["1.png", "1/{frame}.png"])
def test_every_byte_of_every_picture_counts(tmp_path: Path, file: str) -> None:
    def made(maker: str, *pictures: Any) -> Path:
        for number, picture in enumerate(pictures, start=1):
            name = file.replace("{frame}", f"{number:04}").replace("1.png", f"1-{number}.png")
            path = tmp_path / maker / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(path)
        return tmp_path / maker

    first, second = np.zeros((2, 8, 8, 3), np.uint8)
    theirs = made("diffusers", first, second)
    assert compared(made("same", first, second), theirs, file) == "the same bytes"
    second[0, 0, 0] = 2
    text = "differs: 2 of 255 at most, 0.0052 on average; 68.0 dB"
    assert compared(made("other", first, second), theirs, file) == text
    assert compared(made("fewer", first), theirs, file).startswith(
        "differs: (1, 8, 8, 3) is not (2, 8, 8, 3)"
    )
    assert compared(theirs, tmp_path / "none", file) == "made; there is none of diffusers"


class FakeSession:
    """Admits all jobs, of which four ranks share a step."""

    def __init__(self, options: Any) -> None:
        pass

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def admission(self, specs: Sequence[Any]) -> Any:
        return [SimpleNamespace(limits=Limits(max_sequence_degree=4))] * len(specs), ()

    def load(self, jobs: object, *, are_all_needed: bool) -> None:
        pass


def test_each_degree_is_tried_that_a_step_can_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prove, "Session", FakeSession)
    monkeypatch.setattr(prove, "_own_row", lambda session, job, timed, row, folder: row)
    specs: Any = [None] * 5
    rows = [*prove._own_rows(ON_GPUS, specs, Row("m"), tmp_path)]
    assert [row.num_ranks for row in rows] == [1, 2, 4]


@pytest.mark.parametrize(
    ("made_by", "num_ranks", "picture", "is_broken"),
    [
        ("gfgen, bf16", 1, "differs: a bit", True),
        ("gfgen, bf16", 1, "the same bytes", False),
        ("gfgen, bf16", 2, "differs: a bit", False),
        ("gfgen, bf16, fused", 1, "differs: a bit", False),
        ("gfgen, fp32", 1, "out of memory", False),
    ],
)
def test_the_promise_is_for_one_rank_with_the_kernels_of_diffusers(
    made_by: str, num_ranks: int, picture: str, is_broken: bool
) -> None:
    assert Row("m", "", made_by, picture, num_ranks).breaks_promise == is_broken


def test_a_broken_promise_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "proof", lambda *_, **__: iter([Row("a", "", "gfgen, fp32", "differs")]))
    assert command("a").return_value == 1


def test_diffusers_offloads_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried, model = [], SimpleNamespace(name="m", checkpoint=tmp_path)

    def made(jobs: object, ranks: Any, folder: Path) -> list[Any]:
        tried.append(ranks.moved)
        if ranks.moved is None:
            raise WorkerError("diffusers: CUDA out of memory")
        error = "out of memory" if ranks.moved == "model" else None
        return [SimpleNamespace(error=error, timings={"step_s": 2.0}, busy_s=9.0)]

    monkeypatch.setattr(prove, "make_alone", made)
    monkeypatch.setattr(prove, "admit", lambda *_, **__: ((), ()))
    rows = [
        prove._stock_row(model, (), ranks, Row("m"), tmp_path)  # type: ignore[arg-type]
        for ranks in (ON_GPUS, ON_CPU)
    ]
    assert tried == [None, "model", "sequential", None]
    assert (rows[0].made_by, rows[0].step_s, rows[0].job_s) == ("diffusers, sequential offload", 2.0, 9.0)
    assert (rows[1].made_by, rows[1].picture) == ("diffusers", "diffusers: CUDA out of memory")


@pytest.mark.parametrize("minutes", [0, 9])
def test_what_was_not_tried_is_said(monkeypatch: pytest.MonkeyPatch, minutes: float) -> None:
    alarm: list[Callable[[], None]] = []

    def timer(seconds: float, ring: Callable[..., None], args: Sequence[int]) -> SimpleNamespace:
        assert seconds == 60 * minutes
        alarm.append(partial(ring, *args))
        return SimpleNamespace(start=lambda: None, cancel=lambda: None)

    def slow(name: str, *_: object, **__: object) -> Iterator[Row]:
        yield Row(model=name, picture="the same bytes")
        alarm[0]()  # as Ctrl-C, if there is time left
        time.sleep(60)

    monkeypatch.setattr(prove, "threading", SimpleNamespace(Timer=timer))
    monkeypatch.setattr(prove, "_rows", slow)
    rows = []
    try:
        rows.extend(proof(["a", "b"], ON_CPU, minutes=minutes))
        assert minutes == 0
    except InterruptedRunError:
        assert minutes == 9
    texts = ["the same bytes", "stopped here; the rest was not tried", "not tried"]
    assert [(row.model, row.picture) for row in rows] == list(zip("aab", texts, strict=True))


def test_models_that_are_here_are_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cached(hub_id: str) -> Path:
        if hub_id != "Qwen/Qwen-Image":
            raise ModelError("not here")
        return tmp_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listings, "cached", cached)
    assert list(listings._models_here()) == ["qwen-image"]
    Path("gfgen.toml").write_text('policy = "srtf"\n[run]\nmodel = "wan"\n[serve]\nmodel = ["a", "b"]\n')
    assert list(listings._models_here()) == ["qwen-image", "wan", "a", "b"]


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline", "vae": ["a", "B"]}')
    found = {"Qwen/Qwen-Image": tmp_path}
    monkeypatch.setattr(registry, "_snapshot", found.get)
    absent, incomplete = proof(["Org/none-of-these", "qwen-image"], ON_CPU, minutes=1)
    assert absent.picture == (
        "model Org/none-of-these is not here; run 'hf download Org/none-of-these', or give a directory"
    )
    assert str(tmp_path) in incomplete.picture


def test_times_are_compared_with_those_of_diffusers() -> None:
    rows = [
        Row(model="a", made_by="diffusers, model offload", step_s=2.0, job_s=20.0),
        Row(model="a", made_by="gfgen, bf16, fused", num_ranks=2, picture="a | b\nc", step_s=0.5, job_s=None),
    ]
    text = table(rows, ON_GPUS)
    assert text.startswith("8 x H100 of 80.0 GB; python ")
    assert cells(text)[0][5:] == ["2.000", "20.000", "1.00", "1.00"]
    assert cells(text)[1] == ["a", "", "gfgen, bf16, fused", "2", "a / b c", "0.500", "", "4.00", ""]
