"""Bodies of batches and of uploaded files."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from gfgen.server.protocol.picture_schemas import ChatCompletion, Images
from gfgen.server.protocol.schemas import (
    BatchEndpoint,
    JobFailure,
    RequestModel,
    ResponseModel,
    Unused,
    Video,
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
