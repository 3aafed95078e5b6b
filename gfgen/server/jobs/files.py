"""HTTP responses for finished files: with byte ranges, as a thumbnail, or converted to another format."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse, MalformedRangeHeader, RangeNotSatisfiable, Response
from starlette.types import Receive, Scope, Send

from gfgen.errors import OutputError
from gfgen.job import images
from gfgen.server.protocol.problems import ApiError

logger = logging.getLogger(__name__)

THUMBNAIL_SIDE = 320
MEDIA_TYPES = {".png": "image/png", ".mp4": "video/mp4", ".webp": "image/webp"}
PICTURE_FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}


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
            kept = {name: self.headers[name] for name in ("etag", "last-modified", "cache-control")}
            await Response(status_code=304, headers=kept)(scope, receive, send)

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        try:
            return super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            return []
        except RangeNotSatisfiable:
            headers = {"Content-Range": f"bytes */{file_size}"}
            raise ApiError(416, f"the file has {file_size} bytes", headers=headers, param="Range") from None


async def picture_as(path: Path, kind: str) -> bytes:
    return await asyncio.to_thread(_converted, path, kind)


def make_thumbnail(path: Path, small: Path) -> None:
    """Raises: ApiError if the file is missing or unreadable; OutputError if the disk is full."""
    try:
        path.stat()  # a missing file is not a broken video
        content = images.thumbnail(path, THUMBNAIL_SIDE)
    except images.ImageError:
        raise _no_picture() from None
    except OSError as error:
        raise _unreadable(error) from None
    partial = small.with_suffix(".partial")
    try:
        partial.write_bytes(content)
        partial.replace(small)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot write a thumbnail ({error.strerror}); free some space and retry") from None


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


def _unreadable(error: OSError) -> ApiError:
    if isinstance(error, FileNotFoundError):
        return _gone()
    if error.errno is None:  # Pillow does not recognise the content
        return _no_picture()
    logger.warning("cannot read a finished file: %s", error)
    return ApiError(
        503, f"the file cannot be read now ({error.strerror})", code="file_unreadable", retry_after_s=5
    )


def _gone() -> ApiError:
    return ApiError(404, "the file is gone", code="file_gone")


def _no_picture() -> ApiError:
    return ApiError(404, "no picture can be made of the file", code="no_thumbnail")
