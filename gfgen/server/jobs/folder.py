"""The output folder of a server: results, inputs of open jobs and thumbnails, named by job id."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gfgen.errors import OutputError
from gfgen.job.images import ImageError, ImageReader
from gfgen.server.jobs import files
from gfgen.server.jobs.job_requests import RequestedJob, checked_picture
from gfgen.server.protocol.problems import ApiError
from gfgen.server.store import JobFacts, Store

logger = logging.getLogger(__name__)

_INPUTS_NAME, _THUMBNAILS_NAME = ".inputs", ".thumbnails"
_OWN_ID = re.compile(r"(video|image|job)_[0-9a-f]{24}")


class JobFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.inputs, self._thumbnails = path / _INPUTS_NAME, path / _THUMBNAILS_NAME
        self._pictures = asyncio.Semaphore(1)

    def result(self, facts: JobFacts) -> Path:
        return self.path / facts.file

    def result_stat(self, facts: JobFacts) -> os.stat_result | None:
        try:
            return self.result(facts).stat()
        except OSError:
            return None

    async def thumbnail(self, facts: JobFacts) -> Path:
        """A small picture of the result, made on the first request."""
        small = self._thumbnail(facts.id)
        if small.exists():
            return small
        async with self._pictures:
            if not small.exists():
                await asyncio.to_thread(files.make_thumbnail, self.result(facts), small)
        return small

    async def save_input(self, requested: RequestedJob) -> RequestedJob:
        """Check the picture and the files of a request, and save them under the job's id.

        Raises: ApiError if one is no picture or video; OutputError if the disk is full.
        """
        requested = await self._save_uploads(requested)
        if requested.picture is None:
            return requested
        async with self._pictures:
            param = (requested.words or {}).get("image", "image")
            sha256 = await asyncio.to_thread(checked_picture, requested.picture, param=param)
        path = self.inputs / requested.spec.id
        await asyncio.to_thread(_write_picture, path, requested.picture)
        return replace(requested, spec=replace(requested.spec, image=str(path), image_sha256=sha256))

    async def _save_uploads(self, requested: RequestedJob) -> RequestedJob:
        paths: dict[str, str | list[str]] = {}
        hashes: dict[str, str | list[str]] = {}
        number = itertools.count(1)
        for argument, uploads in requested.uploads.items():
            found = []
            for upload in uploads:
                name = f"{requested.spec.id}.{next(number)}{upload.suffix}"
                await asyncio.to_thread(_write_picture, self.inputs / name, upload.content)
                async with self._pictures:
                    found.append(await asyncio.to_thread(self._checked, name, argument))
            is_list = len(found) > 1 or uploads[0].is_item
            paths[argument] = [path for path, _ in found] if is_list else found[0][0]
            hashes[argument] = [digest for _, digest in found] if is_list else found[0][1]
        if not paths:
            return requested
        return replace(requested, spec=replace(requested.spec, files=paths, files_sha256=hashes))

    def _checked(self, name: str, argument: str) -> tuple[str, str]:
        try:
            path, sha256 = ImageReader(self.inputs).check(name, may_be_video=True)
        except ImageError as error:
            reason = str(error).replace(str(self.inputs / name), "the file")
            raise ApiError(400, f"files.{argument}: {reason}", param=f"files.{argument}") from None
        return str(path), sha256

    def remove_input(self, name: str) -> None:
        for path in (self.inputs / name, *self.inputs.glob(f"{name}.*")):
            _unlink(path)

    def remove_result(self, file: str) -> None:
        _unlink(self.path / file)

    def remove(self, facts: JobFacts) -> None:
        _unlink(self.result(facts))
        _unlink(self._thumbnail(facts.id))

    def prepare(self, store: Store) -> None:
        """Create the folders, and remove what a killed server left of cancelled, failed and unknown jobs.

        A damaged store may be repaired and put back later. So results are removed only if this store knows
        that their jobs have none, and input pictures only if they are newer than the store.
        """
        for folder in (self.inputs, self._thumbnails):
            folder.mkdir(exist_ok=True)
        open_ids = {facts.id for facts, _ in store.open_jobs()}
        _clear(self.inputs, lambda ids: ids - open_ids, made_after=store.made_at)
        thumbnails, results = (".webp", ".partial"), (".png", ".mp4")
        _clear(self._thumbnails, lambda ids: ids - store.known(ids, "open", "completed"), suffixes=thumbnails)
        _clear(self.path, lambda ids: store.known(ids, "cancelled", "failed"), suffixes=results)

    def _thumbnail(self, job_id: str) -> Path:
        return self._thumbnails / f"{job_id}.webp"


def _write_picture(path: Path, content: bytes) -> None:
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
    suffixes: tuple[str, ...] | None = None,
    made_after: float = 0.0,
) -> None:
    """Remove files that are named by an unwanted job id with one of these suffixes, or with any.

    Files from before `made_after` (Unix time) stay.
    """
    found = [(path, path.name.partition(".")[0]) for path in folder.iterdir()]
    found = [
        (path, job_id)
        for path, job_id in found
        if (suffixes is None or path.name.removeprefix(job_id) in suffixes) and _OWN_ID.fullmatch(job_id)
    ]
    found = [(path, job_id) for path, job_id in found if path.stat().st_mtime >= made_after]
    gone = unwanted({job_id for _, job_id in found})
    for path, job_id in found:
        if job_id in gone:
            path.unlink(missing_ok=True)
