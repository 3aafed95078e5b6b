"""Whose files and folders are whose: what a job may replace, and where a job file's outputs go."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_job

from gfgen.errors import Problem
from gfgen.job.spec import numbered_name
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.journal import Journal, journal_header
from gfgen.runtime.files.manifest import ManifestWriter
from gfgen.runtime.files.ownership import Claims, claim_files, default_folder, job_file_name, with_names
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.content import MARK, Content, content_of, remove_mark, set_mark

NIGHT, DAY = "../night.jsonl", "../day.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def made(folder: Path, *, job_file: str | None = NIGHT, content: bytes = b"fox", **fields: Any) -> Path:
    """A file that a job has made, with its line in the manifest."""
    info = replace(make_job("fox").info, job_file=job_file, **fields)
    path = folder / info.file
    path.write_bytes(content)
    outcome = JobOutcome(info, "done", 0.0, 0.0, 1.0, None, 1.0, (), written=content_of(path))
    note(folder, outcome)
    return path


def note(folder: Path, outcome: JobOutcome) -> None:
    writer = ManifestWriter(folder / "manifest.jsonl")
    writer.ended(outcome)
    writer.close()


def claim(
    folder: Path, job: AdmittedJob | None = None, *, job_file: str = NIGHT, **options: Any
) -> AdmittedJob | Problem:
    """The job as admitted, or what is wrong with its file."""
    job = make_job("fox", line=3) if job is None else job
    claimed, problems = claim_files([job], output_dir=folder, job_file=job_file, **options)
    (found,) = [*claimed, *problems]
    return found


def reason(found: AdmittedJob | Problem) -> str:
    assert isinstance(found, Problem), found
    return str(found)


def replaced(found: AdmittedJob | Problem) -> Content | None:
    assert isinstance(found, AdmittedJob), str(found)
    return found.replaces


def test_a_name_that_is_free_replaces_nothing_and_the_job_knows_its_file(folder: Path) -> None:
    found = claim(folder)
    assert replaced(found) is None
    assert isinstance(found, AdmittedJob)
    assert found.info.job_file == NIGHT


def test_a_file_that_no_manifest_names_is_kept(folder: Path) -> None:
    (folder / "fox.png").write_bytes(b"mine")
    assert reason(claim(folder)) == (
        f"line 3: {folder}/fox.png: is there already, and manifest.jsonl there does not say that gfgen made "
        "it; move it away, name another output, or replace it with --overwrite"
    )
    assert replaced(claim(folder, overwrite=True)) == content_of(folder / "fox.png")


def test_what_the_same_job_file_made_is_replaced_also_by_a_changed_or_another_job(folder: Path) -> None:
    path = made(folder)
    assert replaced(claim(folder)) == content_of(path)
    other = make_job("owl")
    other = replace(other, info=replace(other.info, file="fox.png"))
    assert replaced(claim(folder, other)) == content_of(path)


def test_it_is_replaced_although_the_job_has_failed_since(folder: Path) -> None:
    path = made(folder)
    info = replace(make_job("fox").info, job_file=NIGHT, spec_hash="changed")
    note(folder, JobOutcome(info, "failed", 0.0, 0.0, 1.0, None, 1.0, (), error="out of memory"))
    assert replaced(claim(folder)) == content_of(path)


@pytest.mark.parametrize("content", [b"fax", b"a longer one"], ids=["same size", "other size"])
def test_a_file_that_has_changed_since_is_kept(folder: Path, content: bytes) -> None:
    made(folder).write_bytes(content)
    assert "out/fox.png: has changed since job fox of " in reason(claim(folder))
    assert replaced(claim(folder, overwrite=True)) is not None


def test_what_another_job_file_made_is_kept_and_its_maker_is_named(folder: Path) -> None:
    made(folder)
    found = reason(claim(folder, job_file=DAY))
    assert f"is there already: job fox of {folder.parent}/night.jsonl made it" in found


def test_a_manifest_that_names_no_job_file_and_no_hash_counts_as_of_the_same(folder: Path) -> None:
    path = made(folder)
    entry = json.loads((folder / "manifest.jsonl").read_text())
    old = {key: value for key, value in entry.items() if key not in ("job_file", "sha256")}
    (folder / "manifest.jsonl").write_text(json.dumps(old) + "\n")
    assert replaced(claim(folder, job_file=DAY)) == content_of(path)
    path.write_bytes(b"longer than it was")
    assert "has changed since job fox made it" in reason(claim(folder, job_file=DAY))


def test_standard_input_replaces_only_what_the_very_same_job_made(folder: Path) -> None:
    path = made(folder, job_file="-")
    assert replaced(claim(folder, job_file="-")) == content_of(path)
    assert "job fox of an earlier standard input made it" in reason(
        claim(folder, other_spec("fox"), job_file="-")
    )
    assert "made it" in reason(claim(folder, other_spec("fox"), job_file=NIGHT))


def other_spec(job_id: str) -> AdmittedJob:
    job = make_job(job_id)
    return replace(job, info=replace(job.info, spec_hash="another"))


def test_a_line_of_a_simulation_gives_no_right(folder: Path) -> None:
    made(folder)
    entry = json.loads((folder / "manifest.jsonl").read_text()) | {"simulated": True}
    (folder / "manifest.jsonl").write_text(json.dumps(entry) + "\n")
    assert "does not say that gfgen made it" in reason(claim(folder))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["a folder", "a link", "not a file"])
def test_folders_links_and_pipes_are_in_the_way_whatever_is_said(
    folder: Path, kind: str, overwrite: bool
) -> None:
    path = folder / "fox.png"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a link":
        path.symlink_to(folder / "gone.png")
    else:
        os.mkfifo(path)
    assert f"fox.png: is {kind}; move it away" in reason(claim(folder, overwrite=overwrite))


@pytest.mark.parametrize("way", ["path", "symlink", "hard link"])
def test_no_output_is_the_image_of_any_job(folder: Path, way: str) -> None:
    path = made(folder)
    image = folder.parent / "image.png"
    if way == "symlink":
        image.symlink_to(path)
    elif way == "hard link":
        os.link(path, image)
    owl = make_job("owl", image=str(path if way == "path" else image))
    jobs = [make_job("fox"), owl]
    for overwrite in (False, True):
        claimed, problems = claim_files(
            jobs, output_dir=folder, job_file=NIGHT, overwrite=overwrite, done={"owl"}
        )
        assert [job.job_id for job in claimed] == ["owl"]
        assert str(problems[0]) == f"{path}: is the image of job owl, too; name another output"


def test_a_finished_job_may_be_the_image_of_another(folder: Path) -> None:
    path = made(folder)
    jobs = [make_job("fox"), make_job("owl", image=str(path))]
    claimed, problems = claim_files(jobs, output_dir=folder, job_file=NIGHT, done={"fox"})
    assert (len(claimed), problems) == (2, [])


def test_all_that_is_in_the_way_is_told_at_once_in_the_order_of_the_jobs(folder: Path) -> None:
    jobs = [make_job(f"job-{number}", line=number) for number in range(1, 5)]
    for number in (1, 2, 4):
        (folder / f"job-{number}.png").write_bytes(b"mine")
    claimed, problems = claim_files(jobs, output_dir=folder, job_file=NIGHT)
    assert [job.job_id for job in claimed] == ["job-3"]
    assert [problem.line for problem in problems] == [1, 2, 4]


def test_a_file_whose_run_was_killed_before_its_line_was_written_is_known_by_its_mark(folder: Path) -> None:
    path = marked(folder / "fox.png")
    assert replaced(claim(folder)) == content_of(path)
    assert "made it" in reason(claim(folder, job_file=DAY))
    content = path.read_bytes()
    path.write_bytes(b"edited")
    assert "does not say" in reason(claim(folder))
    path.write_bytes(content)
    assert replaced(claim(folder)) == content_of(path)
    path.rename(folder / "owl.png")
    assert "does not say" in reason(claim(folder, make_job("owl")))


def marked(path: Path) -> Path:
    path.write_bytes(b"fox")
    made_for = {"id": "fox", "spec_hash": "hash of fox", "job_file": NIGHT}
    set_mark(path, content_of(path), name=path.name, made_for=made_for)
    return path


def test_the_manifest_takes_marks_away_when_its_lines_are_on_the_disk(folder: Path) -> None:
    path = marked(folder / "fox.png")
    made(folder)
    assert MARK not in os.listxattr(path)
    remove_mark(folder / "gone.png")


# --force --------------------------------------------------------------------------------------


def force(folder: Path, *names: str) -> set[str]:
    """A run with --force begins: the jobs that it need not make again."""
    jobs = [make_job(name) for name in names]
    claims = Claims(output_dir=folder, job_file=NIGHT, force=True)
    found = set(claims.done(jobs))
    header = {"started_at": 0.0, "forced_from": claims.forced_from}
    Journal(folder / "journal.jsonl", header=header).close()
    return found


def make(folder: Path, name: str, status: str = "done") -> None:
    info = replace(make_job(name).info, job_file=NIGHT)
    (folder / info.file).write_bytes(name.encode())
    written = content_of(folder / info.file) if status == "done" else None
    note(folder, JobOutcome(info, status, 0.0, 0.0, 1.0, None, 1.0, (), written=written))  # type: ignore[arg-type]


def test_a_stopped_force_goes_on_where_it_was_and_ends(folder: Path) -> None:
    for name in ("fox", "owl", "elk"):
        make(folder, name)
    assert force(folder, "fox", "owl", "elk") == set()
    make(folder, "fox")
    assert force(folder, "fox", "owl", "elk") == {"fox"}, "the run was stopped after the first job"
    make(folder, "owl")
    assert force(folder, "fox", "owl", "elk") == {"fox", "owl"}
    make(folder, "elk", "failed")
    assert force(folder, "fox", "owl", "elk") == set(), "that --force has ended: this is another one"


def test_a_run_without_force_ends_a_stopped_one(folder: Path) -> None:
    make(folder, "fox")
    assert force(folder, "fox", "owl") == set()
    make(folder, "fox")
    Journal(folder / "journal.jsonl", header={"started_at": 0.0, "forced_from": None}).close()
    assert force(folder, "fox", "owl") == set()


def test_a_force_with_jobs_left_is_told_to_runs_without_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("fox", "owl"):
        make(folder, name)
    header = {"started_at": 4e9, "jobs": 2, "forced_from": (folder / "manifest.jsonl").stat().st_size}
    Journal(folder / "journal.jsonl", header=header).close()
    jobs = [make_job("fox"), make_job("owl")]
    assert Claims(output_dir=folder, job_file=NIGHT).done(jobs) == {"fox", "owl"}
    assert "had --force and 2 left: give --force" in caplog.text
    caplog.clear()
    Journal(folder / "journal.jsonl", header={"started_at": 5e9, "jobs": 0, "forced_from": None}).close()
    Claims(output_dir=folder, job_file=NIGHT).done(jobs)
    assert not caplog.text


# Default folders ------------------------------------------------------------------------------


def run_of(folder: Path, source: Path | None) -> None:
    """What a run that has only begun leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    header = journal_header(
        [], RunStart(num_ranks=1, started_at=0), policy="srtf", job_file=job_file_name(source, folder)
    )
    Journal(folder / "journal.jsonl", header=header).close()


