"""Request and response bodies of the HTTP interface, as pydantic models.

Fields with OpenAI's names have OpenAI's meaning; gfgen adds its own. Fields that end in `_at` are Unix
seconds; those that OpenAI's clients read are integers, the others have fractions.

The page at `/` uses `LiveState` (GET /v1/state) and `Change`, the event of GET /v1/state/events;
docs/serving.md describes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from starlette.responses import Response

from gfgen.job.fields import FIELDS, Refused
from gfgen.job.shared import number_of, value_of

JobStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
ServerStatus = Literal["loading", "ready", "draining"]
RankStatus = Literal["starting", "loading", "idle", "busy", "lost", "retired"]
StageName = Literal["encode", "prepare", "denoise", "reuse", "decode", "write"]
MediaKind = Literal["video", "image"]
BatchEndpoint = Literal["/v1/images/generations", "/v1/chat/completions", "/v1/videos"]


@dataclass(frozen=True, slots=True)
class JobField:
    """Marks a field of a request as this field of a job: it accepts what the job file accepts.

    A number may be in quotes, and an object or a list may be a text of JSON, because forms have only texts.
    """

    name: str

    def __get_pydantic_core_schema__(self, _: Any, __: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, _: Any, __: Any) -> dict[str, Any]:
        field = FIELDS[self.name]
        return {**field.schema, "description": f"{field.accepted[:1].upper()}{field.accepted[1:]}."}

    def _validate(self, value: object) -> object:
        field = FIELDS[self.name]
        kind = field.schema.get("type")
        is_number = kind in ("integer", "number")
        if isinstance(value, str) and kind in ("object", "array"):
            value = value_of(self.name, value)
        try:
            parsed = field.parse(number_of(value) if is_number and isinstance(value, str) else value)
        except Refused as refused:
            problem = field.refusal(value, str(refused))
            context = {"shown": problem.value, "accepted": problem.accepted}
            raise PydanticCustomError("job_field", "{accepted}", context) from None
        return parsed if is_number else value


def _unquoted(value: object) -> object:
    """The number that a form gives as a text."""
    return number_of(value) if isinstance(value, str) else value


Prompt = Annotated[str, JobField("prompt")]
Model = Annotated[str, JobField("model")]
Fps = Annotated[int, JobField("fps")]
Frames = Annotated[int, JobField("frames")]
Steps = Annotated[int, JobField("steps")]
BoundaryRatio = Annotated[float, JobField("boundary_ratio")]
FlowShift = Annotated[float, JobField("flow_shift")]
Priority = Annotated[int, JobField("priority")]
Webhook = Annotated[
    str,
    Field(
        max_length=2000,
        description="URL to which the server sends the job when it has ended, on a host of --webhook-host.",
    ),
]
Unused = Annotated[Any, Field(description="Accepted and ignored.", exclude=True)]
"""A field of OpenAI's API without a meaning here; `model_dump` leaves it out."""


