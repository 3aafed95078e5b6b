"""The memory that a checkpoint's weights take, from the headers of its files alone, and its place.

Weights in fp8 are loaded as fp32 or bf16. GGUF stays as it is, and so does what diffusers' own config says is
quantised.

A GPU holds the blocks of a model that fit; the others are streamed from main memory while it computes. A
block has a key: the name of its list, which is the same in files and in modules, and its index there.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gfgen.errors import InputError
from gfgen.models.geometry.weight_files import SINGLE_FILE, own_tensors, weight_files
from gfgen.system.machine import cache_dir

_WEIGHTLESS = re.compile(
    r"(^|_)(scheduler|tokenizer(_\d)?|processor|image_processor|feature_extractor|guider)$"
)

_FP32_BYTES, _BF16_BYTES = 4, 2

FP32_ON_DEVICE: Mapping[str, tuple[str, ...]] = {"WanPipeline": ("vae",), "WanImageToVideoPipeline": ("vae",)}
"""By pipeline class, the components that adapters load in fp32 on every device by default."""

EXPERTS = ("transformer", "transformer_2")
"""Names of two components of which a step uses one."""

TEXT_ENCODER = re.compile(r"text_encoder(_\d)?")
STREAMABLE = re.compile(r"text_encoder(_\d)?|transformer(_\d)?")
"""Names of components whose blocks may be streamed; text encoders first, which a run needs once a job."""
STAYS = re.compile(r"\.(img_mod|txt_mod)\.")
"""Parts of blocks that fused models compute for all blocks at once (fast/linears.py)."""

_BLOCK = re.compile(r"(?:^|\.)(\w*(?:block|blocks|layers))\.(\d+)(?=\.|$)")
_PUBLISHED = {
    "double_blocks": "transformer_blocks",
    "joint_blocks": "transformer_blocks",
    "single_blocks": "single_transformer_blocks",
}
"""Lists in published files, and in diffusers' modules. Source: diffusers 0.42 single_file_utils.py."""

NUM_BUFFERS = (3, 2)
"""Of the size of the largest streamed block; two only if no placement with three fits."""

VAE_DTYPES = ("auto", "float32", "bfloat16")
"""dtypes for a VAE; auto follows FP32_ON_DEVICE, and otherwise uses the dtype of the other components."""


def component_dtypes(pipeline_class: str, vae_dtype: str) -> Mapping[str, str]:
    dtypes = dict.fromkeys(FP32_ON_DEVICE.get(pipeline_class, ()), "float32")
    return dtypes if vae_dtype == "auto" else {**dtypes, "vae": vae_dtype}


def block_key(name: str) -> str | None:
    """The key of the block to which a weight or a module of this name belongs, such as "block.7"."""
    found = _BLOCK.search(name)
    return None if found is None else f"{_PUBLISHED.get(found[1], found[1])}.{found[2]}"


def block_name(name: str) -> str | None:
    """The whole name of that block, such as "encoder.block.7"."""
    found = _BLOCK.search(name)
    return None if found is None else name[: found.end()]


@dataclass(frozen=True, slots=True)
class Part:
    fixed: int
    """What always stays on the device."""
    blocks: Mapping[str, int] = field(default_factory=dict)
    """By key, lists one after the other, each in the order of the forward."""

    @property
    def total(self) -> int:
        return self.fixed + sum(self.blocks.values())

    def in_bytes(self, width: int, saved: tuple[int, int] = (0, 0)) -> Part:
        """From parameters of this width. `saved` is less: of what stays, and of each block."""
        blocks = {key: width * size - saved[1] for key, size in self.blocks.items()}
        return Part(width * self.fixed - saved[0], blocks)


