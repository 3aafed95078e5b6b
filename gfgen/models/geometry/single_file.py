"""Checkpoints in one file, in the layout in which models are published (Flux, SDXL, Wan), or as GGUF.

Such a file lacks configs, and often text encoders and the VAE. These come from a directory in diffusers'
format. gfgen makes a directory of links that has both. In it, a component that the file has is a config and a
link to the file, named SINGLE_FILE. Everything else reads this directory like any other. Loading converts
the file with diffusers' own `from_single_file`. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from gfgen.errors import ModelError
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.weight_files import (
    PART_OF_KEY,
    SINGLE_FILE,
    SINGLE_SUFFIXES,
    part_of,
    read_header,
    refuse_pointer,
)
from gfgen.models.geometry.weights import components_of

_CONFIGS = (".json", ".txt", ".model", ".py", ".jinja")


def is_single_file(name: str) -> bool:
    """Whether a model's name means a file: FILE, or MODEL:FILE with the model that has its other parts."""
    return name.endswith(SINGLE_SUFFIXES)


def split_name(name: str) -> tuple[str | None, Path]:
    """The model in front of the file, if there is one, and the file."""
    base, _, file = name.rpartition(":")
    if not base or Path(name).expanduser().exists():
        return None, Path(name).expanduser()
    return base, Path(file).expanduser()


def base_beside(file: Path) -> Path:
    """The directory in diffusers' format that a file lies in. Raises: ModelError if there is none."""
    for folder in file.resolve().parents[:2]:
        if (folder / "model_index.json").is_file():
            return folder
    raise ModelError(
        f"model {file}: no model_index.json in its folder; name the model that its configs and other parts "
        f"come from: MODEL:{file.name}, with a directory in diffusers' format or a hub id as MODEL"
    )


def assemble(file: Path, base: Path, folder: Path) -> Path:
    """A directory in `folder` with the weights of a file and everything else of `base`, as links.

    Raises: ModelError if the file is no checkpoint, or `base` does not fit it.
    """
    if not file.is_file():
        raise ModelError(f"model {file}: there is no such file")
    index = read_checkpoint(base, with_weights=False).index
    parts = _parts(file)
    own = [name for name in components_of(index) if part_of(name) in parts]
    denoisers = [name for name in own if part_of(name) == "denoiser"]
    if "transformer_2" in denoisers:
        raise ModelError(f"model {file}: {base.name} has two experts, and this file has one of them")
    if file.suffix == ".gguf" and index["_class_name"] == "QwenImagePipeline":
        raise ModelError(f"model {file}: GGUF is not supported for Qwen-Image, whose blocks gfgen fuses")
    if not denoisers:
        raise ModelError(f"model {file}: {base.name} has no component 'transformer' or 'unet'")
    sources = sorted(path for path in base.rglob("*") if path.is_file())
    text = json.dumps([str(file.resolve()), *map(str, sources)])
    made = folder / f"{file.stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not made.is_dir():
        _link(made, file, base, sources, own=own)
    return made


def _link(made: Path, file: Path, base: Path, sources: Collection[Path], *, own: Collection[str]) -> None:
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
    for name in own:
        (partial / name / f"{SINGLE_FILE}{file.suffix}").symlink_to(file.resolve())
    try:
        partial.rename(made)
    except OSError as error:
        shutil.rmtree(partial)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another process was faster
            raise ModelError(f"model {file}: its folder of links {made}: {error.strerror}") from None


def _parts(file: Path) -> set[str]:
    """What a file has: "denoiser", perhaps "vae" and "text". Raises: ModelError if it is no checkpoint."""
    if file.suffix == ".gguf":
        _check_gguf(file)
        return {"denoiser"}
    header = read_header(file)
    if any(".lora_" in name or name.startswith("lora_") for name in header):
        raise ModelError(f"model {file}: is a LoRA; give it with --lora, or as 'lora' of a job")
    if wrong := {entry["dtype"] for entry in header.values()} - {"F64", "F32", "F16", "BF16", "I64", "I32"}:
        raise ModelError(
            f"model {file}: weights of type {min(wrong)} are not supported; bf16, fp16 and fp32 are"
        )
    parts = {PART_OF_KEY.get(name.partition(".")[0], "denoiser") for name in header}
    if "denoiser" not in parts:
        raise ModelError(f"model {file}: has no weights of a transformer or UNet, so it is no checkpoint")
    return parts


def _check_gguf(file: Path) -> None:
    refuse_pointer(file)
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ModelError(f"model {file}: is no GGUF file, which begins with the letters GGUF")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {file}: reading GGUF needs a package: pip install 'gfgen[gguf]'")
