"""Small jobs that try a model, with pictures for the files that its call needs. Imports no torch."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from gfgen.errors import JobError
from gfgen.job.spec import JobSpec

FRAMES = 9


def resolved(geometry: Any, job: JobSpec, folder: Path) -> JobSpec:
    """The job as run, with pictures of `folder` for the files that the call needs.

    Raises: JobError.
    """
    try:
        return geometry.resolve(job)  # type: ignore[no-any-return]
    except JobError as error:
        missing = [problem.field or "" for problem in error.problems if problem.value is None]
        names = [name.removeprefix("files.") for name in missing if name == "image" or "files." in name]
        if not names:
            raise
        return geometry.resolve(with_files(job, names, folder))  # type: ignore[no-any-return]


def with_files(job: JobSpec, names: Collection[str], folder: Path) -> JobSpec:
    """The job with pictures of the folder for these arguments."""
    files = {**(job.files or {}), **{name: _file(name, folder) for name in names if name != "image"}}
    image = str(folder / "0.png") if "image" in names else job.image
    return dataclasses.replace(job, image=image, files=files or None)


@contextmanager
def pictures() -> Iterator[Path]:
    """A folder with pictures 0.png to 8.png, and a mask."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gradient = Image.linear_gradient("L").resize((256, 256))
        for number in range(FRAMES):
            gradient.rotate(10 * number).convert("RGB").save(folder / f"{number}.png")
        gradient.point(lambda value: 255 * (value > 127)).save(folder / "mask.png")
        yield folder


def _file(name: str, folder: Path) -> str | list[str]:
    if "mask" in name:
        return str(folder / "mask.png")
    if "video" in name:
        return [str(folder / f"{number}.png") for number in range(FRAMES)]
    return str(folder / "0.png")
