"""`scheduler`, `sigmas` and `args` of Wan and Qwen-Image: the bits of diffusers' loop with that scheduler."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, WanImageToVideoPipeline, WanPipeline
from own_calls import arguments_of
from stepping_process import SteppingProcess, dumps, loads

from gfgen.errors import JobError
from gfgen.job.reader import JobSource
from gfgen.job.recipes import recipes
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.geometry.model import load_geometry
from gfgen.session.admission import admit_weightless

torch.set_num_threads(1)

EULER, LCM, HEUN = (f"FlowMatch{name}Scheduler" for name in ("EulerDiscrete", "LCM", "HeunDiscrete"))
DPM, UNIPC = "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"
OF_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
FEW = [1.0, 0.75, 0.5, 0.25]


@dataclass(frozen=True)
class Case:
    """A job's scheduler, and the class and options with which diffusers makes the same one."""

    model: str
    pipeline: Any
    scheduler: Any
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    has_image: bool = False


def wan(scheduler: Any, kind: str, *, shift: float = 5.0, **options: Any) -> Case:
    name = "shift" if kind.startswith("FlowMatch") else "flow_shift"
    return Case("tiny-wan", WanPipeline, scheduler, kind, {name: shift, **options})


def qwen(scheduler: Any, kind: str, job: Mapping[str, Any] | None = None, **options: Any) -> Case:
    return Case("tiny-qwen-image", QwenImagePipeline, scheduler, kind, options, job or {})


