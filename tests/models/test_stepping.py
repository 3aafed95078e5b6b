"""A call in steps, on alternating pipeline objects, has the bits of the pipeline's own call."""

import ast
import threading

import numpy as np
import pytest
import torch
from diffusers import CogVideoXDPMScheduler
from small_pipelines import small_call, small_pipeline

from gfgen.models.stepping.check import difference, moved, stepped_call, whole_call
from gfgen.models.stepping.program import NotSteppableError, changed_names, read_names
from gfgen.models.stepping.stepper import Stepper
from gfgen.models.stepping.values import pack, parts_of, unpack

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


def test_values_keep_types_identity_and_order_in_memory() -> None:
    pipeline = small_pipeline("FluxPipeline")
    parts = parts_of(pipeline)
    generator = torch.Generator().manual_seed(5)
    turned = torch.arange(24.0).view(1, 2, 3, 4).permute(0, 2, 3, 1)
    values = {
        "turned": turned,
        "nested": [(1, 2.5, None, True, "text"), {"a": turned, 3: torch.bool}, torch.device("cpu")],
        "generator": generator,
        "again": {"generator": generator},
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "number": np.float32(0.5),
        "array": np.arange(3),
        "transformer": pipeline.transformer,
        "block": pipeline.transformer.transformer_blocks[1],
        "config": pipeline.transformer.config,
        "slice": slice(1, None, 2),
    }
    found = unpack(moved(pack(values, parts)), parts, device=torch.device("cpu"), is_copied=True)
    assert found["turned"].stride() == turned.stride()
    assert torch.equal(found["turned"], turned)
    assert found["nested"][1]["a"] is found["turned"]
    assert found["nested"][0] == values["nested"][0]
    assert found["nested"][1][3] is torch.bool
    assert found["again"]["generator"] is found["generator"]
    assert torch.equal(found["generator"].get_state(), generator.get_state())
    assert found["mask"].dtype == torch.bool
    assert found["empty"].shape == (0, 3)
    assert found["number"] == np.float32(0.5)
    assert found["array"].tolist() == [0, 1, 2]
    assert found["block"] is values["block"]
    assert found["config"] is pipeline.transformer.config
    assert found["slice"] == slice(1, None, 2)


def test_a_value_that_cannot_be_stored_is_named() -> None:
    with pytest.raises(NotSteppableError, match=r"variable 'lock' holds a _thread.lock"):
        pack({"lock": threading.Lock()}, {})


def test_names_that_are_read_before_they_are_assigned() -> None:
    body = ast.parse(
        "if a:\n    b = 1\nelse:\n    b = c\nd = b + e\nfor i in f:\n    g += i\nh = [x for x in k]\nm[0] = 1"
        "\ndel n"
    ).body
    assert read_names(body) == {"a", "c", "e", "f", "g", "k", "m", "n"}
    assert changed_names(body) == {"b", "d", "g", "h", "i", "m", "n", "x"}
