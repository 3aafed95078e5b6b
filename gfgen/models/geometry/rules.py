"""Bounds, rounding, defaults, schedulers, reused steps and second passes, as admission knows them.

A number in a job is accepted, rounded (as the family's pipeline rounds it, or down if the pipeline refuses
it), or a `Problem` that says what would be accepted.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from gfgen.errors import ModelError, Problem
from gfgen.graph import Artifact, Trajectory
from gfgen.job.fields import IF_LATE, MAX_SIDE, shown
from gfgen.job.samplers import FLOW, SAMPLERS, known_sampler
from gfgen.job.spec import SCALE_FIELDS, SHAPE_FIELDS, UPSCALE_FIELDS, JobSpec, num_pictures
from gfgen.models.geometry.call import (
    SPACINGS,
    CallSignature,
    is_pipeline,
    options_of,
    scheduler_problems,
    signature_of,
)

MAX_TOKENS = 1 << 20
"""Tokens of a job: 38 times the largest default (27,280)."""

DEFAULT_KEYS = frozenset({"negative_prompt", *SHAPE_FIELDS, *SCALE_FIELDS})

T = TypeVar("T")


def known(value: T | None) -> T:
    """A field that `resolve` has set."""
    assert value is not None, "the job is not resolved"
    return value


def merge_defaults(family: Mapping[str, Any], settings: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """A family's defaults, overridden by those of a checkpoint's gfgen.json."""
    given = settings.get("defaults", {})
    for key, value in given.items():
        if key not in DEFAULT_KEYS:
            raise ModelError(f"{where}: unknown default {key!r}; known are {', '.join(sorted(DEFAULT_KEYS))}")
        if key == "negative_prompt" and isinstance(value, str):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{where}: the default of {key!r} must be a number, not {value!r}")
    return {**family, **given}


def fill_defaults(spec: JobSpec, defaults: Mapping[str, Any]) -> JobSpec:
    missing = {key: value for key, value in defaults.items() if getattr(spec, key) is None}
    return changed(spec, **missing)


def changed(spec: JobSpec, **values: Any) -> JobSpec:
    """The job with these values. Usually it has them already, and copies would dominate admission."""
    if all(getattr(spec, name) == value for name, value in values.items()):
        return spec
    return replace(spec, **values)


def floor_to_multiple(value: int, multiple: int) -> int:
    return value // multiple * multiple


def size_problems(width: int, height: int, *, multiple: tuple[int, int]) -> Iterator[Problem]:
    """A size below `multiple` (width, height), to which sizes are rounded down, or above MAX_SIDE."""
    if width < multiple[0] or height < multiple[1] or max(width, height) > MAX_SIDE:
        smallest, largest = f"{multiple[0]}x{multiple[1]}", f"{MAX_SIDE}x{MAX_SIDE}"
        accepted = (
            f"from {smallest} to {largest} pixels are accepted, rounded down to multiples of {smallest}"
        )
        yield Problem.of("size", f"{width}x{height}", accepted)


def token_problems(num_tokens: int, *, field: str, value: object) -> Iterator[Problem]:
    if num_tokens > MAX_TOKENS:
        accepted = f"is {num_tokens:,} tokens together with the rest; at most {MAX_TOKENS:,} are accepted"
        yield Problem.of(field, value, accepted)


def whole_problems(spec: JobSpec, field: str, *, low: int, high: int) -> Iterator[Problem]:
    """A whole number outside [low, high]; None passes."""
    value = getattr(spec, field)
    if value is not None and not low <= value <= high:
        yield Problem.of(field, value, f"a whole number from {low} to {high} is accepted")


def number_problems(
    spec: JobSpec, field: str, *, low: float, high: float, above: bool = False
) -> Iterator[Problem]:
    """A number outside [low, high], or outside (low, high] if `above`; None passes."""
    value = getattr(spec, field)
    if value is None:
        return
    inside = (low < value if above else low <= value) and value <= high
    if not math.isfinite(value) or not inside:
        start = f"above {low:g}" if above else f"from {low:g}"
        yield Problem.of(field, value, f"a number {start} to {high:g} is accepted")


def useless(spec: JobSpec, field: str, reason: str) -> Iterator[Problem]:
    """A field that this family does not use, if the job gives it."""
    value = getattr(spec, field)
    if value is not None:
        yield Problem.of(field, value, reason)


# Schedulers that jobs name --------------------------------------------------------------------------


FLOW_SCHEDULERS = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler",
    "SASolverScheduler",
)
TWICE_A_STEP = "FlowMatchHeunDiscreteScheduler"
"""It evaluates the transformer twice in all steps but the last."""
_SECOND_ORDER = re.compile(r"Heun|KDPM2|DPMSolverSDE")
"""In names of classes that evaluate it twice in pipelines, too. Source: `order = 2` in diffusers 0.42."""
OF_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
"""Options of schedulers that know other models, too."""
_KARRAS_OF_FLOW = ("UniPCMultistepScheduler", "use_karras_sigmas")
STATE_ROOM_BYTES = 4 << 30
"""For latents with the state of any scheduler: addresses in a sparse file, not memory."""


def with_known_scheduler(spec: JobSpec, *, is_flow: bool, own_class: str | None = None) -> JobSpec:
    """The job with the class and options that its scheduler's name in other programs stands for, and with
    those for flow if the model predicts it."""
    if spec.scheduler is None:
        return spec
    name, options = spec.scheduler.get("class"), dict(spec.scheduler)
    known = known_sampler(name, is_flow=is_flow) if isinstance(name, str) else None
    if known is not None:
        del options["class"]
    found = {**(known or {}), **options}
    kind = found.get("class", own_class)
    if is_flow and isinstance(kind, str) and "use_flow_sigmas" in options_of(kind):
        found = {**found, **OF_FLOW, **found}
    return changed(spec, scheduler=found or None)


def shift_of(spec: JobSpec) -> float | None:
    options = spec.scheduler or {}
    found = options.get("flow_shift", options.get("shift"))
    return float(found) if isinstance(found, (int, float)) else None


def shift_problems(spec: JobSpec, own_class: str | None, config: Mapping[str, Any]) -> Iterator[Problem]:
    """A shift that a scheduler does not use; 1 is what configs of such schedulers have."""
    options, switch = spec.scheduler or {}, "use_dynamic_shifting"
    known = options_of(str(options.get("class", own_class)))
    for name in {"shift", "flow_shift"} & known.keys() if switch in known else ():
        if options.get(name, 1) != 1 and options.get(switch, config.get(switch)):
            reason = f'has no effect, because the size sets the shift; add "{switch}": false'
            yield Problem.of(f"scheduler.{name}", shown(options[name]), reason)


def prediction_problems(spec: JobSpec, own_class: str | None, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Flow that a scheduler takes for something else, or the reverse; `config` is of the model's own."""
    options = spec.scheduler or {}
    kind = str(options.get("class", own_class))
    predicted = options.get("prediction_type", config.get("prediction_type", "epsilon"))
    if predicted == "flow_prediction":
        return
    if (own_class or "").startswith(FLOW) and "prediction_type" in options_of(kind):
        reason = f"makes noise, because the model predicts flow, as {own_class} takes it"
        yield Problem.of("scheduler.class", kind, reason)
    elif options.get("use_flow_sigmas") is True and "use_flow_sigmas" in options_of(kind):
        yield Problem.of("scheduler.use_flow_sigmas", "true", f"the model predicts {predicted}; leave it out")


