"""Texts that are padded, so that their lengths are data: the same results, and one record for many lengths.

pytest tests/models/test_texts.py            # attention by cuDNN needs a GPU and nvidia-cudnn-frontend
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from gfc_fake import FakeCluster
from gpu_worker_imitation import ImitationRecorder
from test_sequence_parallel import hooked, qwen_inputs

from gfgen.gfc.reshard import shard_sizes
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import recording, texts
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.recording import Graphs
from gfgen.models.fast.texts import common_length, is_padded, padded_length, with_texts
from gfgen.models.parallel import cudnn_attention
from gfgen.models.parallel.cudnn_attention import counted_attention as attend
from gfgen.models.parallel.parallel import parallel_from, rehearsal
from gfgen.models.parallel.sequence_parallel import active, present_degrees

torch.set_num_threads(1)

ROUNDING = 2e-5
CPU = torch.device("cpu")
LAYOUTS = Layout((0,)), Layout((0, 1), cfg=2), Layout((0, 1, 2, 3), ulysses=4)


@pytest.fixture(scope="module")
def fused_qwen(tiny_models: Mapping[str, Path]) -> Any:
    transformer = hooked(QwenImagePipeline, tiny_models["tiny-qwen-image"]).transformer
    fuse(transformer)
    return transformer


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with cuDNN's attention; what attends is a mask here."""
    monkeypatch.setattr(texts, "is_fast", lambda *_: True)


@pytest.mark.parametrize("num_shards", range(1, 9))
def test_padding_is_in_the_last_shard_and_lengths_are_few(num_shards: int) -> None:
    padded = {length: padded_length([length], num_shards=num_shards) for length in range(1, 513)}
    for length, common in padded.items():
        assert common is not None
        assert length <= common <= length + shard_sizes(common, num_shards)[-1]
    assert len(set(padded.values())) <= 16 + 6 * num_shards
    assert [padded_length([each], num_shards=1) for each in (1, 32, 33, 512)] == [32, 32, 64, 512]
    assert [padded_length([each], num_shards=2) for each in (1, 20, 45, 65)] == [2, 32, 64, 96]


def test_texts_of_two_branches_share_a_length_where_padding_stays_in_the_last_shard() -> None:
    assert padded_length([45, 6], num_shards=1) == 64
    assert padded_length([45, 40], num_shards=2) == 64
    assert padded_length([45, 6], num_shards=2) is None


@pytest.mark.usefixtures("counting")
def test_only_what_can_count_is_padded(fused_qwen: Any, tiny_models: Mapping[str, Path]) -> None:
    def length(*degrees: int) -> int | None:
        return common_length([torch.ones(1, 20, 64)], degrees=(degrees[0], degrees[1], degrees[2]))

    assert length(1, 1, 1) == 32
    assert length(2, 2, 1) == 32
    assert length(1, 2, 2) is None
    whole = hooked(QwenImagePipeline, tiny_models["tiny-qwen-image"]).transformer
    assert is_padded(fused_qwen, picture_tokens=12, num_steps=20)
    assert not is_padded(whole, picture_tokens=12, num_steps=20)


def test_texts_of_large_pictures_are_padded_in_fp8_where_there_are_few_steps(
    fused_qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = texts.MAX_PICTURE_TOKENS
    assert not is_padded(fused_qwen, picture_tokens=large, num_steps=4)
    monkeypatch.setattr(fused_qwen.modulation, "in_int8", object())
    assert is_padded(fused_qwen, picture_tokens=large, num_steps=4)
    assert not is_padded(fused_qwen, picture_tokens=large, num_steps=20)


def test_on_a_cpu_texts_are_as_long_as_they_are() -> None:
    text = torch.ones(1, 20, 64, dtype=torch.bfloat16)
    assert common_length([text], degrees=(1, 1, 1)) is None


def test_one_text_without_padding_is_itself() -> None:
    """What a transformer keeps for a prompt it keeps for this tensor."""
    inputs = qwen_inputs(5)
    text = inputs["encoder_hidden_states"]
    given = with_texts(inputs, [text])
    assert given["encoder_hidden_states"] is text
    assert given["hidden_states"] is inputs["hidden_states"]


def random_qkv(*shape: int, device: torch.device = CPU) -> torch.Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).to(device)


def test_tokens_behind_the_count_take_no_part() -> None:
    qkv = random_qkv(2, 10, 3, 8)
    counts = torch.tensor([7, 10], dtype=torch.int32)
    found = attend(*qkv, counts)
    for idx, count in enumerate(counts.tolist()):
        alone = attend(*qkv[:, idx : idx + 1, :count], counts[:1].fill_(count))
        assert torch.allclose(found[idx, :count], alone[0], atol=1e-6)
        assert not found[idx, count:].any()


