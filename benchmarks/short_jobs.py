"""Jobs of a few steps with LoRAs in rotation: diffusers and gfgen on one device, seconds per job by stage.

    python -m benchmarks.short_jobs --model qwen-image --size 1024x1024 --jobs 40
    python -m benchmarks.short_jobs --model wan2.2-ti2v-5b --size 1280x704 --frames 81 --jobs 8
    python -m benchmarks.short_jobs --model tiny-wan --size 64x64 --frames 5 --jobs 4 --device cpu

Random full-size weights, 4 steps without guidance, each job with the next of four random LoRAs of rank 32 of
all linear layers in blocks. diffusers has compiled blocks, and its LoRAs loaded before: `fused` unfuses one
and fuses the next, `unmerged` hot-swaps the factors. Both sides have the same VAE dtype, and end with uint8
frames in host memory; files are written by others meanwhile. gfgen is `gfgen run`, by its trace: from its
first task to its last. The first use of a LoRA there reads its file; the switches are listed job by job.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from gfgen.models.families.pictures import to_uint8
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.geometry.weights import VAE_DTYPES, component_dtypes
from gfgen.models.loading.random_weights import random_pipeline

STEPS, RANK, NUM_LORAS = 4, 32, 4
SIDES = ("fused", "unmerged", "gfgen")
STAGES = ("switch", "encode", "steps", "decode", "rest")
WORDS = (
    "a",
    "red",
    "fox",
    "in",
    "the",
    "snow",
    "under",
    "northern",
    "lights,",
    "soft",
    "focus",
    "and",
    "grain",
)


@dataclass(frozen=True)
class Case:
    """The jobs to measure."""

    model: str
    width: int
    height: int
    frames: int
    num_jobs: int
    device: str
    vae_dtype: str
    num_prompts: int
    folder: Path

    @property
    def is_picture(self) -> bool:
        return self.frames == 1

    def prompt(self, idx: int) -> str:
        """One of some, each of another length: compiled blocks compile each length anew."""
        words = 6 + 14 * (idx % self.num_prompts)
        return " ".join(WORDS[word % len(WORDS)] for word in range(words))

    def lora(self, idx: int) -> Path:
        return self.folder / f"lora{idx % NUM_LORAS}.safetensors"


@dataclass
class Measured:
    """Seconds of a side's jobs."""

    total_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    note: str = ""


