"""Bodies of requests and answers for pictures, also in conversations (chat completions)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationInfo, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from gfgen.server.protocol import schemas
from gfgen.server.protocol.schemas import OpenRequest, ResponseModel, Unused, documented, or_null, same

_AUTO = {"const": "auto", "type": "string"}


class AskedPictures(OpenRequest):
    """Base of all requests for pictures, whatever their words."""

    @property
    def num_pictures(self) -> int:
        raise NotImplementedError


class PictureRequest(AskedPictures):
    """Base of those with OpenAI's words."""

    names: ClassVar = {**same(), "steps": "num_inference_steps"}
    n: int | None = Field(None, ge=1, le=10, description="Number of pictures. [1]")
    num_outputs_per_prompt: int | None = Field(None, ge=1, le=10, description="The same as `n`.")
    size: Annotated[Any, WithJsonSchema(or_null(documented("size"), _AUTO))] = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: int | None = Field(
        None, ge=0, le=100, description="Quality of a JPEG or WebP file; PNG takes only 100. [95]"
    )
    quality: Unused = None
    style: Unused = None
    background: Unused = None
    moderation: Unused = None
    input_fidelity: Unused = None

    @property
    def num_pictures(self) -> int:
        return self.n or self.num_outputs_per_prompt or 1

    @field_validator("output_compression")
    @classmethod
    def _has_a_meaning(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, 100) and info.data.get("output_format") == "png":
            raise PydanticCustomError(
                "no_compression", "less than 100 is for output_format jpeg or webp only"
            )
        return value

    @classmethod
    def job_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        found = super().job_of(values)
        return {name: value for name, value in found.items() if (name, value) != ("size", "auto")}


class ImageRequest(PictureRequest):
    """POST /v1/images/generations and /v1/images/edits; the latter also has a picture."""

    names: ClassVar = {**PictureRequest.names, "prompt": "prompt"}
    required = ("prompt",)
    response_format: Literal["b64_json", "url"] | None = Field(None, description="Without it both.")
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


class Durations(ResponseModel):
    inference_time_s: float | None = Field(None, description="Of the slowest picture, without the queue.")
    stage_durations: dict[str, float] | None = Field(None, description="Of the slowest picture.")
    peak_memory_mb: float = Field(0.0, description="The most of any picture, in MiB; 0 on CPU ranks.")


class Images(Durations):
    created: int
    model: str = Field(description="The one that made them.")
    data: list[Image]
    output_format: Literal["png", "jpeg", "webp"]
    size: str
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


_USAGE = {"input_tokens": 0, "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}
_USAGE |= {"output_tokens": 0, "total_tokens": 0}
NO_TOKENS = "Pictures have no tokens."


class CompletedImage(ImageEvent):
    """An event of a stream of pictures: a finished picture."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    model: str = Field(description="The one that made it.")
    seed: int
    usage: dict[str, Any] = Field(default=_USAGE, description=NO_TOKENS)
    warnings: list[str] | None = Field(None, description="Fields that were ignored.")


class ResponseRequest(schemas.RequestModel):
    """POST /v1/responses. The tool has fields of /v1/images/generations; others of these may stand beside
    `input`."""

    model: str | None = Field(None, description="That of the tool counts, if it has one.")
    input: str | list[dict[str, Any]] = Field(description="A text, or messages with texts and pictures.")
    tools: list[dict[str, Any]] | None = Field(None, description='`{"type": "image_generation", ...}`')
    stream: bool | None = Field(None, exclude=True, description="Send OpenAI's events.")
    tool_choice: Unused = None
    background: Unused = None
    previous_response_id: Unused = None
    ignored: ClassVar = (
        *("instructions", "include", "metadata", "store", "parallel_tool_calls", "reasoning", "text"),
        *("truncation", "temperature", "top_p", "max_output_tokens", "max_tool_calls", "service_tier"),
    )
    """OpenAI's fields without a meaning here."""

    @property
    def text(self) -> str:
        """Of the user's last message."""
        if isinstance(self.input, str):
            return self.input
        content = next((each.get("content") for each in self.input[::-1] if each.get("role") == "user"), "")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))


class ImageCall(ResponseModel):
    """A picture in a response."""

    id: str
    type: Literal["image_generation_call"] = "image_generation_call"
    status: Literal["generating", "completed"] = "generating"
    result: str | None = Field(None, description="As base64.")
    output_format: Literal["png", "jpeg", "webp"]
    size: str | None = None
    revised_prompt: str | None = None


class PictureResponse(ResponseModel):
    id: str
    object: Literal["response"] = "response"
    status: Literal["in_progress", "completed", "failed"] = "in_progress"
    created_at: int
    model: str = Field(description="The one that makes them.")
    output: list[ImageCall]
    error: schemas.JobFailure | None = None
    tools: list[dict[str, Any]]
    tool_choice: Literal["auto"] = "auto"
    parallel_tool_calls: bool = True
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
    modalities: Any = Field(
        None, exclude=True, description="With it, `content` of the answer is a text beside `images`."
    )
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
    def job(self) -> dict[str, Any]:
        prompt = next((each.text for each in reversed(self.messages) if each.role == "user"), "")
        return super().job | {"prompt": prompt}


class ImageUrl(ResponseModel):
    url: str


class ImagePart(ResponseModel):
    type: Literal["image_url"] = "image_url"
    image_url: ImageUrl


class ChatAnswer(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: list[ImagePart] | str
    images: list[ImagePart] = Field(description="The pictures, where clients of OpenRouter look for them.")


class ChatChoice(ResponseModel):
    index: int = 0
    message: ChatAnswer
    finish_reason: Literal["stop"] = "stop"


class ChatCompletion(ResponseModel):
    """The pictures, as vLLM-Omni answers: data: URLs in one message."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: dict[str, int] = Field(
        default={"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, description=NO_TOKENS
    )
    metrics: Durations
    warnings: list[str] | None = Field(None, description="Fields that were ignored.")
