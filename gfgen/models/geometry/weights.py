"""The memory that a checkpoint's weights take, from the headers of its files alone.

Weights in fp8 are loaded as fp32 or bf16. GGUF stays as it is, and so does what diffusers' own config says is
quantised.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfgen.models.geometry.weight_files import SINGLE_FILE, own_tensors, weight_files

_WEIGHTLESS = re.compile(
    r"(^|_)(scheduler|tokenizer(_\d)?|processor|image_processor|feature_extractor|guider)$"
)
"""Names of components that are files without weights."""

_FP32_BYTES, _BF16_BYTES = 4, 2

FP32_ON_DEVICE: Mapping[str, tuple[str, ...]] = {
    "WanPipeline": ("vae",),
    "WanImageToVideoPipeline": ("vae",),
}
"""By pipeline class, the components that adapters load in fp32 on every device by default."""

TEXT_ENCODER = re.compile(r"text_encoder(_\d)?")
"""Names of components that `--offload` keeps in host memory."""
EXPERTS = ("transformer", "transformer_2")
"""Names of two components of which a step uses one; with `--offload` the other one is in host memory."""

VAE_DTYPES = ("auto", "float32", "bfloat16")
"""dtypes for a VAE; auto follows FP32_ON_DEVICE, and otherwise uses the dtype of the other components."""


def component_dtypes(pipeline_class: str, vae_dtype: str) -> Mapping[str, str]:
    """The dtypes of the components that differ from the others."""
    dtypes = dict.fromkeys(FP32_ON_DEVICE.get(pipeline_class, ()), "float32")
    return dtypes if vae_dtype == "auto" else {**dtypes, "vae": vae_dtype}


@dataclass(frozen=True, slots=True)
class Placement:
    """Which components of a model a GPU holds; the others wait in main memory until they are used."""

    holds_all: bool = True
    """Otherwise text encoders wait, and of two experts the one that a step does not use."""

    def waits(self, component: str, components: Collection[str]) -> bool:
        """Whether a component waits before its first use; `components` are those of its model."""
        if self.holds_all:
            return False
        has_experts = set(EXPERTS) <= set(components)
        return TEXT_ENCODER.fullmatch(component) is not None or (has_experts and component in EXPERTS)

    def waiting(self, sizes: Mapping[str, int]) -> Footprint:
        """What waits between tasks, by the bytes of each component.

        Ranks share a mapping of text encoders. Each rank has its own idle expert, because experts change.
        """
        if self.holds_all:
            return Footprint(0, 0)
        experts = [sizes[name] for name in EXPERTS if name in sizes]
        idle = min(experts) if len(experts) == len(EXPERTS) else 0
        return Footprint(sum(sizes[name] for name in sizes if TEXT_ENCODER.fullmatch(name)), idle)


@dataclass(frozen=True, slots=True)
class ComponentFiles:
    folder: Path
    library: str
    class_name: str
    files: tuple[Path, ...]

    @property
    def quantisation(self) -> str | None:
        return quantisation_in(self.folder)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Main memory that weights of a checkpoint take.

    All ranks share one mapping of weights that are stored in the dtype that is used; each rank has its own
    converted copy of the others.
    """

    shared_bytes: int
    private_bytes: int

    def on(self, num_ranks: int) -> int:
        return self.shared_bytes + num_ranks * self.private_bytes


def footprint(checkpoint: Path) -> Footprint:
    """Of CPU ranks, which compute in fp32. Raises: ModelError like `weight_files`."""
    shared = private = 0
    for component in component_files(checkpoint).values():
        for path in component.files:
            if path.suffix != ".safetensors" or component.quantisation:
                private += path.stat().st_size
                continue
            for entry in own_tensors(path).values():
                size_bytes = _FP32_BYTES * math.prod(entry["shape"])
                shared += size_bytes if entry["dtype"] == "F32" else 0
                private += size_bytes if entry["dtype"] != "F32" else 0
    return Footprint(shared, private)


def device_bytes(
    checkpoint: Path, *, num_parameters: Mapping[str, int] | None = None, vae_dtype: str = "auto"
) -> Mapping[str, int]:
    """Bytes that each component takes on a GPU: in bf16, or fp32 if `component_dtypes` says so.

    num_parameters: by component; None counts them in the weight files.
    Raises: ModelError like `weight_files`.
    """
    if num_parameters is None:
        num_parameters = count_parameters(checkpoint)
    name = _model_index(checkpoint)["_class_name"]
    dtypes = component_dtypes(name if isinstance(name, str) else "", vae_dtype)
    wide = {name for name, dtype in dtypes.items() if dtype == "float32"}
    return {
        name: count * (_FP32_BYTES if name in wide else _BF16_BYTES) for name, count in num_parameters.items()
    }


def count_parameters(checkpoint: Path) -> Mapping[str, int]:
    """Parameters of each component.

    Raises: ModelError like `weight_files`.
    """
    return {name: _count(each) for name, each in component_files(checkpoint).items()}


def component_files(checkpoint: Path) -> Mapping[str, ComponentFiles]:
    """The files of each component that has weights.

    Raises: ModelError like `weight_files`.
    """
    return {
        name: ComponentFiles(folder := checkpoint / name, entry[0], entry[1], weight_files(folder, entry[0]))
        for name, entry in components_of(_model_index(checkpoint)).items()
        if has_weights(name)
    }


def quantisation_of(config: Mapping[str, Any]) -> str | None:
    """The package that quantised a component's weights, from diffusers' own config."""
    if not (found := config.get("quantization_config")):
        return None
    return str(found.get("quant_method", "bitsandbytes")) if isinstance(found, dict) else "an unknown package"


def quantisation_in(folder: Path) -> str | None:
    """What a component's weights stay in after loading: "GGUF", or the format of a package; None if plain."""
    if any(folder.glob(f"{SINGLE_FILE}*.gguf")):
        return "GGUF"
    config = folder / "config.json"
    return quantisation_of(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else None


def quantisation(checkpoint: Path) -> str | None:
    """`quantisation_in` the models that steps call, which fp8 and LoRAs would change."""
    return next(filter(None, (quantisation_in(checkpoint / name) for name in (*EXPERTS, "unet"))), None)


def has_weights(component: str) -> bool:
    """Whether a component of this name has weights: not a scheduler, a tokenizer or a processor."""
    is_network = component in ("audio_tokenizer", "sound_tokenizer")
    return is_network or _WEIGHTLESS.search(component) is None


def components_of(index: Mapping[str, Any]) -> Mapping[str, list[str]]:
    """The components in a model_index.json: [library, class] by name; [null, null] is one left out."""
    return {
        name: entry
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)
        if not name.startswith("_")
    }


def _count(component: ComponentFiles) -> int:
    """Parameters; for files of other forms, as many as take their bytes in bf16."""
    if component.quantisation or component.files[0].suffix != ".safetensors":
        return sum(path.stat().st_size for path in component.files) // _BF16_BYTES
    tensors = (entry for path in component.files for entry in own_tensors(path).values())
    return sum(math.prod(entry["shape"]) for entry in tensors)


def _model_index(checkpoint: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((checkpoint / "model_index.json").read_text(encoding="utf-8"))
    return found
