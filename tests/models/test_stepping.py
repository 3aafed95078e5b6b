"""A call in steps, on alternating pipeline objects, has the bits of the pipeline's own call."""

import pytest
import torch
from diffusers import CogVideoXDPMScheduler

from benchmarks.small_pipelines import small_call, small_pipeline
from gfgen.models.stepping.stepper import Stepper
from gfgen.models.stepping.verify import difference, moved, stepped_call, whole_call

SEED = 7


@pytest.mark.parametrize(
    "name",
    [
        "FluxPipeline",
        "CogVideoXPipeline",
        "HunyuanVideoPipeline",
        "LTXPipeline",
        "LTX2Pipeline",
        "StableDiffusion3Pipeline",
        "WanPipeline",
        "QwenImageInpaintPipeline",
        "WanVideoToVideoPipeline",
        "ZImagePipeline",
    ],
)
def test_steps_on_two_pipelines_give_the_bits_of_one_call(name: str) -> None:
    args = small_call(name)
    whole = whole_call(small_pipeline(name), args, seed=SEED)
    stepped, _ = stepped_call([small_pipeline(name), small_pipeline(name)], args, seed=SEED)
    assert difference(stepped, whole) is None


def test_two_jobs_take_turns_on_one_pipeline() -> None:
    stepper = Stepper(small_pipeline("FluxPipeline"))
    calls = [small_call("FluxPipeline") | {"num_inference_steps": steps} for steps in (2, 3)]
    prompts = [stepper.encode(args, seed=SEED) for args in calls]
    parts = [stepper.prepare(prompt) for prompt in prompts]
    states = [state for _, state in parts]
    for step in range(3):
        for job in range(2):
            if step < calls[job]["num_inference_steps"]:
                states[job] = stepper.step(prompts[job], parts[job][0], states[job])
    for args, state in zip(calls, states, strict=True):
        whole = whole_call(small_pipeline("FluxPipeline"), args, seed=SEED)
        assert difference(stepper.decode(state), whole) is None


def test_a_step_changes_no_given_value() -> None:
    stepper = Stepper(small_pipeline("HunyuanVideoPipeline"))
    prompt = stepper.encode(small_call("HunyuanVideoPipeline"), seed=SEED)
    condition, state = stepper.prepare(prompt)
    given = [moved(fields) for fields in (prompt, condition, state)]
    stepper.step(prompt, condition, state)
    for before, after in zip(given, (prompt, condition, state), strict=True):
        assert before.scalars == after.scalars
        assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_cogvideox_with_dpm_keeps_its_previous_prediction() -> None:
    args = small_call("CogVideoXPipeline")
    pipelines = [small_pipeline("CogVideoXPipeline") for _ in range(3)]
    for pipeline in pipelines:
        pipeline.scheduler = CogVideoXDPMScheduler.from_config(pipeline.scheduler.config)
    whole = whole_call(pipelines[0], args, seed=SEED)
    stepped, num_steps = stepped_call(pipelines[1:], args, seed=SEED)
    assert num_steps == 5
    assert difference(stepped, whole) is None
