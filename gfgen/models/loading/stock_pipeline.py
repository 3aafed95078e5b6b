"""A stock diffusers pipeline, used as in a plain script, for comparison with gfgen.

gfgen changes nothing in it. On several ranks its transformer uses diffusers' context parallelism over torch's
process group; every rank makes the same calls.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ContextParallelConfig, QwenImagePipeline, WanPipeline
from numpy.typing import NDArray
from torch import distributed

from gfgen.job.spec import JobSpec
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.components import load_pipeline
from gfgen.models.loading.random_weights import random_pipeline

PIPELINES: dict[str, Any] = {"WanPipeline": WanPipeline, "QwenImagePipeline": QwenImagePipeline}
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
    ) -> None:
        name = str(read_checkpoint(checkpoint, with_weights=not has_random_weights).index["_class_name"])
        load = random_pipeline if has_random_weights else load_pipeline
        self._pipeline = load(
            PIPELINES[name],
            checkpoint,
            device=device,
            dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            dtypes=component_dtypes(name, vae_dtype),
        )
        self._pipeline.set_progress_bar_config(disable=True)
        transformer = self._pipeline.transformer
        if num_ranks > 1:
            config = ContextParallelConfig(ulysses_degree=num_ranks, ulysses_anything=is_uneven)
            transformer.enable_parallelism(config=config)
        if is_compiled:
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            transformer.compile_repeated_blocks(dynamic=False)

    @torch.no_grad()
    def generate(self, spec: JobSpec, *, steps: int | None = None, is_to_decode: bool = True) -> Any:
        """The frames of a job, uint8 [F, H, W, 3]; None without decoding."""
        options: dict[str, Any] = {
            "prompt": spec.prompt,
            "negative_prompt": spec.negative_prompt,
            "width": spec.width,
            "height": spec.height,
            "num_inference_steps": steps or spec.steps,
            "generator": torch.Generator("cpu").manual_seed(spec.seed or 0),
            "output_type": "np" if is_to_decode else "latent",
        }
        if isinstance(self._pipeline, WanPipeline):
            options |= {"num_frames": spec.frames, "guidance_scale": spec.guidance_scale}
        else:
            options["true_cfg_scale"] = spec.true_cfg_scale
        made = self._pipeline(**options)[0]
        if not is_to_decode:
            return None
        pictures = made[0] if isinstance(self._pipeline, WanPipeline) else made
        frames: NDArray[np.uint8] = (np.asarray(pictures) * 255).round().astype(np.uint8)
        return frames
