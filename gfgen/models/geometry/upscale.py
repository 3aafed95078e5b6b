"""The second pass of a job with `upscale`: image to image, from the enlarged picture of the first pass.

Its call is the pipeline's own, or that of the pipeline for image to image with the same components
(SomePipeline, SomeImg2ImgPipeline). The result is that of a job with this picture, strength and size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gfgen.errors import Problem
from gfgen.graph import Trajectory
from gfgen.job.spec import UPSCALE_FIELDS, JobSpec, num_pictures
from gfgen.models.geometry import rules
from gfgen.models.geometry.call import CallSignature, is_pipeline, signature_of

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
    return rules.changed(spec, enlarged=(width, height), upscale_strength=strength, upscale_steps=steps)


def with_refined(trajectory: Trajectory, spec: JobSpec) -> Trajectory:
    num_steps = trajectory.num_steps + spec.num_refined
    return replace(trajectory, num_steps=num_steps, num_refined=spec.num_refined)


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
            yield from rules.useless(spec, name, "belongs to upscale, which is missing; leave it out")
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
    yield from rules.size_problems(*spec.made_size, multiple=(8, 8))
    for problem in call.problems(second_pass(spec, call)):
        yield replace(problem, accepted=f"{problem.accepted} (in the second pass, {call.pipeline_class})")
