"""The manifest of a batch: a line for each of its jobs that has ended, as `gfgen run` writes it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gfgen.job.spec import JobSpec
from gfgen.runtime.core.observer import JobInfo, JobOutcome, OutcomeStatus
from gfgen.runtime.files.manifest import ManifestLine, manifest_entry
from gfgen.runtime.ipc.content import Content
from gfgen.server.jobs.store import Ended, JobFacts, Store, StoredJob

UNTOLD = "what the run knew of it is lost: times count from its acceptance"
_STATUS: dict[Ended, OutcomeStatus] = {"completed": "done", "failed": "failed", "cancelled": "cancelled"}


def manifest(store: Store, batch_id: str) -> bytes:
    """JSON lines, in the order of the job file."""
    lines = [_line(stored, spec, entry) for stored, spec, entry in store.manifest(batch_id)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "replace")


def _line(stored: StoredJob, spec: dict[str, Any], entry: ManifestLine | None) -> ManifestLine:
    """The run's own entry, or what is known without it; the server's files are known by their address."""
    facts = stored.facts
    entry = _without_run(stored, spec) if entry is None else entry
    file = f"/v1/jobs/{facts.id}/content" if entry["status"] == "done" else None
    return {**entry, "id": facts.custom_id, "job": facts.id, "file": file}


def _without_run(stored: StoredJob, spec: dict[str, Any]) -> ManifestLine:
    """The entry of a job whose end no run has told: it was killed first, or never began the job.

    What is not kept is null.
    """
    facts, ending = stored.facts, stored.ending
    assert ending is not None
    accepted_at = facts.created_at
    outcome = JobOutcome(
        info=_info(facts, JobSpec(**spec)),
        status=_STATUS[ending.status],
        arrival_s=facts.arrives_at - accepted_at,
        started_s=None if ending.started_at is None else ending.started_at - accepted_at,
        ended_s=ending.completed_at - accepted_at,
        deadline_s=None if facts.deadline_at is None else facts.deadline_at - accepted_at,
        busy_s=0.0,
        layouts=(),
        error=ending.error_message,
        warnings=(UNTOLD,),
        written=None if ending.size_bytes is None else Content(ending.size_bytes),
    )
    entry = manifest_entry(outcome, written_at=ending.completed_at)
    timings = {**entry["timings"], "busy_s": None}
    unknown = {"family": None, "spec_hash": None, "timings": timings}
    return {**entry, **unknown, "met_deadline": ending.met_deadline}


def _info(facts: JobFacts, requested: JobSpec) -> JobInfo:
    width, height = map(int, facts.size.split("x"))
    run = replace(
        requested,
        model=facts.model,
        width=width,
        height=height,
        frames=facts.frames or requested.frames,
        fps=facts.fps or requested.fps,
        steps=facts.steps,
        seed=facts.seed,
    )
    return JobInfo(requested, run, num_tasks=facts.num_tasks, file=facts.file, spec_hash="", family="")
