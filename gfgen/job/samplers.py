"""Names of samplers and noise schedules in A1111, ComfyUI and InvokeAI, as schedulers of diffusers.

"DPM++ 2M Karras", `dpmpp_2m_k` and `dpmpp_2m karras` are one: a sampler, and how its noise levels are spaced.

Source: the table of equivalents in diffusers' documentation (api/schedulers/overview); the names of samplers
in the documentation of ComfyUI (KSampler) and of InvokeAI (schedulers).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Options = Mapping[str, Any]
FLOW = "FlowMatch"  # schedulers of models that predict flow begin so

_EULER, _EULER_A, _HEUN = "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler"
_MULTISTEP, _LCM = "DPMSolverMultistepScheduler", "LCMScheduler"
_SDE = {"algorithm_type": "sde-dpmsolver++"}
_BY_CLASS: Mapping[str, str] = {
    _EULER: "euler",
    _EULER_A: "euler_a euler_ancestral",
    _HEUN: "heun",
    _LCM: "lcm",
    "LMSDiscreteScheduler": "lms",
    "KDPM2DiscreteScheduler": "dpm2 dpm_2 kdpm_2",
    "KDPM2AncestralDiscreteScheduler": "dpm2_a kdpm_2_a dpm_2_ancestral",
    "DPMSolverSinglestepScheduler": "dpmpp_2s dpmpp_2s_a dpmpp_2s_ancestral dpmpp_sde",
    "DDIMScheduler": "ddim",
    "DDPMScheduler": "ddpm",
    "DEISMultistepScheduler": "deis",
    "IPNDMScheduler": "ipndm",
    "PNDMScheduler": "pndm plms",
    "SASolverScheduler": "sa_solver",
    "TCDScheduler": "tcd",
    "UniPCMultistepScheduler": "unipc uni_pc uni_pc_bh2",
}
SAMPLERS: Mapping[str, tuple[str, Options]] = {
    **{name: (kind, {}) for kind, names in _BY_CLASS.items() for name in names.split()},
    "dpmpp_2m": (_MULTISTEP, {}),
    "dpmpp_2m_sde": (_MULTISTEP, _SDE),
    "dpmpp_2m_sde_heun": (_MULTISTEP, {**_SDE, "solver_type": "heun"}),
    "dpmpp_3m": (_MULTISTEP, {"solver_order": 3}),
    "dpmpp_3m_sde": (_MULTISTEP, {**_SDE, "solver_order": 3}),
}
_TOGETHER = {name.replace("_", ""): name for name in SAMPLERS}  # as some write them: `dpmpp2m`, `eulera`
_OF_FLOW: Mapping[str, tuple[str, Options]] = {
    _EULER: ("FlowMatchEulerDiscreteScheduler", {}),
    _EULER_A: ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    _HEUN: ("FlowMatchHeunDiscreteScheduler", {}),
    _LCM: ("FlowMatchLCMScheduler", {}),
}
"""The schedulers of the same samplers for models that predict flow."""
SCHEDULES: Mapping[str, Options] = {
    "automatic": {},
    "normal": {},
    "karras": {"use_karras_sigmas": True},
    "k": {"use_karras_sigmas": True},
    "exponential": {"use_exponential_sigmas": True},
    "beta": {"use_beta_sigmas": True},
    "sgm_uniform": {"timestep_spacing": "trailing"},
    "simple": {"timestep_spacing": "trailing"},
    "ddim_uniform": {"timestep_spacing": "leading"},
}
_LEVELS = {"use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"}
_SPACED = ("karras", "k", "exponential", "beta")
_SCHEDULES_OF_FLOW: Mapping[str, Sequence[str]] = {
    "FlowMatchEulerDiscreteScheduler": _SPACED,
    "FlowMatchLCMScheduler": _SPACED,
    "UniPCMultistepScheduler": ("karras", "k"),
}
"""What schedulers of models that predict flow can space otherwise."""
_USUAL = ("", "automatic", "normal", "sgm_uniform", "simple")  # what they do by themselves


def known_sampler(name: str, *, is_flow: bool) -> dict[str, Any] | None:
    """The `class` (none for a schedule alone) and options that a name stands for; None if it is unknown."""
    sampler, schedule = _parts(name)
    spacing = SCHEDULES.get(schedule, {})
    if not sampler:
        return dict(spacing) if not is_flow or schedule in _SPACED else {}
    if sampler not in SAMPLERS:
        return None
    kind, options = SAMPLERS[sampler]
    if is_flow:
        kind, options = _OF_FLOW.get(kind, (kind, options))
        spacing = spacing if schedule in _SCHEDULES_OF_FLOW.get(kind, ()) else {}
    return {"class": kind, **options, **spacing}


def ignored_schedule(name: str) -> str | None:
    """The noise schedule in a name that models which predict flow cannot have with this sampler."""
    _, schedule = _parts(name)
    is_ignored = schedule not in _USUAL and not (known_sampler(name, is_flow=True) or {}).keys() & _LEVELS
    return schedule if is_ignored else None


def _parts(name: str) -> tuple[str, str]:
    plain = re.sub(r"[\s_-]+", "_", name.strip().lower().replace("++", "pp")).removeprefix("k_")
    found = next((each for each in SCHEDULES if plain == each or plain.endswith(f"_{each}")), "")
    sampler = plain.removesuffix(found).strip("_")
    return _TOGETHER.get(sampler.replace("_", ""), sampler), found
