"""What only a pipeline's code tells of jobs: the calls that it refuses, and the words that it does not read.

A child process answers (stepping/outlined.py), once for each checkpoint and arguments. gfgen's cache
keeps the answers until a file of the checkpoint, or diffusers, changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gfgen.errors import ModelError, Problem, Warned
from gfgen.job.spec import JobSpec, call_key
from gfgen.models.geometry.rules import max_text_tokens
from gfgen.models.geometry.wan import TEXT_TOKENS
from gfgen.runtime.core.admission import AdmittedJob, Judged
from gfgen.runtime.predict.profile_file import write_whole
from gfgen.system.lifeline import ask_child
from gfgen.system.machine import cache_dir

logger = logging.getLogger(__name__)

SAFE_BYTES = 75
"""No text encoder keeps fewer tokens, and a token has a byte or more."""
Answers = dict[str, dict[str, Any]]
"""By call and by text."""
_SHOWN_WORDS = 8


def try_calls(jobs: Sequence[AdmittedJob], *, trusts_code: bool, may_ask: bool = True) -> Judged:
    """The jobs whose calls their pipelines do not refuse, with warnings for texts that are cut. Kept answers
    count alone unless a child process may be asked, which takes seconds."""
    groups: dict[Path, list[tuple[str, AdmittedJob]]] = defaultdict(list)
    for job in jobs:
        most = max_text_tokens(job.spec, TEXT_TOKENS) - 2
        if job.has_nominal_flops or any(_long_texts(job.spec, most)):
            groups[job.checkpoint].append((_key(job), job))
    known = {checkpoint: _read(checkpoint) for checkpoint in groups}
    questions = [
        {"checkpoint": str(path), "trusts_code": trusts_code, **asked}
        for path, own in groups.items()
        if may_ask and (asked := _asked(own, known[path]))["calls"]
    ]
    try:
        found = ask_child("gfgen.models.stepping.outlined", questions, "calls") if questions else ()
    except ModelError as error:
        found = [{"error": str(error)}] * len(questions)
    unchecked: dict[Path, str] = {}
    for question, answer in zip(questions, found, strict=True):
        path = Path(question["checkpoint"])
        if "error" in answer:
            unchecked[path] = answer["error"]
        else:
            known[path] = {name: known[path][name] | answer[name] for name in known[path]}
            _keep(path, known[path])
    judged: dict[str, AdmittedJob | Problem] = {}
    for path, own in groups.items():
        calls = known[path]["calls"]
        judged |= {job.job_id: _judged(job, known[path], key) for key, job in own if key in calls}
        unknown = [why for key, _ in own if (why := calls.get(key, {}).get("unknown"))]
        if may_ask and (why := unchecked.get(path) or next(iter(unknown), None)):
            logger.info("%s: calls are not checked before they run: %s", own[0][1].spec.model, why)
    all_jobs = [judged.get(job.job_id, job) for job in jobs]
    kept = [each for each in all_jobs if isinstance(each, AdmittedJob)]
    return kept, [each for each in all_jobs if isinstance(each, Problem)]


def _asked(jobs: Sequence[tuple[str, AdmittedJob]], known: Answers) -> dict[str, Any]:
    """What jobs of a checkpoint need beyond the known answers."""
    calls: dict[str, Any] = {}
    texts: dict[str, tuple[str, str]] = {}
    for key, job in jobs:
        answer = known["calls"].get(key)
        most = SAFE_BYTES if answer is None else answer["most_bytes"]
        new = {_text_id(key, text): (key, text) for text in _long_texts(job.spec, most)}
        texts |= (new := {name: text for name, text in new.items() if name not in known["texts"]})
        if new or answer is None:
            calls.setdefault(key, asdict(job.spec))
    return {"calls": calls, "texts": texts}


def _judged(job: AdmittedJob, found: Answers, key: str) -> AdmittedJob | Problem:
    spec = job.spec
    if (refused := found["calls"][key].get("refused")) is not None:
        return replace(Problem.of(None, None, f"{job.info.family} refuses it: {refused}"), line=spec.line)
    for field in ("prompt", "negative_prompt"):
        text = getattr(spec, field) or ""
        read = found["texts"].get(_text_id(key, text), len(text))
        if rest := text[read:].split():
            kind = f"the end of a long {field} has no effect, because no text encoder reads it"
            shown = " ".join(rest[:_SHOWN_WORDS]) + (" ..." if len(rest) > _SHOWN_WORDS else "")
            job = job.warned(Warned(kind, f"{len(rest)} words from {shown!r}"))
    return job


def _key(job: AdmittedJob) -> str:
    """Equal for jobs of a checkpoint whose calls are refused alike; families of gfgen's own refuse none."""
    own = str(job.spec.args) if job.spec.args else ""
    said = call_key(job.spec) if job.has_nominal_flops else own
    return hashlib.sha256(said.encode()).hexdigest()[:20]


def _text_id(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()[:20]


def _long_texts(spec: JobSpec, most_bytes: int) -> Iterator[str]:
    return (text for text in (spec.prompt, spec.negative_prompt or "") if len(text.encode()) > most_bytes)


def _place(checkpoint: Path) -> Path:
    """The file of a checkpoint's answers, which has another name when something changes."""
    paths = [path for pattern in ("*", "*/*") for path in sorted(checkpoint.glob(pattern))]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    versions = [version(package) for package in ("diffusers", "transformers")]
    return cache_dir() / "calls" / f"{hashlib.sha256(repr((stats, versions)).encode()).hexdigest()[:32]}.json"


def _read(checkpoint: Path) -> Answers:
    try:
        found: Answers = json.loads(_place(checkpoint).read_text())
    except (OSError, ValueError):
        return {"calls": {}, "texts": {}}
    return found


def _keep(checkpoint: Path, known: Answers) -> None:
    path = _place(checkpoint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(json.dumps(known), path)
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)
