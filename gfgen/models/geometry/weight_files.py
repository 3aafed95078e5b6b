"""Find a component's weight files and check that they are complete, by names and headers alone.

A folder may hold the same weights more than once: as safetensors and as .bin, in another precision
(`*.fp16.safetensors`), in one file and in shards. The files that `from_pretrained` reads count; a variant
where there are no others. Weights in fp8 may have a scale, a tensor beside the weight with one number, or one
for each row; the weight is the product of both.

A safetensors file begins with the length of a JSON header (8 bytes, little endian), the header
(name -> dtype, shape, data_offsets), then the tensors. So the file's size shows an incomplete download.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gfgen.errors import ModelError
from gfgen.job.images import EXPONENTS

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

VARIANTS = ("bf16", "fp16")
"""Variants that are read; the first that is there counts."""

SINGLE_FILE = "single_file"
"""How links to a published file with the weights of several components begin (single_file.py)."""
SINGLE_SUFFIXES = (".safetensors", ".gguf")
_PART_OF_KEY = dict.fromkeys(("first_stage_model", "vae"), "vae")
_PART_OF_KEY |= dict.fromkeys(("cond_stage_model", "conditioner", "text_encoders"), "text")
"""The part of a model that keys of a published file with this beginning belong to. Others: "denoiser".
Source: diffusers 0.42 loaders/single_file_utils.py."""

_STEMS = {
    "diffusers": ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    "transformers": ("model", "pytorch_model"),
}
"""By library: the stem of *.safetensors, and that of *.bin."""

_SCALE = re.compile(r"\.(scale_weight|weight_scale)$")
"""The ends of names of scales: those of ComfyUI's older files, and those of its newer and of other tools."""
_BESIDE_SCALE = re.compile(r"(\.(scale_input|input_scale|comfy_quant)|(^|\.)scaled_fp8)$")
"""Names of tensors that only files with scales have. Results in fp32 and bf16 do not depend on them.
Source: ComfyUI comfy/ops.py, comfy/quant_ops.py."""
FLOAT8 = ("F8_E4M3", "F8_E5M2")
_UNREAD = {
    r"\.quant_state\.bitsandbytes__|\.absmax$|\.SCB$": "is quantised with bitsandbytes (nf4, fp4, int8)",
    r"\.(wscales|wcscales|smooth_factor(_orig)?)$": "is quantised for nunchaku (SVDQuant)",
    r"\.(qweight|qzeros)$": "has weights in 4 bits (AWQ or GPTQ)",
    r"\.weight_scale_2$": "has weights in nvfp4",
    r"\.weight_scale_inv$": "has fp8 weights with a scale for each block",
}
"""By names in a file: what is not read. Source: the savers of these tools."""
READ = "bf16, fp16, fp32, fp8 (with scales or without) and GGUF are read"


def weight_files(folder: Path, library: str) -> tuple[Path, ...]:
    """The files that `from_pretrained` of this library reads a component's weights from.

    Raises: ModelError if there are none, if a file in the index is missing, or if the library reads none of
            the files that are there.
    Source: diffusers 0.42 ModelMixin.from_pretrained, transformers 5 _get_resolved_checkpoint_files.
    """
    links = (path for path in folder.glob(f"{SINGLE_FILE}*") if path.is_file())
    if published := sorted(path for path in links if path.suffix in SINGLE_SUFFIXES):
        return tuple(published)
    safe, pickled = _STEMS.get(library, _STEMS["diffusers"])
    if library not in _STEMS and not list(folder.glob(f"{safe}*")):  # code of its own, for transformers
        safe, pickled = _STEMS["transformers"]
    names = [f"{safe}.safetensors.index.json", f"{safe}.safetensors"]
    if library == "transformers":
        names.reverse()
    names += [f"{pickled}.bin", f"{pickled}.bin.index.json"]
    for variant in VARIANTS:
        names += [f"{safe}.safetensors.index.{variant}.json", f"{safe}.{variant}.safetensors"]
    for path in (folder / name for name in names):
        if path.is_file():
            return files_of_index(path) if path.suffix == ".json" else (path,)
        if path.is_symlink():
            raise ModelError(f"{path}: is a link to a file that does not exist; {_AGAIN}")
    raise ModelError(f"{folder}: {_what_is_wrong(folder, safe)}")


def files_of_index(index: Path) -> tuple[Path, ...]:
    """The files that an index names. Raises: ModelError if one is missing."""
    files = tuple(index.with_name(shard) for shard in sorted(set(_weight_map(index).values())))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: missing, but {index.name} names it; {_AGAIN}")
    return files


def variant_of(file: Path) -> str | None:
    """The variant that `from_pretrained` has to be asked for to read a file."""
    found = re.search(rf"\.({'|'.join(VARIANTS)})(-\d+-of-\d+)?\.safetensors$", file.name)
    return found and found[1]


def is_published(file: Path) -> bool:
    """Whether a component's file is a link to one in a published layout, or in GGUF."""
    return file.stem.startswith(SINGLE_FILE)


def part_of(component: str) -> str | None:
    """The part of a published file that a component's weights are in; None if it never has them."""
    if component.startswith(("transformer", "unet")):
        return "denoiser"
    return "vae" if component == "vae" else "text" if component.startswith("text_encoder") else None


def part_of_key(name: str) -> str:
    """The part that a tensor of a published file is of."""
    return _PART_OF_KEY.get(name.partition(".")[0], "denoiser")


