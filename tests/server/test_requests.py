"""What can be asked over HTTP, and what comes back; one server with fake models for all of it."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import time
import zipfile
from datetime import UTC, datetime, timedelta

import pytest
from fake_serving import MOVIE, SIDE
from PIL import Image
from serving import ROOT

from gfgen.cli.remote.commands import find_target
from gfgen.errors import InputError
from gfgen.job.reader import JobSource

LIGHTHOUSE = (ROOT / "jobs/lighthouse.png").read_bytes()
SLOW = {"flow_shift": 0.05, "num_inference_steps": 1000}
"""Of a video that takes 50 s, if it is let."""


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def made(server, path="/v1/videos", **values):
    answer = server.post(path, **values)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def slow(server):
    """A video that is being made, and will be for long."""
    job = made(server, prompt="slowly", **SLOW)
    yield server.wait_for(job["id"], "in_progress")
    server.http.delete(f"/v1/videos/{job['id']}")


# Videos ---------------------------------------------------------------------------------------------


def test_a_video_is_made_and_can_be_had(server):
    job = made(server, prompt="a fox", size="70x64", num_inference_steps=3, seed=7)
    assert job["object"] == "video"
    assert (job["status"], job["progress"], job["model"]) == ("queued", 0, "fake-video")
    assert (job["size"], job["seconds"], job["frames"], job["steps"]) == ("64x64", "1.125", 9, 3)
    done = server.wait_for(job["id"])
    assert (done["status"], done["progress"], done["step"], done["seed"]) == ("completed", 100, 3, 7)
    assert done["completed_at"] >= done["created_at"] > 1.7e9
    assert done["expires_at"] == pytest.approx(done["completed_at"] + 7 * 86400, abs=1)
    content = server.http.get(f"/v1/videos/{job['id']}/content")
    assert (content.headers["content-type"], content.content) == ("video/mp4", MOVIE)


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"), [("2", None, 17), (2, 16, 33), (0.5, 10, 5), ("1.25", 24, 29)]
)
def test_seconds_become_frames_as_the_model_rounds_them(server, seconds, fps, frames):
    answer = server.post("/v1/videos", prompt="a fox", seconds=seconds, fps=fps)
    assert answer.json()["frames"] == frames


def test_a_form_with_a_picture_is_taken_like_json(server):
    fields = {"prompt": "a lighthouse", "seconds": "2", "num_inference_steps": "2", "deadline": "90"}
    answer = server.http.post("/v1/videos", data=fields, files={"input_reference": ("x.png", LIGHTHOUSE)})
    job = answer.json()
    assert (job["frames"], job["steps"]) == (17, 2)
    assert job["deadline_at"] == pytest.approx(time.time() + 90, abs=5)
    assert server.wait_for(job["id"])["status"] == "completed"
    assert list((server.folder / "out/.inputs").iterdir()) == []


def test_a_picture_may_come_inside_json(server):
    url = "data:image/png;base64," + base64.b64encode(LIGHTHOUSE).decode()
    job = made(server, prompt="a lighthouse", input_reference={"image_url": url}, num_inference_steps=1)
    assert server.wait_for(job["id"])["status"] == "completed"


def test_a_large_picture_inside_json_is_taken_and_large_json_without_one_is_not(server):
    picture = io.BytesIO()
    Image.effect_noise((1200, 1200), 100).save(picture, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    assert 2**20 < len(url) < 2**21
    body = json.dumps({"prompt": "noise", "input_reference": url, "num_inference_steps": 1})
    headers = {"Content-Type": "application/json", "Idempotency-Key": "large"}
    answers = [
        server.http.post("/v1/videos", content=content, headers=headers)
        for content in (body, body.replace("/", "\\/"))
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    first, again = (answer.json()["id"] for answer in answers)
    assert first == again
    assert server.wait_for(first)["status"] == "completed"
    error = error_of(server.post("/v1/videos", prompt="x" * 1_500_000), 413)
    assert "1,048,576 bytes without its picture" in error["message"]
    texts = dict.fromkeys(("prompt", "negative_prompt"), "x" * 600000)
    form = server.http.post("/v1/videos", data=texts, files={"input_reference": ("x.png", LIGHTHOUSE)})
    assert "without its picture" in error_of(form, 413)["message"]


@pytest.mark.parametrize("url", ["http://example.com/x.png", "file:///etc/passwd", "/etc/passwd", "x", ""])
def test_no_url_is_followed_and_no_path_opened(server, url):
    error = error_of(server.post("/v1/videos", prompt="a fox", input_reference={"image_url": url}), 400)
    assert error["param"] == "input_reference"
    assert "not followed" in error["message"]
    assert error_of(server.post("/v1/jobs", prompt="a fox", image=url), 400)["param"] == "image"


ELSEWHERE = ["s3://bucket/x.png", "gs://bucket/x.png", "file:///etc/passwd", "/etc/passwd", "../x", "~/x.png"]


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("jobs", lambda place: {"image": place}),
        ("jobs", lambda place: {"image": {"image_url": place}}),
        ("jobs", lambda place: {"image": {"file_id": place}}),
        ("jobs", lambda place: {"files": {"mask_image": place}}),
        ("jobs", lambda place: {"files": {"image": [{"url": place}]}}),
        ("jobs", lambda place: {"lora": [{"path": place}]}),
        ("jobs", lambda place: {"model": place}),
        ("jobs", lambda place: {"output": place}),
        ("videos", lambda place: {"input_reference": place}),
        ("images/generations", lambda place: {"lora": [{"path": place}]}),
        ("images/edits", lambda place: {"image": place}),
        ("images/edits", lambda place: {"images": [{"image_url": place}]}),
        ("images/edits", lambda place: {"images": [{"file_id": place}]}),
        ("images/edits", lambda place: {"image": picture_url(), "mask": {"image_url": place}}),
        ("chat/completions", lambda place: {"messages": [said({"type": "image_url", "image_url": place})]}),
        ("responses", lambda place: {**TOOLS, "input": [said({"type": "input_image", "image_url": place})]}),
        ("responses", lambda place: {**TOOLS, "input": [said({"type": "input_image", "file_id": place})]}),
        ("batches", lambda place: {"input_file_id": place, "endpoint": "/v1/videos"}),
    ],
)
def test_requests_name_no_file_and_no_object_of_a_store(server, path, body, place):
    """Whatever a job file may do: it is its user's, and a request is anybody's."""
    before = server.http.get("/v1/jobs", params={"limit": 1}).json()["first_id"]
    fields = body(place) if path in ("batches", "chat/completions") else {"prompt": "a fox", **body(place)}
    answer = server.post(f"/v1/{path}", **fields)
    assert answer.status_code in (400, 404), answer.text
    assert server.http.get("/v1/jobs", params={"limit": 1}).json()["first_id"] == before


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize(
    "line",
    [
        lambda place: {"image": place},
        lambda place: {"files": {"mask_image": place}},
        lambda place: {"lora": [{"path": place}]},
        lambda place: {"model": place},
    ],
)
def test_job_files_of_requests_name_no_file_and_no_object_of_a_store(server, line, place):
    error_of(batch(server, {"prompt": "x", **line(place)}), 400)


def test_the_server_names_the_files_of_job_files(server):
    accepted = batch(server, {"prompt": "x", "steps": 1, "model": "fake-image", "output": "mine.png"}).json()
    finished(server, accepted["id"])
    (job,) = server.http.get("/v1/jobs", params={"batch_id": accepted["id"]}).json()["data"]
    assert not list((server.folder / "out").rglob("mine*"))
    assert (server.folder / "out" / f"{job['id']}.png").exists()


TOOLS = {"tools": [{"type": "image_generation"}]}


def picture_url():
    return "data:image/png;base64," + base64.b64encode(LIGHTHOUSE).decode()


def said(picture):
    return {"role": "user", "content": [{"type": "text", "text": "a fox"}, picture]}


@pytest.mark.parametrize("model", ["/etc", "../fake-video", "fake-vide", "https://x", "x" * 1000])
def test_only_models_that_are_served_can_be_named(server, model):
    error = error_of(server.post("/v1/videos", prompt="a fox", model=model), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "fake-video, fake-image" in error["message"]


@pytest.mark.parametrize(
    ("values", "param", "words"),
    [
        ({}, "prompt", "prompt: missing"),
        ({"prompt": ""}, "prompt", "1 to 20,000 characters"),
        ({"prompt": "   "}, "prompt", "this one is empty"),
        ({"prompt": "x" * 20_001}, "prompt", "this one has 20,001"),
        ({"prompt": "x", "num_images": 2}, "num_images", "only in job files; send one request for each"),
        ({"prompt": "x", "size": "64"}, "size", 'size = "64": a text like "832x480"'),
        ({"prompt": "x", "size": "9x9"}, "size", "each side from 16"),
        ({"prompt": "x", "num_frames": 0}, "num_frames", "num_frames = 0: a whole number from 1 to 4,093"),
        (
            {"prompt": "x", "num_inference_steps": "many"},
            "num_inference_steps",
            '"many": a whole number from 1',
        ),
        ({"prompt": "x", "seconds": "soon"}, "seconds", 'a number of seconds like "4"'),
        ({"prompt": "x", "seconds": 4, "num_frames": 9}, "seconds", "give one"),
        ({"prompt": "x", "deadline": "tomorrow"}, "deadline", 'a text like "90s"'),
        ({"prompt": "x", "deadline": "-90"}, "deadline", "deadline = -90: seconds after the arrival"),
        ({"prompt": "x", "guidance_scale": 101}, "guidance_scale", "a number from 0 to 100"),
        ({"prompt": "x", "seed": -2}, "seed", "seed = -2: a whole number from -1"),
        ({"prompt": "x", "seed": True}, "seed", "seed = true: a whole number from -1"),
        ({"prompt": "x", "num_outputs_per_prompt": True}, "num_outputs_per_prompt", "true and false are not"),
        ({"prompt": "x", "priority": "1e9"}, "priority", "priority = 1e9: a whole number"),
        ({"prompt": "x\0"}, "prompt", "NUL"),
        ({"prompt": "\ud800"}, "prompt", "unpaired surrogate"),
        ({"prompt": "x", "size": "8192x8192", "num_frames": 4093}, "num_frames", "at most 4,294,967,296"),
    ],
)
def test_what_is_wrong_is_told_with_the_fields_name(server, values, param, words):
    body = json.dumps(values)  # in ASCII: half a surrogate pair survives
    answer = server.http.post("/v1/videos", content=body, headers={"Content-Type": "application/json"})
    error = error_of(answer, 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b'"x"', "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"prompt": NaN}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json"),
        (b"prompt=x", "text/html"),
        (b"prompt=x&prompt=y", "application/x-www-form-urlencoded"),
        (b"prompt=\xff", "application/x-www-form-urlencoded"),
        (b"a=b&" * 100 + b"prompt=x", "application/x-www-form-urlencoded"),
        (b"{", "application/x-www-form-urlencoded"),
        (b"--x\r\nnonsense", "multipart/form-data; boundary=x"),
        (b"x", "multipart/form-data"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n', "multipart/form-data; boundary=x"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/videos", "/v1/images/generations", "/v1/jobs"])
def test_bodies_that_are_no_request_are_refused(server, content, kind, path):
    error_of(server.http.post(path, content=content, headers={"Content-Type": kind}), 400)


def test_a_model_says_what_it_cannot_do(server):
    error = error_of(server.post("/v1/jobs", prompt="a fox", true_cfg_scale=3), 422)
    assert error["param"] == "true_cfg_scale"
    assert "no use for it" in error["message"]
    error = error_of(server.post("/v1/videos", prompt="a fox", model="fake-image"), 422)
    assert "makes pictures" in error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"no picture", "not a picture"), (LIGHTHOUSE[:500], "broken"), (b"", "not a picture")],
)
def test_a_broken_picture_is_refused_and_leaves_nothing(server, content, words):
    answer = server.http.post(
        "/v1/videos", data={"prompt": "x"}, files={"input_reference": ("x.png", content)}
    )
    error = error_of(answer, 422)
    assert (error["param"], error["code"]) == ("input_reference", "invalid_image")
    assert words in error["message"]
    assert list((server.folder / "out/.inputs").iterdir()) == []


def test_a_decompression_bomb_is_refused(server):
    bomb = io.BytesIO()
    Image.new("1", (9000, 9000)).save(bomb, format="PNG")
    assert len(bomb.getvalue()) < 20_000
    files = {"input_reference": ("x.png", bomb.getvalue())}
    answer = server.http.post("/v1/videos", data={"prompt": "x"}, files=files)
    assert "pixels" in error_of(answer, 422)["message"]


def test_a_request_that_is_too_large_is_refused_before_it_is_read(server):
    answer = server.http.post("/v1/videos", content=b" " * (2**21 + 1))
    assert "2,097,152 bytes" in error_of(answer, 413)["message"]

    def pieces():
        for _ in range(40):
            yield b" " * 2**16

    error_of(server.http.post("/v1/videos", content=pieces()), 413)


def test_videos_are_listed_page_by_page(server):
    ids = [made(server, prompt=f"number {number}", num_inference_steps=1)["id"] for number in range(5)]
    first = server.http.get("/v1/videos", params={"limit": 2}).json()
    assert [job["id"] for job in first["data"]] == ids[:-3:-1]
    assert (first["object"], first["has_more"], first["last_id"]) == ("list", True, ids[3])
    second = server.http.get("/v1/videos", params={"limit": 2, "after": ids[3]}).json()
    assert [job["id"] for job in second["data"]] == [ids[2], ids[1]]
    after = server.http.get("/v1/videos", params={"after": ids[2], "order": "asc"}).json()
    assert [job["id"] for job in after["data"]] == ids[3:]
    assert not after["has_more"]
    for job_id in ids:
        server.wait_for(job_id)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=video_0"])
def test_a_list_that_cannot_be_given_is_refused(server, query):
    error = error_of(server.http.get(f"/v1/videos?{query}"), 400)
    assert error["param"] == query.partition("=")[0]


@pytest.mark.parametrize("path", ["/v1/videos/x", "/v1/videos/x/content", "/v1/jobs/x/events", "/v1/nothing"])
def test_what_is_not_there_is_not_found(server, path):
    error_of(server.http.get(path), 404)


@pytest.mark.parametrize("name", ["..%2f..%2fjobs.sqlite3", "%2e%2e", "jobs.sqlite3", "..\\x", "a%00b"])
def test_no_path_of_a_request_reaches_the_file_system(server, name):
    for path in (
        "/v1/jobs/{}/content",
        "/v1/videos/{}",
        "/page/{}",
        "/v1/models/{}",
        "/v1/batches/{}/manifest",
    ):
        assert server.http.get(path.format(name)).status_code in (400, 404)


def test_a_picture_is_no_video(server):
    job = made(server, "/v1/jobs", prompt="a fox", model="fake-image", steps=1)
    error_of(server.http.get(f"/v1/videos/{job['id']}"), 404)
    assert job["id"] not in server.http.get("/v1/videos", params={"limit": 100}).text
    assert server.wait_for(job["id"])["object"] == "image"


# Files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def video(server):
    return server.wait_for(made(server, prompt="a fox", num_inference_steps=1)["id"])


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [("bytes=0-9", 0, 10), ("bytes=100-", 100, None), ("bytes=-7", -7, None), ("bytes=5-999999", 5, None)],
)
def test_a_part_of_a_file_can_be_had(server, video, asked, start, stop):
    answer = server.http.get(video["content_url"], headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, MOVIE[start:stop])
    first, _, size = answer.headers["content-range"].removeprefix("bytes ").partition("/")
    assert size == str(len(MOVIE))
    assert MOVIE[int(first.split("-")[0])] == answer.content[0]


@pytest.mark.parametrize("asked", ["bytes=9-2", "bytes=-", "lines=0-9", "bytes=0-1,5-6", "nonsense"])
def test_a_range_that_is_none_gets_the_whole_file(server, video, asked):
    answer = server.http.get(video["content_url"], headers={"Range": asked})
    assert (answer.status_code, answer.content) == (200, MOVIE)


def test_a_range_behind_the_end_is_refused_with_the_size(server, video):
    answer = server.http.get(video["content_url"], headers={"Range": f"bytes={len(MOVIE)}-"})
    error_of(answer, 416)
    assert answer.headers["content-range"] == f"bytes */{len(MOVIE)}"


def test_a_file_that_is_known_already_is_not_sent_again(server, video):
    tag = server.http.get(video["content_url"]).headers["etag"]
    assert server.http.get(video["content_url"], headers={"If-None-Match": tag}).status_code == 304
    headers = {"Range": "bytes=0-9", "If-Range": '"another"'}
    assert server.http.get(video["content_url"], headers=headers).content == MOVIE
    assert server.http.head(video["content_url"]).headers["content-length"] == str(len(MOVIE))


def test_a_picture_comes_in_other_formats_and_small(server):
    job = server.wait_for(made(server, "/v1/jobs", prompt="a fox", model="fake-image", steps=1)["id"])
    for kind in ("png", "jpeg", "webp"):
        content = server.http.get(f"{job['content_url']}?format={kind}").content
        with Image.open(io.BytesIO(content)) as picture:
            assert (picture.format, picture.size) == (kind.upper(), (SIDE, SIDE))
    for _ in range(2):  # made, and kept
        small = server.http.get(job["thumbnail_url"])
        with Image.open(io.BytesIO(small.content)) as picture:
            assert (small.headers["content-type"], picture.format) == ("image/webp", "WEBP")


def test_what_a_file_does_not_have_is_told(server, video, slow):
    error_of(server.http.get(f"{video['content_url']}?variant=spritesheet"), 400)
    error_of(server.http.get(f"{video['content_url']}?variant=image"), 400)
    assert error_of(server.http.get(f"/v1/videos/{slow['id']}/content"), 409)["code"] == "not_done"
    broken = server.wait_for(made(server, prompt="x", num_inference_steps=1)["id"])
    (server.folder / "out" / f"{broken['id']}.mp4").write_bytes(b"no video")
    assert error_of(server.http.get(broken["thumbnail_url"]), 404)["code"] == "no_thumbnail"
    server.http.delete(f"/v1/videos/{broken['id']}")


def test_a_video_has_a_thumbnail(server, video):
    small = server.http.get(video["thumbnail_url"])
    with Image.open(io.BytesIO(small.content)) as picture:
        assert (picture.format, picture.size) == ("WEBP", (32, 32))


# Cancelling and removing ----------------------------------------------------------------------------


def test_a_running_video_is_cancelled_within_a_step_and_stays_as_cancelled(server, slow):
    for _ in range(2):  # a repeated request removes nothing
        answer = server.http.delete(f"/v1/videos/{slow['id']}").json()
        kept = {"object": "video.deleted", "deleted": False, "status": "cancelled"}
        assert answer == {"id": slow["id"]} | kept
    job = server.job(slow["id"])
    assert (job["status"], job["error"]["code"]) == ("cancelled", "cancelled")
    assert 0 <= job["progress"] < 100
    deadline_s = time.monotonic() + 5
    while any(rank["task"] for rank in server.http.get("/v1/state").json()["ranks"]):
        assert time.monotonic() < deadline_s, "its ranks are not free"
        time.sleep(0.01)
    assert error_of(server.http.get(f"/v1/videos/{slow['id']}/content"), 409)["code"] == "cancelled"


def test_a_waiting_job_starts_earlier_with_a_higher_priority(server):
    jobs = [made(server, prompt="slowly", **SLOW) for _ in range(4)]
    last = jobs[-1]["id"]
    assert server.post(f"/v1/jobs/{last}", priority=9).json()["priority"] == 9
    deadline_s = time.monotonic() + 10
    while server.job(last)["position"] not in (None, 1):
        assert time.monotonic() < deadline_s, server.job(last)
        time.sleep(0.05)
    assert error_of(server.post(f"/v1/jobs/{last}", priority="high"), 400)["param"] == "priority"
    for job in reversed(jobs):
        server.http.post(f"/v1/jobs/{job['id']}/cancel")
    error_of(server.post(f"/v1/jobs/{last}", priority=1), 409)


def test_a_queued_video_is_cancelled_at_once(server):
    jobs = [made(server, prompt="slowly", **SLOW) for _ in range(5)]
    last = jobs[-1]
    assert server.job(last["id"])["status"] == "queued"
    for job in reversed(jobs):
        assert server.http.delete(f"/v1/videos/{job['id']}").json()["status"] == "cancelled"
    assert server.job(last["id"])["step"] == 0


@pytest.mark.parametrize("path", ["jobs", "videos"])
def test_a_cancel_is_final_for_every_client_and_may_be_repeated(server, path):
    """OpenAI's clients, vLLM-Omni's and SGLang's stop polling at `completed` and `failed` only."""
    job = made(server, prompt="slowly", **SLOW)
    told = {"jobs": "cancelled", "videos": "failed"}[path]
    for _ in range(2):
        answer = server.http.post(f"/v1/{path}/{job['id']}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, told)
    assert server.job(job["id"])["status"] == "cancelled"
    video = server.http.get(f"/v1/videos/{job['id']}").json()
    assert (video["status"], video["error"]["code"]) == ("failed", "cancelled")
    listed = {each["id"]: each["status"] for each in server.http.get("/v1/videos").json()["data"]}
    assert listed[job["id"]] == "failed"
    assert server.http.delete(f"/v1/jobs/{job['id']}?purge=true").json()["deleted"] is True
    error_of(server.http.get(f"/v1/jobs/{job['id']}"), 404)
    error_of(server.http.post(f"/v1/{path}/{job['id']}/cancel"), 404)


def test_a_late_cancel_keeps_the_finished_file(server):
    job = server.wait_for(made(server, prompt="a fox", num_inference_steps=1)["id"])
    assert server.http.post(f"/v1/videos/{job['id']}/cancel").json()["status"] == "completed"
    assert server.http.get(f"/v1/videos/{job['id']}/content").content == MOVIE


def test_what_has_ended_is_removed_with_its_file(server):
    job = server.wait_for(made(server, prompt="a fox", num_inference_steps=1)["id"])
    file = server.folder / "out" / f"{job['id']}.mp4"
    assert file.exists()
    answer = server.http.delete(f"/v1/videos/{job['id']}").json()
    assert answer == {"id": job["id"], "object": "video.deleted", "deleted": True, "status": "completed"}
    assert not file.exists()
    error_of(server.http.get(f"/v1/videos/{job['id']}"), 404)
    error_of(server.http.delete(f"/v1/videos/{job['id']}"), 404)


def test_a_job_that_fails_says_why(server):
    job = server.wait_for(made(server, prompt="x", guidance_scale=13, num_inference_steps=2)["id"])
    assert job["status"] == "failed"
    assert job["error"]["code"] == "generation_failed"
    assert "an unlucky number in step" in job["error"]["message"], "where the server is, is not for clients"
    assert f"an unlucky number in {server.folder}/step" in server.log
    assert "unlucky" in error_of(server.http.get(f"/v1/videos/{job['id']}/content"), 409)["message"]


def test_a_job_that_takes_longer_than_its_timeout_fails(server):
    job = made(server, "/v1/jobs", prompt="slowly", flow_shift=0.05, steps=1000, timeout="0.3s")
    assert server.wait_for(job["id"])["error"]["code"] == "timed_out"


# Waiting for the result -----------------------------------------------------------------------------


def test_a_client_that_leaves_during_its_request_leaves_no_traceback(server):
    def num_left():
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if "_count{" in line and 'status="499"' in line)

    num_before = num_left()
    for path in ("/v1/videos", "/v1/batches", "/v1/policy"):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            raw.sendall(f"{head}Content-Length: 9999\r\n\r\n{{".encode())
    deadline_s = time.monotonic() + 10
    while num_left() < num_before + 3:
        assert time.monotonic() < deadline_s
    assert "Traceback" not in server.log


