"""Converts requests to jobs: the fields of each endpoint become those of the job file.

No name from a request reaches the file system: models are the served ones, pictures come as bytes, and ids
and file names are generated here.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from gfgen.errors import JobFileError, Problem
from gfgen.job.fields import NAME, REPEATED, parse_fields, plain_name
from gfgen.job.images import ImageError, check_content, is_video
from gfgen.job.reader import read_job_stream
from gfgen.job.spec import SCALE_FIELDS, JobSpec, default_seed, drawn, later_seed, num_pictures
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.files.metadata import texts_by
from gfgen.server.protocol import picture_schemas, schemas
from gfgen.server.protocol.link import Admit
from gfgen.server.protocol.problems import (
    NO_PATHS,
    ApiError,
    bad,
    checked,
    opened,
    refused,
    renamed,
    without_folders,
)
from gfgen.server.protocol.server_schemas import BatchLine, LineFailure, ServedModel
from gfgen.server.store import JobFacts, NewJob

logger = logging.getLogger(__name__)

Models = Sequence[ServedModel]
"""Those that are served."""
_ONE_FILE = "a job over HTTP makes one file; send one request for each picture"
MAX_FIELDS, MAX_UPLOADS, MAX_PICTURES = 64, 32, 16
"""The last one is of an edit, as at OpenAI."""
_OF_ANSWERS = ("output_format", "output_compression", "modalities")
ANY_NAME = "*"
"""The alias that stands for all names that are not served."""
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_KIND = r"(image/[a-z0-9.+-]{1,20}|application/octet-stream)?"
_DATA_URL = re.compile(rf"data:{_KIND}(;[^;,]{{1,50}})*;base64,", re.IGNORECASE)
_LINE_ENDS = dict.fromkeys(map(ord, "\r\n"))
"""Of base64 that is wrapped, as `base64` prints it. No other character may be missing or too many."""
_PICTURE_KEYS = ("image_url", "url", "file", "file_data", "file_url")
_MIN_TIMEOUT_S = 0.001
_OF_FILES: Mapping[str, Any] = {"output": None, "format": None, "quality": None}
"""Fields of files, whose names and formats the server chooses."""
_MODEL_FIELDS = (*SCALE_FIELDS, "fps")
"""Fields that only some models use. Requests have been checked against their ranges, so a problem with one
of them means that the model does not use it."""


@dataclass(frozen=True, slots=True)
class Upload:
    content: bytes
    suffix: str = ""
    """That of a video's name; empty for a picture."""
    is_item: bool = False

    @classmethod
    def of(cls, name: str | None, content: bytes, *, is_item: bool) -> Upload:
        suffix = Path(name).suffix.lower() if name and is_video(name) else ""
        return cls(content, suffix, is_item)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


Uploaded = Mapping[str, Sequence[Upload]]
"""Files for arguments of the pipeline, by argument."""


@dataclass(frozen=True, slots=True)
class RequestedJob:
    spec: JobSpec
    picture: bytes | None = None
    uploads: Uploaded = field(default_factory=dict)
    batch_id: str | None = None
    custom_id: str | None = None
    must_be: schemas.MediaKind | None = None
    words: Mapping[str, str] | None = None
    """The request's names of fields of the job file, where they differ."""
    ignored: list[str] | None = None
    """Collects a warning for each field that the model does not use; None refuses such fields."""
    webhook: str | None = None
    answer: Mapping[str, Any] = field(default_factory=dict)
    """Of a line of a batch: how its pictures are answered."""

    @property
    def has_inputs(self) -> bool:
        return self.picture is not None or bool(self.uploads)


def new_id(kind: str) -> str:
    """An unguessable id that is a valid file name."""
    return f"{kind}_{secrets.token_hex(12)}"


