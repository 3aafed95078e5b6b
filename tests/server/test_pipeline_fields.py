"""Arguments and files of pipelines over HTTP, with a pipeline that has no adapter of its own."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import pytest
from PIL import Image
from serving import Server, free_port
from small_checkpoints import save_checkpoint

BOUND_S = 120.0
JOB = {"prompt": "a red cat", "size": "64x64", "frames": 9, "steps": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    save_checkpoint("LTXImageToVideoPipeline", folder / "ltx")
    port = free_port()
    command = ["-m", "gfgen", "serve", "--port", str(port), "--ranks", "1", "--model", "ltx", "-o", "out"]
    server = Server(command, port=port, folder=folder)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def picture(path: Path) -> bytes:
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(path)
    return path.read_bytes()


def finished(server: Server, job: dict[str, Any]) -> dict[str, Any]:
    deadline_s = time.monotonic() + BOUND_S
    while job["status"] not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < deadline_s, server.log
        time.sleep(0.1)
        job = server.http.get(f"/v1/jobs/{job['id']}").json()
    return job


def refusal(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/jobs", json={**JOB, **body})
    assert answer.status_code in (400, 422), answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_form_and_json_give_the_same_video(server: Server, tmp_path: Path) -> None:
    content = picture(tmp_path / "a.png")
    fields = {
        **JOB,
        "steps": 12,
        "reuse": 0.25,
        "seed": 5,
        "args": {"max_sequence_length": 8},
        "scheduler": {"shift": 3},
    }
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    answers = [
        server.http.post("/v1/jobs", json={**fields, "files": {"image": url}}),
        server.http.post("/v1/jobs", data=texts, files={"files[image]": ("a.png", content)}),
    ]
    videos = []
    for answer in answers:
        assert answer.status_code == 200, answer.text
        job = finished(server, answer.json())
        assert job["status"] == "completed", job
        videos.append(server.http.get(f"/v1/jobs/{job['id']}/content").content)
    assert frames(videos[0]) == frames(videos[1])
    assert not list((server.folder / "out" / ".inputs").iterdir()), "inputs end with their jobs"


def frames(video: bytes) -> bytes:
    """What a video shows; its tags have the id of its job."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", "pipe:0", "-f", "rawvideo", "pipe:1"]
    return subprocess.run(command, input=video, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "image: missing; LTXImageToVideoPipeline needs a picture or video"),
        ({"args": {"max_sequence_lenght": 8}}, "did you mean max_sequence_length?"),
        ({"args": {"num_images_per_prompt": 2}}, "a job over HTTP makes one file"),
        ({"args": 5}, "an object of arguments"),
        ({"scheduler": {"class": "NoScheduler"}}, "is no scheduler of diffusers"),
        ({"files": {"image": "a.png"}}, "files.image: send the picture itself"),
        ({"files": {"image": 5}}, "files: an object of arguments"),
        ({"files": ["a.png"]}, "files: an object of arguments"),
        ({"files": {"image": "data:image/png;base64,AAAA"}}, "files.image: the file is not a picture"),
    ],
)
def test_what_is_refused_has_a_reason(server: Server, body: dict[str, Any], message: str) -> None:
    assert message in refusal(server, **body)["message"]
    assert not list((server.folder / "out" / ".inputs").iterdir())


def test_a_job_of_a_batch_makes_one_file(server: Server) -> None:
    line = json.dumps({**JOB, "args": {"num_images_per_prompt": 2}})
    answer = server.http.post("/v1/batches", content=line)
    assert answer.status_code == 400
    assert "a job over HTTP makes one file" in answer.json()["error"]["message"]


def test_a_form_in_another_charset_is_refused(server: Server) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=B; charset=unicode_escape"}
    form = b'--B\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n\\ud800\r\n--B--\r\n'
    assert server.http.post("/v1/jobs", content=form, headers=headers).status_code == 400


def test_only_jobs_take_files_for_arguments(server: Server, tmp_path: Path) -> None:
    files = {"files[image]": ("a.png", picture(tmp_path / "a.png"))}
    answer = server.http.post("/v1/videos", data={"prompt": "a cat"}, files=files)
    assert answer.status_code == 400
    assert "not a file of this form; send input_reference" in answer.json()["error"]["message"]
