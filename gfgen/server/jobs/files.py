"""The output folder of a server: results, inputs of open jobs and thumbnails, named by job id.

Also finished files as HTTP responses, and files that clients upload for batches (in the folder `.files`).
"""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import itertools
import logging
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse, MalformedRangeHeader, RangeNotSatisfiable
from starlette.staticfiles import NotModifiedResponse
from starlette.types import Receive, Scope, Send

from gfgen.errors import OutputError
from gfgen.job import images
from gfgen.server.jobs.job_requests import RequestedJob, checked_picture
from gfgen.server.protocol.problems import ApiError, bad
from gfgen.server.protocol.server_schemas import BatchInput, Purpose, UploadedFile
from gfgen.server.store import ENDED, JobFacts, RemovedError, Store

logger = logging.getLogger(__name__)

THUMBNAIL_SIDE = 320
MEDIA_TYPES = {".png": "image/png", ".mp4": "video/mp4", ".webp": "image/webp"}
PICTURE_FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_INPUTS_NAME, _THUMBNAILS_NAME = ".inputs", ".thumbnails"


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
                await asyncio.to_thread(make_thumbnail, self.result(facts), small)
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
        await asyncio.to_thread(_write, path, requested.picture, what="save the input picture")
        return replace(requested, spec=replace(requested.spec, image=str(path), image_sha256=sha256))

    async def _save_uploads(self, requested: RequestedJob) -> RequestedJob:
        paths: dict[str, str | list[str]] = {}
        hashes: dict[str, str | list[str]] = {}
        words = requested.words or {}
        number = itertools.count(1)
        for argument, uploads in requested.uploads.items():
            found = []
            for upload in uploads:
                name = f"{requested.spec.id}.{next(number)}{upload.suffix}"
                content = upload.content
                await asyncio.to_thread(_write, self.inputs / name, content, what="save the input picture")
                async with self._pictures:
                    param = words.get(f"files.{argument}", f"files.{argument}")
                    found.append(await asyncio.to_thread(self._checked, name, param))
            is_list = len(found) > 1 or uploads[0].is_item
            paths[argument] = [path for path, _ in found] if is_list else found[0][0]
            hashes[argument] = [digest for _, digest in found] if is_list else found[0][1]
        if not paths:
            return requested
        return replace(requested, spec=replace(requested.spec, files=paths, files_sha256=hashes))

    def _checked(self, name: str, param: str) -> tuple[str, str]:
        try:
            path, sha256 = images.ImageReader(self.inputs).check(name, may_be_video=True)
        except images.ImageError as error:
            reason = str(error).replace(str(self.inputs / name), "the file")
            raise bad(param, reason) from None
        return str(path), sha256

    def remove_input(self, name: str) -> None:
        for path in (self.inputs / name, *self.inputs.glob(f"{name}.*")):
            _unlink(path)

    def remove_inputs(self, requested: Iterable[RequestedJob]) -> None:
        for one in requested:
            if one.has_inputs:
                self.remove_input(one.spec.id)

    def remove_result(self, file: str) -> None:
        _unlink(self.path / file)

    def remove(self, facts: JobFacts) -> None:
        _unlink(self.result(facts))
        _unlink(self._thumbnail(facts.id))

    def prepare(self, store: Store) -> None:
        """Create the folders, and remove what a killed server left of jobs that this store knows as ended.

        Files of other jobs stay, since a damaged store may be repaired and put back later; but not input
        pictures that are newer than this store's first job, whose requests were never accepted.
        """
        for folder in (self.inputs, self._thumbnails):
            folder.mkdir(exist_ok=True)
        first_at = store.first_at
        for folder, statuses in ((self.inputs, ENDED), (self.path, ("cancelled", "failed"))):
            ids = {path: path.name.partition(".")[0] for path in folder.iterdir()}
            unwanted = store.known(ids.values(), *statuses)
            if folder == self.inputs:
                new = {name for path, name in ids.items() if path.stat().st_mtime >= first_at}
                unwanted |= set(filter(_JOB_ID.fullmatch, new)) - store.known(new, "open")
            for path, job_id in ids.items():
                is_own = folder == self.inputs or path.name.removeprefix(job_id) in (".png", ".mp4")
                if is_own and job_id in unwanted:
                    _unlink(path)

    def _thumbnail(self, job_id: str) -> Path:
        return self._thumbnails / f"{job_id}.webp"


