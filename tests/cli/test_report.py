"""`gfgen report`: text, JSON and a page from the manifest of a folder."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gfgen.cli.main import main
from gfgen.cli.shown.picture import _label, _sheet_font, cell_side, draw_sheet
from gfgen.runtime.files.outputs import write_output
from gfgen.session.live import write_live

SHAPE = {"width": 64, "height": 64, "frames": 1, "fps": None}
ENDED = "2026-11-23T14:00:10Z"


def line(job_id: str, **other: Any) -> dict[str, Any]:
    timings = {
        "arrival_s": 0.0,
        "started_s": 1.0,
        "ended_s": 4.0,
        "latency_s": 4.0,
        "busy_s": 2.5,
        "stages_s": {},
    }
    return {
        "version": 1, "id": job_id, "status": "done", "file": f"{job_id}.png", "size_bytes": 2_000_000,
        "prompt": f"a {job_id}", "model": "shapes", "seed": 7, "shape": SHAPE, "steps": 4, "timings": timings,
        "job_file": "../jobs.jsonl", "error": None, "warnings": [], "met_deadline": None, "written_at": ENDED,
    } | other  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.jsonl").write_text("")
    out = tmp_path / "out"
    out.mkdir()
    Image.new("RGB", (64, 64), "red").save(out / "fox.png")
    lines = [
        line("owl", status="failed", file=None, size_bytes=None),
        line("fox", met_deadline=True),
        line("owl", status="failed", file=None, size_bytes=None, error="NaN in step 3", met_deadline=False),
        line("<b>", file="gone.mp4", prompt="<script>alert(1)</script> & {braces}"),
        line("sim", simulated=True),
    ]
    (out / "manifest.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return out


def gfgen(capsys, *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_the_text_counts_every_file_of_a_job(capsys, folder):
    frames = [{"file": f"owl/000{n}.png", "size_bytes": 500_000, "sha256": ""} for n in (1, 2, 3)]
    with (folder / "manifest.jsonl").open("a") as file:
        file.write(json.dumps(line("owl", **frames[0], outputs=frames)) + "\n")
    _, out, _ = gfgen(capsys, "report", "out")
    assert "files     1 MP4, 4 PNG, 5.5 MB" in out.splitlines()


def test_the_text_counts_jobs_names_failures_and_how_to_run_them_again(capsys, folder):
    code, out, _ = gfgen(capsys, "report", "out")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "out: 3 jobs: 2 done, 1 failed"
    assert lines[1].endswith("with 7.5 s of rank time")
    assert "files     1 MP4, 1 PNG, 4.0 MB" in lines
    assert "deadlines 1 of 2 met" in lines
    assert "failed    owl: NaN in step 3" in lines
    assert lines[-1].startswith("again     gfgen run jobs.jsonl -o out --failed, with the ")


def test_failed_prompts_of_the_command_line_have_a_command_too(capsys, folder):
    (folder / "manifest.jsonl").write_text(json.dumps(line("owl", status="failed", job_file="-")) + "\n")
    assert "again     gfgen run ... -o out --failed" in gfgen(capsys, "report", "out")[1]


def test_json_has_every_line_of_the_manifest(capsys, folder):
    code, out, _ = gfgen(capsys, "report", "out", "--json")
    found = json.loads(out)
    assert code == 0
    assert [job["id"] for job in found["jobs"]] == ["owl", "fox", "<b>"]
    assert found["jobs"][1]["ended_at"] - found["jobs"][1]["started_at"] == 3
    assert found["counts"] == {"left": 0, "waiting": 0, "failed": 1, "cancelled": 0, "dropped": 0, "done": 2}
    assert found["left"] == []


def test_the_time_of_first_uses_is_named(capsys, folder):
    first = line("fox")
    first["timings"] |= {"first_uses_s": 1.5}
    (folder / "manifest.jsonl").write_text(json.dumps(first) + "\n")
    out = gfgen(capsys, "report", "out")[1]
    assert "first use 1.5 s of it in tasks that were the first of their kind" in out.splitlines()


def run_in_journal(started: str, *ids: str, jobs: int = 0, forced_from: int | None = None) -> str:
    """A run that began at this time, and in which these jobs arrived."""
    started_at = datetime.fromisoformat(started).timestamp() + 0.1234
    header = {"gfgen_journal": 2, "started_at": started_at, "job_file": "../jobs.jsonl", "jobs": jobs}
    header["forced_from"] = forced_from
    arrivals = [{"event": "JobArrived", "time_s": 0.0, "job_id": name, "spec_hash": "x"} for name in ids]
    return "".join(json.dumps(each) + "\n" for each in (header, *arrivals))


def test_what_a_killed_run_left_is_counted(capsys, folder):
    """The first run ended fox and owl, the second one only <b>: it was to make owl again."""
    runs = [("2026-11-23T13:00:00Z", "fox", "owl"), ("2026-11-23T14:30:00Z", "owl", "<b>", "elk", "hen")]
    (folder / "journal.jsonl").write_text("".join(run_in_journal(*each) for each in runs))
    with (folder / "manifest.jsonl").open("a") as manifest:
        manifest.write(json.dumps(line("<b>", written_at="2026-11-23T14:30:09Z")) + "\n")
    lines = gfgen(capsys, "report", "out")[1].splitlines()
    assert lines[0] == "out: 5 jobs: 2 done, 3 left"
    assert lines[1] == "left      elk, hen, owl: run the same command again to go on"
    assert not [each for each in lines if each.startswith(("failed", "again"))]
    found = json.loads(gfgen(capsys, "report", "out", "--json")[1])
    assert found["counts"] == {"left": 3, "waiting": 0, "failed": 0, "cancelled": 0, "dropped": 0, "done": 2}
    assert found["left"] == ["elk", "hen", "owl"]
    assert gfgen(capsys, "report", "out", "--html")[0] == 0


def test_jobs_that_had_not_arrived_in_the_last_run_wait(capsys, folder):
    """The first run is over; of the second one's jobs elk arrived, and owl was cancelled."""
    (folder / "journal.jsonl").write_text(
        run_in_journal("2026-11-23T13:00:00Z", "fox", "owl", jobs=6)
        + run_in_journal("2026-11-23T14:30:00Z", "elk", jobs=4)
    )
    with (folder / "manifest.jsonl").open("a") as manifest:
        manifest.write(json.dumps(line("owl", status="cancelled", written_at="2026-11-23T14:30:09Z")) + "\n")
    lines = gfgen(capsys, "report", "out")[1].splitlines()
    assert lines[0] == "out: 6 jobs: 2 done, 1 cancelled, 2 waiting, 1 left"
    assert lines[2] == "waiting   2 jobs of the last run had not arrived"
    (folder / "manifest.jsonl").unlink()
    (folder / "journal.jsonl").write_text(run_in_journal("2026-11-23T13:00:00Z", jobs=2))
    assert gfgen(capsys, "report", "out")[1].splitlines()[0] == "out: 2 jobs: 2 waiting"


