"""A session: its folder, its admission and its ranks."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gfgen.cli import run
from gfgen.errors import InputError, JobFileError, Problem
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.weights import Placement
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.devices import CUDA, Devices, Gpu, choose_devices
from gfgen.runtime.core.events import Clock
from gfgen.runtime.predict.cost import CostModel
from gfgen.session import admission, memory, session
from gfgen.session.ranks import Ranks
from gfgen.session.session import Arrivals, Session, SessionOptions


def options_in(folder: Path) -> SessionOptions:
    return SessionOptions(
        output_dir=folder, ranks=Ranks(choose_devices("cpu", 1)), policy=load_policy("fcfs")
    )


def test_admission_names_every_problem_and_line(tmp_path: Path) -> None:
    with Session(options_in(tmp_path / "out")) as session, pytest.raises(JobFileError) as error:
        session.admit([{"prompt": "a fox", "stpes": 4}, {"frames": 3}])
    assert "entry 1: stpes: not a field; did you mean steps?" in str(error.value)
    assert "entry 2: prompt" in str(error.value)


def test_jobs_of_python_and_watched_files_may_ask_about_calls_and_those_of_requests_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[bool] = []

    def try_calls(jobs: Any, *, trusts_code: bool, may_ask: bool) -> Any:
        ways.append(may_ask)
        return jobs[1:], [Problem(1, None, None, "no")] if may_ask else []

    monkeypatch.setattr(admission, "try_calls", try_calls)
    with Session(options_in(tmp_path / "out")) as session:
        with pytest.raises(JobFileError, match="line 1: no"):
            session.admit([{"prompt": "a fox", "frames": 1}])
        (tmp_path / "in").mkdir()
        (tmp_path / "in/a.jsonl").write_text('{"prompt": "a fox", "frames": 1}\n')
        os.utime(tmp_path / "in/a.jsonl", (0, 0))
        named = {"output_dir": tmp_path / "out", "trace": None, "named_at": None}
        options = mock.Mock(**named, skip_invalid=False, overwrite=False)
        monkeypatch.setattr(Session, "load", mock.Mock(side_effect=StopIteration))
        with pytest.raises(StopIteration):
            run.watch_folder(session, tmp_path / "in", options)
        assert "line 1: no" in (tmp_path / "in/a.jsonl.errors.txt").read_text()
        session.admission([JobSpec(id="fox", prompt="a fox", frames=1)])
    assert ways == [True, True, False]


def test_a_session_that_made_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with Session(options_in(tmp_path / "out")):
        pass
    assert not (tmp_path / "out").exists()


def on_gpu(folder: Path, *, gpu_gb: int) -> SessionOptions:
    devices = Devices(CUDA, 1, (Gpu("a GPU", gpu_gb * 10**9),))
    ranks = Ranks(devices, has_random_weights=True)
    return replace(options_in(folder), ranks=ranks)


def test_nothing_is_loaded_if_main_memory_lacks_room_for_what_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**10)
    with (
        Session(on_gpu(tmp_path / "out", gpu_gb=48)) as found,
        pytest.raises(
            InputError, match=r"qwen-image: \d+\.\d GB of main memory needed for weights that GPUs"
        ),
    ):
        found.load([], models=["qwen-image"])


@pytest.mark.parametrize(("gpu_gb", "names"), [(80, ("qwen-image",)), (141, ())])
def test_ranks_are_told_where_copies_for_loras_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_gb: int, names: tuple[str, ...]
) -> None:
    told: list[tuple[str, ...]] = []

    def ready(*_: object, patch_copies_on_host: Sequence[Path], **__: object) -> object:
        told.append(tuple(path.name for path in patch_copies_on_host))
        return contextlib.nullcontext()

    monkeypatch.setattr(session, "ready_pool", ready)
    monkeypatch.setattr(Session, "warm_up", lambda self, jobs, are_all_needed: None)
    with Session(on_gpu(tmp_path / "out", gpu_gb=gpu_gb)) as found:
        found.load([], models=["qwen-image"])
    assert told == [names]


def test_an_error_inside_a_session_reaches_what_it_holds(tmp_path: Path) -> None:
    """Ranks end at once then, without waiting for their steps."""
    seen: list[type[BaseException] | None] = []

    class Held:
        def __enter__(self) -> None: ...

        def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
            seen.append(kind)

    def interrupted() -> None:
        with Session(options_in(tmp_path / "out")) as session:
            session._stack.enter_context(Held())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == [KeyboardInterrupt]


def test_a_session_replaces_no_file_of_an_earlier_one_with_another_job(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "cover.png").write_bytes(b"picture")
    line = {"id": "cover", "status": "done", "file": "cover.png", "spec_hash": "0" * 64, "size_bytes": 7}
    line |= {"job_file": options_in(folder).job_file, "sha256": hashlib.sha256(b"picture").hexdigest()}
    (folder / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    with Session(options_in(folder)) as session, pytest.raises(JobFileError, match=r"cover\.png"):
        session.admit([{"id": "cover", "prompt": "a fox", "frames": 1}])


def test_a_server_leaves_room_for_a_usual_job_of_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs come later, and what streams is decided before."""
    told: list[int] = []

    def ready(*_: object, placements: Mapping[str, Placement], **__: object) -> object:
        told.append(sum(each.saved_bytes for each in placements.values()))
        return contextlib.nullcontext()

    monkeypatch.setattr(memory, "available_bytes", lambda: 10**11)
    monkeypatch.setattr(session, "ready_pool", ready)
    monkeypatch.setattr(Session, "warm_up", lambda self, jobs, are_all_needed: None)
    with Session(on_gpu(tmp_path / "out", gpu_gb=48)) as found:
        found.load([], models=["wan2.2-ti2v-5b"])
    assert told[0] > 5 * 10**9, "weights take 24 GB, and the decode of 1280x704x121 more than another 24"


