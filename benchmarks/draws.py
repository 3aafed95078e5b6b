"""Whether a clean check implies that a job runs: joint draws of size, inputs and arguments for many classes.

    python -m benchmarks.draws [--draws 40] [--limit SECONDS] [--table FILE.md] [NAME...]

Without names, all classes of which small checkpoints can be made. A draw is checked as `gfgen check` does
(geometry, then the call on a pipeline without weights) and then runs to its frames, whatever the check said.
Half of the pictures that a call takes have the size of the job, the others any size.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from small_checkpoints import save_checkpoint
from small_pipelines import SIDE

from benchmarks.measured import head, row
from benchmarks.pipelines import in_child, verified
from gfgen.errors import JobError, ModelError, WorkerError, in_one_line
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.call import FLAG, NUMBER, WHOLE, CallSignature
from gfgen.models.geometry.model import load_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.rules import known
from gfgen.models.stepping.adapter import load_any
from gfgen.models.stepping.outlined import is_refusal, outlined_pipeline, tried, usual_failure, usual_jobs
from gfgen.models.stepping.small_job import pictures, resolved, with_files

LIMIT_S = 900
"""Time for one class, unless `--limit` says otherwise."""
NONE = CallSignature("", {})
FIXED = {"use_resolution_binning": False}
"""Arguments that would make the small models draw large pictures."""
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "DiTPipeline": {"class_labels": [1]},
    "FluxKontextInpaintPipeline": {"max_area": SIDE**2, "_auto_resize": False},
    "FluxKontextPipeline": {"max_area": SIDE**2, "_auto_resize": False},
    "Kandinsky6TI2VAPipeline": {"sample_audio": False},
    "LTX2ImageToVideoPipeline": {"image_crf": 0},
    "LTXI2VLongMultiPromptPipeline": {"decode_horizontal_tiles": 1, "decode_vertical_tiles": 1},
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": {"overlap_history": 5, "base_num_frames": 9},
    "VisualClozePipeline": {"task_prompt": "a fox", "content_prompt": "a fox"},
    "VisualClozeGenerationPipeline": {"task_prompt": "a fox", "content_prompt": "a fox"},
    "SanaWMPipeline": {"action": "w-8", "intrinsics": [50.0, 50.0, 32.0, 32.0]},
}
"""Arguments without which a class runs no job."""
_TEXT = {"max_text_seq_length": 226}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "AuraFlowPipeline": {"transformer": {"pos_embed_max_size": 64 * 64}},
    "CogVideoXFunControlPipeline": {"transformer": {**_TEXT, "in_channels": 32}},
    "CogVideoXImageToVideoPipeline": {"transformer": {**_TEXT, "in_channels": 32}},
    "CogVideoXPipeline": {"transformer": _TEXT},
    "CogVideoXVideoToVideoPipeline": {"transformer": _TEXT},
    "CogView3PlusPipeline": {"transformer": {"pos_embed_max_size": 128}},
}
"""What jobs with the defaults of a call need, which those of `small_pipelines` do not have."""
FRAMES = {"LTX2DFRPipeline": 17, "SkyReelsV2DiffusionForcingVideoToVideoPipeline": 17}
SAID = ("width", "height", "steps", "guidance_scale", "args", "scheduler", "sigmas", "frames")
PROMPTS = {"BriaFiboEditPipeline": '{"edit_instruction": "a fox"}'}
SCHEDULERS = ("LCMScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler", "DDIMScheduler")


@dataclass
class Draws:
    """What became of the draws of one class."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    """Jobs that failed after a clean check."""
    failed_unknown: list[str] = field(default_factory=list)
    """Jobs that failed where the check could not try the call to its end."""
    refused_in_vain: list[str] = field(default_factory=list)
    """Jobs that the call was said to refuse, and that ran."""
    seconds: float = 0.0

    def row(self) -> str:
        counts = [self.counts[name] for name in ("refused", "call", "unknown", "ran")]
        wrong = [len(each) for each in (self.failed, self.failed_unknown, self.refused_in_vain)]
        return row(self.name, *counts, *wrong, f"{self.seconds:.0f}")


COLUMNS: tuple[str, ...] = ("class", "by fields", "by its call", "call unknown", "ran")
COLUMNS += ("failed, clean", "failed, unknown", "refused, runs", "s")


def drawn_jobs(geometry: Any, *, num: int, usual: JobSpec, folder: Path, seed: int = 5) -> Iterator[JobSpec]:
    """Jobs with some of the fields, arguments and files that the class takes, of its types and of any size.

    They have the files of the usual job, and the arguments that are fixed for the class.
    """
    rng = random.Random(seed)
    prompts = [PROMPTS[geometry.family]] * 2 if geometry.family in PROMPTS else ["a fox", "a fox " * 60]
    for number in range(num):
        job = JobSpec(id=f"draw-{number}", prompt=rng.choice(prompts), seed=3)
        job = replace(job, image=usual.image, files=usual.files)
        job, size = replace(job, steps=rng.randint(1, 3)), (rng.randint(32, 110), rng.randint(32, 110))
        if _takes(geometry, "width"):
            job = replace(job, width=size[0], height=size[1])
        if rng.random() < 0.4 and _takes(geometry, "negative_prompt"):
            job = replace(job, negative_prompt="blurry")
        if (most := _fields(geometry)["frames"]) is not None:
            job = replace(job, frames=rng.randint(1, most + 1))
        if not isinstance(geometry, PipelineGeometry):
            yield job
            continue
        if rng.random() < 0.5 and "guidance_scale" in geometry.signature.arguments:
            job = replace(job, guidance_scale=rng.choice([0.0, 1.0, 3.5, 7.0]))
        if rng.random() < 0.25 and geometry.scheduler_class is not None:
            job = replace(job, scheduler={"class": rng.choice([*SCHEDULERS, geometry.scheduler_class])})
        if rng.random() < 0.15 and "sigmas" in geometry.signature.arguments:
            job = replace(job, sigmas=[1.0 - step / known(job.steps) for step in range(known(job.steps))])
        names = [name for name in geometry.signature.args if rng.random() < 0.3 and name not in FIXED]
        args = {name: value for name in names if (value := _drawn(rng, geometry, name)) is not None}
        names = [name for name in geometry.signature.files if rng.random() < 0.1]
        given = {**(usual.files or {}), **({"image": 1} if usual.image else {})}
        job = with_files(job, [name for name in names if name not in given], folder)
        yield replace(job, args=args | _fixed(geometry) or None)


def _takes(geometry: Any, name: str) -> bool:
    return not isinstance(geometry, PipelineGeometry) or name in geometry.signature.arguments


def _fixed(geometry: Any) -> dict[str, Any]:
    taken = getattr(geometry, "signature", NONE).args
    found: dict[str, Any] = {name: value for name, value in FIXED.items() if name in taken}
    return {**found, **NEEDED.get(geometry.family, {})}


def _fields(geometry: Any) -> dict[str, Any]:
    """Fields of the usual job."""
    takes_frames = geometry.kind == "video"
    if isinstance(geometry, PipelineGeometry):
        takes_frames = takes_frames and geometry.signature.argument_of("frames") is not None
    frames = FRAMES.get(geometry.family, 9) if takes_frames else None
    return {"args": _fixed(geometry) or None, "steps": 2, "frames": frames}


def _usual_job(name: str, adapter: Any, geometry: Any, folder: Path) -> JobSpec:
    """A job that runs.

    Raises: ModelError if there is none.
    """
    fields = _fields(geometry)
    jobs: Iterable[JobSpec] = [JobSpec(id="usual", prompt="a", seed=0, width=SIDE, height=SIDE)]
    if isinstance(geometry, PipelineGeometry):
        jobs = usual_jobs(geometry, folder, side=SIDE, **fields)
    failures = []
    for job in jobs:
        job = replace(job, prompt=PROMPTS.get(name, "a"), model=name, **fields)
        if (failure := _run(adapter, resolved(geometry, job, folder))) is None:
            return job
        failures.append(failure)
    raise ModelError(f"the usual job fails: {failures[0] if failures else 'no job is accepted'}")


def _drawn(rng: random.Random, geometry: PipelineGeometry, name: str) -> Any:
    argument = geometry.signature.arguments[name]
    choices: list[Any] = [True, False] if argument.accepts(True) and FLAG.words in argument.accepted else []
    choices += [1, 2, 3, 64] if WHOLE.words in argument.accepted else []
    choices += [0.0, 0.3, 1.0, 2.5] if NUMBER.words in argument.accepted else []
    return rng.choice(choices) if choices else None


def draws_of(name: str, checkpoint: Path, *, num: int, seed: int = 5) -> Draws:
    started, made = time.monotonic(), Draws(name)
    geometry = load_geometry(checkpoint)
    adapter = load_adapter(checkpoint, device="cpu")
    outlined, usual, prompt = None, None, ""
    with pictures() as folder:
        _resize(folder, SIDE, SIDE)
        usual_job = _usual_job(name, adapter, geometry, folder)
        if isinstance(geometry, PipelineGeometry):
            how: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "load": outlined_pipeline}
            outlined = load_any(checkpoint, geometry, **how)
            given = {"side": SIDE, "prompts": [known(usual_job.prompt)], **_fields(geometry)}
            usual, prompt = usual_failure(outlined, geometry, folder, **given)
        sizes = random.Random(seed)
        for job in drawn_jobs(geometry, num=num, usual=usual_job, folder=folder, seed=seed):
            size = sizes.randint(32, 110), sizes.randint(32, 110)
            is_own = sizes.random() < 0.5
            size = (job.width, job.height) if is_own and job.width and job.height else size
            _resize(folder, *size)
            try:
                spec = resolved(geometry, replace(job, model=name), folder)
            except JobError:
                made.counts["refused"] += 1
                continue
            error = None if outlined is None else tried(outlined, spec, prompt=prompt)[0]
            is_refused = error is not None and is_refusal(error, usual)
            failure = _run(adapter, spec)
            said: dict[str, Any] = {"pictures": size}
            said |= {name: value for name in SAID if (value := getattr(job, name)) is not None}
            if is_refused:
                made.counts["call"] += 1
                made.refused_in_vain += [] if failure else [f"{said}: {in_one_line(error or Exception())}"]
            else:
                made.counts["unknown"] += error is not None
                made.counts["ran"] += failure is None
                failed = made.failed if error is None else made.failed_unknown
                failed += [f"{said}: {failure}"] if failure else []
    made.seconds = time.monotonic() - started
    return made


def _resize(folder: Path, width: int, height: int) -> None:
    for path in folder.iterdir():
        with Image.open(path) as image:
            resized = image.resize((width, height))
        resized.save(path)


def _run(adapter: Any, spec: JobSpec) -> str | None:
    """Why a job fails; None if it has frames."""
    stage = "encode"
    try:
        prompt = adapter.encode(spec)
        stage = "prepare"
        condition, latents = adapter.prepare(spec, prompt)
        for step in range(known(spec.steps)):
            stage = f"step {step + 1}"
            latents = adapter.denoise(spec, prompt, condition, latents, step=step)
        stage = "decode"
        adapter.decode(spec, latents)
    except Exception as error:  # any failure counts
        return f"{stage}: {in_one_line(error)}"
    return None


def saved_draws(name: str, folder: Path, num: int) -> Draws:
    """Of a small checkpoint, which is saved there."""
    return draws_of(name, save_checkpoint(name, folder / name, changes=CHANGES.get(name)), num=num)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--limit", type=int, default=LIMIT_S)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows, notes = [head(*COLUMNS)], []
    for name in options.names or verified():
        with tempfile.TemporaryDirectory() as folder:
            try:
                made = in_child(partial(saved_draws, name, Path(folder), options.draws), options.limit)
            except WorkerError as error:  # such as no small checkpoint
                notes.append(f"- {name}: not drawn: {error}")
                print(notes[-1], flush=True)
                continue
        rows.append(made.row())
        print(rows[-1], flush=True)
        for text in [*made.failed, *made.failed_unknown, *made.refused_in_vain][:6]:
            notes.append(f"- {name} {text}")
            print(f"   {text}", flush=True)
    if options.table is not None:
        options.table.write_text("\n".join([*rows, "", *notes, ""]))


if __name__ == "__main__":
    main()
