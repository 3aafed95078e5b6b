"""Every family's steps on one to eight ranks: within rounding of one rank's, and equal on all.

They share heads, keys or both. Ranks are threads around one adapter (`gfc_fake`); the real arenas are
tested at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import ForkedRanks
from gfc_fake import FakeCluster
from shared_steps import CASES, STEPS, TOLERANCE, SharedJob, distance, equal, prepare_job

from gfgen.layout import Degrees, Layout
from gfgen.models.families.adapter import Fields
from gfgen.models.parallel.parallel import Parallel, parallel_from

torch.set_num_threads(1)

MakeJob = Callable[..., SharedJob]

TWO = 2
"""Steps where one model computes all: the second has what the solver carries."""
DEGREES = [
    *[(1, ulysses, 1) for ulysses in range(1, 9)],
    *[(2, ulysses, 1) for ulysses in range(1, 5)],
    *[(1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 2, 2), (1, 2, 3), (1, 3, 2), (1, 2, 4), (2, 1, 3), (2, 2, 2)],
    *[(1, 1, 1, 2), (1, 1, 1, 3), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 3), (1, 2, 2, 2), (2, 1, 2, 2)],
]
"""cfg, ulysses, ring, torus"""
WITH_ALL = ("5b-image", "qwen")
"""One case of each class of transformers; the others have a few degrees of each kind."""
SOME = [(1, 1, 1), (1, 4, 1), (1, 7, 1), (2, 3, 1), (1, 1, 3), (1, 3, 2), (1, 2, 2, 2), (2, 1, 2, 2)]
OF_SHAPES = [(1, 7, 1), (2, 3, 1), (1, 1, 3), (2, 1, 2, 2)]
"""Its adapter and class are those of 5b-image. Each rank has the keys of 512 words, so it takes longest."""


@pytest.fixture(scope="module")
def make_job(tiny_models: Mapping[str, Path], picture: Path) -> MakeJob:
    """Prepared jobs by case; the same one for the same arguments."""
    jobs: dict[str, SharedJob] = {}
    adapters: dict[str, Any] = {}

    def make(name: str, **changes: Any) -> SharedJob:
        key = repr((name, changes))
        if key not in jobs:
            jobs[key] = prepare_job(tiny_models, picture, adapters, name, **changes)
        return jobs[key]

    return make


@pytest.fixture(scope="module")
def alone(make_job: MakeJob) -> Callable[..., Fields]:
    """The latents on one rank after steps, by case; the final ones without a number."""
    return functools.cache(lambda name, steps=STEPS: make_job(name).denoise(steps=steps))


def degrees_of(name: str) -> list[tuple[int, ...]]:
    if name in WITH_ALL:
        return DEGREES
    return OF_SHAPES if name == "shapes-image" else SOME


def on_threads(layout: Layout, program: Callable[[Parallel], Any]) -> list[Any]:
    return FakeCluster().run(layout, lambda group: program(parallel_from(group)))


def layout_of(*degrees: int) -> Layout:
    return Layout(tuple(range(math.prod(degrees))), *degrees)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [(name, degrees) for name in CASES for degrees in degrees_of(name)],
    ids=str,
)
def test_any_degree_gives_the_result_of_one_rank(
    name: str, degrees: Degrees, make_job: MakeJob, alone: Callable[..., Fields]
) -> None:
    steps = TWO if name in WITH_ALL else STEPS  # other cases have two experts
    results = on_threads(layout_of(*degrees), functools.partial(make_job(name).denoise, steps=steps))
    assert all(equal(result, results[0]) for result in results)
    assert distance(results[0], alone(name, steps)) < TOLERANCE
    if max(degrees[1:]) == 1:  # whole branches: nothing is reordered
        assert equal(results[0], alone(name, steps))


@pytest.mark.parametrize(("name", "scale"), [("5b-text", "guidance_scale"), ("qwen", "true_cfg_scale")])
def test_job_without_guidance_is_shared_too(name: str, scale: str, make_job: MakeJob) -> None:
    job = make_job(name, **{scale: 1.0})
    results = on_threads(layout_of(1, 3), job.denoise)
    assert all(equal(result, results[0]) for result in results)
    assert distance(results[0], job.denoise()) < TOLERANCE


def test_both_experts_take_part(make_job: MakeJob) -> None:
    """Else the cases of A14B would not test what they are meant to."""
    for name in ("a14b-text", "a14b-image"):
        job, used = make_job(name), list[int]()
        handles = [
            expert.register_forward_hook(lambda *_, idx=idx: used.append(idx))  # noqa: B023
            for idx, expert in enumerate(job.adapter._experts)
        ]
        job.denoise()
        for handle in handles:
            handle.remove()
        assert set(used) == {0, 1}


def test_layout_may_change_at_every_step(make_job: MakeJob, alone: Callable[[str], Fields]) -> None:
    layouts = (layout_of(1, 5), layout_of(1, 2, 3), layout_of(2, 3), layout_of(1, 1, 2))
    for name in ("5b-image", "qwen"):
        job = make_job(name)
        latents = job.latents
        for step, layout in enumerate(layouts):
            latents = on_threads(layout, lambda parallel: job.step(latents, step, parallel))[-1]  # noqa: B023
        assert distance(latents, alone(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["5b-text", "qwen"])
def test_decoded_pictures_differ_by_one_grey_level_at_most(
    name: str, make_job: MakeJob, alone: Callable[[str], Fields]
) -> None:
    job = make_job(name)
    (shared, *_) = on_threads(layout_of(1, 7), job.denoise)
    pictures = [
        job.adapter.decode(job.spec, latents).tensors["frames"].int() for latents in (shared, alone(name))
    ]
    assert (pictures[0] - pictures[1]).abs().max() <= 1


# --- the real arenas


def make_steps(models: Mapping[str, Path], picture: Path) -> Callable[..., Fields]:
    """In the process that the ranks are forked from."""
    jobs = {name: prepare_job(models, picture, {}, name) for name in ("5b-image", "qwen")}

    def steps(parallel: Parallel, name: str, latents: Fields | None, step: int) -> Fields:
        job = jobs[name]
        return job.denoise(parallel, steps=TWO) if latents is None else job.step(latents, step, parallel)

    return steps


@pytest.fixture(scope="module")
def forked(tiny_models: Mapping[str, Path], picture: Path) -> Iterator[ForkedRanks]:
    ranks = ForkedRanks(4, make_steps, tiny_models, picture)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("scheduler", ["lcm", "heun", "sa_solver", "dpmpp_2m_sde"])
@pytest.mark.parametrize("name", ["5b-image", "a14b-text", "qwen"])
def test_all_ranks_draw_the_noise_of_one(name: str, scheduler: str, make_job: MakeJob) -> None:
    job = make_job(name, scheduler={"class": scheduler})
    alone = job.denoise()
    first, *others = on_threads(layout_of(2, 2), job.denoise)
    assert all(equal(first, other) for other in others)
    assert distance(first, alone) < TOLERANCE


@pytest.mark.parametrize("name", ["5b-image", "qwen"])
def test_equal_layout_shapes_give_equal_bits_on_any_processes_in_any_order(
    name: str, make_job: MakeJob, forked: ForkedRanks
) -> None:
    shapes = {
        (1, 2, 1): [(0, 1), (3, 1), (2, 3)],
        (1, 3, 1): [(0, 1, 2), (3, 0, 2)],
        (1, 4, 1): [(0, 1, 2, 3), (2, 0, 3, 1)],
        (2, 1, 1): [(0, 3), (2, 1)],
        (2, 2, 1): [(0, 1, 2, 3), (3, 1, 0, 2)],
        (1, 1, 3): [(0, 1, 2), (2, 3, 1)],
        (1, 2, 2): [(0, 1, 2, 3), (3, 1, 0, 2)],
        (2, 1, 2): [(0, 1, 2, 3), (1, 3, 2, 0)],
        (1, 1, 1, 2): [(0, 1), (3, 1)],
        (1, 1, 2, 2): [(0, 1, 2, 3), (1, 3, 2, 0)],
        (1, 2, 1, 2): [(2, 0, 3, 1)],
    }
    for degrees, rank_sets in shapes.items():
        wanted = on_threads(layout_of(*degrees), functools.partial(make_job(name).denoise, steps=TWO))[0]
        for ranks in rank_sets:
            layout = Layout(ranks, *degrees)
            results = forked.run(layout, name, None, 0)
            assert all(equal(result, wanted) for result in results), ranks


@pytest.mark.parametrize("name", ["5b-image", "qwen"])
def test_steps_move_between_overlapping_processes(
    name: str, make_job: MakeJob, alone: Callable[[str], Fields], forked: ForkedRanks
) -> None:
    layouts = (
        Layout((2,)),
        Layout((0, 1), ring=2),
        Layout((3, 1, 2, 0), ulysses=2, ring=2),
        Layout((1, 3, 0), ulysses=3),
    )
    latents = make_job(name).latents
    for step, layout in enumerate(layouts):
        latents = forked.run(layout, name, latents, step)[-1]
    assert len(layouts) == STEPS
    assert distance(latents, alone(name)) < TOLERANCE
