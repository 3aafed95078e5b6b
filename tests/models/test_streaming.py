"""Streamed blocks give the bits of blocks that stay on the device (gfgen/models/streaming)."""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from small_checkpoints import save_checkpoint
from torch import nn

from gfgen.errors import AbortedError, RunError
from gfgen.job.spec import JobSpec
from gfgen.models.families.encoders import text_encoder_of
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import stop_checks
from gfgen.models.fast.evaluation import evaluate
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.kernels import Quantised
from gfgen.models.fast.recording import Graphs
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.geometry.weights import Placement, count_parts
from gfgen.models.loading.components import load_pipeline
from gfgen.models.streaming import host_copy
from gfgen.models.streaming.host_copy import HostCopy
from gfgen.models.streaming.placing import Placing
from gfgen.models.streaming.stream import Block, Buffer, Chain, Lane, stream_of
from gfgen.models.streaming.turns import in_turns
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.worker.entry import load_model

torch.set_num_threads(1)

CPU = torch.device("cpu")
NAMES = ("tiny-wan", "tiny-wan-moe", "tiny-qwen-image")
NUM_BLOCKS = 5


def all_streamed(checkpoint: Path, *, num_buffers: int = 2) -> Placement:
    """Every block of text encoders and transformers."""
    parts = count_parts(checkpoint)
    keys = {name: frozenset(part.blocks) for name, part in parts.items() if name != "vae" and part.blocks}
    return Placement(keys, num_buffers)


def load(checkpoint: Path, placement: Placement | None, **options: Any) -> Any:
    placements = {} if placement is None else {str(checkpoint): placement}
    ranks = RankSettings(num_ranks=1, placements=placements, **options)
    return load_model(WorkerSettings(0, (), ranks), str(checkpoint))


def result(adapter: Any, job: JobSpec) -> torch.Tensor:
    spec = adapter.geometry.resolve(job)
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    for step in range(spec.steps or 0):
        latents = adapter.denoise(spec, prompt, condition, latents, step=step)
    frames: torch.Tensor = adapter.decode(spec, latents).tensors["frames"]
    return frames


def models_of(adapter: Any) -> Mapping[str, nn.Module]:
    pipeline = getattr(adapter, "_pipeline", None) or adapter.pipeline
    return {name: each for name, each in pipeline.components.items() if isinstance(each, nn.Module)}


JOB = JobSpec(id="a", prompt="a red fox", seed=1, width=64, height=64, frames=1, steps=2)
"""One frame: what blocks compute with is of no matter here, and decodes would take longest."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config files of a model with more blocks than buffers."""
    folder = Path(shutil.copytree(CONFIGS / "tiny-wan", tmp_path_factory.mktemp("deep") / "model"))
    for component in ("transformer", "text_encoder"):
        path = folder / component / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"num_layers": NUM_BLOCKS}))
    return folder


@pytest.fixture(scope="module")
def of_resident(deep: Path) -> torch.Tensor:
    """What the resident model of these config files makes with random weights."""
    return result(load(deep, None, has_random_weights=True), JOB)


def of_deep(*indices: int, num_buffers: int = 2, texts: bool = True) -> Placement:
    names = {"transformer": "blocks", "text_encoder": "block"} if texts else {"transformer": "blocks"}
    keys = {part: frozenset(f"{name}.{idx}" for idx in indices) for part, name in names.items()}
    return Placement(keys, num_buffers)


