import hashlib
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from builders import make_job
from slabs import publish

from gfgen.models.geometry.weight_files import weights_mark
from gfgen.runtime.control.state import State
from gfgen.runtime.core.dispatch import GivenUp
from gfgen.runtime.core.events import Clock
from gfgen.runtime.files import resume
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.processes.workers import JobMemory

JOB = make_job("a")
ON_CPU = {"device": "cpu", "vae_dtype": "auto", "has_random_weights": False}


def find(folder, job=JOB, **others):
    return resume.find(folder, [job], weights_mark=weights_mark, computed_with=ON_CPU | others)


@pytest.fixture
def folder(tmp_path):
    """An output folder in which job a was stopped."""
    stop(tmp_path)
    return tmp_path


def stop(folder, job=JOB):
    """Before task 3, whose input dispatch 7 made."""
    plan = SlabPlan.of(job.trajectory)
    fd = Slab.create(plan, name="a")
    publish(Slab(fd, plan), "latents", 3, "meta", [memoryview(b"latents")], producer=7)
    point = resume.ResumePoint(3, 7, 9, resume.resume_path(folder, "a"), GivenUp((2, 4), "late"))
    weights = weights_mark(job.checkpoint)
    resume.save(point, job, fd, weights=weights, computed_with=ON_CPU)
    os.close(fd)


def rewrite(folder, **changes):
    path = resume.resume_path(folder, "a")
    line, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(line) | changes).encode() + b"\n" + rest)


def test_a_stopped_job_is_found_and_its_slab_is_whole(folder):
    point = find(folder)["a"]
    assert (point.next_index, point.producer, point.last_number) == (3, 7, 9)
    assert point.given_up == GivenUp((2, 4), "late")
    fd = resume.restore(point, JOB)
    slab = Slab(fd, SlabPlan.of(JOB.trajectory))
    os.close(fd)
    meta, memory, offset = slab.fetch("latents", 3)
    assert (slab.producer("latents", 3), meta) == (7, "meta")
    assert bytes(memory[offset : offset + 7]) == b"latents"


@pytest.mark.parametrize("num_bytes", [1, 31, 32, 33, 10_000])
def test_a_truncated_file_is_passed_over(folder, caplog, num_bytes):
    path = resume.resume_path(folder, "a")
    path.write_bytes(path.read_bytes()[:-num_bytes])
    assert find(folder) == {}
    assert f"{path} cannot be used (its checksum is wrong: it is damaged" in caplog.text
    assert "job a starts at the beginning" in caplog.text


def test_a_flipped_bit_anywhere_is_found(folder, caplog):
    path = resume.resume_path(folder, "a")
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 50):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert find(folder) == {}, at
    assert caplog.text.count("its checksum is wrong") >= 50
    path.write_bytes(whole)
    assert "a" in find(folder)


def test_bytes_after_the_end_are_found(folder):
    path = resume.resume_path(folder, "a")
    path.write_bytes(path.read_bytes() + b"\0")
    assert find(folder) == {}


@pytest.mark.parametrize(
    "changes", [{"producer": 8}, {"next_index": 4}, {"last_number": 7}, {"extents": []}], ids=str
)
def test_an_edited_header_is_passed_over(folder, caplog, changes):
    rewrite(folder, **changes)
    assert find(folder) == {}
    assert "its checksum is wrong" in caplog.text


def test_the_file_of_another_job_is_passed_over(folder, caplog):
    path = resume.resume_path(folder, "a")
    path.rename(resume.resume_path(folder, "b"))
    assert find(folder, make_job("b")) == {}
    assert "b.state cannot be used (it is of job a): job b starts at the beginning" in caplog.text


def test_a_file_of_a_version_without_checksums_is_passed_over_in_one_line(folder, caplog):
    path = resume.resume_path(folder, "a")
    path.write_bytes(path.read_bytes()[: -hashlib.sha256().digest_size])
    rewrite(folder, gfgen_resume=1)
    assert find(folder) == {}
    assert "an earlier version of gfgen wrote it" in caplog.text
    assert caplog.text.count("\n") == 1


def test_a_job_that_has_changed_begins_anew(folder):
    changed = replace(JOB, info=replace(JOB.info, spec_hash="another"))
    assert find(folder, changed) == {}


@pytest.mark.parametrize(
    "others", [{"device": "cuda"}, {"vae_dtype": "bfloat16"}, {"has_random_weights": True}], ids=str
)
def test_state_of_another_kind_of_worker_is_passed_over_and_kept(folder, caplog, others):
    with caplog.at_level("INFO", "gfgen"):
        assert find(folder, **others) == {}
    assert "job a starts at the beginning: it was stopped on another kind of device" in caplog.text
    assert "a" in find(folder)


def test_with_other_weights_a_job_begins_anew(tmp_path, caplog):
    weights = tmp_path / "model/transformer/diffusion_pytorch_model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"as they were")
    job = replace(JOB, checkpoint=tmp_path / "model")
    stop(tmp_path, job)
    assert "a" in find(tmp_path, job)
    weights.write_bytes(b"tuned since")
    with caplog.at_level("INFO", "gfgen"):
        assert find(tmp_path, job) == {}
    assert "job a starts at the beginning: its model's weights have changed" in caplog.text


def test_a_pool_says_what_state_depends_on(pool):
    assert pool.settings.computed_with == ON_CPU


def test_a_file_that_has_served_is_removed_with_its_folder(folder):
    resume.forget(folder, "a")
    assert os.listdir(folder) == []


def test_a_file_that_cannot_be_removed_is_told_and_left(folder, caplog, monkeypatch):
    def refuse(path, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(resume.Path, "unlink", refuse)
    resume.forget(folder, "a")
    assert "a.state cannot be removed: Permission denied" in caplog.text


def test_where_no_folder_can_be_there_is_nothing_to_remove(tmp_path, caplog):
    (tmp_path / resume.FOLDER).write_text("")
    resume.forget(tmp_path, "a")
    resume.forget_others(tmp_path, [])
    assert caplog.text == ""


def test_what_a_run_that_was_killed_had_not_kept_whole_is_removed(folder):
    path = resume.resume_path(folder, "a")
    path.rename(path.with_suffix(".partial"))
    resume.forget_others(folder, ["a"])
    assert os.listdir(folder / resume.FOLDER) == []


def test_dispatch_numbers_go_on_above_all_that_the_slab_may_name(folder):
    points = find(folder)
    state = State([JOB], RunStart(num_ranks=1, resume=points), clock=Clock(virtual=True), costs=CostModel())
    assert state.flights.last_number == 9


def test_a_job_that_was_not_touched_stays_as_it_was_kept(folder):
    memory = JobMemory([JOB], folder, find(folder))
    before = resume.resume_path(folder, "a").stat()
    memory.save("a", SimpleNamespace(), next_index=3, producer=7, given_up=GivenUp())
    assert resume.resume_path(folder, "a").stat() == before


def test_what_was_kept_of_a_job_that_failed_stays_and_of_others_it_goes(folder):
    for is_kept in (True, False):
        memory = JobMemory([JOB], folder, find(folder))
        if is_kept:
            memory.save("a", SimpleNamespace(), next_index=3, producer=7, given_up=GivenUp())
        memory.release("a")
        assert ("a" in find(folder)) is is_kept


def test_a_file_that_has_gone_since_it_was_found_fails_its_job_each_time(folder):
    memory = JobMemory([JOB], folder, find(folder))
    resume.resume_path(folder, "a").unlink()
    fds = os.listdir("/proc/self/fd")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            memory.slab("a")
    assert len(os.listdir("/proc/self/fd")) == len(fds)
