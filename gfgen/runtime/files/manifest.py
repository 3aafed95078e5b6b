"""manifest.jsonl of the output folder: a line per job that has ended, of which the latest one counts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gfgen.errors import InputError
from gfgen.job.spec import PIPELINE_FIELDS, SCALE_FIELDS, JobSpec, numbered_name
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.runtime.ipc.content import remove_mark
from gfgen.system.linefile import LineFile, read_from

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.jsonl"
WATCHED_NAME = "watched.jsonl"  # what `--watch` took from its folder (inbox.py)
SCHEMA_VERSION = 1
_BEGINNING_BYTES = 2**20  # how much of a file `check_own` reads. It holds at least one whole line.
SIMULATED = "simulated"  # key of lines of simulated jobs, which have no file. Its value is true.

ManifestLine = dict[str, Any]  # one line as parsed JSON, with the keys of `manifest_entry`


class ManifestWriter(Observer):
    """Appends a line when a job ends; `now` returns Unix time."""

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.time,
        is_simulated: bool = False,
        made_with: Callable[[JobInfo], Mapping[str, Any] | None] = lambda info: None,
    ) -> None:
        self.path = path
        self._now = now
        self._is_simulated = is_simulated
        self._made_with = made_with
        self._lines = LineFile(path)
        self._written: list[str] = []

    def ended(self, outcome: JobOutcome) -> None:
        entry = manifest_entry(outcome, written_at=self._now())
        if self._is_simulated:
            entry[SIMULATED] = True
        elif (found := self._made_with(outcome.info)) is not None:
            entry["made_with"] = dict(found)
        outcome.entry = entry
        self._lines.append(json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        if outcome.written is not None:
            self._written += outcome.file_names

    def close(self) -> None:
        self._lines.close()
        for file in self._written:  # their lines are on the disk now
            remove_mark(self.path.parent / file)


def manifest_entry(outcome: JobOutcome, *, written_at: float) -> ManifestLine:
    """The line of a job. Removing or redefining a key requires a new SCHEMA_VERSION."""
    info, spec, written = outcome.info, outcome.info.spec, outcome.written
    entry = {
        "version": SCHEMA_VERSION,
        "id": info.job_id,
        "status": outcome.status,
        "file": outcome.file_names[0] if outcome.status == "done" else None,
        "size_bytes": None if written is None else written.size_bytes,
        "sha256": None if written is None else written.sha256,
        "prompt": spec.prompt,
        "negative_prompt": spec.negative_prompt,
        "image": spec.image,
        "model": spec.model,
        "family": info.family,
        "tag": spec.tag,
        "priority": spec.priority,
        "seed": spec.seed,
        "shape_asked": _shape(info.asked),
        "shape": _shape(spec) | _made(outcome),
        "rounded": info.rounding,
        "steps": spec.steps,
        "scales": {name: getattr(spec, name) for name in SCALE_FIELDS if getattr(spec, name) is not None},
        "spec_hash": info.spec_hash,
        "job_file": info.job_file,
        "timings": {
            "arrival_s": _rounded(outcome.arrival_s),
            "started_s": _rounded(outcome.started_s),
            "ended_s": _rounded(outcome.ended_s),
            "latency_s": _rounded(outcome.ended_s - outcome.arrival_s),
            "busy_s": _rounded(outcome.busy_s),
            "rank_s": _rounded(outcome.rank_s),
            "stages_s": {name: _rounded(value) for name, value in outcome.timings.items()},
            **({"first_uses_s": _rounded(outcome.first_uses_s)} if outcome.first_uses_s else {}),
        },
        "deadline_s": _rounded(outcome.deadline_s),
        "met_deadline": outcome.met_deadline,
        "layouts": list(outcome.layouts),
        "error": outcome.error,
        "warnings": list(outcome.warnings),
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(written_at)),
    }
    if outcome.peak_bytes is not None:
        entry["peak_memory_mb"] = round(outcome.peak_bytes / 2**20, 1)
    if info.attempt > 1:
        entry["filter"] = {"attempt": info.attempt}
    given = {name: getattr(spec, name) for name in ("owner", "prompt_syntax", *PIPELINE_FIELDS, "reuse")}
    given["first_pass"] = {"width": spec.width, "height": spec.height} if spec.enlarged else None
    given["steps_reused"] = outcome.num_approximate if spec.may_approximate else None
    given["why_reused"] = outcome.why_approximate
    entry |= {name: value for name, value in given.items() if value is not None}
    if outcome.files:
        entry["outputs"] = [
            {"file": name, "size_bytes": size, "sha256": digest}
            for name, (_, size, digest) in zip(outcome.file_names, outcome.files, strict=True)
        ]
    return entry


def ended_at(line: ManifestLine) -> float:
    """Unix time of a line, in whole seconds; 0 if it does not tell."""
    try:
        return datetime.fromisoformat(str(line.get("written_at"))).timestamp()
    except ValueError:
        return 0.0


def read_manifest(path: Path, *, start: int = 0) -> dict[str, ManifestLine]:
    """The latest line of each job after `start` bytes; skips, with a warning, what it cannot read."""
    return {entry["id"]: entry for entry in manifest_lines(read_from(path, start=start), path)}


def read_files(path: Path, *, name: str | None = None) -> dict[str, ManifestLine]:
    """The latest line with status done of each file, or of one; empty when there is no manifest."""
    mark = b"" if name is None else json.dumps(name, ensure_ascii=False).encode("utf-8", "replace")
    lines = manifest_lines(read_from(path, mark=mark), path)
    done = [entry for entry in lines if entry.get("status") == "done" and not entry.get(SIMULATED)]
    return {str(each.get("file")): each for entry in done for each in of_each_file(entry)}


def of_each_file(entry: ManifestLine) -> list[ManifestLine]:
    return [{**entry, **file} for file in entry.get("outputs", [{}])]


def manifest_lines(content: bytes, path: Path) -> Iterator[ManifestLine]:
    """Lines of a manifest in their order; those that cannot be read are skipped, with one warning."""
    others = []
    for line in content.split(b"\n"):
        if (entry := entry_of(line)) is not None:
            yield entry
        elif line.strip():
            others.append(line)
    warn_of(others, path)


def warn_of(others: Sequence[bytes], path: Path) -> None:
    """Name lines that are no manifest lines, if there are any."""
    if others:
        beginning = others[0][:60].decode(errors="replace").strip()
        logger.warning("%s: no manifest lines, ignored: %d, such as %r", path, len(others), beginning)


def entry_of(line: bytes) -> ManifestLine | None:
    """None for a line that is torn, or of another program."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(entry, dict) and entry.get("version") == SCHEMA_VERSION
    return entry if is_ours and isinstance(entry.get("id"), str) else None


