"""A diffusers scheduler as a function: its state is part of the latents.

A scheduler object lives for one call. `sigmas` and `timesteps` follow from the number of steps and stay on
the CPU, where reading one does not wait for a device. `save_state` saves everything that changes from step
to step, with the generator of schedulers that draw noise; `Solver` restores it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import HOST, SAMPLE, Fields
from gfgen.models.geometry.rules import KEPT_OUTPUTS
from gfgen.models.parallel.parallel import held


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

    diffusers' solver moves each step's coefficients to the samples' device and solves for them there, which
    makes the host wait. Here they are computed on the CPU, where the sigmas are; on a CPU with the same bits.

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


# Source: diffusers 0.42, every attribute that `step` assigns and a later `step` reads.
SCALARS = (
    *("_step_index", "_begin_index", "lower_order_nums"),
    *("this_order", "this_predictor_order", "this_corrector_order"),
)
"""Each that a scheduler has; some do not exist before the first step."""
# UniPC's `timestep_list` is written only. Heun's attributes pass between the two evaluations of a step.
STATES: dict[str, tuple[str, ...]] = {
    "FlowMatchEulerDiscreteScheduler": (),
    "FlowMatchHeunDiscreteScheduler": (),
    "FlowMatchLCMScheduler": (),
    "HostUniPC": ("last_sample", "model_outputs"),
    "DPMSolverMultistepScheduler": ("model_outputs",),
    "DPMSolverSinglestepScheduler": ("sample", "model_outputs"),
    "DEISMultistepScheduler": ("model_outputs",),
    "SASolverScheduler": ("last_sample", "last_noise", "model_outputs", "timestep_list"),
}
"""Tensors, and lists of them that a schedule of steps begins with None."""
IN_PLACE_OF: dict[type, type] = {UniPCMultistepScheduler: HostUniPC}
NUM_SCHEDULERS = 8
"""Kept ready; jobs may have schedulers of their own."""
GENERATOR = f"{HOST}generator"


def scheduler_like(own: Any, options: Mapping[str, Any]) -> Any:
    """A scheduler with options of a job, and its own or another class; the rest as a pipeline's own one."""
    kind = getattr(diffusers, options.get("class", type(own).__name__))
    return kind.from_config(own.config, **{name: x for name, x in options.items() if name != "class"})


class Schedulers:
    """Makes the schedulers of a pipeline's jobs; its own one is unchanged."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self._like = functools.lru_cache(NUM_SCHEDULERS)(lambda text: scheduler_like(own, json.loads(text)))

    def template(self, spec: JobSpec) -> Any:
        """A scheduler with the job's class and config, to be copied."""
        return self._like(json.dumps(spec.scheduler, sort_keys=True)) if spec.scheduler else self._own

    def new(self, spec: JobSpec, *, sigmas: Any = None, mu: float | None = None, **overrides: Any) -> Any:
        """A scheduler with the noise levels of the job, else with `sigmas`, else with its own for the steps.

        It gets `sigmas` and `mu` if it accepts them.
        """
        template = self.template(spec)
        kind: Any = IN_PLACE_OF.get(type(template), type(template))
        assert kind.__name__ in STATES, f"no state is known for {kind.__name__}"
        given = {name: template.config[name] for name in parameters_of(kind) if name in template.config}
        scheduler = kind(**(given | overrides))
        sigmas = sigmas if spec.sigmas is None else np.array(spec.sigmas)
        takes = parameters_of(kind.set_timesteps)
        has_sigmas = sigmas is not None and "sigmas" in takes
        levels: dict[str, Any] = {"sigmas": sigmas} if has_sigmas else {"num_inference_steps": spec.steps}
        if mu is not None and "mu" in takes and scheduler.config.get("use_dynamic_shifting"):
            levels["mu"] = mu
        scheduler.set_timesteps(**levels)
        return scheduler


@functools.cache
def parameters_of(kind: Callable[..., Any]) -> tuple[str, ...]:
    """The names, kept because looking them up at every step, as `from_config` does, takes a millisecond."""
    return tuple(inspect.signature(kind).parameters)