class ResponseModel(BaseModel):
    """Base of response bodies."""

    model_config = ConfigDict(extra="forbid")

    def response(self, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        """The JSON response; FastAPI would validate and convert the body again."""
        content = self.model_dump_json()
        return Response(content, status_code=status, headers=headers, media_type="application/json")


class RequestModel(BaseModel):
    """Base of request bodies: an unknown field is an error that suggests the nearest name."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_bool(cls, value: object, info: ValidationInfo) -> object:
        """pydantic accepts booleans as numbers; no field with a meaning is a boolean."""
        if isinstance(value, bool) and not cls.model_fields[str(info.field_name)].exclude:
            raise PydanticCustomError("no_bool", "true and false are not accepted")
        return value


# Jobs ---------------------------------------------------------------------------------------------


class JobFailure(ResponseModel):
    """Why a job failed or was cancelled."""

    code: str
    message: str


class LayoutView(ResponseModel):
    """The ranks that share a step; their number is cfg x ulysses x ring."""

    ranks: list[int]
    cfg: int = 1
    ulysses: int = 1
    ring: int = 1


class Job(ResponseModel):
    """One picture or video: OpenAI's video object with more fields, the same in all endpoints."""

    id: str
    object: MediaKind
    model: str
    prompt: str = Field(description="The live state has its first 300 characters.")
    status: JobStatus
    progress: int = Field(ge=0, le=100, description="Percent of finished tasks.")
    size: str = Field(description="Actual width x height; the model may round the request.")
    seconds: str | None = Field(None, description="Actual length of the video; null for a picture.")
    created_at: int
    completed_at: int | None = Field(None, description="When it reached its final status.")
    expires_at: int | None = Field(None, description="When an ended job is removed.")
    error: JobFailure | None = None

    frames: int | None = None
    fps: int | None = None
    steps: int
    step: int = Field(0, description="Finished denoising steps.")
    stage: StageName | None = Field(None, description="The current or last stage.")
    layout: LayoutView | None = Field(None, description="The ranks of its current or last task.")
    seed: int
    priority: int = 0
    tag: str | None = None
    batch_id: str | None = None
    custom_id: str | None = Field(None, description="The id from its line of the batch.")
    position: int | None = Field(None, description="Place in the queue, from 1; null once it has started.")
    started_at: float | None = None
    predicted_start_at: float | None = Field(None, description="While it is queued.")
    predicted_completion_at: float | None = Field(None, description="While it is queued or in progress.")
    deadline_at: float | None = None
    will_meet_deadline: bool | None = Field(
        None, description="A prediction; the fact once the job has ended. Null without a deadline."
    )
    inference_time_s: float | None = Field(
        None, description="From the start of a completed job to its file, without the queue."
    )
    stage_durations: dict[str, float] | None = Field(
        None, description="Seconds of work by stage, of a job that has ended."
    )
    rank_s: float = Field(0.0, description="Seconds of ranks that it has taken so far: GPU-seconds on GPUs.")
    peak_memory_mb: float | None = Field(
        None, description="Peak of torch's memory on one of its GPUs in MiB, of a job that has ended."
    )
    steps_reused: int | None = Field(
        None, description="Steps that ran without the transformer, of a job with `reuse` that has ended."
    )
    owner: str | None = Field(None, description="Name of the API key that it came with; null for the admin.")
    content_url: str | None = Field(None, description="Path of the finished file.")
    thumbnail_url: str | None = Field(None, description="Path of its thumbnail.")
    preview_url: str | None = Field(
        None, description="Path of a rough preview, while it is in progress and its model has previews."
    )


class Video(Job):
    """A job in OpenAI's terms: one that was cancelled has failed with the error code `cancelled`, because
    clients know no other final status."""

    object: Literal["video"] = "video"
    status: Literal["queued", "in_progress", "completed", "failed"]
    warnings: list[str] | None = Field(
        None, description="Fields that were ignored; only in the response that creates the video."
    )

    peak_memory_mb: float = Field(
        0.0, description="As of a job; 0 if it is not known, because clients compare it."
    )

    @classmethod
    def of(cls, job: Job, *, warnings: Sequence[str] = ()) -> Video:
        values = dict(job) | {"object": "video", "warnings": list(warnings) or None}
        values["peak_memory_mb"] = job.peak_memory_mb or 0.0
        if job.status == "cancelled":
            values |= {"status": "failed", "error": JobFailure(code="cancelled", message="cancelled")}
        return cls(**values)


class JobList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Job]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(found: Sequence[Job] | Sequence[Batch], limit: int) -> dict[str, Any]:
    """Fields of a list; `found` has one more than the page if there are more."""
    data = found[:limit]
    ends = {"first_id": data[0].id, "last_id": data[-1].id} if data else {"first_id": None, "last_id": None}
    return {"data": data, **ends, "has_more": len(found) > limit}