def test_a_video_can_be_waited_for(server):
    answer = server.post("/v1/videos/sync", prompt="a fox", num_inference_steps=2)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
    assert answer.content == MOVIE
    assert server.job(answer.headers["x-job-id"])["status"] == "completed"


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_pictures_come_as_their_bytes(server, kind):
    values = {"prompt": "a fox", "n": 2, "output_format": kind, "num_inference_steps": 1, "seed": 5}
    answer = server.post("/v1/images/generations", **values).json()
    assert (answer["output_format"], answer["size"]) == (kind, "64x64")
    assert [image["seed"] for image in answer["data"]] == [5, 6]
    for image in answer["data"]:
        with Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) as picture:
            assert picture.format == kind.upper()


def test_pictures_come_as_addresses(server):
    values = {"prompt": "a fox", "response_format": "url", "num_inference_steps": 1, "size": "auto"}
    (image,) = server.post("/v1/images/generations", **values).json()["data"]
    assert image["url"].startswith(f"{server.url}/v1/jobs/image_")
    assert server.http.get(image["url"]).headers["content-type"] == "image/png"
    assert image["b64_json"] is None


def test_pictures_without_a_response_format_come_in_both(server):
    """OpenAI's older models send URLs and its newer ones base64; clients of each look in one place only."""
    values = {"prompt": "a fox", "num_inference_steps": 1}
    (image,) = server.post("/v1/images/generations", **values).json()["data"]
    assert server.http.get(image["url"]).content == base64.b64decode(image["b64_json"])
    (image,) = server.post("/v1/images/generations", **values, response_format="b64_json").json()["data"]
    assert (image["url"], len(image["b64_json"]) > 0) == (None, True)


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_output_compression_is_the_quality_of_a_file(server, kind):
    values = {"prompt": "a fox", "seed": 4, "num_inference_steps": 1, "output_format": kind}
    sizes = []
    for quality in (0, 50, 100):
        answer = server.post("/v1/images/generations", **values, output_compression=quality).json()
        (image,) = answer["data"]
        content = base64.b64decode(image["b64_json"])
        assert server.http.get(image["url"]).content == content
        sizes.append(len(content))
    assert sizes == sorted(set(sizes))
    chat = {"messages": [{"role": "user", "content": "a fox"}], "model": "fake-image", "output_format": kind}
    answer = server.post("/v1/chat/completions", **chat, seed=4, num_inference_steps=1, output_compression=0)
    url = answer.json()["choices"][0]["message"]["images"][0]["image_url"]["url"]
    assert len(base64.b64decode(url.partition("base64,")[2])) < sizes[2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"output_compression": 80}, "less than 100 is for output_format jpeg or webp only"),
        ({"output_compression": 101, "output_format": "jpeg"}, "less than or equal to 100"),
        ({"output_compression": -1, "output_format": "webp"}, "greater than or equal to 0"),
    ],
)
def test_output_compression_that_cannot_act_is_refused_as_by_openai(server, values, words):
    error = error_of(server.post("/v1/images/generations", prompt="a fox", **values), 400)
    assert (error["param"], words in error["message"]) == ("output_compression", True)