@pytest.mark.parametrize("num_buffers", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_streamed_blocks_makes_the_pictures_of_the_resident_one(
    tiny_models: Mapping[str, Path], name: str, num_buffers: int
) -> None:
    checkpoint, found = tiny_models[name], []
    for placement in (None, all_streamed(checkpoint, num_buffers=num_buffers)):
        adapter = load(checkpoint, placement)
        streamed = {part for part, model in models_of(adapter).items() if stream_of(model)}
        assert streamed == set(placement.streamed if placement else ())
        found.append(result(adapter, JOB))
    assert torch.equal(*found)


def test_encodes_that_take_turns_share_their_reads(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [replace(JOB, prompt=prompt) for prompt in ("a fox", "a blue whale in the sea", "rain")]
    found, reads, read = [], Counter[bool](), Lane.read

    def counted(self: Lane, block: Block) -> None:
        reads[bool(found)] += 1
        read(self, block)

    monkeypatch.setattr(Lane, "read", counted)
    for together in (False, True):
        adapter = load(deep, of_deep(*range(NUM_BLOCKS)), has_random_weights=True)
        calls = [partial(adapter.encode, adapter.geometry.resolve(spec)) for spec in specs]
        prompts = in_turns(calls) if together else [call() for call in calls]
        found.append([tensor for each in prompts for tensor in each.tensors.values()])
    assert all(map(torch.equal, *found))
    assert reads[True] == 2 * NUM_BLOCKS < reads[False], "for the prompts, and for the negative ones"


def test_a_pipeline_without_an_adapter_of_its_own_streams_too(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("FluxPipeline", tmp_path)
    placement = all_streamed(checkpoint, num_buffers=1)
    assert set(placement.streamed) == {"text_encoder", "text_encoder_2", "transformer"}
    assert torch.equal(*(result(load(checkpoint, each), JOB) for each in (None, placement)))


@pytest.mark.parametrize(
    "placement",
    [
        of_deep(0, 1, 2, 3, 4),
        of_deep(0, 1, 2, 3, 4, num_buffers=3),
        of_deep(0, 1, 2, 3, 4, num_buffers=1),
        of_deep(1, 3),
        of_deep(2, 3, 4, texts=False),
    ],
    ids=["all", "three buffers", "one buffer", "some", "only the transformer"],
)
def test_random_weights_are_drawn_block_by_block_with_the_same_bits(
    deep: Path, of_resident: torch.Tensor, placement: Placement
) -> None:
    streamed = load(deep, placement, has_random_weights=True)
    assert torch.equal(result(streamed, JOB), of_resident)
    assert torch.equal(result(streamed, JOB), of_resident), "and again"


def test_blocks_are_read_ahead_and_never_more_often_than_forwards_need(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load(deep, of_deep(0, 1, 2, 3, 4, texts=False), has_random_weights=True)
    chain = stream_of(models_of(adapter)["transformer"])
    assert chain is not None
    seen: list[str] = []
    read, enter = chain._lane.read, chain.enter

    def noted_read(block: Block) -> None:
        seen.append(f"read {chain._blocks.index(block)}")
        read(block)

    def noted_enter(idx: int) -> None:
        seen.append(f"enter {idx}")
        enter(idx)

    monkeypatch.setattr(chain._lane, "read", noted_read)
    monkeypatch.setattr(chain, "enter", noted_enter)
    result(adapter, JOB)
    num_reads = seen.count("enter 0") // 2  # both branches of guidance share them
    both = ["read 0", "read 1", "enter 0", "enter 0", "enter 1", "read 2", "enter 1", "enter 2", "read 3"]
    assert seen[:9] == both
    assert seen.count("read 2") == seen.count("read 4") == num_reads
    assert seen.count("read 0") == num_reads + 1, "of the forward that may follow"


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_reads_may_end_as_late_as_their_block_is_entered(
    deep: Path, of_resident: torch.Tensor, monkeypatch: pytest.MonkeyPatch, num_buffers: int
) -> None:
    """On a CPU they end when they are launched, which is the other extreme."""
    late: list[Block] = []

    def read(lane: Lane, block: Block) -> None:
        block.buffer.bytes.fill_(255)
        block.buffer.holds = block
        late.append(block)

    def wait(lane: Lane, buffer: Buffer) -> None:
        for block in [each for each in late if each.buffer is buffer]:
            buffer.bytes[: len(block.region)].copy_(block.region)
            late.remove(block)

    monkeypatch.setattr(Lane, "read", read)
    monkeypatch.setattr(Lane, "wait", wait)
    adapter = load(deep, of_deep(0, 1, 3, 4, num_buffers=num_buffers), has_random_weights=True)
    assert torch.equal(result(adapter, JOB), of_resident)
    assert torch.equal(result(adapter, JOB), of_resident)
    assert late, "what is read ahead for a forward that may follow"


def test_a_forward_that_was_stopped_leaves_the_next_one_right(deep: Path) -> None:
    adapter = load(deep, of_deep(0, 1, 2, 3, 4), has_random_weights=True)
    wanted = result(adapter, JOB)
    for number in (1, 4, 8):
        answers = iter([False] * number)
        watch = stop_checks.Watch(lambda answers=answers: next(answers, True))
        with stop_checks.watching(watch), pytest.raises(AbortedError):
            result(adapter, JOB)
        assert torch.equal(result(adapter, JOB), wanted)


@pytest.mark.parametrize("model", ["tiny-wan", "tiny-qwen-image"])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_fused_blocks_are_placed_as_they_are_fused_also_in_8_bits(
    tiny_models: Mapping[str, Path], model: str, in_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, seen, bring = tiny_models[model], [], Placing.bring
    alive: list[bool] = []
    for placement in (Placement(), all_streamed(checkpoint, num_buffers=1)):
        kind = diffusers.WanPipeline if model == "tiny-wan" else diffusers.QwenImagePipeline
        placing = Placing(placement, device=CPU, brought=("transformer",))
        pipeline = load_pipeline(kind, checkpoint, device="cpu", dtype=torch.bfloat16, placing=placing)
        names = ("to_q", "add_k_proj") if model == "tiny-qwen-image" else ("to_q", "to_v")
        attention = next(each for each in pipeline.transformer.modules() if hasattr(each, "to_q"))
        replaced = [weakref.ref(getattr(attention, name).weight) for name in names]
        alive.clear()
        modulation = [
            getattr(each, "img_mod", [None] * 2)[1]
            for each in getattr(pipeline.transformer, "transformer_blocks", [nn.Identity()])
        ]
        first, last = weakref.ref(modulation[0] or nn.Identity()), modulation.pop()
        del modulation

        def watched(self: Placing, part: nn.Module) -> None:
            alive.append(any(each() is not None for each in replaced))  # noqa: B023
            if part is last and in_fp8:  # noqa: B023
                assert first() is None, "a weight in bf16 goes when it is quantised"  # noqa: B023
            bring(self, part)

        monkeypatch.setattr(Placing, "bring", watched)
        gc.disable()
        fuse(pipeline.transformer, fp8_on=CPU if in_fp8 else None)
        gc.enable()
        assert alive[0]
        assert not alive[-1], "what is replaced leaves the device before the next block comes"
        encoder = text_encoder_of(pipeline.text_encoder)
        placing.finish()
        assert encoder is not None
        seen.append([*all_weights_read(pipeline.transformer), encoder([5, 6, 7], evaluate)])
    assert len(seen[0]) == len(seen[1])
    assert all(map(torch.equal, *seen))


def all_weights_read(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all tensors, as they are when their block is computed."""
    found, chain = list[torch.Tensor](), stream_of(model)
    for name, module in model.named_modules():
        if chain is not None and name in chain._by_name:
            chain.enter(list(chain._by_name).index(name))
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        found += [each.detach().view(torch.uint8).clone() for each in own if each.numel() and each.ndim]
    return found


class Never:
    """Records nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AssertionError(f"{name} was asked for")


def test_forwards_with_streamed_blocks_are_not_recorded(deep: Path) -> None:
    adapter = load(deep, of_deep(1, texts=False), has_random_weights=True)
    graphs = Graphs(Never(), CPU)  # type: ignore[arg-type]
    parts = models_of(adapter)
    assert not graphs._may_be(parts["transformer"])
    assert graphs._may_be(parts["text_encoder"])


def test_a_region_that_was_half_written_is_written_again() -> None:
    fd = Placement().new_copy()
    first, second, third = (HostCopy(fd, CPU) for _ in range(3))

    def die(region: torch.Tensor) -> None:
        region[:3] = 7
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.region(5, die)
    region = second.region(5, lambda region: region.fill_(9))
    assert region.tolist() == [9] * 5
    assert third.region(5, lambda region: pytest.fail("it is there")).tolist() == [9] * 5
    assert third.region(3, lambda region: region.fill_(1)).data_ptr() % 4096 == 0
    mmap.mmap(fd, 0).madvise(mmap.MADV_REMOVE)  # as the pool does, when no rank needs it
    fourth = HostCopy(fd, CPU)
    assert fourth.region(5, lambda region: region.fill_(4)).tolist() == [4] * 5
    fourth.close()
    os.close(fd)
    for each in (first, second, third):
        each.close()


def test_memory_that_cannot_be_pinned_is_told_once_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    class Driver:
        def use(self, device: int) -> None:
            calls.append(f"use {device}")

        def register_host(self, address: int, num_bytes: int) -> None:
            calls.append(f"pin {num_bytes}")
            if num_bytes > 6:
                raise RunError("CUDA: CUDA_ERROR_OUT_OF_MEMORY")

        def call(self, name: str, address: int) -> None:
            calls.append(name)

    monkeypatch.setattr(host_copy, "driver", Driver)
    fd = Placement().new_copy()
    copy = HostCopy(fd, torch.device("cuda", 1))
    os.close(fd)
    regions = [copy.region(size, lambda region: region.fill_(3)) for size in (5, 7, 6)]
    assert [region.tolist() for region in regions] == [[3] * 5, [3] * 7, [3] * 6]
    assert caplog.text.count("pins no more memory (CUDA: CUDA_ERROR_OUT_OF_MEMORY)") == 1
    assert "raise 'ulimit -l' or, of a container," in caplog.text
    copy.close()
    assert calls == ["use 1", "pin 5", "pin 7", "cuMemHostUnregister"]


def test_what_a_model_kept_goes_with_it(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    adapter = load(deep, of_deep(1, 2), has_random_weights=True)
    chain = stream_of(models_of(adapter)["transformer"])
    assert isinstance(chain, Chain)
    ended: list[HostCopy] = []
    monkeypatch.setattr(HostCopy, "close", lambda copy: ended.append(copy))
    del adapter, chain
    gc.collect()
    assert len(ended) == 1


def test_a_block_that_the_model_lacks_is_told(
    deep: Path, of_resident: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    placement = Placement({"transformer": frozenset({"blocks.1", "blocks.77"})})
    adapter = load(deep, placement, has_random_weights=True)
    assert "transformer lacks the blocks ['blocks.77']" in caplog.text
    assert torch.equal(result(adapter, JOB), of_resident)


def test_no_descriptor_is_left_open(deep: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    adapter = load(deep, of_deep(1, 2), has_random_weights=True)
    del adapter
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config files of a Wan with eight blocks of 50 MB in bf16, and a text encoder with eight of 12 MB."""
    folder = Path(shutil.copytree(CONFIGS / "tiny-wan", tmp_path_factory.mktemp("wide") / "model"))
    for component, sizes in (
        ("transformer", {"num_attention_heads": 8, "attention_head_dim": 128, "ffn_dim": 8192}),
        ("text_encoder", {"d_ff": 16384}),
    ):
        path = folder / component / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 8} | sizes))
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True], ids=["bf16", "fp8"])
def test_on_a_gpu_streamed_blocks_give_the_same_bits_in_less_memory(
    wide: Path, in_fp8: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if in_fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    keys = {
        "transformer": frozenset(f"blocks.{idx}" for idx in range(8)),
        "text_encoder": frozenset(f"block.{idx}" for idx in range(8)),
    }
    some = {name: frozenset(sorted(own)[::2]) for name, own in keys.items()}
    found, peaks = [], []
    for placement in (Placement(), Placement(keys, 2), Placement(some, 3)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        adapter = load_adapter(
            wide,
            device="cuda:0",
            has_random_weights=True,
            placement=placement,
            quantised=Quantised(layers=in_fp8),
        )
        torch.cuda.synchronize()
        for _ in range(2):
            found.append(result(adapter, JOB).cpu())
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del adapter
    assert all(torch.equal(found[0], each) for each in found)
    assert "pins no more" not in caplog.text
    # Two buffers hold 100 MB of the 400 MB of blocks in bf16; blocks come to the device in bf16.
    saved = 100e6 if in_fp8 else 250e6
    assert peaks[1] < peaks[0] - saved, peaks
    assert peaks[1] < peaks[2] + 50e6, peaks


@pytest.mark.parametrize(
    ("lasts_s", "num_left"), [((0.009, 0.005, 0.006, 0.007, 0.001), 1), ((0.045, 0.005), 1)]
)
def test_the_rate_of_reads_is_that_of_the_best_of_a_few_copies_and_takes_little_time(
    monkeypatch: pytest.MonkeyPatch, lasts_s: tuple[float, ...], num_left: int
) -> None:
    left, now_s = list(lasts_s), 0.0

    class Target:
        def copy_(self, source: torch.Tensor) -> None:
            nonlocal now_s
            now_s += left.pop(0)

    placing = Placing(Placement({"model": frozenset({"blocks.0"})}))
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(10, 10)])
    placing.begin("model", model)
    placing.finish()
    assert placing.read_rate() == 0, "on a CPU"
    placing._device = torch.device("cuda")
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, device: Target())
    assert placing.read_rate() == pytest.approx(1024 / min(lasts_s[: len(lasts_s) - num_left]))
    assert len(left) == num_left


def test_nothing_is_measured_without_streamed_blocks(deep: Path) -> None:
    assert load(deep, None, has_random_weights=True).read_bytes_per_s == 0
    assert Placing(device=torch.device("cuda")).read_rate() == 0