def flow_problems(spec: JobSpec, *, own_class: str, call: str, most_tokens: int) -> Iterator[Problem]:
    """What a model that predicts flow refuses of `files`, `args`, `scheduler` and `sigmas`."""
    yield from useless(spec, "files", "this model takes no other files; leave it out")
    for name in UPSCALE_FIELDS:
        yield from useless(spec, name, "this model makes no pictures from pictures; leave it out")
    if spec.args is not None:
        yield from signature_of(call).args_problems(spec)
        given: Any = spec.args.get("max_sequence_length")
        if isinstance(given, (int, float)) and not 1 <= given <= most_tokens:
            accepted = f"from 1 to {most_tokens:,} are accepted"
            yield Problem.of("args.max_sequence_length", shown(given), accepted)
    options = spec.scheduler or {}
    name = options.get("class", own_class)
    found = [*scheduler_problems(spec, own_class, is_flow=True)] if options or spec.sigmas else []
    if not found and name not in FLOW_SCHEDULERS:
        samplers = {(known_sampler(each, is_flow=True) or {})["class"]: each for each in [*SAMPLERS][::-1]}
        accepted = f"this model predicts flow, as {', '.join(samplers[each] for each in FLOW_SCHEDULERS)} do"
        found = [Problem.of("scheduler.class", name, accepted)]
    yield from found
    if not (options or spec.sigmas) or any(problem.field == "scheduler.class" for problem in found):
        return
    has_spacing = "use_flow_sigmas" in options_of(name)
    for option, value in options.items():
        if option in OF_FLOW and value != OF_FLOW[option]:
            yield Problem.of(f"scheduler.{option}", shown(value), "this model predicts flow; leave it out")
        if value is True and option in SPACINGS and has_spacing and (name, option) != _KARRAS_OF_FLOW:
            reason = f"{name} spaces no noise levels of flow so; leave it out, or use euler"
            yield Problem.of(f"scheduler.{option}", "true", reason)
    if spec.reuse is not None and name == TWICE_A_STEP:
        yield Problem.of("reuse", spec.reuse, f"{name} evaluates the model twice a step; leave one out")


