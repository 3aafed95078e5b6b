"""Forwards that take turns at a transformer's blocks: their order, their failures, and equal bits."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from gfc_fake import FakeCluster
from shared_steps import CASES, SharedJob, equal, prepare_job
from small_checkpoints import save_checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel

from gfgen.errors import AbortedError
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import kernels, stop_checks
from gfgen.models.parallel import cudnn_attention, sequence_parallel
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.streaming import turns
from gfgen.models.streaming.turns import in_turns, pause

torch.set_num_threads(1)

NAME: ContextVar[str] = ContextVar("name", default="")


class Recording:
    """Calls that note which block they compute, and whether they are the last one there."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def forward(self, name: str, blocks: Sequence[object]) -> str:
        for block in blocks:
            is_last = pause(block)
            self.seen.append(f"{name}{block}" + "|" * is_last)
        return name

    def call(self, name: str, *blocks: object) -> Callable[[], str]:
        return functools.partial(self.forward, name, blocks)


def test_all_calls_come_to_a_block_before_one_goes_on() -> None:
    recording = Recording()
    assert in_turns([recording.call(name, 0, 1, 2) for name in "abc"]) == ["a", "b", "c"]
    assert recording.seen == ["a0", "b0", "c0|", "a1", "b1", "c1|", "a2", "b2", "c2|"]


def test_calls_that_end_early_leave_the_rest_to_the_others() -> None:
    recording = Recording()
    assert in_turns([recording.call("a", 0), recording.call("b"), recording.call("c", 0, 1)]) == [*"abc"]
    assert recording.seen == ["a0", "c0|", "c1|"]


def test_calls_at_other_blocks_wait_until_the_first_call_comes_there_or_has_ended() -> None:
    recording = Recording()
    in_turns([recording.call("a", "x", "y"), recording.call("b", "y", "z"), recording.call("c", "w")])
    assert recording.seen == ["ax|", "ay", "by|", "bz|", "cw|"]


def test_one_call_and_a_call_outside_do_not_wait() -> None:
    recording, here = Recording(), threading.get_ident()
    assert in_turns([recording.call("a", 0, 1)]) == ["a"]
    assert pause()
    assert recording.seen == ["a0|", "a1|"]
    assert in_turns([threading.get_ident]) == [here]
    assert in_turns([]) == []


def test_calls_within_calls_share_each_block_with_all_others() -> None:
    recording = Recording()

    def step(name: str, number: int) -> list[str]:
        return in_turns([recording.call(f"{name}{branch}", 0, 1) for branch in "+-"[:number]])

    found = in_turns([functools.partial(step, "a", 2), functools.partial(step, "b", 1)])
    assert found == [["a+", "a-"], ["b+"]]
    assert recording.seen == ["a+0", "a-0", "b+0|", "a+1", "a-1", "b+1|"]


@pytest.mark.parametrize("seed", range(20))
def test_any_calls_compute_all_of_their_blocks_in_order_and_one_read_serves_equal_ones(seed: int) -> None:
    drawn = random.Random(seed)
    recording, lengths = Recording(), [drawn.randrange(5) for _ in range(drawn.randrange(2, 6))]
    in_turns([recording.call(f"{idx}:", *range(length)) for idx, length in enumerate(lengths)])
    order = [entry.rstrip("|").split(":") for entry in recording.seen]
    for idx, length in enumerate(lengths):
        assert [int(block) for name, block in order if int(name) == idx] == list(range(length))
    assert [int(block) for _, block in order] == sorted(int(block) for _, block in order)
    assert sum(entry.endswith("|") for entry in recording.seen) == max(lengths)


@pytest.mark.parametrize("at", [0, 1])
def test_the_first_exception_is_raised_when_the_others_have_left(at: int) -> None:
    left: list[str] = []
    reads: list[int] = []

    def other(name: str) -> None:
        try:
            for block in range(3):
                pause(block)
                reads.append(block)
        finally:
            with contextlib.suppress(BaseException):
                pause("while it leaves")
            left.append(name)

    def fails() -> None:
        for block in range(at):
            pause(block)
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"):
        in_turns([functools.partial(other, "a"), fails, functools.partial(other, "c")])
    assert left == (["a", "c"] if at else ["a"])  # without a block before, the last one has not begun
    assert reads == [0] * at


def test_a_call_that_fails_within_a_call_stops_all_others() -> None:
    left: list[str] = []

    def branch(name: str) -> None:
        try:
            pause(0)
            if name == "b-":
                raise AbortedError("the task was stopped")
            pause(1)
        finally:
            left.append(name)

    def step(name: str) -> None:
        in_turns([functools.partial(branch, f"{name}+"), functools.partial(branch, f"{name}-")])

    with pytest.raises(AbortedError):
        in_turns([functools.partial(step, "a"), functools.partial(step, "b")])
    assert left == ["b-", "b+", "a+", "a-"]


