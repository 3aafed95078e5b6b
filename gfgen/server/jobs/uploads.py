"""Files that clients upload for batches: each has its content and a description in the folder `.files`."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from gfgen.errors import OutputError
from gfgen.server.protocol import batch_schemas
from gfgen.server.protocol.problems import ApiError

_NAME = ".files"
_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


class _KeptFile(batch_schemas.UploadedFile):
    owner: str | None = None

    @property
    def public(self) -> batch_schemas.UploadedFile:
        return batch_schemas.UploadedFile(**self.model_dump(exclude={"owner"}))


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

    def add(self, content: bytes, *, filename: str, now: float) -> batch_schemas.UploadedFile:
        used_bytes = sum(file.bytes for file in self._kept())
        if used_bytes + len(content) > self._most_bytes:
            raise ApiError(413, f"the files exceed {self._most_bytes:,} bytes; delete some", param="file")
        file_id = f"file-{secrets.token_hex(12)}"
        file = _KeptFile(
            id=file_id, bytes=len(content), created_at=int(now), filename=filename[:200], owner=self._owner
        )
        self._write(f"{file_id}.jsonl", content)
        self._write(f"{file_id}.json", file.model_dump_json().encode())
        return file.public

    def all(self) -> list[batch_schemas.UploadedFile]:
        """Most recent first."""
        return sorted((file.public for file in self._kept()), key=lambda file: file.created_at, reverse=True)

    def _kept(self) -> Iterator[_KeptFile]:
        for path in self._folder.glob("*.json"):
            try:
                file = _KeptFile.model_validate_json(self._read(path.stem, ".json"))
            except ApiError:  # removed meanwhile, or the description of a batch
                continue
            if self._owner in (None, file.owner):
                yield file

    def find(self, file_id: str) -> batch_schemas.UploadedFile:
        file = _KeptFile.model_validate_json(self._read(file_id, ".json"))
        if self._owner not in (None, file.owner):
            raise no_file(file_id)
        return file.public

    def content(self, file_id: str) -> bytes:
        self.find(file_id)
        return self._read(file_id, ".jsonl")

    def remove(self, file_id: str) -> None:
        self.find(file_id)
        for suffix in (".json", ".jsonl"):
            (self._folder / f"{file_id}{suffix}").unlink(missing_ok=True)

    def note_batch(self, batch_id: str, made_of: batch_schemas.BatchInput) -> None:
        self._write(f"{batch_id}.json", made_of.model_dump_json().encode())

    def forget_batch(self, batch_id: str) -> None:
        (self._folder / f"{batch_id}.json").unlink(missing_ok=True)

    def batch(self, batch_id: str) -> batch_schemas.BatchInput | None:
        """What a batch was made of; None for a batch of a job file."""
        if not _BATCH_ID.fullmatch(batch_id):
            return None
        try:
            return batch_schemas.BatchInput.model_validate_json(
                (self._folder / f"{batch_id}.json").read_bytes()
            )
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

    def _write(self, name: str, content: bytes) -> None:
        partial = self._folder / f"{name}.partial"  # readers see whole files
        try:
            self._folder.mkdir(exist_ok=True)
            partial.write_bytes(content)
            partial.replace(self._folder / name)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OutputError(f"cannot save the file ({error.strerror}); free some space and retry") from None


def no_file(file_id: str) -> ApiError:
    return ApiError(404, f"there is no file {file_id}", param="file_id", code="file_not_found")
