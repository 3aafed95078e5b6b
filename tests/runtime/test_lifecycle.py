"""The phases of a process, and what happens to it on the way."""

from __future__ import annotations

import os
import re
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_warming import ITEMS, Rank, Silent, closed_ends, pool_of

from gfgen.models.geometry.weights import Placement
from gfgen.runtime.ipc.messages import ModelsSet, SetModels, WarmedUp, WorkerReady
from gfgen.runtime.processes.child import GONE, TRANSITIONS, Joined, Loaded, Lost, Phase
from gfgen.runtime.processes.starting import leave_behind

__all__ = ["closed_ends"]


def test_every_phase_has_its_row_and_every_life_can_end() -> None:
    assert set(TRANSITIONS) == set(Phase)
    for phase in set(Phase) - GONE:
        assert Phase.ENDED in TRANSITIONS[phase]
    assert all(not TRANSITIONS[phase] for phase in GONE)


def test_the_table_in_the_documentation_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\w, ]*) \| [^|]* \|$", text, flags=re.MULTILINE)
    found = {row[0]: set(row[1].split(", ")) for row in rows if row[0] in list(Phase)}
    expected = {
        phase.value: {after.value for after in TRANSITIONS[phase]} for phase in Phase if TRANSITIONS[phase]
    }
    assert found == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [(Phase.STARTING, Phase.PREPARING), (Phase.ENDING, Phase.SERVING), (Phase.ENDED, Phase.STARTING)],
)
def test_a_way_that_is_not_in_the_table_is_a_mistake_of_ours(before: Phase, after: Phase) -> None:
    rank = Rank(0)
    rank.phase = before
    with pytest.raises(AssertionError, match=f"rank 0 goes from {before} to {after}"):
        rank.enter(after)


def test_what_a_killed_worker_had_sent_does_not_bring_it_back() -> None:
    rank: Any = Silent(0)
    pool: Any = pool_of(rank)
    pool._arenas = SimpleNamespace(take=lambda rank, fds: None)
    rank.phase = Phase.ENDING
    for message in (WorkerReady(0, 1.0), WarmedUp(0, 1.0), ModelsSet(1.0)):
        rank._theirs.send(message)
        assert [what for _, what in pool.turn(0.0)] == [message]
    assert rank.phase is Phase.ENDING


def test_the_rate_of_reads_stays_known_while_a_rank_holds_other_models() -> None:
    rank, found = Silent(0), []
    for rate in (0.0, 12e9, 0.0, 25e9):
        rank.hear(ModelsSet(1.0, rate))
        found.append(rank.read_bytes_per_s)
    assert found == [0.0, 12e9, 12e9, 25e9]


def test_a_worker_that_is_told_to_load_while_it_starts_joins_when_it_has_loaded() -> None:
    rank: Any = Silent(0)
    pool: Any = pool_of(rank)
    pool._arenas = SimpleNamespace(take=lambda rank, fds: None)
    pool.meeting._counts_tokens = True
    pool.meeting._welcome = lambda worker: setattr(worker, "has_arenas", True)
    rank.phase, rank.has_arenas = Phase.STARTING, False
    pool.set_models([Path("/other")])
    pool.steps_at_hand = lambda: ITEMS  # of the models of before
    rank._theirs.send(WorkerReady(0, 1.0))
    assert [what for _, what in pool.turn(0.0)] == [WorkerReady(0, 1.0)]
    assert rank.phase is Phase.PREPARING
    assert (list(rank.requests), rank.later) == ([SetModels(("/other",))], ())
    rank._theirs.send(ModelsSet(2.0))
    assert [what for _, what in pool.turn(0.0)] == [ModelsSet(2.0), Joined(), Loaded(2.0)]
    assert rank.phase is Phase.SERVING


def test_a_rank_that_dies_while_the_run_stops_holds_up_no_introduction() -> None:
    new, peer = Silent(0), Silent(1)
    pool: Any = pool_of(new, peer)
    pool.meeting._counts_tokens, pool.is_stopping = True, True
    new.phase, new.unknown_to = Phase.INTRODUCING, {1}
    assert list(pool.turn(0.0)) == []
    peer.die()
    assert list(pool.turn(0.0)) == [(peer, Lost("killed by signal 9", is_retired=True)), (new, Joined())]
    assert (pool._left_out, pool.retired) == ({1}, {1})
    replaced: list[tuple[int, bool]] = []
    pool.replace_worker = lambda rank, *, is_to_blame: replaced.append((rank, is_to_blame))
    for _ in range(2):
        pool.begin_start()
    assert replaced == [(1, False)], "before the next run"


def test_a_rank_that_several_wait_for_is_left_behind_once() -> None:
    ranks: list[Any] = [Rank(number) for number in range(3)]
    pool: Any = pool_of(*ranks)
    for rank in ranks:
        rank.phase, rank.process = Phase.INTRODUCING, SimpleNamespace(kill=lambda: None)
    ranks[1].unknown_to, ranks[2].unknown_to = {0}, {0}
    buried: list[Rank] = []
    pool._bury = buried.append
    leave_behind(pool, "it does not answer")
    assert buried == [ranks[0]]


def test_the_host_copy_of_a_model_that_no_job_needs_is_given_back_once_no_rank_holds_it() -> None:
    ranks: list[Any] = [Silent(0), Silent(1)]
    pool: Any = pool_of(*ranks)
    copies = {path: Connection(Placement().new_copy()) for path in ("/a", "/b")}
    pool._launcher.host_copies = copies

    def held(*, loaded: int) -> list[str]:
        """The copies with content after a change to model a, which this rank has answered."""
        for copy in copies.values():
            os.pwrite(copy.fileno(), b"weights", 100_000)
        if loaded == 0:
            pool.set_models([Path("/a")])
        ranks[loaded]._theirs.send(ModelsSet(1.0))
        list(pool.turn(0.0))
        return [path for path, copy in copies.items() if os.pread(copy.fileno(), 7, 100_000) == b"weights"]

    for rank in ranks:
        rank.phase, rank.has_joined = Phase.SERVING, True
    assert [held(loaded=0), held(loaded=1)] == [["/a", "/b"]] * 2, "jobs may come"
    pool.needed = lambda: {"/b"}
    assert [held(loaded=0), held(loaded=1)] == [["/a", "/b"]] * 2
    pool.needed = set
    assert [held(loaded=0), held(loaded=1)] == [["/a", "/b"], ["/a"]], "a rank held b"
    for copy in copies.values():
        copy.close()
