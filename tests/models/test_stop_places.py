"""Places inside a task where it can be stopped."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from diffusers import AutoencoderKLWan

from gfgen.errors import AbortedError
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import stop_checks

MODELS = ["tiny-wan", "tiny-wan-moe", "tiny-qwen-image"]


class Counting(stop_checks.Watch):
    """Counts its checks and stops at one of them."""

    def __init__(self, stop_at=None):
        self.num_checks = 0
        super().__init__(lambda: self.num_checks == stop_at)

    def check(self):
        self.num_checks += 1
        super().check()


@pytest.fixture(params=MODELS)
def adapter(request, tiny_models):
    return load_adapter(tiny_models[request.param], device="cpu")


@pytest.fixture
def spec(adapter):
    asked = JobSpec(id="a", prompt="a fox", model="", width=64, height=64, steps=2, seed=3)
    return adapter.geometry.resolve(asked)


def stages(adapter, spec):
    """The calls of a job's tasks, each with what the ones before have made."""
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    yield lambda: adapter.encode(spec)
    yield lambda: adapter.denoise(spec, prompt, condition, latents, step=0)
    yield lambda: adapter.decode(spec, latents)


def test_every_stage_can_be_stopped_in_its_middle_and_then_run_as_before(adapter, spec):
    _, denoise, decode = stages(adapter, spec)
    for stage in (denoise, decode):
        whole = stage()
        with stop_checks.watching(counting := Counting()):
            stage()
        assert counting.num_checks >= 2
        with stop_checks.watching(Counting(stop_at=2)), pytest.raises(AbortedError, match="was stopped"):
            stage()
        again = stage()
        assert all(torch.equal(again.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_lists_of_modules_may_have_gaps():
    part = torch.nn.Linear(2, 2)
    stop_checks.install(torch.nn.Sequential(torch.nn.ModuleList([None, part])))
    with stop_checks.watching(counting := Counting()):
        part(torch.zeros(1, 2))
    assert counting.num_checks == 1


def test_a_decode_of_a_video_is_asked_in_every_latent_frame(tiny_models):
    adapter = load_adapter(tiny_models["tiny-wan"], device="cpu")
    num_checks = []
    for frames in (1, 5, 9):
        spec = adapter.geometry.resolve(
            JobSpec(id="a", prompt="a fox", model="", width=64, height=64, frames=frames, steps=1, seed=3)
        )
        _, latents = adapter.prepare(spec, adapter.encode(spec))
        with stop_checks.watching(counting := Counting()):
            adapter.decode(spec, latents)
        num_checks.append(counting.num_checks)
    first, second, third = num_checks
    assert third - second == second - first >= 1
    assert isinstance(adapter._vae, AutoencoderKLWan)


def test_hooks_do_nothing_where_nobody_watches():
    model = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Identity()]))
    stop_checks.install(model, None)
    model[0][0](torch.zeros(1))
    with stop_checks.watching(counting := Counting()):
        model[0][0](torch.zeros(1))
        with stop_checks.watching(None):
            model[0][0](torch.zeros(1))
    assert counting.num_checks == 1


@dataclass
class Mark:
    """An event of a device that does one part after the other."""

    device: Device
    done_s: float

    def synchronize(self):
        self.device.now_s = max(self.device.now_s, self.done_s)

    def elapsed_time(self, other):
        return 1e3 * (other.done_s - self.done_s)


class Device:
    """Launching a part takes a millisecond of the host; doing it takes `part_s` of the device."""

    def __init__(self, part_s):
        self.now_s = self.free_s = 0.0
        self.part_s = part_s

    def launch(self):
        self.now_s += 0.001
        self.free_s = max(self.free_s, self.now_s) + self.part_s

    def record(self):
        return Mark(self, self.free_s)


@pytest.mark.parametrize(
    ("part_s", "ahead_s"), [(0.0005, 0.001), (0.004, 0.05), (0.03, 0.061), (0.2, 0.41), (1.0, 1.01)]
)
def test_the_host_runs_ahead_of_a_device_by_little_and_the_device_never_waits(part_s, ahead_s):
    device = Device(part_s)
    watch = stop_checks.DeviceWatch(lambda: False, record=device.record)
    num_parts, ahead = 200, []
    for _ in range(num_parts):
        watch.check()
        device.launch()
        ahead.append(device.free_s - device.now_s)
    assert max(ahead[20:]) <= ahead_s
    slowest_s = max(part_s, 0.001)
    gaps_s = 0.001 if part_s > stop_checks.LONG_S else 0.0
    assert device.free_s == pytest.approx(num_parts * (slowest_s + gaps_s), rel=0.02)


def launch_for_ever(device, watch):
    while True:
        watch.check()
        device.launch()


def test_a_stop_that_comes_while_the_host_waits_is_seen_before_the_next_launch():
    device = Device(1.0)
    watch = stop_checks.DeviceWatch(lambda: device.now_s > 2.5, record=device.record)
    with pytest.raises(AbortedError):
        launch_for_ever(device, watch)
    assert device.free_s < 4.1
