"""Bodies about the server: its models, policy, errors, and the live state.

The page at `/` uses `LiveState` (GET /v1/state) and `Change`, the event of GET /v1/state/events;
docs/serving.md describes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from gfgen.errors import JobError
from gfgen.job.recipes import is_for, recipes
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.pipeline import SEVERAL_PICTURES
from gfgen.runtime.core.admission import ResolvedModel
from gfgen.runtime.predict.job_bounds import JobBounds
from gfgen.server.protocol import schemas
from gfgen.server.protocol.picture_schemas import ChatCompletion, Images
from gfgen.server.protocol.schemas import Job, MediaKind, RequestModel, ResponseModel, StageName


class Defaults(ResponseModel):
    """Defaults of a model's jobs."""

    size: str
    frames: int | None = None
    fps: int | float | None = None
    steps: int
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None


class ServedModel(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["gfgen"] = "gfgen"
    root: str | None = Field(None, description="The model that this alias stands for.")
    patches: list[str] = Field(default_factory=list, description="LoRAs of this server, by name.")
    recipes: list[str] = Field(default_factory=list, description="Recipes that its jobs can have.")
    kind: MediaKind
    takes_image: Literal["no", "yes", "always"] = Field(description="Whether jobs take an input picture.")
    takes_several: bool = Field(False, description="Whether a job may have several input pictures.")
    mask_argument: str | None = Field(None, description="What takes a mask: white where the model paints.")
    defaults: Defaults | None = None
    limited: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict, exclude=True)
    """Fields whose limit at this server is below the model's own default."""

    def usual(self, given: Callable[[str], Any]) -> dict[str, Any]:
        """The limited fields that a job leaves out."""
        left_out = {name: value for name, value in self.limited.items() if given(name) is None}
        if given("recipe") is not None:
            left_out.pop("steps", None)
        return left_out


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


class RankTask(ResponseModel):
    job_id: str
    stage: StageName
    step: int | None = Field(None, description="Index of the denoising step, from 0.")
    steps: int
    layout: schemas.LayoutView
    started_at: float
    predicted_end_at: float


class Rank(ResponseModel):
    rank: int
    node: str | None = Field(None, description="On a cluster: the machine of the rank.")
    status: schemas.RankStatus
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
    layout: schemas.LayoutView
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
    status: schemas.ServerStatus
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
    status: schemas.ServerStatus | None = None
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
    status: schemas.JobStatus
    progress: int
    position: int | None = None
    step: int | None = None
    steps: int | None = None
    stage: StageName | None = None
    layout: schemas.LayoutView | None = None
    predicted_start_at: float | None = None
    predicted_completion_at: float | None = None
    will_meet_deadline: bool | None = None
    error: schemas.JobFailure | None = None
    content_url: str | None = None


NO_BOUNDS = JobBounds()
MASKS = ("mask_image", "mask")
_PLAIN = JobSpec(id="plain", prompt="plain", seed=0)


def served_model(
    model: ResolvedModel, *, created: int, bounds: JobBounds = NO_BOUNDS, patches: Collection[str] = ()
) -> ServedModel:
    """The model with its geometry's defaults for jobs that leave fields out, within bounds."""
    specs = _PLAIN, replace(_PLAIN, image="image")
    run, with_image = (_resolved(model, spec) for spec in specs)
    family = model.geometry.family
    masks = {name: _resolved(model, replace(specs[1], files={name: "mask"})) for name in MASKS}
    mask = next((name for name in MASKS if masks[name] is not None), None)
    known = run or with_image or masks.get(mask or "")
    limited = {} if known is None else _limited(model, known, bounds)
    known = known and replace(known, **limited)
    return ServedModel(
        id=model.name,
        created=created,
        root=None,
        patches=list(patches),
        recipes=[
            name
            for name, each in recipes().items()
            if any(is_for(key, family) and (patches or not x.get("lora")) for key, x in each.items())
        ],
        kind="image" if model.geometry.kind == "image" else "video",
        takes_image="no" if with_image is None and mask is None else "always" if run is None else "yes",
        takes_several=model.geometry.family in SEVERAL_PICTURES,
        mask_argument=mask,
        defaults=None if known is None else _defaults(known),
        limited=limited,
    )


def _limited(model: ResolvedModel, known: JobSpec, bounds: JobBounds) -> dict[str, Any]:
    """Values within the bounds for defaults of a model that exceed them, if it has some."""
    width, height = known.width or 0, known.height or 0

    def tries(name: str, most: int) -> Iterator[dict[str, Any]]:
        if name != "pixels":
            yield from ({name: number} for number in range(most, 0, -1))
        for part in range(10 if name == "pixels" else 0):  # some models round up
            side = math.sqrt(most / (width * height)) * (1 - part / 20)
            yield {"width": int(width * side), "height": int(height * side)}

    found: dict[str, Any] = {}
    for name in ("frames", "steps", "pixels"):
        most = getattr(bounds, name)
        for values in () if most is None or _extent(known, name) <= most else tries(name, most):
            run = _resolved(model, replace(known, sigmas=None, **values))
            if run is not None and _extent(run, name) <= most:
                found |= {each: getattr(run, each) for each in values}
                break
    return found


def _extent(run: JobSpec, name: str) -> int:
    return (run.width or 0) * (run.height or 0) if name == "pixels" else getattr(run, name) or 1


def _resolved(model: ResolvedModel, spec: JobSpec) -> JobSpec | None:
    try:
        return model.geometry.resolve(spec)
    except JobError:
        return None


def _defaults(run: JobSpec) -> Defaults:
    is_video = (run.frames or 1) > 1
    return Defaults(
        size=run.size_text,
        frames=run.frames if is_video else None,
        fps=run.fps if is_video else None,
        steps=run.steps or 1,
        guidance_scale=run.guidance_scale,
        true_cfg_scale=run.true_cfg_scale,
    )


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
        None, description="Problems of the skipped lines; only in the response that creates the batch."
    )
    endpoint: schemas.BatchEndpoint | None = Field(None, description="Of a batch of OpenAI's requests.")
    input_file_id: str | None = None
    output_file_id: str | None = Field(None, description="Results, once every job has ended.")
    error_file_id: str | None = Field(None, description="Failed requests, once every job has ended.")
    completion_window: str | None = None
    metadata: dict[str, str] | None = None


class BatchRequest(RequestModel):
    """POST /v1/batches with an uploaded file, as OpenAI's clients send it."""

    input_file_id: str = Field(max_length=120)
    endpoint: schemas.BatchEndpoint
    completion_window: str = Field("24h", max_length=20, description="Accepted and ignored.")
    metadata: dict[str, str] | None = None
    output_expires_after: schemas.Unused = None


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
    answers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By custom_id: the fields of a request that say how its pictures are answered, where they do."""


Purpose = Literal["batch", "vision", "user_data"]
"""Of an uploaded file: requests, or for both others a picture."""


class UploadedFile(ResponseModel):
    """OpenAI's file object."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal[Purpose, "batch_output"] = "batch"
    status: Literal["processed"] = "processed"
    owner: str | None = Field(default=None, description="Name of the API key that it came with.")


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
    body: Images | ChatCompletion | schemas.Video


class LineResult(BaseModel):
    """A line of a batch's output or error file."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: schemas.JobFailure | None = None


class BatchList(schemas.Page):
    data: list[Batch]