def test_a_job_that_a_stopped_force_was_to_make_again_counts_once(capsys, folder):
    """The second --force made fox again; <b> and owl, of the first one, had not arrived."""
    manifest, journal = folder / "manifest.jsonl", folder / "journal.jsonl"
    made = manifest.stat().st_size
    journal.write_text(run_in_journal("2026-11-23T14:30:00Z", "fox", jobs=3, forced_from=made))
    with manifest.open("a") as file:
        file.write(json.dumps(line("fox", written_at="2026-11-23T14:30:09Z")) + "\n")
    assert gfgen(capsys, "report", "out")[1].splitlines()[0] == "out: 3 jobs: 1 done, 2 waiting"
    started_at = datetime.fromisoformat("2026-11-23T14:30:00Z").timestamp()
    write_live(folder, {"state": "stopped", "started_at": started_at, "counts": {"jobs": 3}})
    status = gfgen(capsys, "status", "out")[1].splitlines()[1]
    assert status.endswith("1/3  1 done, 2 waiting")


def test_a_run_that_was_killed_before_a_job_ended_has_a_report(capsys, folder):
    (folder / "manifest.jsonl").unlink()
    (folder / "journal.jsonl").write_text(run_in_journal("2026-11-23T13:00:00Z", "fox", "owl"))
    assert gfgen(capsys, "report", "out")[1].splitlines() == [
        "out: 2 jobs: 2 left",
        "left      fox, owl: run the same command again to go on",
    ]
    assert gfgen(capsys, "report", "out", "--html")[0] == 0


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_thumbnails_prompts_and_failures_and_needs_no_other_file(capsys, folder):
    code, out, _ = gfgen(capsys, "report", "out", "--html")
    assert code == 0
    assert out.splitlines()[-1] == "the page is out/report.html"
    page = Page((folder / "report.html").read_text())
    (picture,) = [attrs for tag, attrs in page.tags if tag == "img"]
    assert (picture["src"] or "").startswith("data:image/webp;base64,")
    assert [attrs["href"] for tag, attrs in page.tags if tag == "a"] == ["fox.png"]
    assert "script" not in [tag for tag, _ in page.tags]
    assert "<script>alert(1)</script> & {braces}" in page.text
    assert "NaN in step 3" in page.text
    assert len([tag for tag, _ in page.tags if tag == "article"]) == 3
    assert len([tag for tag, _ in page.tags if tag == "rect"]) == 3
    assert not re.search(r'(?:src|href)="(?:https?:)?//', (folder / "report.html").read_text())