def latents_artifact(spec: JobSpec, artifact: Artifact) -> Artifact:
    """The artifact with room in place of fields for a job's own scheduler, whose state is unknown here."""
    if spec.scheduler is None:
        return artifact
    return Artifact(artifact.name, (), room_bytes=STATE_ROOM_BYTES)


def evaluations_key(spec: JobSpec, own_class: str | None = None) -> str:
    """The part of `Geometry.shape_key` for steps that evaluate the transformer twice."""
    return "+heun" if _SECOND_ORDER.search(str((spec.scheduler or {}).get("class", own_class))) else ""


def max_text_tokens(spec: JobSpec, usual: int) -> int:
    """Where a job's prompts are cut."""
    return int((spec.args or {}).get("max_sequence_length") or usual)


# Steps that run no transformer ----------------------------------------------------------------------
# A reused step extrapolates the transformer's guided output linearly from the last two computed ones. So the
# first two steps are computed, the last one, and those around a change of the transformer.


NUM_FIRST, NUM_LAST = 2, 1
"""Steps at either end that are always computed."""
LARGEST_SHARES = {30: 0.7, 20: 0.5, 12: 0.4}
"""The largest share from so many steps on. Elsewhere the job with as many steps as would be computed is
nearer to the full result, on the built-in model.

Source: benchmarks/results/precision.md.
"""
MIN_STEPS, MANY_STEPS, MIN_NUMBER = min(LARGEST_SHARES), max(LARGEST_SHARES), 3
"""The fewest reused steps below MANY_STEPS, for the same reason."""
IF_LATE_SHARE = 0.4
"""Of the steps, which a policy may have reused."""
Output = tuple[tuple[int, ...], str]
KEPT_OUTPUTS = ("reuse_0", "reuse_1")
"""Tensors of latents: the last two computed outputs, in turn."""


def with_reuse(
    trajectory: Trajectory, spec: JobSpec, *, output: Output | None, switch: int | None = None
) -> Trajectory:
    """The trajectory of a job as run with its reused steps, and with room for outputs in its latents.

    output: None where the latents have room for anything.
    switch: the first step of a second transformer.
    """
    if spec.reuse is None:
        return trajectory
    artifacts = trajectory.artifacts
    if output is not None:
        artifacts = tuple(_with_outputs(each, output) for each in artifacts)
    if spec.reuse == IF_LATE:
        steps = chosen_steps(trajectory.num_steps, IF_LATE_SHARE, switch=switch)
        return replace(trajectory, artifacts=artifacts, approximable=steps)
    assert isinstance(spec.reuse, float)
    steps = chosen_steps(trajectory.num_steps, spec.reuse, switch=switch)
    return replace(trajectory, artifacts=artifacts, approximate=steps)


def chosen_steps(num_steps: int, share: float, *, switch: int | None = None) -> tuple[int, ...]:
    """At most this share of the steps, spread evenly over those that may be reused."""
    around = () if switch is None else (switch - 1, switch, switch + 1)
    may_be = [step for step in range(NUM_FIRST, num_steps - NUM_LAST) if step not in around]
    number = min(int(share * num_steps + 1e-9), len(may_be))
    return tuple(may_be[int((place + 0.5) * len(may_be) / number)] for place in range(number))


