"""One server with fake models for all tests that do not stop it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Server, fake_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = fake_server(
        tmp_path_factory.mktemp("server"), body_bytes=2**21, streams=12, header_s=1, body_s=2
    )
    try:
        yield running.wait_ready()
    finally:
        running.stop()
