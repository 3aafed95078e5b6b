"""Request and response bodies of the HTTP interface, as pydantic models: shared parts, jobs and videos.

Fields with OpenAI's names have OpenAI's meaning; gfgen adds its own. Fields that end in `_at` are Unix
seconds; those that OpenAI's clients read are integers, the others have fractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.responses import Response

from gfgen.job.fields import FIELDS
from gfgen.job.shared import value_of

JobStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
ServerStatus = Literal["loading", "ready", "draining"]
RankStatus = Literal["starting", "loading", "idle", "busy", "lost", "retired"]
StageName = Literal["encode", "prepare", "denoise", "reuse", "refine", "decode", "write"]
MediaKind = Literal["video", "image"]
BatchEndpoint = Literal["/v1/images/generations", "/v1/chat/completions", "/v1/videos"]


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
    """Base of request bodies: an unknown field is an error that suggests the nearest name (problems.py).

    job/fields.py checks and documents the fields in `names`. A number may be in quotes, and an object or a
    list may be a text of JSON: forms have only texts.
    """

    model_config = ConfigDict(extra="forbid")
    names: ClassVar[Mapping[str, str]] = {}
    """The request's names of fields of the job file."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """What errors call fields of its jobs that it has in another form."""
    required: ClassVar[Sequence[str]] = ()
    _job: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, job: Any, /) -> None:
        """`job` is the context of the validation: `problems.checked` gives its fields of the job file."""
        self._job = job or {}

    @property
    def job(self) -> dict[str, Any]:
        return dict(self._job)

    @classmethod
    def job_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the job file among these values, by their names there."""
        read = {ours: value_of(ours, values.get(theirs)) for ours, theirs in cls.names.items()}
        return {name: value for name, value in read.items() if value is not None}

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_bool(cls, value: object, info: ValidationInfo) -> object:
        """pydantic accepts booleans as numbers; no field with a meaning is a boolean."""
        if isinstance(value, bool) and not cls.model_fields[str(info.field_name)].exclude:
            raise PydanticCustomError("no_bool", "true and false are not accepted")
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler.resolve_ref_schema(handler(schema))
        fields = {theirs: documented(ours) for ours, theirs in cls.names.items()}
        optional = {name: or_null(fields[name]) for name in fields if name not in cls.required}
        noted = {name: optional[name] | note for name, note in _NOTES.items() if name in optional}
        found["properties"] = fields | optional | noted | found.get("properties", {})
        found["required"] = [*cls.required, *found.get("required", ())]
        return found


_NOTES = {
    "model": {"description": "One of GET /v1/models. [the first one that fits]"},
    "width": {"description": "With `height`, in place of `size`."},
    "seed": {"description": "Of several pictures that of the first; further ones count up."},
    "timeout": {"description": "The job fails if it has not ended this long from now."},
}


def documented(name: str) -> dict[str, Any]:
    """The JSON schema of a field of the job file."""
    accepted = FIELDS[name].accepted
    return {**FIELDS[name].schema, "description": f"{accepted[:1].upper()}{accepted[1:]}."}


def or_null(*schemas: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*schemas, {"type": "null"}]}


def same(*names: str) -> dict[str, str]:
    """Names of fields that are those of the job file, with those of every request for pictures or videos."""
    shared = ("model", "size", "width", "height", "negative_prompt", "guidance_scale", "guidance_scale_2")
    more = ("true_cfg_scale", "lora", "seed", "deadline", "priority", "tag")
    return {name: name for name in (*shared, *more, *names)}


class JobFailure(ResponseModel):
    """Why a job failed or was cancelled."""

    code: str
    message: str


class LayoutView(ResponseModel):
    """The ranks that share a step; their number is cfg x torus x ulysses x ring."""

    ranks: list[int]
    cfg: int = 1
    ulysses: int = 1
    ring: int = 1
    torus: int = 1


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
    fps: int | float | None = None
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
    warnings: list[str] | None = Field(None, description="What in it does not act as it was written.")
    favourite: bool = Field(False, description="Its record and file stay beyond the retention limits.")
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
        None,
        description="As of a job; the response that creates the video adds the fields that were ignored.",
    )

    peak_memory_mb: float = Field(
        0.0, description="As of a job; 0 if it is not known, because clients compare it."
    )
    num_outputs: int = Field(0, description="1 once the file is there: SGLang's clients count it.")

    @classmethod
    def of(cls, job: Job, *, warnings: Sequence[str] = ()) -> Video:
        values = dict(job) | {"object": "video", "warnings": [*warnings, *(job.warnings or ())] or None}
        values["peak_memory_mb"] = job.peak_memory_mb or 0.0
        values["num_outputs"] = int(job.status == "completed")
        if job.status == "cancelled":
            values |= {"status": "failed", "error": JobFailure(code="cancelled", message="cancelled")}
        return cls(**values)


class Page(ResponseModel):
    """Base of lists, whose `data` has an `id` each."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool

    @classmethod
    def of(cls, found: Sequence[Any], limit: int) -> Self:
        """Of what was `found`, which is one more than the page if there are more."""
        data = list(found[:limit])
        ends = {"first_id": data[0].id, "last_id": data[-1].id} if data else {}
        return cls(data=data, **ends, has_more=len(found) > limit)


class JobList(Page):
    data: list[Job]


class VideoList(Page):
    data: list[Video]


class Deleted(ResponseModel):
    """Result of a DELETE: an open job is cancelled and kept; a completed or failed one is removed."""

    id: str
    object: Literal["video.deleted", "image.deleted"]
    deleted: bool
    status: JobStatus


class OpenRequest(RequestModel):
    """Base of the requests that clients of other servers send. Without `--strict`, problems.py removes
    unknown fields first; `extra_args` and `extra_body` hold more fields."""

    user: Unused = None
    safety_identifier: Unused = None


class VideoRequest(OpenRequest):
    """POST /v1/videos: fields of OpenAI, vLLM-Omni and SGLang, and gfgen's own."""

    names: ClassVar = {
        **same("prompt", "fps", "boundary_ratio", "flow_shift"),
        "frames": "num_frames",
        "steps": "num_inference_steps",
    }
    other_names: ClassVar = {"image": "input_reference"}
    required = ("prompt",)
    seconds: str | float | None = Field(
        None,
        description="Length; the server converts it to frames, rounded as the model requires.",
        examples=["4"],
    )
    num_outputs_per_prompt: int | None = Field(None, ge=1, le=1, description="One video per request.")
    webhook: Webhook | None = None


class JobRequest(RequestModel):
    """POST /v1/jobs: a job of any model with the fields of the job file.

    A form has pictures and videos for arguments of the pipeline as files named `files[ARGUMENT]`, or
    `files[ARGUMENT][]` for each of a list; JSON has `files` with data:image/...;base64 URLs.
    """

    names: ClassVar = {
        name: name
        for name in FIELDS
        if name not in ("id", "image", "files", "arrival", "output", "format", "quality")
    }
    required = ("prompt",)
    webhook: Webhook | None = None
    vary: bool | dict[str, list[Any]] | None = Field(
        None, description="Expands choices such as {red|blue} in prompts, or lists of values, to a batch."
    )
    seeds: str | list[int] | None = Field(None, description="A batch with a job for each seed.")
    num_images: int | None = Field(None, ge=1, description="A batch of this many jobs.")


class JobChange(RequestModel):
    """POST /v1/jobs/{id}: what can change of an open job."""

    names: ClassVar = {"priority": "priority"}
    required = ("priority",)
