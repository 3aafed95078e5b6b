"""Forwards, steps and a run of pipelines without adapters of their own, on one GPU.

    python -m benchmarks.generic [forwards] [stepping] [run] [--only NAME...] [--tiny] [--device cpu]

`forwards`  full-size transformers with random weights: diffusers eager, diffusers with compiled blocks, gfgen
`stepping`  Flux.1: the pipeline's own loop against the same iterations one task at a time
`run`       `gfgen run` with five small families that take turns on the GPU: bytes against own calls

Each row is printed as soon as it is measured. `--tiny` replaces all sizes by small ones, to rehearse on a
CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from benchmarks import families
from gfgen.errors import in_one_line
from gfgen.models.fast import compiled
from gfgen.models.fast.kernels import KernelChoice, using
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.components import load_pipeline
from gfgen.models.loading.random_weights import draw_weights
from gfgen.models.parallel.hooks import install
from gfgen.models.stepping.adapter import prepare_kernels
from gfgen.models.stepping.stepper import Stepper, is_finished
from gfgen.runtime.files.journal import JOURNAL_NAME
from gfgen.runtime.files.manifest import MANIFEST_NAME, read_manifest

WARM_UPS, REPEATS = 2, 5
LOOPS = 3
"""Of each kind, of which the median counts; one more warms up."""
POISON_BYTES = 4 << 30
TEXT_TOKENS = 60
"""Of HunyuanVideo's 256, without padding."""

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A full-size transformer and its inputs at the size of the goal."""

    kind: str
    config: Mapping[str, Any]
    inputs: Callable[[Case, Shapes], Inputs]
    goal_ms: float
    what: str
    shallow: Mapping[str, Any]
    """What makes it a transformer of few blocks, of which a copy in fp32 fits and is fast."""
    tiny: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Makes inputs on a device; tiny ones for rehearsals."""

    device: torch.device
    is_tiny: bool

    def random(self, *size: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(size))
        return torch.randn(size, generator=generator).to(self.device, torch.bfloat16)

    def of(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full

    def times(self, batch: int, value: float) -> Tensor:
        return torch.full((batch,), value, device=self.device)


def _flux(case: Case, shapes: Shapes, *, side: int = 64) -> Inputs:
    side, text = shapes.of(side, 4), shapes.of(512, 7)
    positions = torch.zeros(side, side, 3, device=shapes.device)
    positions[..., 1] += torch.arange(side, device=shapes.device)[:, None]
    positions[..., 2] += torch.arange(side, device=shapes.device)
    return {
        "hidden_states": shapes.random(1, side * side, 64),
        "encoder_hidden_states": shapes.random(1, text, case.config.get("joint_attention_dim", 4096)),
        "pooled_projections": shapes.random(1, case.config.get("pooled_projection_dim", 768)),
        "timestep": shapes.times(1, 0.5).bfloat16(),
        "guidance": shapes.times(1, 3.5),
        "img_ids": positions.view(-1, 3).bfloat16(),
        "txt_ids": torch.zeros(text, 3, device=shapes.device, dtype=torch.bfloat16),
    }


def _cogvideox(case: Case, shapes: Shapes) -> Inputs:
    frames, rows, columns = shapes.of(13, 3), shapes.of(60, 4), shapes.of(90, 6)
    tokens, width = frames * rows * columns // 4, case.config["attention_head_dim"]
    angles = torch.rand(tokens, width // 2, generator=torch.Generator().manual_seed(1)) * 6
    turns = [x.repeat_interleave(2, dim=1).to(shapes.device) for x in (angles.cos(), angles.sin())]
    texts = case.config["max_text_seq_length"], case.config["text_embed_dim"]
    return {
        "hidden_states": shapes.random(2, frames, 16, rows, columns),
        "encoder_hidden_states": shapes.random(2, *texts),
        "timestep": shapes.times(2, 500),
        "image_rotary_emb": tuple(turns),
    }


def _sd3(case: Case, shapes: Shapes) -> Inputs:
    side = shapes.of(128, 8)
    return {
        "hidden_states": shapes.random(2, 16, side, side),
        "encoder_hidden_states": shapes.random(2, shapes.of(333, 9), case.config["joint_attention_dim"]),
        "pooled_projections": shapes.random(2, case.config["pooled_projection_dim"]),
        "timestep": shapes.times(2, 500),
    }


def _hunyuan(case: Case, shapes: Shapes) -> Inputs:
    text, valid = shapes.of(256, 16), shapes.of(TEXT_TOKENS, 5)
    mask = torch.arange(text, device=shapes.device)[None] < valid
    return {
        "hidden_states": shapes.random(1, 16, shapes.of(16, 2), shapes.of(60, 4), shapes.of(104, 6)),
        "timestep": shapes.times(1, 500),
        "encoder_hidden_states": shapes.random(1, text, case.config.get("text_embed_dim", 4096)),
        "encoder_attention_mask": mask.bfloat16(),
        "pooled_projections": shapes.random(1, case.config.get("pooled_projection_dim", 768)),
        "guidance": shapes.times(1, 6000).bfloat16(),
    }


_TINY_HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
_TINY_FLUX = {**_TINY_HEADS, "axes_dims_rope": (4, 6, 6), "num_layers": 2, "num_single_layers": 2}
_FEW: Mapping[str, Any] = {"num_layers": 2, "num_single_layers": 2}
CASES: Mapping[str, Case] = {
    "flux": Case(
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
        _flux,
        120,
        "Flux.1-dev 1024x1024, 512 text tokens",
        _FEW,
        {**_TINY_FLUX, "joint_attention_dim": 32, "pooled_projection_dim": 32},
    ),
    "sd3": Case(
        "SD3Transformer2DModel",
        {
            "sample_size": 128,
            "num_layers": 38,
            "attention_head_dim": 64,
            "num_attention_heads": 38,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 2432,
            "pooled_projection_dim": 2048,
            "out_channels": 16,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        _sd3,
        155,
        "SD3.5-large 1024x1024, both branches",
        {"num_layers": 3},
        {
            **_TINY_HEADS,
            "num_layers": 3,
            "caption_projection_dim": 64,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "sample_size": 8,
            "pos_embed_max_size": 8,
        },
    ),
    "cogvideox": Case(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 48,
            "attention_head_dim": 64,
            "num_layers": 42,
            "text_embed_dim": 4096,
            "max_text_seq_length": 226,
            "use_rotary_positional_embeddings": True,
        },
        _cogvideox,
        1350,
        "CogVideoX-5B 720x480x49, both branches",
        {"num_layers": 2},
        {
            **_TINY_HEADS,
            "num_layers": 2,
            "text_embed_dim": 32,
            "max_text_seq_length": 8,
            "time_embed_dim": 16,
        },
    ),
    "hunyuan": Case(
        "HunyuanVideoTransformer3DModel",
        {},
        _hunyuan,
        1450,
        f"HunyuanVideo 832x480x61, {TEXT_TOKENS} of 256 text tokens",
        _FEW,
        {
            **_TINY_HEADS,
            **_FEW,
            "num_refiner_layers": 1,
            "text_embed_dim": 32,
            "pooled_projection_dim": 32,
            "rope_axes_dim": (4, 6, 6),
        },
    ),
}


# Forwards -----------------------------------------------------------------------------------------


HEADER = (
    "| transformer | eager ms | compiled ms (first s) | gfgen ms (first s) | goal | gfgen fused only ms "
    "| difference from eager | error to fp32 of few blocks: eager, compiled, gfgen |\n"
    "|---|---|---|---|---|---|---|---|"
)


@torch.no_grad()
def forward_row(case: Case, shapes: Shapes) -> str:
    if shapes.is_tiny:
        case = _smaller(case, case.tiny)
    errors = _errors(case, shapes)
    _release()
    inputs = case.inputs(case, shapes)
    model = _made(case, shapes)
    run = _runner(model, inputs)
    wanted = run()
    eager = _timed(run)
    first_s, stock = _compiled_times(model, run)
    _prepare(model)
    poison(shapes.device)
    with using("fused"):
        _check(run(), wanted, "fused")
        fused = _timed(run)
    with using("compiled"):
        ours_s, found = _first(run)
        distance = _check(found, wanted, "gfgen")
        ours = _timed(run)
    return (
        f"| {case.what} | {eager:.1f} | {stock:.1f} ({first_s:.0f}) | {ours:.1f} ({ours_s:.0f}) "
        f"| {case.goal_ms:g} | {fused:.1f} | {distance:.1e} | {', '.join(f'{x:.1e}' for x in errors)} |"
    )


def _smaller(case: Case, changes: Mapping[str, Any]) -> Case:
    return replace(case, config={**case.config, **changes})


def _compiled_times(model: Any, run: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds of the first forward and milliseconds of the others, with blocks compiled as diffusers does."""
    blocks = compiled.repeated_blocks(model)
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = compiled.RECOMPILE_LIMIT
    for block in blocks:
        block.compile(dynamic=False)
    try:
        first_s, _ = _first(run)
        return first_s, _timed(run)
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()


def _errors(case: Case, shapes: Shapes) -> list[float]:
    """Of few blocks in bf16 against diffusers in fp32, relative: eager, compiled, gfgen."""
    case = _smaller(case, case.shallow)
    inputs = case.inputs(case, shapes)
    model = _made(case, shapes)
    exact = copy.deepcopy(model).float()
    exact_inputs = {
        name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    wanted = _runner(exact, exact_inputs)()
    del exact, exact_inputs
    run = _runner(model, inputs)
    found = [run()]
    blocks = compiled.repeated_blocks(model)
    for block in blocks:
        block.compile(dynamic=False)
    found.append(run())
    for block in blocks:
        block._compiled_call_impl = None
    torch._dynamo.reset()
    _prepare(model)
    poison(shapes.device)
    with using("compiled"):
        found.append(run())
    torch._dynamo.reset()
    return [distance_of(each, wanted) for each in found]


def distance_of(found: Tensor, wanted: Tensor) -> float:
    """The root mean square of the difference, relative to that of `wanted`."""
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def _check(found: Tensor, wanted: Tensor, what: str) -> float:
    distance = distance_of(found, wanted)
    if not distance < 0.1:  # NaN, too
        raise RuntimeError(f"{what} differs from diffusers by {distance:.2g}")
    return distance


def _prepare(model: Any) -> None:
    install(model)
    prepare_kernels(model, may_copy=True)


def _made(case: Case, shapes: Shapes) -> Any:
    """The transformer with random weights, made on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with shapes.device, no_init_weights():
            model = getattr(diffusers, case.kind)(**case.config)
    finally:
        torch.set_default_dtype(before)
    draw_weights(model, name="transformer")
    return model.eval()


def _runner(model: Any, inputs: Inputs) -> Callable[[], Tensor]:
    def run() -> Tensor:
        result: Tensor = model(**inputs, return_dict=False)[0]
        return result

    return run


def _first(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    began_s = time.perf_counter()
    found = run()
    synchronize()
    return time.perf_counter() - began_s, found


def _timed(run: Callable[[], Tensor]) -> float:
    """The median in milliseconds."""
    times = []
    for _ in range(WARM_UPS + REPEATS):
        synchronize()
        began_s = time.perf_counter()
        run()
        synchronize()
        times.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(times[WARM_UPS:])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def poison(device: torch.device) -> None:
    """Fill memory that torch keeps for later with NaN, so that what is not computed shows."""
    if device.type == "cuda":
        torch.full((POISON_BYTES // 2,), torch.nan, dtype=torch.bfloat16, device=device)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Stepping -----------------------------------------------------------------------------------------


STEPPING_HEADER = (
    "| Flux.1-dev | own loop ms/step | one task at a time | ratio | goal | own loop, fused | task, fused "
    "| ratio |\n|---|---|---|---|---|---|---|---|"
)
STEPS = (4, 12)
"""Two calls of these lengths; their difference is the time of steps alone."""


@torch.no_grad()
def stepping_rows(shapes: Shapes) -> Iterator[str]:
    """Times with diffusers' kernels, and with fused ones, where Python's part is larger."""
    case = CASES["flux"]
    if shapes.is_tiny:
        case = _smaller(case, case.tiny)
    model = _made(case, shapes)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
    )
    pipeline = diffusers.FluxPipeline(
        scheduler=scheduler,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=model,
    )
    pipeline.set_progress_bar_config(disable=True)
    _prepare(model)
    stepper = Stepper(pipeline, device=str(shapes.device))
    for side, goal in ((1024, 1.02), (512, 1.05)):
        size = shapes.of(side, 64)
        inputs = _flux(case, shapes)
        args = {
            "prompt_embeds": inputs["encoder_hidden_states"],
            "pooled_prompt_embeds": inputs["pooled_projections"],
            "width": size,
            "height": size,
            "output_type": "latent",
            "return_dict": False,
        }
        cells = []
        choices: tuple[KernelChoice, ...] = ("own", "fused")
        for choice in choices:
            with using(choice):
                own, stepped = _loop_times(pipeline, stepper, args)
            bound = [f"{goal:g}"] if choice == "own" else []
            cells += [f"{own:.2f}", f"{stepped:.2f}", f"{stepped / own:.3f}", *bound]
        yield f"| {size}x{size} | {' | '.join(cells)} |"


def _loop_times(pipeline: Any, stepper: Stepper, args: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds of a step in the pipeline's own loop, and of one that is a task."""

    def own(num_steps: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        result: Tensor = pipeline(**args, num_inference_steps=num_steps, generator=generator)[0]
        return result

    def stepped(num_steps: int) -> Tensor:
        prompt = stepper.encode({**args, "num_inference_steps": num_steps}, seed=3)
        condition, state = stepper.prepare(prompt)
        while not is_finished(state):
            state = stepper.step(prompt, condition, state)
        result: Tensor = stepper.decode(state)[0]
        return result

    if not torch.equal(own(STEPS[0]), stepped(STEPS[0])):
        raise RuntimeError("steps one at a time differ from the pipeline's own call")
    times: dict[str, list[float]] = {"own": [], "stepped": []}
    for _ in range(1 + LOOPS):
        for name, function in (("own", own), ("stepped", stepped)):
            seconds = [_seconds(lambda: function(count)) for count in STEPS]  # noqa: B023
            times[name].append(1e3 * (seconds[1] - seconds[0]) / (STEPS[1] - STEPS[0]))
    return statistics.median(times["own"][1:]), statistics.median(times["stepped"][1:])


def _seconds(function: Callable[[], object]) -> float:
    synchronize()
    began_s = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began_s


# A run --------------------------------------------------------------------------------------------


RUN_NAMES = (
    "CogVideoXPipeline",
    "FluxPipeline",
    "HunyuanVideoPipeline",
    "LTXPipeline",
    "StableDiffusion3Pipeline",
)
TURNS = '''
from gfgen.layout import Layout
from gfgen.snapshot import Decision


def turns(snapshot):
    """The job with the fewest tasks behind it is next, so that all jobs take turns."""
    job = min(snapshot.open.values(), key=lambda job: job.next_task.index, default=None)
    if job is None or not snapshot.free_ranks:
        return []
    return [Decision(job.next_task, Layout.single(min(snapshot.free_ranks)))]
'''


def run_rows(device: torch.device) -> Iterator[str]:
    """Whether the files of a run have the bytes of own calls on the same device."""
    kind = device.type
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        families.write_inputs(folder, RUN_NAMES)
        (folder / "turns.py").write_text(TURNS)
        own, again = ([_own_frames(folder, each, device) for each in RUN_NAMES] for _ in range(2))
        command = [sys.executable, "-m", "gfgen", "run", "jobs.jsonl", "--ranks", "1", "--device", kind]
        command += ["--policy", "turns.py:turns", "--lookahead", "0", "-o", "out", *_OWN_KERNELS]
        began_s = time.perf_counter()
        ended = subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        yield f"`gfgen run`: exit status {ended.returncode}, {time.perf_counter() - began_s:.1f} s"
        print(ended.stdout[-3000:], flush=True)
        lines = read_manifest(folder / "out" / MANIFEST_NAME)
        yield f"turns: {_num_turns(folder / 'out')} changes of job between two tasks"
        yield "| pipeline | status | bytes of its own call | two own calls |\n|---|---|---|---|"
        for each, frames, other in zip(RUN_NAMES, own, again, strict=True):
            line = lines.get(each, {})
            is_same = line.get("status") == "done" and families.has_frames(
                folder / "out" / line["file"], frames
            )
            repeated = "equal" if (frames == other).all() else "differ"
            cells = (each, line.get("status"), "same" if is_same else "DIFFERENT", repeated)
            yield f"| {' | '.join(map(str, cells))} |"


_OWN_KERNELS: tuple[str, ...] = ()


def _environment() -> dict[str, str]:
    """This one, with the project's own packages first."""
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def _num_turns(output: Path) -> int:
    entries = [json.loads(line) for line in (output / JOURNAL_NAME).read_text().splitlines()]
    jobs = [job for entry in entries for _, job, *_ in entry.get("dispatches") or ()]
    return sum(one != other for one, other in itertools.pairwise(jobs))


def _own_frames(folder: Path, name: str, device: torch.device) -> Any:
    """What the pipeline's own call makes of its job, in the precision in which gfgen loads it."""

    def load(kind: Any, path: Path) -> Any:
        return load_pipeline(
            kind,
            path,
            device=str(device),
            dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
            dtypes=component_dtypes(name, "auto"),
        )

    return families.own_frames(folder, name, load=load)


# --------------------------------------------------------------------------------------------------


@contextmanager
def _told(name: str) -> Iterator[None]:
    """A failure is one line, and the next part follows; so is how long it took."""
    began_s = time.perf_counter()
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        print(f"{name}: FAILED: {type(error).__name__}: {in_one_line(error)}", flush=True)
    print(f"<!-- {name}: {time.perf_counter() - began_s:.0f} s -->", flush=True)
    _release()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["forwards", "stepping", "run"])
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(given)
    device = torch.device(options.device)
    shapes = Shapes(device, options.tiny)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    if "run" in options.parts:
        with _told("run"):
            for row in run_rows(device):
                print(row, flush=True)
    if "forwards" in options.parts:
        print(HEADER, flush=True)
        for name in options.only:
            with _told(name):
                print(forward_row(CASES[name], shapes), flush=True)
    if "stepping" in options.parts:
        print(STEPPING_HEADER, flush=True)
        with _told("stepping"):
            for row in stepping_rows(shapes):
                print(row, flush=True)


if __name__ == "__main__":
    main()