NO_CFG = {"true_cfg_scale": 1.0}
CASES = {
    "wan-euler": wan("euler", EULER),
    "wan-euler-a": wan("Euler a", EULER, stochastic_sampling=True),
    "wan-lcm": wan({"class": LCM}, LCM),
    "wan-heun": wan("heun", HEUN),
    "wan-dpmpp-2m": wan("DPM++ 2M", DPM, **OF_FLOW),
    "wan-dpmpp-2m-sde": wan("dpmpp_2m_sde", DPM, algorithm_type="sde-dpmsolver++", **OF_FLOW),
    "wan-dpmpp-3m": wan("dpmpp_3m", DPM, solver_order=3, **OF_FLOW),
    "wan-dpmpp-2s": wan("dpmpp_2s", "DPMSolverSinglestepScheduler", **OF_FLOW),
    "wan-deis": wan("deis", "DEISMultistepScheduler", **OF_FLOW),
    "wan-sa": wan("sa_solver", "SASolverScheduler", **OF_FLOW),
    "wan-unipc-karras": wan("UniPC Karras", UNIPC, use_karras_sigmas=True, **OF_FLOW),
    "wan-unipc-3": wan({"class": "uni_pc", "solver_order": 3}, UNIPC, solver_order=3, **OF_FLOW),
    "wan-shift-of-the-scheduler": wan({"flow_shift": 2.0}, UNIPC, shift=2.0),
    "wan-image-lcm": Case(
        "tiny-wan", WanImageToVideoPipeline, "lcm", LCM, {"shift": 5.0}, has_image=True
    ),
    "a14b-sigmas": Case(
        "tiny-wan-moe", WanPipeline, "euler", EULER, {"shift": 3.0},
        {"sigmas": FEW, "guidance_scale": 3.0, "guidance_scale_2": 2.0},
    ),
    "a14b-sigmas-own-scheduler": Case(
        "tiny-wan-moe", WanPipeline, None, UNIPC, {"flow_shift": 4.0}, {"sigmas": FEW, "flow_shift": 4.0}
    ),
    "a14b-image-euler-a": Case(
        "tiny-wan-moe-i2v", WanImageToVideoPipeline, "euler_a", EULER,
        {"shift": 3.0, "stochastic_sampling": True}, has_image=True,
    ),
    "qwen-lcm": qwen("LCM", LCM),
    "qwen-sigmas": qwen(None, EULER, {"sigmas": FEW, **NO_CFG}),
    "qwen-lightning": qwen(
        {"use_dynamic_shifting": False, "shift": 3.0, "shift_terminal": None},
        EULER, {"sigmas": FEW, **NO_CFG},
        use_dynamic_shifting=False, shift=3.0, shift_terminal=None,
    ),
    "qwen-lightning-4": qwen(
        recipes()["lightning-4"]["qwen-image"]["scheduler"],
        EULER, {"steps": 4, **NO_CFG},
        base_shift=math.log(3), max_shift=math.log(3), shift_terminal=None,
    ),
    "qwen-heun": qwen("Heun", HEUN, NO_CFG),
    "qwen-unipc": qwen("unipc", UNIPC, NO_CFG, **OF_FLOW),
    "qwen-dpm-static": qwen(
        {"class": "dpmpp_2m", "use_dynamic_shifting": False, "flow_shift": 3.0}, DPM, NO_CFG,
        use_dynamic_shifting=False, flow_shift=3.0, **OF_FLOW,
    ),
    "qwen-dpm": qwen("dpmpp_2m_sde", DPM, NO_CFG, algorithm_type="sde-dpmsolver++", **OF_FLOW),
    "qwen-short-texts": qwen(None, EULER, {"args": {"max_sequence_length": 4}, **NO_CFG}),
    "wan-short-texts": Case(
        "tiny-wan", WanPipeline, None, UNIPC, {}, {"args": {"max_sequence_length": 16}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_steps_in_two_processes_give_the_bits_of_diffusers_loop(
    name: str,
    tiny_models: Mapping[str, Path],
    two_processes: tuple[SteppingProcess, SteppingProcess],
    picture: Path,
) -> None:
    case = CASES[name]
    checkpoint = resolve_checkpoint(case.model)
    spec = load_geometry(checkpoint).resolve(asked(case, picture))
    assert load_geometry(checkpoint).resolve(spec) == spec
    assert torch.equal(_steps(two_processes, checkpoint, spec), _reference(case, checkpoint, spec))


def asked(case: Case, picture: Path) -> JobSpec:
    scheduler = {"class": case.scheduler} if isinstance(case.scheduler, str) else case.scheduler
    size = {"width": 96, "height": 64, "steps": 4, "negative_prompt": "dark"}
    size |= {"frames": 9} if case.pipeline is not QwenImagePipeline else {}
    image = str(picture) if case.has_image else None
    prompt = "a red fox, quietly, in the snow of a long winter"
    return JobSpec(id="x", prompt=prompt, seed=11, image=image, scheduler=scheduler, **size | case.job)


def _steps(processes: tuple[SteppingProcess, ...], checkpoint: Path, spec: JobSpec) -> torch.Tensor:
    """Final latents; consecutive tasks never run in the same process."""
    first, second = processes
    prompt = first.call(checkpoint, "encode", spec)
    condition, latents = map(dumps, loads(second.call(checkpoint, "prepare", spec, prompt)))
    for step in range(spec.steps or 0):
        process = processes[step % 2]
        latents = process.call(checkpoint, "denoise", spec, prompt, condition, latents, step=step)
    return loads(latents).tensors["sample"]


def _reference(case: Case, checkpoint: Path, spec: JobSpec) -> torch.Tensor:
    pipeline = case.pipeline.from_pretrained(str(checkpoint), dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(spec.seed or 0)
    new = getattr(diffusers, case.kind).from_config(pipeline.scheduler.config, **case.options)
    _adapt(new, spec, generator)
    pipeline.scheduler = new
    arguments = arguments_of(spec, case.pipeline, output_type="latent")
    return pipeline(**arguments, generator=generator)[0]


def _adapt(scheduler: Any, spec: JobSpec, generator: torch.Generator) -> None:
    """Let a pipeline's loop give the job's sigmas to `set_timesteps` and its generator to `step`."""
    step, set_timesteps = scheduler.step, scheduler.set_timesteps
    taken = inspect.signature(set_timesteps).parameters
    if "generator" in inspect.signature(step).parameters:
        scheduler.step = functools.partial(step, generator=generator)

    def adapted(
        num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, mu: Any = None
    ) -> None:
        levels: dict[str, Any] = {}
        sigmas = sigmas if spec.sigmas is None else np.array(spec.sigmas)
        if sigmas is not None and "sigmas" in taken:
            levels["sigmas"] = sigmas
        else:
            levels["num_inference_steps"] = num_inference_steps or spec.steps
        if mu is not None and "mu" in taken and scheduler.config.get("use_dynamic_shifting"):
            levels["mu"] = mu
        set_timesteps(device=device, **levels)

    scheduler.set_timesteps = adapted


@pytest.mark.parametrize(
    ("model", "fields", "problem"),
    [
        ("tiny-wan", {"scheduler": {"class": "ddim"}},
         "flow, as euler, heun, lcm, unipc, dpmpp_2m, dpmpp_2s, deis, sa_solver do"),
        ("tiny-wan", {"scheduler": {"class": "deis", "use_karras_sigmas": True}}, "spaces no noise levels"),
        ("tiny-wan", {"scheduler": {"class": "dpmp_2m"}}, "did you mean dpmpp_2m?"),
        ("tiny-wan", {"scheduler": {"class": "FlowMatchEuler"}}, "did you mean FlowMatchEuler"),
        ("tiny-wan", {"scheduler": {"prediction_type": "epsilon"}}, "this model predicts flow; leave it out"),
        ("tiny-wan", {"scheduler": {"use_dynamic_shifting": True}}, "does not depend on the size"),
        ("tiny-wan", {"scheduler": {"flow_shift": 3}, "flow_shift": 2.0}, "scheduler has another one"),
        ("tiny-wan", {"scheduler": {"class": "deis"}, "sigmas": [1.0, 0.5]},
         "sigmas: DEISMultistepScheduler"),
        ("tiny-wan", {"sigmas": [14.6, 2.0]}, "numbers up to 1 are accepted"),
        ("tiny-wan", {"sigmas": [1.0, 0.0]}, "without the 0 at the end"),
        ("tiny-qwen-image", {"sigmas": [1.0, 0.0]}, "without the 0 at the end"),
        ("tiny-wan", {"sigmas": [1.0, 0.5], "scheduler": {"class": "euler karras"}},
         "use_karras_sigmas of the scheduler spaces the noise levels itself"),
        ("tiny-wan", {"args": {"attention_kwargs": 1}}, "args.attention_kwargs = 1: takes what a job file"),
        ("tiny-wan", {"args": {"max_sequence_length": 513}}, "from 1 to 512 are accepted"),
        ("tiny-wan", {"args": {"strength": 1}}, "is no such argument of WanPipeline"),
        ("tiny-wan", {"scheduler": {"class": "heun"}, "reuse": 0.5, "steps": 30}, "twice a step"),
        ("tiny-wan-moe", {"scheduler": {"class": "euler"}, "reuse": 0.5, "steps": 30},
         "the expert is unknown"),
        ("tiny-qwen-image", {"args": {"num_images_per_prompt": 2}}, "use num_images"),
        ("tiny-qwen-image", {"steps": 1}, "steps = 1"),
    ],
)  # fmt: skip
def test_what_does_not_act_is_refused(
    tiny_models: Mapping[str, Path], model: str, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(JobError) as refused:
        load_geometry(tiny_models[model]).resolve(JobSpec(id="x", prompt="a fox", seed=1, **fields))
    (found,) = refused.value.problems
    assert problem in str(found)
    assert "\n" not in str(found)


def test_one_step_needs_no_stretched_schedule(tiny_models: Mapping[str, Path]) -> None:
    spec = JobSpec(id="x", prompt="a fox", seed=1, steps=1, scheduler={"shift_terminal": None})
    assert load_geometry(tiny_models["tiny-qwen-image"]).resolve(spec).steps == 1


def test_a_job_with_a_scheduler_has_room_for_its_state_beside_one_of_equal_shape(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    lines = ['{"prompt": "a fox", "scheduler": "lcm"}', '{"prompt": "a fox"}', '{"prompt": "an owl"}']
    jobs.write_text("\n".join(lines))
    admitted = admit_weightless(JobSource(files=(str(jobs),)), default_model="wan2.2-ti2v-5b")
    rooms = [job.trajectory.artifact("latents").room_bytes > 0 for job in admitted]
    assert rooms == [True, False, False]