def test_fields_of_openais_api_that_mean_nothing_here_are_accepted(server):
    told = re.search(r"no meaning here \(([^)]*)\)", (ROOT / "docs/serving.md").read_text())
    unused = dict.fromkeys(re.findall(r"`(\w+)`", told[1]), "standard")
    assert "quality" in unused
    answer = server.post("/v1/images/generations", prompt="a fox", num_inference_steps=1, **unused)
    assert answer.status_code == 200, answer.text


def test_a_video_model_makes_pictures_of_one_frame(server):
    values = {"prompt": "a fox", "model": "fake-video", "num_inference_steps": 1}
    (image,) = server.post("/v1/images/generations", **values).json()["data"]
    assert server.job(image["id"])["object"] == "image"


def test_a_picture_that_fails_is_an_error_with_its_reason(server):
    values = {"prompt": "x", "guidance_scale": 13, "num_inference_steps": 1}
    assert "an unlucky number" in error_of(server.post("/v1/images/generations", **values), 500)["message"]


def test_who_goes_away_cancels_what_was_waited_for(server):
    with pytest.raises(Exception, match="timed out"):
        server.http.post("/v1/videos/sync", json={"prompt": "gone", **SLOW}, timeout=0.5)
    (job,) = (j for j in server.http.get("/v1/videos").json()["data"] if j["prompt"] == "gone")
    assert server.wait_for(job["id"])["status"] == "cancelled"


