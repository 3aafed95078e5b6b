"""What weight files hold, told by their headers alone: are they whole, and what they cost in memory.

A safetensors file begins with the length of a JSON header (8 bytes, little endian), the header
(name -> dtype, shape, data_offsets), then the tensors. So a download that broke off shows in
the file's size, without reading a tensor.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfgen.errors import ModelError

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
_FP32_BYTES, _BF16_BYTES = 4, 2
_AGAIN = "download the model again"

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


def check_weights(folder: Path) -> None:
    """Refuse a component's folder with a weight file that is cut short or lacks tensors.

    Raises: ModelError that names the file, what it has and what it should have.
    """
    headers = {path.name: read_header(path) for path in sorted(folder.glob("*.safetensors"))}
    for index in sorted(folder.glob("*.safetensors.index.json")):
        for tensor, shard in _weight_map(index).items():
            if shard in headers and tensor not in headers[shard]:
                raise ModelError(f"{folder / shard}: no {tensor!r}, which {index.name} expects; {_AGAIN}")


def footprint(checkpoint: Path) -> Footprint:
    """Of all components of a diffusers-format directory."""
    shared = private = 0
    for path in checkpoint.glob("*/*.safetensors"):
        for entry in read_header(path).values():
            size_bytes = _FP32_BYTES * math.prod(entry["shape"])
            shared += size_bytes if entry["dtype"] == "F32" else 0
            private += size_bytes if entry["dtype"] != "F32" else 0
    for path in checkpoint.glob("*/*.bin"):
        private += 0 if any(path.parent.glob("*.safetensors")) else path.stat().st_size
    return Footprint(shared, private)


def device_bytes(
    checkpoint: Path, *, num_parameters: Mapping[str, int] | None = None, vae_dtype: str = "auto"
) -> int:
    """Bytes that a checkpoint's weights take on a GPU: bf16, and fp32 where `component_dtypes` says so.

    num_parameters: by component, where there are no weight files; 0 bytes for what is not known.
    """
    counts = dict(num_parameters or {}) or {
        folder.name: _count(folder) for folder in checkpoint.iterdir() if folder.is_dir()
    }
    dtypes = component_dtypes(_pipeline_class(checkpoint), vae_dtype)
    wide = {name for name, dtype in dtypes.items() if dtype == "float32"}
    return sum(count * (_FP32_BYTES if name in wide else _BF16_BYTES) for name, count in counts.items())


def _count(folder: Path) -> int:
    """Parameters in a component's folder."""
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    if headers:
        return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())
    return sum(path.stat().st_size // _BF16_BYTES for path in folder.glob("*.bin"))


def _pipeline_class(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / "model_index.json").read_text(encoding="utf-8"))["_class_name"])


def read_header(path: Path) -> Mapping[str, Any]:
    """The tensors of a safetensors file: name -> dtype, shape, data_offsets.

    Raises: ModelError when it is no such file, or not as long as its header says.
    """
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
        raise ModelError(f"{path}: its header is broken ({size_bytes:,} bytes in all); {_AGAIN}") from None
    expected = _LENGTH.size + length + max(ends, default=0)
    if size_bytes != expected:
        raise ModelError(
            f"{path}: has {size_bytes:,} bytes, its header says {expected:,}: it is truncated or damaged; "
            f"{_AGAIN}"
        )
    assert header is not None
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _ends(header: Any) -> Iterator[int]:
    """Where each tensor ends, and that its shape is there."""
    for name, entry in header.items():
        if name != "__metadata__":
            math.prod(entry["shape"])
            _, end = entry["data_offsets"]
            yield int(end)


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(shard) for tensor, shard in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index}: is no index of weight files; {_AGAIN}") from None
