"""What benchmarks of models have in common: shapes, choices of cases, results, times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch


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


def device_ms(run: Callable[[], Any]) -> float:
    """Milliseconds on the GPU, from the launch of a call until it is done."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def host_s(run: Callable[[], Any]) -> float:
    """Seconds from an idle device to an idle device; also without a GPU."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    run()
    if has_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
