"""From what a request asks for to jobs: the words of each interface become those of the job file.

No name that a request gives reaches the file system: models are those that are served, pictures come as
bytes, and ids and file names are made here.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gfgen.errors import JobFileError, Problem
from gfgen.job.fields import parse_fields
from gfgen.job.images import ImageError, NoImages, check_content
from gfgen.job.reader import read_job_stream
from gfgen.job.spec import JobSpec, default_seed
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.server.jobs.store import JobFacts, NewJob
from gfgen.server.protocol import schemas
from gfgen.server.protocol.link import Admit
from gfgen.server.protocol.problems import ApiError, refused

INPUTS_NAME = ".inputs"
"""Folder of the pictures that came with jobs that have not ended."""
_NO_PATHS = "files of the server cannot be named over HTTP; send the job with its picture to /v1/videos"
_VIDEO_WORDS = {"num_frames": "frames", "num_inference_steps": "steps"}
_IMAGE_WORDS = {"num_inference_steps": "steps"}
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_DATA_URL = re.compile(r"data:image/[a-z.+-]{1,20};base64,", re.IGNORECASE)
_DECODED_AT_ONCE = 1 << 20
"""Characters of base64, a multiple of 4: other threads wait for as long as one part takes."""
_SOONEST_S = 0.001


@dataclass(frozen=True, slots=True)
class RequestedJob:
    """A job that is asked for: as the job file would say it, and what came along."""

    spec: JobSpec
    picture: bytes | None = None
    batch_id: str | None = None
    custom_id: str | None = None
    must_be: schemas.MediaKind | None = None
    """The kind that this endpoint makes."""
    words: Mapping[str, str] | None = None
    """The request's word for a field of the job file, where it is another."""


def new_id(kind: str) -> str:
    """An id that nobody can guess, and that is a file name everywhere."""
    return f"{kind}_{secrets.token_hex(12)}"


# The interfaces ------------------------------------------------------------------------------------


def video_job(request: schemas.VideoRequest, *, models: Sequence[schemas.ServedModel]) -> RequestedJob:
    """One video; the picture is put in by who has it."""
    model = chosen_model(request.model, models, kind="video")
    values = _job_words(request, _VIDEO_WORDS, leave_out=("seconds", "model"))
    if request.seconds is not None:
        if request.num_frames is not None:
            raise ApiError(400, "num_frames and seconds both say how long it is; give one", param="seconds")
        values["frames"] = _frames(request.seconds, request.fps or _default_fps(model))
    words = {ours: theirs for theirs, ours in _VIDEO_WORDS.items()}
    spec = _spec(values | {"model": model.id}, "video", words)
    return RequestedJob(spec, must_be="video", words=words)


def image_jobs(request: schemas.ImageRequest, *, models: Sequence[schemas.ServedModel]) -> list[RequestedJob]:
    """As many pictures as were asked for; each after the first has the next seed."""
    model = chosen_model(request.model, models, kind="image")
    left_out = ("n", "model", "response_format", "output_format")
    values = _job_words(request, _IMAGE_WORDS, leave_out=left_out)
    if values.get("size") == "auto":
        del values["size"]
    if model.kind == "video":
        values["frames"] = 1
    words = {ours: theirs for theirs, ours in _IMAGE_WORDS.items()}
    first = _spec(values | {"model": model.id}, "image", words)
    specs = [first]
    for number in range(1, request.n):
        seed = None if request.seed is None else (request.seed + number) % 2**63
        specs.append(replace(first, id=new_id("image"), seed=seed))
    return [RequestedJob(spec, must_be="image", words=words) for spec in specs]


def plain_job(request: schemas.JobRequest, *, models: Sequence[schemas.ServedModel]) -> RequestedJob:
    """One job of any model, in the job file's own words."""
    model = chosen_model(request.model, models, kind=None)
    values = _job_words(request, {}, leave_out=("model",))
    kind = "image" if model.kind == "image" or request.frames == 1 else "video"
    return RequestedJob(_spec(values | {"model": model.id}, kind, {}))


