"""Both branches of guidance in one forward: what two forwards give, for every family, alone and shared.

Qwen-Image's blocks are fused for it, in fp32: prompts of 7 and 6 tokens then go without a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gfc_fake import FakeCluster
from shared_steps import CASES, STEPS, TOLERANCE, SharedJob, distance, equal, prepare_job

from gfgen.layout import Layout
from gfgen.models.families import guidance
from gfgen.models.families.adapter import Fields
from gfgen.models.families.guidance import BatchRule, is_batch_faster
from gfgen.models.fast.fused import fuse
from gfgen.models.parallel.parallel import parallel_from

torch.set_num_threads(1)

MakeJob = Callable[[str], SharedJob]


@pytest.fixture(scope="module")
def make_job(tiny_models: Mapping[str, Path], picture: Path) -> MakeJob:
    adapters: dict[str, Any] = {}

    @functools.cache
    def make(name: str) -> SharedJob:
        job = prepare_job(tiny_models, picture, adapters, name)
        assert {"prompt_embeds", "negative_prompt_embeds"} == job.prompt.tensors.keys()
        return job

    return make


@pytest.fixture(scope="module")
def in_turn(make_job: MakeJob) -> Mapping[str, Fields]:
    """By case, the final latents of two forwards a step; then Qwen-Image's blocks are fused."""
    found = {name: make_job(name).denoise() for name in CASES}
    fuse(make_job("qwen").adapter._pipeline.transformer)
    return found


@pytest.fixture(scope="module")
def in_batch(make_job: MakeJob, in_turn: Mapping[str, Fields]) -> Callable[[str], Fields]:
    """By case, the final latents on one rank, in a test that is always in batch."""
    return functools.cache(lambda name: make_job(name).denoise())


@pytest.fixture
def always_in_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "is_batch_faster", lambda *_, **__: True)


def transformers_of(job: SharedJob) -> list[Any]:
    """A job's transformers, counting their forwards in `num_forwards`."""
    found = getattr(job.adapter, "_experts", None) or [job.adapter._pipeline.transformer]
    return [each for each in found if each is not None]


def count_forwards(job: SharedJob, program: Callable[[], Fields]) -> tuple[Fields, int]:
    count = 0

    def hook(*_: object) -> None:
        nonlocal count
        count += 1

    handles = [each.register_forward_hook(hook) for each in transformers_of(job)]
    try:
        return program(), count
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.usefixtures("always_in_batch")
@pytest.mark.parametrize("name", CASES)
def test_one_forward_gives_what_two_give(name: str, make_job: MakeJob, in_turn: Mapping[str, Fields]) -> None:
    job, wanted = make_job(name), in_turn[name]
    found, num_forwards = count_forwards(job, job.denoise)
    assert num_forwards == STEPS
    assert distance(found, wanted) < TOLERANCE


@pytest.mark.usefixtures("always_in_batch")
def test_blocks_that_are_not_fused_get_a_text_in_each_forward(
    tiny_models: Mapping[str, Path], picture: Path, in_turn: Mapping[str, Fields]
) -> None:
    """As those of a quantized checkpoint, which cannot ignore the padding of the shorter text."""
    job = prepare_job(tiny_models, picture, {}, "qwen")
    assert equal(job.denoise(), in_turn["qwen"])


@pytest.mark.usefixtures("always_in_batch")
@pytest.mark.parametrize("degrees", [(1, 2, 1), (1, 5, 1), (1, 1, 3), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ranks_share_one_forward(
    name: str,
    degrees: tuple[int, int, int],
    make_job: MakeJob,
    in_turn: Mapping[str, Fields],
    in_batch: Callable[[str], Fields],
) -> None:
    """As one rank alone in the same batch, which the test above compares with branches in turn."""
    job = make_job(name)
    wanted, separate = in_batch(name), in_turn[name]
    cfg, ulysses, ring = degrees
    layout = Layout(tuple(range(cfg * ulysses * ring)), cfg=cfg, ulysses=ulysses, ring=ring)
    results = FakeCluster().run(layout, lambda group: job.denoise(parallel_from(group)))
    assert all(equal(result, results[0]) for result in results)
    assert distance(results[0], wanted) < TOLERANCE
    assert distance(results[0], separate) < 2 * TOLERANCE  # the batch and the sharing each reorder sums


@pytest.mark.usefixtures("always_in_batch")
def test_halves_keep_a_branch_each(make_job: MakeJob, in_turn: Mapping[str, Fields]) -> None:
    layout = Layout((0, 1), cfg=2)
    results = FakeCluster().run(layout, lambda group: make_job("5b-text").denoise(parallel_from(group)))
    assert all(equal(result, in_turn["5b-text"]) for result in results)


@pytest.mark.usefixtures("always_in_batch")
def test_job_without_guidance_has_one_branch(
    tiny_models: Mapping[str, Path], picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare_job(tiny_models, picture, {}, "5b-text", guidance_scale=1.0)
    found = job.denoise()
    monkeypatch.undo()
    assert equal(found, job.denoise())


def test_branches_take_turns_where_nothing_was_measured(make_job: MakeJob) -> None:
    job = make_job("5b-text")
    _, num_forwards = count_forwards(job, job.denoise)
    assert num_forwards == 2 * STEPS


def test_rules_are_for_bf16_on_gpus_and_for_their_own_tokens_and_ranks(
    monkeypatch: pytest.MonkeyPatch, make_job: MakeJob
) -> None:
    job = make_job("5b-text")
    geometry, num_tokens = job.adapter.geometry, job.adapter.geometry.num_tokens(job.spec)

    def embeds(*lengths: int, is_cuda: bool = True, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
        return [SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, each, 64)) for each in lengths]

    def is_faster(rule: BatchRule, degree: int, given: Sequence[Any] | None = None) -> bool:
        monkeypatch.setattr(guidance, "BATCH_RULES", (rule,))
        return is_batch_faster(geometry, job.spec, sequence_degree=degree, embeds=given or embeds(20, 8))

    rule = BatchRule(geometry.family, 2, num_tokens, num_tokens + 1, 12)
    assert is_faster(rule, 2)
    assert not is_faster(rule, 4)
    assert not is_faster(rule._replace(from_tokens=num_tokens + 1, to_tokens=num_tokens + 9), 2)
    assert not is_faster(rule._replace(to_tokens=num_tokens), 2)
    assert not is_faster(rule._replace(family="qwen-image"), 2)
    assert is_faster(rule, 2, embeds(8, 20))
    assert not is_faster(rule, 2, embeds(21, 8))
    assert not is_faster(rule, 2, embeds(20))
    assert not is_faster(rule, 2, embeds(20, 8, dtype=torch.float32))
    assert not is_faster(rule, 2, embeds(20, 8, is_cuda=False))