def reuse_problems(spec: JobSpec) -> Iterator[Problem]:
    """Steps and shares at which a job with fewer steps gives a better result in the same time."""
    if spec.reuse is None or spec.steps is None:
        return
    if spec.steps < MIN_STEPS:
        accepted = f"needs at least {MIN_STEPS} steps, and this job has {spec.steps}; leave it out"
        yield Problem.of("reuse", spec.reuse, accepted)
        return
    if not isinstance(spec.reuse, float):
        return
    most = next(share for least, share in LARGEST_SHARES.items() if spec.steps >= least)
    number = int(spec.reuse * spec.steps + 1e-9)
    better = f"{spec.steps - number} steps give a better result in the same time"
    if spec.reuse > most:
        accepted = f"with {spec.steps} steps at most {most:g} is accepted: {better}"
        yield Problem.of("reuse", spec.reuse, accepted)
    elif spec.steps < MANY_STEPS and number < MIN_NUMBER:
        least = MIN_NUMBER / spec.steps
        accepted = f"with {spec.steps} steps at least {math.ceil(100 * least) / 100:g} is accepted: {better}"
        yield Problem.of("reuse", spec.reuse, accepted)


def _with_outputs(artifact: Artifact, output: Output) -> Artifact:
    if artifact.name != "latents":
        return artifact
    return replace(artifact, fields=(*artifact.fields, *((name, *output) for name in KEPT_OUTPUTS)))


# Second passes --------------------------------------------------------------------------------------
# That of a job with `upscale` is image to image, from the enlarged picture of the first pass. Its call is the
# pipeline's own, or that of the pipeline for image to image with the same components (SomePipeline,
# SomeImg2ImgPipeline). The result is that of a job with this picture, strength and size.


DEFAULT_STRENGTH = 0.4
FROM_PICTURES = frozenset(("image", "strength"))
_PICTURE = "the first picture"


def call_of_second_pass(first: CallSignature) -> CallSignature | None:
    """None if no such pipeline begins with a picture."""
    taken = first.arguments.keys()
    if taken >= FROM_PICTURES:
        return None if "mask_image" in taken else first
    return _sibling(first.pipeline_class)


@functools.cache
def _sibling(name: str) -> CallSignature | None:
    name = name.removesuffix("Pipeline") + "Img2ImgPipeline"
    found = signature_of(name) if is_pipeline(name) else None
    return found if found is not None and found.arguments.keys() >= FROM_PICTURES else None


def with_second_pass(spec: JobSpec, *, multiple: int) -> JobSpec:
    """The job with defaults of its second pass, and the size of that, rounded down to a multiple."""
    if (factor := spec.upscale) is None or spec.width is None or spec.height is None:
        return spec
    width, height = (int(side * factor + 1e-6) // multiple * multiple for side in (spec.width, spec.height))
    strength, steps = spec.upscale_strength or DEFAULT_STRENGTH, spec.upscale_steps or spec.steps
    return changed(spec, enlarged=(width, height), upscale_strength=strength, upscale_steps=steps)


def second_pass(spec: JobSpec, call: CallSignature) -> JobSpec:
    """The job that makes the same picture from that of the first pass, which stands in `image`."""
    width, height = spec.made_size if "width" in call.arguments else (None, None)
    nothing: dict[str, Any] = dict.fromkeys((*UPSCALE_FIELDS, "enlarged"))
    return replace(
        spec,
        width=width,
        height=height,
        frames=None,
        steps=spec.upscale_steps,
        args={**(spec.args or {}), "strength": spec.upscale_strength},
        image=_PICTURE,
        reuse=None,
        **nothing,
    )


def second_pass_problems(spec: JobSpec, first: CallSignature, *, is_picture: bool) -> Iterator[Problem]:
    """`spec` has its defaults."""
    if spec.upscale is None:
        for name in UPSCALE_FIELDS[1:]:
            yield from useless(spec, name, "belongs to upscale, which is missing; leave it out")
        return
    call, reason = call_of_second_pass(first), None
    if not is_picture or call is None:
        reason = f"needs image to image, which {first.pipeline_class} does not have; leave it out"
    elif spec.enlarged is None:
        reason = f"{first.pipeline_class} takes its size from its picture; give a larger one instead"
    elif num_pictures(spec.args) > 1:
        reason = "the second pass takes one picture; leave out args.num_images_per_prompt"
    elif spec.sigmas is not None:
        reason = "sigmas sets the steps of the first pass only; leave out sigmas or upscale"
    elif spec.num_refined == 1:
        made = f"upscale_strength {spec.upscale_strength:g} of {spec.upscale_steps} steps"
        reason = f"{made} makes no step; raise one of them"
    if reason is not None or call is None:
        yield Problem.of("upscale", f"{spec.upscale:g}", reason or "")
        return
    yield from size_problems(*spec.made_size, multiple=(8, 8))
    for problem in call.problems(second_pass(spec, call)):
        yield replace(problem, accepted=f"{problem.accepted} (in the second pass, {call.pipeline_class})")
