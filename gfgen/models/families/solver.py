"""A diffusers scheduler as a function: its state is part of the latents.

A scheduler object lives for one call. `sigmas` and `timesteps` follow from the number of steps and stay on
the CPU, where reading one does not wait for a device. `save_state` saves everything that changes from step
to step, `restore_state` restores it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from gfgen.models.families.adapter import SAMPLE, Fields, Scalar
from gfgen.models.families.outputs import carry_outputs, extrapolated
from gfgen.models.families.unipc import HostUniPC


@dataclass(frozen=True, slots=True)
class SolverState:
    """Names of the scheduler's attributes that one step passes to the next."""

    scalars: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    tensor_lists: tuple[str, ...] = ()


# Source: diffusers 0.42, every attribute that `step` assigns and a later `step` reads.
# UniPC's `timestep_list` is written only; `this_order` does not exist before the first step.
STATES: dict[type, SolverState] = {
    HostUniPC: SolverState(
        scalars=("_step_index", "_begin_index", "lower_order_nums", "this_order"),
        tensors=("last_sample",),
        tensor_lists=("model_outputs",),
    ),
    FlowMatchEulerDiscreteScheduler: SolverState(scalars=("_step_index", "_begin_index")),
}
IN_PLACE_OF: dict[type, type] = {UniPCMultistepScheduler: HostUniPC}
"""Replacements of schedulers that make the host wait for the device."""


def new_scheduler(template: Any, *, set_timesteps: Callable[[Any], None], **overrides: Any) -> Any:
    """A scheduler of the template's class and config with some values replaced; the template is unchanged."""
    kind: Any = IN_PLACE_OF.get(type(template), type(template))
    assert kind in STATES, f"no state is known for {kind.__name__}"
    given = {name: template.config[name] for name in _parameters(kind) if name in template.config}
    scheduler = kind(**(given | overrides))
    set_timesteps(scheduler)
    return scheduler


@functools.cache
def _parameters(kind: type) -> tuple[str, ...]:
    """Parameters of its config; looking them up at every step, as `from_config` does, takes a millisecond."""
    return tuple(inspect.signature(kind).parameters)


def save_state(scheduler: Any, sample: Any) -> Fields:
    """The artifact `latents`: the sample and the scheduler's state."""
    state = STATES[type(scheduler)]
    tensors = {SAMPLE: sample}
    for name in state.tensors:
        if getattr(scheduler, name) is not None:
            tensors[name] = getattr(scheduler, name)
    for name in state.tensor_lists:
        for idx, tensor in enumerate(getattr(scheduler, name)):
            if tensor is not None:
                tensors[_item_name(name, idx)] = tensor
    scalars: dict[str, Scalar] = {name: getattr(scheduler, name, None) for name in state.scalars}
    return Fields(tensors, scalars)


def restore_state(scheduler: Any, latents: Fields) -> Any:
    """Make a new scheduler continue where `save_state` left another; returns the sample."""
    state = STATES[type(scheduler)]
    for name in state.scalars:
        if latents.scalars[name] is not None:
            setattr(scheduler, name, latents.scalars[name])
    for name in state.tensors:
        setattr(scheduler, name, latents.tensors.get(name))
    for name in state.tensor_lists:
        length = len(getattr(scheduler, name))
        setattr(scheduler, name, [latents.tensors.get(_item_name(name, idx)) for idx in range(length)])
    return latents.tensors[SAMPLE]


class Solver:
    """A scheduler where a job's latents have brought it, before one step."""

    def __init__(self, scheduler: Any, latents: Fields, *, step: int) -> None:
        self.scheduler, self.latents = scheduler, latents
        self.sample = restore_state(scheduler, latents)
        self.timestep = scheduler.timesteps[step]

    def next_state(self, predicted: Any, *, pin: Callable[[Any], Any] | None = None) -> Fields:
        """The artifact `latents` after the step; `pin` changes its sample."""
        sample = self.scheduler.step(predicted, self.timestep, self.sample, return_dict=False)[0]
        return save_state(self.scheduler, sample if pin is None else pin(sample))


def stacked(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Samples of several jobs as one batch; a single one stays the same object."""
    return samples[0] if len(samples) == 1 else torch.cat(list(samples))


def extrapolated_step(scheduler: Any, latents: Fields, *, step: int) -> Fields:
    (output,) = extrapolated(latents, step=step)
    state = Solver(scheduler, latents, step=step).next_state(output)
    carry_outputs(state, latents)
    return detach_from(latents, state)


def detach_from(given: Fields, result: Fields) -> Fields:
    """The result with every tensor that shares storage with a given one copied.

    A multistep solver keeps given tensors (the last sample, the previous output). Without the copy, artifacts
    would keep each other's storage alive.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in given.tensors.values()}
    tensors = {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor
        for name, tensor in result.tensors.items()
    }
    return Fields(tensors, result.scalars)


def _item_name(name: str, idx: int) -> str:
    """model_outputs, 1 -> model_output_1."""
    return f"{name.removesuffix('s')}_{idx}"
