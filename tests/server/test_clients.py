"""Requests exactly as clients of other servers send them. The shapes were read from these programs:

vLLM-Omni   benchmarks/diffusion/backends.py: forms without a file are URL-encoded, all values are strings
GF-DiT      the same file of an earlier version, with the request's id as `user`
SGLang      multimodal_gen/benchmarks/bench_serving.py: JSON, or a multipart form with `extra_body` as JSON
OpenAI      unset optional fields as null, and fields that have no meaning here
"""

from __future__ import annotations

import base64
import io
import json
import re

import client_table
import pytest
from client_table import calls
from fake_serving import MOVIE, SIDE
from PIL import Image
from serving import ROOT, fake_server

PICTURE = (ROOT / "jobs/lighthouse.png").read_bytes()
WAN = {
    "num_inference_steps": "2",
    "guidance_scale": "4.0",
    "guidance_scale_2": "4.0",
    "boundary_ratio": "0.875",
    "flow_shift": "0.01",
    "user": "me",
    "num_outputs_per_prompt": "1",
    "extra_args": '{"cache_backend": "none"}',
    "negative_prompt": "blurry",
    "prompt": "a fox",
    "height": "64",
    "width": "96",
    "num_frames": "9",
    "seed": "42",
    "fps": "8",
}
"""The fields of vLLM-Omni's video client with everything that its users pass as `extra_body`."""


def downloaded(server, answer):
    """The video, polled and downloaded as vLLM-Omni's client does."""
    assert answer.status_code == 200, answer.text
    video = answer.json()
    server.wait_for(video["id"])
    done = server.http.get(f"/v1/videos/{video['id']}").json()
    assert done["status"] == "completed"
    assert set(done["stage_durations"]) >= {"encode", "denoise", "decode"}
    assert sum(done["stage_durations"].values()) > 0
    assert done["inference_time_s"] > 0
    assert done["peak_memory_mb"] >= 0  # the clients of SGLang and GF-DiT compare it
    assert done["num_outputs"] == 1  # SGLang's client adds it up
    content = server.http.get(f"/v1/videos/{video['id']}/content")
    assert content.status_code == 200
    assert server.http.delete(f"/v1/videos/{video['id']}").json()["deleted"] is True
    return video, content


STRETCHED = r"a picture is stretched to other proportions: (video|image)_\w+: 384x256 -> 64x64"


@calls(
    "vLLM-Omni",
    "`/v1/videos`: URL-encoded text-to-video, with both guidance scales and `extra_args`",
    result="the video, polled, loaded and deleted; a warning for unknown `extra_args`",
)
@calls(
    "GF-DiT",
    "`/v1/videos`: URL-encoded text-to-video, with both guidance scales and `extra_args`",
    result="the video, polled, loaded and deleted; a warning for unknown `extra_args`",
)
def test_vllm_omni_text_to_video(server):
    video, content = downloaded(server, server.http.post("/v1/videos", data=WAN))
    assert content.content == MOVIE
    assert video["stage_durations"] is None
    assert (video["size"], video["frames"], video["fps"], video["seed"]) == ("96x64", 9, 8, 42)
    assert video["warnings"] == ["cache_backend: not a field, ignored"]
    assert f"{video['id']}: cache_backend: not a field, ignored" in server.log


@calls(
    "vLLM-Omni",
    "`/v1/videos`: multipart image-to-video, the same fields",
    result="the video, polled, loaded and deleted",
)
@calls(
    "GF-DiT",
    "`/v1/videos`: multipart image-to-video, the same fields",
    result="the video, polled, loaded and deleted",
)
def test_vllm_omni_image_to_video(server):
    files = {"input_reference": ("x.png", PICTURE, "image/png")}
    video, content = downloaded(server, server.http.post("/v1/videos", data=WAN, files=files))
    assert content.content == MOVIE
    assert video["steps"] == 2


@calls(
    "vLLM-Omni",
    "`/v1/videos`: warm-up with one frame",
    result="a picture as PNG",
)
@calls(
    "GF-DiT",
    "`/v1/videos`: warm-up with one frame",
    result="a picture as PNG",
)
def test_vllm_omni_warms_up_with_a_single_frame(server):
    fields = {
        "prompt": "warmup",
        "height": "64",
        "width": "64",
        "num_frames": "1",
        "num_inference_steps": "1",
    }
    video, content = downloaded(server, server.http.post("/v1/videos", data=fields))
    assert (video["object"], content.headers["content-type"]) == ("video", "image/png")


@calls(
    "vLLM-Omni",
    "`/v1/images/generations`: JSON",
    result="the picture as base64",
)
@calls(
    "GF-DiT",
    "`/v1/images/generations`: JSON",
    result="the picture as base64",
)
def test_vllm_omni_text_to_image(server):
    payload = {
        "model": "fake-image",
        "prompt": "a fox",
        "n": 1,
        "size": "64x64",
        "response_format": "b64_json",
        "seed": 3,
        "num_inference_steps": 1,
        "true_cfg_scale": 4.0,
        "guidance_scale": 1.0,
        "num_outputs_per_prompt": 1,
    }
    answer = server.http.post(
        "/v1/images/generations", json=payload, headers={"Authorization": "Bearer EMPTY"}
    ).json()
    assert len(answer["data"]) == 1
    assert answer["peak_memory_mb"] == 0
    assert answer["warnings"] == ["true_cfg_scale = 4: this model has no use for it; ignored"]