def job_files(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "A" / "jobs.jsonl", tmp_path / "B" / "jobs.jsonl"
    for path in paths:
        path.parent.mkdir()
        path.write_text("")
    return paths


def test_job_files_of_the_same_name_have_folders_of_their_own_and_find_them_again(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    folders = {}
    for path in job_files(tmp_path):
        folders[path] = default_folder(outputs, "jobs", path)
        run_of(folders[path], path)
    first, second = folders.values()
    assert first == outputs / "jobs"
    assert second.parent == outputs
    assert second.name.startswith("jobs-")
    assert second != first
    assert {path: default_folder(outputs, "jobs", path) for path in folders} == folders
    (first / "journal.jsonl").unlink()  # the second one stays where its files are
    assert {path: default_folder(outputs, "jobs", path) for path in folders} == folders


def test_a_manifest_says_whose_a_folder_is_where_the_journal_is_gone(tmp_path: Path) -> None:
    one, other = job_files(tmp_path)
    folder = tmp_path / "outputs" / "jobs"
    folder.mkdir(parents=True)
    made(folder, job_file=job_file_name(one, folder))
    assert default_folder(folder.parent, "jobs", one) == folder
    assert default_folder(folder.parent, "jobs", other) != folder


def test_a_folder_of_earlier_gfgen_belongs_to_who_comes_first(tmp_path: Path) -> None:
    one, other = job_files(tmp_path)
    folder = tmp_path / "outputs" / "jobs"
    folder.mkdir(parents=True)
    made(folder, job_file=None)
    assert default_folder(folder.parent, "jobs", other) == folder
    run_of(folder, other)
    assert default_folder(folder.parent, "jobs", one) != folder


def test_a_watched_folder_a_job_file_and_standard_input_of_one_name_are_apart(tmp_path: Path) -> None:
    outputs, watched, file = tmp_path / "outputs", tmp_path / "stdin", tmp_path / "stdin.jsonl"
    watched.mkdir()
    file.write_text("")
    sources = (watched, file, None)
    folders = []
    for source in sources:
        folders.append(default_folder(outputs, "stdin", source))
        run_of(folders[-1], source)
    assert len(set(folders)) == 3
    assert [default_folder(outputs, "stdin", source) for source in sources] == folders
    (outputs / "stdin" / "journal.jsonl").unlink()
    made(outputs / "stdin", job_file=job_file_name(watched / "a.jsonl", outputs / "stdin"))
    assert default_folder(outputs, "stdin", watched) == outputs / "stdin"


def test_a_folder_that_is_moved_with_its_job_file_is_known_still(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    one, other = job_files(tmp_path / "here")
    for path in (one, other):
        run_of(default_folder(tmp_path / "here" / "outputs", "jobs", path), path)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = tmp_path / "there" / "B" / "jobs.jsonl"
    folder = default_folder(tmp_path / "there" / "outputs", "jobs", moved)
    assert (folder / "journal.jsonl").exists()


def test_a_pipe_is_like_standard_input_whatever_its_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "63")
    assert job_file_name(tmp_path / "63", tmp_path) == job_file_name(None, tmp_path) == "-"


def test_a_job_with_several_pictures_replaces_its_own_alone(folder: Path) -> None:
    job = make_job("fox", line=3)
    known = job.trajectory.artifacts
    frames = next(each for each in known if each.name == "frames")
    artifacts = tuple(replace(each, fields=()) if each is frames else each for each in known)
    job = replace(job, trajectory=replace(job.trajectory, artifacts=artifacts))
    names = [numbered_name(job.info.file, number) for number in (1, 2, 3)]
    for name in names:
        (folder / name).write_bytes(b"fox")
    content = content_of(folder / names[0])
    info = replace(job.info, job_file=NIGHT)
    files = tuple((name, content.size_bytes, content.sha256) for name in names[:2])
    note(folder, JobOutcome(info, "done", 0.0, 0.0, 1.0, None, 1.0, (), written=content, files=files))
    found = claim(folder, job)
    assert isinstance(found, AdmittedJob)
    assert found.replaces_numbered == dict.fromkeys(names[:2], content)
    found = claim(folder, job, job_file=DAY)
    assert isinstance(found, AdmittedJob)
    assert found.replaces_numbered == {}


def named(job_id: str, file: str) -> AdmittedJob:
    job = make_job(job_id, line=3)
    return replace(job, info=replace(job.info, file=file))


def test_two_jobs_never_write_one_file_and_a_finished_one_keeps_it(folder: Path) -> None:
    jobs = [named("a", "2026-11-24.mp4"), named("b", "2026-11-24.MP4")]
    for done, kept in (((), "a"), (("b",), "b")):
        claimed, (problem,) = claim_files(jobs, output_dir=folder, job_file=NIGHT, done=done)
        assert [job.job_id for job in claimed] == [kept]
        assert "already writes this file" in problem.accepted


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("x.mp4/y.mp4", "x.mp4 is the file of job x"),
        ("manifest.jsonl/y.mp4", "manifest.jsonl is a file"),
        ("note/below/y.mp4", "note is a file"),
        ("away/y.mp4", "away is a link out of the output folder"),
    ],
)
def test_a_folder_in_a_name_is_a_folder_inside_the_output_folder(
    folder: Path, tmp_path: Path, file: str, expected: str
) -> None:
    (folder / "note").write_text("mine")
    (folder / "inside").mkdir()
    (folder / "away").symlink_to(tmp_path)
    jobs = [named("x", "x.mp4"), named("y", file), named("z", "inside/z.mp4")]
    claimed, (problem,) = claim_files(jobs, output_dir=folder, job_file=NIGHT, overwrite=True)
    assert [job.job_id for job in claimed] == ["x", "z"]
    assert expected in problem.accepted


