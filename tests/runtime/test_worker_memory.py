"""Which launches may have to wait for the device, by torch's own counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gfgen.runtime.worker.memory import DeviceMemory

MB = 1 << 20
DEVICE, TASKS, ARRIVALS = torch.device("cuda", 1), 77, 88


class Allocator:
    """torch's counts, as a test wants them."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = self.num_taken = self.num_given_back = 0
        self.elsewhere: list[dict[str, Any]] = []
        self.num_lists = 0

    def stats(self, _: torch.device) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}},
            "reserved_bytes": {"all": {"current": self.reserved}},
            "num_device_alloc": self.num_taken,
            "num_device_free": self.num_given_back,
        }

    def snapshot(self) -> list[dict[str, Any]]:
        """One segment of the stream of tasks, and those that are elsewhere."""
        self.num_lists += 1
        taken_elsewhere = sum(each["total_size"] for each in self.elsewhere)
        used_elsewhere = sum(each["allocated_size"] for each in self.elsewhere)
        own = segment(self.reserved - taken_elsewhere, self.allocated - used_elsewhere)
        return [own, *self.elsewhere, segment(99 * MB, 0, device=0), segment(99 * MB, 0, pool=(0, 3))]

    def take_elsewhere(self, total: int, used: int, **where: Any) -> None:
        self.elsewhere.append(segment(total, used, **where))
        self.reserved, self.allocated = self.reserved + total, self.allocated + used
        self.num_taken += 1

    def use(self, num_bytes: int) -> None:
        """Take so much for a while, from the device where what is kept is not enough."""
        self.peak = self.allocated + num_bytes
        if self.peak > self.reserved:
            self.reserved, self.num_taken = self.peak, self.num_taken + 1


def segment(
    total: int, used: int, *, stream: int = TASKS, device: int = 1, pool: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """As torch lists it."""
    blocks = [{"size": used, "state": "active_allocated"}, {"size": total - used, "state": "inactive"}]
    return {
        "device": device,
        "stream": stream,
        "segment_pool_id": pool,
        "total_size": total,
        "allocated_size": used,
        "blocks": blocks,
    }


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", found.stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", found.snapshot)
    return found


def launch(memory: DeviceMemory, allocator: Allocator, kind: str, num_bytes: int, model: str = "wan") -> None:
    with memory.launching({kind}, model=model):
        allocator.use(num_bytes)


def test_a_kind_is_familiar_once_it_was_launched_without_asking_the_device(allocator: Allocator):
    memory = DeviceMemory(DEVICE, stream=TASKS)
    seen = [memory.is_familiar({"step"})]
    for _ in range(2):
        launch(memory, allocator, "step", 5 * MB)
        seen.append(memory.is_familiar({"step"}))
    assert seen == [False, False, True]
    assert not memory.is_familiar({"step", "decode"})


def test_a_kind_is_no_longer_familiar_when_less_is_free_than_it_takes(allocator: Allocator):
    memory = DeviceMemory(DEVICE, stream=TASKS)
    for _ in range(2):
        launch(memory, allocator, "step", 5 * MB)
    allocator.allocated = MB  # somebody else keeps something
    assert not memory.is_familiar({"step"})
    allocator.reserved += MB
    assert memory.is_familiar({"step"})


@pytest.mark.parametrize("where", [{"stream": ARRIVALS}, {"pool": (0, 3)}])
def test_memory_that_torch_keeps_for_others_makes_nothing_familiar(allocator: Allocator, where: Any):
    """What was free of it served when the kind was launched last, and is in use now."""
    memory = DeviceMemory(DEVICE, stream=TASKS)
    for _ in range(2):
        launch(memory, allocator, "step", 5 * MB)
    allocator.take_elsewhere(20 * MB, 1 * MB, **where)
    assert memory.is_familiar({"step"})
    allocator.allocated += MB
    assert not memory.is_familiar({"step"})
    assert memory.is_known({"step"})


def test_segments_are_listed_when_others_have_come_and_where_it_is_close(allocator: Allocator):
    memory = DeviceMemory(DEVICE, stream=TASKS)
    allocator.take_elsewhere(50 * MB, 50 * MB, stream=0)  # weights
    for _ in range(2):
        launch(memory, allocator, "decode", 9 * MB)
    for _ in range(2):
        launch(memory, allocator, "step", 5 * MB)
    assert all(memory.is_familiar({"step"}) for _ in range(5))
    assert allocator.num_lists == 1
    allocator.take_elsewhere(6 * MB, 6 * MB, stream=ARRIVALS)
    assert memory.is_familiar({"step"})  # though it might be that the tasks' stream has these in use
    assert allocator.num_lists == 2
    assert all(memory.is_familiar({"decode"}) for _ in range(5))
    assert allocator.num_lists == 2


def test_a_launch_that_gave_memory_back_makes_nothing_familiar(allocator: Allocator):
    memory = DeviceMemory(DEVICE, stream=TASKS)
    for _ in range(2):
        launch(memory, allocator, "step", 5 * MB)
    with memory.launching({"step"}, model="wan"):
        allocator.num_given_back += 1
    assert not memory.is_familiar({"step"})


def test_a_launch_that_raises_leaves_its_kind_as_it_was(allocator: Allocator):
    memory = DeviceMemory(DEVICE, stream=TASKS)
    with pytest.raises(ValueError, match="broken"), memory.launching({"step"}, model="wan"):
        raise ValueError("broken")
    assert not memory.is_familiar({"step"})


def test_peaks_are_kept_by_model(allocator: Allocator):
    memory = DeviceMemory(DEVICE, stream=TASKS)
    allocator.allocated = allocator.reserved = 10 * MB
    for num_bytes, model in ((5 * MB, "wan"), (2 * MB, "wan"), (9 * MB, "qwen")):
        launch(memory, allocator, "step", num_bytes, model)
    assert memory.peaks == {"wan": 15 * MB, "qwen": 19 * MB}
    assert memory.reserved_bytes == 19 * MB


def test_on_a_device_that_was_never_used_everything_is_familiar_from_the_second_time_on():
    memory = DeviceMemory(torch.device("cpu"), stream=0)
    assert not memory.is_familiar({"step"})
    with memory.launching({"step"}, model="wan"):
        pass
    assert memory.is_familiar({"step"})


def test_what_a_launch_takes_itself_is_told_apart_from_what_was_there(allocator: Allocator):
    memory = DeviceMemory(DEVICE, stream=TASKS)
    allocator.allocated = 10 * MB
    launch(memory, allocator, "step", 5 * MB)
    assert (memory.last_peak_bytes, memory.last_own_bytes) == (15 * MB, 5 * MB)
