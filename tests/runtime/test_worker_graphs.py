"""Where there is room for records: a GPU's memory is imitated by numbers."""

from __future__ import annotations

import pytest
import torch

from gfgen.runtime.worker.forwards import CudaRecorder

GB = 10**9


@pytest.mark.parametrize(
    ("fraction", "kept_gb", "unused_gb", "has_room"),
    [
        (1.0, 120, 0, True),
        (1.0, 130, 0, False),
        (1.0, 130, 40, True),  # it is given back first
        (0.25, 20, 0, True),
        (0.25, 33, 0, False),  # of the 35 GB that --memory leaves to torch
        (0.25, 33, 10, True),
    ],
)
def test_there_is_room_for_records_where_a_tenth_of_what_torch_may_take_is_free(
    fraction: float, kept_gb: int, unused_gb: int, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = kept_gb * GB

    def empty_cache() -> None:
        nonlocal reserved
        reserved -= unused_gb * GB

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (140 * GB - reserved, 140 * GB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    assert CudaRecorder(torch.device("cuda", 0)).has_room() == has_room
