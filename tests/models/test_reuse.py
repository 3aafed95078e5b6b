"""Steps that run no transformer: which they are, what they compute, and which jobs may have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from small_checkpoints import save_checkpoint

from gfgen.errors import JobError
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import Fields
from gfgen.models.families.registry import load_adapter
from gfgen.models.families.solver import extrapolated, keep_outputs
from gfgen.models.geometry.model import shipped_geometry
from gfgen.models.geometry.rules import chosen_steps
from gfgen.models.geometry.wan import WanGeometry
from gfgen.models.stepping.check import moved

JOB = JobSpec(id="a", prompt="a red cat", width=64, height=64, frames=1, steps=12, seed=3, reuse=0.4)


@pytest.mark.parametrize("num_steps", [12, 30, 50])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
def test_first_and_last_steps_and_those_around_a_switch_are_computed(num_steps: int, share: float) -> None:
    found = chosen_steps(num_steps, share, switch=8)
    assert len(set(found)) == len(found) <= share * num_steps
    assert not {0, 1, 7, 8, 9, num_steps - 1} & {*found}
    assert list(found) == sorted(found)


def test_outputs_go_on_in_a_line_through_the_last_two_computed_ones() -> None:
    state = Fields()
    for step in (0, 1, 4):
        made = Fields()
        keep_outputs(made, state, [torch.tensor([2.0 * step, 1.0])], step=step)
        state = made
    assert len(state.tensors) == 2
    (output,) = extrapolated(state, step=6)
    assert output.tolist() == [12.0, 1.0]


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-wan-moe", "tiny-qwen-image"])
def test_a_reused_step_runs_no_transformer_and_keeps_what_the_geometry_says(
    tiny_models: Mapping[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters: list[Any] = [load_adapter(tiny_models[name]) for _ in range(2)]
    assert made_of(adapters, JOB, monkeypatch) == made_of(adapters[:1], JOB, monkeypatch)


def test_a_pipeline_without_an_adapter_reuses_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_checkpoint("LTXPipeline", tmp_path)
    adapters: list[Any] = [load_adapter(checkpoint) for _ in range(2)]
    job = replace(JOB, frames=9)
    assert made_of(adapters, job, monkeypatch) == made_of(adapters[:1], job, monkeypatch)


def made_of(adapters: list[Any], job: JobSpec, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The latents of a job whose tasks alternate between adapters; reused steps may not evaluate them."""
    run = adapters[0].geometry.resolve(job)
    trajectory = adapters[0].geometry.trajectory(run)
    prompt = moved(adapters[0].encode(run))
    condition, latents = map(moved, adapters[-1].prepare(run, prompt))
    for step in range(run.steps):
        adapter = adapters[step % len(adapters)]
        given = (run, prompt, condition, latents)
        if trajectory.task(step + 2).stage is Stage.DENOISE:
            latents = moved(adapter.denoise(*given, step=step))
            continue
        if step > 4:  # each adapter knows the shapes by now
            with monkeypatch.context() as patch:
                patch.setattr(torch.nn.functional, "linear", _refuse)
                latents = moved(adapter.approximate(*given, step=step))
        else:
            latents = moved(adapter.approximate(*given, step=step))
    declared = {name for name, _, _ in trajectory.artifact("latents").fields}
    assert latents.tensors.keys() == declared or not declared
    sample: bytes = latents.tensors["sample"].contiguous().numpy().tobytes()
    return sample


def _refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("a layer was evaluated")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reuse": 0.75, "steps": 40}, "at most 0.7"),
        ({"reuse": 0.6, "steps": 20}, "8 steps give a better result"),
        ({"reuse": 0.5, "steps": 12}, "at most 0.4"),
        ({"reuse": 0.1, "steps": 20}, "at least 0.15"),
        ({"reuse": 0.4, "steps": 8}, "needs at least 12 steps"),
        ({"reuse": "if-late", "steps": 8}, "needs at least 12 steps"),
    ],
)
def test_a_share_that_fewer_steps_beat_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        shipped_geometry("qwen-image").resolve(JobSpec(id="a", prompt="a fox", **fields))


@pytest.mark.parametrize("steps", [1, 2, 23, 40])
@pytest.mark.parametrize("shift", [3.0, 12.0])
@pytest.mark.parametrize("boundary", [0.5, 0.875, 1.0])
def test_the_step_at_which_experts_change_is_that_of_the_scheduler(
    steps: int, shift: float, boundary: float
) -> None:
    geometry = shipped_geometry("wan2.2-t2v-a14b")
    assert isinstance(geometry, WanGeometry)
    job = JobSpec(id="a", prompt="a fox", steps=steps, flow_shift=shift, boundary_ratio=boundary)
    schedulers = (
        (3, UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=shift)),
        (0, FlowMatchEulerDiscreteScheduler(shift=shift)),
    )
    for num_tensors, scheduler in schedulers:
        scheduler.set_timesteps(steps)
        low = [step for step, t in enumerate(scheduler.timesteps) if t < boundary * 1000]
        variant = replace(geometry, num_solver_tensors=num_tensors)
        assert variant._switch(variant.resolve(job)) == (low[0] if low else None)
