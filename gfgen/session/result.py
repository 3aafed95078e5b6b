"""What a program, or a filter of `--keep-if`, gets of a job that has ended."""

from __future__ import annotations

import base64
import html
import io
import math
import mimetypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfgen.errors import RunError
from gfgen.job.images import all_frames
from gfgen.job.spec import VIDEO_SUFFIXES, JobSpec
from gfgen.runtime.core.observer import JobOutcome

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Result:
    """A job that has ended, with the file that `gfgen run` would write."""

    job: JobSpec
    """As it ran: id, prompt, seed, steps, ..."""
    path: Path | None
    """Its file; None without `output_dir`."""
    error: str | None
    seconds: float
    """From its first task to its file."""
    contents: Sequence[bytes | Path] = field(repr=False)
    """Its files, or where they are."""
    suffix: str = field(repr=False)

    def check(self) -> None:
        """Raises: RunError if the job has failed."""
        if self.error is not None:
            raise RunError(f"job {self.job.id}: {self.error}")

    @cached_property
    def files(self) -> Sequence[bytes]:
        """The content of its files: one, or one for each picture. Raises: as `check`."""
        self.check()
        return [each.read_bytes() if isinstance(each, Path) else each for each in self.contents]

    @property
    def image(self) -> Image:
        """The picture, or the first one; of a video its first frame."""
        from PIL import Image

        return Image.fromarray(self.frames[0]) if self.is_video else Image.open(io.BytesIO(self.files[0]))

    @cached_property
    def frames(self) -> np.ndarray[Any, Any]:
        """All pictures or frames [F, H, W, C]; those of a video as its file has them, after compression."""
        import numpy as np

        return np.concatenate([_video(each) if self.is_video else _pictures(each) for each in self.files])

    @property
    def is_video(self) -> bool:
        return self.suffix in VIDEO_SUFFIXES

    def _repr_html_(self) -> str:
        name = f"<b>{html.escape(self.job.id)}</b>"
        if self.error is not None:
            return f"<p>{name}: {html.escape(self.error)}</p>"
        kind = mimetypes.guess_type(f"_{self.suffix}")[0] or "image/avif"
        form = '<video controls loop src="{}"></video>' if self.is_video else '<img src="{}">'
        urls = (f"data:{kind};base64,{base64.b64encode(each).decode()}" for each in self.files)
        return f"<p>{''.join(map(form.format, urls))}<br>{name} {html.escape(self.job.prompt)}</p>"


def result_of(outcome: JobOutcome, folder: Path) -> Result:
    """A job's result, whose files are in the output folder."""
    error = "it was cancelled" if outcome.status == "cancelled" else outcome.error
    paths = [folder / name for name in outcome.file_names]
    own, made = (None, []) if error else (paths[0], paths)
    seconds = 0.0 if outcome.started_s is None else outcome.ended_s - outcome.started_s
    return Result(outcome.info.spec, own, error, seconds, made, paths[0].suffix.lower())


def _pictures(content: bytes) -> np.ndarray[Any, Any]:
    import imageio.v3 as imageio

    found = imageio.imread(content, index=None)
    return found[None] if found.ndim == 3 else found


def _video(content: bytes) -> np.ndarray[Any, Any]:
    import numpy as np

    ppms = all_frames(content)
    head, width, height = re.match(rb"P6\s(\d+) (\d+)\s255\s", ppms).group(0, 1, 2)  # type: ignore[union-attr]
    shape = (int(height), int(width), 3)
    rows = np.frombuffer(ppms, np.uint8).reshape(-1, len(head) + math.prod(shape))
    return rows[:, len(head) :].reshape(-1, *shape)