def test_nothing_of_an_answer_is_sent_before_its_status_is_known(server):
    """A proxy that has passed on a status cannot try again."""
    body = json.dumps({"prompt": "waited for", **SLOW}).encode()
    head = f"POST /v1/videos/sync HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as end:
        end.sendall(head.encode() + body)
        deadline_s, found = time.monotonic() + 30, []
        while not found:
            assert time.monotonic() < deadline_s
            listed = server.http.get("/v1/videos").json()["data"]
            found = [job for job in listed if job["prompt"] == "waited for" and job["step"] > 1]
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(1)
        end.settimeout(30)
        server.http.delete(f"/v1/videos/{found[0]['id']}")
        assert end.recv(20).startswith(b"HTTP/1.1 409 ")


# Idempotency ----------------------------------------------------------------------------------------


def test_a_request_that_comes_again_makes_no_second_job(server):
    headers = {"Idempotency-Key": "a key of mine"}
    body = {"prompt": "once", "num_inference_steps": 1}
    first = server.http.post("/v1/videos", json=body, headers=headers).json()
    again = server.http.post("/v1/videos", json=body, headers=headers).json()
    assert again["id"] == first["id"]
    other = server.http.post("/v1/videos", json=body | {"seed": 1}, headers=headers)
    assert error_of(other, 422)["code"] == "idempotency_key_reused"
    elsewhere = server.http.post("/v1/jobs", json={"prompt": "once", "steps": 1}, headers=headers).json()
    assert elsewhere["id"] != first["id"]
    server.wait_for(first["id"])
    done = server.http.post("/v1/videos", json=body, headers=headers).json()
    assert (done["id"], done["status"]) == (first["id"], "completed")


