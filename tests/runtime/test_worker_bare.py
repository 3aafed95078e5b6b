"""A bare loop as one rank sees it, without the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.bare import RunBare
from benchmarks.worker_bare import BareLoop
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout

ONE, BOTH = Layout.single(0), Layout((0, 1), ulysses=2)


def trail(rank: int) -> list[str]:
    """What a rank does for two jobs of one step on both ranks, with a decode on the first of them."""
    done: list[str] = []

    class Fake:
        """An adapter and an endpoint."""

        def __getattr__(self, name: str) -> Any:
            def call(*_: object, **__: object) -> Any:
                done.append(name)
                return ("condition", "latents") if name == "prepare" else name

            return call

        def group(self, descriptor: Any) -> Any:
            def enter() -> None:
                done.append(f"meet {descriptor.dispatch}")

            return SimpleNamespace(enter=enter, subgroup=lambda kind: None)

    message = RunBare(10, JobSpec(id="bare", prompt="a fox"), "", (ONE, ONE, BOTH, ONE), (1, 1), 2)
    BareLoop(message, Fake(), rank, Fake(), wait=lambda: done.append("wait")).run()  # type: ignore[arg-type]
    return done


@pytest.mark.parametrize("rank", [0, 1])
def test_each_job_of_a_bare_loop_begins_when_all_of_its_ranks_have_come(rank: int) -> None:
    done = trail(rank)
    begins = [done[at - 2 : at] for at, name in enumerate(done) if name == "encode"]
    assert begins == [["meet 10", "wait"], ["meet 14", "wait"]]


def test_a_rank_decodes_what_is_its_own_and_no_more() -> None:
    assert [trail(rank).count("decode") for rank in (0, 1)] == [2, 0]