def video_job(request: schemas.VideoRequest, *, models: Models, ignored: list[str] | None) -> RequestedJob:
    """The job of a video request; the caller adds the picture.

    A video model may make a single frame, a picture: warm-up requests ask for that.
    """
    job = request.job
    model = chosen_model(job.get("model"), models, kind="video")
    if request.seconds is not None:
        if "frames" in job:
            raise ApiError(400, "num_frames and seconds exclude each other; give one", param="seconds")
        default_fps = (model.defaults.fps if model.defaults else None) or 16
        job["frames"] = _frames(request.seconds, job.get("fps") or default_fps)
    words = {**request.names, **request.other_names}
    spec = _spec(job, model, "video", words)
    must_be: schemas.MediaKind | None = None if model.kind == "video" else "video"
    return RequestedJob(spec, must_be=must_be, words=words, ignored=ignored, webhook=request.webhook)


def image_jobs(
    request: picture_schemas.AskedPictures,
    *,
    pictures: Sequence[bytes] = (),
    mask: bytes | None = None,
    models: Models,
    ignored: list[str] | None,
) -> list[RequestedJob]:
    """One job per picture; each after the first has the next seed. `pictures` are those to begin with, and
    `mask` is white where the first of them is painted."""
    job, words = request.job, {**request.names, "files.image": "image", **request.other_names}
    is_several = len(pictures) > 1

    def takes(model: ServedModel) -> bool:
        takes_image = model.takes_several if is_several else not pictures or model.takes_image != "no"
        return takes_image and (mask is None or model.mask_argument is not None)

    model = chosen_model(job.get("model"), models, kind="image", takes=takes)
    if pictures and model.takes_image == "no":
        able = ", ".join(each.id for each in models if each.kind == model.kind and takes(each))
        then = f"name {able}" if able else "serve an image-to-image pipeline as well (--model)"
        reason = f"model {model.id} makes pictures from text only; {then}"
        raise ApiError(422, f"{words.get('image', 'image')}: {reason}", param=words.get("image", "image"))
    if is_several and not model.takes_several:
        raise ApiError(422, f"image: model {model.id} takes one, not {len(pictures)}", param="image")
    if mask is not None and model.mask_argument is None:
        reason = "takes no mask; leave it out, or use a model for inpainting"
        raise ApiError(422, f"mask: model {model.id} {reason}", param="mask")
    picture = pictures[0] if pictures and not is_several else None
    uploads = {"image": [Upload(each, is_item=True) for each in pictures]} if is_several else {}
    uploads |= {} if mask is None else {model.mask_argument or "": [Upload(mask)]}
    words |= {f"files.{model.mask_argument or 'mask_image'}": "mask"}
    if model.kind == "video":
        job["frames"] = 1
    first = _spec(job, model, "image", words)
    specs = [first]
    for number in range(1, request.num_pictures):
        seed = None if first.seed is None else later_seed(first.seed, number)
        specs.append(replace(first, id=new_id("image"), seed=seed))
    return [
        RequestedJob(spec, picture, uploads, must_be="image", words=words, ignored=ignored) for spec in specs
    ]


