"""OpenAI's own client, unchanged, against this server."""

from __future__ import annotations

import base64
import io
import json
import re
import time

import httpx
import pytest
from client_table import calls
from fake_serving import MOVIE
from PIL import Image
from serving import ROOT

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@calls(
    "openai",
    "`images.generate`, as base64 or URL",
    result="the pictures",
)
def test_images_are_generated(client):
    answer = client.images.generate(prompt="a fox", n=2, size="64x64", model="fake-image")
    assert len(answer.data) == 2
    for image in answer.data:
        with Image.open(io.BytesIO(base64.b64decode(image.b64_json))) as picture:
            assert picture.format == "PNG"
    (image,) = client.images.generate(prompt="a fox", response_format="url").data
    assert image.url.startswith("http://127.0.0.1:")


@calls(
    "openai",
    "`images.generate(stream=True)`",
    result="previews where the model has them, then the pictures",
)
def test_images_are_streamed(client):
    stream = client.images.generate(prompt="a fox", n=2, model="fake-image", stream=True, partial_images=1)
    events = list(stream)  # fake models have no previews
    assert [event.type for event in events] == ["image_generation.completed"] * 2
    with Image.open(io.BytesIO(base64.b64decode(events[0].b64_json))) as picture:
        assert f"{picture.width}x{picture.height}" == "16x16"
    assert events[0].usage.total_tokens == 0


PICTURE = (ROOT / "jobs/lighthouse.png").read_bytes()
ONE, SEVERAL = ("x.png", PICTURE), [("x.png", PICTURE), ("y.png", PICTURE)]


def mask_of(box, size=None):
    """A mask as OpenAI defines it: what is to be painted is transparent."""
    with Image.open(io.BytesIO(PICTURE)) as picture:
        mask = Image.new("RGBA", size or picture.size, "black")
    if box is not None:
        mask.paste((0, 0, 0, 0), box)
    content = io.BytesIO()
    mask.save(content, format="PNG")
    return content.getvalue()


@calls("openai", "`images.edit`", result="the picture")
def test_images_are_edited(client):
    for image in (ONE, [ONE]):
        answer = client.images.edit(image=image, prompt="a fox", size="auto", input_fidelity="high")
        assert len(answer.data) == 1


