"""Previews of running jobs: from latents in shared memory to pictures and streams."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_job
from diffusers import QwenImagePipeline
from PIL import Image

from gfgen.graph import Artifact
from gfgen.models.families.adapter import SAMPLE, Fields
from gfgen.models.loading.colour_fit import fit_colours, random_pictures
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.worker.jobs import publish
from gfgen.server.http import routes_jobs
from gfgen.server.http.routes_images import Streamed, picture_events, response_events
from gfgen.server.protocol import picture_schemas
from gfgen.server.shown.previews import LatentColours, Previews, latent_picture
from gfgen.server.shown.served_job import Notifier

COLOURS = LatentColours(np.eye(3, dtype=np.float32), np.zeros(3, np.float32))
"""Of latents whose channels are the colours."""


@pytest.fixture
def job(tmp_path):
    """A job of a Wan model with latents of 3 channels, and its checkpoint."""
    (tmp_path / "vae").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    colours = {"matrix": np.eye(3).tolist(), "offset": [0, 0, 0]}
    (tmp_path / "vae/latent_colours.json").write_text(json.dumps(colours))
    plain = make_job("fox")
    latents = Artifact("latents", (("all", (1, 3, 8, 16, 16), "float32"),))
    artifacts = tuple(latents if each.name == "latents" else each for each in plain.trajectory.artifacts)
    return replace(plain, checkpoint=tmp_path, trajectory=replace(plain.trajectory, artifacts=artifacts))


@pytest.fixture
def fd(job):
    """The job's slab, which this process owns as a run would."""
    fd = Slab.create(SlabPlan.of(job.trajectory), name=job.job_id)
    yield fd
    os.close(fd)


def put(fd: int, job: Any, version: int, **tensors: torch.Tensor) -> None:
    slab = Slab(fd, SlabPlan.of(job.trajectory))
    publish(slab, "latents", version, Fields(tensors, {"_step_index": version}), producer=10 + version)


def drawn(fd: int, job: Any, *, width: int = 16, height: int = 16) -> Any:
    return latent_picture(fd, SlabPlan.of(job.trajectory), COLOURS, width=width, height=height)


def red(*shape: int) -> torch.Tensor:
    latents = torch.full(shape, -1.0)
    latents[:, 0] = 1.0
    return latents


def test_a_preview_is_the_middle_frame_of_what_the_solver_predicts(job, fd):
    noise, predicted = torch.randn(1, 3, 3, 4, 4), -torch.ones(1, 3, 3, 4, 4)
    predicted[:, 0, 1] = 1.0
    put(fd, job, 3, sample=noise, model_output_0=noise, model_output_1=predicted.bfloat16())
    previews = Previews(run_pid=os.getpid())
    assert previews.add(job)
    content = asyncio.run(previews.picture("fox"))
    with Image.open(io.BytesIO(content)) as picture:
        assert (picture.format, picture.size) == ("WEBP", (16, 16))
    assert (drawn(fd, job) == (255, 0, 0)).all()
    previews.forget("fox")
    assert asyncio.run(previews.picture("fox")) is None


def test_without_predictions_the_last_step_is_continued_to_the_end_of_the_noise(job, fd):
    noise, torch_noise = torch.Generator().manual_seed(3), {"dtype": torch.float32}
    end, begin = red(1, 3, 16, 16) * 0.8, torch.randn(1, 3, 16, 16, generator=noise, **torch_noise)
    for version, sigma in ((2, 1.0), (3, 0.9), (4, 0.8)):
        put(fd, job, version, **{SAMPLE: (1 - sigma) * end + sigma * begin})
    expected = ((end[0].permute(1, 2, 0) + 1) * 127.5).numpy()
    assert np.abs(drawn(fd, job) - expected).mean() < 5


def test_latents_in_tokens_are_unpacked_as_their_pipeline_does(job, fd):
    packed = torch.randn(1, 6 * 2, 12, generator=torch.Generator().manual_seed(4)).clamp(-1, 1)
    put(fd, job, 3, sample=packed, model_output_1=packed)
    unpacked = QwenImagePipeline._unpack_latents(packed, 96, 32, 8)[0, :, 0]
    expected = (unpacked.permute(1, 2, 0) * 127.5 + 127.5).numpy().astype(np.uint8)
    assert (drawn(fd, job, width=32, height=96) == expected).all()


