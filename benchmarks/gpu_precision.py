"""How near shared steps in bf16 come to diffusers' own pipeline, on GPUs, full-size random weights.

    python -m benchmarks.gpu_precision [--steps 4] [--json FILE]

The measure is what bf16 itself costs: the distance of diffusers' final latents in bf16 from those in
fp32, relative to the latter's norm. Every layout, layouts that change between steps, and both branches of
guidance in one forward must not be farther from diffusers in bf16 than that; the same degrees on other ranks
must give the same bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import QwenImagePipeline, WanPipeline

from gfgen.bench.gfc import check_num_gpus
from gfgen.bench.workloads import admitted, weightless_model
from gfgen.errors import GfgenError
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.driver import driver
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.gfc.descriptor import Descriptor
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families import guidance
from gfgen.models.families.adapter import SAMPLE, Fields
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_component
from gfgen.models.parallel.parallel import parallel_from
from gfgen.runtime.ipc.arenas import GPU_PLAN

TEXT = {"wan2.2-ti2v-5b": ((512, 512), 4096), "qwen-image": ((64, 8), 3584)}
"""Tokens of the prompt and of the negative prompt, and channels of each."""
SIZES: dict[str, dict[str, Any]] = {
    "wan2.2-ti2v-5b": {"width": 832, "height": 480, "frames": 17},
    "qwen-image": {"width": 512, "height": 512, "negative_prompt": "blurred"},
}


@dataclass(frozen=True)
class PrecisionCase:
    """Layouts of the steps, in turn."""

    name: str
    layouts: tuple[Layout, ...]
    in_batch: bool = False
    """Both branches in one forward."""


def cases(num_gpus: int) -> list[PrecisionCase]:
    """What is compared with diffusers."""
    single, pair, other = Layout((0,)), Layout((0, 1), ulysses=2), Layout((1, 0), ulysses=2)
    found = [
        PrecisionCase("1", (single,)),
        PrecisionCase("2", (pair,)),
        PrecisionCase("2, other ranks", (other,)),
    ]
    halves = Layout((0, 1), cfg=2)
    found.append(PrecisionCase("cfg 2", (halves,)))
    found += [
        PrecisionCase(f"{each.degree}, in one forward", (each,), in_batch=True) for each in (single, pair)
    ]
    if num_gpus >= 4:
        four, turned = Layout((0, 1, 2, 3), ulysses=4), Layout((2, 0, 3, 1), ulysses=4)
        both = Layout((3, 1, 0, 2), cfg=2, ulysses=2)
        found += [
            PrecisionCase("4", (four,)),
            PrecisionCase("4, other order", (turned,)),
            PrecisionCase("cfg 2 x 2", (both,)),
        ]
        found.append(PrecisionCase("1, 2, 4, cfg 2 x 2 in turn", (single, pair, four, both)))
        found.append(PrecisionCase("4, in one forward", (four,), in_batch=True))
    return found


# What runs on the ranks -------------------------------------------------------------------------

_ADAPTERS: dict[str, Any] = {}


def prompts(model: str, device: torch.device) -> Fields:
    """Random embeddings, the same on every rank."""
    noise = torch.Generator().manual_seed(5)
    names = ("prompt_embeds", "negative_prompt_embeds")
    lengths, channels = TEXT[model]
    drawn = [torch.randn((1, num, channels), generator=noise).bfloat16().to(device) for num in lengths]
    return Fields(dict(zip(names, drawn, strict=True)))


@torch.no_grad()
def start(endpoint: CudaEndpoint, model: str, spec: JobSpec) -> Fields:
    """The first latents; makes the adapter."""
    _ADAPTERS.clear()
    gc.collect()
    torch.cuda.empty_cache()
    device = endpoint.torch_device
    adapter = load_adapter(CONFIGS / model, device=str(device), has_random_weights=True)
    _ADAPTERS[model] = adapter
    _, latents = adapter.prepare(spec, prompts(model, device))
    return _on(latents, "cpu")


@torch.no_grad()
def step(
    endpoint: CudaEndpoint,
    model: str,
    spec: JobSpec,
    latents: Fields,
    idx: int,
    layout: Layout,
    number: int,
    in_batch: bool,
) -> Fields:
    """The latents after a step, on this rank of a layout."""
    parallel = None
    if layout.degree > 1:
        group = endpoint.group(Descriptor(number, layout, (1,) * layout.degree))
        group.enter()
        parallel = parallel_from(group)
    given = _on(latents, endpoint.torch_device)
    inputs = (prompts(model, endpoint.torch_device), Fields(), given)
    with patch.object(guidance, "is_batch_faster", return_value=in_batch):
        result = _ADAPTERS[model].denoise(spec, *inputs, step=idx, parallel=parallel)
    torch.cuda.synchronize()
    if parallel is not None:
        endpoint.check(number)
    return _on(result, "cpu")


@torch.no_grad()
def reference(endpoint: CudaEndpoint, model: str, spec: JobSpec, latents: Fields) -> dict[str, torch.Tensor]:
    """diffusers' final latents in bf16 and in fp32."""
    _ADAPTERS.clear()
    gc.collect()
    torch.cuda.empty_cache()
    device = endpoint.torch_device
    results = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        pipeline = diffusers_pipeline(model, str(device))
        pipeline.set_progress_bar_config(disable=True)
        settings: dict[str, Any] = {
            "width": spec.width,
            "height": spec.height,
            "num_inference_steps": spec.steps,
        }
        sample = latents.tensors[SAMPLE].to(device)
        if dtype == torch.float32:
            pipeline.transformer.float()
        if isinstance(pipeline, QwenImagePipeline):
            settings |= {"true_cfg_scale": spec.true_cfg_scale}
            sample = sample.to(dtype)
        else:
            settings |= {"num_frames": spec.frames, "guidance_scale": spec.guidance_scale}
        embeds = {key: value.to(dtype) for key, value in prompts(model, device).tensors.items()}
        output = pipeline(**embeds, latents=sample, output_type="latent", return_dict=False, **settings)
        results[name] = output[0].float().cpu()
        del pipeline, output
        gc.collect()
        torch.cuda.empty_cache()
    return results