def test_pictures_of_a_request_that_comes_again_are_those_of_the_first(server):
    headers = {"Idempotency-Key": "pictures"}
    body = {"prompt": "once", "n": 2, "num_inference_steps": 1}
    first, again = (
        server.http.post("/v1/images/generations", json=body, headers=headers).json() for _ in range(2)
    )
    assert first == again


def test_a_waiting_request_with_a_key_goes_on_when_its_client_has_gone(server):
    headers = {"Idempotency-Key": "patience"}
    body = {"prompt": "patience", "flow_shift": 0.02, "num_inference_steps": 40}
    with pytest.raises(Exception, match="timed out"):
        server.http.post("/v1/videos/sync", json=body, headers=headers, timeout=0.2)
    answer = server.http.post("/v1/videos/sync", json=body, headers=headers)
    assert answer.content == MOVIE
    assert len([j for j in server.http.get("/v1/videos").json()["data"] if j["prompt"] == "patience"]) == 1


# Deadlines and predictions --------------------------------------------------------------------------


def predicted(server, job):
    """The job, once it is predicted when it will be done."""
    deadline_s = time.monotonic() + 10
    while (found := server.job(job["id"]))["predicted_completion_at"] is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return found


def test_a_status_says_when_it_will_be_done_and_whether_in_time(server, slow):
    moment = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
    jobs = [made(server, prompt="x", deadline=deadline, **SLOW) for deadline in (1, "1h", moment)]
    try:
        assert jobs[2]["deadline_at"] == pytest.approx(time.time() + 7200, abs=5)
        assert jobs[2]["position"] >= 1
        found = [predicted(server, job) for job in jobs]
        assert [job["will_meet_deadline"] for job in found] == [False, True, True]
        assert predicted(server, slow)["predicted_completion_at"] > time.time()
        waiting = [job for job in found if job["status"] == "queued"]  # the policy may begin any of them
        assert all(job["position"] >= 1 for job in waiting)
        assert all(job["predicted_start_at"] < job["predicted_completion_at"] for job in waiting)
    finally:
        for job in jobs:
            server.http.delete(f"/v1/videos/{job['id']}")