class VideoList(JobList):
    data: list[Video]  # type: ignore[assignment]  # a list of jobs that nobody appends to


class Deleted(ResponseModel):
    """Result of a DELETE: an open job is cancelled and kept; a completed or failed one is removed."""

    id: str
    object: Literal["video.deleted", "image.deleted"]
    deleted: bool
    status: JobStatus


class Generation(RequestModel):
    """Base of the requests for pictures and videos."""

    model: Model | None = Field(None, description="One of GET /v1/models. [the first one that fits]")
    size: Annotated[str, JobField("size")] | None = None
    width: Annotated[int, JobField("width")] | None = Field(
        None, description="With `height`, in place of `size`."
    )
    height: Annotated[int, JobField("height")] | None = None
    negative_prompt: Annotated[str, JobField("negative_prompt")] | None = None
    guidance_scale: Annotated[float, JobField("guidance_scale")] | None = None
    guidance_scale_2: Annotated[float, JobField("guidance_scale_2")] | None = None
    true_cfg_scale: Annotated[float, JobField("true_cfg_scale")] | None = None
    lora: Annotated[list[dict[str, Any]], JobField("lora")] | None = None
    seed: Annotated[int, JobField("seed")] | None = Field(
        None, description="Of several pictures that of the first; further ones count up."
    )
    deadline: Annotated[float | str, JobField("deadline")] | None = None
    priority: Priority | None = None
    tag: Annotated[str, JobField("tag")] | None = None


class OpenRequest(Generation):
    """Base of the requests that clients of other servers send. Without `--strict`, validation.py removes
    unknown fields first; `extra_args` and `extra_body` hold more fields."""

    user: Unused = None
    safety_identifier: Unused = None


class VideoRequest(OpenRequest):
    """POST /v1/videos: fields of OpenAI, vLLM-Omni and SGLang, and gfgen's own."""

    prompt: Prompt
    seconds: str | float | None = Field(
        None,
        description="Length; the server converts it to frames, rounded as the model requires.",
        examples=["4"],
    )
    num_frames: Frames | None = None
    fps: Fps | None = None
    num_inference_steps: Steps | None = None
    boundary_ratio: BoundaryRatio | None = None
    flow_shift: FlowShift | None = None
    num_outputs_per_prompt: int | None = Field(None, ge=1, le=1, description="One video per request.")
    webhook: Webhook | None = None


class JobRequest(Generation):
    """POST /v1/jobs: a job of any model with the fields of the job file.

    A form has pictures and videos for arguments of the pipeline as files named `files[ARGUMENT]`, or
    `files[ARGUMENT][]` for each of a list; JSON has `files` with data:image/...;base64 URLs.
    """

    prompt: Prompt
    frames: Frames | None = None
    fps: Fps | None = None
    steps: Steps | None = None
    boundary_ratio: BoundaryRatio | None = None
    flow_shift: FlowShift | None = None
    args: Annotated[dict[str, Any], JobField("args")] | None = None
    scheduler: Annotated[dict[str, Any], JobField("scheduler")] | None = None
    sigmas: Annotated[list[float], JobField("sigmas")] | None = None
    reuse: Annotated[float | str, JobField("reuse"), BeforeValidator(_unquoted)] | None = None
    timeout: Annotated[float | str, JobField("timeout")] | None = Field(
        None, description="The job fails if it has not ended this long from now."
    )
    webhook: Webhook | None = None
    vary: bool | dict[str, list[Any]] | None = Field(
        None, description="Expands choices such as {red|blue} in prompts, or lists of values, to a batch."
    )
    seeds: str | list[int] | None = Field(None, description="A batch with a job for each seed.")
    num_images: int | None = Field(None, ge=1, description="A batch of this many jobs.")


class JobChange(RequestModel):
    """POST /v1/jobs/{id}: what can change of an open job."""

    priority: Priority


