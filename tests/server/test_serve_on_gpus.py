"""`gfgen serve` on GPUs, as clients see it: pictures, videos, a worker's death, a stop in the middle."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from gpu_ranks import NUM_RANKS, RANKS_PER_GPU, needs_two_ranks
from PIL import Image
from process_tree import children_of
from serving import Server, free_port

DEVICE = "cuda"
PICTURE = {
    "prompt": "a fox",
    "model": "tiny-qwen-image",
    "size": "64x64",
    "num_inference_steps": 6,
    "seed": 7,
}
VIDEO = {"prompt": "the sea", "model": "tiny-wan", "size": "64x64", "num_frames": 5, "deadline": "5m"}
NUM_STEPS = 400 if RANKS_PER_GPU == 1 else 60
"""Of a video that a death or a stop interrupts. Ranks that share a GPU take tens of milliseconds for each."""

pytestmark = [pytest.mark.gpu, needs_two_ranks]


def served(folder: Path, port: int) -> Server:
    """All steps on all ranks, so that the same request gives the same bits."""
    command = ["-m", "gfgen", "serve", "--port", str(port), "--output", "out", "--policy", "legacy"]
    command += ["--model", "tiny-wan", "--model", "tiny-qwen-image", "--device", DEVICE]
    command += ["--ranks", str(NUM_RANKS), "--ranks-per-gpu", str(RANKS_PER_GPU)]
    command += ["--max-steps", str(NUM_STEPS)]
    return Server(command, port=port, folder=folder, slowness=RANKS_PER_GPU)


def picture(server: Server) -> bytes:
    (made,) = server.post("/v1/images/generations", **PICTURE, response_format="url").json()["data"]
    with Image.open(io.BytesIO(server.http.get(made["url"]).content)) as found:
        return found.tobytes()


def workers_of(server: Server) -> list[int]:
    """The processes of the ranks, then those of writers."""
    return max((sorted(children_of(child)) for child in children_of(server.process.pid)), key=len)


def test_a_death_and_a_stop_cost_no_job_and_no_bit(tmp_path: Path, tiny_models: Mapping[str, Path]):
    port = free_port()
    server = served(tmp_path, port).wait_ready()
    first = picture(server)
    assert picture(server) == first
    short = server.post("/v1/videos", **VIDEO, num_inference_steps=4).json()["id"]
    assert server.wait_for(short)["status"] == "completed"
    assert server.http.get(f"/v1/videos/{short}/content").content[4:8] == b"ftyp"

    struck = server.post("/v1/videos", **VIDEO, num_inference_steps=NUM_STEPS).json()["id"]
    while server.job(struck)["step"] < 3:
        time.sleep(0.01)
    os.kill(workers_of(server)[0], signal.SIGKILL)
    assert server.wait_for(struck)["status"] == "completed"
    assert "rank 0 is gone" in server.log

    parted = [
        server.post("/v1/videos", **VIDEO, num_inference_steps=NUM_STEPS).json()["id"] for _ in range(2)
    ]
    while server.job(parted[0])["step"] < 3:
        time.sleep(0.01)
    assert server.stop() == 0
    again = served(tmp_path, port).wait_ready()
    try:
        assert again.wait_for(parted[0], "in_progress", "completed")["step"] >= 3
        assert {again.wait_for(job_id)["status"] for job_id in parted} == {"completed"}
        assert picture(again) == first
    finally:
        assert again.stop() == 0
