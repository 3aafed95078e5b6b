"""curl, with the commands of OpenAI's documentation and other values."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess

import pytest
from client_table import calls
from fake_serving import MOVIE
from serving import ROOT

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
PICTURE = ROOT / "jobs/lighthouse.png"
KEY = ("-H", "Authorization: Bearer any")
JSON = ("-H", "Content-Type: application/json")


@pytest.fixture
def curl(server):
    def run(path, *arguments):
        command = ["curl", "-fsSL", f"{server.url}{path}", *KEY, *arguments]
        return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout

    return run


@calls(
    "curl",
    "`/v1/images/generations`: JSON",
    "`/v1/images/edits`: `-F image[]=@FILE -F prompt=...`",
    result="the picture as base64",
)
def test_curl_makes_pictures(curl):
    body = {"model": "fake-image", "prompt": "a fox", "n": 1, "size": "64x64"}
    answer = json.loads(curl("/v1/images/generations", *JSON, "-d", json.dumps(body)))
    assert base64.b64decode(answer["data"][0]["b64_json"]).startswith(b"\x89PNG")
    fields = ("-F", "model=fake-video", "-F", f"image[]=@{PICTURE}", "-F", "prompt=a fox")
    answer = json.loads(curl("/v1/images/edits", *fields))
    assert base64.b64decode(answer["data"][0]["b64_json"]).startswith(b"\x89PNG")


@calls(
    "curl",
    "`/v1/videos`: `-F` fields, also with `-F input_reference=@FILE`",
    "`/v1/videos`: `-d` fields; `-d` with JSON and without a content type",
    "`/v1/videos/{id}`, `/v1/videos/{id}/content -o FILE`, `-X DELETE`",
    result="the video, its status, its file",
)
def test_curl_makes_videos(server, curl, tmp_path):
    fields = ("-F", "prompt=a fox", "-F", "size=1280x720", "-F", "seconds=4")
    ids = [json.loads(curl("/v1/videos", *fields))["id"]]
    reference = ("-F", f"input_reference=@{PICTURE}")
    ids.append(json.loads(curl("/v1/videos", *fields, *reference))["id"])
    ids.append(json.loads(curl("/v1/videos", "-d", "prompt=a fox", "-d", "seconds=4"))["id"])
    ids.append(json.loads(curl("/v1/videos", "-d", '{"prompt": "a fox"}'))["id"])
    for job_id in ids:
        server.wait_for(job_id)
        assert json.loads(curl(f"/v1/videos/{job_id}"))["status"] == "completed"
    curl(f"/v1/videos/{ids[0]}/content", "-o", str(tmp_path / "video.mp4"))
    assert (tmp_path / "video.mp4").read_bytes() == MOVIE
    assert json.loads(curl(f"/v1/videos/{ids[0]}", "-X", "DELETE"))["deleted"] is True


@calls(
    "curl",
    "`/v1/files`: `-F purpose=batch -F file=@FILE`; `/v1/batches`: JSON",
    result="the file of requests runs",
)
def test_curl_runs_batches(curl, tmp_path):
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/videos", "body": {"prompt": "a fox"}}
    (tmp_path / "night.jsonl").write_text(json.dumps(line))
    file = json.loads(curl("/v1/files", "-F", "purpose=batch", "-F", f"file=@{tmp_path / 'night.jsonl'}"))
    body = {"input_file_id": file["id"], "endpoint": "/v1/videos", "completion_window": "24h"}
    batch = json.loads(curl("/v1/batches", *JSON, "-d", json.dumps(body)))
    assert batch["request_counts"]["total"] == 1