class PictureRequest(OpenRequest):
    """Base of all requests for pictures."""

    n: int | None = Field(None, ge=1, le=10, description="Number of pictures. [1]")
    num_outputs_per_prompt: int | None = Field(None, ge=1, le=10, description="The same as `n`.")
    size: Annotated[str, JobField("size")] | Literal["auto"] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    num_inference_steps: Steps | None = None
    quality: Unused = None
    style: Unused = None
    background: Unused = None
    moderation: Unused = None
    output_compression: Unused = None
    input_fidelity: Unused = None


class ImageRequest(PictureRequest):
    """POST /v1/images/generations and /v1/images/edits; the latter also has a picture."""

    prompt: Prompt
    response_format: Literal["b64_json", "url"] = "b64_json"
    stream: bool | None = Field(
        None, exclude=True, description="Send events: `PartialImage` with previews, then `CompletedImage`."
    )
    partial_images: int | None = Field(
        None, ge=0, le=3, exclude=True, description="Previews of each picture in a stream. [0]"
    )


class Image(ResponseModel):
    """A finished picture, as base64 or as a URL."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    id: str = Field(description="Its job in /v1/jobs.")
    seed: int


class Images(ResponseModel):
    created: int
    data: list[Image]
    output_format: Literal["png", "jpeg", "webp"]
    size: str
    inference_time_s: float | None = Field(None, description="Of the slowest picture, without the queue.")
    stage_durations: dict[str, float] | None = Field(None, description="Of the slowest picture.")
    peak_memory_mb: float = Field(0.0, description="The most of any picture, in MiB; 0 on CPU ranks.")
    warnings: list[str] | None = Field(None, description="Fields that were ignored.")


class ImageEvent(ResponseModel):
    """Base of the events of a stream of pictures."""

    b64_json: str
    created_at: int
    id: str = Field(description="Its job in /v1/jobs.")
    output_format: Literal["png", "jpeg", "webp"]
    size: str
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"


class PartialImage(ImageEvent):
    """An event of a stream of pictures: a rough preview of a picture in progress."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    partial_image_index: int = Field(description="From 0, for each picture.")


class ImageTokens(ResponseModel):
    """Pictures have no tokens."""

    image_tokens: int = 0
    text_tokens: int = 0


class ImageUsage(ResponseModel):
    input_tokens: int = 0
    input_tokens_details: ImageTokens = ImageTokens()
    output_tokens: int = 0
    total_tokens: int = 0


class CompletedImage(ImageEvent):
    """An event of a stream of pictures: a finished picture."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    seed: int
    usage: ImageUsage = ImageUsage()
    warnings: list[str] | None = Field(None, description="Fields that were ignored.")


class TextPart(ResponseModel):
    type: Literal["text", "input_text"] = "text"
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation. Its picture, a part of type `image_url`, has been taken out."""

    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())


class ChatRequest(PictureRequest):
    """POST /v1/chat/completions: the last message of the user has the prompt and perhaps a picture."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    stream: Literal[False] | None = Field(None, exclude=True, description="Only false is accepted.")
    partial_images: Unused = None
    modalities: Unused = None
    response_format: Unused = None
    max_tokens: Unused = None
    max_completion_tokens: Unused = None
    temperature: Unused = None
    top_p: Unused = None

    @field_validator("stream", mode="before")
    @classmethod
    def _is_not_streamed(cls, value: object) -> object:
        if value is True:
            raise PydanticCustomError("no_stream", "only false; /v1/images/generations streams pictures")
        return value

    @property
    def prompt(self) -> str:
        return next((each.text for each in reversed(self.messages) if each.role == "user"), "")


class ImageUrl(ResponseModel):
    url: str


class ImagePart(ResponseModel):
    type: Literal["image_url"] = "image_url"
    image_url: ImageUrl


class ChatAnswer(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: list[ImagePart]


class ChatChoice(ResponseModel):
    index: int = 0
    message: ChatAnswer
    finish_reason: Literal["stop"] = "stop"


class ChatUsage(ResponseModel):
    """Pictures have no tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class ChatMetrics(ResponseModel):
    inference_time_s: float | None = None
    stage_durations: dict[str, float] | None = None
    peak_memory_mb: float = 0.0