def test_there_is_none_before_the_first_step_and_of_other_models(job, fd, tmp_path):
    assert drawn(fd, job) is None
    put(fd, job, 2, sample=red(1, 3, 1, 4, 4))
    assert drawn(fd, job) is None
    (tmp_path / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    assert not Previews().add(job)


def test_the_fit_finds_the_colours_of_a_linear_vae():
    mixed = torch.tensor([[1.0, 0, 0, 0.5], [0, 1, 0, 0.5], [0, 0, 1, -1]])

    def encode(batch: torch.Tensor) -> Any:
        small = torch.nn.functional.avg_pool2d(batch, 8)
        latents = torch.einsum("bchw,cd->bdhw", small, mixed) / 2 + 0.3
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))

    vae = SimpleNamespace(encode=encode, config=SimpleNamespace(shift_factor=0.3, scaling_factor=2.0))
    found = fit_colours(vae, random_pictures())
    assert found["residual"] < 0.01
    assert torch.allclose(mixed @ torch.tensor(found["matrix"]), torch.eye(3), atol=0.01)


# Streams --------------------------------------------------------------------------------------------


class StreamingService:
    """One picture of eight steps, whose preview is its step; a step ends whenever the stream looks."""

    def __init__(self, *, fails: bool = False) -> None:
        self.cancelled: list[str] = []
        self.fails = fails
        self._steps = deque(range(1, 9))
        facts = SimpleNamespace(id="image_1", steps=8, size="16x16")
        self._record = SimpleNamespace(facts=facts, step=0, updates=Notifier())
        self.mirror = SimpleNamespace(status="ready", records=SimpleNamespace(get=self._get))
        self.previews = SimpleNamespace(picture=self._picture)
        self.job = self._ended
        self.limits = SimpleNamespace(left_s=0.0)

    def now(self) -> float:
        return 1.0

    async def cancel(self, ids: list[str]) -> list[str]:
        self.cancelled += ids
        return ids

    def _get(self, job_id: str) -> Any:
        if not self._steps:
            return None
        self._record.step = self._steps.popleft()
        return self._record

    async def _picture(self, job_id: str, *, kind: str, is_small: bool) -> bytes:
        return b"%d" % self._record.step

    def _ended(self, job_id: str) -> Any:
        ending = SimpleNamespace(error_message="bad", error_code="x")
        return SimpleNamespace(status="failed" if self.fails else "cancelled", ending=ending)


def streamed(partial_images: int) -> Streamed:
    asked_for = picture_schemas.ImageRequest(stream=True, partial_images=partial_images)
    return Streamed(["image_1"], asked_for, [], of="image_edit", is_kept=False)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("gfgen.server.http.routes_images.WAIT_S", 0.0)


def test_a_stream_has_previews_at_equal_distances_and_ends_with_the_error():
    async def read() -> list[bytes]:
        return [event async for event in picture_events(StreamingService(fails=True), streamed(3))]

    *partial, error = asyncio.run(read())
    bodies = [json.loads(event.split(b"data: ")[1]) for event in partial]
    assert {body["type"] for body in bodies} == {"image_edit.partial_image"}
    assert [body["partial_image_index"] for body in bodies] == [0, 1, 2]
    steps = [int(base64.b64decode(body["b64_json"])) for body in bodies]
    assert all(step >= place for step, place in zip(steps, (2, 4, 6), strict=True))
    assert error.startswith(b"event: error\n")
    assert json.loads(error.split(b"data: ")[1])["error"]["code"] == "x"


def a_response(service, asked_for):
    answer = picture_schemas.PictureResponse(id="resp_1", created_at=1, model="fake", output=[], tools=[])
    return response_events(service, asked_for, answer)


def test_a_response_has_previews_at_equal_distances_and_ends_with_the_error():
    async def read() -> list[bytes]:
        return [event async for event in a_response(StreamingService(fails=True), streamed(3))]

    bodies = [json.loads(event.split(b"data: ")[1]) for event in asyncio.run(read())]
    assert [body["sequence_number"] for body in bodies] == list(range(9))
    partial = [body for body in bodies if body["type"] == "response.image_generation_call.partial_image"]
    assert [body["partial_image_index"] for body in partial] == [0, 1, 2]
    assert {(body["item_id"], body["output_index"], body["size"]) for body in partial} == {
        ("ig_image_1", 0, "16x16")
    }
    steps = [int(base64.b64decode(body["partial_image_b64"])) for body in partial]
    assert all(step >= place for step, place in zip(steps, (2, 4, 6), strict=True))
    assert (bodies[-1]["type"], bodies[-1]["response"]["error"]["code"]) == ("response.failed", "x")


@pytest.mark.parametrize("events_of", [picture_events, a_response])
@pytest.mark.parametrize("num_read", [1, 3, 6])
def test_a_client_that_leaves_a_stream_cancels_its_pictures(events_of, num_read):
    async def leave() -> list[str]:
        service = StreamingService()
        events = events_of(service, streamed(3))
        for _ in range(min(num_read, 3) if events_of is picture_events else num_read):
            await anext(events)
        await events.aclose()
        await asyncio.gather(*routes_jobs._leaving)
        return service.cancelled

    assert asyncio.run(leave()) == ["image_1"]
