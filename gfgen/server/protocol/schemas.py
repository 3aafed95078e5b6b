"""What the server takes and answers: every body of the HTTP interface as a pydantic model.

The names that OpenAI's clients know (`Video`'s first fields, `Image`, `Error`) mean what they mean
there. All that is ours comes beside them. Times that end in `_at` are Unix seconds; those that
OpenAI's clients read are whole numbers, the others have fractions.

The page at `/` needs two of these: `LiveState` (GET /v1/state), and `Change`, the event of GET
/v1/state/events. docs/serving.md says how they go together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gfgen.job.fields import FIELDS, Refused
from gfgen.job.shared import number_of

JobStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
ServerStatus = Literal["loading", "ready", "draining"]
RankStatus = Literal["starting", "loading", "idle", "busy", "lost", "retired"]
StageName = Literal["encode", "prepare", "denoise", "decode", "write"]
MediaKind = Literal["video", "image"]


@dataclass(frozen=True, slots=True)
class JobField:
    """Marks a field of a request as this field of a job: it accepts what the job file accepts.

    A number may be in quotes, because forms have only texts.
    """

    name: str

    def __get_pydantic_core_schema__(self, _: Any, __: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, _: Any, __: Any) -> dict[str, Any]:
        field = FIELDS[self.name]
        return {**field.schema, "description": f"{field.accepted[:1].upper()}{field.accepted[1:]}."}

    def _validate(self, value: object) -> object:
        field = FIELDS[self.name]
        is_number = field.schema.get("type") in ("integer", "number")
        try:
            parsed = field.parse(number_of(value) if is_number and isinstance(value, str) else value)
        except Refused as refused:
            problem = field.refusal(value, str(refused))
            context = {"shown": problem.value, "accepted": problem.accepted}
            raise PydanticCustomError("job_field", "{accepted}", context) from None
        return parsed if is_number else value


Prompt = Annotated[str, JobField("prompt")]
NegativePrompt = Annotated[str, JobField("negative_prompt")]
Model = Annotated[str, JobField("model")]
Size = Annotated[str, JobField("size")]
Fps = Annotated[int, JobField("fps")]
Frames = Annotated[int, JobField("frames")]
Steps = Annotated[int, JobField("steps")]
Guidance = Annotated[float, JobField("guidance_scale")]
Guidance2 = Annotated[float, JobField("guidance_scale_2")]
TrueCfg = Annotated[float, JobField("true_cfg_scale")]
BoundaryRatio = Annotated[float, JobField("boundary_ratio")]
FlowShift = Annotated[float, JobField("flow_shift")]
Seed = Annotated[int, JobField("seed")]
Deadline = Annotated[float | str, JobField("deadline")]
Priority = Annotated[int, JobField("priority")]
Tag = Annotated[str, JobField("tag")]
Unused = Annotated[str | None, Field(description="Accepted and not used.", exclude=True)]
"""Of a request: what clients written for OpenAI's API may say. `model_dump` leaves it out."""


class ResponseModel(BaseModel):
    """What the server answers: only what is named here."""

    model_config = ConfigDict(extra="forbid")


class RequestModel(BaseModel):
    """What the server is sent: a field that is not named here is an error, which names the nearest one."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_bool(cls, value: object) -> object:
        """True and false are no numbers; no field here is either of them."""
        if isinstance(value, bool):
            raise PydanticCustomError("no_bool", "true and false are not accepted")
        return value


# Jobs ---------------------------------------------------------------------------------------------


class JobFailure(ResponseModel):
    """Why a job has failed, or was cancelled."""

    code: str
    message: str


class LayoutView(ResponseModel):
    """The ranks that share a job's step, and how: cfg x ulysses x ring is their number."""

    ranks: list[int]
    cfg: int = 1
    ulysses: int = 1
    ring: int = 1