def batch_jobs(
    content: bytes, *, batch_id: str, skip_invalid: bool, models: Sequence[schemas.ServedModel]
) -> tuple[list[RequestedJob], tuple[Problem, ...]]:
    """The jobs of a job file, and what is wrong with it if that may be skipped.

    A job's seed is the one that `gfgen run` would give it, so the same file gives the same results.

    Raises: JobFileError with every problem, as the command line would.
    """
    parsed = read_job_stream(
        io.BytesIO(content), source="the job file", folder=Path(), images=NoImages(_NO_PATHS)
    )
    served = {model.id for model in models}
    problems, requested = list(parsed.problems), []
    for spec in parsed.specs:
        name = spec.model or models[0].id
        if name not in served:
            problems.append(_not_served(spec.line, name, models))
            continue
        seed = default_seed(spec.id) if spec.seed is None else spec.seed
        own = replace(spec, id=new_id("job"), seed=seed, model=name, output=None)
        requested.append(RequestedJob(own, batch_id=batch_id, custom_id=spec.id))
    problems.sort(key=lambda problem: problem.line or 0)
    if problems and not (skip_invalid and requested):
        raise JobFileError(parsed.source, tuple(problems))
    return requested, tuple(problems)


def chosen_model(
    name: str | None, models: Sequence[schemas.ServedModel], *, kind: schemas.MediaKind | None
) -> schemas.ServedModel:
    """The served model of that name, or the first one for this kind of thing.

    Raises: ApiError when it is not served.
    """
    if name is None:
        return next((model for model in models if kind in (None, model.kind)), models[0])
    for model in models:
        if model.id == name:
            return model
    served = ", ".join(model.id for model in models)
    shown = name if len(name) <= 80 and name.isprintable() else repr(name[:80])
    raise ApiError(
        404,
        f"model {shown}: not served here; there are {served}",
        param="model",
        code="model_not_found",
    )


def data_url_content(url: str) -> bytes:
    """The bytes of a data: URL with a picture; any other URL is refused, nothing is fetched."""
    match = _DATA_URL.match(url)
    if match is None:
        raise ApiError(
            400,
            "input_reference: send the picture itself, as a file or as a data:image/...;base64 URL; "
            "other URLs are not followed",
            param="input_reference",
        )
    padding = url.find("=", match.end())
    if 0 <= padding < len(url) - 2:  # which a part that ends there would take
        raise _not_base64()
    try:
        parts = range(match.end(), len(url), _DECODED_AT_ONCE)
        return b"".join(
            base64.b64decode(url[start : start + _DECODED_AT_ONCE], validate=True) for start in parts
        )
    except (binascii.Error, ValueError):
        raise _not_base64() from None


def _not_base64() -> ApiError:
    return ApiError(400, "input_reference: not base64", param="input_reference")


def checked_picture(content: bytes, *, param: str) -> str:
    """SHA-256 of a picture's bytes; raises ApiError for what is none."""
    try:
        return check_content(content)
    except ImageError as error:
        raise ApiError(422, f"{param}: {error}", param=param, code="invalid_image") from None


# Admission ------------------------------------------------------------------------------------------


def admitted(requested: Sequence[RequestedJob], admit: Admit) -> list[tuple[RequestedJob, AdmittedJob]]:
    """Each job with itself as it will run.

    Raises: ApiError with what the model or this machine cannot do.
    """
    jobs, problems = admit([one.spec for one in requested])
    if problems:
        raise refused(problems, requested[0].words or {}, status=422)
    pairs = list(zip(requested, jobs, strict=True))
    for one, job in pairs:
        _check_kind(one, job)
    return pairs


def admitted_of_file(
    requested: Sequence[RequestedJob], admit: Admit
) -> tuple[list[tuple[RequestedJob, AdmittedJob]], Sequence[Problem]]:
    """The jobs of a batch that will run, each with itself as it will, and what is wrong with the others."""
    jobs, problems = admit([one.spec for one in requested])
    by_id = {one.spec.id: one for one in requested}
    return [(by_id[job.job_id], job) for job in jobs], problems


