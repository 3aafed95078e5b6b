"""Admission: turn the jobs of a job file into jobs as they run, or collect all of their problems.

All of a job acts as written, is a `Problem`, or is among its `warnings`.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gfgen.errors import JobError, ModelError, Problem, Warned
from gfgen.graph import Stage, Trajectory
from gfgen.job.images import RATE, TRANSPARENT, remarks_on, upright_size
from gfgen.job.packed import FEW, Form, Packed
from gfgen.job.samplers import FLOW, ignored_schedule
from gfgen.job.spec import (
    FRAME,
    JobSpec,
    filled,
    input_files,
    later_seed,
    output_name,
    prompts_of,
    spec_hash,
    with_defaults,
)
from gfgen.layout import Limits
from gfgen.models.geometry.call import takes_eta
from gfgen.models.geometry.model import Geometry, twin_of
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.rules import evaluations_key, known
from gfgen.runtime.core.observer import JobInfo
from gfgen.runtime.ipc.content import SHRINKS, Content
from gfgen.system.wording import counted, in_lines

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdmittedJob:
    """A job that can run: as asked and as run, with its trajectory and its cost."""

    info: JobInfo
    trajectory: Trajectory
    shape: str  # the cost model's key: jobs of one model and shape have equal durations
    flops: Mapping[Stage, float]
    checkpoint: Path
    limits: Limits = field(default_factory=Limits)
    num_reads: tuple[int, int] = (1, 1)  # of streamed blocks in a step: on one rank, and one for each branch
    has_nominal_flops: bool = False  # `flops` only compare sizes: the operations are unknown
    twin: str | None = None  # the short name of an equal model, if its own is a directory or hub id
    replaces: Content | None = None  # the file that its output may replace, as it was (ownership.py)
    replaces_numbered: Mapping[str, Content] = field(default_factory=dict)  # the same for pictures, by name

    @property
    def job_id(self) -> str:
        return self.info.job_id

    @property
    def spec(self) -> JobSpec:
        return self.info.spec

    def model_in(self, models: Collection[str] = ()) -> str:
        """The name of the job's model in a profile of these models: its own if present, else its twin's."""
        own = self.spec.model or ""
        return own if own in models else self.twin or own

    @property
    def file_bytes(self) -> int:
        """The most that its files are likely to take."""
        return 4096 + self.trajectory.frames_bytes // SHRINKS.get(Path(self.info.file).suffix.lower(), 4)

    def with_priority(self, priority: int) -> AdmittedJob:
        return replace(self, info=replace(self.info, spec=replace(self.spec, priority=priority)))

    def warned(self, *warnings: Warned) -> AdmittedJob:
        if not warnings:
            return self
        return replace(self, info=replace(self.info, warnings=(*self.info.warnings, *warnings)))

    @property
    def kind(self) -> object:
        """Equal for jobs whose tasks launch the same kernels."""
        spec = self.spec
        return self.checkpoint, self.shape, self.limits, spec.image is None, spec.may_approximate

    @property
    def state_bytes(self) -> int:
        """Bytes that move when the job moves between two steps."""
        return self.trajectory.artifact("latents").size_bytes


JOBS = Form(
    {"info.asked": JobSpec, "info.spec": JobSpec, "trajectory": Trajectory, "info": JobInfo, "": AdmittedJob},
    lambda job: (job.checkpoint, job.shape, job.info.job_file),
)
Judged = tuple[Sequence[AdmittedJob], Sequence[Problem]]  # the jobs that are kept, and others' problems


def arriving_after(job: AdmittedJob, offset_s: float) -> AdmittedJob:
    """The same job with a later arrival; a relative deadline moves with it."""
    spec = replace(job.spec, arrival_s=job.spec.arrival_s + offset_s)
    return replace(job, info=replace(job.info, spec=spec))


def with_attempt(job: AdmittedJob, entry: Mapping[str, Any]) -> AdmittedJob:
    """The job with the seed of its line in a manifest, or the next one if a filter wants it."""
    info, said, is_next = job.info, entry.get("filter", {}), entry.get("status") == "again"
    if "attempt" not in said or entry["spec_hash"] != info.spec_hash or entry["status"] == "dropped":
        return job
    spec = replace(info.spec, seed=later_seed(entry["seed"], int(is_next)))
    return replace(job, info=replace(info, spec=spec, attempt=said["attempt"] + is_next))


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    name: str
    checkpoint: Path
    geometry: Geometry
    has_random_weights: bool = False


def admit(
    specs: Iterable[JobSpec], *, default_model: str, find_model: Callable[[str], ResolvedModel]
) -> Judged:
    """The jobs that can run, and all problems of the others; one for each name that `find_model` refuses."""
    models: dict[str, ResolvedModel | ModelError] = {}
    lines_without: dict[str, list[int | None]] = defaultdict(list)
    alike: dict[tuple[str, str, bool], AdmittedJob] = {}
    jobs: list[AdmittedJob] | Packed[AdmittedJob] = []
    problems: list[Problem] = []
    for spec in specs:
        if len(jobs) == FEW and isinstance(jobs, list):
            jobs = Packed(JOBS, jobs)
        name = spec.model or default_model
        if name not in models:
            try:
                models[name] = find_model(name)
            except ModelError as error:
                models[name] = error
        model = models[name]
        if isinstance(model, ModelError):
            lines_without[name].append(spec.line)
            continue
        try:
            jobs.extend([_admit_one(spec, model, alike)])
        except JobError as error:
            problems += error.at_line(spec.line)
    for name, lines in lines_without.items():  # one problem for all jobs of a model, at their first line
        reason = str(models[name]).removeprefix(f"model {name}: ")
        reason += f" (the same model: {in_lines(lines[1:])})" if len(lines) > 1 else ""
        problems.append(replace(Problem.of("model", name, reason), line=lines[0]))
    return tuple(jobs) if isinstance(jobs, list) else jobs, tuple(problems)


def _admit_one(
    spec: JobSpec, model: ResolvedModel, alike: dict[tuple[str, str, bool], AdmittedJob]
) -> AdmittedJob:
    geometry, asked = model.geometry, with_defaults(spec, model=model.name)
    problems: list[Problem] = []
    run, file = asked, ""
    try:
        run = geometry.resolve(asked)
    except JobError as error:
        problems += error.problems
    try:
        name = output_name(asked, geometry.output_kind(asked), has_alpha=geometry.has_alpha)
        file = filled(name, model=asked.model, index=asked.place)
        run = replace(run, format=run.format or "png") if FRAME in file else run  # ".png" alone: a picture
    except JobError as error:
        problems += error.problems
    if problems:
        raise JobError(*problems)
    assert run.steps is not None, "the job is not resolved"
    info = JobInfo(
        asked=asked,
        spec=run,
        num_tasks=Trajectory(run.id, run.steps + run.num_refined).num_tasks,
        file=file,
        spec_hash=spec_hash(asked, has_random_weights=model.has_random_weights),
        family=geometry.family,
    )
    has_own_artifacts = run.may_approximate or bool(
        run.scheduler or run.args or run.sample_bytes > 1 or run.enlarged
    )
    key = (model.name, geometry.shape_key(run), has_own_artifacts)
    if (first := alike.get(key)) is None:
        first = alike[key] = AdmittedJob(
            info,
            geometry.trajectory(run),
            shape=geometry.shape_key(run),
            flops={stage: geometry.flops(run, stage) for stage in Stage},
            checkpoint=model.checkpoint,
            limits=Limits(
                uses_cfg=geometry.uses_cfg(run),
                max_sequence_degree=geometry.num_tokens(run),
                max_ulysses_degree=geometry.num_heads,
                max_decode_degree=geometry.num_latent_rows(run),
                **_exchanges(geometry, run),
            ),
            num_reads=_num_reads(geometry, run),
            has_nominal_flops=isinstance(geometry, PipelineGeometry),
            twin=twin_of(geometry, run),
        )
    trajectory = Trajectory(run.id, run.steps, first.trajectory.artifacts)
    if has_own_artifacts:
        trajectory = geometry.trajectory(run)
    return replace(first, info=info, trajectory=trajectory).warned(*warnings_of(info, geometry))


def _exchanges(geometry: Geometry, spec: JobSpec) -> dict[str, Any]:
    """What ranks exchange of the queries, keys, values and results of bf16 attentions; for `Limits`."""
    tokens, flops = geometry.num_tokens(spec), geometry.flops(spec, Stage.DENOISE)
    width = geometry.attention_width * (2 if geometry.uses_cfg(spec) else 1)
    return {"exchanged_bytes": 8.0 * tokens * width, "attention": 4.0 * tokens**2 * width / max(flops, 1.0)}


def _num_reads(geometry: Geometry, spec: JobSpec) -> tuple[int, int]:
    """`AdmittedJob.num_reads`; Wan and Qwen-Image read once for both branches."""
    own = geometry if isinstance(geometry, PipelineGeometry) else None
    number = 2 if evaluations_key(spec, own.scheduler_class if own else None) else 1
    are_apart = own and own.signature.calls_branches_apart and own.is_guided(spec)
    return number * (2 if are_apart else 1), number


# Warnings -------------------------------------------------------------------------------------

MAX_DETAILS = 3  # details of a kind of warning that the log shows; the manifest has all
_WEIGHTED = re.compile(r"\([^()]*:\s*(?:[01]?\.\d+|[012])\s*\)")  # up to 2: (16:9) and (12:30) are none
_CHOICE = re.compile(r"\{[^{}]*\|[^{}]*\}|\b__\w[\w/*-]*?__\b")
_OPTION = re.compile(r"(?<!\S)--[A-Za-z]\w*(?:-\w+)*(?=\s|$)")
_BRACKETS = r"\([^()]*:\s*-\d*\.?\d+\s*\)|\({2,}[^()]+\){2,}|\[[^\[\]]*[^\W\d_][^\[\]]*\]"
WEIGHTS = "weights such as (red:1.3) in a prompt are plain text"
OF_A1111 = '((red)), [blue], AND and BREAK in a prompt are plain text without "prompt_syntax": "a1111"'
IN_PROMPTS: Mapping[str, re.Pattern[str]] = {
    WEIGHTS: _WEIGHTED,
    OF_A1111: re.compile(rf"{_BRACKETS}|\b(?:AND|BREAK)\b"),
    "<lora:...> in a prompt loads no LoRA; use the field lora": re.compile(r"<(?:lora|lyco):[^<>]*>"),
    "embedding:name in a prompt loads no textual inversion": re.compile(r"\bembedding:\S*\w"),
    "{a|b} and __a__ in a prompt are plain text; vary reads {a|b} and {@file.txt}": _CHOICE,
    "options in a prompt are plain text; use fields of the job": _OPTION,
}
"""What other programs read in prompts."""


def warnings_of(info: JobInfo, geometry: Geometry) -> Iterator[Warned]:
    """What in a job does not act as written, as far as its fields and files tell."""
    asked = info.asked
    if info.rounding is not None:
        yield Warned(f"rounded by {info.spec.model}", info.rounding)
    yield from _warnings_of_inputs(info.spec, has_alpha=geometry.has_alpha)
    if not isinstance(geometry, PipelineGeometry) or geometry.signature.stretches:
        yield from _stretched(info.spec)
    has_clip = isinstance(geometry, PipelineGeometry) and geometry.has_clip
    if asked.prompt_syntax != info.spec.prompt_syntax:
        asked = replace(asked, prompt_syntax=info.spec.prompt_syntax)
    yield from warnings_of_texts(asked, has_clip=has_clip)
    sampler = (asked.scheduler or {}).get("class")
    own = geometry.scheduler_class or "" if isinstance(geometry, PipelineGeometry) else FLOW
    if isinstance(sampler, str) and own.startswith(FLOW) and (schedule := ignored_schedule(sampler)):
        yield Warned(f"the noise schedule {schedule} has no effect on models that predict flow", sampler)
    is_guided = geometry.uses_cfg(info.spec)
    if isinstance(geometry, PipelineGeometry):
        is_guided = not geometry.ignores_negative_prompt(info.spec)
        yield from _unused_by_call(asked, info.spec, geometry)
    for name, value in {"negative_prompt": asked.negative_prompt, **(asked.args or {})}.items():
        if name.startswith(("negative_", "guidance_rescale")) and str(value or "").strip() and not is_guided:
            yield Warned(f"{name} has no effect without guidance")


def warnings_of_texts(asked: JobSpec, *, has_clip: bool = False) -> Iterator[Warned]:
    fine = {WEIGHTS, OF_A1111} if asked.prompt_syntax else set() if has_clip else {OF_A1111}
    texts = prompts_of(asked)
    for kind, pattern in IN_PROMPTS.items():
        if kind not in fine and (found := pattern.findall("\n".join(texts.values()))):
            yield Warned(kind, ", ".join(dict.fromkeys(found)))
    for name in (name for name, text in texts.items() if not text and name in (asked.args or {})):
        yield Warned(f"args.{name} has no effect: an empty text stands for that of {name[:-2]}")


def _unused_by_call(asked: JobSpec, spec: JobSpec, geometry: PipelineGeometry) -> Iterator[Warned]:
    name, signature = geometry.family, geometry.signature
    scheduler = str((spec.scheduler or {}).get("class", geometry.scheduler_class))
    if (asked.args or {}).get("eta") and not takes_eta(scheduler):
        yield Warned(f"args.eta has no effect with {scheduler}, whose steps take none")
    if (asked.true_cfg_scale or 0) > 1 and spec.negative_prompt is None:
        yield Warned("true_cfg_scale has no effect without a negative_prompt")
    for given, value in (("prompt", asked.prompt.strip()), ("steps", asked.steps)):
        if value and signature.argument_of(given) is None:
            yield Warned(f"{given} has no effect on {name}, whose call takes none")
    if asked.guidance_scale is not None and (why := geometry.why_no_guidance) is not None:
        yield Warned(f"guidance_scale has no effect on {asked.model}: {why}", f"{asked.guidance_scale:g}")
    if "strength" in (asked.args or {}) and asked.image is None and not asked.files:
        yield Warned("args.strength has no effect without an image")


def _warnings_of_inputs(spec: JobSpec, *, has_alpha: bool) -> Iterator[Warned]:
    hashes = {"image": spec.image_sha256, **(spec.files_sha256 or {})}
    remarks = [
        remark
        for name, path in input_files(spec)
        if name in hashes
        for remark in remarks_on(str(path), str(hashes[name]), argument=name)
        if remark.kind != RATE or (spec.fps and not remark.detail.endswith(f" {spec.fps:.3g}"))
    ]
    others = [remark for remark in remarks if remark.kind != TRANSPARENT]
    yield from others if has_alpha or spec.background else remarks
    if spec.background and not has_alpha and others == remarks:
        yield Warned("background has no effect: no pixel of a picture is transparent")


def _stretched(spec: JobSpec) -> Iterator[Warned]:
    """Pictures whose proportions differ from the result's by more than a tenth."""
    for path in (path for name, path in input_files(spec) if name == "image" and spec.width and spec.height):
        size = upright_size(str(path), str(spec.image_sha256 or spec.files_sha256))
        if size and not 0.9 < size[0] * known(spec.height) / size[1] / known(spec.width) < 1.1:
            detail = "{}: {}x{}".format(path.name, *size)
            yield Warned("a picture is stretched to other proportions", f"{detail} -> {spec.size_text}")


def tell_of_warnings(warnings: Iterable[tuple[JobSpec, Iterable[Warned]]], *, source: str = "") -> None:
    """Log each kind of warning once, with the lines of its jobs, their number and the first details."""
    kinds: dict[str, list[tuple[JobSpec, str]]] = defaultdict(list)
    for spec, of_job in warnings:
        for warned in of_job:
            kinds[warned.kind].append((spec, warned.detail))
    for kind, found in kinds.items():
        lines = [spec.line for spec, _ in found]
        where = f"{source} {in_lines(lines)}".strip() if lines[0] is not None else f"job {found[0][0].id}"
        count = f" ({counted(len(found), 'job')})" if len(found) > 1 else ""
        details = list(dict.fromkeys(detail for _, detail in found if detail))
        more = f" and {len(details) - MAX_DETAILS} more" if len(details) > MAX_DETAILS else ""
        shown = f": {'; '.join(details[:MAX_DETAILS])}{more}" if details else ""
        logger.warning("%s%s: %s%s", where, count, kind, shown)