# Batches --------------------------------------------------------------------------------------------


def batch(server, *lines, **params):
    content = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    headers = {"Content-Type": "application/jsonl"}
    return server.http.post("/v1/batches", content=content.encode(), headers=headers, params=params)


def finished(server, batch_id):
    deadline_s = time.monotonic() + 30
    while (found := server.http.get(f"/v1/batches/{batch_id}").json())["status"] == "in_progress":
        assert time.monotonic() < deadline_s, found
        time.sleep(0.02)
    return found


def test_a_job_file_is_run_and_tells_of_each_line(server):
    lines = [
        {"id": "fox", "prompt": "a red fox", "model": "fake-image", "steps": 1, "output": "my-fox.png"},
        {"prompt": "the sea", "steps": 2, "tag": "S", "deadline": "5m"},
        {"id": "bad", "prompt": "x", "guidance_scale": 13, "steps": 1},
    ]
    accepted = batch(server, "# a comment\n", *lines).json()
    assert accepted["request_counts"]["total"] == 3
    done = finished(server, accepted["id"])
    assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1, "cancelled": 0}
    assert (done["status"], done["num_late"]) == ("completed", 0)
    entries = [json.loads(line) for line in server.http.get(done["manifest_url"]).text.splitlines()]
    assert [entry["id"].partition("-")[0] for entry in entries] == ["fox", "the", "bad"]
    assert [entry["status"] for entry in entries] == ["done", "done", "failed"]
    assert entries[1]["tag"] == "S"
    assert entries[1]["met_deadline"] is True
    assert server.http.get(entries[0]["file"]).headers["content-type"] == "image/png"
    jobs = server.http.get("/v1/jobs", params={"batch_id": done["id"], "order": "asc"}).json()["data"]
    assert [job["id"] for job in jobs] == [entry["job"] for entry in entries]
    assert not (server.folder / "out/my-fox.png").exists()
    assert done in server.http.get("/v1/batches").json()["data"]


def test_seeds_of_a_batch_are_those_that_the_command_line_would_take(server):
    from one_job import parse_job

    from gfgen.job.spec import default_seed

    spec, _ = parse_job({"prompt": "the sea", "steps": 1})
    accepted = batch(server, {"prompt": "the sea", "steps": 1}).json()
    finished(server, accepted["id"])
    (job,) = server.http.get("/v1/jobs", params={"batch_id": accepted["id"]}).json()["data"]
    assert (job["custom_id"], job["seed"]) == (spec.id, default_seed(spec.id))


def test_random_seeds_of_pictures_are_drawn_one_by_one(server):
    values = {"prompt": "a fox", "n": 2, "size": "64x64", "num_inference_steps": 1, "seed": -1}
    answer = server.http.post("/v1/images/generations", json=values).json()
    assert len({image["b64_json"] for image in answer["data"]}) == 2
    assert min(image["seed"] for image in answer["data"]) > 0


def test_a_random_seed_is_drawn_when_a_job_is_accepted(server):
    accepted = batch(server, {"prompt": "the sea", "steps": 1, "seed": -1, "num_images": 2}).json()
    finished(server, accepted["id"])
    jobs = server.http.get("/v1/jobs", params={"batch_id": accepted["id"]}).json()["data"]
    seeds = {job["seed"] for job in jobs}
    assert len(seeds) == 2
    assert min(seeds) > 0


def test_a_faulty_job_file_is_refused_with_the_messages_of_the_command_line(server):
    lines = (
        {"prompt": "fine"},
        {"stpes": 3, "prompt": "x"},
        {"prompt": "y", "image": "/etc/passwd"},
        "nonsense",
    )
    error = error_of(batch(server, *lines), 400)
    assert error["code"] == "invalid_job_file"
    assert "3 problems; nothing was started" in error["message"]
    assert "line 2: stpes: not a field; did you mean steps?" in error["message"]
    assert "line 3: image" in error["message"]
    assert "not accepted over HTTP" in error["message"]
    assert "line 4" in error["message"]
    refused = error_of(batch(server, {"prompt": "x", "model": "/etc"}), 400)
    assert "not served here" in refused["message"]
    beyond = error_of(batch(server, {"prompt": "x", "true_cfg_scale": 3}), 400)
    assert "line 1: true_cfg_scale" in beyond["message"]


def test_the_valid_jobs_of_a_faulty_file_are_run_if_that_is_wanted(server):
    lines = (
        {"prompt": "beyond the model", "true_cfg_scale": 3},
        {"id": "fine", "prompt": "fine", "steps": 1},
        {"stpes": 3},
        {"prompt": "elsewhere", "model": "other"},
    )
    accepted = batch(server, *lines, skip_invalid=True).json()
    done = finished(server, accepted["id"])
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0, "cancelled": 0}
    starts = ["line 1: true_cfg_scale = 3: ", "line 3: stpes: not a field", "line 4: model = other: "]
    assert len(accepted["skipped"]) == 4  # line 3 has no prompt either
    assert all(any(told.startswith(start) for told in accepted["skipped"]) for start in starts)
    assert done["skipped"] is None
    (job,) = server.http.get("/v1/jobs", params={"batch_id": done["id"]}).json()["data"]
    assert job["custom_id"] == "fine"


def test_a_file_of_which_no_line_is_left_is_refused_with_all_that_is_wrong(server):
    lines = ({"prompt": "beyond the model", "true_cfg_scale": 3}, {"stpes": 3, "prompt": "x"})
    error = error_of(batch(server, *lines, skip_invalid=True), 400)
    assert "2 problems; nothing was started" in error["message"]
    assert batch(server, {"prompt": "fine", "steps": 1}).json()["skipped"] == []


def test_a_batch_comes_as_a_file_of_a_form_too_and_only_once(server):
    headers = {"Idempotency-Key": "batch"}
    files = {"file": ("jobs.jsonl", b'{"prompt": "once", "steps": 1}\n')}
    first, again = (server.http.post("/v1/batches", files=files, headers=headers).json() for _ in range(2))
    assert first["id"] == again["id"]
    finished(server, first["id"])