class Job(ResponseModel):
    """One picture or one video, wherever it stands: OpenAI's video object, and what is ours.

    Every answer that tells of a job tells this: /v1/videos, /v1/jobs, the live state.
    """

    id: str
    object: MediaKind
    """Whether the job makes a video or a picture."""
    model: str
    prompt: str
    """In the live state the first 300 characters of it."""
    status: JobStatus
    progress: int = Field(ge=0, le=100, description="Percent of the tasks that are done.")
    size: str = Field(description="Width x height as made: the model may have rounded what was asked for.")
    seconds: str | None = Field(None, description="Length of the video as made; none for a picture.")
    created_at: int
    completed_at: int | None = Field(None, description="When it reached its last status.")
    expires_at: int | None = Field(None, description="When it is removed, once it has ended.")
    error: JobFailure | None = None

    frames: int | None = None
    fps: int | None = None
    steps: int
    step: int = Field(0, description="Denoising steps that are done.")
    stage: StageName | None = Field(None, description="What is being done, or was done last.")
    layout: LayoutView | None = Field(None, description="Where its last task runs or ran.")
    seed: int
    priority: int = 0
    tag: str | None = None
    batch_id: str | None = None
    custom_id: str | None = Field(None, description="The id that its line of a batch gave it.")
    position: int | None = Field(None, description="Place in the queue, 1 is next; none once it has begun.")
    started_at: float | None = None
    predicted_start_at: float | None = Field(None, description="While it is queued.")
    predicted_completion_at: float | None = Field(None, description="While it is queued or in progress.")
    deadline_at: float | None = None
    will_meet_deadline: bool | None = Field(
        None, description="By the prediction; once it has ended, whether it did. None without a deadline."
    )
    content_url: str | None = Field(None, description="Path of the finished file.")
    thumbnail_url: str | None = Field(None, description="Path of a small picture of it.")


class JobList(ResponseModel):
    """A page of jobs."""

    object: Literal["list"] = "list"
    data: list[Job]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(ResponseModel):
    """What a DELETE has done: a job that had ended is gone; one that had not is cancelled, and stays."""

    id: str
    object: Literal["video.deleted", "image.deleted"]
    deleted: bool
    status: JobStatus


class VideoRequest(RequestModel):
    """POST /v1/videos."""

    prompt: Prompt
    model: Model | None = Field(None, description="One of GET /v1/models. [the first one]")
    seconds: str | float | None = Field(
        None, description="Length; becomes frames by the fps, rounded as the model rounds.", examples=["4"]
    )
    size: Size | None = None
    num_frames: Frames | None = None
    fps: Fps | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance2 | None = None
    boundary_ratio: BoundaryRatio | None = None
    flow_shift: FlowShift | None = None
    negative_prompt: NegativePrompt | None = None
    seed: Seed | None = None
    deadline: Deadline | None = None
    priority: Priority | None = None
    tag: Tag | None = None


class JobRequest(RequestModel):
    """POST /v1/jobs: a job of any model in the words of the job file."""

    prompt: Prompt
    negative_prompt: NegativePrompt | None = None
    model: Model | None = None
    size: Size | None = None
    width: Annotated[int, JobField("width")] | None = None
    height: Annotated[int, JobField("height")] | None = None
    frames: Frames | None = None
    fps: Fps | None = None
    steps: Steps | None = None
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance2 | None = None
    boundary_ratio: BoundaryRatio | None = None
    flow_shift: FlowShift | None = None
    true_cfg_scale: TrueCfg | None = None
    seed: Seed | None = None
    deadline: Deadline | None = None
    timeout: Annotated[float | str, JobField("timeout")] | None = Field(
        None, description="The job fails if it has not ended this long from now."
    )
    priority: Priority | None = None
    tag: Tag | None = None


class ImageRequest(RequestModel):
    """POST /v1/images/generations."""

    prompt: Prompt
    model: Model | None = Field(None, description="[the first one that makes pictures]")
    n: int = Field(1, ge=1, le=10)
    size: Size | Literal["auto"] | None = None
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    negative_prompt: NegativePrompt | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    true_cfg_scale: TrueCfg | None = None
    seed: Seed | None = Field(None, description="Of the first picture; each further one has the next number.")
    deadline: Deadline | None = None
    priority: Priority | None = None
    tag: Tag | None = None
    quality: Unused = None
    style: Unused = None
    background: Unused = None
    moderation: Unused = None
    user: Unused = None


