"""The manifest of a batch: one line per ended job, in the format of `gfgen run`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from gfgen.job.spec import JobSpec
from gfgen.runtime.core.observer import JobInfo, JobOutcome, OutcomeStatus
from gfgen.runtime.files.manifest import ManifestLine, manifest_entry
from gfgen.runtime.ipc.content import Content
from gfgen.server.jobs.store import Ended, JobFacts, Store, StoredJob

NO_DETAILS = "the run's details of this job are lost: times count from its acceptance"
_STATUS: dict[Ended, OutcomeStatus] = {"completed": "done", "failed": "failed", "cancelled": "cancelled"}


def manifest(store: Store, batch_id: str) -> bytes:
    """The manifest as JSON lines, in the order of the job file."""
    lines = [_line(stored, spec, entry) for stored, spec, entry in store.manifest(batch_id)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "replace")


def _line(stored: StoredJob, spec: dict[str, Any], entry: ManifestLine | None) -> ManifestLine:
    """The run's entry, or what is known without it; `file` becomes a URL path."""
    facts = stored.facts
    entry = _without_run(stored, spec) if entry is None else entry
    file = f"/v1/jobs/{facts.id}/content" if entry["status"] == "done" else None
    return {**entry, "id": facts.custom_id, "job": facts.id, "file": file}


def _without_run(stored: StoredJob, spec: dict[str, Any]) -> ManifestLine:
    """The entry of a job without an outcome from the run, which was killed or never started the job.

    Unknown values are null.
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
        warnings=(NO_DETAILS,),
        written=None if ending.size_bytes is None else Content(ending.size_bytes),
    )
    entry = manifest_entry(outcome, written_at=ending.completed_at)
    timings = {**entry["timings"], "busy_s": None, "rank_s": None}
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
