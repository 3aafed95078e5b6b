"""What a checkpoint's weights cost in memory, told by the headers of its files alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfgen.models.geometry.weight_files import read_header, weight_files

WEIGHTLESS = frozenset({"scheduler", "tokenizer", "image_processor", "feature_extractor", "processor"})

_FP32_BYTES, _BF16_BYTES = 4, 2

FP32_ON_DEVICE: Mapping[str, tuple[str, ...]] = {
    "WanPipeline": ("vae",),
    "WanImageToVideoPipeline": ("vae",),
}
"""By pipeline class, the components that adapters load in fp32 on every device, unless told otherwise."""

VAE_DTYPES = ("auto", "float32", "bfloat16")
"""What a VAE may compute in; auto: as FP32_ON_DEVICE says, else as everything does."""


def component_dtypes(pipeline_class: str, vae_dtype: str) -> Mapping[str, str]:
    """The components that have a dtype of their own, and which."""
    dtypes = dict.fromkeys(FP32_ON_DEVICE.get(pipeline_class, ()), "float32")
    return dtypes if vae_dtype == "auto" else {**dtypes, "vae": vae_dtype}


@dataclass(frozen=True, slots=True)
class ComponentFiles:
    """A component of a checkpoint, as model_index.json has it, and the files that it is loaded from."""

    folder: Path
    library: str
    class_name: str
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Main memory that a checkpoint's weights take on CPU ranks, in fp32.

    What is stored in fp32 is mapped, and all ranks share one copy of it; the rest is converted,
    so each rank has a copy of its own.
    """

    shared_bytes: int
    private_bytes: int

    def on(self, num_ranks: int) -> int:
        """Bytes on so many ranks."""
        return self.shared_bytes + num_ranks * self.private_bytes


def footprint(checkpoint: Path) -> Footprint:
    """Of all components of a diffusers-format directory, each weight counted once.

    Raises: ModelError as `weight_files`.
    """
    shared = private = 0
    for component in component_files(checkpoint).values():
        for path in component.files:
            if path.suffix == ".bin":
                private += path.stat().st_size
                continue
            for entry in read_header(path).values():
                size_bytes = _FP32_BYTES * math.prod(entry["shape"])
                shared += size_bytes if entry["dtype"] == "F32" else 0
                private += size_bytes if entry["dtype"] != "F32" else 0
    return Footprint(shared, private)


def device_bytes(
    checkpoint: Path, *, num_parameters: Mapping[str, int] | None = None, vae_dtype: str = "auto"
) -> int:
    """Bytes that a checkpoint's weights take on a GPU: bf16, and fp32 where `component_dtypes` says so.

    num_parameters: by component, where there are no weight files to count them in.
    Raises: ModelError as `weight_files`.
    """
    if num_parameters is None:
        num_parameters = count_parameters(checkpoint)
    dtypes = component_dtypes(str(_model_index(checkpoint)["_class_name"]), vae_dtype)
    wide = {name for name, dtype in dtypes.items() if dtype == "float32"}
    return sum(
        count * (_FP32_BYTES if name in wide else _BF16_BYTES) for name, count in num_parameters.items()
    )


def count_parameters(checkpoint: Path) -> Mapping[str, int]:
    """By component, from the weight files.

    Raises: ModelError as `weight_files`.
    """
    return {name: sum(map(_count, each.files)) for name, each in component_files(checkpoint).items()}


def component_files(checkpoint: Path) -> Mapping[str, ComponentFiles]:
    """Of each component that has weights.

    Raises: ModelError as `weight_files`.
    """
    return {
        name: ComponentFiles(folder := checkpoint / name, entry[0], entry[1], weight_files(folder, entry[0]))
        for name, entry in _model_index(checkpoint).items()
        if is_component(entry) and name not in WEIGHTLESS
    }


def is_component(entry: object) -> bool:
    """Whether this is a component in model_index.json, [library, class]; [null, null] is one left out."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)


def _count(path: Path) -> int:
    """Parameters in a weight file."""
    if path.suffix == ".bin":
        return path.stat().st_size // _BF16_BYTES
    return sum(math.prod(entry["shape"]) for entry in read_header(path).values())


def _model_index(checkpoint: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((checkpoint / "model_index.json").read_text(encoding="utf-8"))
    return found
