"""The manifest of a batch: one line per ended job, in the format of `gfgen run`."""

from __future__ import annotations

import json
import time

from gfgen.runtime.core.observer import OutcomeStatus
from gfgen.runtime.files.manifest import SCHEMA_VERSION, ManifestLine
from gfgen.server.jobs.store import Ended, Store, StoredJob

NO_DETAILS = "the run's details of this job are lost"
_STATUS: dict[Ended, OutcomeStatus] = {"completed": "done", "failed": "failed", "cancelled": "cancelled"}


def manifest(store: Store, batch_id: str) -> bytes:
    """The manifest as JSON lines, in the order of the job file."""
    lines = [_line(stored, entry) for stored, entry in store.manifest(batch_id)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "replace")


def _line(stored: StoredJob, entry: ManifestLine | None) -> ManifestLine:
    """The run's entry, or what is known without it; `file` becomes a URL path."""
    facts = stored.facts
    entry = _without_run(stored) if entry is None else entry
    file = f"/v1/jobs/{facts.id}/content" if entry["status"] == "done" else None
    return {**entry, "id": facts.custom_id, "job": facts.id, "file": file}


def _without_run(stored: StoredJob) -> ManifestLine:
    """The entry of a job without an outcome from the run, which was killed or never started the job."""
    facts, ending = stored.facts, stored.ending
    assert ending is not None
    return {
        "version": SCHEMA_VERSION,
        "status": _STATUS[ending.status],
        "size_bytes": ending.size_bytes,
        **{name: getattr(facts, name) for name in ("prompt", "model", "tag", "priority", "seed", "steps")},
        "shape": None,
        "timings": None,
        "met_deadline": ending.met_deadline,
        "error": ending.error_message,
        "warnings": [NO_DETAILS],
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ending.completed_at)),
    }
