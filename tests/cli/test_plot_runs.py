"""Several traces as one picture, and what a simulated one says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from acted_run import WRITTEN, ActedRun, Part, batch, job_info
from builders import finished_jobs

from gfgen.cli.shown.picture import draw_runs, figures_of, find_traces, plot_runs
from gfgen.cli.shown.timeline import read_timeline
from gfgen.errors import InputError
from gfgen.runtime.files.manifest import ManifestWriter
from gfgen.runtime.files.trace import TraceWriter


def traced(
    path: Path,
    parts: list[Part],
    *,
    num_ranks: int = 2,
    is_simulated: bool = False,
) -> Path:
    writer = TraceWriter(path, is_simulated=is_simulated)
    ActedRun(parts, num_ranks=num_ranks, observers=[writer]).play()
    return path


def test_figures_are_those_of_the_jobs_that_ended(tmp_path: Path) -> None:
    parts = [
        Part(job_info("fox", deadline_s=100)),
        Part(job_info("koi", deadline_s=0.001)),
        Part(job_info("tram"), fails=True),
    ]
    run = figures_of(read_timeline(traced(tmp_path / "trace.json", parts)), name="srtf")
    assert run.attainment == 0.5
    assert run.mean_s is not None
    assert run.p95_s is not None
    assert run.p95_s >= run.mean_s > 0
    assert run.jobs_per_min == pytest.approx(60 * 2 / run.makespan_s)


def test_a_panel_for_each_number_and_a_bar_for_each_run(tmp_path: Path) -> None:
    runs = [
        figures_of(read_timeline(traced(tmp_path / f"{n}.json", batch(6), num_ranks=n)), name=f"{n} ranks")
        for n in (1, 2, 4)
    ]
    figure = draw_runs(runs, title="three")
    assert [len(axes.patches) for axes in figure.axes] == [3, 3, 3, 3]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "1 ranks",
        "2 ranks",
        "4 ranks",
    ]


def test_a_folder_stands_for_the_traces_in_it(tmp_path: Path) -> None:
    for name in ("srtf", "edf"):
        (tmp_path / name).mkdir()
        traced(tmp_path / name / "trace.json", batch(3))
    assert sorted(trace.parent.name for trace in find_traces([tmp_path])) == ["edf", "srtf"]
    plot_runs(find_traces([tmp_path]), tmp_path / "both.png")
    assert (tmp_path / "both.png").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"contains no trace\.json"):
        find_traces([tmp_path / "empty"])


def test_traces_of_a_folder_come_as_they_were_written(tmp_path: Path) -> None:
    for number, name in enumerate(("legacy", "edf", "auto")):
        (tmp_path / name).mkdir()
        trace = traced(tmp_path / name / "trace.json", batch(3), num_ranks=8)
        os.utime(trace, ns=(number, number))
    assert [trace.parent.name for trace in find_traces([tmp_path])] == ["legacy", "edf", "auto"]
    given = [tmp_path / "edf" / "trace.json", tmp_path / "legacy" / "trace.json"]
    assert find_traces(given) == given


def test_a_trace_without_ended_jobs_is_refused_by_name(tmp_path: Path) -> None:
    good = traced(tmp_path / "good.json", batch(2))
    TraceWriter(tmp_path / "none.json").close()
    with pytest.raises(InputError, match=r"none\.json: no job has ended"):
        plot_runs([good, tmp_path / "none.json"], tmp_path / "a.png")


def test_a_simulation_says_so_and_its_jobs_do_not_count_as_done(tmp_path: Path) -> None:
    info = job_info("fox")
    simulated = traced(tmp_path / "trace.json", [Part(info)], is_simulated=True)
    assert read_timeline(simulated).is_simulated
    assert not read_timeline(traced(tmp_path / "real.json", [Part(info)])).is_simulated
    (tmp_path / info.file).write_bytes(bytes(WRITTEN.size_bytes))  # so that it is not missing
    for is_simulated, finished in ((False, {"fox"}), (True, set())):
        path = tmp_path / "manifest.jsonl"
        writer = ManifestWriter(path, is_simulated=is_simulated)
        ActedRun([Part(info)], num_ranks=1, observers=[writer]).play()
        assert ('"simulated": true' in path.read_text()) is is_simulated
        assert finished_jobs(path, [info]) == finished
