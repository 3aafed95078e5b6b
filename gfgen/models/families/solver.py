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
from torch import Tensor

from gfgen.models.families.adapter import SAMPLE, Fields, Scalar
from gfgen.models.families.outputs import carry_outputs, extrapolated


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """Coefficients of one step: tensors without dimensions on the CPU."""

    of_sample: Tensor
    of_output: Tensor
    of_rest: Tensor
    rks: list[Tensor]
    """For the earlier outputs, the latest first, and 1 for the newest."""
    matrix: Tensor
    right_side: Tensor


class HostUniPC(UniPCMultistepScheduler):  # type: ignore[misc]
    """UniPC that never waits for a device.

    diffusers' solver moves each step's coefficients to the samples' device and solves for them there. Every
    such copy and solution makes the host wait for all work on the device. Here the coefficients are computed
    on the CPU, where the sigmas are. On a CPU the arithmetic and its order are the same, so the bits are too.

    Legend: t the target sigma of a step, s its source.
    Source: diffusers 0.42 UniPCMultistepScheduler.multistep_uni_p_bh_update and multistep_uni_c_bh_update.
    """

    def multistep_uni_p_bh_update(
        self, model_output: Tensor, *args: Any, sample: Tensor, order: int, **kwargs: Any
    ) -> Tensor:
        """The predictor: from the present sigma to the next one."""
        assert not args
        assert not kwargs
        assert self.solver_p is None
        m_s = self.model_outputs[-1]
        found = self._coefficients(self.step_index + 1, order)
        differences = self._differences(found, m_s)
        rhos = torch.ones(1, dtype=sample.dtype) * 0.5  # diffusers simplifies order 2
        if order > 2:
            rhos = torch.linalg.solve(found.matrix[:-1, :-1], found.right_side[:-1]).to(sample.dtype)
        predicted: Tensor = found.of_sample * sample - found.of_output * m_s
        predicted = predicted - found.of_rest * _combined(rhos, differences)
        return predicted.to(sample.dtype)

    def multistep_uni_c_bh_update(
        self,
        this_model_output: Tensor,
        *args: Any,
        last_sample: Tensor,
        this_sample: Tensor,
        order: int,
        **kwargs: Any,
    ) -> Tensor:
        """The corrector: repeats the step to the present sigma with the model's output there."""
        assert not args
        assert not kwargs
        m_s = self.model_outputs[-1]
        found = self._coefficients(self.step_index, order)
        differences = self._differences(found, m_s)
        rhos = torch.ones(1, dtype=last_sample.dtype) * 0.5
        if order > 1:
            rhos = torch.linalg.solve(found.matrix, found.right_side).to(last_sample.dtype)
        corrected: Tensor = found.of_sample * last_sample - found.of_output * m_s
        rest = _combined(rhos[:-1], differences) + rhos[-1] * (this_model_output - m_s)
        corrected = corrected - found.of_rest * rest
        return corrected.to(last_sample.dtype)

    def _coefficients(self, t_idx: int, order: int) -> _Coefficients:
        """Coefficients of the step from sigma `t_idx` - 1 to sigma `t_idx`."""
        alpha_t, sigma_t = self._sigma_to_alpha_sigma_t(self.sigmas[t_idx])
        alpha_s, sigma_s = self._sigma_to_alpha_sigma_t(self.sigmas[t_idx - 1])
        lambda_s = self._lambda(t_idx - 1)
        h = self._lambda(t_idx) - lambda_s
        rks = [(self._lambda(t_idx - 1 - back) - lambda_s) / h for back in range(1, order)]
        rks.append(torch.ones(()))
        hh = -h if self.predict_x0 else h
        h_phi_1 = torch.expm1(hh)
        b_h = hh if self.config.solver_type == "bh1" else torch.expm1(hh)
        h_phi_k, factorial = h_phi_1 / hh - 1, 1
        matrix, right_side = [], []
        for power in range(order):
            matrix.append(torch.pow(torch.stack(rks), power))
            right_side.append(h_phi_k * factorial / b_h)
            factorial *= power + 2
            h_phi_k = h_phi_k / hh - 1 / factorial
        is_x0 = self.predict_x0
        return _Coefficients(
            of_sample=sigma_t / sigma_s if is_x0 else alpha_t / alpha_s,
            of_output=(alpha_t if is_x0 else sigma_t) * h_phi_1,
            of_rest=(alpha_t if is_x0 else sigma_t) * b_h,
            rks=rks,
            matrix=torch.stack(matrix),
            right_side=torch.stack(right_side),
        )

    def _lambda(self, idx: int) -> Tensor:
        alpha, sigma = self._sigma_to_alpha_sigma_t(self.sigmas[idx])
        return torch.log(alpha) - torch.log(sigma)

    def _differences(self, found: _Coefficients, m_s: Tensor) -> list[Tensor]:
        earlier = reversed(self.model_outputs[:-1])
        return [(output - m_s) / rk for output, rk in zip(earlier, found.rks[:-1], strict=False)]


def _combined(rhos: Tensor, differences: list[Tensor]) -> Tensor | int:
    """The sum of the differences, each times its rho."""
    if not differences:
        return 0
    if len(differences) == 1:
        return rhos[0] * differences[0]  # the same bits without a copy to the device
    on_device = rhos.to(differences[0].device, non_blocking=True)
    return torch.einsum("k,bkc...->bc...", on_device, torch.stack(differences, dim=1))


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