def draws_noise(scheduler: Any) -> bool:
    """Whether its steps may draw noise from a generator."""
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return bool(scheduler.config.stochastic_sampling)
    return "generator" in inspect.signature(scheduler.step).parameters


def save_state(scheduler: Any, sample: Any, *, generator: torch.Generator | None = None) -> Fields:
    """The artifact `latents`: the sample, the scheduler's state, and a generator's if steps draw noise."""
    tensors = {SAMPLE: sample}
    for name in STATES[type(scheduler).__name__]:
        values = getattr(scheduler, name, None)
        pairs = zip(_keys(scheduler, name), values if isinstance(values, list) else [values], strict=True)
        tensors |= {key: tensor for key, tensor in pairs if tensor is not None}
    if generator is not None and draws_noise(scheduler):
        tensors[GENERATOR] = generator.get_state()
    scalars = {name: getattr(scheduler, name) for name in SCALARS if hasattr(scheduler, name)}
    return Fields(tensors, scalars)


def restore_state(scheduler: Any, latents: Fields) -> Any:
    """Make a new scheduler continue where `save_state` left another; returns the sample."""
    for name in SCALARS:
        if latents.scalars.get(name) is not None:
            setattr(scheduler, name, latents.scalars[name])
    for name in STATES[type(scheduler).__name__]:
        found = [latents.tensors.get(key) for key in _keys(scheduler, name)]
        is_list = isinstance(getattr(scheduler, name, None), list)
        setattr(scheduler, name, found if is_list else found[0])
    return latents.tensors[SAMPLE]


def _keys(scheduler: Any, name: str) -> list[str]:
    """Names in artifacts: model_outputs has model_output_0 and so on."""
    values = getattr(scheduler, name, None)
    if isinstance(values, list):
        return [f"{name.removesuffix('s')}_{idx}" for idx in range(len(values))]
    return ["first_sample" if name == SAMPLE else name]