def own_tensors(path: Path) -> Mapping[str, Any]:
    """The tensors of a safetensors file that belong to the component in whose folder it is.

    The first text encoder counts for all that are in a published file.
    """
    header = {name: entry for name, entry in read_header(path).items() if not is_scale(name)}
    if not is_published(path):
        return header
    part = None if path.parent.name.startswith("text_encoder_") else part_of(path.parent.name)
    return {name: entry for name, entry in header.items() if part_of_key(name) == part}


def check_weights(files: Sequence[Path], *, is_quantised: bool = False) -> None:
    """Check the files that `weight_files` found.

    Raises: ModelError if one is truncated, lacks tensors, or has weights in a form that is not read.
    """
    headers = {path: read_header(path) for path in files if path.suffix == ".safetensors"}
    for index in {index for path in headers for index in path.parent.glob("*.safetensors.index*.json")}:
        for tensor, shard in _weight_map(index).items():
            if tensor not in headers.get(path := index.with_name(shard), {tensor}):
                raise ModelError(f"{path}: no {tensor!r}, which {index.name} expects; {_AGAIN}")
    if not is_quantised:
        _check_forms(headers)


def scales_of(names: Iterable[str]) -> Mapping[str, str]:
    """Of the tensors of a component: by weight, the name of its scale."""
    return {_SCALE.sub(".weight", name): name for name in names if _SCALE.search(name)}


def is_scale(name: str) -> bool:
    """Whether a tensor is no weight: a scale, or what files with scales have besides."""
    return bool(_SCALE.search(name) or _BESIDE_SCALE.search(name))


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
        reason = f"its header is broken ({size_bytes:,} bytes in all)"
        raise ModelError(f"{path}: {reason}, {_REMOVE}; {_AGAIN}") from None
    expected = _LENGTH.size + length + max(ends, default=0)
    if size_bytes != expected:
        reason = f"has {size_bytes:,} bytes, its header says {expected:,}: it is truncated or damaged"
        raise ModelError(f"{path}: {reason}, {_REMOVE}; {_AGAIN}")
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
        reason = "is a pointer of git-lfs in place of the file; run 'git lfs pull' in that folder"
        raise ModelError(f"{path}: {reason}")


def _check_forms(headers: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raises: ModelError for a form that is not read, and for scales that are missing, broken or not read."""
    import numpy as np

    places = {name: path for path, header in headers.items() for name in header}
    entries = {name: entry for header in headers.values() for name, entry in header.items()}
    for path, header in headers.items():
        for pattern, what in _UNREAD.items():
            if any(re.search(pattern, name) for name in header):
                raise ModelError(f"{_shown(path)}: {what}; {READ}")
        for name in (x for x in header if x.endswith(".weight") and header[x]["dtype"][0] in "IU"):
            raise ModelError(f"{_shown(path)}: {name} has the type {header[name]['dtype']}; {READ}")
    scales = scales_of(entries)
    for weight, scale in scales.items():
        path, entry, of_weight = _shown(places[scale]), entries[scale], entries.get(weight)
        if of_weight is None:
            raise ModelError(f"{path}: has {scale}, but no {weight}; {_AGAIN}")
        if of_weight["dtype"] not in FLOAT8:
            raise ModelError(f"{path}: {weight} has a scale and the type {of_weight['dtype']}; {READ}")
        number, kinds = math.prod(entry["shape"]), ("F32", "F16", "BF16")
        if entry["dtype"] not in kinds or number not in (1, *of_weight["shape"][:1]):
            what = f"{scale} has the type {entry['dtype']} and the shape {entry['shape']}; one number, or one"
            raise ModelError(f"{path}: {what} for each row, in fp32, fp16 or bf16 is read")
    for path, header in headers.items():
        content = np.memmap(path, mode="r")[path.stat().st_size - max(_ends(header), default=0) :]
        for name, entry in ((name, header[name]) for name in filter(_SCALE.search, header)):
            form, exponent = EXPONENTS[entry["dtype"]]
            stored = content[slice(*entry["data_offsets"])]
            if len(stored) != math.prod(entry["shape"]) * np.dtype(form).itemsize:
                raise ModelError(f"{_shown(path)}: {name} is not whole; {_AGAIN}")
            if np.any(stored.view(form) & exponent == exponent):
                raise ModelError(f"{_shown(path)}: {name} is not a number (NaN or infinite); {_AGAIN}")
    has_scales = scales or any(_BESIDE_SCALE.search(name) for name in entries)
    if has_scales or any(re.search(r"fp8.*scaled", _shown(path).name) for path in headers):
        weights = {name for name in entries if not is_scale(name)}
        for name in sorted(weights - scales.keys()):
            if entries[name]["dtype"] in FLOAT8 and len(entries[name]["shape"]) > 1:
                reason = "is in fp8 and lacks its scale, which other names imply"
                raise ModelError(f"{_shown(places[name])}: {name} {reason}; {_AGAIN}")


def _shown(path: Path) -> Path:
    """The name for people: of a published file its own, in place of the link's."""
    return path.resolve() if is_published(path) else path


def _what_is_wrong(folder: Path, stem: str) -> str:
    """The reason why `from_pretrained` reads nothing in this folder."""
    there = sorted(path.name for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if not there:
        return f"no weight files ({stem}.safetensors) in it; {_AGAIN}"
    if any(name.startswith(f"{stem}-") for name in there):
        return f"{stem}.safetensors.index.json is missing; it lists the contents of {there[0]}; {_AGAIN}"
    if any(name.startswith(f"{stem}.") for name in there):
        variants = " and ".join(VARIANTS)
        return f"{stem}.safetensors is missing, and of variants ({there[0]}) {variants} are read; {_AGAIN}"
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