@calls(
    "SGLang",
    "`/v1/videos`: JSON text-to-video",
    result="the video, polled",
)
def test_sglang_text_to_video(server):
    payload = {"model": "fake-video", "prompt": "a fox", "size": "64x64", "num_frames": 9, "fps": 8}
    payload |= {"num_outputs_per_prompt": 1, "num_inference_steps": 1, "enable_teacache": False}
    video, _ = downloaded(server, server.http.post("/v1/videos", json=payload))
    assert video["num_outputs"] == 0
    assert video["warnings"] == ["enable_teacache: not a field, ignored"]


@calls(
    "SGLang",
    "`/v1/videos`: multipart image-to-video with `extra_body`",
    result="the video, polled",
)
def test_sglang_image_to_video(server):
    fields = {"model": "fake-video", "prompt": "a fox", "size": "64x64", "num_frames": "9", "fps": "8"}
    fields["num_outputs_per_prompt"] = "1"
    fields["extra_body"] = json.dumps({"num_inference_steps": 3, "seed": 5, "fps": 30})
    files = {"input_reference": ("x.png", PICTURE, "application/octet-stream")}
    video, _ = downloaded(server, server.http.post("/v1/videos", data=fields, files=files))
    assert (video["steps"], video["seed"], video["fps"]) == (3, 5, 8)
    (warning,) = video["warnings"]
    assert re.fullmatch(STRETCHED, warning)


def test_openais_unset_fields_and_those_without_a_meaning_pass(server):
    unset = dict.fromkeys(("n", "response_format", "output_format", "model", "size", "stream", "user"))
    no_ops = {"stream": False, "output_compression": 100, "safety_identifier": "me", "partial_images": 0}
    for fields in (unset, no_ops):
        answer = server.post("/v1/images/generations", prompt="a fox", num_inference_steps=1, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["warnings"] is None


def test_openais_curl_without_a_content_type(server):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    body = b'{"prompt": "a fox", "num_inference_steps": 1}'
    answer = server.http.post("/v1/videos", content=body, headers=headers)
    assert answer.json()["prompt"] == "a fox"
    url = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    fields = {"prompt": "a fox", "num_inference_steps": "1", "input_reference[image_url]": url}
    downloaded(server, server.http.post("/v1/videos", data=fields))


def picture_in(url):
    kind, _, content = url.partition(";base64,")
    with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
        assert picture.format.lower() == kind.removeprefix("data:image/")
    return picture


@calls(
    "vLLM-Omni",
    "`/v1/images/edits`: multipart",
    result="the picture as base64",
)
@calls(
    "SGLang",
    "`/v1/images/edits`: multipart",
    result="the picture as base64",
)
def test_vllm_omni_image_edits(server):
    fields = {
        "model": "fake-video",
        "prompt": "a fox",
        "size": "64x64",
        "response_format": "b64_json",
        "num_inference_steps": "1",
        "bot_task": "think",
    }
    files = {"image": ("x.png", PICTURE, "image/png")}
    answer = server.http.post("/v1/images/edits", data=fields, files=files).json()
    assert picture_in("data:image/png;base64," + answer["data"][0]["b64_json"]).size == (SIDE, SIDE)
    ignored, stretched = answer["warnings"]
    assert ignored == "bot_task: not a field, ignored"
    assert re.fullmatch(STRETCHED, stretched)


@calls(
    "vLLM-Omni",
    "`/v1/chat/completions`: text",
    result="the picture as a `data:` URL, times in `metrics`",
)
@calls(
    "GF-DiT",
    "`/v1/chat/completions`: text",
    result="the picture as a `data:` URL, times in `metrics`",
)
def test_vllm_omni_chat_text_to_image(server):
    payload = {
        "model": "fake-image",
        "messages": [{"role": "user", "content": "a fox"}],
        "extra_body": {"height": 64, "width": 64, "num_inference_steps": 1, "seed": 3},
    }
    answer = server.http.post("/v1/chat/completions", json=payload).json()
    (choice,) = answer["choices"]
    (part,) = choice["message"]["content"]
    assert picture_in(part["image_url"]["url"]).size == (SIDE, SIDE)
    assert answer["metrics"]["inference_time_s"] > 0
    assert answer["metrics"]["stage_durations"] == server.job(answer["id"][9:])["stage_durations"]
    assert (answer["object"], answer["model"], answer["warnings"]) == ("chat.completion", "fake-image", None)
    job = server.job(answer["id"].removeprefix("chatcmpl-"))
    assert (job["prompt"], job["seed"]) == ("a fox", 3)


@calls(
    "vLLM-Omni",
    "`/v1/chat/completions`: text and a picture",
    result="the picture as a `data:` URL",
)
@calls(
    "GF-DiT",
    "`/v1/chat/completions`: text and a picture",
    result="the picture as a `data:` URL",
)
def test_vllm_omni_chat_image_to_image(server):
    url = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    parts = [{"type": "text", "text": "a fox"}, {"type": "image_url", "image_url": {"url": url}}]
    payload = {"model": "fake-video", "messages": [{"role": "user", "content": parts}]}
    payload["extra_body"] = {"num_inference_steps": 1}
    (choice,) = server.http.post("/v1/chat/completions", json=payload).json()["choices"]
    assert len(choice["message"]["content"]) == 1
    two = payload | {"messages": [{"role": "user", "content": [*parts, parts[1]]}]}
    error = server.http.post("/v1/chat/completions", json=two).json()["error"]
    assert error["message"] == "image: model fake-video takes one, not 2"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "a fox"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
        ({"messages": [{"role": "system", "content": "a fox"}]}, "prompt"),
        ({"messages": [{"role": "user", "content": "a fox"}], "stream": True}, "stream"),
    ],
)
def test_a_conversation_without_a_prompt_is_refused(server, fields, param):
    answer = server.http.post("/v1/chat/completions", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    if param == "stream":
        text = "stream: only false; /v1/images/generations streams pictures"
        assert answer.json()["error"]["message"] == text


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"sice": "64x64"}, "sice: not a field, ignored; did you mean size?"),
        ({"steps": 5}, "steps: not a field, ignored; did you mean num_inference_steps?"),
        ({"CFG-Scale": 5}, "CFG-Scale: not a field, ignored; did you mean guidance_scale?"),
        ({"image": "a"}, "image: not a field, ignored; did you mean input_reference?"),
        ({"length": 9}, "length: not a field, ignored; did you mean num_frames?"),
        ({"extra_args": "{'a': 1}"}, "extra_args: not a JSON object, ignored"),
        ({"true_cfg_scale": 3}, "true_cfg_scale = 3: this model has no use for it; ignored"),
        ({"lora": None}, None),
    ],
)
def test_a_field_without_effect_is_a_warning(server, fields, warning):
    video = server.post("/v1/videos", prompt="a fox", num_inference_steps=1, **fields).json()
    assert video["warnings"] == (None if warning is None else [warning])
    assert server.job(video["id"])["warnings"] is None


