"""Which kernels the general pipelines of a run get: by option, work at hand, and what jobs began with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_job

from gfgen.models.fast.kernels import KernelChoice
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CPU, CUDA, Devices, Gpu
from gfgen.runtime.files.resume import resume_path
from gfgen.runtime.predict.cost import CostModel
from gfgen.session import warming
from gfgen.session.ranks import Ranks

ON_GPU = Ranks(Devices(CUDA, 2, (Gpu("NVIDIA H200", 1), Gpu("NVIDIA H200", 1))))


def general(job_id: str) -> AdmittedJob:
    return replace(make_job(job_id, steps=10), has_nominal_flops=True)


def chosen(ranks: Ranks, jobs: list[AdmittedJob], folder: Path) -> KernelChoice:
    return warming.choose_kernels(ranks, jobs, profile=None, output_dir=folder)


@pytest.mark.parametrize(
    ("option", "on_gpu", "on_cpu"),
    [("auto", "fused", "own"), ("on", "compiled", "compiled"), ("off", "own", "own")],
)
def test_options(
    option: str, on_gpu: str, on_cpu: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_cpus = Ranks(Devices(CPU, 2), compile=option)
    assert chosen(replace(ON_GPU, compile=option), [general("a")], tmp_path) == on_gpu
    assert chosen(on_cpus, [general("a")], tmp_path) == on_cpu
    assert not caplog.text
    assert chosen(on_cpus, [make_job("own adapter")], tmp_path) == "own"
    assert ("--compile on has no effect" in caplog.text) == (option == "on")


def test_auto_compiles_when_known_steps_save_more_than_compiling_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "has_seen", lambda *_: True)
    monkeypatch.setattr(CostModel, "task_s", lambda *_: 2.0)
    saved_by_one_s = warming.SAVED * 10 * 2.0
    enough = int(2 * warming.COMPILING_S / saved_by_one_s)
    assert chosen(ON_GPU, [general(str(idx)) for idx in range(enough)], tmp_path) == "fused"
    assert chosen(ON_GPU, [general(str(idx)) for idx in range(enough + 1)], tmp_path) == "compiled"


def test_a_job_that_continues_keeps_its_kernels(tmp_path: Path) -> None:
    path = resume_path(tmp_path, "a")
    path.parent.mkdir()
    for found in ("compiled", "fused"):
        path.write_bytes(json.dumps({"job_id": "a", "computed_with": {"kernels": found}}).encode() + b"\n...")
        assert chosen(replace(ON_GPU, compile="on"), [general("b"), general("a")], tmp_path) == found
    path.write_bytes(b"damaged")
    assert chosen(ON_GPU, [general("a")], tmp_path) == "fused"
