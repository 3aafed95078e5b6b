"""How long ranks take to load a checkpoint of full size, and what of main memory that takes.

    python -m benchmarks.gpu_loading wan2.2-ti2v-5b --folder /dev/shm/checkpoint [--gpus 2]

Random weights are saved as the released checkpoints store them (Wan's transformers in fp32), then loaded
by as many processes at once, one to each GPU: as gfgen does it, and by diffusers' `from_pretrained` and
`.to(device)`. The folder takes 34 GB for Wan2.2-5B, 58 for Qwen-Image, and is left for the next time. With
--device cpu and a small model's name this can be tried out anywhere.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from gfgen.models.geometry.model import CONFIGS
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.components import load_pipeline
from gfgen.models.loading.random_weights import random_pipeline

SHARDS = "5GB"
WIDE = {"WanPipeline": ("transformer", "transformer_2")}
"""By pipeline class, what is stored in fp32 and computed with in bf16.
Source: the card of AbstractFramework/wan2.2-ti2v-5b-diffusers-8bit on the Hugging Face hub."""
WAYS = ("from_pretrained, then .to(device)", "gfgen")


def class_of(checkpoint: Path) -> Any:
    """The pipeline's class."""
    return getattr(diffusers, json.loads((checkpoint / "model_index.json").read_text())["_class_name"])


def save(configs: Path, folder: Path, device: str) -> None:
    """A checkpoint with random weights."""
    kind = class_of(configs)
    dtypes = component_dtypes(kind.__name__, "auto")
    pipeline = random_pipeline(kind, configs, device=device, dtype=torch.bfloat16, dtypes=dtypes)
    for name in WIDE.get(kind.__name__, ()):
        if getattr(pipeline, name, None) is not None:
            getattr(pipeline, name).float()
    pipeline.save_pretrained(str(folder), max_shard_size=SHARDS)


def load(checkpoint: Path, device: str, way: str) -> tuple[float, Mapping[str, float]]:
    """Seconds, and gigabytes of this process's main memory: at most, and afterwards."""
    torch.set_num_threads(1)  # as a rank has
    torch.empty(1, device=device)
    kind = class_of(checkpoint)
    dtypes = component_dtypes(kind.__name__, "auto")
    began_s = time.perf_counter()
    if way == "gfgen":
        load_pipeline(kind, checkpoint, device=device, dtype=torch.bfloat16, dtypes=dtypes)
    else:
        own = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}
        kind.from_pretrained(str(checkpoint), dtype={"default": torch.bfloat16, **own}).to(device)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s, _memory_gb()


def _memory_gb() -> Mapping[str, float]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 / 1e9 for name in ("VmHWM", "VmRSS")}


def main() -> None:
    """Print a table: the slower process of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a short name, of which the config files come with gfgen")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is made, or is")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    devices = [f"cuda:{idx}" for idx in range(asked.gpus)] if asked.device == "cuda" else ["cpu"] * asked.gpus
    context = multiprocessing.get_context("spawn")
    if not (asked.folder / "model_index.json").exists():
        with context.Pool(1) as pool:
            pool.apply(save, (CONFIGS / asked.model, asked.folder, devices[0]))
    print(f"{asked.model} in {asked.folder}, loaded by {asked.gpus} processes at once\n")
    print("| | s | main memory of a process at most, mapped files included, GB | afterwards, GB |")
    print("|---|---|---|---|")
    for way in WAYS:
        with context.Pool(len(devices), maxtasksperchild=1) as pool:
            found = pool.starmap(load, [(asked.folder, device, way) for device in devices], chunksize=1)
        seconds = max(taken_s for taken_s, _ in found)
        peak, after = (max(memory[name] for _, memory in found) for name in ("VmHWM", "VmRSS"))
        print(f"| {way} | {seconds:.1f} | {peak:.1f} | {after:.1f} |")


if __name__ == "__main__":
    main()