def test_calls_have_the_modes_and_contexts_of_the_caller_and_keep_theirs_to_themselves() -> None:
    watch = stop_checks.Watch(lambda: False)
    seen: list[object] = []

    def call(name: str, *, grad: bool) -> None:
        token = NAME.set(NAME.get() + name)
        with torch.set_grad_enabled(grad), kernels.using("fused" if grad else "compiled"):
            for _ in range(2):
                pause()
                seen.append((NAME.get(), torch.is_grad_enabled(), kernels.present_choice()))
        NAME.reset(token)
        seen.append((torch.is_grad_enabled(), kernels.present_choice(), stop_checks._WATCH.get() is watch))

    NAME.set("in ")
    with torch.no_grad(), kernels.using("own"), stop_checks.watching(watch):
        in_turns([functools.partial(call, "a", grad=True), functools.partial(call, "b", grad=False)])
        assert (NAME.get(), torch.is_grad_enabled(), kernels.present_choice()) == ("in ", False, "own")
    one, other, end = ("in a", True, "fused"), ("in b", False, "compiled"), (False, "own", True)
    assert seen == [one, other, one, end, other, end]


@pytest.mark.parametrize("mode", [True, False])
def test_inference_mode_and_the_number_of_threads_are_the_callers(mode: bool) -> None:
    with torch.inference_mode(mode):
        found = in_turns([torch.is_inference_mode_enabled, torch.is_inference_mode_enabled])
    assert found == [mode, mode]
    assert in_turns([torch.get_num_threads] * 2) == [1, 1]