@dataclass(frozen=True, slots=True)
class Placement:
    """The streamed blocks of a model; its other weights are on the device."""

    streamed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    num_buffers: int = NUM_BUFFERS[0]
    streamed_bytes: int = 0
    saved_bytes: int = 0
    """How much less the device holds, with its buffers."""
    copied: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the streamed blocks of which each rank has a copy while patches change them, by name: those
    in 8 bits."""
    shared: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The streamed blocks that ranks keep for each other (models/streaming/shards.py); main memory has them,
    too."""
    is_on_disk: bool = False
    """A file has all of them instead, for those whose rank is not there."""

    def streams(self, weight: str) -> bool:
        """Whether a weight is in a streamed block; its name begins with its component."""
        component, _, name = weight.partition(".")
        return block_key(name) in self.streamed.get(component, ()) and STAYS.search(name) is None

    def copies(self, weight: str) -> str | None:
        """The name in `copied` of a weight's block; None if it is not there."""
        block = f"{weight.partition('.')[0]}.{block_key(weight)}"
        return block if block in self.copied and self.streams(weight) else None

    def new_copy(self, kept_bytes: int = 0) -> int:
        """The descriptor of an empty file in memory for the streamed blocks (models/streaming/host_copy.py),
        or for all of a model that is kept.

        Pages are allocated when they are first written, so room for alignment and for fp32 costs nothing.
        """
        if self.is_on_disk:
            try:
                (folder := cache_dir()).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder) as file:
                    os.posix_fallocate(file.fileno(), 0, self.streamed_bytes * 17 // 16 + (1 << 26))
                    return os.dup(file.fileno())
            except OSError as error:
                raise InputError(f"{folder}: cannot hold a file of the streamed weights ({error})") from None
        fd = os.memfd_create("gfgen-weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, 3 * max(self.streamed_bytes, kept_bytes) + (1 << 30))
        return fd


WHOLE = Placement()


def placed(parts: Mapping[str, Part], room_bytes: int, *, num_sharing: int = 1) -> Placement:
    """As many weights on the device as there is room for; as few as possible if not even those fit.

    Blocks of text encoders are streamed first. Those of transformers are spread evenly over the forward, and
    over two experts, so that reads hide behind the blocks between them. That many ranks keep the streamed
    blocks for each other; if these do not fit either, some are in main memory only.
    """
    total = sum(part.total for part in parts.values())
    if total <= room_bytes:
        return WHOLE
    groups: tuple[list[_Block], list[_Block]] = ([], [])
    for name in filter(STREAMABLE.fullmatch, parts):
        group = groups[0 if TEXT_ENCODER.fullmatch(name) else 1]
        group += [(name, key, size) for key, size in parts[name].blocks.items()]
    choices = [
        [*before, *(group[idx] for idx in spread(number, of=len(group)))]
        for before, group in (([], groups[0]), groups)
        for number in range(1, len(group) + 1)
    ]
    stages = [[(chosen, chosen if num_sharing > 1 else []) for chosen in choices]]
    if num_sharing > 1:
        rests = [[block for block in choices[-1] if block not in alone] for alone in map(set, choices)]
        stages.append([(choices[-1], rest) for rest in rests])
    best = WHOLE
    for stage in stages:
        for num_buffers, (chosen, shared) in itertools.product(NUM_BUFFERS, stage):
            found = _streaming(chosen, num_buffers, shared, num_sharing)
            best = max(best, found, key=lambda each: each.saved_bytes)
            if total - found.saved_bytes <= room_bytes:
                return found
    return best


def spread(number: int, *, of: int) -> list[int]:
    """That many of `of` places, as evenly as possible."""
    return [(2 * idx + 1) * of // (2 * number) for idx in range(number)]


_Block = tuple[str, str, int]
"""A component, the key of one of its blocks, and its size."""


def _streaming(
    blocks: Sequence[_Block], num_buffers: int, shared: Sequence[_Block] = (), num_sharing: int = 1
) -> Placement:
    sizes = [size for _, _, size in blocks]
    in_turn = [size for _, _, size in sorted(shared, key=lambda block: block[0])]
    kept = max(sum(in_turn[position::num_sharing]) for position in range(num_sharing))
    saved = sum(sizes) - num_buffers * max(sizes) - kept
    return Placement(_keys(blocks), num_buffers, sum(sizes), saved, shared=_keys(shared))


def _keys(blocks: Sequence[_Block]) -> Mapping[str, frozenset[str]]:
    keys: dict[str, frozenset[str]] = {}
    for name, key, _ in blocks:
        keys[name] = keys.get(name, frozenset()) | {key}
    return keys


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


def device_bytes(checkpoint: Path) -> Mapping[str, int]:
    """Bytes that each component takes on a GPU. Raises: ModelError like `weight_files`."""
    return {name: part.total for name, part in device_parts(checkpoint).items()}


def device_parts(
    checkpoint: Path,
    *,
    counted: Mapping[str, Part] | None = None,
    vae_dtype: str = "auto",
    saved: Mapping[str, tuple[int, int]] | None = None,
) -> Mapping[str, Part]:
    """Bytes that each component takes on a GPU: in bf16, or fp32 if `component_dtypes` says so.

    counted: parameters by component; None counts them in the weight files.
    saved: what those in fewer bits take less (`Part.in_bytes`).
    Raises: ModelError like `weight_files`.
    """
    if counted is None:
        counted = count_parts(checkpoint)
    name = _model_index(checkpoint)["_class_name"]
    dtypes = component_dtypes(name if isinstance(name, str) else "", vae_dtype)
    widths = {name: _FP32_BYTES if dtype == "float32" else _BF16_BYTES for name, dtype in dtypes.items()}
    return {
        name: part.in_bytes(widths.get(name, _BF16_BYTES), (saved or {}).get(name, (0, 0)))
        for name, part in counted.items()
    }


def count_parts(checkpoint: Path) -> Mapping[str, Part]:
    return {name: _count(each) for name, each in component_files(checkpoint).items()}


def noted_parts(settings: Mapping[str, Any]) -> Mapping[str, Part]:
    """The same from the settings of a model without weight files (gfgen.json); none if they lack it."""
    found = {}
    for name, total in settings.get("num_parameters", {}).items():
        lists = settings.get("block_parameters", {}).get(name, {})
        blocks = {f"{kind}.{idx}": size for kind, (number, size) in lists.items() for idx in range(number)}
        found[name] = Part(total - sum(blocks.values()), blocks)
    return found


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


def _count(component: ComponentFiles) -> Part:
    """Parameters; of GGUF and other forms, as many as take their bytes in bf16, the others in one piece."""
    is_gguf = component.files[0].suffix == ".gguf"
    if not is_gguf and (component.quantisation or component.files[0].suffix != ".safetensors"):
        return Part(sum(path.stat().st_size for path in component.files) // _BF16_BYTES)
    fixed, blocks = 0, dict[str, int]()
    for name, size in (each for path in component.files for each in _sizes(path)):
        key = block_key(name)
        if key is None or (STAYS.search(name) and not is_gguf):
            fixed += size
        else:
            blocks[key] = blocks.get(key, 0) + size
    return Part(fixed, dict(sorted(blocks.items(), key=lambda each: (len(each[0]), each[0]))))


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Parameters of each tensor of a file; of GGUF, as many as take its bytes in bf16."""
    if path.suffix == ".gguf":
        import gguf

        yield from ((each.name, int(each.n_bytes) // _BF16_BYTES) for each in gguf.GGUFReader(path).tensors)
    else:
        yield from ((name, math.prod(entry["shape"])) for name, entry in own_tensors(path).items())


def _model_index(checkpoint: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((checkpoint / "model_index.json").read_text(encoding="utf-8"))
    return found
