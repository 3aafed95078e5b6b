"""The output folder of a server: results, inputs of open jobs and thumbnails, named by job id."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gfgen.errors import OutputError
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import RequestedJob, checked_picture
from gfgen.server.jobs.store import JobFacts, Store

logger = logging.getLogger(__name__)

_INPUTS_NAME, _THUMBNAILS_NAME = ".inputs", ".thumbnails"
_OWN_ID = re.compile(r"(video|image|job)_[0-9a-f]{24}")


class JobFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._inputs, self._thumbnails = path / _INPUTS_NAME, path / _THUMBNAILS_NAME
        self._pictures = asyncio.Semaphore(1)
        """Limits how many pictures are decoded at the same time."""

    def result(self, facts: JobFacts) -> Path:
        return self.path / facts.file

    def result_stat(self, facts: JobFacts) -> os.stat_result | None:
        """None if the result is missing or inaccessible."""
        try:
            return self.result(facts).stat()
        except OSError:
            return None

    async def thumbnail(self, facts: JobFacts) -> Path:
        return await files.thumbnail(
            self.result(facts), self._thumbnail(facts.id), one_at_a_time=self._pictures
        )

    def input(self, facts: JobFacts) -> str | None:
        """The path of the job's input picture."""
        return None if facts.input_file is None else str(self._inputs / facts.input_file)

    async def save_input(self, requested: RequestedJob) -> RequestedJob:
        """Check the picture of a request and save it under the job's id.

        Raises: ApiError if it is not a picture; OutputError if the disk is full.
        """
        if requested.picture is None:
            return requested
        async with self._pictures:
            param = (requested.words or {}).get("image", "image")
            sha256 = await asyncio.to_thread(checked_picture, requested.picture, param=param)
        path = self._inputs / requested.spec.id
        await asyncio.to_thread(_write_picture, path, requested.picture)
        return replace(requested, spec=replace(requested.spec, image=str(path), image_sha256=sha256))

    def remove_input(self, name: str) -> None:
        _unlink(self._inputs / name)

    def remove_result(self, file: str) -> None:
        _unlink(self.path / file)

    def remove(self, facts: JobFacts) -> None:
        """Remove the result and its thumbnail."""
        _unlink(self.result(facts))
        _unlink(self._thumbnail(facts.id))

    def prepare(self, store: Store) -> None:
        """Create the folders, and remove what a killed server left of cancelled, failed and unknown jobs.

        A damaged store may be repaired and put back later. So results are removed only if this store knows
        that their jobs have none, and input pictures only if they are newer than the store.
        """
        for folder in (self._inputs, self._thumbnails):
            folder.mkdir(exist_ok=True)
        open_ids = {facts.id for facts, _ in store.open_jobs()}
        _clear(self._inputs, lambda ids: ids - open_ids, suffixes=("",), made_after=store.made_at)
        _clear(self._thumbnails, lambda ids: ids - store.with_file(ids), suffixes=(".webp", ".partial"))
        _clear(self.path, store.without_file, suffixes=(".png", ".mp4"))

    def _thumbnail(self, job_id: str) -> Path:
        return self._thumbnails / f"{job_id}.webp"


def _write_picture(path: Path, content: bytes) -> None:
    """Raises: OutputError if the disk is full; the caller removes the partial file."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OutputError(
            f"cannot save the input picture ({error.strerror}); free some space and retry"
        ) from None


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error.strerror)


def _clear(
    folder: Path,
    unwanted: Callable[[set[str]], set[str]],
    *,
    suffixes: tuple[str, ...],
    made_after: float = 0.0,
) -> None:
    """Remove files that are named by a job id, if `unwanted` returns that id and the file is not older
    than `made_after` (Unix time)."""
    paths = [path for path in folder.iterdir() if path.suffix in suffixes and _OWN_ID.fullmatch(path.stem)]
    paths = [path for path in paths if path.stat().st_mtime >= made_after]
    gone = unwanted({path.stem for path in paths})
    for path in paths:
        if path.stem in gone:
            path.unlink(missing_ok=True)
