"""Checkpoints in one file or its shards, in the layout of published models (Flux, SDXL, Wan), or as GGUF.

Such a file lacks configs, and often text encoders and the VAE. These come from a directory in diffusers'
format. gfgen makes a directory of links that has both. In it, a component that the file has is a config and a
link to each file, named SINGLE_FILE. Everything else reads this directory like any other. Loading converts
the file with diffusers' own `from_single_file`. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from gfgen.errors import ModelError, in_one_line
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.weight_files import (
    FLOAT8,
    READ,
    SINGLE_FILE,
    SINGLE_SUFFIXES,
    check_weights,
    files_of_index,
    is_scale,
    part_of,
    part_of_key,
    read_header,
    refuse_pointer,
)
from gfgen.models.geometry.weights import EXPERTS, components_of

_CONFIGS = (".json", ".txt", ".model", ".py", ".jinja")
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-(\d{5})$")
_TYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", *FLOAT8}
_GGUF_TYPES = re.compile(r"F32|F16|BF16|Q8_0|Q[45]_[01]|Q[2-6]_K|IQ4_(NL|XS)")
"""Source: diffusers 0.42 quantizers/gguf/utils.py."""


def is_single_file(name: str) -> bool:
    """Whether a model's name means a file: FILE, or MODEL:FILE with the model that has its other parts.

    That model may be a file, too: MODEL:FILE:FILE has both experts from files.
    """
    return name.endswith((*SINGLE_SUFFIXES, _INDEX))


def split_name(name: str) -> tuple[str | None, Path]:
    """The model in front of the file, if there is one, and the file."""
    base, _, file = name.rpartition(":")
    if not base or os.path.exists(os.path.expanduser(name)):
        return None, Path(os.path.expanduser(name))
    return base, Path(os.path.expanduser(file))


def base_beside(file: Path) -> Path:
    """The directory in diffusers' format that a file lies in. Raises: ModelError if there is none."""
    for folder in file.resolve().parents[:2]:
        if os.path.isfile(folder / "model_index.json"):
            return folder
    raise ModelError(
        f"model {file}: no model_index.json in its folder; name the model that its configs and other parts "
        f"come from: MODEL:{file.name}, with a directory in diffusers' format or a hub id as MODEL"
    )


def assemble(file: Path, base: Path, folder: Path) -> Path:
    """A directory in `folder` with the weights of a file and everything else of `base`, as links.

    Raises: ModelError if the file is no checkpoint, or `base` does not fit it.
    """
    if not os.path.isfile(file):
        raise ModelError(f"model {file}: there is no such file")
    index = read_checkpoint(base, with_weights=False).index
    files = _shards(file)
    if file.suffix == ".gguf" and importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {file}: reading GGUF needs a package: pip install 'gfgen[gguf]'")
    sources = sorted(path for path in base.rglob("*") if path.is_file())
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([facts, *map(str, sources)])
    made = folder / f"{file.stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if made.is_dir():
        return made
    parts = _parts(files)
    own = [name for name in components_of(index) if part_of(name) in parts]
    denoisers = [name for name in own if part_of(name) == "denoiser"]
    if set(EXPERTS) <= set(denoisers):
        where, words = f"{file.absolute().parent.name}/{file.name}".lower(), ("high", "low")
        others = [name for name, word in zip(EXPERTS, words, strict=True) if word not in where]
        if len(others) != 1:
            raise ModelError(
                f"model {file}: {base.name} has two experts; 'high' or 'low' in the name of the file or its "
                "folder has to say which one it has (MODEL:HIGH:LOW takes both from files)"
            )
        own.remove(others[0])
    if not denoisers:
        raise ModelError(f"model {file}: {base.name} has no component 'transformer' or 'unet'")
    _link(made, files, base, sources, own=own)
    return made


def _shards(file: Path) -> tuple[Path, ...]:
    """The files of an index, or of all shards if the file is one. Raises: ModelError if one is missing."""
    if file.name.endswith(_INDEX):
        return files_of_index(file)
    if (found := _SHARD.search(file.stem)) is None:
        return (file,)
    start, count = file.stem[: found.start()], found[1]
    files = tuple(
        file.with_name(f"{start}-{number:05}-of-{count}{file.suffix}") for number in range(1, int(count) + 1)
    )
    for path in files:
        if not path.is_file():
            raise ModelError(f"model {file}: its shard {path} is missing")
    return files


def _link(
    made: Path, files: Sequence[Path], base: Path, sources: Collection[Path], *, own: Collection[str]
) -> None:
    """Write the directory under a temporary name and rename it."""
    partial = made.with_name(f".{made.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    for source in sources:
        place = source.relative_to(base)
        is_weight = source.suffix not in _CONFIGS or source.name.endswith(".index.json")
        if (len(place.parts) == 1 and source.suffix not in _CONFIGS) or (is_weight and place.parts[0] in own):
            continue
        target = partial / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source.absolute())
    for name, (number, file) in itertools.product(own, enumerate(files)):
        link = f"{SINGLE_FILE}-{number:05}" if len(files) > 1 else SINGLE_FILE
        (partial / name / f"{link}{file.suffix}").symlink_to(file.resolve())
    try:
        partial.rename(made)
    except OSError as error:
        shutil.rmtree(partial)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another process was faster
            raise ModelError(f"model {files[0]}: its folder of links {made}: {error.strerror}") from None


def _parts(files: Sequence[Path]) -> set[str]:
    """What files have: "denoiser", perhaps "vae" and "text". Raises: ModelError if they are no checkpoint."""
    if files[0].suffix == ".gguf":
        for file in files:
            _check_gguf(file)
        return {"denoiser"}
    headers = {file: read_header(file) for file in files}
    for file, header in headers.items():
        if any(".lora_" in name or name.startswith("lora_") for name in header):
            raise ModelError(f"model {file}: is a LoRA; give it with --lora, or as 'lora' of a job")
    check_weights(files)
    parts = set[str]()
    for file, header in headers.items():
        weights = {name: entry["dtype"] for name, entry in header.items() if not is_scale(name)}
        if wrong := set(weights.values()) - _TYPES:
            raise ModelError(f"model {file}: weights of type {min(wrong)} are not supported; {READ}")
        parts |= {part_of_key(name) for name in weights}
    if "denoiser" not in parts:
        raise ModelError(f"model {files[0]}: has no weights of a transformer or UNet, so it is no checkpoint")
    return parts


def _check_gguf(file: Path) -> None:
    refuse_pointer(file)
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(f"model {file}: is no GGUF file, which begins with the letters GGUF")
    import gguf

    try:
        types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    except Exception as error:  # whatever the package meets in a damaged file
        raise ModelError(f"model {file}: is truncated or damaged ({in_one_line(error)})") from None
    if wrong := [name for name in types if not _GGUF_TYPES.fullmatch(name)]:
        raise ModelError(f"model {file}: weights of type {min(wrong)} are not read; {READ}")
