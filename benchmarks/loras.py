"""Time to switch the LoRAs of a full-size transformer on one GPU, and that its steps then cost nothing extra.

    python -m benchmarks.loras wan2.2-ti2v-5b [--rank 32] [--without img_mod,txt_mod] [--blocks 30] [--theirs]
    python -m benchmarks.loras qwen-image --on-host
    python -m benchmarks.loras qwen-image --fp8
    python -m benchmarks.loras tiny-qwen-image --device cpu

Random weights and two random LoRAs of all linear layers of the blocks. Times are milliseconds by the host's
clock, from an idle device to an idle device. `--without` leaves layers out and `--blocks` leaves blocks out,
where weights and their copies do not fit in memory. `--on-host` has the copies in main memory, `--fp8` the
blocks in 8 bits. `--theirs` measures diffusers' own switch, too.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.measure_forward import ForwardShape, RunForward, captured, forward_of, inputs_of, timed_ms
from benchmarks.timing import host_s
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import resolve_checkpoint
from gfgen.models.fast.fused import fuse
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.components import without_progress_bars
from gfgen.models.loading.random_weights import StoredWeights, random_component
from gfgen.models.lora.merging import MergedLoras
from gfgen.models.lora.reading import original_weights
from gfgen.models.parallel.hooks import install

REPEATS = 10
NUM_CHECKED = 12
"""Weights that are compared with fp64."""
SHAPES = {
    "wan2.2-ti2v-5b": ForwardShape("wan2.2-ti2v-5b", 832, 480, 81),
    "qwen-image": ForwardShape("qwen-image", 1024, 1024, 1),
}


class Case:
    """A model, and two LoRAs for it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.device = torch.device(options.device)
        name = options.model
        self.checkpoint = CONFIGS / name if (CONFIGS / name).is_dir() else resolve_checkpoint(name)
        self.transformer = self.make()
        self.layers = dict(self._linears())
        self.files = [self._save(folder / f"{idx}.safetensors", seed=idx) for idx in range(2)]
        self.hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.files]

    def make(self) -> Any:
        dtype = torch.bfloat16
        model = random_component(self.checkpoint, "transformer", device=str(self.device), dtype=dtype)
        if self.options.blocks:
            blocks = "transformer_blocks" if hasattr(model, "transformer_blocks") else "blocks"
            setattr(model, blocks, getattr(model, blocks)[: self.options.blocks])
        return model

    def pipeline(self, transformer: Any) -> Any:
        kind = diffusers.QwenImagePipeline if "qwen" in self.options.model else diffusers.WanPipeline
        others = ("vae", "text_encoder", "tokenizer", "scheduler")
        return kind(transformer=transformer, **dict.fromkeys(others))

    def job(self, idx: int | None) -> JobSpec:
        if idx is None:
            return JobSpec(id="job", prompt="a fox")
        lora = {"sha256": self.hashes[idx], "scale": 0.8, "target": None}
        return JobSpec(id="job", prompt="a fox", lora=[lora], lora_files=[str(self.files[idx])])

    def factors(self, layer: str, *, seed: int) -> tuple[Tensor, Tensor]:
        """The two matrices of a LoRA for a layer, in bf16."""
        rows, columns = self.layers[layer]
        digest = hashlib.sha256(f"{seed} {layer}".encode()).digest()
        noise = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "little"))
        rank = self.options.rank
        up = torch.randn(rows, rank, generator=noise, device=self.device)
        down = torch.randn(rank, columns, generator=noise, device=self.device)
        return up.mul(0.1 / rank).bfloat16(), down.mul(0.1).bfloat16()

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        left_out = [part for part in self.options.without.split(",") if part]
        for name, layer in self.transformer.named_modules():
            is_in_block = isinstance(layer, nn.Linear) and "blocks." in name
            if is_in_block and not any(part in name for part in left_out):
                yield name, (layer.out_features, layer.in_features)

    def _save(self, path: Path, *, seed: int) -> Path:
        tensors = {}
        for name in self.layers:
            up, down = self.factors(name, seed=seed)
            tensors[f"transformer.{name}.lora_B.weight"] = up.cpu()
            tensors[f"transformer.{name}.lora_A.weight"] = down.cpu()
        save_file(tensors, path)
        return path


def checksum(model: nn.Module) -> list[int]:
    """A number for each weight, which depends on every bit and its place."""
    found = []
    dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    for parameter in model.state_dict().values():
        bits = parameter.flatten().view(dtypes[parameter.element_size()])
        total = 0
        for start in range(0, len(bits), 2**24):
            part = bits[start : start + 2**24]
            places = torch.arange(1, len(part) + 1, device=part.device)
            total = total * 31 + int((part.long() * (places % 1_000_003)).sum())
        found.append(total)
    return found


def errors(case: Case, weights: Mapping[str, Tensor], base: Mapping[str, Tensor], *, seed: int) -> float:
    """The largest error of merged weights, in half units in the last place of the largest weight."""
    worst = 0.0
    for name in base:
        up, down = case.factors(name.removesuffix(".weight"), seed=seed)
        exact = base[name].double() + 0.8 * (up.double() @ down.double())
        error = (weights[name].double() - exact).abs().max() / exact.abs().max()
        worst = max(worst, float(error) * 2**8)
    return worst


