"""The same jobs with all weights on the GPU, and with --memory, which streams what does not fit.

    python -m benchmarks.streamed qwen-image --size 1024x1024 --steps 20 --jobs 8 --memory 24GB -- --ranks 1
    python -m benchmarks.streamed wan2.2-ti2v-5b --size 832x480 --frames 49 --steps 20 --memory 16GB
    python -m benchmarks.streamed flux --size 1024x1024 --steps 20 --jobs 4 --memory 16GB
    python -m benchmarks.streamed qwen-image --size 1024x1024 --steps 20 --jobs 8 --only diffusers
    python -m benchmarks.streamed --tiny

Options after `--` are those of both runs, such as `--precision fp8`. Weights are random; `flux` is
Flux.1-dev. Each run is a process of its own, and its time is that from the first task to the last file, by
the trace. Files of both runs must have equal bytes; `--only` makes one of them, where a call may not take
long. Memory is torch's peak and what it took from the GPU, by the trace, and the most that nvidia-smi shows
for a process. `--only diffusers` makes the jobs one after another with diffusers' group offload: one block in
a group, with a stream, from a pinned copy; the VAE stays on the GPU, nothing is compiled, and a first job of
one step does not count. `--tiny` tries the script out on CPU ranks, which stream nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measured import run_gfgen, times_of
from gfgen.runtime.core.devices import parse_memory

PROMPTS = ("a red fox in the snow", "two boats at sunset", "a castle on a hill", "rain in a city at night")

FLUX: dict[str, dict[str, Any]] = {
    "transformer": {
        "attention_head_dim": 128, "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38,
        "in_channels": 64, "out_channels": None, "joint_attention_dim": 4096, "pooled_projection_dim": 768,
        "axes_dims_rope": [16, 56, 56], "guidance_embeds": True,
    },
    "text_encoder": {
        "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "vocab_size": 49408, "max_position_embeddings": 77,
    },
    "text_encoder_2": {
        "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new",
    },
    "vae": {
        "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16,
        "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
        "norm_num_groups": 32, "use_quant_conv": False, "use_post_quant_conv": False,
    },
}  # fmt: skip
"""What Flux.1-dev has in the place of the small checkpoint's values."""
NUM_PARAMETERS = {
    "num_parameters": {
        "transformer": 11901408320, "text_encoder": 123060480, "text_encoder_2": 4762310656, "vae": 83819683,
    },
    "block_parameters": {
        "transformer": {
            "transformer_blocks": [19, 339831296], "single_transformer_blocks": [38, 141591808],
        },
        "text_encoder_2": {"block": [24, 192946176]},
    },
}  # fmt: skip
"""By which gfgen knows what fits; without weight files it has no other way."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny-qwen-image")
    parser.add_argument("--size", default="64x64")
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--memory", default="24GB")
    parser.add_argument("--negative-prompt", help="Gives models guidance that have it with this only.")
    parser.add_argument("--image", help="The picture that videos begin with.")
    parser.add_argument("--vae-dtype", default="float32", help="Of diffusers; gfgen's stands after --.")
    parser.add_argument("--only", choices=("whole", "streamed", "diffusers"))
    parser.add_argument("--tiny", action="store_true")
    words = [*sys.argv[1:], "--"]
    asked = parser.parse_args(words[: words.index("--")])
    given = words[words.index("--") + 1 : -1]
    options = [*given, *(["--device", "cpu", "--ranks", "1"] if asked.tiny else [])]
    limits = {"whole": [], "streamed": [] if asked.tiny else ["--memory", asked.memory]}
    print(f"{asked.model} {asked.size}x{asked.frames}, {asked.steps} steps, {asked.jobs} jobs, {options}")
    if asked.only == "diffusers":
        by_diffusers(asked)
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        if asked.model == "flux":
            asked.model = str(flux(Path(folder) / "flux"))
        for name in [asked.only] if asked.only else limits:
            found = run(asked, [*options, *limits[name]], Path(folder) / name)
            gb = ", ".join(f"{key} {value / 1e9:.1f}" for key, value in found["bytes"].items())
            limit = " ".join(limits[name]) or "all on the GPU"
            print(f"{limit:16} {found['seconds'] / asked.jobs:8.3f} s a job   GB: {gb}", flush=True)
            print(*(f"    {line}\n" for line in (found["stages"], *found["told"])), sep="", end="")
            results.append(found)
    if len(results) == 2:
        whole, streamed = results
        is_equal = whole["files"] == streamed["files"]
        print(
            f"ratio {streamed['seconds'] / whole['seconds']:.3f}, files {'equal' if is_equal else 'DIFFER'}"
        )
        sys.exit(not is_equal)


def flux(folder: Path) -> Path:
    """Config files of Flux.1-dev at its full size, without weights."""
    from small_checkpoints import save_checkpoint

    save_checkpoint("FluxPipeline", folder)
    for part, values in FLUX.items():
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    for path in folder.glob("*/*.safetensors"):
        path.unlink()
    (folder / "gfgen.json").write_text(json.dumps(NUM_PARAMETERS))
    return folder


def lines_of(asked: argparse.Namespace) -> list[dict[str, Any]]:
    given = {"model": asked.model, "size": asked.size, "frames": asked.frames, "steps": asked.steps}
    given |= {name: value for name in ("negative_prompt", "image") if (value := getattr(asked, name))}
    prompts = itertools.islice(itertools.cycle(PROMPTS), asked.jobs)
    return [{"id": f"job-{n}", "prompt": text, "seed": n, **given} for n, text in enumerate(prompts)]


def run(asked: argparse.Namespace, options: Sequence[str], folder: Path) -> dict[str, Any]:
    """The time, the memory and the files of one run."""
    folder.mkdir()
    ending, peaks = threading.Event(), [0]
    watcher = threading.Thread(target=_watch, args=(ending, peaks))
    watcher.start()
    try:
        timeline, said = run_gfgen(lines_of(asked), folder, "--random-weights", *options)
    finally:
        ending.set()
        watcher.join()
    (seconds, stages), entries = times_of(timeline), json.loads((folder / "trace.json").read_text())
    used = [each["args"] for each in entries if each["name"] == "memory"]
    files = [path for path in sorted((folder / "out").iterdir()) if path.suffix in (".png", ".mp4")]
    assert len(files) == asked.jobs, f"{len(files)} files for {asked.jobs} jobs"
    return {
        "seconds": seconds,
        "files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        "bytes": {
            "torch": max((size for each in used for size in each["device_peaks"].values()), default=0),
            "reserved": max((each["reserved_bytes"] for each in used), default=0),
            "nvidia-smi": peaks[0],
        },
        "stages": stages,
        "told": [line for line in said.splitlines() if "stream" in line or "pins no more" in line],
    }


def by_diffusers(asked: argparse.Namespace) -> None:
    """Print the time of a job with group offload, in this process."""
    import imageio
    import torch

    from benchmarks.first_run import read_jobs
    from benchmarks.replicas import Replica, Settings

    class Offloaded(Replica):
        def _compile(self, pipeline: Any) -> None:
            if not torch.cuda.is_available():
                return
            pipeline.to("cpu")
            pipeline.enable_group_offload(
                torch.device("cuda"), num_blocks_per_group=1, use_stream=True, exclude_modules="vae"
            )
            pipeline.vae.to("cuda")
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(parse_memory(asked.memory, option="--memory") / total)

    specs = [job.spec for job in read_jobs("".join(f"{json.dumps(line)}\n" for line in lines_of(asked)))]
    device = "cpu" if asked.tiny else "cuda"
    replica = Offloaded(Settings(device, 1, True, asked.vae_dtype, Path()), specs, device)
    replica.generate(specs[0], steps=1)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as files:
        for idx, spec in enumerate(specs):
            frames = replica.generate(spec)
            files.submit(imageio.mimwrite, f"{folder}/{idx}.{'mp4' if len(frames) > 1 else 'png'}", frames)
    seconds = time.perf_counter() - began_s
    gb = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    print(f"diffusers        {seconds / asked.jobs:8.3f} s a job   GB: torch {gb:.1f}", flush=True)


def _watch(ending: threading.Event, peaks: list[int]) -> None:
    """Note the most memory that nvidia-smi shows for a process, or for a GPU if it shows no processes."""
    asks = ("--query-compute-apps=used_memory", "--query-gpu=memory.used")
    gpus = ["-i", visible] if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    while not ending.wait(0.25):
        for ask in asks:
            try:
                shown = subprocess.run(
                    ["nvidia-smi", *gpus, ask, "--format=csv,noheader,nounits"],
                    capture_output=True,
                    text=True,
                )
            except OSError:
                return
            sizes = [int(word) for word in shown.stdout.split() if word.isdigit()]
            if sizes:
                peaks[0] = max(peaks[0], max(sizes) << 20)
                break


if __name__ == "__main__":
    main()
