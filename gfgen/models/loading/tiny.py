"""Small pipelines of the real classes with random weights, made offline in seconds.

    python -m gfgen.models.loading.tiny DIR [NAME...]

They run the same code as the full-size models, at a size for one CPU core. 24 heads allow every degree from 1
to 8. The bytes are reproducible.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import diffusers
import torch

from gfgen.errors import ModelError
from gfgen.models.geometry.checkpoint import SETTINGS_NAME, read_checkpoint
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_pipeline

NAMES = tuple(sorted(path.name for path in CONFIGS.glob("tiny-*")))


def make_tiny(directory: Path, names: Sequence[str] = NAMES) -> list[Path]:
    """The directories of the tiny models of these names (all by default), made where missing.

    Each is written to a temporary folder and renamed, so it appears complete or not at all.

    Raises: ModelError for an unknown name or a directory that cannot be written.
    """
    for name in names:
        if name not in NAMES:
            raise ModelError(f"tiny model {name!r} is unknown; there are {', '.join(NAMES)}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [_make_one(directory, name) for name in names]
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); give a directory that can"
        raise ModelError(f"{directory}: {reason}") from error


def _make_one(directory: Path, name: str) -> Path:
    final = directory / name
    if final.is_dir():
        return final
    os.umask(umask := os.umask(0))
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory))
    try:
        write_tiny(CONFIGS / name, partial)
        for path in (partial, *partial.rglob("*")):  # mkdtemp and safetensors make them private
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        os.rename(partial, final)
    except OSError:
        if not final.is_dir():  # else another process made the same bytes first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def write_tiny(configs: Path, folder: Path) -> None:
    kind = getattr(diffusers, read_checkpoint(configs, with_weights=False).pipeline_class)
    pipeline = random_pipeline(kind, configs, device="cpu", dtype=torch.float32)
    pipeline.save_pretrained(str(folder))
    shutil.copyfile(configs / SETTINGS_NAME, folder / SETTINGS_NAME)


if __name__ == "__main__":
    try:
        make_tiny(Path(sys.argv[1]), sys.argv[2:] or NAMES)
    except ModelError as error:
        sys.exit(str(error))
