"""Models that leave their device and come back with the same bits (gfgen/models/streaming/placing.py)."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from small_checkpoints import save_checkpoint
from test_streaming import JOB, all_weights_read, models_of, result

from gfgen.gfc.cuda import device_endpoint
from gfgen.models.families.encoders import text_encoder_of
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast.evaluation import evaluate
from gfgen.models.fast.fused import fuse
from gfgen.models.geometry.weights import WHOLE
from gfgen.models.loading.components import load_pipeline
from gfgen.models.streaming import placing as keeping
from gfgen.models.streaming.host_copy import HostCopy
from gfgen.models.streaming.placing import Kept
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.worker import entry
from gfgen.runtime.worker.entry import load_model

torch.set_num_threads(1)


def kept(checkpoint: Path, fd: int | None = None) -> Any:
    """An adapter whose model may leave."""
    copy_fd = WHOLE.new_copy() if fd is None else fd
    adapter = load_adapter(checkpoint, copy_fd=copy_fd, is_kept=True)
    if fd is None:
        os.close(copy_fd)
    return adapter


def on_device(adapter: Any) -> set[int]:
    """Where the weights are."""
    return {
        tensor.untyped_storage().data_ptr()
        for model in models_of(adapter).values()
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.numel()
    }


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-wan-moe", "tiny-qwen-image"])
def test_a_model_that_left_and_came_back_makes_the_same_pictures(
    tiny_models: Mapping[str, Path], name: str
) -> None:
    wanted = result(load_adapter(tiny_models[name]), JOB)
    adapter = kept(tiny_models[name])
    assert len(on_device(adapter)) == 1, "all of them are in one piece of memory"
    assert torch.equal(result(adapter, JOB), wanted)
    for _ in range(2):
        adapter.kept.leave()
        adapter.kept.come_back()
        assert torch.equal(result(adapter, JOB), wanted)


def test_a_pipeline_without_an_adapter_of_its_own_comes_back_too(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("FluxPipeline", tmp_path)
    adapter = kept(checkpoint)
    adapter.kept.leave()
    adapter.kept.come_back()
    assert torch.equal(result(adapter, JOB), result(load_adapter(checkpoint), JOB))


@pytest.mark.parametrize("in_fp8", [False, True])
def test_fused_and_quantised_models_come_back_as_they_are(
    tiny_models: Mapping[str, Path], in_fp8: bool
) -> None:
    cpu, fd = torch.device("cpu"), WHOLE.new_copy()
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
    pipeline = load_pipeline(diffusers.QwenImagePipeline, tiny_models["tiny-qwen-image"], **options)
    fuse(pipeline.transformer, fp8_on=cpu if in_fp8 else None)
    encoder = text_encoder_of(pipeline.text_encoder)
    assert encoder is not None

    def state() -> list[torch.Tensor]:
        return [*all_weights_read(pipeline.transformer), encoder([5, 6, 7], evaluate)]

    before = state()
    kept = Kept(pipeline, HostCopy(fd, cpu), cpu)
    os.close(fd)
    assert all(map(torch.equal, before, state()))
    kept.leave()
    kept.come_back()
    assert all(map(torch.equal, before, state()))


def test_ranks_share_one_copy_which_the_first_has_written(tiny_models: Mapping[str, Path]) -> None:
    checkpoint, fd = tiny_models["tiny-wan"], WHOLE.new_copy()
    first, second = kept(checkpoint, fd), kept(checkpoint, fd)
    os.close(fd)
    wanted = result(first, JOB)
    for adapter in (first, second):
        adapter.kept.leave()
    for _, region in first.kept._parts:
        region.fill_(0)
    second.kept.come_back()
    assert not torch.equal(result(second, JOB), wanted)
    assert all(not tensor.any() for model in models_of(second).values() for tensor in model.parameters())


def test_a_copy_is_made_only_if_main_memory_has_room_then(
    tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tiny_models["tiny-wan"])
    copy = Connection(WHOLE.new_copy(5 << 20))
    settings = WorkerSettings(
        0, (), RankSettings(num_ranks=1, kept={path: 5 << 20}), host_copies={path: copy}
    )
    monkeypatch.setattr(entry, "available_bytes", lambda: 4 << 20)
    assert load_model(settings, path).kept is None
    assert "main memory has no room for a copy of" in caplog.text
    monkeypatch.setattr(entry, "available_bytes", lambda: 5 << 20)
    assert load_model(settings, path).kept is not None
    monkeypatch.setattr(entry, "available_bytes", lambda: 4 << 20)
    assert load_model(settings, path).kept is not None, "it is there"


def test_addresses_on_a_gpu_are_reserved_once_and_memory_is_mapped_there_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[object, ...]] = []

    class Driver:
        def shareable(self, device: int, num_bytes: int) -> tuple[int, int, int]:
            calls.append(("create", num_bytes))
            return 5, num_bytes, os.open(os.devnull, os.O_RDONLY)

        def map(self, handle: int, num_bytes: int, device: int, *, at: int | None) -> int:
            calls.append(("map", handle, at))
            return 4096

        def call(self, name: str, *arguments: int) -> None:
            calls.append((name, *arguments))

    monkeypatch.setattr(keeping, "driver", Driver)
    monkeypatch.setattr(keeping, "limit_torch", lambda device, less: calls.append(("less", less)))
    monkeypatch.setattr(device_endpoint, "as_tensor", lambda address, size, device: (address, size, device))
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append((name,)))
    size, pages = 2 << 20, keeping._Pages(5, torch.device("cuda", 1))
    taken = [("empty_cache",), ("create", size)], [("less", size)]
    given = [("synchronize",), ("cuMemUnmap", 4096, size), ("less", -size)]
    for at in (None, 4096):
        calls.clear()
        assert pages.take() == (4096, size, 1)
        assert (calls, pages.num_bytes) == ([*taken[0], ("map", 5, at), *taken[1]], size)
        calls.clear()
        pages.give_back()
        pages.give_back()
        assert (calls, pages.num_bytes) == (given, 0)
    calls.clear()
    fd = WHOLE.new_copy()
    keeping._close(pages, HostCopy(fd, torch.device("cpu")))
    os.close(fd)
    assert calls == [("cuMemAddressFree", 4096, size)]


def on_gpu_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@pytest.mark.gpu
def test_on_a_gpu_a_model_comes_back_to_its_addresses_and_gives_its_memory_back(
    tiny_models: Mapping[str, Path],
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    checkpoint, fd = tiny_models["tiny-qwen-image"], WHOLE.new_copy()
    wanted = result(load_adapter(checkpoint, device="cuda:0"), JOB)
    adapter = load_adapter(checkpoint, device="cuda:0", copy_fd=fd, is_kept=True)
    os.close(fd)
    assert torch.equal(result(adapter, JOB), wanted)
    addresses, present, size = on_device(adapter), on_gpu_bytes(), adapter.kept.pages.num_bytes
    for _ in range(3):
        adapter.kept.leave()
        assert on_gpu_bytes() <= present - size
        adapter.kept.come_back()
        assert on_device(adapter) == addresses
        assert torch.equal(result(adapter, JOB), wanted)
    assert size >= sum(each.nbytes for model in models_of(adapter).values() for each in model.parameters())


def test_a_kept_model_that_goes_leaves_nothing(tiny_models: Mapping[str, Path]) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    adapter = kept(tiny_models["tiny-wan"])
    adapter.kept.leave()
    del adapter
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