def accepted(requested: RequestedJob, job: AdmittedJob, *, now: float) -> NewJob:
    """What is put down of a job. Its deadline becomes a moment, which no restart moves."""
    spec, run = requested.spec, job.spec
    arrives_at = now + spec.arrival_s
    deadline_at = spec.deadline_at
    if spec.deadline_s is not None:
        deadline_at = arrives_at + spec.deadline_s
    is_video = media_kind(job) == "video"
    facts = JobFacts(
        id=job.job_id,
        kind=media_kind(job),
        model=run.model or "",
        prompt=run.prompt,
        size=f"{run.width}x{run.height}",
        steps=run.steps or 0,
        seed=run.seed or 0,
        created_at=now,
        arrives_at=arrives_at,
        file=job.info.file,
        num_tasks=job.info.num_tasks,
        seconds=_length((run.frames or 0) / (run.fps or 1)) if is_video else None,
        frames=run.frames if is_video else None,
        fps=run.fps if is_video else None,
        priority=run.priority,
        tag=run.tag,
        batch_id=requested.batch_id,
        custom_id=requested.custom_id,
        deadline_at=deadline_at,
        input_file=job.job_id if requested.picture is not None else None,
    )
    stored = replace(spec, deadline_s=None, deadline_at=deadline_at, seed=run.seed, line=None, image=None)
    return NewJob(facts, {name: value for name, value in asdict(stored).items() if value is not None})


def resumed_spec(facts: JobFacts, spec: Mapping[str, Any], *, folder: Path, now: float) -> JobSpec:
    """The spec of a job that was accepted earlier; times count from when it was."""
    image = None if facts.input_file is None else str(folder / INPUTS_NAME / facts.input_file)
    stored = JobSpec(**{**spec, "image": image})
    waited_s = max(0.0, now - facts.arrives_at)
    timeout_s = stored.timeout_s
    if timeout_s is not None:
        timeout_s = max(_SOONEST_S, timeout_s - waited_s)
    return replace(stored, arrival_s=max(0.0, facts.arrives_at - now), timeout_s=timeout_s)


def media_kind(job: AdmittedJob) -> schemas.MediaKind:
    return "video" if job.info.file.endswith(".mp4") else "image"


# Parts ----------------------------------------------------------------------------------------------


def _job_words(
    request: schemas.RequestModel, words: Mapping[str, str], *, leave_out: Sequence[str]
) -> dict[str, Any]:
    """What a request says, under the job file's names."""
    given = request.model_dump(exclude_none=True)
    return {words.get(name, name): value for name, value in given.items() if name not in leave_out}


def _spec(values: Mapping[str, Any], kind: str, words: Mapping[str, str]) -> JobSpec:
    fields, problems = parse_fields(values, images=NoImages(_NO_PATHS))
    if problems:
        raise refused(problems, words, status=400)
    return JobSpec(**{**fields, "id": new_id(kind)})


def _frames(seconds: str | float, fps: int) -> int:
    """Frames of so many seconds; the model rounds them."""
    text = str(seconds)
    if not _SECONDS.fullmatch(text) or not float(text) > 0:
        raise ApiError(
            400, f'seconds = {text[:40]!r}: a number of seconds like "4" or 2.5 is accepted', param="seconds"
        )
    return max(1, math.floor(float(text) * fps + 0.5))


def _default_fps(model: schemas.ServedModel) -> int:
    return (model.defaults.fps if model.defaults else None) or 16


def _length(seconds: float) -> str:
    """'5.063', '4': as OpenAI's clients read it."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def _check_kind(requested: RequestedJob, job: AdmittedJob) -> None:
    kind = media_kind(job)
    if requested.must_be in (None, kind):
        return
    if kind == "image":
        what = "makes pictures" if requested.spec.frames is None else "makes a picture of a single frame"
        raise ApiError(422, f"model {job.spec.model} {what}: use /v1/images/generations", param="model")
    raise ApiError(422, f"model {job.spec.model} makes videos: use /v1/videos", param="model")


def _not_served(line: int | None, name: str, models: Sequence[schemas.ServedModel]) -> Problem:
    served = ", ".join(model.id for model in models)
    return replace(Problem.of("model", name, f"is not served here; there are {served}"), line=line)