@calls(
    "openai",
    "`images.edit` with several pictures and a `mask`",
    result="the picture, if the model takes them; otherwise 422",
)
def test_images_are_edited_with_several_pictures_and_a_mask(client):
    given = {"prompt": "a fox", "model": "fake-edit"}
    answer = client.images.edit(image=SEVERAL, mask=("m.png", mask_of((2, 2, 8, 8))), n=2, **given)
    assert len(answer.data) == 2
    text_only = "image: model fake-image makes pictures from text only"
    reasons = {
        "fake-video": ("image: model fake-video takes one, not 2", "mask: model fake-video takes no mask"),
        "fake-image": (text_only, text_only),
    }
    for model, (of_several, of_mask) in reasons.items():
        with pytest.raises(openai.UnprocessableEntityError, match=of_several):
            client.images.edit(image=SEVERAL, **given | {"model": model})
        with pytest.raises(openai.UnprocessableEntityError, match=of_mask):
            client.images.edit(image=ONE, mask=mask_of((2, 2, 8, 8)), **given | {"model": model})
    for mask, reason in (
        (mask_of(None), "mask: nothing in it is transparent"),
        (mask_of((2, 2, 8, 8), (16, 16)), "mask: is 16x16, but the image 384x256"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            client.images.edit(image=ONE, mask=mask, **given)
    with pytest.raises(openai.BadRequestError, match="image: 17 files; at most 16"):
        client.images.edit(image=[ONE] * 17, **given)


STRETCHED = r"a picture is stretched to other proportions: image_\w+: 384x256 -> 64x64"


@pytest.mark.parametrize("name", ["mask", "mask[image_url]", "mask[file_id]"])
def test_a_form_refers_to_a_mask_as_to_a_picture(client, name):
    def edited(mask):
        content = ("m.png", mask)
        given = client.files.create(file=content, purpose="vision").id if "id" in name else data_url(mask)
        form = {"prompt": "a fox", "model": "fake-edit", "image": data_url(PICTURE), name: given}
        files = {"none": (None, "")}  # makes it a multipart form
        return httpx.post(f"{client.base_url}images/edits", data=form, files=files, timeout=30).json()

    (warning,) = edited(mask_of((2, 2, 8, 8)))["warnings"]
    assert re.fullmatch(STRETCHED, warning)
    assert edited(mask_of(None))["error"]["message"].startswith("mask: nothing in it is transparent")


def test_two_masks_and_two_fields_of_pictures_are_refused(client):
    url, masks = f"{client.base_url}images/edits", [("mask", mask_of((2, 2, 8, 8)))] * 2
    error = httpx.post(url, data={"prompt": "a fox"}, files=[("image", PICTURE), *masks]).json()["error"]
    assert error["message"] == "mask: 2 files; at most 1 can be given"
    fields = {"image": data_url(PICTURE), "images": [data_url(PICTURE)]}
    answer = httpx.post(url, json={"prompt": "a fox", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (400, "images: give image or images, not both")


def data_url(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_without_a_model_the_first_one_that_takes_the_pictures_makes_them(client):
    answer = client.images.edit(image=SEVERAL, mask=mask_of((2, 2, 8, 8)), prompt="a fox")
    assert server_model(client, answer.data[0].id) == "fake-edit"


def server_model(client, job_id):
    return client.get(f"/jobs/{job_id}", cast_to=httpx.Response).json()["model"]


@calls(
    "openai",
    "`files.create(purpose='vision')`, then its `file_id` where a picture is accepted as JSON",
    result="the uploaded picture is the one to begin with",
)
def test_an_uploaded_picture_is_a_reference(client):
    file = client.files.create(file=ONE, purpose="vision")
    assert file.purpose == "vision"
    assert client.files.content(file.id).read() == PICTURE
    named = {"file_id": file.id}
    values = {"prompt": "a fox", "input_reference": named}  # the client's own method takes only files
    video = client.post("/videos", body=values, cast_to=openai.types.Video)
    assert client.videos.poll(video.id).status == "completed"
    form = {"prompt": (None, "a fox"), "input_reference[file_id]": (None, file.id)}
    assert httpx.post(f"{client.base_url}videos", files=form).status_code == 200
    for part in ({"type": "image_url", "image_url": named}, {"type": "file", "file": named}):
        messages = [{"role": "user", "content": [{"type": "text", "text": "a fox"}, part]}]
        assert client.chat.completions.create(model="fake-edit", messages=messages).choices
    edit = {
        "prompt": "a fox",
        "images": [named, named],
        "model": "fake-edit",
    }  # JSON, as the REST API takes it
    assert client.post("/images/edits", body=edit, cast_to=httpx.Response).json()["data"]
    job = {"prompt": "a fox", "model": "fake-edit", "files": {"image": [named, named], "mask_image": named}}
    assert client.post("/jobs", body=job, cast_to=httpx.Response).json()["model"] == "fake-edit"
    with pytest.raises(openai.NotFoundError, match="there is no file file-"):
        client.post("/jobs", body={"prompt": "a fox", "image": {"file_id": "file-" + "0" * 24}}, cast_to=dict)
    with pytest.raises(openai.UnprocessableEntityError, match="the file is not a picture"):
        client.files.create(file=("x.png", b"nonsense"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="batch, vision, user_data are accepted"):
        client.files.create(file=ONE, purpose="fine-tune")


@calls(
    "openai",
    "`chat.completions.create`",
    result="the picture as a `data:` URL, in `content` and `images`",
)
def test_pictures_come_in_a_conversation(client):
    messages = [{"role": "user", "content": "a fox"}]
    answer = client.chat.completions.create(model="fake-image", messages=messages)
    message = answer.choices[0].message
    assert message.content[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert message.images == message.content
    assert answer.warnings is None
    turns = [*messages, {"role": "assistant", "content": "here"}, {"role": "user", "content": "a wolf"}]
    answer = client.chat.completions.create(model="fake-image", messages=turns)
    assert answer.warnings == ["messages: earlier messages and their pictures have no effect"]


@calls(
    "openai",
    "`chat.completions.create(extra_body={'modalities': ['image', 'text']})`, as OpenRouter documents it",
    result="a text in `content`, the picture in `images`",
)
def test_with_modalities_the_content_of_an_answer_is_a_text(client):
    messages = [{"role": "user", "content": "a fox"}]
    answer = client.chat.completions.create(
        model="fake-image", messages=messages, extra_body={"modalities": ["image", "text"]}
    )
    (picture,) = answer.choices[0].message.images
    assert answer.choices[0].message.content == "1 picture"
    assert picture["type"] == "image_url"
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")


def uploaded(client, *lines):
    content = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    return client.files.create(file=("night.jsonl", content.encode()), purpose="batch")


def request_of(number, url="/v1/images/generations", **body):
    body = {"model": "fake-image", "prompt": f"number {number}", "num_inference_steps": 1} | body
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def ended(client, batch):
    deadline_s = time.monotonic() + 30
    while batch.status == "in_progress":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines_of(client, file_id):
    lines = map(json.loads, client.files.content(file_id).text.splitlines())
    return {line["custom_id"]: line for line in lines}


@calls(
    "openai",
    "`files.create`, `retrieve`, `list`, `content`, `wait_for_processing`, `delete`",
    "`batches.create`, `retrieve`, `list`",
    result="a file of results and one of errors",
)
def test_a_file_of_requests_becomes_files_of_results_and_errors(client):
    file = uploaded(
        client,
        request_of(1),
        request_of(2, n=2, size="64x64"),
        request_of(3, guidance_scale=13),
        request_of(4, size="huge"),
        request_of(5, url="/v1/videos"),
        request_of(1, prompt="another with the same id"),
        "nonsense\n",
    )
    assert (file.filename, file.purpose, file.status) == ("night.jsonl", "batch", "processed")
    assert client.files.content(file.id).text.count("custom_id") == 6
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/images/generations",
        completion_window="24h",
        metadata={"of": "me"},
    )
    assert (batch.endpoint, batch.input_file_id, batch.metadata) == (
        "/v1/images/generations",
        file.id,
        {"of": "me"},
    )
    batch = ended(client, batch)
    assert batch.status == "completed"
    results = lines_of(client, batch.output_file_id)
    assert [len(results[name]["response"]["body"]["data"]) for name in ("r1", "r2")] == [1, 2]
    (image,) = results["r1"]["response"]["body"]["data"]
    with Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) as picture:
        assert picture.format == "PNG"
    errors = lines_of(client, batch.error_file_id)
    assert set(errors) == {"r1", "r3", "r4", "r5", None}
    assert "also on line 1" in errors["r1"]["error"]["message"]
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (8, 3, 5)
    assert "unlucky" in errors["r3"]["error"]["message"]
    assert "/v1/images/generations is accepted in this batch" in errors["r5"]["error"]["message"]
    assert batch.id in [each.id for each in client.batches.list(limit=1)]  # page by page
    assert file.id in [each.id for each in client.files.list()]
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_results_of_a_batch_have_the_form_that_their_requests_ask_for(client):
    file = uploaded(
        client,
        request_of(1, output_format="jpeg", output_compression=20, n=2),
        request_of(2, extra_body={"output_format": "webp"}),
        request_of(3),
    )
    values = {"endpoint": "/v1/images/generations", "completion_window": "24h"}
    batch = client.batches.create(input_file_id=file.id, **values)
    client.files.delete(file.id)
    results = lines_of(client, ended(client, batch).output_file_id)
    bodies = {name: line["response"]["body"] for name, line in results.items()}
    assert {name: body["output_format"] for name, body in bodies.items()} == {
        "r1": "jpeg",
        "r2": "webp",
        "r3": "png",
    }
    for body in bodies.values():
        for image in body["data"]:
            with Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) as picture:
                assert picture.format.lower() == body["output_format"]


def test_messages_of_a_batch_have_a_text_if_their_requests_have_modalities(client):
    values = {
        "url": "/v1/chat/completions",
        "prompt": None,
        "messages": [{"role": "user", "content": "a fox"}],
    }
    file = uploaded(client, request_of(1, **values, modalities=["image", "text"]), request_of(2, **values))
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    results = lines_of(client, ended(client, batch).output_file_id)
    first, second = (results[name]["response"]["body"]["choices"][0]["message"] for name in ("r1", "r2"))
    assert (first["content"], len(first["images"])) == ("1 picture", 1)
    assert second["content"] == second["images"]


@calls(
    "openai",
    "`batches.cancel`",
    result="its open jobs are cancelled",
)
def test_a_batch_of_videos_is_cancelled(client):
    slow = {"model": "fake-video", "flow_shift": 0.05, "num_inference_steps": 1000}
    file = uploaded(client, *(request_of(number, url="/v1/videos", **slow) for number in range(4)))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/videos", completion_window="24h")
    assert batch.output_file_id is None
    with pytest.raises(openai.NotFoundError):
        client.files.content(f"file-output_{batch.id}")
    batch = client.batches.cancel(batch.id)
    assert batch.status == "cancelled"
    errors = lines_of(client, batch.error_file_id)
    assert {line["error"]["code"] for line in errors.values()} == {"cancelled"}


def test_a_batch_without_a_valid_request_is_refused(client):
    file = uploaded(client, request_of(1, prompt=""), request_of(2, url="/v1/audio"))
    values = {"endpoint": "/v1/images/generations", "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError, match="line 1: prompt"):
        client.batches.create(input_file_id=file.id, **values)
    for file_id in ("file-0", "../jobs", "file-" + "0" * 24):
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id=file_id, **values)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"x"), purpose="fine-tune")


@calls(
    "openai",
    "`videos.create`, `create_and_poll`, `poll`, `retrieve`, `list`, `download_content`, `delete`",
    result="the video, its status, its file, the list",
)
def test_a_video_is_created_polled_downloaded_listed_and_deleted(client):
    video = client.videos.create(prompt="a fox", seconds="4", size="1280x720")
    assert (video.status, video.object, video.size) == ("queued", "video", "1280x720")
    done = client.videos.poll(video.id, poll_interval_ms=50)
    assert (done.status, done.progress, done.error) == ("completed", 100, None)
    assert done.completed_at >= done.created_at
    assert client.videos.download_content(video.id).read() == MOVIE
    assert video.id in [each.id for each in client.videos.list(limit=2)]
    other = client.videos.create_and_poll(prompt="a fox", poll_interval_ms=50)
    assert other.status == "completed"
    deleted = client.videos.delete(video.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)


@calls(
    "openai",
    "`videos.remix`, `edit`, `extend`, `create_character`, `get_character`",
    "`images.create_variation`",
    result="404 or 405: not supported",
)
def test_what_changes_videos_is_not_supported(client):
    movie, picture = ("a.mp4", MOVIE), ("x.png", b"x")
    for call in (
        lambda: client.videos.remix("video_1", prompt="a fox"),
        lambda: client.videos.edit(prompt="a fox", video=movie),
        lambda: client.videos.extend(prompt="a fox", seconds="4", video=movie),
        lambda: client.videos.create_character(name="fox", video=movie),
        lambda: client.videos.get_character("char_1"),
        lambda: client.images.create_variation(image=picture),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            call()
        assert error.value.status_code in (404, 405)


@calls(
    "openai",
    "`videos.create(input_reference=..., extra_body=...)`",
    result="the video",
)
def test_a_video_begins_with_a_picture_and_takes_our_fields(client):
    with (ROOT / "jobs/lighthouse.png").open("rb") as picture:
        video = client.videos.create(
            prompt="waves",
            input_reference=picture,
            extra_body={"num_inference_steps": 2, "seed": 11, "deadline": "5m", "priority": 3},
        )
    assert (video.steps, video.seed, video.priority) == (2, 11, 3)
    assert client.videos.poll(video.id, poll_interval_ms=50).status == "completed"


def test_pages_follow_each_other(client):
    made = [client.videos.create(prompt=f"number {number}").id for number in range(5)]
    found = []
    for video in client.videos.list(limit=2, order="desc"):
        found.append(video.id)
        if len(found) == 5:
            break
    assert found == made[::-1]


def test_errors_are_those_that_the_client_knows(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.videos.create(prompt="a fox", size="huge")
    assert (error.value.param, error.value.type) == ("size", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.videos.create(prompt="a fox", model="sora-2")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.UnprocessableEntityError):
        client.videos.create(prompt="a fox", model="fake-image")


@calls(
    "openai",
    "`models.list`, `retrieve`",
    result="the models",
)
def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["fake-video", "fake-image", "fake-edit"]
    assert client.models.retrieve("fake-video").owned_by == "gfgen"


TOOL = {"type": "image_generation", "size": "64x64", "quality": "high", "background": "opaque"}


@calls("openai", "`responses.create` with the tool `image_generation`", result="an `image_generation_call`")
def test_a_response_has_a_picture(client):
    answer = client.responses.create(
        model="fake-image", input="a fox", tools=[TOOL], instructions="paint", extra_body={"seed": 7}
    )
    assert (answer.status, answer.model, answer.error, answer.output_text) == (
        "completed",
        "fake-image",
        None,
        "",
    )
    (call,) = answer.output
    assert (call.type, call.status, call.output_format) == ("image_generation_call", "completed", "png")
    with Image.open(io.BytesIO(base64.b64decode(call.result))) as picture:
        assert (picture.format, call.size) == ("PNG", "64x64")
    job = client.get(f"/jobs/{call.id.removeprefix('ig_')}", cast_to=httpx.Response).json()
    assert (job["prompt"], job["seed"]) == ("a fox", 7)


@calls(
    "openai",
    "`responses.create` with `input_image` (a `data:` URL or `file_id`) and `input_image_mask`",
    result="the edited picture, if the model takes it",
)
def test_a_response_begins_with_pictures(client):
    file = client.files.create(file=ONE, purpose="vision")
    mask = f"data:image/png;base64,{base64.b64encode(mask_of((0, 0, 8, 8))).decode()}"
    pictures = [
        {"type": "input_image", "file_id": file.id, "detail": "auto"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"},
    ]
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "earlier"}, pictures[0]]},
        {"type": "image_generation_call", "id": "ig_1", "result": "AAAA", "status": "completed"},
        {"role": "user", "content": [{"type": "input_text", "text": "a fox"}, *pictures]},
    ]
    tool = TOOL | {"input_image_mask": {"image_url": mask}, "output_format": "jpeg", "model": "fake-edit"}
    answer = client.responses.create(model="gpt-5", input=turns, tools=[tool], tool_choice="required")
    (call,) = answer.output
    assert base64.b64decode(call.result)[:2] == b"\xff\xd8"
    assert answer.model == "fake-edit"
    with pytest.raises(
        openai.UnprocessableEntityError,
        match="image: model fake-image makes pictures from text only; name fake-edit",
    ):
        client.responses.create(model="fake-image", input=turns, tools=[TOOL])


@calls(
    "openai",
    "`responses.create(stream=True)`, `responses.stream`",
    result="OpenAI's events, with previews where the model has them",
)
def test_a_response_is_streamed(client):
    tool = TOOL | {"partial_images": 2}
    events = list(client.responses.create(model="fake-image", input="a fox", tools=[tool], stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.image_generation_call.in_progress",
        "response.image_generation_call.generating",
        "response.image_generation_call.completed",  # fake models have no previews
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(8))
    assert events[0].response.status == "in_progress"
    assert events[3].item_id == events[6].item.id == events[7].response.output[0].id
    assert events[6].item.result == events[7].response.output[0].result
    with client.responses.stream(model="fake-image", input="a fox", tools=[TOOL]) as stream:
        assert stream.get_final_response().output[0].result


def test_a_streamed_response_that_fails_says_why(client):
    unlucky = {"model": "fake-image", "input": "a fox", "extra_body": {"guidance_scale": 13}}
    *_, last = client.responses.create(**unlucky, tools=[TOOL], stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "unlucky" in last.response.error.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": []}, "tools: this server makes pictures, no texts"),
        ({"tools": [{"type": "web_search"}]}, "tools: this server makes pictures, no texts"),
        ({"tools": openai.omit}, "tools: this server makes pictures, no texts"),
        ({"tool_choice": "none"}, "tools: this server makes pictures, no texts"),
        ({"previous_response_id": "resp_1"}, "input: responses are not kept"),
        ({"background": True}, "input: responses are not kept"),
        ({"input": [{"role": "assistant", "content": "a fox"}]}, "input: has no text of the user"),
        ({"input": 5}, "input: input should be a valid string"),
    ],
)
def test_a_response_without_a_picture_is_one_clear_error(client, change, message):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**{"model": "fake-image", "input": "a fox", "tools": [TOOL]} | change)
    assert error.value.body["message"].startswith(message)