def job_of_frames(number: int = 3) -> AdmittedJob:
    job = make_job("fox", line=3)
    spec = replace(job.spec, frames=number)
    return replace(job, info=replace(job.info, spec=spec, file="fox/{frame}.png", job_file=NIGHT))


def made_frames(folder: Path, number: int = 3, **fields: Any) -> dict[str, Content]:
    """The frames that a job has made, with their line in the manifest."""
    (folder / "fox").mkdir()
    names = [f"{idx + 1:04}.png" for idx in range(number)]
    for name in names:
        (folder / "fox" / name).write_bytes(name.encode())
    found = {name: content_of(folder / "fox" / name) for name in names}
    files = tuple((name, each.size_bytes, each.sha256) for name, each in found.items())
    info = replace(job_of_frames().info, **fields)
    done = JobOutcome(info, "done", 0.0, 0.0, 1.0, None, 1.0, (), written=found[names[0]], files=files)
    note(folder, done)
    return found


def test_frames_of_a_job_replace_those_that_it_made_before_also_more_and_with_gaps(folder: Path) -> None:
    content = made_frames(folder, 5)
    (folder / "fox" / "0002.png").unlink()
    found = claim(folder, job_of_frames(3))
    assert isinstance(found, AdmittedJob), str(found)
    assert found.replaces_numbered == {name: each for name, each in content.items() if name != "0002.png"}