def zipped(paths: Iterable[Path]) -> Iterator[bytes]:
    """A ZIP file, one file at a time; a file that is gone is left out."""
    pieces = _Pieces()
    with zipfile.ZipFile(pieces, "w", strict_timestamps=False) as archive:  # type: ignore[call-overload]
        for path in paths:
            with suppress(FileNotFoundError):
                archive.write(path, path.name)
            yield b"".join(pieces)
            pieces.clear()
    yield b"".join(pieces)


class _Pieces(list[bytes]):
    """Where zipfile writes; without `seek`, it writes from start to end."""

    def write(self, content: bytes) -> int:
        self.append(bytes(content))
        return len(content)

    def flush(self) -> None:
        pass


def _write(path: Path, content: bytes, *, what: str) -> None:
    """Write a whole file or none. Raises: OutputError if the disk is full."""
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except FileNotFoundError:
        raise RemovedError(f"cannot {what}: its folder was removed; start the server again") from None
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot {what} ({error.strerror}); free some space and retry") from None


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error.strerror)


class StoredFile(FileResponse):
    """A finished file. It is opened here, so a file that is removed meanwhile is still sent whole.

    A request for several ranges, or for a malformed one, gets the whole file, as RFC 9110 allows.

    Raises: ApiError if the file is missing or unreadable.
    """

    chunk_size = 1 << 18
    max_ranges = 1

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise _unreadable(error) from None
        super().__init__(
            f"/proc/self/fd/{self._file.fileno()}",
            filename=path.name,
            media_type=MEDIA_TYPES.get(path.suffix, "application/octet-stream"),
            headers={"Cache-Control": "private, max-age=3600"},
            stat_result=os.fstat(self._file.fileno()),
            content_disposition_type="inline",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            if Headers(scope=scope).get("if-none-match") != self.headers["etag"]:
                await super().__call__(scope, receive, send)
                return
            await NotModifiedResponse(self.headers)(scope, receive, send)

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        try:
            return super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            return []
        except RangeNotSatisfiable:
            headers = {"Content-Range": f"bytes */{file_size}"}
            raise ApiError(416, f"the file has {file_size} bytes", headers=headers, param="Range") from None


async def picture_as(path: Path, kind: str, quality: int | None = None) -> bytes:
    return await asyncio.to_thread(_converted, path, kind, quality)


async def base64_as(path: Path, kind: str, quality: int | None = None) -> str:
    return await asyncio.to_thread(lambda: base64.b64encode(_converted(path, kind, quality)).decode())


def make_thumbnail(path: Path, small: Path) -> None:
    """Raises: ApiError if the file is missing or unreadable; OutputError if the disk is full."""
    try:
        path.stat()  # a missing file is not a broken video
        content = images.thumbnail(path, THUMBNAIL_SIDE)
    except images.ImageError:
        raise _no_picture() from None
    except OSError as error:
        raise _unreadable(error) from None
    _write(small, content, what="write a thumbnail")


def _converted(path: Path, kind: str, quality: int | None) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    try:
        if kind == "png":
            return path.read_bytes()
        with Image.open(path) as picture:
            shown = images.as_rgb(picture) if kind == "jpeg" else picture
            shown.save(content, format=kind.upper(), quality=95 if quality is None else quality)
    except OSError as error:
        raise _unreadable(error) from None
    return content.getvalue()


def _unreadable(error: OSError) -> ApiError:
    if isinstance(error, FileNotFoundError):
        return ApiError(404, "the file is gone", code="file_gone")
    if error.errno is None:  # Pillow does not recognise the content
        return _no_picture()
    logger.warning("cannot read a finished file: %s", error)
    return ApiError(
        503, f"the file cannot be read now ({error.strerror})", code="file_unreadable", retry_after_s=5
    )


def _no_picture() -> ApiError:
    return ApiError(404, "no picture can be made of the file", code="no_thumbnail")


_NAME = ".files"
_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
_JOB_ID = re.compile(r"(video|image|job)_[0-9a-f]{24}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


class Uploads:
    """All methods read or write the disk. They raise OutputError if it is full."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self._folder = folder / _NAME
        self._most_bytes = most_bytes
        self._owner: str | None = None

    def seen_by(self, owner: str) -> Uploads:
        uploads = copy.copy(self)
        uploads._owner = owner
        return uploads

    def add(self, content: bytes, *, filename: str, now: float, purpose: Purpose = "batch") -> UploadedFile:
        if purpose != "batch":
            checked_picture(content, param="file")
        used_bytes = sum(file.bytes for file in self._kept())
        if used_bytes + len(content) > self._most_bytes:
            raise ApiError(413, f"the files exceed {self._most_bytes:,} bytes; delete some", param="file")
        file_id = f"file-{secrets.token_hex(12)}"
        file = UploadedFile(
            id=file_id,
            bytes=len(content),
            created_at=int(now),
            filename=filename[:200],
            purpose=purpose,
            owner=self._owner,
        )
        self._save(f"{file_id}.jsonl", content)
        self._save(f"{file_id}.json", file.model_dump_json().encode())
        return file

    def all(self) -> list[UploadedFile]:
        """Most recent first."""
        return sorted(self._kept(), key=lambda file: file.created_at, reverse=True)

    def _kept(self) -> Iterator[UploadedFile]:
        for path in self._folder.glob("*.json"):
            with suppress(ApiError):  # removed meanwhile, of another key, or the description of a batch
                yield self.find(path.stem)

    def find(self, file_id: str) -> UploadedFile:
        file = UploadedFile.model_validate_json(self._read(file_id, ".json"))
        if self._owner not in (None, file.owner):
            raise no_file(file_id)
        return file

    def content(self, file_id: str) -> bytes:
        self.find(file_id)
        return self._read(file_id, ".jsonl")

    def remove(self, file_id: str) -> None:
        self.find(file_id)
        for suffix in (".json", ".jsonl"):
            (self._folder / f"{file_id}{suffix}").unlink(missing_ok=True)

    def note_batch(self, batch_id: str, made_of: BatchInput) -> None:
        self._save(f"{batch_id}.json", made_of.model_dump_json().encode())

    def forget_batch(self, batch_id: str) -> None:
        (self._folder / f"{batch_id}.json").unlink(missing_ok=True)

    def batch(self, batch_id: str) -> BatchInput | None:
        """What a batch was made of; None for a batch of a job file."""
        if not _BATCH_ID.fullmatch(batch_id):
            return None
        try:
            return BatchInput.model_validate_json((self._folder / f"{batch_id}.json").read_bytes())
        except FileNotFoundError:
            return None

    def remove_expired(self, *, before: float, is_kept: Callable[[str], bool]) -> None:
        for path in self._folder.glob("*"):
            with suppress(FileNotFoundError):  # removed meanwhile
                if path.stat().st_mtime < before and not is_kept(path.stem):
                    path.unlink()

    def _read(self, file_id: str, suffix: str) -> bytes:
        if _FILE_ID.fullmatch(file_id):
            try:
                return (self._folder / f"{file_id}{suffix}").read_bytes()
            except FileNotFoundError:
                pass
        raise no_file(file_id)

    def _save(self, name: str, content: bytes) -> None:
        _write(self._folder / name, content, what="save the file")


def no_file(file_id: str) -> ApiError:
    return ApiError(404, f"there is no file {file_id}", param="file_id", code="file_not_found")
