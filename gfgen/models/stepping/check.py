"""Whether a checkpoint runs in steps with the bits of its pipeline's own call, tried with a small job.

`StockPipeline` is diffusers' own, as a plain script uses it, for comparisons.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import torch
from diffusers import ContextParallelConfig
from torch import distributed

from gfgen.errors import ModelError, in_one_line
from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import Adapter, Fields
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.call import signature_of
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.model import weightless_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.rules import known
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.components import load_pipeline
from gfgen.models.loading.random_weights import random_pipeline
from gfgen.models.stepping.adapter import PipelineAdapter, as_frames, given_files, tile_if_needed
from gfgen.models.stepping.program import NotSteppableError
from gfgen.models.stepping.small_job import pictures, resolved
from gfgen.models.stepping.stepper import Stepper, is_finished
from gfgen.models.stepping.values import vars_of

SIDES = (128, 256, 512, 1024)
"""Sizes to try: the smallest one that the pipeline's own call accepts counts."""
SEED = 7


@dataclass(frozen=True, slots=True)
class Trial:
    job: JobSpec
    num_iterations: int
    problem: str | None
    """Where the results differ, or why the call cannot run in steps; None if all bits are equal."""
    is_stepped: bool
    peak_bytes: int = 0
    """The most memory of the GPU, or of this process, up to the end of the job."""


def try_checkpoint(checkpoint: Path, given: JobSpec, *, device: str, trusts_code: bool = False) -> Trial:
    """Run a small job in steps and by the pipeline's own call; what `given` says is kept.

    Raises: ModelError if the checkpoint cannot be loaded, or if its own call fails at all sizes; JobError
            for a job that the model does not take.
    """
    adapter = load_adapter(checkpoint, device=device, trusts_code=trusts_code)
    failure: BaseException | None = None
    with pictures() as folder:
        geometry = adapter.geometry
        has_size = not isinstance(geometry, PipelineGeometry) or geometry.takes_size
        for side in SIDES if has_size and given.width is None else (None,):
            width, height = given.width or side, given.height or side
            job = dataclasses.replace(given, seed=SEED, width=width, height=height)
            spec = resolved(geometry, job, folder)
            try:
                trial = _try(adapter, spec, checkpoint, device=device)
                peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                if device != "cpu":
                    peak_bytes = torch.cuda.max_memory_allocated()
                return dataclasses.replace(trial, peak_bytes=peak_bytes)
            except _OwnCallError as error:
                failure = failure or error.__cause__
    assert failure is not None
    raise ModelError(f"model {checkpoint}: its own call fails: {_where(failure)}")


class _OwnCallError(Exception):
    pass


def _try(adapter: Adapter, spec: JobSpec, checkpoint: Path, *, device: str) -> Trial:
    if not isinstance(adapter, PipelineAdapter):
        return _try_own_adapter(adapter, spec, checkpoint, device=device)
    arguments = adapter.arguments(spec)
    adapter.pipeline.set_progress_bar_config(disable=True)
    try:
        own = whole_call(adapter.pipeline, arguments, seed=SEED)
    except Exception as error:  # a pipeline may raise anything for a size that it does not take
        raise _OwnCallError from error
    try:
        stepped, num_iterations = stepped_call([adapter.pipeline], arguments, seed=SEED, device=device)
    except NotSteppableError as error:
        return Trial(spec, 0, str(error), is_stepped=False)
    except Exception as error:
        return Trial(spec, 0, f"the call fails in steps: {_where(error)}", is_stepped=True)
    return Trial(spec, num_iterations, difference(stepped, own), is_stepped=True)


def _try_own_adapter(adapter: Adapter, spec: JobSpec, checkpoint: Path, *, device: str) -> Trial:
    """The frames of gfgen's own adapter of a class, against those of diffusers' pipeline."""
    frames = _frames(adapter, spec)
    stock = StockPipeline(checkpoint, device=device, num_ranks=1)
    try:
        own = stock.generate(spec)
    except Exception as error:
        raise _OwnCallError from error
    found = difference(frames.cpu(), torch.from_numpy(own), "frames")
    return Trial(spec, known(spec.steps), found, is_stepped=True)


def _frames(adapter: Adapter, spec: JobSpec) -> torch.Tensor:
    prompt = moved(adapter.encode(spec))
    condition, latents = map(moved, adapter.prepare(spec, prompt))
    for step in range(known(spec.steps)):
        latents = moved(adapter.denoise(spec, prompt, condition, latents, step=step))
    made: Fields = adapter.decode(spec, latents)
    return made.tensors["frames"]


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_one_line(error)[:300]} ({Path(frame.filename).name}:{frame.lineno})"


def whole_call(pipeline: Any, args: Mapping[str, Any], *, seed: int) -> Any:
    torch.manual_seed(seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipeline(**args, generator=generator)


def stepped_call(
    pipelines: list[Any], args: Mapping[str, Any], *, seed: int, device: str = "cpu"
) -> tuple[Any, int]:
    """The output of a call whose tasks alternate between pipeline objects, and the number of its steps."""
    steppers = [Stepper(pipeline, device=device) for pipeline in pipelines]
    prompt = moved(steppers[0].encode(args, seed=seed))
    condition, state = map(moved, steppers[-1].prepare(prompt))
    num_steps = 0
    while not is_finished(state):
        state = moved(steppers[num_steps % len(steppers)].step(prompt, condition, state))
        num_steps += 1
    return steppers[num_steps % len(steppers)].decode(state), num_steps


def moved(fields: Fields) -> Fields:
    """An artifact as another process gets it."""
    return Fields({name: tensor.clone() for name, tensor in fields.tensors.items()}, dict(fields.scalars))


def difference(ours: Any, theirs: Any, where: str = "output") -> str | None:
    """Where two outputs first differ in a bit; None if they are equal."""
    if type(ours) is not type(theirs):
        return f"{where}: {type(ours).__name__}, not {type(theirs).__name__}"
    if isinstance(ours, PIL.Image.Image):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
    if isinstance(ours, np.ndarray):
        ours, theirs = torch.from_numpy(ours.copy()), torch.from_numpy(theirs.copy())
    if isinstance(ours, torch.Tensor):
        is_same = ours.shape == theirs.shape and torch.equal(_bits(ours), _bits(theirs))
        return None if is_same else f"{where}: {_how_far(ours, theirs)}"
    if isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} items, not {len(theirs)}"
        pairs = [(f"{where}[{idx}]", *pair) for idx, pair in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, dict):
        pairs = [(f"{where}.{key}", ours[key], theirs[key]) for key in ours]
    elif hasattr(ours, "__dataclass_fields__"):
        pairs = [(f"{where}.{key}", value, vars_of(theirs)[key]) for key, value in vars_of(ours).items()]
    else:
        return None if ours == theirs else f"{where}: {ours!r}, not {theirs!r}"
    return next((found for name, a, b in pairs if (found := difference(a, b, name))), None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _how_far(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    return f"largest difference {(ours.double() - theirs.double()).abs().max().item():.3g}"


# diffusers' own pipelines ---------------------------------------------------------------------------
# gfgen changes nothing in them. On several ranks their transformer uses diffusers' context parallelism over
# torch's process group; every rank makes the same calls.


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