def test_draws_from_pytorchs_own_generator_are_those_of_each_call_alone() -> None:
    def draws(seed: int) -> list[float]:
        torch.manual_seed(seed)
        found = []
        for _ in range(3):
            pause()
            found.append(float(torch.rand(())))
        return found

    alone = [draws(seed) for seed in (1, 2)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert in_turns([functools.partial(draws, seed) for seed in (1, 2)]) == alone
    assert torch.equal(torch.get_rng_state(), before)


def test_each_call_has_the_attentions_that_it_chose() -> None:
    """PyTorch has one choice for all threads."""

    def call(chosen: SDPBackend) -> list[bool]:
        seen = []
        with sdpa_kernel(chosen):
            for block in range(2):
                pause(block)
                seen.append(torch.backends.cuda.flash_sdp_enabled())
        return seen

    before = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    choices = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION
    assert in_turns([functools.partial(call, each) for each in choices]) == [
        [True] * 2,
        [False] * 2,
        [False] * 2,
    ]
    assert (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before


def test_calls_use_the_handles_and_plans_of_their_callers_thread() -> None:
    found = in_turns([cudnn_attention.kept, lambda: in_turns([cudnn_attention.kept] * 2)[1]])
    assert found == [cudnn_attention.kept()] * 2
    others: list[object] = []
    thread = threading.Thread(target=lambda: others.append(cudnn_attention.kept()))
    thread.start()
    thread.join()
    assert others != [cudnn_attention.kept()]


# Transformers -----------------------------------------------------------------------------------


def waits(block: object, args: object) -> None:
    """A hook of a block; ranks may be threads around one model."""
    pause(block)


class Reads:
    """Hooks that pause at each block, as those that read blocks do, and note the reads."""

    def __init__(self, *transformers: Any) -> None:
        self.blocks: list[str] = []
        """Read one after the other: a block that serves several forwards counts once."""
        self.num_computed = 0
        self._is_over = True
        for number, transformer in enumerate(transformers):
            transformer.gfgen_stream = True
            for name, module in transformer.named_modules():
                if isinstance(module, torch.nn.ModuleList) and "blocks" in name and "." not in name:
                    for idx, block in enumerate(module):
                        block.register_forward_pre_hook(
                            functools.partial(self._read, f"{number}:{name}{idx}")
                        )

    def _read(self, name: str, block: object, args: object) -> None:
        is_last = pause(block)
        if self._is_over:
            self.blocks.append(name)
        assert self.blocks[-1] == name, "another block was read before all had used this one"
        self._is_over = is_last
        self.num_computed += 1

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.blocks, self.num_computed = [], 0
        yield


@pytest.fixture(scope="module")
def adapters() -> dict[str, Any]:
    return {}


def transformers_of(adapter: Any) -> list[Any]:
    found = getattr(adapter, "_experts", None) or [getattr(adapter, "_pipeline", adapter).transformer]
    return [each for each in found if each is not None]


def reading(adapter: Any) -> Reads:
    if not hasattr(adapter, "reads"):
        adapter.reads = Reads(*transformers_of(adapter))
    reads: Reads = adapter.reads
    return reads


def steps_of(*jobs: SharedJob, at: Sequence[int]) -> list[Any]:
    """Steps of several jobs, each of which has come to another one, in turns."""
    before = []
    for job, step in zip(jobs, at, strict=True):
        latents = job.latents
        for earlier in range(step):
            latents = job.step(latents, earlier)
        before.append(functools.partial(job.step, latents, step))
    return before


@pytest.mark.parametrize("name", CASES)
def test_both_branches_share_the_reads_and_give_what_they_give_one_after_the_other(
    tiny_models: Mapping[str, Path], picture: Path, adapters: dict[str, Any], name: str
) -> None:
    job = prepare_job(tiny_models, picture, {}, name)
    wanted = job.denoise()
    reads = reading(job.adapter)
    assert job.adapter.takes_turns
    with reads.counted():
        found = job.denoise()
    assert equal(found, wanted)
    assert reads.num_computed == 2 * len(reads.blocks)


@pytest.mark.parametrize("degrees", [(1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", ["5b-text", "qwen"])
def test_branches_in_turn_on_several_ranks_give_what_they_give_one_after_the_other(
    tiny_models: Mapping[str, Path], picture: Path, name: str, degrees: tuple[int, int, int]
) -> None:
    """Texts of a branch have lengths of their own, which ranks that share it cut."""
    cfg, ulysses, ring = degrees
    layout = Layout(tuple(range(cfg * ulysses * ring)), cfg=cfg, ulysses=ulysses, ring=ring)
    job = prepare_job(tiny_models, picture, {}, name, negative_prompt="dark, and much longer than the other")

    def results() -> list[Any]:
        return FakeCluster().run(layout, lambda group: job.denoise(parallel_from(group)))

    wanted = results()
    for transformer in transformers_of(job.adapter):
        transformer.gfgen_stream = True
        for block in next(m for m in transformer.modules() if isinstance(m, torch.nn.ModuleList)):
            block.register_forward_pre_hook(waits)
    assert all(equal(found, own) for found, own in zip(results(), wanted, strict=True))


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny-wan", "tiny-qwen-image"])
def test_steps_of_unequal_jobs_share_the_reads_and_give_what_each_gives_alone(
    tiny_models: Mapping[str, Path], model: str, dtype: str, guided: bool
) -> None:
    adapter: Any = load_adapter(tiny_models[model], dtype=dtype)
    reads = reading(adapter)
    is_video = "wan" in model

    def job(size: int, seed: int, guidance: bool, **fields: Any) -> SharedJob:
        scale = {"guidance_scale" if is_video else "true_cfg_scale": 3.0 if guidance else 1.0}
        if guidance:
            fields["negative_prompt"] = "dark"
        job_id, prompt = str(size), "a fox " * seed
        spec = JobSpec(id=job_id, prompt=prompt, width=size, height=48, seed=seed, **scale, **fields)
        spec = adapter.geometry.resolve(spec)
        encoded = adapter.encode(spec)
        return SharedJob(adapter, spec, encoded, *adapter.prepare(spec, encoded))

    frames = {"frames": 5} if is_video else {}
    jobs = [job(64, 1, guided, steps=4, **frames), job(80, 2, True, steps=3, **frames)]
    jobs.append(job(48, 4, guided, steps=5))
    steps = steps_of(*jobs, at=(3, 1, 0))
    alone = [step() for step in steps]
    with reads.counted():
        together = in_turns(steps)
    assert all(equal(*pair) for pair in zip(together, alone, strict=True))
    num_forwards = sum(2 if adapter.geometry.uses_cfg(each.spec) else 1 for each in jobs)
    assert reads.num_computed == num_forwards * len(reads.blocks)


def test_jobs_at_different_experts_read_one_expert_after_the_other(
    tiny_models: Mapping[str, Path], picture: Path
) -> None:
    adapters: dict[str, Any] = {}
    jobs = [prepare_job(tiny_models, picture, adapters, "a14b-text") for _ in range(3)]
    steps = steps_of(*jobs, at=(0, 3, 0))
    alone = [step() for step in steps]
    reads = reading(jobs[0].adapter)
    with reads.counted():
        together = in_turns(steps)
    assert all(equal(*pair) for pair in zip(together, alone, strict=True))
    assert [block.partition(":")[0] for block in reads.blocks] == sorted(b[0] for b in reads.blocks)
    assert len(set(reads.blocks)) == len(reads.blocks)


@pytest.mark.parametrize("pipeline", ["FluxPipeline", "StableDiffusion3Pipeline"])
def test_steps_of_any_pipeline_share_the_reads(tmp_path: Path, pipeline: str) -> None:
    adapter: Any = load_adapter(save_checkpoint(pipeline, tmp_path))
    jobs = []
    for seed, (size, scale) in enumerate([(64, 3.0), (96, 5.0)]):
        spec = JobSpec(
            id=str(seed), prompt="a fox", width=size, height=64, steps=4, guidance_scale=scale, seed=seed
        )
        spec = adapter.geometry.resolve(spec)
        prompt = adapter.encode(spec)
        jobs.append(SharedJob(adapter, spec, prompt, *adapter.prepare(spec, prompt)))
    steps = steps_of(*jobs, at=(1, 2))
    alone = [step() for step in steps]
    adapter._pipeline = adapter.pipeline
    reads = reading(adapter)
    assert adapter.takes_turns
    with reads.counted():
        together = in_turns(steps)
    assert all(equal(*pair) for pair in zip(together, alone, strict=True))
    assert reads.num_computed == 2 * len(reads.blocks)
    assert turns.present_place() == 0
    assert sequence_parallel.present_sharing() is None
