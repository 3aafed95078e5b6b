"""Shards: one object with the files of many jobs, as WebDataset (a tar) or Parquet."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gfgen.errors import InputError
from gfgen.runtime.core.devices import parse_memory
from gfgen.runtime.files.manifest import ManifestLine, manifest_lines, of_each_file

SHARD, PART = "shard-", "manifest-"
SUFFIXES = {"webdataset": ".tar", "parquet": ".parquet"}
DEFAULT_SIZE = "10000,256MB"
GROUP_ROWS, GROUP_BYTES = 100, 2**24  # of a row group in Parquet, which is built in memory
_SHOWN = ("id", "prompt", "negative_prompt", "model", "tag", "file")
_NUMBERS = ("seed", "steps", "width", "height", "frames")


@dataclass(frozen=True, slots=True)
class Shards:
    kind: str | None  # a key of SUFFIXES; None for files that are in no shard
    max_jobs: int
    max_bytes: int

    @classmethod
    def of(cls, kind: str | None, size: str) -> Shards:
        """Raises: InputError for a size, or without pyarrow."""
        counts = [each for each in size.split(",") if each.strip().isdigit()]
        sizes = [each for each in size.split(",") if not each.strip().isdigit()]
        if len(counts) > 1 or len(sizes) > 1 or counts == ["0"]:
            raise InputError(f"--shard-size {size}: jobs, bytes or both are accepted, as {DEFAULT_SIZE}")
        if kind == "parquet":
            try:
                import pyarrow.parquet  # noqa: F401
            except ImportError:
                raise InputError("--shards parquet needs pyarrow; pip install 'gfgen[data]'") from None
        max_bytes = parse_memory(sizes[0], option="--shard-size") if sizes else 2**62
        return cls(kind, int(counts[0]) if counts else 2**62, max_bytes)

    @property
    def suffix(self) -> str | None:
        return SUFFIXES.get(self.kind or "")

    def is_full(self, num_jobs: int, size_bytes: int) -> bool:
        return num_jobs >= self.max_jobs or size_bytes >= self.max_bytes

    def write(self, path: Path, lines: Iterable[ManifestLine], folder: Path) -> None:
        """Make a shard of the jobs of these lines, each with its `job`, whose files are in the folder."""
        partial = path.with_suffix(".part")
        with partial.open("wb") as file:
            (_write_tar if self.kind == "webdataset" else _write_parquet)(file, lines, folder)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)


def lines_of(path: Path) -> Iterator[ManifestLine]:
    """The manifest lines of the jobs in a shard, or in a part of a manifest."""
    if path.suffix not in SUFFIXES.values():
        yield from manifest_lines(path.read_bytes(), path)
        return
    if path.suffix == SUFFIXES["parquet"]:
        from pyarrow import parquet

        yield from map(json.loads, parquet.read_table(path, columns=["manifest"])[0].to_pylist())
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.endswith(".json") and (content := archive.extractfile(member)) is not None:
                yield {name: value for name, value in json.load(content).items() if name != "job"}


def _write_tar(file: IO[bytes], lines: Iterable[ManifestLine], folder: Path) -> None:
    """Each job is a sample, whose key is its id; a dot would end the key, so ~ replaces it."""
    with tarfile.open(fileobj=file, mode="w") as archive:
        for line in lines:
            files = [folder / str(each["file"]) for each in of_each_file(line)]
            key = str(line["id"]).replace(".", "~")
            for number, path in enumerate(files, start=1):
                member = tarfile.TarInfo(f"{key}{f'.{number:04}' if len(files) > 1 else ''}{path.suffix}")
                member.size = path.stat().st_size
                with path.open("rb") as content:
                    archive.addfile(member, content)
            text = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace")
            member = tarfile.TarInfo(f"{key}.json")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))


def _write_parquet(file: IO[bytes], lines: Iterable[ManifestLine], folder: Path) -> None:
    """A row for each job: what it was, the bytes of its file, and its manifest line as JSON."""
    import pyarrow as pa
    from pyarrow import parquet

    of_file = {"file": pa.string(), "bytes": pa.binary()}
    schema = pa.schema(
        {
            **dict.fromkeys(_SHOWN, pa.string()),
            **dict.fromkeys(_NUMBERS, pa.int64()),
            "fps": pa.float64(),
            "bytes": pa.binary(),
            "more_files": pa.list_(pa.struct(of_file)),
            **dict.fromkeys(("job", "manifest"), pa.string()),
        }
    )
    with closing(parquet.ParquetWriter(file, schema)) as writer:
        rows: list[dict[str, Any]] = []
        for line in lines:
            rows.append(_row(line, folder))
            files = (each for row in rows for each in (row, *row["more_files"]))
            if len(rows) == GROUP_ROWS or sum(len(each["bytes"]) for each in files) > GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, schema))


def _row(line: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    first, *more = [
        {"file": each["file"], "bytes": (folder / str(each["file"])).read_bytes()}
        for each in of_each_file(dict(line))
    ]
    texts = {
        "job": json.dumps(line.get("job"), ensure_ascii=False),
        "manifest": json.dumps({name: line[name] for name in line if name != "job"}, ensure_ascii=False),
    }
    known = {name: line.get(name) for name in (*_SHOWN, *_NUMBERS)}
    return {**known, **line["shape"], **first, "more_files": more, **texts}