@pytest.mark.parametrize("name", ["image", "input_reference"])
def test_a_picture_for_generations_is_sent_to_edits(server, name):
    fields = {"prompt": "a fox", name: "data:image/png;base64,aGVsbG8="}
    error = server.http.post("/v1/images/generations", json=fields).json()["error"]
    assert error["message"] == "image: pictures begin with one at /v1/images/edits"


def test_what_does_not_act_as_written_is_a_warning_of_the_job_to_its_end(server):
    video = server.post("/v1/videos", prompt="a fox", size="70x64", num_inference_steps=1).json()
    assert video["warnings"] == ["rounded by fake-video: 70x64 -> 64x64"]


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    running = fake_server(tmp_path_factory.mktemp("strict"), strict=1)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"sice": "64x64"}, 400, "sice: not a field; did you mean size?"),
        ({"extra_args": {"cache": 1}}, 400, "cache: not a field; the fields are"),
        ({"extra_args": "x"}, 400, "extra_args: not a JSON object"),
        ({"true_cfg_scale": 3}, 422, "this model has no use for it"),
        ({"user": "me", "extra_body": {"seed": 1}}, 200, ""),
    ],
)
def test_a_strict_server_refuses_a_field_without_effect(strict, fields, status, words):
    for path in ("/v1/videos", "/v1/images/generations"):
        answer = strict.post(path, prompt="a fox", num_inference_steps=1, **fields)
        assert answer.status_code == status
        assert words in answer.text


def test_the_table_in_the_documentation_has_the_calls_of_these_tests():
    assert client_table.DOCUMENT.read_text() == client_table.written()


@pytest.mark.parametrize(
    ("first", "second"), [("image", "image"), ("image[]",) * 2, ("image[0]", "image[1]")]
)
def test_a_form_may_have_several_pictures(server, first, second):
    files = [(first, ("x.png", PICTURE)), (second, ("y.png", PICTURE))]
    answer = server.http.post("/v1/images/edits", data={"prompt": "a fox"}, files=files)
    assert answer.json()["model"] == "fake-edit"
    answer = server.http.post(
        "/v1/videos", data={"prompt": "a fox"}, files=[("input_reference", PICTURE)] * 2
    )
    message = "input_reference: 2 files; at most 1 can be given"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_a_file_of_requests_is_one_file_of_that_name(server):
    one, other = (("file", ("a.jsonl", b"{}")), ("file", ("b.jsonl", b"{}")))
    answer = server.http.post("/v1/files", data={"purpose": "batch"}, files=[one, other])
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "file: 2 files; at most 1 can be given",
    )
    answer = server.http.post("/v1/files", data={"purpose": "batch"}, files=[one, ("notes", ("b", b"x"))])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
