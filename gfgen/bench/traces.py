"""Job files from public traces of requests: when requests came, and of which kind.

| format | kind of a request | time | also used |
|---|---|---|---|
| GF-DiT's artifact, JSON with `requests` | `request_class` | `arrival_ms` | size, frames, `num_steps` |
| Katz, JSON | `base_model_id` | `timestamp` | |
| Alibaba's GenAI trace, CSV | `checkpoint_model_version_id` | `gmt_create` | steps, images per prompt |

Source: github.com/SJTU-Liquid/GF-DiT, benchmarks/diffusion; the README files of the two other traces.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gfgen.bench.workloads import JobClass, mix_of, spec_of
from gfgen.errors import InputError
from gfgen.job.spec import JobSpec

KINDS = {
    "request_class": "arrival_ms",
    "base_model_id": "timestamp",
    "checkpoint_model_version_id": "gmt_create",
}
"""The field of a request's kind, and that of its time, by which a format is known."""
MAPPED = re.compile(
    r"(?P<kind>[^=]+)=(?P<model>[^,=]+)(,(?P<size>\d+x\d+(x\d+)?))?(,slack=(?P<slack>\d+(\.\d+)?))?"
)
REST = "*"
"""Stands for all kinds that are not named."""
IN_MS = 1e11
"""Larger numbers are milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """What a kind of requests stands for."""

    model: str
    size: tuple[int, ...] | None
    slack: float | None
    """The deadline is so many times the time of a job alone; None: there is none."""


def parse_map(text: str) -> tuple[str, Mapped]:
    """`KIND=MODEL[,WxH[xF]][,slack=X]`. Raises: InputError."""
    found = MAPPED.fullmatch(text)
    if found is None:
        raise InputError(
            f"--map {text}: KIND=MODEL[,WxH[xF]][,slack=X] is accepted, such as S=qwen-image,512x512"
        )
    mix_of(found["model"])
    size = tuple(map(int, found["size"].split("x"))) if found["size"] else None
    return found["kind"], Mapped(found["model"], size, float(found["slack"]) if found["slack"] else None)


def read_trace(
    path: Path, mapped: Mapping[str, Mapped], *, steps: int | None = None
) -> tuple[list[tuple[JobSpec, float | None]], Counter[str]]:
    """By arrival, from 0 on, a job for each mapped request, tagged by its kind, with its slack; and the
    kinds of the others. Raises: InputError for a file of another format.
    """
    rows = _rows(path)
    kind_in, time_in = next((each for each in KINDS.items() if {*each} <= rows[0].keys()), ("", ""))
    if not kind_in:
        raise InputError(f"--arrivals {path}: its requests have none of {', '.join(KINDS)} with their time")
    jobs, unmapped, rng = list[tuple[JobSpec, float | None]](), Counter[str](), random.Random(0)
    for number, row in enumerate(rows, start=1):
        kind = str(row.get(kind_in))
        if (found := mapped.get(kind, mapped.get(REST))) is None:
            unmapped[kind] += 1
            continue
        try:
            size = found.size or (int(row["width"]), int(row["height"]), int(row.get("num_frames") or 1))
            own_steps = steps or int(row.get("num_steps") or row.get("num_inference_steps") or 0) or None
            arrival_s = _seconds(row[time_in]) / (1e3 if time_in.endswith("_ms") else 1)
            copies = int(row.get("num_images_per_prompt") or 1)
        except KeyError as error:
            raise InputError(f"--map {kind}=...: request {number} has no {error}, so name a size") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"--arrivals {path}: request {number}: {error}") from None
        frames = size[2] if len(size) > 2 and size[2] > 1 else None
        cls = JobClass(kind, 0.0, 0.0, size[0], size[1], frames)
        mix = mix_of(found.model, steps=own_steps)
        for copy in range(copies):
            spec = spec_of(f"{number:05d}-{copy}", cls, mix, found.model, rng)
            jobs.append((replace(spec, arrival_s=arrival_s, seed=number), found.slack))
    begin_s = min((job.arrival_s for job, _ in jobs), default=0.0)
    jobs.sort(key=lambda each: each[0].arrival_s)
    return [
        (replace(job, arrival_s=round(job.arrival_s - begin_s, 3)), slack) for job, slack in jobs
    ], unmapped


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        text = path.read_text()
        if path.suffix == ".csv":
            rows = list(csv.DictReader(io.StringIO(text)))
        elif text.lstrip().startswith("{") and path.suffix != ".json":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            content = json.loads(text)
            rows = content["requests"] if isinstance(content, dict) else content
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it has no requests")
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"--arrivals {path}: not a trace ({error})") from None
    return rows


def _seconds(value: object) -> float:
    """A number, or a date and time. Raises: ValueError."""
    text = str(value)
    try:
        number = float(text)
    except ValueError:
        date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    return number / 1e3 if number > IN_MS else number
