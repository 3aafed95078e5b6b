"""Schedulers that jobs name: in the words of other programs, and for Wan and Qwen-Image, which predict flow.

Source: diffusers 0.42, `schedulers/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gfgen.errors import Problem
from gfgen.graph import Artifact
from gfgen.job.fields import shown
from gfgen.job.samplers import SAMPLERS, known_sampler
from gfgen.job.spec import JobSpec
from gfgen.models.geometry import rules
from gfgen.models.geometry.call import options_of, scheduler_problems, signature_of

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
_SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")
_KARRAS_OF_FLOW = ("UniPCMultistepScheduler", "use_karras_sigmas")
STATE_ROOM_BYTES = 4 << 30
"""For latents with the state of any scheduler: addresses in a sparse file, not memory."""


def with_known_scheduler(spec: JobSpec, *, is_flow: bool, own_class: str | None = None) -> JobSpec:
    """The job with the class and options that its scheduler's name in other programs stands for.

    Those of models that predict flow get the options for it: where a name is known, or for all schedulers
    with the model's own class.
    """
    if spec.scheduler is None:
        return spec
    name, options = spec.scheduler.get("class"), dict(spec.scheduler)
    known = known_sampler(name, is_flow=is_flow) if isinstance(name, str) else None
    if known is not None:
        del options["class"]
    found = {**(known or {}), **options}
    kind = found.get("class", own_class)
    if is_flow and (own_class or known) and isinstance(kind, str) and "use_flow_sigmas" in options_of(kind):
        found = {**found, **OF_FLOW, **found}
    return rules.changed(spec, scheduler=found or None)


def shift_of(spec: JobSpec) -> float | None:
    """The flow shift among the options of a job's scheduler."""
    options = spec.scheduler or {}
    found = options.get("flow_shift", options.get("shift"))
    return float(found) if isinstance(found, (int, float)) else None


def flow_problems(spec: JobSpec, *, own_class: str, call: str, most_tokens: int) -> Iterator[Problem]:
    """What a model that predicts flow refuses of `files`, `args`, `scheduler` and `sigmas`."""
    yield from rules.useless(spec, "files", "this model takes no other files; leave it out")
    if spec.args is not None:
        yield from signature_of(call).args_problems(spec)
        given: Any = spec.args.get("max_sequence_length")
        if isinstance(given, (int, float)) and not 1 <= given <= most_tokens:
            accepted = f"from 1 to {most_tokens:,} are accepted"
            yield Problem.of("args.max_sequence_length", shown(given), accepted)
    options = spec.scheduler or {}
    name = options.get("class", own_class)
    found = [*scheduler_problems(spec, own_class)] if options or spec.sigmas else []
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
        if value is True and option in _SPACINGS and has_spacing and (name, option) != _KARRAS_OF_FLOW:
            reason = f"{name} spaces no noise levels of flow so; leave it out, or use euler"
            yield Problem.of(f"scheduler.{option}", "true", reason)
    if spec.sigmas is not None and (spec.sigmas[0] > 1 or spec.sigmas[-1] == 0):
        accepted = "numbers up to 1 are accepted, without the 0 at the end, which the scheduler adds"
        yield Problem.of("sigmas", shown(spec.sigmas), accepted)
    if spec.sigmas is not None and (own := [each for each in _SPACINGS if options.get(each) is True]):
        accepted = f"{own[0]} of the scheduler spaces the noise levels itself; leave one out"
        yield Problem.of("sigmas", shown(spec.sigmas), accepted)
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
    return int((spec.args or {}).get("max_sequence_length", usual))