def test_the_timeline_of_2000_jobs_has_lanes_an_axis_and_names(capsys, folder):
    def at(idx: int) -> dict[str, Any]:  # 4 ranks, 10 s each, and a pause of an hour
        ended = 10 * (idx // 4 + 1) + 3600 * (idx >= 1000)
        timings = {"started_s": ended - 9.5, "ended_s": float(ended), "busy_s": 9.5, "latency_s": 9.5}
        moment = datetime.fromtimestamp(1.8e9 + ended, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return line(f"job-{idx:04}", timings=timings, written_at=moment, file=None)

    (folder / "manifest.jsonl").write_text("".join(json.dumps(at(idx)) + "\n" for idx in range(2000)))
    assert gfgen(capsys, "report", "out", "--html")[0] == 0
    page = Page((folder / "report.html").read_text())
    bars = [attrs for tag, attrs in page.tags if tag == "rect"]
    assert len(bars) == 2000
    assert len({bar["y"] for bar in bars}) == 4, "a lane for each rank"
    assert min(float(bar["width"] or 0) for bar in bars) > 50
    assert all(page.text.count(f"job-{idx:04}") >= 3 for idx in (0, 999, 1999)), "tooltip, bar and card"
    sizes = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(sizes) == 2, "one for each time without a pause"
    assert len([tag for tag, _ in page.tags if tag == "path"]) > 100, "ticks"


def test_a_page_elsewhere_links_to_the_files(capsys, folder, tmp_path):
    code, _, _ = gfgen(capsys, "report", "out", "-o", "page.html")
    assert code == 0
    page = Page((tmp_path / "page.html").read_text())
    assert [attrs["href"] for tag, attrs in page.tags if tag == "a"] == ["out/fox.png"]


def test_a_broken_picture_has_a_link_and_a_warning(capsys, folder):
    (folder / "fox.png").write_bytes(b"no picture")
    code, _, err = gfgen(capsys, "report", "out", "--html")
    assert code == 0
    assert "no thumbnail of out/fox.png" in err
    assert "fox.png" in Page((folder / "report.html").read_text()).text


@pytest.mark.parametrize(
    "content", [None, "", '{"version": 1, "id": "a", "status": "done", "simulated": true}\n']
)
def test_a_folder_without_jobs_is_refused(capsys, tmp_path: Path, content):
    if content is not None:
        (tmp_path / "manifest.jsonl").write_text(content)
    code, _, err = gfgen(capsys, "report", str(tmp_path))
    assert code == 2
    assert "name the output folder of a run" in err


# Sheets -----------------------------------------------------------------------------------------


def put(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "manifest.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def colours(path: Path) -> set[Any]:
    """Of the areas of a sheet, without its black labels."""
    with Image.open(path) as sheet:
        found = sheet.convert("RGB").getcolors(1 << 24) or []
    return {colour for count, colour in found if count > 500}


def test_a_sheet_has_each_picture_and_the_first_frame_of_each_video(capsys, folder):
    frames = np.zeros((2, 64, 64, 3), np.uint8)
    frames[0, ..., 2] = 250
    write_output(frames, folder / "sea.webm", fps=8, metadata={})
    (folder / "walk").mkdir()
    for name, colour in (("a-1", "lime"), ("a-2", "gray"), ("walk/0001", "fuchsia"), ("walk/0002", "navy")):
        Image.new("RGB", (64, 64), colour).save(folder / f"{name}.png")
    several, walk = ([{"file": f"{stem}{n}.png"} for n in (1, 2)] for stem in ("a-", "walk/000"))
    moving = SHAPE | {"frames": 2}
    put(
        folder,
        line("fox"),
        line("gone"),
        line("owl", status="failed", file=None),
        line("a", file="a-1.png", outputs=several),
        line("walk", file="walk/0001.png", outputs=walk, shape=moving),
        line("sea", file="sea.webm", shape=moving),
    )
    code, out, err = gfgen(capsys, "report", "out", "--sheet", "sheet.png")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "the sheet is sheet.png"
    shown = colours(Path("sheet.png"))
    assert {(255, 0, 0), (0, 255, 0), (128, 128, 128), (255, 0, 255), (255, 255, 255)} < shown
    (sea,) = shown - {(255, 0, 0), (0, 255, 0), (128, 128, 128), (255, 0, 255), (255, 255, 255)}
    assert sea[2] > 200


def test_labels_are_prompts_that_the_font_has_and_the_ends_of_ids():
    font = _sheet_font()
    assert _label("a fox", "fox-1", font, 160) == ["a fox", "fox-1"]
    assert _label("\u96ea \U0001f98a", "fox-1", font, 160) == ["fox-1"]
    assert _label("F\u00fcchse", "x", font, 160)[0] in ("F\u00fcchse", "Fuchse")
    *lines, name = _label("a red fox " * 20, "a-red-fox-" * 5 + "0042", font, 160)
    assert (len(lines), lines[-1][-3:], name[:3], name[-5:]) == (2, "...", "...", "-0042")
    assert all(font.getlength(each) <= 160 for each in (*lines, name, *_label("W" * 99, "W" * 99, font, 160)))


@pytest.mark.parametrize(
    ("number", "columns", "side"), [(1, 1, 512), (2, 2, 512), (64, 8, 504), (100, 10, 401), (500, 23, 170)]
)
def test_sheets_of_1_to_500_pictures_have_a_sensible_size(number, columns, side):
    assert cell_side(number) == side
    sheet = draw_sheet([(Image.new("RGB", (side, 9)), "a fox", "fox")] * number)
    assert sheet.width == columns * (side + 8) + 8


def test_cells_of_tiny_pictures_are_small_and_not_mostly_white():
    """Sides of 64 are doubled; 100 next to them is not."""
    cells = [(Image.new("RGB", (64, 64), colour), "a fox", "fox") for colour in ("red", "lime", "blue")]
    cells.append((Image.new("RGB", (100, 80), "navy"), "a fox", "fox"))
    sheet = draw_sheet(cells)
    assert sheet.width == 2 * (160 + 8) + 8
    found = {colour: count for count, colour in sheet.getcolors(1 << 20) or []}
    assert [found[each] for each in ((255, 0, 0), (0, 255, 0), (0, 0, 255))] == [128 * 128] * 3
    assert found[0, 0, 128] == 100 * 80
    assert found[255, 255, 255] < sheet.width * sheet.height * 0.6


def test_more_pictures_than_fit_become_several_sheets(capsys, folder, monkeypatch):
    monkeypatch.setattr("gfgen.cli.report.MAX_ON_SHEET", 2)
    put(folder, *(line(f"fox-{number}", file="fox.png") for number in range(3)))
    _, out, _ = gfgen(capsys, "report", "out", "--sheet", "sheet.jpg")
    assert out.splitlines()[-2:] == ["the sheet is sheet-1.jpg", "the sheet is sheet-2.jpg"]
    assert colours(Path("sheet-1.jpg"))
    with Image.open("sheet-1.jpg") as first, Image.open("sheet-2.jpg") as second:
        assert second.width < first.width


def test_the_page_replaces_no_record_and_no_file_of_a_job(capsys, folder):
    kept = {path: path.read_bytes() for path in (folder / "fox.png", folder / "manifest.jsonl")}
    for path, what in zip(kept, ("a file of job fox", "a record of runs"), strict=True):
        code, out, err = gfgen(capsys, "report", "out", "-o", str(path))
        assert (code, out, err) == (2, "", f"gfgen: --output {path}: is {what}; name another file\n")
        assert path.read_bytes() == kept[path]
    put(folder, line("fox", file="fox.png"), line("owl", file="deep/owl.png"))
    (folder / "deep").mkdir()
    (folder / "deep/owl.png").write_bytes(b"made")
    for name in ("fox", "deep/owl"):
        code, _, err = gfgen(capsys, "plot", "trace.json", "-o", f"out/{name}.png")
        job = Path(name).name
        assert (code, err) == (
            2,
            f"gfgen: --output out/{name}.png: is a file of job {job}; name another file\n",
        )


def test_a_sheet_that_cannot_be_is_refused_in_one_line(capsys, folder):
    for name, message in {
        "sheet.doc": "sheet.doc: cannot be written (unknown file extension: .doc); name another --sheet",
        "out/fox.png": "--sheet out/fox.png: is a file of job fox; name another file",
        "out/manifest.jsonl": "--sheet out/manifest.jsonl: is a record of runs; name another file",
        "none/sheet.png": "none/sheet.png: cannot be written (No such file or directory)",
    }.items():
        code, _, err = gfgen(capsys, "report", "out", "--sheet", name)
        assert (code, message in err, err.count("\n")) == (2, True, 1), err
    with Image.open("out/fox.png") as kept:
        assert kept.size == (64, 64)
    (folder / "fox.png").write_bytes(b"no picture")
    (folder / "fox.png").unlink()
    _, _, err = gfgen(capsys, "report", "out", "--sheet", "sheet.png")
    assert "sheet.png: none of the jobs has a picture or video that can be shown" in err


def test_a_page_of_a_folder_whose_name_is_not_utf8(capsys, folder):
    other = os.fsdecode(b"out-\xff")
    folder.rename(other)
    code, _, err = gfgen(capsys, "report", other, "--html", "-o", "page.html")
    assert code == 0, err
    assert 'href="out-%FF/fox.png"' in Path("page.html").read_text()
