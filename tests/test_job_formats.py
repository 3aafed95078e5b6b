"""Formats and quality of outputs, and templates of their names."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_job, read_jobs, simulated_control

from gfgen.errors import InputError, JobError
from gfgen.job.reader import ParsedJobs
from gfgen.job.shared import parse_overrides
from gfgen.job.spec import (
    JobSpec,
    default_seed,
    file_names,
    filled,
    lack_of,
    numbered_name,
    of_frames,
    output_name,
    spec_hash,
)
from gfgen.models.geometry.model import CONFIGS, weightless_geometry
from gfgen.runtime.core.admission import ResolvedModel, admit
from gfgen.runtime.files.journal import Journal
from gfgen.runtime.files.ownership import with_names


def read(tmp_path: Path, *lines: dict[str, Any], **overrides: Any) -> ParsedJobs:
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_jobs(path, overrides=overrides)


def name(kind: str, **fields: Any) -> str:
    return output_name(JobSpec(id="fox", prompt="a fox", **fields), kind)


@pytest.mark.parametrize(
    ("kind", "format_", "expected"),
    [
        ("image", None, "fox.png"),
        ("image", "jpeg", "fox.jpg"),
        ("image", "webp", "fox.webp"),
        ("image", "avif", "fox.avif"),
        ("video", None, "fox.mp4"),
        ("video", "h265", "fox.mp4"),
        ("video", "av1", "fox.mp4"),
        ("video", "webm", "fox.webm"),
        ("video", "prores", "fox.mov"),
        ("video", "webp", "fox.webp"),
        ("video", "gif", "fox.gif"),
    ],
)
def test_a_format_decides_the_ending_of_the_default_name(kind, format_, expected, monkeypatch):
    monkeypatch.setattr("gfgen.job.spec.lack_of", lambda name: None)
    assert name(kind, format=format_) == expected
    assert expected in file_names("fox", None, format_)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "image",
            {"format": "gif"},
            r"format = gif: one of png, png16, jpeg, webp, avif, because the model makes images",
        ),
        (
            "video",
            {"format": "jpeg"},
            r"format = jpeg: one of mp4, h265, webm, av1, prores, png, png16, webp, gif",
        ),
        (
            "video",
            {"output": "a.jpg"},
            r"output = a\.jpg: a name that ends in \.mp4, \.webm, \.mov, \.png, \.webp or \.gif",
        ),
        ("video", {"quality": 90, "output": "a.png"}, "quality = 90: png files have none"),
        (
            "image",
            {"output": "a.png", "format": "webp"},
            r"a name that ends in \.webp, as format = 'webp' asks",
        ),
        ("image", {"quality": 90}, "quality = 90: png files have none"),
        ("image", {"quality": 90, "format": "png16"}, "quality = 90: png16 files have none"),
        ("video", {"quality": 90, "output": "a.gif"}, "quality = 90: gif files have none"),
        ("video", {"quality": 90, "output": "a.mov"}, "quality = 90: prores files have none"),
        (
            "video",
            {"output": "a.mov", "format": "av1"},
            r"a name that ends in \.mp4 or \.webm, as format = 'av1'",
        ),
    ],
)
def test_a_format_that_does_not_fit_is_refused(kind, fields, message):
    with pytest.raises(JobError, match=message):
        name(kind, **fields)


def test_a_name_gives_the_format_and_both_may_agree():
    assert name("image", output="a.JPG", quality=80) == "a.JPG"
    assert name("image", output="a.jpeg", format="jpeg") == "a.jpeg"
    assert name("video", output="a.webm", quality=80) == "a.webm"
    assert name("video", output="a.WEBM", format="av1") == "a.WEBM"


def test_frames_of_a_video_as_png_are_in_a_folder_of_its_name():
    assert name("video", format="png") == "fox/{frame}.png"
    assert name("video", format="png16") == "fox/{frame}.png"
    assert name("video", output="shots/a.PNG") == "shots/a/{frame}.PNG"
    numbered = [numbered_name("shots/a/{frame}.png", number) for number in (1, 49, 12_345)]
    assert numbered == ["shots/a/0001.png", "shots/a/0049.png", "shots/a/12345.png"]
    with pytest.raises(InputError, match=r"\{frame\} is none of"):
        parse_overrides([("--set", "output={id}/{frame}.png")])


def test_what_the_machine_lacks_is_found_before_the_run(monkeypatch):
    monkeypatch.setattr("gfgen.job.spec.lack_of", lambda name: f"this ffmpeg has no {name}")
    with pytest.raises(JobError, match="format = av1: this ffmpeg has no av1"):
        name("video", format="av1")


@pytest.mark.parametrize(
    ("encoders", "fields", "message"),
    [
        ("libopenh264", {}, "format = mp4: this ffmpeg has no encoder libx264"),
        ("libx264", {"output": "a.webm"}, "format = webm: this ffmpeg has no encoder libvpx-vp9"),
        ("libvpx-vp9", {"format": "webm"}, "format = webm: this ffmpeg has no encoder libopus"),
        ("libvpx-vp9 libopus", {"output": "a.webm", "format": "av1"}, "has no encoder libsvtav1"),
        ("libsvtav1", {"output": "a.webm", "format": "av1"}, "this ffmpeg has no encoder"),
        ("libx264", {"output": "a.mov"}, "format = prores: this ffmpeg has no encoder prores_ks"),
    ],
)
def test_a_missing_encoder_is_one_line_before_the_run(tmp_path, monkeypatch, encoders, fields, message):
    ffmpeg = tmp_path / "ffmpeg"
    ffmpeg.write_text(f'#!/bin/sh\nfor each in {encoders}; do echo " V..... $each  "; done\n')
    ffmpeg.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(ffmpeg))
    lack_of.cache_clear()
    try:
        with pytest.raises(JobError, match=message):
            name("video", **fields)
    finally:
        lack_of.cache_clear()


def test_an_ffmpeg_that_does_not_run_is_one_line_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "none"))
    lack_of.cache_clear()
    try:
        with pytest.raises(
            JobError, match=r"format = mp4: ffmpeg cannot be used: .*none: this ffmpeg is gone"
        ):
            name("video")
        assert name("image") == "fox.png"
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", shutil.which("false"))
        lack_of.cache_clear()
        with pytest.raises(JobError, match=r"ffmpeg cannot be used: \S+/false ends with 1; unset"):
            name("video")
    finally:
        lack_of.cache_clear()


def test_formats_are_written_in_several_ways(tmp_path):
    parsed = read(
        tmp_path, *({"prompt": "a", "format": text} for text in ("JPG", "jpeg", "h264", "MOV", "vp9", "tiff"))
    )
    assert [spec.format for spec in parsed.specs] == ["jpeg", "jpeg", "mp4", "prores", "webm"]
    (problem,) = parsed.problems
    assert "one of png, png16, jpeg, webp, avif, mp4, h265, webm, av1, prores, gif" in str(problem)


def test_a_format_makes_another_job_and_none_changes_no_hash():
    spec = JobSpec(id="fox", prompt="a fox")
    hashes = {spec_hash(replace(spec, format=each)) for each in (None, "webp", "jpeg")}
    assert len(hashes | {spec_hash(replace(spec, format="jpeg", quality=50))}) == 4


# Templates --------------------------------------------------------------------------------------


def test_placeholders_of_a_name_are_filled_in(tmp_path):
    template = "{tag}/{id}-{seed}.webp"
    lines = [
        {"id": "fox", "prompt": "a", "output": template, "tag": "night/../1 \u00fc"},
        {"id": "owl", "prompt": "b", "output": template, "seed": 3},
    ]
    fox, owl = read(tmp_path, *lines).specs
    assert fox.output == f"night-..-1/fox-{default_seed('fox')}.webp"
    assert owl.output == "untagged/owl-3.webp"


def test_prompts_models_numbers_and_positions_are_filled_in(tmp_path):
    line = {
        "prompt": "A red fox, at dawn",
        "size": "64x64",
        "output": "{model}/{index:04}-{seed:03}-{prompt}.png",
    }
    lines = [
        {**line, "model": "org/Tiny.1", "seed": 5},
        {**line, "seed": 6},
        {**line, "seed": 7, "model": "/a/b/"},
    ]
    jobs, problems = admitted(read(tmp_path, *lines).specs)
    assert problems == ()
    assert [job.info.file for job in jobs] == [
        "Tiny.1/0001-005-a-red-fox-at-dawn.png",
        "tiny-qwen-image/0002-006-a-red-fox-at-dawn.png",
        "b/0003-007-a-red-fox-at-dawn.png",
    ]


def admitted(specs):
    geometry = weightless_geometry(CONFIGS / "tiny-qwen-image")
    found = lambda name: ResolvedModel(name, CONFIGS / "tiny-qwen-image", geometry)  # noqa: E731
    return admit(specs, default_model="tiny-qwen-image", find_model=found)


@pytest.mark.parametrize(
    "wrong", ["{nmae}", "{", "}", "{}", "{id:4}", "{index:x}", "{index:0}", "{a/b}", "{ID}"]
)
def test_braces_that_are_no_placeholder_are_refused_with_those_that_are(tmp_path, wrong):
    (problem,) = read(tmp_path, {"prompt": "a", "output": f"x{wrong}.png"}).problems
    known = "{id}, {index}, {seed}, {tag}, {prompt}, {model}, {date}, {time}, nor {index:04}"
    assert f"; {wrong} is none of {known}" in str(problem)


def test_a_position_counts_each_job_of_its_file_also_faulty_ones(tmp_path):
    line = {"prompt": "a", "output": "{index}.png"}
    parsed = read(tmp_path, line, {"prompt": ""}, {**line, "num_images": 2})
    assert [(spec.output, spec.place) for spec in parsed.specs] == [
        ("{index}.png", 1), ("{index}.png", 3), ("{index}.png", 4),
    ]  # fmt: skip


def test_a_position_changes_neither_id_nor_hash(tmp_path):
    line = {"prompt": "a", "output": "{index}.png"}
    (alone,), (_, second) = read(tmp_path, line).specs, read(tmp_path, {"prompt": "b"}, line).specs
    assert (alone.id, spec_hash(alone)) == (second.id, spec_hash(second))


def test_a_name_that_gets_too_long_is_found_before_it_is_written(tmp_path):
    (problem,) = read(tmp_path, {"id": "x" * 110, "prompt": "a", "output": "{id}-{id}.png"}).problems
    assert "with its placeholders filled in, at most 200 bytes, not 225" in str(problem)


def test_jobs_without_an_id_can_have_a_template(tmp_path):
    (spec,) = read(tmp_path, {"prompt": "a fox", "output": "all/{id}.png"}).specs
    assert spec.output == f"all/{spec.id}.png"


@pytest.mark.parametrize(
    "output",
    ["../{id}.png", "/{id}.png", "a//{id}.png", "a/.hidden/{id}.png", "a/../{id}.png", "{id}/", "{id}/.png",
     "a\\{id}.png", "a /{id}.png", "a/b.png", "1/2/3/4/5/6/7/8/{id}.png"],
)  # fmt: skip
def test_names_stay_below_the_output_folder(tmp_path, output):
    assert read(tmp_path, {"prompt": "a", "output": output}).problems


@pytest.mark.parametrize("tag", ["..", "/", "...", "a/../../b", "\u72d0"])
def test_a_tag_is_never_a_path(tag):
    folder, _ = filled("{tag}/{id}.png", job_id="fox", seed=1, tag=tag).split("/")
    assert folder not in ("", ".", "..")
    assert not folder.startswith(".")


def test_two_jobs_with_one_filled_name_are_a_problem(tmp_path):
    lines = [{"id": each, "prompt": "a", "seed": 1, "output": "x/{seed}.png"} for each in ("fox", "owl")]
    (problem,) = read(tmp_path, *lines).problems
    assert "line 1 already writes x/1.png" in str(problem)


def test_defaults_and_options_share_names_that_have_the_id(tmp_path):
    defaults = {"defaults": {"output": "{tag}/{id}.png"}}
    (spec,) = read(tmp_path, defaults, {"id": "fox", "prompt": "a", "tag": "S"}).specs
    assert spec.output == "S/fox.png"
    (problem,) = read(tmp_path, {"defaults": {"output": "{tag}.png"}}).problems[:1]
    assert "each job needs its own" in str(problem)
    for name in ("all/{id}.png", "{index:03}.png"):
        assert parse_overrides([("--set", f"output={name}")]) == {"output": name}
    with pytest.raises(InputError, match="each job needs its own"):
        parse_overrides([("--set", "output=a.png")])
    with pytest.raises(InputError, match=r"control characters"):
        parse_overrides([("--set", "output=../{id}.png")])


def test_variations_number_the_id_alone(tmp_path):
    line = {"id": "fox", "prompt": "a", "num_images": 2, "output": "all/{id}.png"}
    assert [spec.output for spec in read(tmp_path, line).specs] == ["all/fox-1.png", "all/fox-2.png"]


def jobs_of(tmp_path, *lines, default="tiny-qwen-image"):
    jobs, problems = admitted(read(tmp_path, *lines).specs)
    assert problems == ()
    return jobs


def files(jobs, folder, **options):
    return [job.info.file for job in with_names(jobs, output_dir=folder, **options)]


def finish(folder, job, **changes):
    (job,) = with_names([job], output_dir=folder)
    line = {"version": 1, "id": job.job_id, "status": "done", "file": job.info.file, "seed": job.spec.seed}
    with (folder / "manifest.jsonl").open("a") as file:
        file.write(json.dumps(line | {"spec_hash": job.info.spec_hash} | changes) + "\n")


def test_a_finished_job_keeps_its_number_and_a_new_one_takes_none_that_is_used(tmp_path):
    lines = [{"prompt": each, "size": "64x64", "output": "{index:02}.png"} for each in ("fox", "owl", "elk")]
    fox, owl, elk = jobs_of(tmp_path, *lines)
    for job in (fox, owl):
        finish(tmp_path, job)
    assert files([fox, owl, elk], tmp_path) == ["01.png", "02.png", "03.png"]
    hen = {**lines[0], "prompt": "hen"}
    assert files(jobs_of(tmp_path, hen, *lines), tmp_path) == ["03.png", "01.png", "02.png", "04.png"]
    assert files(jobs_of(tmp_path, hen), tmp_path) == ["03.png"], "files of jobs that are gone stay, too"
    finish(tmp_path, fox, outputs=[{"file": "01-1.png"}], file="01-1.png")
    assert files([fox], tmp_path) == ["01.png"], "the name of several pictures, without a number"


def test_a_folder_of_frames_keeps_its_number_too(tmp_path):
    lines = [{"prompt": each, "size": "64x64", "output": "{index:02}.png"} for each in ("fox", "owl")]
    fox, owl = (
        replace(job, info=replace(job.info, file=of_frames(job.info.file)))
        for job in jobs_of(tmp_path, *lines)
    )
    assert files([fox, owl], tmp_path) == ["01/{frame}.png", "02/{frame}.png"]
    finish(tmp_path, owl, outputs=[{"file": "01/0001.png"}, {"file": "01/0002.png"}], file="01/0001.png")
    assert files([fox, owl], tmp_path) == ["02/{frame}.png", "01/{frame}.png"]


def test_the_time_is_that_of_the_first_start_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    jobs = jobs_of(tmp_path, *[{"prompt": each, "output": "{time}-{id}.png"} for each in ("fox", "owl")])
    ids = [job.job_id for job in jobs]
    assert files(jobs, tmp_path, named_at=3723.0) == [f"01-02-03-{each}.png" for each in ids]
    header = {"gfgen_journal": 2, "started_at": 9.0, "named_at": 3661.0}
    (tmp_path / "journal.jsonl").write_text(json.dumps(header) + "\n")
    assert files(jobs, tmp_path, named_at=3723.0) == [f"01-01-01-{each}.png" for each in ids]
    monkeypatch.undo()
    time.tzset()


def test_a_random_seed_is_drawn_once_and_later_runs_find_it(tmp_path):
    (job,) = jobs_of(tmp_path, {"prompt": "a", "size": "64x64", "seed": -1, "output": "{seed}.png"})
    first, second = (with_names([job], output_dir=tmp_path)[0] for _ in range(2))
    assert first.spec.seed != second.spec.seed
    assert (first.info.file, first.info.spec_hash) == (f"{first.spec.seed}.png", job.info.spec_hash)
    assert with_names([first], output_dir=tmp_path) == [first], "it is drawn once"
    journal = Journal(tmp_path / "journal.jsonl", header={"started_at": 0.0})
    control, _ = simulated_control([first], journal=journal)
    control.run()
    journal.close()
    assert with_names([job], output_dir=tmp_path)[0].spec.seed == first.spec.seed
    (tmp_path / "journal.jsonl").unlink()
    finish(tmp_path, second)
    assert with_names([job], output_dir=tmp_path)[0].spec.seed == second.spec.seed


def test_the_seed_is_in_the_journal_before_the_first_step(tmp_path):
    (job,) = with_names(jobs_of(tmp_path, {"prompt": "a", "size": "64x64", "seed": -1}), output_dir=tmp_path)
    journal = Journal(tmp_path / "journal.jsonl", header={"started_at": 0.0})
    control, recorder = simulated_control([job], journal=journal)
    control.begin()
    while not recorder.dispatches:
        control.turn()
    (arrival,) = [
        line for line in (tmp_path / "journal.jsonl").read_text().splitlines() if "JobArrived" in line
    ]
    assert json.loads(arrival)["seed"] == job.spec.seed
    journal.close()


def test_a_date_is_that_of_the_first_recorded_arrival(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    job = make_job("fox")
    job = replace(job, info=replace(job.info, file="{date}/fox.png"))
    (today,) = with_names([job], output_dir=tmp_path)
    assert today.info.file == time.strftime("%Y-%m-%d/fox.png")
    arrival = {"job_id": "fox", "spec_hash": job.info.spec_hash, "time_s": 0.0}
    monkeypatch.setattr("gfgen.runtime.files.ownership.arrivals", lambda path: [(86_400.0, arrival)])
    (dated,) = with_names([job], output_dir=tmp_path)
    assert dated.info.file == "1970-01-02/fox.png"
    done = {"version": 1, "id": "fox", "status": "done", "file": "1970-01-01/fox.png"}
    entry = done | {"spec_hash": job.info.spec_hash}
    (tmp_path / "manifest.jsonl").write_text(json.dumps(entry) + "\n")
    (kept,) = with_names([job], output_dir=tmp_path)
    assert kept.info.file == "1970-01-01/fox.png"
    plain = make_job("owl")
    assert with_names([plain], output_dir=tmp_path) == [plain]
    os.environ.pop("TZ", None)
    time.tzset()


def test_a_job_says_its_size_its_seed_and_the_name_of_its_file():
    spec = JobSpec(id="fox", prompt="a fox")
    assert spec.size_text == "auto"
    assert replace(spec, width=64, height=32).size_text == "64x32"
    assert 0 <= default_seed("fox") < 2**32
    assert len({default_seed(f"fox-{n}") for n in range(100)}) == 100
    assert max(default_seed(f"fox-{n}") for n in range(100)) > 2**24
    assert filled("{index:04}-{tag}-{id}", index=7, tag="S", job_id="a") == "0007-S-a"
