"""The rule of admission: all of a job acts as written, is a `Problem`, or among its `warnings`."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gfgen.errors import Warned
from gfgen.job.images import TRANSPARENT, remarks_on
from gfgen.job.samplers import FLOW, ignored_schedule
from gfgen.job.spec import JobSpec, input_files
from gfgen.models.geometry.model import Geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.runtime.core.observer import JobInfo
from gfgen.system.wording import counted, in_lines

logger = logging.getLogger(__name__)

MAX_DETAILS = 3
"""Details of a kind of warning that the log shows; the manifest has all."""


_WEIGHTED = re.compile(r"\([^()]*:\s*(?:[01]?\.\d+|[012])\s*\)")
"""A weight up to 2: (16:9) and (12:30) are none."""
_OPTION = re.compile(r"(?<!\S)--[A-Za-z]\w*(?:-\w+)*(?=\s|$)")
_BRACKETS = r"\([^()]*:\s*-\d*\.?\d+\s*\)|\({2,}[^()]+\){2,}|\[[^\[\]]*[^\W\d_][^\[\]]*\]"
WEIGHTS = "weights such as (red:1.3) in a prompt are plain text"
OF_A1111 = '((red)), [blue], AND and BREAK in a prompt are plain text without "prompt_syntax": "a1111"'
IN_PROMPTS: Mapping[str, re.Pattern[str]] = {
    WEIGHTS: _WEIGHTED,
    OF_A1111: re.compile(rf"{_BRACKETS}|\b(?:AND|BREAK)\b"),
    "<lora:...> in a prompt loads no LoRA; use the field lora": re.compile(r"<lora:[^<>]*>"),
    "{a|b} in a prompt is plain text without vary": re.compile(r"\{[^{}]*\|[^{}]*\}"),
    "options in a prompt are plain text; use fields of the job": _OPTION,
}
"""What other programs read in prompts."""


def warnings_of(info: JobInfo, geometry: Geometry) -> Iterator[Warned]:
    """What in a job does not act as written, as far as its fields and files tell."""
    asked = info.asked
    if info.rounding is not None:
        yield Warned(f"rounded by {info.spec.model}", info.rounding)
    yield from _warnings_of_inputs(info.spec, has_alpha=geometry.has_alpha)
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
        yield from _unused_by_call(asked, geometry)
    if (asked.negative_prompt or "").strip() and not is_guided:
        yield Warned("negative_prompt has no effect without guidance")


def warnings_of_texts(asked: JobSpec, *, has_clip: bool = False) -> Iterator[Warned]:
    fine = {WEIGHTS, OF_A1111} if asked.prompt_syntax else set() if has_clip else {OF_A1111}
    for kind, pattern in IN_PROMPTS.items():
        if kind not in fine and (found := pattern.findall(f"{asked.prompt}\n{asked.negative_prompt or ''}")):
            yield Warned(kind, ", ".join(dict.fromkeys(found)))


def _unused_by_call(asked: JobSpec, geometry: PipelineGeometry) -> Iterator[Warned]:
    name, signature = geometry.family, geometry.signature
    for field, value in (("prompt", asked.prompt.strip()), ("steps", asked.steps)):
        if value and signature.argument_of(field) is None:
            yield Warned(f"{field} has no effect on {name}, whose call takes none")
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
    ]
    others = [remark for remark in remarks if remark.kind != TRANSPARENT]
    yield from others if has_alpha or spec.background else remarks
    if spec.background and not has_alpha and others == remarks:
        yield Warned("background has no effect: no pixel of a picture is transparent")


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
