"""Whatever is made up from the OpenAPI document, the server answers as the document says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Server, fake_server

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "unsupported_method"),
)
"""Not among them: that all that fits the document is accepted. A model may refuse what its schema allows."""
ENDLESS = "/v1/state/events"


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_HASTE", "1")
    running: Server = fake_server(tmp_path, a1111=1)
    yield running.wait_ready()
    running.stop()


def test_schemathesis_finds_no_server_error(hasty: Server, tmp_path: Path) -> None:
    command = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{hasty.url}/openapi.json"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "4", "--seed", "1"),
        *("--exclude-path", ENDLESS, "--checks", ",".join(CHECKS), "--request-timeout", "20"),
        *("--continue-on-failure", "--no-color"),
    ]
    environment = {**os.environ, "SCHEMATHESIS_REPORT": "false"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Traceback" not in hasty.log