class Diffusers:
    """A pipeline with random weights and compiled blocks that takes one job after another."""

    def __init__(self, case: Case) -> None:
        index = json.loads((CONFIGS / case.model / "model_index.json").read_text())
        self._case = case
        self._dtype = torch.float32 if case.device == "cpu" else torch.bfloat16
        self.pipeline: Any = random_pipeline(
            getattr(diffusers, index["_class_name"]),
            CONFIGS / case.model,
            device=case.device,
            dtype=self._dtype,
            dtypes=component_dtypes(index["_class_name"], case.vae_dtype),
        )
        self.pipeline.set_progress_bar_config(disable=True)
        self.pipeline.vae.decode = self._timed("decode", self.pipeline.vae.decode)
        self.pipeline.encode_prompt = self._timed("encode", self.pipeline.encode_prompt)
        self.stages: defaultdict[str, float] = defaultdict(float)

    def make_loras(self) -> None:
        layers = [
            (name, layer)
            for name, layer in self.pipeline.transformer.named_modules()
            if isinstance(layer, torch.nn.Linear) and "blocks." in name
        ]
        for idx in range(NUM_LORAS):
            random = torch.Generator(self._case.device).manual_seed(idx)
            factors = {
                f"transformer.{name}.lora_{part}.weight": 0.02
                * torch.randn(size, generator=random, device=self._case.device, dtype=self._dtype)
                for name, layer in layers
                for part, size in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK)))
            }
            save_file(factors, self._case.lora(idx))

    def measure(self, side: str) -> Measured:
        switch = self._fused() if side == "fused" else self._unmerged()
        began_s = time.perf_counter()
        self.pipeline.transformer.compile_repeated_blocks(dynamic=False)
        for idx in range(max(NUM_LORAS, self._case.num_prompts)):  # each may be compiled once more
            switch(idx)
            self._call(idx, output_type="latent", steps=1)
        first_s = self._now() - began_s
        self.stages.clear()
        with ThreadPoolExecutor(4) as files:
            began_s = self._now()
            for idx in range(self._case.num_jobs):
                with self._stage("switch"):
                    switch(idx)
                output = self._call(idx, output_type="pt")[0][0]
                frames = to_uint8(output if output.dim() == 4 else output[None]).cpu()
                if self._case.is_picture:
                    files.submit(Image.fromarray(frames[0].numpy()).save, self._case.folder / f"{idx}.png")
            total_s = self._now() - began_s
        stages = self.stages.copy()
        stages["steps"] -= stages["encode"] + stages["decode"]
        stages["rest"] = total_s - sum(stages.values())
        return Measured(total_s, stages, f"compiling and four steps before: {first_s:.1f} s")

    def _call(self, idx: int, *, output_type: str, steps: int = STEPS) -> Any:
        case = self._case
        options: dict[str, Any] = {"true_cfg_scale": 1.0} if case.is_picture else {"guidance_scale": 1.0}
        if not case.is_picture:
            options["num_frames"] = case.frames
        with self._stage("steps"):
            return self.pipeline(
                prompt=case.prompt(idx),
                width=case.width,
                height=case.height,
                num_inference_steps=steps,
                generator=torch.Generator("cpu").manual_seed(idx),
                output_type=output_type,
                return_dict=False,
                **options,
            )

    def _fused(self) -> Callable[[int], None]:
        names = [f"lora{idx}" for idx in range(NUM_LORAS)]
        for idx, name in enumerate(names):
            self.pipeline.load_lora_weights(self._factors(idx), adapter_name=name)
        fused: list[str] = []

        def switch(idx: int) -> None:
            if fused:
                self.pipeline.unfuse_lora(components=["transformer"])
            fused[:] = [names[idx % NUM_LORAS]]
            self.pipeline.set_adapters(fused)
            self.pipeline.fuse_lora(components=["transformer"], adapter_names=fused)

        return switch

    def _unmerged(self) -> Callable[[int], None]:
        """After `fused`: without its LoRAs."""
        self.pipeline.unload_lora_weights()
        for module in self.pipeline.transformer.modules():
            module._compiled_call_impl = None
        factors = [self._factors(idx) for idx in range(NUM_LORAS)]
        self.pipeline.enable_lora_hotswap(target_rank=RANK)
        self.pipeline.load_lora_weights(dict(factors[0]), adapter_name="current")

        def switch(idx: int) -> None:
            given = dict(factors[idx % NUM_LORAS])
            self.pipeline.load_lora_weights(given, adapter_name="current", hotswap=True)

        return switch

    def _factors(self, idx: int) -> dict[str, torch.Tensor]:
        factors: dict[str, torch.Tensor] = load_file(self._case.lora(idx), device=self._case.device)
        return factors

    def _now(self) -> float:
        if self._case.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began_s = self._now()
        yield
        self.stages[name] += self._now() - began_s

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._stage(name):
                return function(*args, **kwargs)

        return timed


def by_gfgen(case: Case) -> Measured:
    """The same jobs by `gfgen run`, in a process of its own."""
    lines, trace = case.folder / "jobs.jsonl", case.folder / "trace.json"
    with lines.open("w") as file:
        for idx in range(case.num_jobs):
            file.write(json.dumps(_job(case, idx)) + "\n")
    options = f"--random-weights --ranks 1 --device {case.device} --vae-dtype {case.vae_dtype}"
    command = f"-m gfgen run {lines} {options} --trace {trace} -q"
    subprocess.run([sys.executable, *command.split(), "-o", tempfile.mkdtemp(dir=case.folder)], check=True)
    return from_trace(json.loads(trace.read_text()))