def diffusers_pipeline(model: str, device: str) -> Any:
    """Without text encoder, with the weights that an adapter draws."""

    def part(name: str) -> Any:
        return random_component(CONFIGS / model, name, device=device, dtype=torch.bfloat16)

    parts = {name: part(name) for name in ("transformer", "vae", "scheduler")}
    parts |= {"text_encoder": None, "tokenizer": None}
    if "qwen" in model:
        return QwenImagePipeline(**parts)
    return WanPipeline(**parts, expand_timesteps=True)


def _on(fields: Fields, device: Any) -> Fields:
    return Fields({name: tensor.to(device) for name, tensor in fields.tensors.items()}, fields.scalars)


# Comparing --------------------------------------------------------------------------------------


def distance(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of two tensors, over the norm of the second."""
    return float((result.double() - wanted.double()).norm() / wanted.double().norm())


def compare(ranks: CudaRanks, model: str, num_gpus: int, steps: int) -> dict[str, Any]:
    """All cases of one model beside diffusers."""
    asked = JobSpec(id="fox", prompt="a fox", seed=3, steps=steps, **SIZES[model])
    (job,) = admitted([asked], weightless_model(model))
    everyone = range(num_gpus)
    first = ranks.run(everyone, start, model, job.spec)[0]
    results: dict[str, torch.Tensor] = {}
    for case in cases(num_gpus):
        latents = first
        for idx in range(steps):
            layout = case.layouts[idx % len(case.layouts)]
            number = ranks.next_dispatch()
            arguments = (model, job.spec, latents, idx, layout, number, case.in_batch)
            found = ranks.run(layout.ranks, step, *arguments)
            latents = found[0]
            for other in found[1:]:
                assert torch.equal(other.tensors[SAMPLE], latents.tensors[SAMPLE]), "ranks differ"
        results[case.name] = latents.tensors[SAMPLE].float()
    wanted = ranks.run([0], reference, model, job.spec, first)[0]
    bf16, fp32 = (wanted[name].reshape(results["1"].shape) for name in ("bf16", "fp32"))
    rows = {
        name: {"from diffusers bf16": distance(result, bf16), "from diffusers fp32": distance(result, fp32)}
        for name, result in results.items()
    }
    same = [("2", "2, other ranks"), ("4", "4, other order")]
    bitwise = all(torch.equal(results[a], results[b]) for a, b in same if a in results)
    return {"model": model, "bf16 from fp32": distance(bf16, fp32), "bitwise": bitwise, "cases": rows}


def table(found: dict[str, Any]) -> str:
    """A model's cases in Markdown."""
    lines = [
        f"## {found['model']}: diffusers in bf16 is {found['bf16 from fp32']:.2e} from fp32",
        "",
        "| layout | from diffusers bf16 | from diffusers fp32 |",
        "|---|---|---|",
    ]
    for name, row in found["cases"].items():
        lines.append(f"| {name} | {row['from diffusers bf16']:.2e} | {row['from diffusers fp32']:.2e} |")
    same = "the same bits" if found["bitwise"] else "DIFFERENT bits"
    return "\n".join([*lines, "", f"Equal degrees on other ranks: {same}."])


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        num_gpus = min(4, driver().num_devices)
        check_num_gpus(num_gpus, at_least=2)
    except GfgenError as error:
        raise SystemExit(str(error)) from None
    results = []
    ranks = CudaRanks(num_gpus, GPU_PLAN)
    try:
        for model in SIZES:
            began_s = time.monotonic()
            results.append(compare(ranks, model, num_gpus, arguments.steps))
            print(f"{table(results[-1])}\n\n({time.monotonic() - began_s:.0f} s)\n", flush=True)
    finally:
        ranks.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
