"""Live states for tests of the page: ranks, jobs and bars with times around now."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

from PIL import Image

from gfgen.server.protocol import schemas, server_schemas

MODELS = [
    server_schemas.ServedModel(
        id="tiny-wan",
        created=1,
        kind="video",
        takes_image="yes",
        defaults=server_schemas.Defaults(size="128x128", frames=17, fps=8, steps=8, guidance_scale=5.0),
    ),
    server_schemas.ServedModel(
        id="tiny-qwen-image",
        created=1,
        kind="image",
        takes_image="no",
        defaults=server_schemas.Defaults(size="256x256", steps=10, true_cfg_scale=4.0),
    ),
]


def layout(*ranks: int, **degrees: int) -> schemas.LayoutView:
    return schemas.LayoutView(ranks=list(ranks), **degrees)


def job(
    job_id: str, *, prompt: str | None = None, kind: schemas.MediaKind = "image", **values: Any
) -> schemas.Job:
    """A job that waits, or whatever else `values` say."""
    video: dict[str, Any] = {"frames": 17, "fps": 8, "seconds": "2.125"} if kind == "video" else {"frames": 1}
    fields: dict[str, Any] = {
        "status": "queued",
        "progress": 0,
        "created_at": int(time.time()),
        "steps": 10,
        "seed": 7,
        "size": "256x256",
    }
    return schemas.Job(
        id=job_id,
        object=kind,
        model="tiny-wan" if kind == "video" else "tiny-qwen-image",
        prompt=prompt or f"prompt of {job_id}",
        **(fields | video | values),
    )


def running(job_id: str, *ranks: int, step: int = 3, **values: Any) -> schemas.Job:
    now = time.time()
    fields: dict[str, Any] = {
        "status": "in_progress",
        "progress": 10 * step,
        "step": step,
        "stage": "denoise",
        "layout": layout(*ranks),
        "started_at": now - 5,
        "predicted_completion_at": now + 30,
    }
    return job(job_id, **(fields | values))


def ended(job_id: str, *, status: schemas.JobStatus = "completed", **values: Any) -> schemas.Job:
    fields: dict[str, Any] = {"status": status, "progress": 100, "step": 10, "completed_at": int(time.time())}
    if status == "completed":
        url = f"/v1/jobs/{job_id}/content"
        fields |= {"content_url": url, "thumbnail_url": f"{url}?variant=thumbnail"}
    return job(job_id, **(fields | values))


def bar(
    job_id: str,
    rank: int,
    *,
    begin: float = -8.0,
    end: float | None = None,
    ranks: Sequence[int] = (),
    **values: Any,
) -> server_schemas.TimelineBar:
    """A bar; `begin` and `end` are seconds from now."""
    now = time.time()
    fields: dict[str, Any] = {"stage": "denoise", "first_step": 0, "last_step": 3}
    return server_schemas.TimelineBar(
        key=f"{job_id}-{rank}-{begin}",
        rank=rank,
        job_id=job_id,
        layout=layout(*(ranks or (rank,)), ulysses=max(1, len(ranks))),
        started_at=now + begin,
        ended_at=None if end is None else now + end,
        **(fields | values),
    )


def rank(
    number: int, job_id: str | None = None, *, ranks: Sequence[int] = (), **values: Any
) -> server_schemas.Rank:
    now = time.time()
    task = None
    if job_id is not None:
        task = server_schemas.RankTask(
            job_id=job_id,
            stage="denoise",
            step=3,
            steps=10,
            layout=layout(*(ranks or (number,))),
            started_at=now,
            predicted_end_at=now + 1,
        )
    fields: dict[str, Any] = {"status": "idle" if job_id is None else "busy", "utilisation": 0.5}
    return server_schemas.Rank(rank=number, task=task, **(fields | values))


def live(**values: Any) -> server_schemas.LiveState:
    """Four idle ranks and no jobs, or whatever else `values` say."""
    now = time.time()
    jobs = values.get("open", [])
    fields: dict[str, Any] = {
        "server_time": now,
        "started_at": now - 100,
        "version": "0",
        "status": "ready",
        "device": "cpu",
        "policy": server_schemas.PolicyState(
            policy="auto", deciding="srtf", available=["auto", "edf", "srtf"]
        ),
        "models": MODELS,
        "ranks": [rank(number) for number in range(4)],
        "timeline": [],
        "open": jobs,
        "num_open": len(jobs),
        "max_open": 1000,
        "finished": [],
    }
    return server_schemas.LiveState(**(fields | values))


def png(colour: tuple[int, int, int] = (200, 80, 40), *, size: tuple[int, int] = (64, 64)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return content.getvalue()
