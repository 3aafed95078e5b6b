"""The cells of `python -m benchmarks.forward`, and what becomes of their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import forward
from benchmarks.forward import SHAPES, MeasuredForward, cells_of, keep, table_of
from gfgen.bench import gfc
from gfgen.errors import InputError, WorkerError


def test_every_shape_is_measured_in_every_way_on_every_number_of_gpus():
    cells = cells_of(num_gpus=4)
    assert (
        len({cell.name for cell in cells})
        == len(cells)
        == 3 * 8 * (2 + 2 + 2) + 2 * 2 + 8 * (3 * 2 + 2) + 2 * 8 * 3
    )
    assert {cell.degree for cell in cells_of(num_gpus=3)} == {1, 2}


def test_diffusers_own_come_before_ours_in_each_process():
    for degree in (1, 2, 4):
        ours = [cell.kind.is_ours for cell in cells_of(num_gpus=4) if cell.degree == degree]
        assert ours == sorted(ours)


def test_each_transformer_is_made_once_in_a_process():
    cells = cells_of(num_gpus=4)
    keys = [
        (
            cell.degree,
            cell.shape.model,
            cell.way if cell.way.startswith("diffusers") else cell.way in forward.HOST,
        )
        for cell in cells
    ]
    changes = [key for idx, key in enumerate(keys) if idx == 0 or keys[idx - 1] != key]
    assert len(changes) == len(set(changes))


def test_patterns_choose_cells():
    names = [cell.name for cell in cells_of(num_gpus=4, only=["qwen-512*/2/ours*p*", "*/4/diffusers"])]
    assert names[:3] == [f"qwen-512x512/2/ours-{way}" for way in ("graph", "fp8", "fp8-attention")]
    assert names[3:] == [f"{shape.name}/4/diffusers" for shape in SHAPES]


def test_uneven_shards_are_measured_where_diffusers_refuses_them_otherwise():
    uneven = [cell.name for cell in cells_of(num_gpus=4, only=["*/diffusers-uneven"])]
    assert uneven == ["wan-832x480x49/4/diffusers-uneven", "wan-832x480x81/4/diffusers-uneven"]


def test_patterns_that_fit_nothing_are_refused(monkeypatch: pytest.MonkeyPatch):
    class Machine:
        num_devices = 4

    monkeypatch.setattr(gfc, "driver", Machine)
    with pytest.raises(InputError, match="fits no name such as wan-832x480x49/1/diffusers"):
        forward.measure_forwards(num_gpus=4, only=["nothing"])
    with pytest.raises(InputError, match="this machine has 4 NVIDIA GPUs"):
        forward.measure_forwards(num_gpus=5)


def test_a_cell_has_the_time_of_its_slowest_rank_or_the_reason_of_the_first():
    cell = cells_of(num_gpus=2)[-1]
    ranks = [
        {"times_ms": [3.0, 1.0, 2.0], "first_s": 4.0, "peak_gb": 5.0},
        {"times_ms": [2.5, 2.5, 9.0], "first_s": 3.0, "peak_gb": 6.0},
    ]
    assert forward._summary(cell, ranks) == MeasuredForward(cell, ms=2.5, first_s=4.0, peak_gb=6.0)
    assert forward._summary(cell, [ranks[0], {"error": "ValueError: no"}]).error == "ValueError: no"


def test_tables_say_what_is_gained_and_why_cells_are_empty():
    theirs, other, ours = cells_of(num_gpus=2, only=["qwen-512x512/2/diff*", "qwen-512x512/2/ours"])
    results = [
        MeasuredForward(theirs, ms=60.0),
        MeasuredForward(other, error="ValueError: no"),
        MeasuredForward(ours, ms=20.0),
    ]
    text = "\n".join(table_of(results, device="2 x GPU", command="python -m benchmarks.forward"))
    assert "| qwen-512x512 | 60.0 | - | 20.0 | 3.00 |" in text
    assert f"- {other.name}: ValueError: no" in text


def test_both_branches_have_a_table_of_their_own_which_names_the_fastest_way():
    cells = cells_of(num_gpus=2, only=["qwen-512x512/2/both-*", "qwen-512x512/2/ours-graph"])
    assert [cell.layout.degrees for cell in cells] == [(1, 2, 1), (1, 2, 1), (1, 2, 1), (2, 1, 1)]
    alone, in_turn, in_batch, on_halves = cells
    results = [
        MeasuredForward(alone, ms=20.0),
        MeasuredForward(in_turn, ms=40.0),
        MeasuredForward(in_batch, ms=30.0),
    ]
    results.append(MeasuredForward(on_halves, error="ValueError: no"))
    text = "\n".join(table_of(results, device="2 x GPU", command="python -m benchmarks.forward"))
    assert "| qwen-512x512 | 20.0 | |" in text
    assert "| qwen-512x512 | 40.0 | 30.0 | - | in-batch |" in text


def test_halves_need_an_even_number_of_gpus():
    assert {cell.degree for cell in cells_of(num_gpus=4, only=["*/both-on-halves"])} == {2, 4}


def test_results_of_several_calls_come_together_in_one_table(tmp_path: Path):
    first, second = (cells_of(num_gpus=2, only=[name])[0] for name in ("*49/1/ours", "*49/2/diffusers"))
    path = tmp_path / "found.json"
    keep([MeasuredForward(first, ms=1.5)], path, device="1 x GPU", command="one")
    results, device, command = keep(
        [MeasuredForward(second, ms=2.5)], path, device="2 x GPU, more", command="two"
    )
    assert {each.cell.name: each.ms for each in results} == {first.name: 1.5, second.name: 2.5}
    text = "\n".join(table_of(results, device=device, command=command))
    assert "2 x GPU, more; command: `one`, `two`" in text
    assert "| wan-832x480x49 | 1.5 |" in text
    assert "| wan-832x480x49 | 2.5 |" in text


def test_cells_are_kept_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cell = cells_of(num_gpus=1)[0]

    class Machine:
        num_devices = 1

        def name(self, device: int) -> str:
            return "GPU"

    def measure(*, tell: Callable[[MeasuredForward], None], **_: object) -> None:
        tell(MeasuredForward(cell, ms=1.5, first_s=2.0))
        raise WorkerError("rank 1 did not answer")

    monkeypatch.setattr("gfgen.gfc.cuda.driver.driver", Machine)
    monkeypatch.setattr(forward, "measure_forwards", measure)
    result = CliRunner().invoke(forward.main, ["--to", str(path := tmp_path / "found.json")])
    assert isinstance(result.exception, WorkerError)
    assert json.loads(path.read_text())["cells"][cell.name]["ms"] == 1.5