def _job(case: Case, idx: int) -> dict[str, Any]:
    model = case.model if not case.model.startswith("tiny-") else str(CONFIGS / case.model)
    job = {
        "id": f"job{idx:02}",
        "model": model,
        "prompt": case.prompt(idx),
        "width": case.width,
        "height": case.height,
        "steps": STEPS,
        "seed": idx,
        "lora": [{"path": str(case.lora(idx))}],
    }
    if case.is_picture:
        return {**job, "true_cfg_scale": 1.0}
    video = {"frames": case.frames, "guidance_scale": 1.0, "format": "webp", "quality": 1}  # without ffmpeg
    return {**job, **video}


def from_trace(events: Sequence[dict[str, Any]]) -> Measured:
    """A rank's tasks. A switch is what a job's first step takes longer than other steps."""
    tasks = sorted(
        (event for event in events if event.get("ph") == "X" and event["args"].get("stage") in _STAGE_OF),
        key=lambda event: event["ts"],
    )
    stages: defaultdict[str, float] = defaultdict(float)
    for task in tasks:
        stages[_STAGE_OF[task["args"]["stage"]]] += task["dur"] / 1e6
    steps = [task for task in tasks if task["args"]["stage"] == "denoise"]
    later = [step for step in steps if step["args"]["step"]]
    step_s = statistics.median(step["dur"] / 1e6 for step in later)
    switches = {step["args"]["job"]: step["dur"] / 1e6 - step_s for step in steps if step not in later}
    stages["switch"] = sum(switches.values())
    stages["steps"] -= stages["switch"]
    total_s = (tasks[-1]["ts"] + tasks[-1]["dur"] - tasks[0]["ts"]) / 1e6
    stages["rest"] += total_s - sum(stages.values())
    idle_s = sum(task["args"].get("idle_ms", 0.0) for task in tasks[1:]) / 1e3
    gap_ms = statistics.median(step["args"].get("idle_ms", 0.0) for step in later)
    each = " ".join(f"{job} {1e3 * switch_s:.0f}" for job, switch_s in switches.items())
    decodes = " ".join(f"{task['dur'] / 1e6:.2f}" for task in tasks if task["args"]["stage"] == "decode")
    idle = f"device idle {idle_s:.3f} s in all, {gap_ms:.3f} ms before a step (median)"
    return Measured(total_s, stages, f"switches in ms: {each}; decodes in s: {decodes}; {idle}")


_STAGE_OF = {"encode": "encode", "prepare": "rest", "denoise": "steps", "decode": "decode"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--size", required=True, help="WxH")
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vae-dtype", choices=VAE_DTYPES, default="auto")
    parser.add_argument("--prompts", type=int, default=NUM_LORAS, help="of as many lengths")
    parser.add_argument("--sides", default=",".join(SIDES), help="in this order")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    torch._dynamo.config.recompile_limit = 64
    print(f"{options.model} {options.size}, {options.frames} frames, {options.jobs} jobs of {STEPS} steps")
    print(f"| | {' | '.join(('s per job', *STAGES))} |\n|---|{'---|' * (len(STAGES) + 1)}")
    with tempfile.TemporaryDirectory() as folder:
        case = Case(
            model=options.model,
            width=width,
            height=height,
            frames=options.frames,
            num_jobs=options.jobs,
            device=options.device,
            vae_dtype=options.vae_dtype,
            num_prompts=options.prompts,
            folder=Path(folder),
        )
        for side, measured in _measured(case, options.sides.split(",")):
            shares = [f"{measured.stages[stage] / measured.total_s:.1%}" for stage in STAGES]
            each = f"{measured.total_s / case.num_jobs:.3f}"
            print(f"| {side} | {' | '.join((each, *shares))} |\n{side}: {measured.note}", flush=True)


def _measured(case: Case, sides: Sequence[str]) -> Iterator[tuple[str, Measured]]:
    stock: Diffusers | None = Diffusers(case)
    assert stock is not None
    stock.make_loras()
    for side in sides:
        if side == "gfgen":
            stock = None
            gc.collect()
            torch.cuda.empty_cache()
        yield side, by_gfgen(case) if stock is None else stock.measure(side)


if __name__ == "__main__":
    main()
