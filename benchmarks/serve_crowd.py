"""200 clients of `gfgen serve` while its processes are killed, and the memory of uploads (tests/crowd.py)."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import click

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from crowd import Crowd, Trouble, check_outcome, meet, private_bytes, processes
from serving import Server, fake_server, free_port

VICTIMS = ("rank", "writer", "front", "server", "writer", "front", "rank")
PAUSE_S = 3.0
"""Between two kills."""
BOUND_S = 400.0
SLOWNESS = 10.0
"""Patience with a machine that others use, in the usual timeouts."""
SIDE = 7000
"""Of each uploaded picture, in pixels."""
SHOWN_AFTER = (0, 1, 10, 37, 100, 150, 200)


def crowd_rows(folder: Path, *, options: str) -> Iterator[tuple[str, str]]:
    """Raises: AssertionError if a job is lost or doubled, or a file is missing or left over."""
    port = free_port()
    command = ["-m", "gfgen", "serve", "--port", str(port), "--ranks", "2", "--max-open", "150"]
    command += ["--model", "shapes", "--output", str(folder / "out"), "--quiet", *options.split()]
    trouble = Trouble(lambda: Server(command, port=port, folder=folder, slowness=SLOWNESS))
    trouble.server.wait_ready()
    crowd = Crowd(trouble.server.url, Random(5), _job_of)
    began_s = time.monotonic()
    try:
        asyncio.run(asyncio.wait_for(meet(crowd, trouble, VICTIMS, pause_s=PAUSE_S), BOUND_S))
        took_s = time.monotonic() - began_s
        ends = Counter(check_outcome(crowd, trouble, suffix=".mp4").values())
    finally:
        trouble.server.stop()
    yield "killed", ", ".join(f"{what} {count}" for what, count in trouble.done.items())
    yield "accepted; lost or doubled; wrong or missing files", f"{len(crowd.ids)}; 0; 0"
    yield "completed, cancelled", f"{ends['completed']}, {ends['cancelled']}"
    errors = [str(crowd.num_errors[code]) for code in (0, 429, 503)]
    yield "connection errors, 429, 503", ", ".join(errors)
    yield "time", f"{took_s:.0f} s"


def _job_of(number: int) -> Mapping[str, Any]:
    return {"model": "shapes", "size": "64x64", "frames": 5, "steps": 2 + number % 5}


def upload_rows(folder: Path, *, num_uploads: int) -> Iterator[tuple[str, str]]:
    """Private memory of the HTTP process of a server with fake models."""
    from PIL import Image

    picture = io.BytesIO()
    Image.linear_gradient("L").resize((SIDE, SIDE)).convert("RGB").save(picture, "PNG")
    server = fake_server(folder).wait_ready()
    (front,) = processes(server)["front"]
    for number in range(num_uploads + 1):
        if number in SHOWN_AFTER:
            yield f"{number} uploads", f"{private_bytes(front) / 1e6:.0f} MB"
        values = {"prompt": "x", "model": "fake-video", "num_inference_steps": "1"}
        answer = server.http.post(
            "/v1/videos", data=values, files={"input_reference": picture.getvalue()}, timeout=300
        )
        answer.raise_for_status()
        server.wait_for(answer.json()["id"])
    server.stop()


@click.command()
@click.option(
    "--uploads", type=click.IntRange(0), default=200, show_default=True, help="Pictures to upload; 0: none."
)
@click.option("--server", default="", help="More options of the server, such as '--device cuda'.")
def main(*, uploads: int, server: str) -> None:
    """Clients while processes die, then uploads."""
    with tempfile.TemporaryDirectory() as name:
        click.echo(f"load average {os.getloadavg()[0]:.0f}\n\n| | |\n|---|---|")
        for what, found in crowd_rows(Path(name), options=server):
            click.echo(f"| {what} | {found} |")
    with tempfile.TemporaryDirectory() as name:
        for what, found in upload_rows(Path(name), num_uploads=uploads) if uploads else ():
            click.echo(f"| {what} | {found} |")


if __name__ == "__main__":
    main()