def user(*parts):
    return {"role": "user", "content": [{"type": "input_text", "text": "a fox"}, *parts]}


AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}
NO_PICTURE = {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": [user(AUDIO)]}, "input: 'input_audio': not a kind of part"),
        ({"input": [user("a word")]}, "input: 'a word': not a kind of part"),
        ({"input": [user(NO_PICTURE)]}, "input: send the picture itself"),
        ({"tools": [TOOL | {"action": "edit"}]}, "input: has no picture to edit"),
        ({"tools": [TOOL | {"action": "paint"}]}, "tools: action is auto, edit or generate"),
        ({"tools": [TOOL | {"model": 5}]}, "tools: action is auto, edit or generate, and model the name"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tools: this server makes pictures, no texts"),
        ({"tools": [TOOL, TOOL]}, "tools: 2 of type image_generation; give one"),
        ({"extra_body": {"prompt": {"id": "pmpt_1"}}}, "input: responses are not kept, nor prompts"),
    ],
)
def test_a_response_drops_nothing_in_silence(client, change, message):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**{"model": "fake-image", "input": "a fox", "tools": [TOOL]} | change)
    assert error.value.body["message"].startswith(message)


def test_unknown_fields_of_the_tool_and_other_tools_are_named(client):
    tool, others = TOOL | {"prompt": "a dog", "stream": True, "sharpness": 3}, {"type": "web_search"}
    answer = client.responses.create(model="fake-image", input="a fox", tools=[others, tool])
    assert sorted(each.partition(",")[0] for each in answer.warnings) == [
        "sharpness: not a field",
        "tools.prompt: not a field",
        "tools.stream: not a field",
        "tools.web_search: not a field",
    ]
    job_id = answer.output[0].id.removeprefix("ig_")
    assert client.get(f"/jobs/{job_id}", cast_to=httpx.Response).json()["prompt"] == "a fox"