@pytest.mark.parametrize(
    ("fields", "content", "message"),
    [
        ({}, b"painted over", "has changed since job fox of"),
        ({"job_file": DAY}, b"0002.png", "is there already: job fox of"),
        ({"asked": make_job("owl").spec, "spec": make_job("owl").spec}, b"0002.png", "job owl made it"),
    ],
)
def test_a_frame_that_is_not_the_jobs_own_is_a_problem_before_the_run(
    folder: Path, fields: dict[str, Any], content: bytes, message: str
) -> None:
    made_frames(folder, **fields)
    (folder / "fox" / "0002.png").write_bytes(content)
    text = reason(claim(folder, job_of_frames()))
    assert message in text
    assert text.startswith(f"line 3: {folder}/fox/000")
    found = claim(folder, job_of_frames(), overwrite=True)
    assert isinstance(found, AdmittedJob)
    assert len(found.replaces_numbered) == 3


def test_a_frame_without_a_line_in_the_manifest_is_kept(folder: Path) -> None:
    (folder / "fox").mkdir()
    (folder / "fox" / "0002.png").write_bytes(b"mine")
    assert f"{folder}/fox/0002.png: is there already, and manifest.jsonl" in reason(
        claim(folder, job_of_frames())
    )
    assert isinstance(claim(folder, job_of_frames(1)), AdmittedJob)


