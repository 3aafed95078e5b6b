"""Trouble around a run: memory that runs out in a task, disks that are full."""

import errno
import os
import subprocess

import pytest
from builders import make_job, simulated_control
from journal_reader import read_journal
from test_elastic import following
from test_workers import PICTURE, run

from gfgen.errors import OutputError
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.events import TaskFailed
from gfgen.runtime.files.journal import Journal
from gfgen.runtime.files.manifest import ManifestWriter, read_manifest
from gfgen.runtime.ipc.slab import Slab
from gfgen.runtime.processes.writes import Writes


def failures(recorder):
    return [event for event in recorder.events if isinstance(event, TaskFailed) and not event.void]


def test_a_task_that_runs_out_of_memory_once_is_tried_again(faulty_pool, tmp_path):
    short = JobSpec(id="a", prompt="a fox | short rank=0 step=1 times=1", **PICTURE)
    recorder = run(faulty_pool, tmp_path, short, policy=following((0,)))
    assert [outcome.status for outcome in recorder.outcomes] == ["done"]
    (failure,) = failures(recorder)
    assert "out of memory; fewer --ranks or a smaller size may help: RuntimeError" in failure.reason


def test_a_task_that_never_fits_fails_its_job_and_its_worker_goes_on(faulty_pool, tmp_path):
    processes = [worker.process.pid for worker in faulty_pool.workers]
    short = JobSpec(id="short", prompt="a fox | short rank=0 step=1 times=9", **PICTURE)
    good = JobSpec(id="good", prompt="a boat", **PICTURE)
    recorder = run(faulty_pool, tmp_path, short, good, policy=following((0,)))
    statuses = {outcome.info.job_id: outcome.status for outcome in recorder.outcomes}
    assert statuses == {"short": "failed", "good": "done"}
    assert len(failures(recorder)) == 2
    assert [worker.process.pid for worker in faulty_pool.workers] == processes


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "gfgen-test", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_an_output_that_does_not_fit_the_disk_fails_alone(pool, small_disk):
    large = JobSpec(id="large", prompt="a boat", **PICTURE | {"width": 512, "height": 512, "steps": 2})
    small = JobSpec(id="small", prompt="a fox", **PICTURE)
    recorder = run(pool, small_disk, large, small, policy="fcfs")
    outcomes = {outcome.info.job_id: outcome for outcome in recorder.outcomes}
    assert (outcomes["large"].status, outcomes["small"].status) == ("failed", "done")
    assert "No space left on device" in (outcomes["large"].error or "")
    assert "make room, or choose another --output" in (outcomes["large"].error or "")
    assert [path.name for path in small_disk.rglob("*") if path.is_file()] == ["small.png"], "nor its state"


def fill_disk(monkeypatch, *, after, fd_of):
    """From the given write on, the disk is full for one file; half of that write still fits."""
    writes, write = [0], os.write

    def limited(fd, content):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(fd_of):
            writes[0] += 1
            if writes[0] == after:
                return write(fd, content[: len(content) // 2])
            if writes[0] > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content)

    monkeypatch.setattr(os, "write", limited)


def test_a_full_disk_under_the_journal_stops_the_run_and_leaves_whole_lines(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal.jsonl", header={"policy": "srtf"})
    control, recorder = simulated_control([make_job("a", steps=9)], journal=journal)
    fill_disk(monkeypatch, after=5, fd_of="journal.jsonl")
    with pytest.raises(OutputError, match=r"journal\.jsonl: No space left on device; make room, then run"):
        control.run()
    journal.close()
    _, *events = read_journal(tmp_path / "journal.jsonl")
    assert events == recorder.events[: len(events)]
    assert (tmp_path / "journal.jsonl").read_bytes().endswith(b"\n")


def test_a_full_disk_under_the_manifest_stops_the_run_and_leaves_whole_lines(tmp_path, monkeypatch):
    manifest = ManifestWriter(tmp_path / "manifest.jsonl")
    control, _ = simulated_control([make_job(name) for name in "abc"])
    control.observers = (*control.observers, manifest)
    fill_disk(monkeypatch, after=2, fd_of="manifest.jsonl")
    with pytest.raises(OutputError, match="make room, then run the same command again to go on"):
        control.run()
    manifest.close()
    assert len(read_manifest(tmp_path / "manifest.jsonl")) == 1
    assert (tmp_path / "manifest.jsonl").read_bytes().endswith(b"\n")


@pytest.mark.parametrize("what", ["slab", "frames"])
def test_a_job_for_which_no_file_can_be_opened_fails_alone(pool, tmp_path, monkeypatch, what):
    """Each task is tried twice."""
    refused, create, new_frames = [], Slab.create, Writes.new_frames

    def refuse(name):
        if name == f"poor-{what}" and len(refused) < 2:
            refused.append(name)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def create_slab(plan, *, name):
        refuse(name if what == "slab" else "")
        return create(plan, name=name)

    def create_frames(writes, job, number):
        refuse(job.job_id if what == "frames" else "")
        return new_frames(writes, job, number)

    monkeypatch.setattr(Slab, "create", staticmethod(create_slab))
    monkeypatch.setattr(Writes, "new_frames", create_frames)
    jobs = [JobSpec(id=f"{kind}-{what}", prompt="a fox", **PICTURE) for kind in ("poor", "rich")]
    recorder = run(pool, tmp_path, *jobs)
    outcomes = {outcome.info.job_id: outcome for outcome in recorder.outcomes}
    assert outcomes[f"rich-{what}"].status == "done"
    assert outcomes[f"poor-{what}"].status == "failed"
    assert (
        "its state has no place here: OSError: [Errno 24] Too many open files"
        in outcomes[f"poor-{what}"].error
    )
