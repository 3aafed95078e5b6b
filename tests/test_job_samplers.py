"""Names of samplers in other programs."""

from __future__ import annotations

from typing import Any

import pytest

from gfgen.job.samplers import SAMPLERS, SCHEDULES, ignored_schedule, known_sampler

MULTISTEP = "DPMSolverMultistepScheduler"
SDE = {"algorithm_type": "sde-dpmsolver++"}
KARRAS = {"use_karras_sigmas": True}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Euler", {"class": "EulerDiscreteScheduler"}),
        ("k_euler", {"class": "EulerDiscreteScheduler"}),
        ("Euler a", {"class": "EulerAncestralDiscreteScheduler"}),
        ("euler_ancestral", {"class": "EulerAncestralDiscreteScheduler"}),
        ("DPM++ 2M", {"class": MULTISTEP}),
        ("DPM++ 2M Karras", {"class": MULTISTEP, **KARRAS}),
        ("dpmpp_2m_k", {"class": MULTISTEP, **KARRAS}),
        ("DPM++2M Karras", {"class": MULTISTEP, **KARRAS}),
        ("dpmpp2m", {"class": MULTISTEP}),
        ("eulera", {"class": "EulerAncestralDiscreteScheduler"}),
        ("dpmpp_2m_sde", {"class": MULTISTEP, **SDE}),
        ("DPM++ 2M SDE Exponential", {"class": MULTISTEP, **SDE, "use_exponential_sigmas": True}),
        ("DPM++ 2M SGM Uniform", {"class": MULTISTEP, "timestep_spacing": "trailing"}),
        ("DPM++ 3M SDE", {"class": MULTISTEP, **SDE, "solver_order": 3}),
        ("DPM2 a Karras", {"class": "KDPM2AncestralDiscreteScheduler", **KARRAS}),
        ("LMS Karras", {"class": "LMSDiscreteScheduler", **KARRAS}),
        ("DDIM", {"class": "DDIMScheduler"}),
        ("uni_pc", {"class": "UniPCMultistepScheduler"}),
        ("karras", KARRAS),
        ("sgm_uniform", {"timestep_spacing": "trailing"}),
        ("normal", {}),
        ("DPM++ 7Q", None),
        ("EulerDiscreteScheduler", None),
    ],
)
def test_a_name_of_other_programs_is_a_class_and_options(name: str, meant: dict[str, Any] | None) -> None:
    assert known_sampler(name, is_flow=False) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("euler", {"class": "FlowMatchEulerDiscreteScheduler"}),
        ("euler_a", {"class": "FlowMatchEulerDiscreteScheduler", "stochastic_sampling": True}),
        ("Heun", {"class": "FlowMatchHeunDiscreteScheduler"}),
        ("lcm sgm_uniform", {"class": "FlowMatchLCMScheduler"}),
        ("Euler Beta", {"class": "FlowMatchEulerDiscreteScheduler", "use_beta_sigmas": True}),
        ("dpmpp_2m", {"class": MULTISTEP}),
        ("simple", {}),
        ("karras", KARRAS),
        ("DPM++ 2M Karras", {"class": MULTISTEP}),
        ("unipc_k", {"class": "UniPCMultistepScheduler", **KARRAS}),
    ],
)
def test_models_that_predict_flow_have_schedulers_of_their_own(name: str, meant: dict[str, Any]) -> None:
    assert known_sampler(name, is_flow=True) == meant


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("DPM++ 2M Karras", "karras"),
        ("uni_pc ddim_uniform", "ddim_uniform"),
        ("euler karras", None),
        ("dpmpp_2m simple", None),
        ("dpmpp_2m", None),
    ],
)
def test_what_models_that_predict_flow_cannot_have_is_known(name: str, ignored: str | None) -> None:
    assert ignored_schedule(name) == ignored


def test_every_class_and_option_is_of_diffusers() -> None:
    from gfgen.models.geometry.call import options_of

    for name in SAMPLERS:
        for is_flow in (False, True):
            known = known_sampler(name, is_flow=is_flow) or {}
            assert known.keys() - {"class"} <= options_of(known["class"]).keys()
    flow = options_of("UniPCMultistepScheduler").keys()
    assert all(options.keys() <= flow for options in SCHEDULES.values())