def response_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of /v1/images that a request for a response has: those of its tool, further ones of its
    own, and the prompt. Raises: ApiError if it asks for something else than a picture."""
    kind = picture_schemas.ResponseRequest
    request = checked(kind, {name: values.get(name) for name in kind.model_fields})
    tools = [tool for tool in request.tools or () if tool.get("type") == "image_generation"]
    choice = request.tool_choice
    chosen = choice.get("type") if isinstance(choice, Mapping) else choice
    if not tools or chosen not in (None, "auto", "required", "image_generation", "allowed_tools"):
        raise bad("tools", 'this server makes pictures, no texts; give [{"type": "image_generation"}]')
    if len(tools) > 1:
        raise bad("tools", f"{len(tools)} of type image_generation; give one")
    tool = tools[0]
    is_known = tool.get("action") in (None, "auto", "edit", "generate")
    if not is_known or not isinstance(tool.get("model"), str | None):
        raise bad("tools", "action is auto, edit or generate, and model the name of a model")
    if request.background is True or request.previous_response_id or values.get("prompt") is not None:
        raise bad("input", "responses are not kept, nor prompts, and none runs in the background; send all")
    if not request.text.strip():
        raise bad("input", "has no text of the user, which is the prompt")
    taken = {*kind.model_fields, *kind.ignored, "prompt"}
    fields = {name: value for name, value in values.items() if name not in taken}
    fields |= {f"tools.{each.get('type')}": each for each in request.tools or () if each is not tool}
    for name in tool.keys() - {"type", "action", "model"}:
        fields[f"tools.{name}" if name in taken - {"background"} else name] = tool[name]
    model = tool.get("model") or request.model
    return {**fields, "model": model, "prompt": request.text, "stream": request.stream}


def painted_part(mask: bytes, picture: bytes) -> bytes:
    """A request's mask as pipelines take it: white where they paint. In the request that is transparent.

    Raises: ApiError if it does not fit the picture, or nothing in it is transparent.
    Source: OpenAI's reference of images/edits ("fully transparent areas (e.g. where alpha is zero)");
            diffusers 0.42 StableDiffusionInpaintPipeline ("White pixels in the mask are repainted").
    """
    from PIL import Image, ImageOps

    checked_picture(picture, param="image")
    checked_picture(mask, param="mask")
    with Image.open(io.BytesIO(mask)) as shape, Image.open(io.BytesIO(picture)) as below:
        size = ImageOps.exif_transpose(below).size
        alpha = shape.convert("RGBA").getchannel("A")
    if alpha.size != size:
        raise bad("mask", "is {}x{}, but the image {}x{}; give both the same size".format(*alpha.size, *size))
    white = alpha.point(lambda opacity: 255 * (opacity == 0))
    if white.getbbox() is None:
        raise bad("mask", "nothing in it is transparent; the part to paint must be (alpha 0)")
    content = io.BytesIO()
    white.save(content, format="PNG")
    return content.getvalue()


def taken_uploads(
    values: Mapping[str, Any], uploads: Uploaded, read_file: Callable[[str], bytes]
) -> tuple[Mapping[str, Any], Uploaded]:
    """The values without `files`, and the uploads with those that `files` refers to."""
    named = values.get("files")
    if named is None:
        return values, uploads
    accepted = "an object of arguments, each with a data:image/...;base64 URL, a file_id, or a list of them"
    if not isinstance(named, Mapping):
        raise bad("files", accepted)
    found = dict(uploads)
    for name, given in named.items():
        urls = given if isinstance(given, list) else [given]
        if not urls or not all(isinstance(url, str | Mapping) for url in urls) or not NAME.fullmatch(name):
            raise bad("files", accepted)
        contents = [picture_content(url, read_file, param=f"files.{name}") for url in urls]
        found[name] = [Upload(content, is_item=isinstance(given, list)) for content in contents]
    if sum(map(len, found.values())) > MAX_UPLOADS:
        raise bad("files", f"at most {MAX_UPLOADS} files are accepted")
    return {name: value for name, value in values.items() if name != "files"}, found


def plain_job(request: schemas.JobRequest, *, uploads: Uploaded, models: Models) -> RequestedJob:
    job = request.job
    model = chosen_model(job.get("model"), models, kind=None)
    kind = "image" if model.kind == "image" or job.get("frames") == 1 else "video"
    spec = _spec(job, model, kind, {})
    if num_pictures(spec.args) != 1:
        raise ApiError(400, f"args.num_images_per_prompt: {_ONE_FILE}", param="args")
    return RequestedJob(spec, uploads=uploads, webhook=request.webhook)


def batch_jobs(
    content: bytes, *, suffix: str, max_jobs: int, batch_id: str, skip_invalid: bool, models: Models
) -> tuple[list[RequestedJob], tuple[Problem, ...]]:
    """The jobs of a job file, and its problems if those may be skipped.

    A job without a seed gets the one that `gfgen run` would use, so the same file gives the same results.

    Raises: JobFileError with all problems, as on the command line.
    """
    parsed = read_job_stream(
        io.BytesIO(content),
        source="the job file",
        folder=Path(),
        images=NO_PATHS,
        suffix=suffix,
        max_jobs=max_jobs,
    )
    problems, requested = list(parsed.problems), []
    for spec in parsed.specs:
        try:
            model = chosen_model(spec.model or models[0].id, models, kind=None)
        except ApiError as error:
            accepted = error.message.partition(": ")[2]
            problems.append(replace(Problem.of("model", spec.model, accepted), line=spec.line))
            continue
        if num_pictures(spec.args) != 1:
            problems.append(Problem(spec.line, "args.num_images_per_prompt", None, _ONE_FILE))
            continue
        seed = default_seed(spec.id) if spec.seed is None else spec.seed
        usual = model.usual(partial(getattr, spec))
        own = replace(spec, id=new_id("job"), seed=seed, model=model.root or model.id, **usual, **_OF_FILES)
        requested.append(RequestedJob(own, batch_id=batch_id, custom_id=spec.id))
    problems.sort(key=lambda problem: problem.line or 0)
    if problems and not (skip_invalid and requested):
        raise JobFileError(parsed.source, tuple(problems))
    return requested, tuple(problems)


def batch_lines(
    content: bytes, *, endpoint: str, batch_id: str, models: Models, max_lines: int, is_strict: bool
) -> tuple[list[list[RequestedJob]], list[LineFailure]]:
    """The jobs of each valid line of an uploaded file of OpenAI's requests, and the other lines.

    Raises: ApiError if there are more lines than that.
    """
    lines: list[list[RequestedJob]] = []
    failures: list[LineFailure] = []
    first_lines: dict[str, int] = {}
    for number, text in enumerate(io.BytesIO(content), start=1):
        if not text.strip():
            continue
        if len(lines) + len(failures) == max_lines:
            raise ApiError(413, f"the file has more than {max_lines:,} requests: split it")
        custom_id = None
        try:
            line = checked(BatchLine, json_object(text))
            custom_id = line.custom_id
            if (first := first_lines.setdefault(custom_id, number)) != number:
                raise bad("custom_id", f"also on line {first}; give each its own")
            if line.url != endpoint:
                raise ApiError(400, f"url = {line.url!r}: {endpoint} is accepted in this batch", param="url")
            jobs = _line_jobs(endpoint, line.body, models, is_strict=is_strict)
        except ApiError as error:
            failures.append(line_failure(error, line=number, custom_id=custom_id))
            continue
        of_batch: dict[str, Any] = {"batch_id": batch_id, "custom_id": custom_id}
        lines.append([replace(job, spec=replace(job.spec, line=number), **of_batch) for job in jobs])
    return lines, failures


def line_failure(error: ApiError, *, line: int, custom_id: str | None) -> LineFailure:
    return LineFailure(custom_id=custom_id, line=line, code=error.code, message=error.message)


def json_object(content: bytes) -> dict[str, Any]:
    """The fields of a request; raises ApiError."""
    try:
        value = json.loads(content, parse_constant=_refuse_constant, object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise ApiError(400, "the request is not UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the request is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the request is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, 'the request is not a JSON object like {"prompt": "a red circle falls"}')
    if len(value) > MAX_FIELDS:
        raise ApiError(400, f"{len(value):,} fields; at most {MAX_FIELDS} are accepted")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise bad(plain_name(Counter(name for name, _ in pairs).most_common(1)[0][0]), REPEATED)
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _line_jobs(
    endpoint: str, body: Mapping[str, Any], models: Models, *, is_strict: bool
) -> list[RequestedJob]:
    if "input_reference" in body:
        raise bad("input_reference", "pictures are not accepted in batches")
    if endpoint == "/v1/videos":
        video, warnings = opened(schemas.VideoRequest, body, is_strict=is_strict)
        return [video_job(video, models=models, ignored=None if is_strict else warnings)]
    is_chat = endpoint == "/v1/chat/completions"
    kind = picture_schemas.ChatRequest if is_chat else picture_schemas.ImageRequest
    asked_for: picture_schemas.ImageRequest | picture_schemas.ChatRequest
    asked_for, warnings = opened(kind, body, is_strict=is_strict)
    if asked_for.stream:
        raise bad("stream", "a batch has no streams; leave it out")
    jobs = image_jobs(asked_for, models=models, ignored=None if is_strict else warnings)
    answer = {name: found for name in _OF_ANSWERS if (found := getattr(asked_for, name, None)) is not None}
    return [replace(job, answer=answer) for job in jobs]


def chosen_model(
    name: str | None,
    models: Models,
    *,
    kind: schemas.MediaKind | None,
    takes: Callable[[ServedModel], bool] = lambda model: True,
) -> ServedModel:
    """The served model of this name, or the first one that fits; raises ApiError if there is no such name.

    A model of this kind fits that `takes` what is given, or if there is none, any model that does.
    """
    if name is None:
        able = list(filter(takes, models))
        return next((model for model in able if kind in (None, model.kind)), (able or models)[0])
    by_name = {model.id: model for model in models}
    if name in by_name:
        return by_name[name]
    shown = name if len(name) <= 80 and name.isprintable() else repr(name[:80])
    if (model := by_name.get(ANY_NAME)) is not None:
        logger.info("model %s: not served here; %s runs in its place", shown, model.root)
        return model
    message = f"model {shown}: not served here; there are {', '.join(by_name)}"
    raise ApiError(404, message, param="model", code="model_not_found")


def picture_content(given: Any, read_file: Callable[[str], bytes], *, param: str) -> bytes:
    """The picture that a request refers to by a data: URL or the id of an uploaded file, as OpenAI's clients
    write them. Raises ApiError for any other URL: the server fetches nothing."""
    while isinstance(given, Mapping):
        if isinstance(file_id := given.get("file_id"), str):
            return read_file(file_id)
        given = next((given[key] for key in _PICTURE_KEYS if given.get(key) is not None), None)
    if not isinstance(given, str):
        raise bad(param, "send a file in a form, a data:image/...;base64 URL, or a file_id of /v1/files")
    match = _DATA_URL.match(given)
    if match is None:
        accepted = "send the picture itself, as a file or as a data:image/...;base64 URL"
        raise bad(param, f"{accepted}; other URLs are not followed")
    try:
        return base64.b64decode(given[match.end() :].translate(_LINE_ENDS), validate=True)
    except ValueError:
        raise bad(param, "not base64 with + and /, padded with =") from None


def checked_picture(content: bytes, *, param: str) -> str:
    try:
        return check_content(content)
    except ImageError as error:
        raise ApiError(422, f"{param}: {error}", param=param, code="invalid_image") from None


def admitted(requested: Sequence[RequestedJob], admit: Admit) -> list[tuple[RequestedJob, AdmittedJob]]:
    """Each request with its admitted job; raises ApiError if the model or this machine cannot do one."""
    requested = _seeded(requested)
    jobs, problems = admit([one.spec for one in requested])
    if problems and (ignored := requested[0].ignored) is not None:
        unused = {each.field: f"{each}; ignored" for each in problems if each.field in _MODEL_FIELDS}
        if unused:
            ignored += unused.values()
            nothing: dict[str, Any] = dict.fromkeys(unused)
            requested = [replace(one, spec=replace(one.spec, **nothing)) for one in requested]
            jobs, problems = admit([one.spec for one in requested])
    if problems:
        raise refused(renamed(problems, requested[0].words or {}), status=422)
    pairs = list(zip(requested, jobs, strict=True))
    for one, job in pairs:
        kind = media_kind(job)
        if one.must_be not in (None, kind):
            what, where = ("pictures", "images/generations") if kind == "image" else ("videos", "videos")
            raise ApiError(422, f"model {job.spec.model} makes {what}: use /v1/{where}", param="model")
    return pairs


def _seeded(requested: Sequence[RequestedJob]) -> list[RequestedJob]:
    """The requests with seeds in place of random ones, which are drawn now."""
    return [replace(one, spec=replace(one.spec, seed=drawn(one.spec.seed))) for one in requested]


def admitted_of_file(
    requested: Sequence[RequestedJob], admit: Admit
) -> tuple[list[tuple[RequestedJob, AdmittedJob]], Sequence[Problem]]:
    requested = _seeded(requested)
    jobs, problems = admit([one.spec for one in requested])
    by_id = {one.spec.id: one for one in requested}
    return [(by_id[job.job_id], job) for job in jobs], problems


def accepted(requested: RequestedJob, job: AdmittedJob, *, now: float) -> NewJob:
    """The job to store. Its deadline becomes a point in time, which no restart moves."""
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
        size=run.size_text,
        steps=job.trajectory.num_steps,
        seed=run.seed or 0,
        created_at=now,
        arrives_at=arrives_at,
        file=job.info.file,
        num_tasks=job.info.num_tasks,
        num_refined=job.trajectory.num_refined,
        frames=run.frames if is_video else None,
        fps=run.fps if is_video else None,
        priority=run.priority,
        tag=run.tag,
        batch_id=requested.batch_id,
        custom_id=requested.custom_id,
        deadline_at=deadline_at,
        input_file=job.job_id if requested.has_inputs else None,
        webhook=requested.webhook,
        owner=run.owner,
        warnings=tuple(without_folders(str(warned)) for warned in job.info.warnings),
    )
    due: dict[str, Any] = {"deadline_s": None, "deadline_at": deadline_at, "deadline_clock": None}
    stored = replace(spec, owner=run.owner, seed=run.seed, line=None, image=None, **due)
    if spec.files is not None:  # the folder may move
        stored = replace(stored, files=texts_by(lambda path: Path(path).name, spec.files))
    said = ((each.name, getattr(stored, each.name)) for each in fields(stored))
    return facts, {name: value for name, value in said if value is not None}


def resumed_spec(facts: JobFacts, spec: Mapping[str, Any], *, inputs: Path, now: float) -> JobSpec:
    """The spec of a job from the store, with its files in the folder `inputs`; its times still count from its
    acceptance."""
    has_image = facts.input_file is not None and "image_sha256" in spec
    stored = JobSpec(**{**spec, "image": str(inputs / facts.id) if has_image else None})
    if stored.files is not None:
        stored = replace(stored, files=texts_by(lambda name: str(inputs / name), stored.files))
    waited_s = max(0.0, now - facts.arrives_at)
    timeout_s = stored.timeout_s
    if timeout_s is not None:
        timeout_s = max(_MIN_TIMEOUT_S, timeout_s - waited_s)
    return replace(stored, arrival_s=max(0.0, facts.arrives_at - now), timeout_s=timeout_s)


def media_kind(job: AdmittedJob) -> schemas.MediaKind:
    return "video" if job.info.file.endswith(".mp4") else "image"


def _spec(job: Mapping[str, Any], model: ServedModel, kind: str, words: Mapping[str, str]) -> JobSpec:
    named = {**job, "model": model.root or model.id}
    fields, problems = parse_fields(named, images=NO_PATHS)
    if problems:
        raise refused(renamed(problems, words), status=400)
    return JobSpec(**{**model.usual(fields.get), **fields, "id": new_id(kind)})


def _frames(seconds: str | float, fps: float) -> int:
    """Number of frames for a length in seconds; the model rounds it."""
    text = str(seconds)
    if not _SECONDS.fullmatch(text) or not float(text) > 0:
        raise ApiError(
            400, f'seconds = {text[:40]!r}: a number of seconds like "4" or 2.5 is accepted', param="seconds"
        )
    return max(1, math.floor(float(text) * fps + 0.5))
