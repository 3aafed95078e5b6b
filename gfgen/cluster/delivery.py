"""The way of an attempt's files from its node to the driver's output folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gfgen.cluster.member import attempt_folder
from gfgen.errors import OutputError
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.ipc.content import Content, name_file, temporary_name

CHUNK_BYTES = 8 * 2**20
"""Two of them are in the driver's memory at a time: the one that comes, and the one that is written."""

Read = Callable[[str, int, int], bytes]
"""(file, offset, size) -> a part of a file of the node."""


class FileDelivery:
    """Complete files of one attempt under temporary names."""

    def __init__(self, job: AdmittedJob, outcome: JobOutcome, *, attempt: int, output_dir: Path) -> None:
        self._job, self._outcome, self._attempt = job, outcome, attempt
        self._path = output_dir / job.info.file
        self._names = [name for name, _, _ in outcome.files] or [self._path.name]
        self._temporary: dict[str, Path] = {}

    def fetch(self, read: Read) -> None:
        """Copy the files into the output folder. Raises: OutputError; what `read` raises."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for name in self._names:
                # Like those of writers, so that the next run removes what this one leaves.
                pid = int(f"{os.getpid()}{self._attempt:06}")
                temporary = self._temporary[name] = temporary_name(self._path.with_name(name), pid=pid)
                with temporary.open("wb") as stream:
                    offset = 0
                    while chunk := read(self._on_node(name), offset, CHUNK_BYTES):
                        stream.write(chunk)
                        offset += len(chunk)
        except OSError as error:
            self.drop()
            raise OutputError(f"cannot write {self._path}: {error.strerror or error}") from error

    def take(self, folder: Path) -> None:
        """Use the files where they are, in a folder on the same file system."""
        self._temporary = {name: folder / self._on_node(name) for name in self._names}

    def publish(self) -> JobOutcome:
        info, sizes = self._job.info, {name: (size, digest) for name, size, digest in self._outcome.files}
        if self._outcome.written is not None and not sizes:
            sizes = {self._path.name: (self._outcome.written.size_bytes, self._outcome.written.sha256)}
        made_for = {"id": info.job_id, "spec_hash": info.spec_hash, "job_file": info.job_file}
        try:
            for name, temporary in self._temporary.items():
                is_only = len(self._temporary) == 1
                replaces = self._job.replaces if is_only else self._job.replaces_numbered.get(name)
                path = self._path.with_name(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                if temporary.stat().st_size != sizes[name][0]:
                    raise OutputError(f"{path}: only a part of the file came from its node")
                found = name_file(temporary, path, replaces=replaces, made_for=made_for if is_only else None)
                if found != Content(*sizes[name]):
                    raise OutputError(f"{path}: the file changed on its way from its node; run again")
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror or error}") from error
        finally:
            self.drop()
        return replace(self._outcome, info=info)

    def drop(self) -> None:
        for temporary in self._temporary.values():
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _on_node(self, name: str) -> str:
        return str(Path(attempt_folder(self._attempt), self._job.info.file).with_name(name))


def make_shared(output_dir: Path, name: str) -> Path:
    """A folder for a node's files in a shared output folder."""
    folder = output_dir / ".nodes" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def remove_shared(output_dir: Path) -> None:
    shutil.rmtree(output_dir / ".nodes", ignore_errors=True)