class Solver:
    """A scheduler where a job's latents have brought it, before one step."""

    def __init__(self, scheduler: Any, latents: Fields, *, step: int) -> None:
        self.scheduler, self.latents = scheduler, latents
        self.sample = restore_state(scheduler, latents)
        number, steps = len(scheduler.timesteps), scheduler.num_inference_steps
        first, end = (-(-number * each // steps) for each in (step, step + 1))
        self.timesteps = scheduler.timesteps[first:end]
        """Of the step; two if its scheduler evaluates the transformer twice."""
        self.draws: dict[str, torch.Generator] = {}
        if (state := latents.tensors.get(GENERATOR)) is not None:
            self.draws = {"generator": torch.Generator("cpu")}
            self.draws["generator"].set_state(state)

    def advance(self, predicted: Any, timestep: Any) -> None:
        step = self.scheduler.step
        self.sample = step(predicted, timestep, self.sample, return_dict=False, **self.draws)[0]

    def state(self, *, pin: Callable[[Any], Any] | None = None) -> Fields:
        """The artifact `latents` after the step; `pin` changes its sample."""
        return save_state(self.scheduler, self.sample if pin is None else pin(self.sample), **self.draws)


def solved_step(
    scheduler: Any,
    latents: Fields,
    predict: Callable[[Tensor, Tensor], Tensor],
    *,
    step: int,
    pin: Callable[[Any], Any] | None = None,
    keeps_outputs: bool = False,
) -> Fields:
    """The artifact `latents` after a step. predict: the guided output for a sample at a timestep."""
    solver = Solver(scheduler, latents, step=step)
    outputs: list[Tensor] = []
    for timestep in solver.timesteps:
        outputs = [predict(solver.sample, timestep)]
        solver.advance(outputs[0], timestep)
    state = solver.state(pin=pin)
    if keeps_outputs:
        keep_outputs(state, latents, outputs, step=step)
    return detach_from(latents, state)


def extrapolated_step(scheduler: Any, latents: Fields, *, step: int) -> Fields:
    (output,) = extrapolated(latents, step=step)
    solver = Solver(scheduler, latents, step=step)
    solver.advance(output, solver.timesteps[0])
    state = solver.state()
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


# Outputs of transformers, kept and given ------------------------------------------------------------
# A transformer's guided output is the first argument of a scheduler's `step`, whatever a pipeline did to it.
# So outputs of any pipeline are caught, or replaced, on their way to its scheduler.


_STEPS = "reuse_steps"
"""A scalar of latents: the steps of KEPT_OUTPUTS, -1 for none."""
_NO_STEPS = [-1] * len(KEPT_OUTPUTS)
Exchange = Callable[[Tensor], Tensor]
# Per context and so per thread: ranks may be threads with schedulers of one class.
_EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)
_ARGUMENT = "model_output"


def keep_outputs(state: Fields, given: Fields, outputs: Sequence[Tensor], *, step: int) -> None:
    """Add the outputs of a computed step to its result, in place of the older ones that it was given."""
    carry_outputs(state, given)
    steps = list(_steps_of(given))
    slot = steps.index(min(steps))
    steps[slot] = step
    state.scalars[_STEPS] = steps
    state.tensors |= {_name(slot, number): output for number, output in enumerate(outputs)}


def carry_outputs(state: Fields, given: Fields) -> None:
    state.scalars[_STEPS] = list(_steps_of(given))
    state.tensors |= {x: given.tensors[x] for x in given.tensors if x.partition(":")[0] in KEPT_OUTPUTS}


def can_extrapolate(given: Fields) -> bool:
    """Whether two steps left outputs of equal shapes."""
    older, newer = _outputs_of(given, 0), _outputs_of(given, 1)
    return bool(older) and [x.shape for x in older] == [x.shape for x in newer]


def extrapolated(given: Fields, *, step: int) -> list[Tensor]:
    """The outputs of a step on the lines through the last two computed ones."""
    (first, second), found = _steps_of(given), []
    weight = (step - second) / (second - first)
    for one, other in zip(_outputs_of(given, 0), _outputs_of(given, 1), strict=True):
        start, end = one.float(), other.float()
        found.append((end + (end - start) * weight).to(one.dtype))
    return found


def _steps_of(given: Fields) -> list[int]:
    steps = given.scalars.get(_STEPS, _NO_STEPS)
    assert isinstance(steps, list)
    return [int(step) for step in steps]


def _outputs_of(given: Fields, slot: int) -> list[Tensor]:
    own = {name: x for name, x in given.tensors.items() if name.partition(":")[0] == KEPT_OUTPUTS[slot]}
    return [own[_name(slot, number)] for number in range(len(own))]


def _name(slot: int, number: int) -> str:
    """A step has several outputs if its pipeline has several schedulers."""
    return KEPT_OUTPUTS[slot] + (f":{number}" if number else "")


def watch_scheduler(scheduler: Any) -> None:
    """Let `catching` and `giving` see the steps of all schedulers of a class, permanently.

    Of the class, because pipelines copy their schedulers.
    """
    kind = type(scheduler)
    step = kind.step
    if hasattr(step, "__wrapped_by_gfgen__"):
        return

    @functools.wraps(step)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = _EXCHANGE.get()
        if exchange is None:
            return step(self, *args, **kwargs)
        with held(_EXCHANGE, None):  # a step may call that of its base class
            if _ARGUMENT in kwargs:
                kwargs[_ARGUMENT] = exchange(kwargs[_ARGUMENT])
            else:
                args = (exchange(args[0]), *args[1:])
            return step(self, *args, **kwargs)

    watched.__wrapped_by_gfgen__ = True  # type: ignore[attr-defined]
    kind.step = watched


def catching(caught: list[Tensor]) -> AbstractContextManager[None]:
    def catch(output: Tensor) -> Tensor:
        caught.append(output.clone())
        return output

    return held(_EXCHANGE, catch)


@contextmanager
def giving(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Inside, schedulers get these outputs, one for each of their steps.

    Raises: ModelError if there are fewer or more steps.
    """
    left = list(outputs)

    def give(output: Tensor) -> Tensor:
        if not left:
            raise ModelError(f"reuse: a step has more than {len(outputs)} outputs; leave reuse out")
        return left.pop(0)

    with held(_EXCHANGE, give):
        yield
    if left:
        raise ModelError(f"reuse: a step has fewer than {len(outputs)} outputs; leave reuse out")
