"""`gfgen bench paper`: cells are kept by place, figures are made of them, and the grid is checked."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gfgen.bench.paper import figures
from gfgen.bench.paper.cells import Cell, CellStore, Place, Results, admitted_of, found_of, simulated
from gfgen.bench.paper.figures import Grid, auto_by_point, grid_cells, grid_table
from gfgen.bench.policy_comparison import PolicyRun
from gfgen.cli.bench import paper as bench_paper
from gfgen.cli.main import cli
from gfgen.errors import InputError, InterruptedRunError
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.runtime.predict.profile_store import SHIPPED

H200 = SHIPPED / "h200.json"
CELL = Cell(model="qwen-image", workload="short", load=0.9, num_jobs=6, steps=2, seed=1, policy="fcfs")
PLACE = Place("NVIDIA H200", 4, "abcdef0123", is_simulated=True)
GRID = Grid(("qwen-image",), 4, load_profile(H200))


def paper(*words: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "paper", *words], obj={"debug": False})


@pytest.fixture(scope="module")
def run() -> PolicyRun:
    ((_, found),) = simulated([CELL], load_profile(H200), num_ranks=4)
    return found


def test_a_kept_cell_is_read_again_and_only_where_it_ran(tmp_path: Path, run: PolicyRun) -> None:
    store = CellStore(tmp_path, PLACE)
    kept = store.keep(CELL, run)
    assert kept.score is not None
    assert kept.score.num_jobs == 6
    assert (found := store.read([CELL])[CELL].score) is not None
    assert found == kept.score
    assert not store.read([replace(CELL, seed=2)])
    for other in (replace(PLACE, card="NVIDIA H100"), replace(PLACE, is_simulated=False)):
        assert not CellStore(tmp_path, other).read([CELL])


def test_a_cell_of_another_card_in_the_folder_is_refused_by_name(tmp_path: Path, run: PolicyRun) -> None:
    store = CellStore(tmp_path, PLACE)
    store.keep(CELL, run)
    (path,) = (tmp_path / "cells" / PLACE.name).iterdir()
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"place": {**content["place"], "card": "NVIDIA H100"}}))
    with pytest.raises(InputError, match=f"{path.name}: this is a cell of another place"):
        store.read([CELL])
    path.write_text("{}")
    with pytest.raises(InputError, match="not a kept cell"):
        store.read([CELL])


def test_policies_get_the_same_jobs_and_seeds_other_ones() -> None:
    jobs = {
        (seed, policy): admitted_of(replace(CELL, seed=seed, policy=policy), GRID.profile, num_ranks=4)
        for seed in (1, 2)
        for policy in ("fcfs", "edf")
    }
    arrivals = {key: [job.spec.arrival_s for job in each] for key, each in jobs.items()}
    assert arrivals[1, "fcfs"] == arrivals[1, "edf"] != arrivals[2, "fcfs"]


def test_the_grid_says_where_auto_is_behind(run: PolicyRun) -> None:
    cells = [cell for cell in grid_cells(GRID) if cell.load == 0.8 and cell.workload == "short"]
    found = {cell: found_of(cell, run) for cell in cells}
    behind = next(cell for cell in cells if cell.policy == "auto")
    score = found[behind].score
    assert score is not None
    worse = {cell: each for cell, each in found.items() if replace(cell, seed=0) == replace(behind, seed=0)}
    lost = replace(score, attainment=score.attainment - 0.1)
    found |= {cell: replace(each, score=lost) for cell, each in worse.items()}
    (table,) = grid_table(GRID, Results(found))
    assert [row[-1].split()[0] for row in table.rows if row[0] in ("mean", "worst")] == ["-5.0", "-10.0"]
    stored = auto_by_point(Results(found))
    assert stored["qwen-image short from 1 load 0.8"] == [
        round(score.attainment_client, 4), round(lost.attainment, 4)
    ]  # fmt: skip


def test_a_page_says_what_was_run_what_was_not_and_goes_on(tmp_path: Path) -> None:
    words = ("--simulate", "--seeds", "1", "--jobs", "6", "--steps", "2", "--model", "qwen-image")
    names = ("3a", "3b", "6", "7", "11", "table1")
    words = (*words, "-o", str(tmp_path), *(word for name in names for word in ("--figure", name)))
    first = paper(*words)
    assert first.exception is None, first.output
    cells = sorted((tmp_path / "cells").rglob("*.json"))
    times = [path.stat().st_mtime_ns for path in cells]
    assert len(cells) == 2 * 6 + 1  # Figures 6 and 11.
    page = (tmp_path / "paper.md").read_text()
    for text in ("## Figure 6", "| auto |", "Not run here: `gfgen bench gfc >", "| not run |"):
        assert text in page
    assert (tmp_path / "paper.html").read_text().count("<h2>") == len(names)
    assert set(json.loads((tmp_path / "paper.json").read_text())["tables"]) == set(names)
    assert paper(*words).exception is None
    assert [path.stat().st_mtime_ns for path in cells] == times


def test_kept_runs_are_shown_and_compared_on_a_machine_without_ranks(tmp_path: Path) -> None:
    words = ["--simulate", "--seeds", "2", "--jobs", "6", "--steps", "2", "--model", "qwen-image"]
    words += ["-o", str(tmp_path), "--figure", "6", "--figure", "8", "--figure", "11"]
    assert paper(*words).exception is None
    page = (tmp_path / "paper.md").read_text()
    assert page.count("run on") == page.count("not run on") == 1  # Figure 8.
    (simulated_cells,) = (tmp_path / "cells").iterdir()
    ran = simulated_cells.with_name(simulated_cells.name.removeprefix("simulated-"))
    ran.mkdir()
    for path in simulated_cells.glob("*-1-*.json"):  # seed 1
        content = json.loads(path.read_text())
        content["place"]["is_simulated"] = False
        content["score"]["makespan_s"] *= 1.5
        (ran / path.name).write_text(json.dumps(content))
    assert paper(*words).exception is None
    tables = json.loads((tmp_path / "paper.json").read_text())["tables"]
    assert [len(tables[name]) for name in ("6", "6-run", "8", "11")] == [2, 2, 1, 2]
    rows = {row[0]: row for table in tables["11"] for row in table["rows"]}
    assert [row[3] for row in rows.values()] == ["+0.0"] * 7
    assert rows["auto"][-2:] == ["+50.0%", "1"]
    assert [row[1] != "-" for row in tables["8"][0]["rows"]] == [True, True, False]  # no diffusers


def test_a_stopped_evaluation_has_a_page_of_what_it_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: PolicyRun
) -> None:
    def stopped(cells: list[Cell], *_: object, **__: object) -> Iterator[tuple[Cell, PolicyRun]]:
        yield cells[0], run
        raise InterruptedRunError("stopped", signal_number=2)

    monkeypatch.setattr(bench_paper, "simulated", stopped)
    found = paper("--simulate", "--seeds", "1", "--model", "qwen-image", "--figure", "6", "-o", str(tmp_path))
    assert "stopped; 1 of 12 cells kept" in str(found.exception)
    assert "| EDF | - |" in (tmp_path / "paper.md").read_text()


def test_an_unknown_figure_or_model_is_one_line() -> None:
    assert "'12' is not one of" in paper("--figure", "12").output
    found = paper("--simulate", "--model", "x")
    assert "no workload is defined" in str(found.exception)


def test_check_fails_where_auto_has_lost_two_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"GRID_LOADS": (0.8,), "GRID_WORKLOADS": ("short",), "GRID_JOBS": 8, "GRID_SEEDS": 1}
    for name, value in small.items():
        monkeypatch.setattr(figures, name, value)
    monkeypatch.setattr(bench_paper, "MODELS", ("qwen-image",))
    points = [f"qwen-image short from {number} load 0.8" for number in (1, 4)]
    stored = tmp_path / "grid.json"
    monkeypatch.setattr(bench_paper, "STORED", stored)
    stored.write_text(json.dumps({point: [0.0, 0.0] for point in points}))
    assert "0 values of 4 lost" in paper("--check").output
    stored.write_text(json.dumps({points[0]: [1.5, 0.0], points[1]: [0.0, 0.0]}))
    found = paper("--check").output
    assert f"{points[0]}: 150.0% ->" in found
    assert "1 value of 4 lost" in found
