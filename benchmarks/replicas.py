"""Plain diffusers at its best, for `first_run.py replicas`: one process a GPU, one shared queue.

A process holds the pipelines of all models with random weights of full size, and blocks compiled for fixed
shapes (`compile_repeated_blocks(dynamic=False)`). Before the clock starts it makes two steps of every shape
and length of text, and decodes every shape. Frames become uint8 on the device; threads write the files.
On GPUs of more than 100 GB text encoders stay, and jobs are encoded in their turn. Smaller ones do not hold
both models: there, embeddings are made before the clock starts, and the text encoders are dropped.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch

from benchmarks.first_run import Record, alone_of, conditions, keep_record, read_jobs, scores
from gfgen.job.spec import JobSpec
from gfgen.models.families.pictures import to_uint8
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.random_weights import random_pipeline
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import find_gpus
from gfgen.runtime.files.outputs import write_output

ROOM_BYTES = 100e9
WARM_UP_STEPS = 4
"""Flow matching with one step divides by zero; cache-dit may not compute the third of four."""
NUM_WRITERS = 4
"""Threads of each process."""
PATIENCE_S = 5.0
"""Between two looks whether all processes live."""
ORDERS: Mapping[str, Callable[[AdmittedJob, float], float]] = {
    "file": lambda job, alone_s: 0.0,
    "longest": lambda job, alone_s: -alone_s,
    "deadline": lambda job, alone_s: job.spec.deadline_s or 0.0,
    "shortest": lambda job, alone_s: alone_s,
}


class Settings(NamedTuple):
    device: str
    num_ranks: int
    encodes: bool
    vae_dtype: str
    folder: Path
    cache_dit: str = ""
    """Words of cache_dit_group.py."""
    rank: int = 0


class Told(NamedTuple):
    """A message of a process: "ready", or of a job "made" or "written"."""

    kind: str
    idx: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    num_late_graphs: int = 0
    """Compiled since the warm-up."""
    error: str = ""


class Replica:
    """All pipelines on one device."""

    def __init__(self, settings: Settings, specs: Sequence[JobSpec], device: str) -> None:
        self._settings, self._device = settings, device
        self._texts: dict[tuple[str | None, ...], Mapping[str, Any]] = {}
        """Embeddings as arguments of a call."""
        self._pipelines: dict[str | None, Any] = {}
        for model in sorted({spec.model or "" for spec in specs}):
            self._pipelines[model] = self._made(model, [spec for spec in specs if spec.model == model])

    def _made(self, model: str, specs: Sequence[JobSpec]) -> Any:
        name = json.loads((CONFIGS / model / "model_index.json").read_text())["_class_name"]
        pipeline: Any = random_pipeline(
            getattr(diffusers, name),
            CONFIGS / model,
            device=self._device,
            dtype=torch.float32 if self._device == "cpu" else torch.bfloat16,
            dtypes=component_dtypes(name, self._settings.vae_dtype),
        )
        pipeline.set_progress_bar_config(disable=True)
        if not self._settings.encodes:
            self._texts |= {_text(spec): self._embeddings(pipeline, spec) for spec in specs}
            pipeline.register_modules(text_encoder=None)
            gc.collect()
            torch.cuda.empty_cache()
        self._compile(pipeline)
        return pipeline

    def _compile(self, pipeline: Any) -> None:
        if self._device != "cpu":
            pipeline.transformer.compile_repeated_blocks(dynamic=False)

    @torch.no_grad()
    def _embeddings(self, pipeline: Any, spec: JobSpec) -> Mapping[str, Any]:
        texts = {"prompt": spec.prompt}
        if max(spec.guidance_scale or 0.0, spec.true_cfg_scale or 0.0) > 1:
            texts["negative_prompt"] = spec.negative_prompt or ""
        given: dict[str, Any] = {"device": self._device, "max_sequence_length": 512}
        if isinstance(pipeline, diffusers.WanPipeline):
            given["do_classifier_free_guidance"] = False
        # Qwen-Image's mask is not passed on: without one all tokens count, as they do with one prompt.
        return {f"{name}_embeds": pipeline.encode_prompt(text, **given)[0] for name, text in texts.items()}

    def warm_up(self, specs: Sequence[JobSpec]) -> None:
        """Replicas begin elsewhere, so that they find each other's compiled blocks in Inductor's cache."""
        examples: dict[tuple[Any, ...], JobSpec] = {}
        for spec in specs:
            num_tokens = len(self._pipelines[spec.model].tokenizer(spec.prompt).input_ids)
            examples.setdefault((_shape(spec), 0 if spec.fps else num_tokens), spec)  # Wan pads
        found, seen = list(examples.values()), set()
        first = self._settings.rank * len(found) // self._settings.num_ranks
        for spec in found[first:] + found[:first]:
            self.generate(spec, steps=WARM_UP_STEPS, is_decoded=_shape(spec) not in seen)
            seen.add(_shape(spec))

    @torch.no_grad()
    def generate(self, spec: JobSpec, *, steps: int | None = None, is_decoded: bool = True) -> Any:
        pipeline, texts = self._pipelines[spec.model], self._texts.get(_text(spec))
        options: dict[str, Any] = {"num_frames": spec.frames, "guidance_scale": spec.guidance_scale}
        if not isinstance(pipeline, diffusers.WanPipeline):
            options = {"true_cfg_scale": spec.true_cfg_scale}
        output = pipeline(
            **(texts or {"prompt": spec.prompt, "negative_prompt": spec.negative_prompt}),
            **options,
            width=spec.width,
            height=spec.height,
            num_inference_steps=steps or spec.steps,
            generator=torch.Generator("cpu").manual_seed(spec.seed or 0),
            output_type="pt" if is_decoded else "latent",
            return_dict=False,
        )[0][0]
        return to_uint8(output if output.dim() == 4 else output[None]).cpu().numpy() if is_decoded else None


def _shape(spec: JobSpec) -> tuple[Any, ...]:
    return (spec.model, spec.width, spec.height, spec.frames)


def _text(spec: JobSpec) -> tuple[str | None, ...]:
    return (spec.model, spec.prompt, spec.negative_prompt)


def serve(rank: int, settings: Settings, specs: Sequence[JobSpec], todo: Any, told: Any) -> None:
    """A process: tells that it is ready, then makes jobs until it is killed."""
    diffusers.logging.set_verbosity_error()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.num_ranks))
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    device = "cpu" if settings.device == "cpu" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    kind = importlib.import_module("benchmarks.cache_dit_group").Group if settings.cache_dit else Replica
    replica = kind(settings._replace(rank=rank), specs, device)
    replica.warm_up(specs)
    counts = torch._dynamo.utils.counters["stats"]
    num_graphs = counts["unique_graphs"]
    told.put(Told("ready"))

    def write(idx: int, frames: Any) -> None:
        fps, error = (specs[idx].fps, "") if len(frames) > 1 else (None, "")
        path = settings.folder / f"{time.monotonic_ns()}-{idx}{'.mp4' if fps else '.png'}"
        try:
            write_output(frames, path, fps=fps, metadata={})
        except Exception as problem:
            error = repr(problem)
        told.put(Told("written", idx, ended_s=time.monotonic(), error=error))
        path.unlink(missing_ok=True)

    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        while True:
            idx = todo.get()
            began_s = time.monotonic()
            frames = replica.generate(specs[idx])
            if frames is None:  # another rank of the group has them
                continue
            told.put(Told("made", idx, began_s, time.monotonic(), counts["unique_graphs"] - num_graphs))
            writers.submit(write, idx, frames)


def measure(asked: argparse.Namespace) -> None:
    """Run the jobs in each order, and keep a record of each."""
    began_s, longest_s = time.monotonic(), 0.0
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # no NVLink multicast (README.md)
    gpus = find_gpus() if asked.device == "cuda" else ()
    has_room = all(gpu.memory_bytes > ROOM_BYTES for gpu in gpus)
    encodes = asked.embeddings == "encoded" or (asked.embeddings == "auto" and has_room)
    jobs = read_jobs(asked.jobs.read_text())
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        num_ranks = asked.gpus or len(gpus) or 1
        settings = Settings(asked.device, num_ranks, encodes, asked.vae_dtype, Path(folder), asked.cache_dit)
        specs = [job.spec for job in jobs]
        assert not any(spec.arrival_s or (spec.reuse and not asked.cache_dit) for spec in specs)
        todo = [context.SimpleQueue() for _ in range(num_ranks if asked.cache_dit else 1)]
        given = [(rank, settings, specs, todo[rank % len(todo)], told) for rank in range(num_ranks)]
        processes = [context.Process(target=serve, args=args, daemon=True) for args in given]
        for process in processes:
            process.start()
        _wait(told, processes, "ready", settings.num_ranks)
        name = f"cache-dit {metadata.version('cache-dit')} {asked.cache_dit}" if asked.cache_dit else ""
        record = {"what": name or "diffusers compiled", "caches": "warm", **conditions(asked)}
        record["options"] = ["encoding" if encodes else "ready-made embeddings", f"VAE {asked.vae_dtype}"]
        record |= {"num_ranks": settings.num_ranks, "to_ready_s": time.monotonic() - began_s}
        for order in asked.orders.split(","):
            if asked.limit - (time.monotonic() - began_s) < longest_s:
                print(f"no time for the order {order}")
                break
            keys = [ORDERS[order](*each) for each in zip(jobs, alone_of(jobs), strict=True)]
            for idx in sorted(range(len(jobs)), key=keys.__getitem__):
                for each in todo:
                    each.put(idx)
            found = _scores(jobs, _wait(told, processes, "written", len(jobs)), num_ranks // len(todo))
            longest_s = max(longest_s, found["makespan_s"])
            keep_record(asked.to, {**record, "policy": order, **found})
        for process in processes:
            process.kill()


def _wait(told: Any, processes: Sequence[Any], kind: str, count: int) -> list[Told]:
    """All that is told until `count` messages of a kind have come."""
    found: list[Told] = []
    while sum(each.kind == kind for each in found) < count:
        try:
            found.append(told.get(timeout=PATIENCE_S))
        except queue.Empty:
            assert all(process.is_alive() for process in processes), "a process has died"
    return found


def _scores(jobs: Sequence[AdmittedJob], told: Sequence[Told], lanes: int) -> Record:
    made = [each for each in told if each.kind == "made"]
    written = [each for each in told if each.kind == "written"]
    ended_s = {jobs[each.idx].job_id: each.ended_s for each in written if not each.error}
    found = scores(jobs, ended_s, origin_s=min(each.began_s for each in made))
    return {
        **found,
        "busy": sum(each.ended_s - each.began_s for each in made) / lanes / (found["makespan_s"] or 1.0),
        "num_late_graphs": max(each.num_late_graphs for each in made),
        "error": next((each.error for each in written if each.error), None),
    }
