"""The commands of the documents work as they are printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
from fake_serving import MOVIE
from serving import ROOT

SERVING = (ROOT / "docs/serving.md").read_text()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_walk_through_with_curl_works_as_printed(server, tmp_path):
    section = SERVING.partition("## With curl")[2]
    (script,) = re.findall(r"```sh\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    printed = script.replace("localhost:3000", f"localhost:{server.port}")
    try:
        done = subprocess.run(
            ["bash", "-e", "-u", "-o", "pipefail"],
            input=printed,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    finally:
        server.post("/v1/policy", policy="srtf")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "video.mp4").read_bytes() == MOVIE
    assert (tmp_path / "first-hundred-bytes").read_bytes() == MOVIE[:100]
    assert "event: completed" in done.stdout
    assert json.loads((tmp_path / "batch.json").read_text())["request_counts"]["total"] == 2
    assert '"deleted":true' in done.stdout


def test_every_path_that_is_served_is_in_the_documents(server):
    paths = server.http.get("/openapi.json").json()["paths"]
    for path in paths:
        first = re.sub(r"^(/v1/[a-z]+|/[a-z]+).*", r"\1", path)
        assert first in SERVING, path


def test_the_example_for_openais_client_uses_names_that_exist():
    openai = pytest.importorskip("openai")
    code, *_ = re.findall(r"```python\n(.*?)```", SERVING, re.DOTALL)
    compile(code, "docs/serving.md", "exec")
    client = openai.OpenAI(base_url="http://localhost:1/v1", api_key="none")
    for name in re.findall(r"client\.([a-z.]+_?[a-z_]*)\(", code):
        found = client
        for part in name.split("."):
            found = getattr(found, part)
    client.close()