class ChatCompletion(ResponseModel):
    """The pictures, as vLLM-Omni answers: data: URLs in one message."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage = ChatUsage()
    metrics: ChatMetrics = Field(description="Of the slowest picture.")
    warnings: list[str] | None = Field(None, description="Fields that were ignored.")


# Batches ------------------------------------------------------------------------------------------


class RequestCounts(ResponseModel):
    total: int
    completed: int
    failed: int
    cancelled: int


class Batch(ResponseModel):
    """The jobs of one job file."""

    id: str
    object: Literal["batch"] = "batch"
    status: Literal["in_progress", "completed", "cancelled"] = Field(
        description="completed once every job has ended, even if some failed"
    )
    created_at: int
    completed_at: int | None = None
    request_counts: RequestCounts
    predicted_completion_at: float | None = None
    num_late: int = Field(0, description="Jobs that missed their deadline or are predicted to miss it.")
    manifest_url: str
    skipped: list[str] | None = Field(
        None,
        description="Problems of the skipped lines; only in the response that creates the batch.",
    )
    endpoint: BatchEndpoint | None = Field(None, description="Of a batch of OpenAI's requests.")
    input_file_id: str | None = None
    output_file_id: str | None = Field(None, description="Results, once every job has ended.")
    error_file_id: str | None = Field(None, description="Failed requests, once every job has ended.")
    completion_window: str | None = None
    metadata: dict[str, str] | None = None


class BatchRequest(RequestModel):
    """POST /v1/batches with an uploaded file, as OpenAI's clients send it."""

    input_file_id: str = Field(max_length=120)
    endpoint: BatchEndpoint
    completion_window: str = Field("24h", max_length=20, description="Accepted and ignored.")
    metadata: dict[str, str] | None = None
    output_expires_after: Unused = None


class BatchLine(RequestModel):
    """A line of an uploaded file."""

    custom_id: str = Field(min_length=1, max_length=200)
    method: Literal["POST"] = "POST"
    url: str = Field(max_length=100)
    body: dict[str, Any]


class LineFailure(ResponseModel):
    """A line of an uploaded file that was not accepted."""

    custom_id: str | None
    line: int
    code: str | None
    message: str


class BatchInput(ResponseModel):
    """What the server keeps of a BatchRequest."""

    request: BatchRequest
    failures: list[LineFailure]


class UploadedFile(ResponseModel):
    """OpenAI's file object."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"] = "batch"
    status: Literal["processed"] = "processed"


class UploadedFiles(ResponseModel):
    object: Literal["list"] = "list"
    data: list[UploadedFile]
    has_more: Literal[False] = False


class FileDeleted(ResponseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class LineResponse(ResponseModel):
    status_code: int = 200
    request_id: str
    body: Images | ChatCompletion | Video


class LineResult(BaseModel):
    """A line of a batch's output or error file."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: JobFailure | None = None


class BatchList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


# The server ---------------------------------------------------------------------------------------


class Defaults(ResponseModel):
    """Defaults of a model's jobs."""

    size: str
    frames: int | None = None
    fps: int | None = None
    steps: int
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None


class ServedModel(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["gfgen"] = "gfgen"
    root: str | None = Field(None, description="The model that this alias stands for.")
    kind: MediaKind
    takes_image: Literal["no", "yes", "always"] = Field(description="Whether jobs take an input picture.")
    defaults: Defaults | None = None


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ServedModel]


class PolicyRequest(RequestModel):
    policy: str = Field(
        min_length=1, max_length=200, description="A built-in policy, as for --policy.", examples=["edf"]
    )


class PolicyState(ResponseModel):
    object: Literal["policy"] = "policy"
    policy: str = Field(description="The requested policy.")
    deciding: str = Field(description="The active policy: auto selects among others.")
    reason: str | None = None
    available: list[str]