def test_steps_are_read_at_the_rate_that_ranks_measured_and_later_runs_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**11)
    monkeypatch.setattr(Session, "warm_up", lambda self, jobs, are_all_needed: None)
    ranks = [mock.Mock(read_bytes_per_s=rate) for rate in (12.5e9, 0.0, 12.5e9, 40e9)]
    pool = mock.Mock(living=ranks, islands=[(0, 1, 2, 3)])
    pool.models.checkpoints = ()
    monkeypatch.setattr(session, "ready_pool", lambda *_, **__: contextlib.nullcontext(pool))

    def read_s(found: Session) -> float:
        found.load([], models=["qwen-image"])
        return found._start([], found.options, Clock(), Arrivals()).reads_s["qwen-image"]

    with Session(on_gpu(tmp_path / "out", gpu_gb=24)) as found:
        measured_s = read_s(found)
        assert measured_s == pytest.approx(4 * 0.6, rel=0.2), "50 GB/s are assumed where nothing is known"
        found._keep_measured(found.options.ranks, CostModel())
    ranks.clear()
    with Session(on_gpu(tmp_path / "out", gpu_gb=24)) as found:
        assert read_s(found) == measured_s


@pytest.mark.parametrize(
    ("fields", "models", "num_kept"),
    [({}, (), 0), ({"priority": 1}, (), 2), ({}, ("qwen-image", "wan2.2-ti2v-5b"), 2)],
    ids=["one turn each", "turns", "a server"],
)
def test_models_stay_in_main_memory_where_they_may_come_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    models: Sequence[str],
    num_kept: int,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**12)
    monkeypatch.setattr(Session, "warm_up", lambda self, jobs, are_all_needed: None)
    told: list[Mapping[Path, int]] = []

    def ready_pool(*_: Any, kept: Mapping[Path, int], **__: Any) -> Any:
        told.append(kept)
        return contextlib.nullcontext(mock.Mock(living=[], islands=[(0,)]))

    monkeypatch.setattr(session, "ready_pool", ready_pool)
    with Session(on_gpu(tmp_path / "out", gpu_gb=80)) as found:
        lines = [
            {"id": "a", "prompt": "a fox", "model": "qwen-image", "width": 832, "height": 480},
            {"id": "b", "prompt": "a fox", "model": "wan2.2-ti2v-5b", "width": 832, "height": 480} | fields,
        ]
        found.load(found.admit(lines), models=models)
        assert found.residency is not None
        assert found.residency.is_needed
        assert len(told[0]) == num_kept
        assert found.residency.kept == told[0]
