"""What benchmarks have in common: shapes, choices of cases, tables, results, times."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil

from gfgen.cli.shown.timeline import Timeline, read_timeline
from gfgen.errors import RunError
from gfgen.system.machine import cpu_name
from gfgen.system.wording import table_head, table_row

head, row = table_head, table_row


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """A picture (1 frame) or video of a model of the named ones."""

    model: str
    width: int
    height: int
    frames: int

    @property
    def name(self) -> str:
        """As in wan-832x480x49 or qwen-512x512."""
        frames = f"x{self.frames}" if self.frames > 1 else ""
        return f"{self.model.split('2')[0].split('-')[0]}-{self.width}x{self.height}{frames}{self.variant}"

    @property
    def variant(self) -> str:
        """What sets it apart from others of its size, as in "-image"."""
        return ""


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """Whether the name of a case fits one of the patterns of `--only`, if there are any."""
    return not only or any(fnmatch(name, pattern) for pattern in only)


def keep(folder: Path | None, name: str, content: Any, text: str) -> None:
    """Write a result into a folder, if one was given: today's NAME.json and NAME.md."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{time.strftime('%Y-%m-%d')}-{name}"
        stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        stem.with_suffix(".md").write_text(text + "\n")


def about(command: str = "") -> str:
    """When, where and by which command a table was made."""
    text = f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, Python {platform.python_version()}"
    return f"{text}\ncommand: python -m benchmarks.{command}" if command else text


def run_gfgen(
    lines: Iterable[Mapping[str, Any]], folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> tuple[Timeline, str]:
    """The timeline of a run into folder/out, whose trace is folder/trace.json, and what it said.

    Raises: RunError if it fails.
    """
    jobs, trace = folder / "jobs.jsonl", folder / "trace.json"
    jobs.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, "-m", "gfgen", "run", str(jobs), "--trace", str(trace), *options]
    command, environment = [*command, "-o", str(folder / "out")], {**os.environ, **(env or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return read_timeline(trace), done.stderr


def times_of(timeline: Timeline) -> tuple[float, str]:
    """Seconds from the first task to the last file, and medians of the stages in words."""
    tasks, stages = timeline.tasks, dict[str, list[float]]()
    for each in tasks:
        stages.setdefault(each.stage, []).append(each.duration_s)
    words = [f"{stage} {1e3 * statistics.median(each):.1f} ms" for stage, each in stages.items()]
    return max(each.end_s for each in (*tasks, *timeline.writes)) - tasks[0].start_s, ", ".join(words)


def cpu_s(*processes: psutil.Process) -> float:
    """User and system time so far, with that of their threads."""
    times = [each.cpu_times() for each in processes]
    return float(sum(each.user + each.system for each in times))


def device_ms(run: Callable[[], Any]) -> float:
    """Milliseconds on the GPU, from the launch of a call until it is done."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def host_s(run: Callable[[], Any]) -> float:
    """Seconds from an idle device to an idle device; also without a GPU."""
    import torch

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    run()
    if has_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
