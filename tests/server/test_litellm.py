"""LiteLLM, unchanged, as a user has it: `pip install litellm` beside gfgen. CI does not have it."""

from __future__ import annotations

import base64
import io
import json
import time
from typing import Any

import pytest
from client_table import calls
from fake_serving import MOVIE
from PIL import Image
from serving import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")
PICTURE = ROOT / "jobs/lighthouse.png"


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield pytest.importorskip("litellm")


@pytest.fixture
def at(server) -> dict[str, Any]:
    return {"api_base": f"{server.url}/v1", "api_key": "any"}


def is_picture(content: str) -> bool:
    with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
        return picture.format == "PNG"


@calls("LiteLLM", "`image_generation`", "`image_edit`", result="the pictures")
def test_litellm_makes_pictures(litellm, at):
    answer = litellm.image_generation(model="openai/fake-image", prompt="a fox", n=2, size="64x64", **at)
    assert [is_picture(each.b64_json) for each in answer.data] == [True, True]
    with PICTURE.open("rb") as picture:
        answer = litellm.image_edit(model="openai/fake-video", image=picture, prompt="a fox", **at)
    assert is_picture(answer.data[0].b64_json)


@calls(
    "LiteLLM",
    *("`video_generation`", "`video_status`", "`video_content`", "`video_list`"),
    result="the video, its status, its file, the list",
)
def test_litellm_makes_videos(litellm, at):
    video = litellm.video_generation(model="openai/fake-video", prompt="a fox", seconds="4", **at)
    deadline_s = time.monotonic() + 30
    while (status := litellm.video_status(video_id=video.id, **at).status) != "completed":
        assert time.monotonic() < deadline_s, status
        time.sleep(0.05)
    assert litellm.video_content(video_id=video.id, **at) == MOVIE
    assert len(litellm.video_list(custom_llm_provider="openai", **at)) > 0


@calls(
    "LiteLLM",
    *("`create_file`", "`create_batch`", "`retrieve_batch`", "`file_content`"),
    result="a file of requests becomes a file of results",
)
def test_litellm_runs_batches(litellm, at):
    of_openai = at | {"custom_llm_provider": "openai"}
    body = {"model": "fake-image", "prompt": "a fox", "num_inference_steps": 1}
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/images/generations", "body": body}
    content = ("night.jsonl", json.dumps(line).encode())
    file = litellm.create_file(file=content, purpose="batch", **of_openai)
    batch = litellm.create_batch(
        completion_window="24h", endpoint="/v1/images/generations", input_file_id=file.id, **of_openai
    )
    deadline_s = time.monotonic() + 30
    while batch.status != "completed":
        assert time.monotonic() < deadline_s, batch.status
        time.sleep(0.05)
        batch = litellm.retrieve_batch(batch_id=batch.id, **of_openai)
    found = litellm.file_content(file_id=batch.output_file_id, **of_openai)
    assert json.loads(found.content)["custom_id"] == "r1"


@calls(
    "LiteLLM",
    "`completion(modalities=['image', 'text'])`",
    result="the picture as a `data:` URL; without `modalities` an error of LiteLLM, which accepts only text",
)
def test_litellm_gets_pictures_in_a_conversation(litellm, at):
    messages = [{"role": "user", "content": "a fox"}]
    answer = litellm.completion(
        model="openai/fake-image", messages=messages, modalities=["image", "text"], **at
    )
    (picture,) = answer.choices[0].message.images
    assert is_picture(picture["image_url"]["url"].partition("base64,")[2])
    with pytest.raises(Exception, match="content"):
        litellm.completion(model="openai/fake-image", messages=messages, **at)
