"""Uploaded files of OpenAI's requests, before any of them is admitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from gfgen.server.jobs.files import Uploads
from gfgen.server.jobs.job_requests import batch_lines
from gfgen.server.protocol.problems import ApiError
from gfgen.server.protocol.server_schemas import LineFailure, ServedModel

ENDPOINT = "/v1/images/generations"
MODELS = [ServedModel(id="fake", created=0, kind="image", takes_image="no")]


def failures_of(content: bytes, *, max_lines: int = 9) -> tuple[int, list[LineFailure]]:
    lines, failures = batch_lines(
        content, endpoint=ENDPOINT, batch_id="b", models=MODELS, max_lines=max_lines, is_strict=False
    )
    return len(lines), failures


def test_a_file_of_more_requests_than_may_be_open_is_not_read_to_its_end() -> None:
    assert len(failures_of(b"{}\n" * 9)[1]) == 9
    with pytest.raises(ApiError, match="more than 9 requests") as refused:
        failures_of(b"{}\n" * 10)
    assert refused.value.status == 413


def test_a_file_that_another_request_removes_is_not_listed(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path, most_bytes=1000)
    first, second = (uploads.add(b"{}", filename="a", now=0) for _ in range(2))
    (tmp_path / ".files" / f"{first.id}.json").unlink()
    (tmp_path / ".files" / f"{first.id}.json").symlink_to("gone")  # as between listing and reading
    assert [file.id for file in uploads.all()] == [second.id]
    uploads.remove_expired(before=2e9, is_kept=lambda name: name == second.id)
    assert [file.id for file in uploads.all()] == [second.id]
    uploads.remove_expired(before=2e9, is_kept=lambda name: False)
    assert not uploads.all()