@pytest.mark.parametrize("name", ["file_id", "file_data"])
def test_a_file_with_a_picture_is_a_picture(client, name):
    given = client.files.create(file=ONE, purpose="vision").id if name == "file_id" else data_url(PICTURE)
    part = {"type": "input_file", name: given}
    tool = TOOL | {"action": "edit", "model": "fake-edit"}
    assert client.responses.create(input=[user(part)], tools=[tool]).output[0].result
    with pytest.raises(
        openai.UnprocessableEntityError,
        match="image: model fake-image makes pictures from text only; name fake-edit",
    ):
        client.responses.create(model="fake-image", input=[user(part, part)], tools=[TOOL])


CALL = {"type": "image_generation_call", "id": "ig_1"}
SHOWN = CALL | {"result": base64.b64encode(PICTURE).decode()}
UNUSED = "input: earlier messages have no effect"


@pytest.mark.parametrize("before", [SHOWN, user({"type": "input_image", "image_url": data_url(PICTURE)})])
def test_a_second_turn_begins_with_the_picture_of_the_first(client, before):
    tools = [TOOL | {"model": "fake-edit", "action": "edit"}]
    answer = client.responses.create(input=[user(), before, user()], tools=tools)
    earlier, stretched = answer.warnings
    assert (answer.status, earlier) == ("completed", f"{UNUSED}, but their last picture")
    assert re.fullmatch(STRETCHED, stretched)


@pytest.mark.parametrize(("before", "action"), [(CALL, "auto"), (SHOWN, "generate")])
def test_a_second_turn_without_a_picture_says_what_has_no_effect(client, before, action):
    tools = [TOOL | {"model": "fake-edit", "action": action}]
    assert client.responses.create(input=[user(), before, user()], tools=tools).warnings == [UNUSED]


def test_a_large_picture_of_an_earlier_turn_is_no_large_request(client):
    content = io.BytesIO()
    Image.effect_noise((1200, 1200), 100).save(content, format="PNG")
    assert len(content.getvalue()) > 2**20
    call = {"type": "image_generation_call", "result": base64.b64encode(content.getvalue()).decode()}
    tools = [TOOL | {"model": "fake-edit", "action": "edit"}]
    assert client.responses.create(input=[user(), call, user()], tools=tools).status == "completed"