@pytest.mark.parametrize("kind", ["a file, not a folder", "a link out of the output folder"])
def test_a_folder_that_frames_cannot_have_is_shown_as_it_is_called(folder: Path, kind: str) -> None:
    (folder / "fox").symlink_to("/tmp") if "link" in kind else (folder / "fox").write_bytes(b"mine")
    assert reason(claim(folder, job_of_frames())).startswith(f"line 3: {folder}/fox: fox is {kind}; ")


def test_a_folder_that_this_user_may_not_write_is_a_problem_before_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "theirs/mine").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "theirs")
    jobs = [named("x", "theirs/x.mp4"), named("y", "theirs/new/y.mp4"), named("z", "theirs/mine/z.mp4")]
    claimed, problems = claim_files(jobs, output_dir=folder, job_file=NIGHT)
    assert [job.job_id for job in claimed] == ["z"]
    assert all("you may not write into theirs (its owner can" in each.accepted for each in problems)


def test_a_name_that_the_file_system_refuses_is_a_problem_before_the_run(tmp_path: Path) -> None:
    folder = tmp_path
    while len(str(folder)) < 3_850:  # a path of Linux has 4,095 bytes at most
        folder /= "x" * 120
    jobs = [named("x", f"{'x' * 196}.mp4"), named("y", "y.mp4")]
    (claimed,), (problem,) = claim_files(jobs, output_dir=folder, job_file=NIGHT)
    assert claimed.job_id == "y"
    assert "cannot have such a name (File name too long)" in problem.accepted