class Health(ResponseModel):
    status: Literal["ok"] = "ok"


class Ready(ResponseModel):
    status: Literal["ready"] = "ready"
    ranks: int


class ErrorBody(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(ResponseModel):
    """Every error response."""

    error: ErrorBody


class SessionRequest(RequestModel):
    """POST /v1/session: exchanges the key for the cookie that the page uses."""

    api_key: str = Field(max_length=1000)


# The live state -----------------------------------------------------------------------------------


class RankTask(ResponseModel):
    job_id: str
    stage: StageName
    step: int | None = Field(None, description="Index of the denoising step, from 0.")
    steps: int
    layout: LayoutView
    started_at: float
    predicted_end_at: float


class Rank(ResponseModel):
    rank: int
    node: str | None = Field(None, description="On a cluster: the machine of the rank.")
    status: RankStatus
    task: RankTask | None = None
    utilisation: float = Field(ge=0, le=1, description="Busy share of the last minute.")
    restarts: int = 0


class TimelineBar(ResponseModel):
    """A bar of the timeline: uninterrupted work of one rank for one job, stage and layout.

    While it grows, `key` stays the same and `last_step` and `ended_at` rise.
    """

    key: str
    rank: int
    job_id: str
    stage: StageName
    layout: LayoutView
    first_step: int | None = None
    last_step: int | None = None
    started_at: float
    ended_at: float | None = Field(None, description="Null while it grows.")


class LiveState(ResponseModel):
    """Everything that the page shows."""

    object: Literal["state"] = "state"
    server_time: float = Field(description="Now, by the clock of all times here.")
    started_at: float
    version: str
    status: ServerStatus
    reason: str | None = Field(None, description="Why the server is not ready.")
    device: str
    policy: PolicyState
    models: list[ServedModel]
    ranks: list[Rank]
    timeline: list[TimelineBar] = Field(description="The last two minutes, oldest first.")
    open: list[Job] = Field(description="Started jobs, then the queue in predicted order; at most 200.")
    num_open: int
    max_open: int
    finished: list[Job] = Field(description="Ended jobs, most recent first; at most 48.")
    streams: int = Field(0, description="Open event streams.")


class Change(ResponseModel):
    """Changes since the previous event: each field present replaces the old value.

    `open`, `finished` and `timeline` have only new or changed entries, by `id` or `key`. A job that appears
    in `finished` has left `open`.
    """

    server_time: float
    status: ServerStatus | None = None
    reason: str | None = None
    policy: PolicyState | None = None
    models: list[ServedModel] | None = None
    ranks: list[Rank] | None = None
    timeline: list[TimelineBar] | None = None
    open: list[Job] | None = None
    order: list[str] | None = Field(None, description="Ids of `open` in their current order.")
    num_open: int | None = None
    finished: list[Job] | None = None
    removed: list[str] | None = Field(None, description="Ids of removed jobs.")


class JobEvent(ResponseModel):
    """The data of an event of GET /v1/jobs/{id}/events; `type` is also the event's name.

    queued     position, predicted_start_at: the first event; repeated when the position changes
    started    the first task was submitted
    layout     the ranks, or how they share the work, changed
    stage      another stage starts
    step       a denoising step finished
    stopping   the server stops; the stream ends
    completed, failed, cancelled    the last event; the stream ends
    """

    type: Literal[
        "queued", "started", "layout", "stage", "step", "completed", "failed", "cancelled", "stopping"
    ]
    at: float
    job_id: str
    status: JobStatus
    progress: int
    position: int | None = None
    step: int | None = None
    steps: int | None = None
    stage: StageName | None = None
    layout: LayoutView | None = None
    predicted_start_at: float | None = None
    predicted_completion_at: float | None = None
    will_meet_deadline: bool | None = None
    error: JobFailure | None = None
    content_url: str | None = None