def test_attention_that_does_not_work_is_told_of_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was in the way for a moment only is no reason: all ranks must decide alike."""
    works = cudnn_attention._works.__wrapped__
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())

    def outcome(plan: Any) -> bool:
        monkeypatch.setattr(cudnn_attention, "_plan", plan)
        found: bool = works(CPU)
        return found

    def failing(error: Exception) -> Any:
        def plan(*_: Any, **__: Any) -> Any:
            raise error

        return plan

    assert outcome(lambda *_, **__: cudnn_attention.by_mask)
    assert not outcome(failing(ModuleNotFoundError("no cudnn", name="cudnn")))
    assert not caplog.records
    assert not outcome(lambda *_, **__: lambda query, *_: query.new_zeros(query.shape))
    assert not outcome(failing(ModuleNotFoundError("no other", name="other")))
    reasons = ["ValueError: its result is wrong", "ModuleNotFoundError: no other"]
    assert [record.args for record in caplog.records] == [(reason,) for reason in reasons]
    with pytest.raises(torch.OutOfMemoryError):
        outcome(failing(torch.OutOfMemoryError("none")))


def predictions(transformer: Any, lengths: tuple[int, ...], *, common: int | None) -> list[torch.Tensor]:
    """Of both branches in one forward, or of one."""
    noise = torch.Generator().manual_seed(1)
    embeds = [torch.randn(1, length, 64, generator=noise) for length in lengths]
    inputs = with_texts(qwen_inputs(1) | {"attention_kwargs": {}}, embeds, length=common)
    with torch.no_grad():
        return list(transformer(**inputs, return_dict=False)[0].chunk(len(lengths)))


@pytest.mark.parametrize("lengths", [(7,), (9, 5)], ids=str)
def test_padded_texts_give_what_they_give_by_themselves(fused_qwen: Any, lengths: tuple[int, ...]) -> None:
    wanted = [predictions(fused_qwen, lengths, common=None)[idx] for idx in range(len(lengths))]
    found = predictions(fused_qwen, lengths, common=32)
    for result, best in zip(found, wanted, strict=True):
        assert torch.allclose(result, best, atol=ROUNDING)


@pytest.mark.parametrize("how", [{}, {"num_chunks": 2}], ids=str)
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("lengths", [(7,), (21,), (22, 21), (1,)], ids=str)
def test_ranks_share_padded_texts(
    fused_qwen: Any, lengths: tuple[int, ...], degree: int, how: Mapping[str, Any]
) -> None:
    common = padded_length(lengths, num_shards=degree)
    assert common is not None

    def program(group: Any) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        with active(parallel_from(group, **how)):
            assert present_degrees() == (1, degree, 1)
            return predictions(fused_qwen, lengths, common=common)

    wanted = predictions(fused_qwen, lengths, common=None)
    for results in FakeCluster().run(Layout(tuple(range(degree)), ulysses=degree), program):
        for result, best in zip(results, wanted, strict=True):
            assert torch.allclose(result, best, atol=ROUNDING)


def of_length(length: int) -> Mapping[str, Any]:
    text = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(length))
    return with_texts(qwen_inputs(1) | {"attention_kwargs": {}}, [text], length=32)


@torch.no_grad()
def test_one_record_serves_texts_of_many_lengths(fused_qwen: Any) -> None:
    of = Graphs(recorder := ImitationRecorder(), CPU)
    for length in (20, 25, 32):
        with of.recording(None):
            of(fused_qwen, of_length(length))
        found = of(fused_qwen, of_length(length))
        assert torch.equal(found, recording.evaluate(fused_qwen, of_length(length)))
    assert (len(of._records), recorder.num_replays) == (1, 3)


def test_one_record_serves_texts_of_many_lengths_among_ranks(fused_qwen: Any) -> None:
    @torch.no_grad()
    def program(group: Any) -> int:
        of, parallel = Graphs(ImitationRecorder(), CPU), parallel_from(group)
        for length in (20, 25, 32):
            with active(rehearsal(parallel)), of.recording(parallel):
                of(fused_qwen, of_length(length))
        return len(of._records)

    assert FakeCluster().run(Layout((0, 1), ulysses=2), program) == [1, 1]


@pytest.mark.usefixtures("counting")
def test_an_adapters_steps_are_the_same_with_padding(tiny_models: Mapping[str, Path]) -> None:
    adapter: Any = load_adapter(tiny_models["tiny-qwen-image"])
    fuse(adapter._pipeline.transformer)
    shapes, results = [], []
    for prompt in ("a fox", "a fox in the snow"):
        spec = adapter.geometry.resolve(
            JobSpec(id="job", prompt=prompt, seed=1, steps=2, width=64, height=64, true_cfg_scale=4.0)
        )
        embeds = adapter.encode(spec)
        latents = adapter.prepare(spec, embeds)[1]
        results.append(adapter.denoise(spec, embeds, None, latents, step=0))
        shapes.append([adapter.text_shape(spec, embeds, layout) for layout in LAYOUTS])
        with pytest.MonkeyPatch.context() as without:
            without.setattr(texts, "is_fast", lambda *_: False)
            wanted = adapter.denoise(spec, embeds, None, latents, step=0)
            exact = [(each.shape[1],) for each in embeds.tensors.values()]
            assert list(adapter.text_shape(spec, embeds, LAYOUTS[0])) == exact
        for name, tensor in wanted.tensors.items():
            assert torch.allclose(results[-1].tensors[name].float(), tensor.float(), atol=1e-4)
    for alone, half, _ in shapes:
        assert alone == half == ((32, (True,)),) * 2
    assert all(length % 4 == 0 for each in shapes for length, _ in each[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("length", "num_heads"), [(1088, 24), (1088, 12), (100, 4)])
def test_cudnn_leaves_padding_out_and_takes_counts_when_it_is_replayed(length: int, num_heads: int) -> None:
    device = torch.device("cuda:0")
    if not cudnn_attention.is_fast(device, torch.bfloat16):
        pytest.skip("needs nvidia-cudnn-frontend")
    values = random_qkv(2, length, num_heads, 128, device=device).bfloat16()
    qkv = values.clone()
    counts = torch.tensor([length - 44, length], dtype=torch.int32, device=device)
    attend(*qkv, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend(*qkv, counts)
    for first in (length - 44, length - 1, length // 2):
        counts[0] = first
        qkv.copy_(values)[:, 0, first:] = 1e3
        result.fill_(torch.nan)
        graph.replay()
        wanted = attend(*qkv.float(), counts)
        assert (result.float() - wanted).abs().max() < 0.02
        assert not result[0, first:].any()