def test_a_frame_that_a_job_reads_is_never_replaced(folder: Path) -> None:
    made_frames(folder)
    image = str(folder / "fox" / "0003.png")
    job = job_of_frames()
    job = replace(job, info=replace(job.info, spec=replace(job.spec, image=image)))
    assert "0003.png: is the image of job fox, too" in reason(claim(folder, job))


def test_frames_that_are_there_are_done_and_one_that_is_gone_makes_them_again(folder: Path) -> None:
    made_frames(folder)
    job = job_of_frames()
    claims = Claims(output_dir=folder, job_file=NIGHT)
    assert claims.done([job]) == {"fox"}
    (folder / "fox" / "0003.png").unlink()
    claims = Claims(output_dir=folder, job_file=NIGHT)
    assert claims.claim([job])[1] == []
    assert claims.status(job) == ("again", "its file is gone")


# Names --------------------------------------------------------------------------------------------


def test_a_job_that_arrives_later_has_the_date_of_its_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    job = make_job("fox", arrival_s=86_400.0)
    job = replace(job, info=replace(job.info, file="{date}.png"))
    (named,) = with_names([job], output_dir=tmp_path, named_at=86_400.0)
    assert named.info.file == "1970-01-03.png"


def test_a_job_whose_number_is_taken_gets_the_next_one_and_a_finished_one_keeps_its_own(
    tmp_path: Path,
) -> None:
    def numbered(job_id: str) -> AdmittedJob:
        job = make_job(job_id, output="pic-{index}.png", place=1)
        return replace(job, info=replace(job.info, file="pic-1.png"))

    def files(*job_ids: str) -> list[str]:
        return [job.info.file for job in with_names(list(map(numbered, job_ids)), output_dir=tmp_path)]

    assert files("a", "b", "c") == ["pic-1.png", "pic-2.png", "pic-3.png"]
    note(tmp_path, JobOutcome(replace(numbered("b").info, file="pic-1.png"), "done", written=Content(1)))
    assert files("a", "b") == ["pic-2.png", "pic-1.png"]
    other = replace(numbered("b").info, file="old.png", spec_hash="another")
    note(tmp_path, JobOutcome(other, "done", written=Content(1)))
    assert files("a", "b") == ["pic-1.png", "pic-2.png"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [("failed", "it failed"), ("cancelled", "it was cancelled"), ("done", "its file is gone")],
)
def test_a_job_that_is_made_again_has_a_reason(folder: Path, status: Any, reason: str) -> None:
    job = make_job("fox")
    written = Content(1) if status == "done" else None
    note(folder, JobOutcome(job.info, status, written=written, error="boom"))
    claims = Claims(output_dir=folder, job_file=NIGHT)
    assert claims.status(job) == ("again", reason)
    assert claims.status(make_job("new")) == ("new", "")


def test_a_run_overwrites_no_file_unless_it_is_told_to(folder: Path) -> None:
    (folder / "fox.png").write_bytes(b"mine")
    kept, problems = Claims(output_dir=folder, job_file=NIGHT).claim([make_job("fox")])
    assert (list(kept), len(problems)) == ([], 1)
    kept, problems = Claims(output_dir=folder, job_file=NIGHT, overwrite=True).claim([make_job("fox")])
    assert ([job.job_id for job in kept], list(problems)) == (["fox"], [])
