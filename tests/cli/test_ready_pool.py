"""What is said while ranks start, by workers that are not there."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from gfgen.gfc.cuda import compiler
from gfgen.runtime.core.devices import Devices, Gpu
from gfgen.session import ranks
from gfgen.session.ranks import Ranks, ready_pool
from gfgen.system.signals import SignalPipe


@pytest.fixture(autouse=True)
def nothing_is_awaited(monkeypatch):
    monkeypatch.setattr("gfgen.runtime.processes.starting.wait_ready", lambda pool, signals: None)
    monkeypatch.setattr(ranks, "compile_ahead", lambda *_: contextlib.nullcontext())


def test_workers_are_told_how_many_gpus_they_share_and_what_each_may_use(monkeypatch):
    told = []

    def note(settings, checkpoints, **options):
        told.append(settings)
        return contextlib.nullcontext(SimpleNamespace(living=[]))

    monkeypatch.setattr("gfgen.runtime.processes.pool.WorkerPool", note)
    monkeypatch.setattr(compiler, "kept", list)
    shared = Devices("cuda", 4, (Gpu("NVIDIA H200", 100),) * 2, ranks_per_gpu=2)
    with contextlib.closing(SignalPipe()) as signals, ready_pool([Path("model")], Ranks(shared), signals):
        pass
    (settings,) = told
    assert (settings.num_ranks, settings.num_gpus, settings.memory_limit) == (4, 2, 50)


@pytest.mark.parametrize(
    ("kind", "is_first", "is_told"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_the_first_start_on_gpus_says_that_it_compiles(caplog, monkeypatch, kind, is_first, is_told):
    monkeypatch.setattr(
        "gfgen.runtime.processes.pool.WorkerPool",
        lambda *_, **options: contextlib.nullcontext(SimpleNamespace(living=[])),
    )
    monkeypatch.setattr(compiler, "kept", lambda: [] if is_first else [Path("kernels.cubin")])
    caplog.set_level("INFO", "gfgen")
    with (
        contextlib.closing(SignalPipe()) as signals,
        ready_pool([Path("model")], Ranks(Devices(kind, 2)), signals),
    ):
        assert ("compiling kernels first" in caplog.text) is is_told
    assert "starting 2 ranks" in caplog.text
