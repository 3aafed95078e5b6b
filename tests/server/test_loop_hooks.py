"""The backend that times the loop passes on all that a backend is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gfgen.runtime.control.control import Backend
from gfgen.server.bridge.loop_hooks import LoopTimer

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "wait": ((1.0,), {}),
    "submit": (("a dispatch",), {}),
    "stop": (("a dispatch",), {}),
    "release": (("a job",), {}),
    "add": (((),), {}),
    "load": ((("wan",),), {"load_s": 2.0}),
    "save": (("a job",), {"next_index": 2, "producer": 3}),
    "memory_use": ((), {}),
}


@pytest.mark.parametrize("name", sorted(n for n in vars(Backend) if not n.startswith("_")))
def test_every_call_reaches_the_backend(name: str):
    arguments, options = CALLS[name]
    asked: list[object] = []

    def answer(*given: Any, **options: Any) -> tuple[()]:
        asked.append((given, options))
        return ()

    backend: Any = SimpleNamespace(**{name: answer})
    getattr(LoopTimer(backend), name)(*arguments, **options)
    assert asked == [(arguments, options)]
