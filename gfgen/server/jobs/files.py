"""Finished files as answers: whole or in part, small, or in another format."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from starlette.responses import Response, StreamingResponse

from gfgen.errors import OutputError
from gfgen.server.protocol.problems import ApiError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
THUMBNAIL_SIDE = 320
FFMPEG_S = 30.0
"""For one picture out of a video."""
MEDIA_TYPES = {".png": "image/png", ".mp4": "video/mp4", ".webp": "image/webp"}
PICTURE_FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
OWN_ID = re.compile(r"(video|image|job)_[0-9a-f]{24}")
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes `start` to `stop`, of a file that has `size`."""

    start: int
    stop: int
    size: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.size


def file_response(path: Path, headers: Mapping[str, str], *, method: str, name: str) -> Response:
    """The file, or the range of it that the request's headers ask for.

    It is opened here: removed meanwhile, it is still sent whole. Several ranges in one request are
    answered with the whole file, as RFC 9110 allows.

    Raises: ApiError when there is no file, it cannot be read, or has nothing in that range.
    """
    file = _OpenFile(path)
    stat = os.fstat(file.fd)
    tag = f'"{hashlib.sha256(f"{stat.st_mtime_ns}-{stat.st_size}".encode()).hexdigest()[:32]}"'
    own = {
        "Accept-Ranges": "bytes",
        "ETag": tag,
        "Last-Modified": formatdate(stat.st_mtime, usegmt=True),
        "Cache-Control": "private, max-age=3600",
        "Content-Disposition": f'inline; filename="{name}"',
    }
    if headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=own)
    part = _part(headers, tag, stat.st_size)
    own["Content-Length"] = str(part.stop - part.start)
    if not part.is_whole:
        own["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{part.size}"
    kind = MEDIA_TYPES.get(path.suffix, "application/octet-stream")
    status = 200 if part.is_whole else 206
    if method == "HEAD":
        return Response(status_code=status, headers=own, media_type=kind)
    return StreamingResponse(_chunks(file, part), status_code=status, headers=own, media_type=kind)


def _part(headers: Mapping[str, str], tag: str, size: int) -> _Part:
    whole = _Part(0, size, size)
    asked = _RANGE.fullmatch(headers.get("range", "").replace(" ", ""))
    if asked is None or headers.get("if-range", tag) != tag:
        return whole
    first, last = asked.groups()
    if not first and not last:
        return whole
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if first and last and int(last) < int(first):
        return whole
    if start >= size:
        raise ApiError(
            416, f"the file has {size} bytes", headers={"Content-Range": f"bytes */{size}"}, param="Range"
        )
    return _Part(start, stop, size)


class _OpenFile:
    """A file for reading; closed when nobody has it any more, also if its answer was never begun."""

    def __init__(self, path: Path) -> None:
        self.fd = -1
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(error) from None

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


async def _chunks(file: _OpenFile, part: _Part) -> AsyncIterator[bytes]:
    position = part.start
    while position < part.stop:
        length = min(CHUNK_BYTES, part.stop - position)
        piece = await asyncio.to_thread(os.pread, file.fd, length, position)
        if not piece:
            return
        position += len(piece)
        yield piece


async def thumbnail(path: Path, kept: Path, *, one_at_a_time: asyncio.Semaphore) -> Path:
    """A small picture of a finished file, made at the first request and kept.

    Raises: ApiError when there is no file, or it cannot be read; OutputError when this cannot be written.
    """
    if kept.exists():
        return kept
    async with one_at_a_time:
        if not kept.exists():
            picture = await _first_frame(path) if path.suffix == ".mp4" else path
            await asyncio.to_thread(_shrink, picture, kept)
    return kept


async def picture_as(path: Path, kind: str) -> bytes:
    """A finished picture in a format that it may not have; raises ApiError when it cannot be read."""
    return await asyncio.to_thread(_converted, path, kind)


async def _first_frame(path: Path) -> io.BytesIO:
    import imageio_ffmpeg

    if not path.exists():
        raise _gone()
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-nostdin"]
    command += [
        "-i",
        f"file:{path.absolute()}",
        "-frames:v",
        "1",
        "-f",
        "image2pipe",
        "-c:v",
        "png",
        "pipe:1",
    ]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise _not_now(error) from None
    try:
        async with asyncio.timeout(FFMPEG_S):
            content, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0 or not content:
        raise _no_picture()
    return io.BytesIO(content)


def _shrink(source: Path | io.BytesIO, kept: Path) -> None:
    from PIL import Image

    try:
        with Image.open(source) as picture:
            small = picture.convert("RGB")
            small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    except OSError as error:
        raise _unreadable(error) from None
    content = io.BytesIO()
    small.save(content, format="WEBP", quality=80)
    write_whole(kept, content.getvalue(), partial=kept.with_suffix(".partial"), what="a thumbnail")


def _converted(path: Path, kind: str) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    try:
        if kind == "png":
            return path.read_bytes()
        with Image.open(path) as picture:
            picture.convert("RGB").save(content, format=kind.upper(), quality=95)
    except OSError as error:
        raise _unreadable(error) from None
    return content.getvalue()


def write_whole(path: Path, content: bytes, *, partial: Path, what: str) -> None:
    """Write a file that is there as a whole or not at all, by way of `partial`; `what` is for the message.

    Raises: OutputError on a full disk and the like; nothing is left then.
    """
    try:
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"cannot write {what} ({error.strerror}); make room, then try again") from None


def _unreadable(error: OSError) -> ApiError:
    """What is answered when a finished file cannot be read, which it may be another time."""
    if isinstance(error, FileNotFoundError):
        return _gone()
    return _no_picture() if error.errno is None else _not_now(error)


def _gone() -> ApiError:
    return ApiError(404, "the file is gone", code="file_gone")


def _no_picture() -> ApiError:
    """Pillow and ffmpeg can do nothing with it."""
    return ApiError(404, "no picture can be made of the file", code="no_thumbnail")


def _not_now(error: OSError) -> ApiError:
    logger.warning("a finished file cannot be read: %s", error)
    return ApiError(
        503, f"the file cannot be read now ({error.strerror})", code="file_unreadable", retry_after_s=5
    )


def make_folders(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).mkdir(exist_ok=True)


def clear(
    folder: Path,
    unwanted: Callable[[set[str]], set[str]],
    *,
    suffixes: tuple[str, ...],
    made_after: float | None = None,
) -> None:
    """Remove files that are named by the id of a job, of those jobs that `unwanted` picks out of all.

    made_after: Unix time; files that are older stay.
    """
    paths = [path for path in folder.iterdir() if path.suffix in suffixes and OWN_ID.fullmatch(path.stem)]
    if made_after is not None:
        paths = [path for path in paths if path.stat().st_mtime >= made_after]
    gone = unwanted({path.stem for path in paths})
    for path in paths:
        if path.stem in gone:
            path.unlink(missing_ok=True)
