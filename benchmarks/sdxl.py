"""Pictures of SDXL at full size with random weights: gfgen and diffusers on one device.

    python -m benchmarks.sdxl [--cases guided few] [--sides gfgen eager compiled]
    python -m benchmarks.sdxl --tiny --device cpu

`guided` is 20 pictures of 1024x1024 in 30 steps with guidance, `few` 24 in 4 steps without, as Lightning and
LCM make them. gfgen is `gfgen run` twice, first with empty caches, from its first task to its last file.
diffusers has the same weights in bf16, is warm, and threads write its files. `eager` makes a quarter of the
pictures; `compiled` has its UNet compiled (torch.compile, mode default), and channels last in UNet and VAE.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from small_checkpoints import clip_tokenizer, save_checkpoint
from transformers.initialization import no_init_weights

from benchmarks.first_run import CACHES
from benchmarks.measured import head, row, run_gfgen, times_of
from gfgen.models.loading.random_weights import draw_weights

UNET: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048, "use_linear_projection": True,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "force_upcast": True,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip


class Case(NamedTuple):
    """Jobs of one kind."""

    num_jobs: int
    steps: int
    guidance_scale: float
    side: int = 1024

    def call(self, idx: int) -> dict[str, Any]:
        """Arguments of a call, and fields of a job."""
        prompt = f"a red fox in the snow under {idx + 2} northern lights, soft focus and grain"
        size = {"width": self.side, "height": self.side}
        return {"prompt": prompt, **size, "guidance_scale": self.guidance_scale}


CASES = {"guided": Case(20, 30, 5.0), "few": Case(24, 4, 1.0)}


def make(device: str) -> Any:
    """A pipeline with random weights, drawn on the device."""
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device), no_init_weights():
        text = transformers.CLIPTextModel(_text_config(768, layers=12))
        text_2 = transformers.CLIPTextModelWithProjection(_text_config(1280, layers=32))
        vae, unet = AutoencoderKL(**VAE), UNet2DConditionModel(**UNET)
    torch.set_default_dtype(torch.float32)
    for idx, model in enumerate((vae, text, text_2, unet)):
        draw_weights(model.eval(), name=str(idx))
    tokenizers = clip_tokenizer(), clip_tokenizer()
    return StableDiffusionXLPipeline(vae, text, text_2, *tokenizers, unet, EulerDiscreteScheduler())


def _text_config(width: int, *, layers: int) -> Any:
    return transformers.CLIPTextConfig(
        hidden_size=width, intermediate_size=4 * width, projection_dim=width,
        num_hidden_layers=layers, num_attention_heads=width // 64,
        vocab_size=49408, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip


def by_diffusers(pipeline: Any, case: Case, folder: Path, num_jobs: int) -> tuple[float, str]:
    """Seconds from the first call to the last file, after a call of the same shapes."""
    began_s = time.perf_counter()
    pipeline(**case.call(0), num_inference_steps=2)
    note = f"{time.perf_counter() - began_s:.1f} s before it"
    with ThreadPoolExecutor(4) as files:
        began_s = time.perf_counter()
        for idx in range(num_jobs):
            generator = torch.Generator("cpu").manual_seed(idx)
            result = pipeline(**case.call(idx), num_inference_steps=case.steps, generator=generator)
            files.submit(result.images[0].save, folder / f"{idx}.png")
    return time.perf_counter() - began_s, note


def by_gfgen(checkpoint: Path, case: Case, folder: Path, device: str, caches: Path) -> tuple[float, str]:
    """Seconds from the first task to the last file, and what its tasks take."""
    lines = [{**case.call(idx), "steps": case.steps, "seed": idx} for idx in range(case.num_jobs)]
    own = {name: str(caches / part) for name, part in CACHES.items()}
    options = ("--model", str(checkpoint), "--ranks", "1", "--device", device)
    timeline, _ = run_gfgen(lines, folder, *options, env=own)
    total_s, stages = times_of(timeline)
    return total_s, f"busy {sum(each.duration_s for each in timeline.tasks) / total_s:.1%}, {stages}"


def rows(asked: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, int, float, str]]:
    """Case, side, pictures, seconds and a note."""
    if asked.tiny:
        save_checkpoint("StableDiffusionXLPipeline", folder / "sdxl")
        pipeline: Any = StableDiffusionXLPipeline.from_pretrained(folder / "sdxl")
    else:
        (pipeline := make(asked.device)).save_pretrained(folder / "sdxl")
    pipeline.set_progress_bar_config(disable=True)
    for side, name in itertools.product(asked.sides, asked.cases):
        case = CASES[name]._replace(num_jobs=4, steps=3, side=64) if asked.tiny else CASES[name]
        case = case._replace(num_jobs=asked.pictures or case.num_jobs)
        if side == "compiled" and pipeline.unet._compiled_call_impl is None:
            for part in (pipeline.unet, pipeline.vae):
                part.to(memory_format=torch.channels_last)
            pipeline.unet.compile(dynamic=False)
        if side != "gfgen":
            num_jobs = case.num_jobs // (4 if side == "eager" else 1)
            yield name, f"diffusers {side}", num_jobs, *by_diffusers(pipeline, case, folder, num_jobs)
            continue
        caches, *own = (Path(tempfile.mkdtemp(dir=folder)) for _ in range(3))
        for turn, output in zip(("first", "second"), own, strict=True):
            found = by_gfgen(folder / "sdxl", case, output, asked.device, caches)
            yield name, f"gfgen, {turn} run", case.num_jobs, *found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    sides = ("gfgen", "eager", "compiled")
    parser.add_argument("--sides", nargs="+", default=sides, choices=sides, help="in this order")
    parser.add_argument("--pictures", type=int, help="of each case [20 and 24]")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    print(head("case", "side", "pictures", "s", "s per picture", ""), flush=True)
    with tempfile.TemporaryDirectory() as made:
        for name, side, num_jobs, seconds, note in rows(parser.parse_args(), Path(made)):
            print(row(name, side, num_jobs, f"{seconds:.2f}", f"{seconds / num_jobs:.3f}", note), flush=True)


if __name__ == "__main__":
    main()
