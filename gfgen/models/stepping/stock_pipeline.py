"""A stock diffusers pipeline, used as in a plain script, for comparison with gfgen.

gfgen changes nothing in it. On several ranks its transformer uses diffusers' context parallelism over torch's
process group; every rank makes the same calls.
"""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ContextParallelConfig
from torch import distributed

from gfgen.job.spec import JobSpec
from gfgen.models.geometry.call import signature_of
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.model import weightless_geometry
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.components import load_pipeline
from gfgen.models.loading.random_weights import random_pipeline
from gfgen.models.stepping.adapter import as_frames, given_files, tile_if_needed

RECOMPILE_LIMIT = 64
"""Beyond torch's 8, after which a block would run eagerly without a word."""


def join_group(*, rank: int, num_ranks: int, store: str, device: str) -> None:
    """Meet the other ranks through a file.

    GPUs use NCCL, and gloo for the sizes of uneven shards, so that the host waits for no GPU. CPU ranks use
    gloo. diffusers does not support these: it counts accelerators.
    Source: diffusers 0.42 commands/run.py, models/_modeling_parallel.py (gather_size_by_comm)
    """
    if device == "cpu":
        torch.accelerator.device_count = lambda: 1
        backend = "gloo"
    else:
        torch.cuda.set_device(device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        backend = "cpu:gloo,cuda:nccl"
    method = f"file://{store}"
    distributed.init_process_group(backend, init_method=method, rank=rank, world_size=num_ranks)


class StockPipeline:
    """Of any class. Its parts move to a small GPU at their turn if `moved` is "model" or "sequential"."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        device: str,
        num_ranks: int,
        is_uneven: bool = False,
        is_compiled: bool = False,
        has_random_weights: bool = False,
        vae_dtype: str = "auto",
        moved: str | None = None,
    ) -> None:
        name = read_checkpoint(checkpoint, with_weights=not has_random_weights).pipeline_class
        load = random_pipeline if has_random_weights else load_pipeline
        self._device, self._signature = device, signature_of(name)
        self._has_alpha = weightless_geometry(checkpoint).has_alpha
        self.step_s: float | None = None
        """The median time of the last call's steps after its first; None for fewer, or if no call tells."""
        self._pipeline = load(
            getattr(diffusers, name),
            checkpoint,
            device="cpu" if moved else device,
            dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            dtypes=component_dtypes(name, vae_dtype),
        )
        tile_if_needed(self._pipeline)
        self._pipeline.set_progress_bar_config(disable=True)
        if moved:
            getattr(self._pipeline, f"enable_{moved}_cpu_offload")(device=device)
        if num_ranks > 1:
            config = ContextParallelConfig(ulysses_degree=num_ranks, ulysses_anything=is_uneven)
            self._pipeline.transformer.enable_parallelism(config=config)
        if is_compiled:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            self._pipeline.transformer.compile_repeated_blocks(dynamic=False)

    @torch.no_grad()
    def generate(self, spec: JobSpec, *, steps: int | None = None, is_to_decode: bool = True) -> Any:
        """The frames of a job, uint8 [F, H, W, C]; None without decoding."""
        arguments = self._signature.arguments_for(spec) | given_files(spec, has_alpha=self._has_alpha)
        ends, on_gpu, event = list[Any](), self._device != "cpu", torch.cuda.Event

        def note(*_: Any) -> dict[str, Any]:
            ends.append(event(enable_timing=True) if on_gpu else time.monotonic())  # type: ignore[no-untyped-call]
            if on_gpu:
                ends[-1].record()
            return {}

        own = {"output_type": "np" if is_to_decode else "latent", "callback_on_step_end": note}
        arguments |= {name: value for name, value in own.items() if name in self._signature.arguments}
        if steps is not None:
            arguments["num_inference_steps"] = steps
        torch.manual_seed(spec.seed or 0)
        made = self._pipeline(**arguments, generator=torch.Generator("cpu").manual_seed(spec.seed or 0))
        frames = as_frames(made).cpu().numpy() if is_to_decode else None
        if on_gpu:
            torch.cuda.synchronize()
        steps_s = [1e-3 * a.elapsed_time(b) if on_gpu else b - a for a, b in pairwise(ends)]
        self.step_s = statistics.median(steps_s) if steps_s else None
        return frames
