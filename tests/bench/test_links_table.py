"""`gfgen bench gfc` on machines without peer access, with the driver and the ranks replaced."""

from __future__ import annotations

from types import SimpleNamespace

from gfgen.bench import gfc


def test_tuning_without_peer_access_has_no_effect_and_says_so(monkeypatch, caplog):
    cuda = SimpleNamespace(num_devices=2, can_access=lambda *_: False, name=lambda _: "a GPU")
    row = {"transport": "host", "pair": (0, 1), "us": 2.0}
    kept = []
    monkeypatch.setattr(gfc, "driver", lambda: cuda)
    monkeypatch.setattr(gfc, "_links", lambda *_: [{**row, "bytes": size} for size in gfc.LINK_SIZES])
    monkeypatch.setattr(gfc, "keep_links", lambda device, rows: kept.extend(rows))
    report = gfc.measure_collectives(num_gpus=2, tune=True)
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "--tune has no effect: it is for peer memory, and these GPUs do not all reach each other"
    ]
    assert not report.tuning
    assert [(each["from"], each["to"]) for each in kept] == [(0, 1)]
    caplog.clear()
    gfc.measure_collectives(num_gpus=2, tune=False)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_pairs_of_gpus_are_measured_over_both_transports(monkeypatch):
    reached = {(0, 1), (1, 0), (2, 3), (3, 2)}
    cuda = SimpleNamespace(num_devices=4, can_access=lambda *pair: pair in reached, name=lambda _: "a GPU")
    kept, started = [], []

    class FakeRanks:
        def __init__(self, num_ranks, plan, *, near):
            started.append(near)

        def run(self, pair, *_):
            return [{"us": 2.0}] * 2

        def next_dispatch(self):
            return 1

        def close(self):
            pass

    monkeypatch.setattr(gfc, "driver", lambda: cuda)
    monkeypatch.setattr(gfc, "CudaRanks", FakeRanks)
    monkeypatch.setattr(gfc, "keep_links", lambda device, rows: kept.extend(rows))
    gfc.measure_collectives(num_gpus=4, tune=False)
    found = {"peer": set(), "host": set()}
    for each in kept:
        found[each["transport"]].add((each["from"], each["to"]))
    assert found["peer"] == {(0, 1), (2, 3)}
    assert len(found["host"]) == 6
    assert started == [((0, 1), (2, 3)), [(0,), (1,), (2,), (3,)]]
