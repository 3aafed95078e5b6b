"""`gfgen run` where files of others, and of other job files, already have the names that it would write."""

import json
import os

import pytest
from PIL import Image

from gfgen.cli import run as run_module
from gfgen.cli.main import main
from gfgen.runtime.core.metrics import Summary

FOX = {"id": "fox", "prompt": "a red fox", "model": "tiny-qwen-image", "size": "64x64", "steps": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_models):
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def admitted(monkeypatch):
    """The jobs, and the output folder, of each run that passes admission: nothing is started."""
    runs = []

    def run_jobs(session, jobs, options, claims):
        runs.append(({job.job_id: job.replaces for job in jobs}, options.output_dir))
        return Summary()

    monkeypatch.setattr(run_module, "run_jobs", run_jobs)
    return runs


def put(path, *jobs):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    return path


def gfgen(capsys, *arguments):
    """(exit code, standard error)"""
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", *map(str, arguments)])
    return end.value.code, capsys.readouterr().err


def test_a_job_does_not_replace_its_own_image(capsys, folder, admitted):
    Image.new("RGB", (64, 64)).save("star.png")
    before = (folder / "star.png").read_bytes()
    wan = FOX | {"id": "star", "model": "tiny-wan", "image": "star.png", "frames": 1}
    put(folder / "jobs.jsonl", wan)
    for option in ((), ("--overwrite",)):
        code, err = gfgen(capsys, "jobs.jsonl", "-o", ".", *option)
        assert (code, admitted) == (2, [])
        assert "line 1: star.png: is the image of job star, too; name another output" in err
    assert (folder / "star.png").read_bytes() == before
    assert sorted(os.listdir()) == ["jobs.jsonl", "star.png"]


def test_files_in_the_way_are_told_with_all_other_mistakes_and_may_be_skipped_or_replaced(
    capsys, folder, admitted
):
    put(folder / "jobs.jsonl", FOX, {"promt": ""}, FOX | {"id": "owl"}, FOX | {"id": "hen"})
    for name in ("fox.png", "owl.png"):
        (folder / name).write_bytes(b"mine")
    code, err = gfgen(capsys, "jobs.jsonl", "-o", ".")
    assert (code, admitted) == (2, [])
    assert "jobs.jsonl: 3 problems; nothing was started" in err
    assert [line.split(": ")[:2] for line in err.splitlines() if "--overwrite" in line] == [
        ["  line 1", "fox.png"],
        ["  line 3", "owl.png"],
    ]
    code, err = gfgen(capsys, "jobs.jsonl", "-o", ".", "--skip-invalid")
    assert (code, list(admitted.pop()[0])) == (1, ["hen"])
    put(folder / "jobs.jsonl", FOX, FOX | {"id": "hen"})
    code, err = gfgen(capsys, "jobs.jsonl", "-o", ".", "--overwrite")
    assert code == 0, err
    assert {job_id: found is not None for job_id, found in admitted.pop()[0].items()} == {
        "fox": True,
        "hen": False,
    }


def test_nothing_is_appended_to_a_manifest_of_someone_else(capsys, folder, admitted):
    jobs, mine = put(folder / "jobs.jsonl", FOX), put(folder / "manifest.jsonl", {"audio": "a.wav"})
    code, err = gfgen(capsys, jobs, "-o", ".")
    assert (code, admitted) == (2, [])
    assert "manifest.jsonl: was not written by gfgen; name another --output" in err
    assert json.loads(mine.read_text()) == {"audio": "a.wav"}


def test_job_files_of_one_name_write_to_folders_of_their_own(capsys, folder, admitted):
    one, other = put(folder / "A" / "jobs.jsonl", FOX), put(folder / "B" / "jobs.jsonl", FOX)
    line = {"version": 1, "id": "fox", "job_file": "../../A/jobs.jsonl", "status": "done", "file": "fox.png"}
    put_manifest(folder / "outputs" / "jobs", line)
    for path in (one, other, one.relative_to(folder)):
        gfgen(capsys, path)
    first, second, third = [output for _, output in admitted]
    assert (str(first), first) == ("outputs/jobs", third)
    assert second.name.startswith("jobs-")


def put_manifest(folder, line):
    folder.mkdir(parents=True)
    put(folder / "manifest.jsonl", line)


def test_a_folder_that_was_made_for_a_refused_run_is_removed_again(capsys, folder):
    put(folder / "jobs.jsonl", {"promt": ""})
    (folder / "kept").mkdir()
    for output in ("kept", "new", "new/and/deep"):
        assert gfgen(capsys, "jobs.jsonl", "-o", output)[0] == 2
    assert gfgen(capsys, "jobs.jsonl")[0] == 2
    assert sorted(os.listdir()) == ["jobs.jsonl", "kept"]
