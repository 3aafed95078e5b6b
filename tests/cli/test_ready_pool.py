"""What is said while ranks start, by workers that are not there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gfgen.cli import ranks
from gfgen.cli.ranks import Ranks, ready_pool
from gfgen.runtime.devices import Devices
from gfgen.runtime.signals import SignalPipe


@pytest.mark.parametrize(
    ("kind", "is_first", "is_told"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_the_first_start_on_gpus_says_that_it_compiles(caplog, monkeypatch, kind, is_first, is_told):
    class NoPool:
        def wait_ready(self, signals):
            """Nothing is awaited."""

    monkeypatch.setattr(ranks, "WorkerPool", lambda **options: contextlib.nullcontext(NoPool()))
    monkeypatch.setattr(ranks.compiler, "kept", lambda: [] if is_first else [Path("kernels.cubin")])
    caplog.set_level("INFO", "gfgen")
    with (
        contextlib.closing(SignalPipe()) as signals,
        ready_pool([Path("model")], Ranks(Devices(kind, 2)), signals),
    ):
        assert ("compiling kernels first" in caplog.text) is is_told
    assert "starting 2 ranks" in caplog.text
