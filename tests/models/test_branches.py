"""Steps of pipelines on two halves of a layout: which half evaluates what, and what the step gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gfc_fake import FakeCluster
from torch import Tensor, nn

from benchmarks.shared_pipelines import LAYOUTS, SteppedRanks, are_equal, distance
from benchmarks.shared_transformers import Ranks, make
from gfgen.errors import ModelError
from gfgen.layout import Layout
from gfgen.models.parallel.branches import shared_step, watch
from gfgen.models.parallel.parallel import Parallel, parallel_from

X = torch.arange(12.0).view(2, 3, 2)
IDS = torch.tensor([[1.0], [5.0]])
"""Of two axes; they look like a batch of two."""


class Small(nn.Module):
    """Stands for a transformer; counts the samples of its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[int] = []

    def forward(
        self, hidden_states: Any, text: Any = None, img_ids: Any = None, residuals: Any = ()
    ) -> tuple[Any]:
        self.samples.append(len(hidden_states))
        if isinstance(hidden_states, list):
            return ([x + 1 for x in hidden_states],)
        out = 2 * hidden_states
        for extra in ([] if text is None else [text]) + list(residuals):
            out = out + extra
        return (out if img_ids is None else out * img_ids.sum(),)


Step = Callable[[Small], Tensor]


def on_halves(step: Step) -> tuple[list[Tensor], list[list[int]]]:
    """The result of the step on each half, and the samples of each evaluation there.

    It is the second step: before the first one each rank evaluates a call of each shape alone.
    """

    def program(parallel: Parallel) -> tuple[Tensor, list[int]]:
        model = Small()
        watch(model)
        shared_step(lambda: step(model), parallel)
        model.samples.clear()
        return shared_step(lambda: step(model), parallel), model.samples

    results, samples = zip(*Ranks(2).run(Layout((0, 1), cfg=2), program), strict=True)
    return list(results), list(samples)


def in_two_calls(model: Small) -> Tensor:
    known = model(X[:1], text=torch.ones(1))[0].float() * 1.5  # a copy in front of the other call
    unguided = model(hidden_states=X[1:])[0]
    return unguided + 3 * (known - unguided)


def in_a_batch(model: Small) -> Tensor:
    texts = {"text": X, "residuals": [X, X + 1], "img_ids": IDS}
    one, other = model(X, **texts)[0].chunk(2)
    return one + 3 * (other - one)


def in_a_batch_and_a_call(model: Small) -> Tensor:
    one, other = model(X)[0].chunk(2)
    return one + other - model(X[:1], text=X[1:])[0]


def in_a_list(model: Small) -> Tensor:
    one, other = model([X[0], X[1]])[0]
    return one - 2 * other


def in_one_call(model: Small) -> Tensor:
    return model(X[:1])[0]


def in_place_afterwards(model: Small) -> Tensor:
    latents = X[:1].clone()
    one = model(latents)[0]
    latents += one
    return latents + model(X[1:])[0]


@pytest.mark.parametrize(
    ("step", "samples"),
    [
        (in_two_calls, [[1], [1]]),
        (in_a_batch, [[1], [1]]),
        (in_a_batch_and_a_call, [[2], [1]]),
        (in_a_list, [[1], [1]]),
        (in_one_call, [[1], []]),
        (in_place_afterwards, [[1], [1]]),
    ],
)
def test_halves_evaluate_their_samples_and_get_all_results(step: Step, samples: list[list[int]]) -> None:
    results, evaluated = on_halves(step)
    assert all(torch.equal(result, step(Small())) for result in results)
    assert evaluated == samples


def test_a_call_that_depends_on_another_one_becomes_nan() -> None:
    results, _ = on_halves(lambda model: model(model(X[:1])[0])[0])
    assert all(result.isnan().all() for result in results)


def test_a_result_without_a_batch_is_refused() -> None:
    class Other(Small):
        def forward(self, hidden_states: Tensor) -> Any:  # type: ignore[override]
            return hidden_states, hidden_states.sum()

    def program(group: Any) -> Any:
        model = Other()
        watch(model)
        return shared_step(lambda: model(X), parallel_from(group))

    with pytest.raises(ModelError, match="Other returns more than tensors with a batch"):
        FakeCluster().run(Layout((0, 1), cfg=2), program)


def test_samples_that_depend_on_each_other_are_refused() -> None:
    """Perturbed-attention guidance (PAG) replaces processors by some that compute with the whole batch."""

    class PAGProcessor:
        pass

    def program(group: Any) -> Any:
        model = Small()
        model.processor = PAGProcessor()  # type: ignore[assignment]
        watch(model)
        return shared_step(lambda: in_a_batch(model), parallel_from(group))

    with pytest.raises(ModelError, match="Small with PAGProcessor cannot be shared among two halves"):
        FakeCluster().run(Layout((0, 1), cfg=2), program)


def test_calls_are_evaluated_in_the_state_that_the_step_gives_the_transformer() -> None:
    class Scaled(Small):
        scale = 1.0

        def forward(self, hidden_states: Any, **others: Any) -> tuple[Any]:  # type: ignore[override]
            return (self.scale * hidden_states,)

    def program(group: Any) -> Any:
        model = Scaled()
        watch(model)

        def step() -> Tensor:
            model.scale = 3.0
            result = in_two_calls(model)
            model.scale = 1.0
            return result

        return shared_step(step, parallel_from(group))

    wanted = Scaled()
    wanted.scale = 3.0
    results = FakeCluster().run(Layout((0, 1), cfg=2), program)
    assert all(torch.equal(result, in_two_calls(wanted)) for result in results)


def test_a_layout_without_halves_runs_the_step_once() -> None:
    model = Small()
    watch(model)
    results = FakeCluster().run(
        Layout((0, 1), ulysses=2),
        lambda group: shared_step(lambda: in_a_batch(model), parallel_from(group)),
    )
    assert model.samples == [2, 2]
    assert all(torch.equal(each, in_a_batch(Small())) for each in results)


def test_halves_of_several_ranks_share_tokens_too() -> None:
    model, inputs = make("flux")
    watch(model)
    other = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"].flip(1)}

    @torch.no_grad()
    def step() -> Tensor:
        torch.set_num_threads(1)
        one, two = (model(**each, return_dict=False)[0] for each in (inputs, other))
        return two + 3 * (one - two)

    found = Ranks().run(
        Layout(tuple(range(6)), cfg=2, ulysses=3), lambda parallel: shared_step(step, parallel)
    )
    wanted = step()
    assert float((found[0] - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("name", "samples"), [("FluxPipeline", [1, 1]), ("CogVideoXPipeline", [2]), ("ZImagePipeline", [2])]
)
def test_steps_of_pipelines_agree_with_one_rank(name: str, samples: list[int]) -> None:
    stepped = SteppedRanks(name, Ranks(4))
    wanted = stepped.alone(2)
    assert stepped.samples == samples * 2
    for layout in LAYOUTS.values():
        found = stepped.shared(layout, 2)
        assert distance(found[0], wanted) < 1e-5
        assert are_equal(found)