def measure_switches(case: Case) -> None:
    device, transformer = case.device, case.transformer
    install(transformer)
    fuse(transformer, fp8_on=device if case.options.fp8 else None)
    before = checksum(transformer)
    weights = original_weights(transformer)
    checked = [f"{name}.weight" for name in list(case.layers)[:: max(1, len(case.layers) // NUM_CHECKED)]]
    base = {} if case.options.fp8 else {name: weights[name].clone() for name in checked}
    forward = recorded_forward(case)
    say("a forward before all", forward_times(forward))
    merged = MergedLoras(case.pipeline(transformer))
    merged.keeps_on_host = case.options.on_host
    merged.stored = StoredWeights(case.checkpoint, has_random_weights=True)

    def switch(idx: int | None) -> float:
        return 1e3 * host_s(partial(merged.merge, case.job(idx)))

    say("first use from disk (1st with copies of base weights, 2nd)", [switch(0), switch(1)])
    say("switch, both known", [switch(turn % 2) for turn in range(REPEATS)])
    sums, restores_ms = [], []
    for idx in range(2):
        switch(idx)
        sums.append(checksum(transformer))
        if base:
            error = errors(case, weights, base, seed=idx)
            print(f"LoRA {idx}: largest error against fp64 is {error:.2f} half units of bf16", flush=True)
    say("a forward with a LoRA", forward_times(forward))
    for turn in range(REPEATS // 2):
        restores_ms.append(switch(None))
        is_same = checksum(transformer) == before
        switch(turn % 2)
        is_same_again = checksum(transformer) == sums[turn % 2]
        print(f"base restored bitwise: {is_same}; same LoRA, same bits: {is_same_again}", flush=True)
    say("switch to no LoRA", restores_ms)
    switch(None)
    say("a forward without a LoRA", forward_times(forward))
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)


@torch.no_grad()
def recorded_forward(case: Case) -> RunForward | None:
    """A forward in a CUDA graph; None where there is none to time."""
    if case.device.type != "cuda" or case.options.blocks:
        return None
    run = forward_of(case.transformer, *inputs_of(SHAPES[case.options.model], case.device), "one")
    for _ in range(2):
        run(None)
    return captured(run, None)


def forward_times(forward: RunForward | None) -> list[float]:
    return [timed_ms(forward, None) for _ in range(8)][1:] if forward else []


def measure_theirs(case: Case) -> None:
    """diffusers' own: fuse_lora after unfuse_lora, with both LoRAs loaded."""
    pipeline, names = case.pipeline(case.make()), ["first", "second"]
    for name, path in zip(names, case.files, strict=True):
        load = partial(pipeline.load_lora_weights, str(path.parent), weight_name=path.name, adapter_name=name)
        first_ms = 1e3 * host_s(load)
        say(f"diffusers: load_lora_weights of the {name}", [first_ms])
    before = {name: each for name, each in pipeline.transformer.named_parameters() if ".lora_" not in name}
    before = {name: before[name].detach().clone() for name in list(before)[::20]}
    times_ms = []
    for turn in range(6):

        def switch(name: str = names[turn % 2], is_first: bool = turn == 0) -> None:
            if not is_first:
                pipeline.unfuse_lora(components=["transformer"])
            pipeline.set_adapters([name], [0.8])
            pipeline.fuse_lora(components=["transformer"], adapter_names=[name])

        times_ms.append(1e3 * host_s(switch))
    pipeline.unfuse_lora(components=["transformer"])
    say("diffusers: unfuse_lora, set_adapters, fuse_lora", times_ms[1:])
    after = dict(pipeline.transformer.named_parameters())
    num_same = sum(torch.equal(each, after[name]) for name, each in before.items())
    print(f"diffusers: {num_same} of {len(before)} weights have their bits after unfuse_lora", flush=True)


def say(what: str, times_ms: Sequence[float]) -> None:
    if times_ms:
        all_ms = " ".join(f"{each:.1f}" for each in times_ms)
        print(f"{what}: median {statistics.median(times_ms):.2f} ms ({all_ms})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--without", default="", metavar="PART,...")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--on-host", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--theirs", action="store_true")
    options = parser.parse_args()
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=scratch) as folder, without_progress_bars():
        began = time.perf_counter()
        case = Case(options, Path(folder))
        size_mb = case.files[0].stat().st_size / 1e6
        changed = sum(rows * columns for rows, columns in case.layers.values())
        where = torch.cuda.get_device_name() if case.device.type == "cuda" else "CPU"
        print(
            f"{options.model} on {where}: {len(case.layers)} layers with {changed / 1e9:.2f} G parameters, "
            f"LoRAs of rank {options.rank} with {size_mb:.0f} MB, in {time.perf_counter() - began:.1f} s",
            flush=True,
        )
        measure_switches(case)
        if options.theirs:
            del case.transformer
            gc.collect()
            measure_theirs(case)


if __name__ == "__main__":
    main()
