"""The picture of a trace: it is drawn for every kind of run, and refuses what is none."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from acted_run import ActedRun, Part, batch, job_info
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from gfgen.cli.shown.picture import PALETTE, job_colour, luminance, shaded
from gfgen.cli.shown.plot_timeline import MAX_ROWS_WITH_NAME, draw, plot_timeline
from gfgen.cli.shown.timeline import read_timeline
from gfgen.errors import InputError
from gfgen.runtime.files.trace import TraceWriter


def traced(folder: Path, parts: list[Part], *, num_ranks: int) -> Path:
    path = folder / "trace.json"
    ActedRun(parts, num_ranks=num_ranks, observers=[TraceWriter(path)]).play()
    return path


def texts(trace: Path) -> list[str]:
    """All that is written in the picture."""
    figure = draw(read_timeline(trace))
    written = [text.get_text() for axes in figure.axes for text in axes.texts]
    return [text.get_text() for text in figure.texts] + written


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_picture_has_the_kind_of_its_suffix(tmp_path: Path, suffix: str) -> None:
    trace = traced(tmp_path, batch(3), num_ranks=2)
    plot_timeline(trace, tmp_path / "deep" / f"timeline{suffix}")
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert (tmp_path / "deep" / f"timeline{suffix}").read_bytes().startswith(start)


def test_picture_names_the_run_its_ranks_jobs_and_verdicts(tmp_path: Path) -> None:
    parts = [
        Part(job_info("fox", prompt="a fox in deep snow", deadline_s=100)),
        Part(job_info("koi", deadline_s=1)),
        Part(job_info("tram"), fails=True),
    ]
    written = texts(traced(tmp_path, parts, num_ranks=2))
    assert written[0].startswith("srtf: 3 jobs on 2 ranks in ")
    assert written[0].endswith("1 of 2 deadlines met, 1 failed")
    assert {"rank 0", "rank 1", "writer 0", "failed", "fox  a fox in deep snow"} <= set(written)
    assert any("early)" in text for text in written)
    assert any("late by" in text for text in written)


def test_task_on_several_ranks_is_one_rectangle_with_one_label(tmp_path: Path) -> None:
    trace = traced(tmp_path, [Part(job_info("koi", steps=30), degree=4)], num_ranks=4)
    lanes = draw(read_timeline(trace)).axes[0]
    assert [text.get_text() for text in lanes.texts if text.get_position()[1] == 1.5] == ["koi"]
    heights = [artist.get_height() for artist in lanes.get_children() if isinstance(artist, Rectangle)]
    assert sum(height > 3 for height in heights) >= 30


@pytest.mark.parametrize("stage", ["reuse", "refine"])
def test_legend_names_seldom_stages_where_they_occur(tmp_path: Path, stage: str) -> None:
    trace = traced(tmp_path, [Part(job_info("koi", steps=3))], num_ranks=1)

    def legend() -> list[str]:
        return [text.get_text() for text in draw(read_timeline(trace)).legends[0].get_texts()]

    assert {"denoise", "decode"} <= set(legend())
    assert stage not in legend()
    trace.write_text(trace.read_text().replace("denoise", stage))
    assert stage in legend()


def test_prompt_with_mathematics_and_braces_is_shown_as_it_is(tmp_path: Path) -> None:
    written = texts(traced(tmp_path, [Part(job_info("a", prompt="$x_{$ {y} \\frac"))], num_ranks=1))
    assert "a  $x_{$ {y} \\frac" in written
    plot_timeline(tmp_path / "trace.json", tmp_path / "a.png")


def test_prompt_without_a_font_is_no_warning(tmp_path: Path) -> None:
    trace = traced(tmp_path, [Part(job_info("a", prompt="\u96ea \U0001f98a"))], num_ranks=1)
    plot_timeline(trace, tmp_path / "a.png")


def test_many_jobs_stay_within_a_page(tmp_path: Path) -> None:
    num_jobs = MAX_ROWS_WITH_NAME + 1
    trace = traced(tmp_path, [Part(job_info(f"a-{idx}", steps=1)) for idx in range(num_jobs)], num_ranks=2)
    figure = draw(read_timeline(trace))
    assert figure.get_size_inches()[1] < 20
    assert not any("  a " in text for axes in figure.axes for text in (t.get_text() for t in axes.texts))


def test_unfinished_run_is_drawn(tmp_path: Path) -> None:
    trace = traced(tmp_path, batch(12), num_ranks=4)
    torn = tmp_path / "torn.json"
    torn.write_text(trace.read_text()[: len(trace.read_text()) // 2])
    assert "unfinished" in texts(torn)


def test_empty_broken_or_missing_traces_and_wrong_suffixes_are_refused(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "empty.json").close()
    (tmp_path / "broken.json").write_text("not json")
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a fox"}\n' * 2)
    for name, output, reason in [
        ("empty.json", "a.png", "no task has ended"),
        ("broken.json", "a.png", "not a trace"),
        ("jobs.jsonl", "a.png", "not a trace"),
        ("missing.json", "a.png", "No such file"),
        ("empty.json", "a.gif", r"\.png, \.svg, \.pdf"),
    ]:
        with pytest.raises(InputError, match=reason):
            plot_timeline(tmp_path / name, tmp_path / output)


def test_missing_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(tmp_path, batch(1), num_ranks=1)
    real_import = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(InputError, match=r"pip install 'gfgen\[plot\]'"):
        plot_timeline(trace, tmp_path / "a.png")


def test_first_colours_differ_and_later_ones_are_shades_of_them() -> None:
    assert len({job_colour(idx) for idx in range(36)}) == 36
    assert job_colour(0) == PALETTE[0]
    assert luminance(job_colour(12)) > luminance(job_colour(0)) > luminance(job_colour(24))
    assert shaded("#102030", 2.0) == "#FFFFFF"
    assert shaded("#102030", 0.0) == "#000000"


def test_a_long_id_is_shortened_in_the_middle(tmp_path: Path) -> None:
    twins = [Part(job_info(f"a-red-fox-in-the-snow-e6905673b9-{n}"), step_s=0.3) for n in (2, 3)]
    trace = traced(tmp_path, [*twins, Part(job_info("koi"), step_s=3.0)], num_ranks=1)
    cut = [text for text in texts(trace) if "~" in text]
    assert {text.partition("  ")[0][-2:] for text in cut} == {"-2", "-3"}
    assert len(cut) >= 4


def test_a_label_has_a_plain_ground_that_it_stands_out_from(tmp_path: Path) -> None:
    lanes = draw(read_timeline(traced(tmp_path, batch(12), num_ranks=4))).axes[0]
    labels = [text for text in lanes.texts if text.get_bbox_patch() is not None]
    assert len(labels) >= 10
    for label in labels:
        ground = luminance(to_hex(label.get_bbox_patch().get_facecolor()))
        assert abs(ground - luminance(to_hex(label.get_color()))) > 0.25
