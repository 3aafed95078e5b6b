"""Which launches may have to wait for the device, by torch's own counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gfgen.runtime.worker_memory import DeviceMemory

MB = 1 << 20


class Allocator:
    """torch's counts, as a test wants them."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = self.num_taken = self.num_given_back = 0

    def stats(self, _: torch.device) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.reserved}},
            "num_device_alloc": self.num_taken,
            "num_device_free": self.num_given_back,
        }

    def use(self, num_bytes: int) -> None:
        """Take so much for a while, from the device where what is kept is not enough."""
        self.peak = self.allocated + num_bytes
        if self.peak > self.reserved:
            self.reserved, self.num_taken = self.peak, self.num_taken + 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", found.stats)
    return found


def launch(memory: DeviceMemory, allocator: Allocator, kind: str, num_bytes: int, model: str = "wan") -> None:
    with memory.launching({kind}, model=model):
        allocator.use(num_bytes)


def test_a_kind_is_familiar_once_it_was_launched_without_asking_the_device(allocator: Allocator):
    memory = DeviceMemory(torch.device("cuda"))
    seen = [memory.is_familiar({"step"})]
    for _ in range(2):
        launch(memory, allocator, "step", 5 * MB)
        seen.append(memory.is_familiar({"step"}))
    assert seen == [False, False, True]
    assert not memory.is_familiar({"step", "decode"})


def test_a_kind_is_no_longer_familiar_when_less_is_free_than_it_takes(allocator: Allocator):
    memory = DeviceMemory(torch.device("cuda"))
    for _ in range(2):
        launch(memory, allocator, "step", 5 * MB)
    allocator.allocated = MB  # somebody else keeps something
    assert not memory.is_familiar({"step"})
    allocator.reserved += MB
    assert memory.is_familiar({"step"})


def test_a_launch_that_gave_memory_back_makes_nothing_familiar(allocator: Allocator):
    memory = DeviceMemory(torch.device("cuda"))
    for _ in range(2):
        launch(memory, allocator, "step", 5 * MB)
    with memory.launching({"step"}, model="wan"):
        allocator.num_given_back += 1
    assert not memory.is_familiar({"step"})


def test_a_launch_that_raises_leaves_its_kind_as_it_was(allocator: Allocator):
    memory = DeviceMemory(torch.device("cuda"))
    with pytest.raises(ValueError, match="broken"), memory.launching({"step"}, model="wan"):
        raise ValueError("broken")
    assert not memory.is_familiar({"step"})


def test_peaks_are_kept_by_model(allocator: Allocator):
    memory = DeviceMemory(torch.device("cuda"))
    allocator.allocated = allocator.reserved = 10 * MB
    for num_bytes, model in ((5 * MB, "wan"), (2 * MB, "wan"), (9 * MB, "qwen")):
        launch(memory, allocator, "step", num_bytes, model)
    assert memory.peaks == {"wan": 15 * MB, "qwen": 19 * MB}
    assert memory.reserved_bytes == 19 * MB


def test_on_a_device_that_was_never_used_everything_is_familiar_from_the_second_time_on():
    memory = DeviceMemory(torch.device("cpu"))
    assert not memory.is_familiar({"step"})
    with memory.launching({"step"}, model="wan"):
        pass
    assert memory.is_familiar({"step"})