class Image(ResponseModel):
    """A finished picture: its bytes, or where they are."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    id: str = Field(description="Its job, as in /v1/jobs.")
    seed: int


class Images(ResponseModel):
    created: int
    data: list[Image]
    output_format: Literal["png", "jpeg", "webp"]
    size: str


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
        description="completed once every job has ended, in whatever way"
    )
    created_at: int
    completed_at: int | None = None
    request_counts: RequestCounts
    predicted_completion_at: float | None = None
    num_late: int = Field(0, description="Jobs that have missed their deadline, or are predicted to.")
    manifest_url: str
    skipped: list[str] | None = Field(
        None,
        description="What is wrong with the lines that were left out; only in the answer that tells of the "
        "batch's creation.",
    )


class BatchList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Batch]


# The server ---------------------------------------------------------------------------------------


class Defaults(ResponseModel):
    """What a job of a model gets when it does not say."""

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
    kind: MediaKind
    takes_image: Literal["no", "yes", "always"] = Field(description="Whether jobs have an input picture.")
    defaults: Defaults | None = None


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ServedModel]


class PolicyRequest(RequestModel):
    policy: str = Field(
        min_length=1, max_length=200, description="A built-in one, as --policy names it.", examples=["edf"]
    )


class PolicyState(ResponseModel):
    """Which policy decides."""

    object: Literal["policy"] = "policy"
    policy: str = Field(description="As asked for, at the start or by POST /v1/policy.")
    deciding: str = Field(description="The one that decides now: auto hands over to others.")
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
    """Every error of every endpoint."""

    error: ErrorBody


class SessionRequest(RequestModel):
    """POST /v1/session: the key once, in exchange for a cookie that the page's later requests carry."""

    api_key: str = Field(max_length=1000)


# The live state -----------------------------------------------------------------------------------


class RankTask(ResponseModel):
    """What a rank is doing."""

    job_id: str
    stage: StageName
    step: int | None = Field(None, description="From 0, of a denoising step.")
    steps: int
    layout: LayoutView
    started_at: float
    predicted_end_at: float


class Rank(ResponseModel):
    rank: int
    status: RankStatus
    task: RankTask | None = None
    utilisation: float = Field(ge=0, le=1, description="Share of the last minute in which it computed.")
    restarts: int = 0


class TimelineBar(ResponseModel):
    """Work of one rank for one job, stage and layout without a gap: one bar of the timeline.

    It grows while steps follow each other: `key` stays, `last_step` and `ended_at` rise.
    """

    key: str
    rank: int
    job_id: str
    stage: StageName
    layout: LayoutView
    first_step: int | None = None
    last_step: int | None = None
    started_at: float
    ended_at: float | None = Field(None, description="None while it goes on.")


class LiveState(ResponseModel):
    """All that the page shows, at one moment."""

    object: Literal["state"] = "state"
    server_time: float = Field(description="Every time in this answer is of this clock.")
    started_at: float
    version: str
    status: ServerStatus
    reason: str | None = Field(None, description="Why the server is not ready.")
    device: str
    policy: PolicyState
    models: list[ServedModel]
    ranks: list[Rank]
    timeline: list[TimelineBar] = Field(description="Of the last two minutes, the oldest first.")
    open: list[Job] = Field(description="Running ones, then the queue in its predicted order; 200 at most.")
    num_open: int
    max_open: int
    finished: list[Job] = Field(description="Ended in whatever way, the last first; 48 at most.")
    streams: int = Field(0, description="Event streams that are being read.")


class Change(ResponseModel):
    """What has changed since the event before: every field that is there takes the old one's place.

    `open`, `finished` and `timeline` have only the entries that are new or other than before, by `id` or
    `key`. An entry of `open` whose job has come to `finished` has left `open`.
    """

    server_time: float
    status: ServerStatus | None = None
    reason: str | None = None
    policy: PolicyState | None = None
    models: list[ServedModel] | None = None
    ranks: list[Rank] | None = None
    timeline: list[TimelineBar] | None = None
    open: list[Job] | None = None
    order: list[str] | None = Field(None, description="Ids of `open` in their present order.")
    num_open: int | None = None
    finished: list[Job] | None = None
    removed: list[str] | None = Field(None, description="Ids of finished jobs that are gone.")


class JobEvent(ResponseModel):
    """The data of an event of GET /v1/jobs/{id}/events; its `type` is the event's name too.

    queued     position, predicted_start_at: sent first, and when the position changes
    started    the first task is on its ranks
    layout     the ranks, or how they share the work, have changed
    stage      another stage than denoising begins
    step       a denoising step is done
    completed, failed, cancelled    the last event: the stream ends
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


JsonObject = dict[str, Any]
