"""Find a component's weight files and check that they are complete, by names and headers alone.

A folder may hold the same weights more than once: as safetensors and as .bin, in another precision
(`*.fp16.safetensors`), in one file and in shards of an older download. The files that `from_pretrained`
reads count.

A safetensors file begins with the length of a JSON header (8 bytes, little endian), the header
(name -> dtype, shape, data_offsets), then the tensors. So the file's size shows an incomplete download.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gfgen.errors import ModelError

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
_AGAIN = "download the model again"
_REMOVE = "remove it"
"""A new download does not replace an existing file."""
_SUFFIXES = (".safetensors", ".bin")
EDGE_BYTES = 2**16
"""Of each end of a weight file that count for its hash; reading all of 60 GB would take minutes."""
_POINTER = b"version https://git-lfs"
"""First bytes of the file that git leaves in place of a large one if git-lfs is not set up."""

SINGLE_FILE = "single_file"
"""Stem of a link to a published file with the weights of several components (single_file.py)."""
SINGLE_SUFFIXES = (".safetensors", ".gguf")
PART_OF_KEY = {
    "first_stage_model": "vae",
    "vae": "vae",
    "cond_stage_model": "text",
    "conditioner": "text",
    "text_encoders": "text",
}
"""The part of a model that keys of a published file with this beginning belong to. Others: "denoiser".
Source: diffusers 0.42 loaders/single_file_utils.py."""

_STEMS = {
    "diffusers": ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    "transformers": ("model", "pytorch_model"),
}
"""By library: the stem of *.safetensors, and that of *.bin."""


def weight_files(folder: Path, library: str) -> tuple[Path, ...]:
    """The files that `from_pretrained` of this library reads a component's weights from.

    Raises: ModelError if there are none, if a file in the index is missing, or if the library reads none of
            the files that are there.
    Source: diffusers 0.42 ModelMixin.from_pretrained, transformers 5 _get_resolved_checkpoint_files.
    """
    for suffix in SINGLE_SUFFIXES:
        if (path := folder / f"{SINGLE_FILE}{suffix}").is_file():
            return (path,)
    safe, pickled = _STEMS.get(library, _STEMS["diffusers"])
    if library not in _STEMS and not list(folder.glob(f"{safe}*")):  # code of its own, for transformers
        safe, pickled = _STEMS["transformers"]
    single, index = folder / f"{safe}.safetensors", folder / f"{safe}.safetensors.index.json"
    candidates = (index, single) if library != "transformers" else (single, index)
    for path in (*candidates, folder / f"{pickled}.bin", folder / f"{pickled}.bin.index.json"):
        if path.is_file():
            return _shards(path) if path.suffix == ".json" else (path,)
        if path.is_symlink():
            raise ModelError(f"{path}: is a link to a file that does not exist; {_AGAIN}")
    raise ModelError(f"{folder}: {_what_is_wrong(folder, safe)}")


def part_of(component: str) -> str | None:
    """The part of a published file that a component's weights are in; None if it never has them."""
    if component.startswith(("transformer", "unet")):
        return "denoiser"
    return "vae" if component == "vae" else "text" if component.startswith("text_encoder") else None


def own_tensors(path: Path) -> Mapping[str, Any]:
    """The tensors of a safetensors file that belong to the component in whose folder it is.

    The first text encoder counts for all that are in a published file.
    """
    header = read_header(path)
    if path.stem != SINGLE_FILE:
        return header
    part = None if path.parent.name.startswith("text_encoder_") else part_of(path.parent.name)
    return {
        name: entry
        for name, entry in header.items()
        if PART_OF_KEY.get(name.partition(".")[0], "denoiser") == part
    }


def check_weights(files: Sequence[Path]) -> None:
    """Check the files that `weight_files` found.

    Raises: ModelError if one is truncated or lacks tensors.
    """
    headers = {path: read_header(path) for path in files if path.suffix == ".safetensors"}
    for index in {index for path in headers for index in path.parent.glob("*.safetensors.index.json")}:
        for tensor, shard in _weight_map(index).items():
            if tensor not in headers.get(path := index.with_name(shard), {tensor}):
                raise ModelError(f"{path}: no {tensor!r}, which {index.name} expects; {_AGAIN}")


def weights_mark(checkpoint: Path) -> str:
    """A mark that changes with the weight files' names, sizes and modification times; reads no file."""
    files = sorted(path for suffix in _SUFFIXES for path in checkpoint.glob(f"*/*{suffix}") if path.is_file())
    facts = [(str(path.relative_to(checkpoint)), path.stat()) for path in files]
    text = json.dumps([(name, fact.st_size, fact.st_mtime_ns) for name, fact in facts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def weights_id(checkpoint: Path) -> str:
    """The revision of a checkpoint from the hub, or a hash of its weight files' names, sizes and ends."""
    if checkpoint.parent.name == "snapshots":
        return f"revision {checkpoint.name}"
    digest = hashlib.sha256()
    for path in sorted(path for suffix in _SUFFIXES for path in checkpoint.rglob(f"*{suffix}")):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.relative_to(checkpoint)} {size}\n".encode())
            digest.update(file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return f"sha256 {digest.hexdigest()[:16]}"


def read_header(path: Path) -> Mapping[str, Any]:
    """The tensors of a safetensors file: name -> dtype, shape, data_offsets.

    Raises: ModelError if it is not such a file, or its size differs from what its header says.
    """
    refuse_pointer(path)
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else _MAX_HEADER_BYTES + 1
            header = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else None
        ends = list(_ends(header))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(
            f"{path}: its header is broken ({size_bytes:,} bytes in all), {_REMOVE}; {_AGAIN}"
        ) from None
    expected = _LENGTH.size + length + max(ends, default=0)
    if size_bytes != expected:
        raise ModelError(
            f"{path}: has {size_bytes:,} bytes, its header says {expected:,}: it is truncated or damaged, "
            f"{_REMOVE}; {_AGAIN}"
        )
    assert header is not None
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def refuse_pointer(path: Path) -> None:
    """Raises: ModelError if git-lfs left a pointer in place of the file, or it cannot be read."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    if is_pointer:
        raise ModelError(
            f"{path}: is a pointer of git-lfs in place of the file; run 'git lfs pull' in that folder"
        )


def _shards(index: Path) -> tuple[Path, ...]:
    files = tuple(index.with_name(shard) for shard in sorted(set(_weight_map(index).values())))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: missing, but {index.name} names it; {_AGAIN}")
    return files


def _what_is_wrong(folder: Path, stem: str) -> str:
    """The reason why `from_pretrained` reads nothing in this folder."""
    there = sorted(path.name for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if not there:
        return f"no weight files ({stem}.safetensors) in it; {_AGAIN}"
    if any(name.startswith(f"{stem}-") for name in there):
        return f"{stem}.safetensors.index.json is missing; it lists the contents of {there[0]}; {_AGAIN}"
    if any(name.startswith(f"{stem}.") for name in there):
        return f"{stem}.safetensors is missing, and a variant ({there[0]}) is not read; download that, too"
    return f"{stem}.safetensors is missing, and {there[0]} is not read; {_AGAIN}"


def _ends(header: Any) -> Iterator[int]:
    """The offset at which each tensor ends; raises if a shape is missing."""
    for name, entry in header.items():
        if name != "__metadata__":
            math.prod(entry["shape"])
            _, end = entry["data_offsets"]
            yield int(end)


def _weight_map(index: Path) -> Mapping[str, str]:
    refuse_pointer(index)
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(shard) for tensor, shard in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index}: is not an index of weight files; {_AGAIN}") from None
