"""The jobs of a file as requests to a server that runs, for `first_run.py servers`.

A server of one model is named with it. Videos are asked for as JSON or, if that is refused, as a form
(vLLM-Omni); gfgen alone heeds `deadline`. Each shape is made in a few steps before the clock starts. Requests
are sent when jobs arrive; their time ends with the last byte. `num_missing` jobs are lost: their last request
failed. `num_doubled` results are no job's, of the last 100 that a server lists (gfgen: all, others: videos).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks.first_run import Record, conditions, keep_record, read_jobs, scores
from gfgen.errors import RunError
from gfgen.job.spec import JobSpec

WARM_UP_STEPS, POLL_S, RETRY_S = 4, 0.25, 2.0
FIELDS = ("prompt", "negative_prompt", "seed", "guidance_scale", "true_cfg_scale", "fps")


class Client:
    def __init__(self, asked: argparse.Namespace) -> None:
        self._num_tries, self._limit_s = 1 + asked.retries, asked.limit
        named = [each.rpartition("=") if "=http" in each else ("", "", each) for each in asked.server]
        self._of_model = {name: httpx.Client(base_url=url, timeout=asked.limit) for name, _, url in named}
        self.errors, self.made = list[str](), set[str]()

    def make(self, spec: JobSpec, *, steps: int | None = None) -> float | None:
        """When the file has come; None if the job is lost."""
        for _ in range(self._num_tries):
            try:
                self.made.add(self._result(spec, steps))
                return time.monotonic()
            except (httpx.HTTPError, RunError, LookupError, ValueError) as error:
                text = error.response.text if isinstance(error, httpx.HTTPStatusError) else ""
                self.errors.append(f"{spec.id}: {error!r} {text}"[:300])
                time.sleep(RETRY_S)
        return None

    def _result(self, spec: JobSpec, steps: int | None) -> str:
        http = self._of_model.get(spec.model or "") or self._of_model[""]
        body = {name: value for name in FIELDS if (value := getattr(spec, name)) is not None}
        body |= {"size": f"{spec.width}x{spec.height}", "num_inference_steps": steps or spec.steps}
        body |= {"num_frames": spec.frames} if spec.fps else {"n": 1, "response_format": "b64_json"}
        body |= {} if spec.model in self._of_model else {"model": spec.model}
        body |= {"deadline": f"{spec.deadline_s}s"} if spec.deadline_s and not steps else {}
        if not spec.fps:
            (found,) = http.post("/v1/images/generations", json=body).raise_for_status().json()["data"]
            return str(found.get("id"))
        answer = http.post("/v1/videos", json=body)
        if answer.is_client_error:
            form = {name: (None, str(value)) for name, value in body.items()}
            answer = http.post("/v1/videos", files=form)
        video, ends_s = answer.raise_for_status().json()["id"], time.monotonic() + self._limit_s
        while (job := http.get(f"/v1/videos/{video}").raise_for_status().json())["status"] != "completed":
            if job["status"] == "failed" or time.monotonic() > ends_s:
                raise RunError(f"{job['status']}: {job.get('error')}")
            time.sleep(POLL_S)
        http.get(f"/v1/videos/{video}/content").raise_for_status()
        return str(video)

    def listed(self) -> set[str]:
        """The last results of all servers."""
        found = []
        for http, path in itertools.product(self._of_model.values(), ("/v1/jobs", "/v1/videos")):
            with contextlib.suppress(httpx.HTTPError):  # a dead server lists nothing, and others no jobs
                found += http.get(path, params={"limit": 100}).raise_for_status().json()["data"]
        return {each["id"] for each in found if each["status"] == "completed"}


def measure(asked: argparse.Namespace) -> None:
    jobs, client = read_jobs(asked.jobs.read_text()), Client(asked)
    specs = [job.spec for job in jobs]
    for spec in {(spec.model, spec.width, spec.height, spec.frames): spec for spec in specs}.values():
        if client.make(spec, steps=WARM_UP_STEPS) is None:
            raise RunError(f"the warm-up fails: {client.errors[-1]}")
    before, origin_s = client.listed(), time.monotonic()

    def make(spec: JobSpec) -> float | None:
        time.sleep(max(0.0, origin_s + spec.arrival_s - time.monotonic()))
        return client.make(spec)

    if asked.kill:
        threading.Timer(float(asked.kill[0]), subprocess.run, asked.kill[1:], {"shell": True}).start()
    with ThreadPoolExecutor(len(jobs)) as threads:
        found = zip(jobs, threads.map(make, specs), strict=True)
    about = {"what": asked.name, "policy": "killed once" if asked.kill else "served", "options": []}
    record: Record = {**about, **conditions(asked), "caches": "warm", "num_ranks": asked.gpus}
    record |= scores(jobs, {job.job_id: end_s for job, end_s in found if end_s}, origin_s=origin_s)
    record |= {"num_doubled": len(client.listed() - before - client.made), "errors": client.errors[:5]}
    keep_record(asked.to, record)