def check_own(path: Path) -> None:
    """Raises: InputError if the file has the name of one of gfgen's lists but another program wrote it."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
        if beginning.strip() and b'"version"' not in beginning:
            raise InputError(f"{path}: was not written by gfgen; name another --output")


def is_finished(info: JobInfo, entry: ManifestLine | None, folder: Path) -> bool:
    """Whether `entry` says done with this spec hash and names, and the files are there in their sizes; or it
    has this hash, and a filter has dropped them."""
    return entry is not None and stands(entry, folder, file=info.file, spec_hash=info.spec_hash)


def stands(entry: ManifestLine, folder: Path, *, file: str, spec_hash: str) -> bool:
    """`is_finished` of a job with this file and hash."""
    if entry.get("status") not in ("done", "dropped") or entry.get(SIMULATED):
        return False
    if entry["status"] == "dropped":
        return bool(entry.get("spec_hash") == spec_hash)
    files = of_each_file(entry)
    numbered = [numbered_name(file, number) for number in range(1, len(files) + 1)]
    names = [each.get("file") for each in files]
    if entry.get("spec_hash") != spec_hash or names != (numbered if "outputs" in entry else [file]):
        return False
    try:
        return all(os.stat(f"{folder}/{each['file']}").st_size == each.get("size_bytes") for each in files)
    except OSError:
        return False


def _shape(spec: JobSpec) -> ManifestLine:
    width, height = spec.enlarged or (spec.width, spec.height)
    return {"width": width, "height": height, "frames": spec.frames, "fps": spec.fps}


def _made(outcome: JobOutcome) -> ManifestLine:
    """The true size of the files, where only the decode knew it."""
    return {} if outcome.made is None else dict(zip(("frames", "height", "width"), outcome.made, strict=True))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