def test_a_batch_is_cancelled_as_a_whole(server):
    lines = [{"id": f"j{n}", "prompt": "slowly", "flow_shift": 0.05, "steps": 1000} for n in range(6)]
    accepted = batch(server, *lines).json()
    cancelled = server.http.post(f"/v1/batches/{accepted['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["request_counts"]["cancelled"] == 6


@pytest.mark.parametrize(
    ("path", "kind", "content"),
    [
        ("jobs", "application/json", b'[{"prompt": "a fox", "steps": 1}, {"prompt": "an owl", "steps": 1}]'),
        ("jobs", "application/json", b'{"prompt": "{a fox|an owl}", "steps": 1, "vary": true}'),
        (
            "jobs",
            "application/jsonl",
            b'{"defaults": {"steps": 1}}\n{"prompt": "a fox"}\n{"prompt": "an owl"}',
        ),
        ("batches", "text/csv", b"prompt,steps\na fox,1\nan owl,1\n"),
        ("batches", "text/plain; charset=utf-8", b"a fox\nan owl\n"),
    ],
)
def test_several_jobs_of_any_kind_of_file_are_a_batch(server, path, kind, content):
    accepted = server.http.post(f"/v1/{path}", content=content, headers={"Content-Type": kind}).json()
    assert (accepted["object"], accepted["request_counts"]["total"]) == ("batch", 2)
    server.http.post(f"/v1/batches/{accepted['id']}/cancel")
    jobs = server.http.get("/v1/jobs", params={"batch_id": accepted["id"], "order": "asc"}).json()["data"]
    assert [job["prompt"] for job in jobs] == ["a fox", "an owl"]


def test_a_job_that_varies_has_no_files_and_not_more_jobs_than_may_be_open(server):
    many = server.post("/v1/jobs", prompt="a fox", num_images=100_000)
    assert "jobs; split it here" in error_of(many, 400)["message"]
    form = {"data": {"prompt": "a fox", "num_images": "2"}, "files": {"image": ("x.png", b"x")}}
    assert "send one request for each" in error_of(server.http.post("/v1/jobs", **form), 400)["message"]


def test_an_empty_batch_is_refused(server):
    assert "no jobs in" in error_of(batch(server, "# nothing\n"), 400)["message"]
    error_of(server.http.get("/v1/batches/batch_0"), 404)
    error_of(server.http.post("/v1/batches/batch_0/cancel"), 404)


# The server -----------------------------------------------------------------------------------------


def test_models_are_listed_with_what_they_make(server):
    video, image, edit = server.http.get("/v1/models").json()["data"]
    assert (video["id"], video["kind"], video["takes_image"]) == ("fake-video", "video", "yes")
    assert video["defaults"]["frames"] == 9
    assert (image["id"], image["kind"], image["takes_image"]) == ("fake-image", "image", "no")
    assert (edit["takes_image"], edit["takes_several"], edit["mask_argument"]) == (
        "yes",
        True,
        "mask_image",
    )
    assert video["mask_argument"] is image["mask_argument"] is None
    assert server.http.get("/v1/models/fake-image").json() == image
    error_of(server.http.get("/v1/models/other"), 404)


def test_the_policy_is_changed_while_the_server_runs(server):
    assert server.http.get("/v1/policy").json()["policy"] == "srtf"
    try:
        for policy in ("edf", "fcfs,degree=2", "auto"):
            assert server.post("/v1/policy", policy=policy).json()["policy"] == policy
            deadline_s = time.monotonic() + 5
            while server.http.get("/v1/policy").json()["deciding"] == "srtf":
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            job = made(server, prompt="a fox", num_inference_steps=2)
            assert server.wait_for(job["id"])["status"] == "completed"
    finally:
        server.post("/v1/policy", policy="srtf")


@pytest.mark.parametrize(
    "policy", ["x", "os:system", "docs/examples/shortest_first.py", "edf,x=1", "srtf,degree=9"]
)
def test_only_built_in_policies_can_be_asked_for(server, policy):
    assert error_of(server.post("/v1/policy", policy=policy), 400)["param"] == "policy"


def test_prometheus_reads_what_has_happened(server):
    job = made(server, "/v1/jobs", prompt="a fox", model="fake-image", steps=3, tag="counted", deadline="1h")
    server.wait_for(job["id"])
    text = server.http.get("/metrics").text
    labels = 'class="counted",model="fake-image"'
    assert f'gfgen_jobs_ended_total{{{labels},status="completed"}} 1.0' in text
    assert 'gfgen_deadlines_total{class="counted",met="true",model="fake-image"} 1.0' in text
    assert f"gfgen_queue_seconds_count{{{labels}}} 1.0" in text
    assert 'gfgen_http_request_seconds_count{method="POST",route="/v1/jobs",status="200"}' in text
    server.http.get("/v1/nothing/of/mine")
    assert "mine" not in server.http.get("/metrics").text
    assert 'gfgen_task_seconds_count{model="fake-image",ranks="1",stage="denoise"}' in text
    for name in ("gfgen_rank_utilisation", "gfgen_rank_busy_seconds_total", "gfgen_ready", "gfgen_rank_up"):
        assert name in text
    assert "_created" not in text


def test_health_needs_nothing_and_other_methods_are_refused(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready", "ranks": 2}
    refused = server.http.put("/v1/videos")
    error_of(refused, 405)
    assert refused.headers["allow"] == "GET, HEAD, POST"
    assert server.http.put("/v1/jobs/x").headers["allow"] == "DELETE, GET, HEAD, POST"
    error_of(server.http.post("/v1/videos/video_1/remix"), 404)


def test_a_path_that_is_not_there_names_the_nearest(server):
    for path, hint in {
        "/images/generations": "; did you mean /v1/images/generations?",
        "/v1/v1/images/generations": "; did you mean /v1/images/generations?",
        "/v1/image/generations": "; did you mean /v1/images/generations?",
        "/sdapi/v1/txt2img": "; did you mean /sdapi/v1/txt2img with gfgen serve --a1111?",
        "/nothing": "",
    }.items():
        assert error_of(server.http.post(path), 404)["message"] == f"there is no such path{hint}"


def test_slashes_too_many_are_none(server):
    for path in ("/health/", "//v1/models", "/v1//models/", "/v1/models//fake-video"):
        assert server.http.get(f"{server.url}{path}").status_code == 200


def test_head_is_answered_as_get_without_a_body(server):
    """`wget --spider` and `curl -I` ask so."""
    job = server.wait_for(server.post("/v1/jobs", prompt="a fox", steps=1).json()["id"])
    paths = ("/", "/page/page.js", "/health", "/ready", "/metrics", "/openapi.json", "/v1/models")
    streams = ("/v1/state/events", f"/v1/jobs/{job['id']}/events")
    for path in (*paths, *streams, f"/v1/jobs/{job['id']}", job["content_url"], job["thumbnail_url"]):
        answer = server.http.head(path)
        assert (path, answer.status_code, answer.content) == (path, 200, b"")
        if path not in (*streams, "/metrics"):
            whole = server.http.get(path).headers
            assert [answer.headers[n] for n in ("content-type", "content-length")] == [
                whole[n] for n in ("content-type", "content-length")
            ]
    assert server.http.head("/v1/jobs/none").status_code == 404
    deadline_s = time.monotonic() + 30
    while server.http.get("/v1/state").json()["streams"]:
        assert time.monotonic() < deadline_s


def test_pages_of_other_sites_may_not_ask(server):
    body = {"prompt": "x"}
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        error_of(server.http.post("/v1/videos", json=body, headers=headers), 403)
    for host in (
        "evil.example",
        "127.evil.example",
        "127.0.0.1.evil.example:80",
        "localhost.evil.example",
        "",
    ):
        told = error_of(server.http.get("/v1/jobs", headers={"Host": host}), 400)
        assert told["message"] == f"Host {host}: not this server; name it by --public-url, or set a key"
    for host in ("127.0.0.1:80", "[::1]:3000", "localhost", "LocalHost", "a.localhost:1"):
        assert server.http.get("/v1/jobs", headers={"Host": host}).status_code == 200
    with socket.create_connection(("127.0.0.1", server.http.base_url.port)) as check:
        check.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # as load balancers do
        assert check.recv(99).startswith(b"HTTP/1.1 200")
    packed = server.http.post("/v1/videos", content=b"", headers={"Content-Encoding": "gzip"})
    assert "Content-Encoding gzip" in error_of(packed, 400)["message"]
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    job = server.http.post("/v1/videos", json=body | {"num_inference_steps": 1}, headers=own)
    assert job.status_code == 200
    assert server.http.get("/health", headers={"Host": "localhost:1"}).status_code == 200


# gfgen status, cancel and submit --------------------------------------------------------------------


def test_the_command_line_submits_to_a_server_and_cancels_there(server, tmp_path):
    target = find_target(server.url, key=None)
    Image.new("RGB", (16, 16)).save(tmp_path / "star.png")
    slow = {"flow_shift": 0.05, "steps": 1000}
    lines = [
        {"id": "far-1", "prompt": "a", **slow},
        {"id": "far-2", "prompt": "b", "image": "star.png", **slow},
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    submitted = target.submit(JobSource(files=(str(tmp_path / "jobs.jsonl"),)))
    batch, single = submitted.answer
    assert (submitted.num_jobs, batch["object"], single["status"]) == (2, "batch", "queued")
    status = target.status()
    assert {"far-1", None} <= {row["name"] for row in status.jobs}
    assert (status.kind, status.state) == ("server", "ready")
    found = target.cancel(["far-*", single["id"], "never"])
    assert (found.num_cancelled, found.unmatched) == (2, ["never"])
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a", "model": "other"}')
    with pytest.raises(InputError, match="other: not served here"):
        target.submit(JobSource(files=(str(tmp_path / "jobs.jsonl"),)))


# What the page is built on ---------------------------------------------------------------------------


def test_a_favourite_is_kept_in_lists_and_in_the_live_state(server, picture):
    path = f"/v1/jobs/{picture}/favourite"
    assert server.http.put(path).json()["favourite"] is True
    assert server.http.put(path).json()["favourite"] is True
    listed = server.http.get("/v1/jobs", params={"favourite": True, "ended": True}).json()["data"]
    assert picture in [job["id"] for job in listed]
    assert all(job["favourite"] for job in listed)
    assert server.http.put(path, params={"value": False}).json()["favourite"] is False
    assert error_of(server.http.put("/v1/jobs/none/favourite"), 404)["code"] == "job_not_found"


def test_files_of_several_jobs_come_as_one_archive(server, picture):
    other = made(server, "/v1/jobs", prompt="another", model="fake-image")["id"]
    server.wait_for(other)
    answer = server.http.get("/v1/jobs/archive", params={"ids": f"{picture},{other},{picture}"})
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [f"{picture}.png", f"{other}.png"]
        own = server.http.get(f"/v1/jobs/{picture}/content").content
        assert archive.read(f"{picture}.png") == own
    assert error_of(server.http.get("/v1/jobs/archive", params={"ids": f"{picture},none"}), 404)


def test_a_jobs_line_makes_the_same_job_again(server):
    asked = {"prompt": "a fox", "model": "fake-image", "steps": 3, "tag": "S"}
    first = made(server, "/v1/jobs", **asked, size="64x32", deadline="90s")
    line = server.http.get(f"/v1/jobs/{first['id']}/line").json()
    assert line == asked | {"width": 64, "height": 32, "seed": first["seed"], "priority": 0}
    second = made(server, "/v1/jobs", **line)
    same = ("prompt", "model", "size", "steps", "seed", "tag")
    assert [second[name] for name in same] == [first[name] for name in same]


def test_a_jobs_line_says_that_it_had_a_picture(server):
    form = {"prompt": "the light turns", "model": "fake-video"}
    answer = server.http.post("/v1/jobs", data=form, files={"image": ("a.png", LIGHTHOUSE)})
    line = server.http.get(f"/v1/jobs/{answer.json()['id']}/line").json()
    assert (line["prompt"], line["image"]) == ("the light turns", "image.png")


def test_the_line_of_a_picture_of_a_video_model_makes_a_picture(server):
    asked = {"prompt": "a fox", "model": "fake-video", "frames": 1}
    first = made(server, "/v1/jobs", **asked)
    line = server.http.get(f"/v1/jobs/{first['id']}/line").json()
    assert (first["object"], line["frames"]) == ("image", 1)
    assert made(server, "/v1/jobs", **line)["object"] == "image"


def test_a_jobs_line_has_the_name_of_its_recipe(server):
    own = {"wan": {"steps": 3}}
    for recipe in ("lightning-4", own):
        job = made(server, "/v1/jobs", prompt="a fox", model="fake-image", recipe=recipe)
        assert server.http.get(f"/v1/jobs/{job['id']}/line").json()["recipe"] == recipe


@pytest.fixture
def picture(server):
    """The id of a picture that is done."""
    return server.wait_for(made(server, "/v1/jobs", prompt="a picture", model="fake-image")["id"])["id"]
