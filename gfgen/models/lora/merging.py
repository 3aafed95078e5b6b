"""LoRAs merged into the weights of a pipeline's models, and taken out again.

diffusers' own loader converts a file and attaches its factors to an *outline* of each model, which has shapes
but no weights (outlines.py). The base weights of changed layers are kept on the device, or in host memory
where the device has no room for them (session/memory.py). A switch writes base weight plus change to the
model's weight in place, also where a fused block has it as rows of a larger one (weights.py), so recorded
forwards stay valid. Layers in 8 bits get the sum quantised; their base weights are read from the checkpoint
(stored_weights.py) when a LoRA first changes them. Nothing is subtracted, so a model without LoRAs has the
bits that it was loaded with. Bits do not depend on where base weights are.

A linear layer's change is the product of two factors, computed as in `fuse_lora`. On a GPU, one kernel reads
the base weight once and adds the product (low_rank.py). Factors under diffusers' own names are read from the
file without an outline. peft computes the changes of other layers.

Results equal `load_lora_weights`, `set_adapters` and `fuse_lora`: bitwise in fp32 on a CPU.
Source: diffusers 0.42 loaders/lora_base.py and peft.py, peft 0.21 tuners/lora/layer.py.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.models.loading.stored_weights import StoredWeights
from gfgen.models.lora.fit import ADAPTER_METADATA, FACTOR, KEPT_FILES, SECOND
from gfgen.models.lora.outlines import Outlines
from gfgen.models.lora.weights import QuantisedRows, original_weights

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 30
"""Size of a block of pinned memory for several weights; torch rounds each allocation to a power of two."""
_ALIGNMENT = 64


class MergedLoras:
    """The LoRAs that a pipeline's models contain. For one thread.

    `changed` is called with each model whose weights have changed.
    """

    def __init__(self, pipeline: Any, *, changed: Callable[[nn.Module], None] = lambda model: None) -> None:
        self._pipeline = pipeline
        self._changed = changed
        self._outlines = Outlines(pipeline)
        self.keeps_on_host = False
        """Whether host memory has the base weights of changed layers; set before the first job."""
        self.stored: StoredWeights | None = None
        """Where the base weights of layers in 8 bits are; set before the first job of such a model."""
        self._models: dict[str, _Model] = {}
        self._merged: dict[str, tuple[object, ...]] = {}
        self._loaded: OrderedDict[tuple[str, bool], _Loaded] = OrderedDict()
        """By the file's hash and whether it is for the second expert; the last used come last."""
        self._names = (f"file{idx}" for idx in itertools.count())
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="lora-hash")
        """Hashing a file takes longer than reading and merging it, so it runs at the same time."""

    def merge(self, spec: JobSpec) -> None:
        """Give the models the LoRAs of a job, and no others.

        Raises: ModelError for a file that does not fit the model.
        """
        if not spec.lora and not any(self._merged.values()):
            return
        loras = [
            {**lora, "path": path} for lora, path in zip(spec.lora or (), spec.lora_files or (), strict=True)
        ]
        for component in self._outlines.components:
            own = [lora for lora in loras if lora.get("target") in (None, component)]
            wanted = tuple((lora["sha256"], lora["scale"]) for lora in own)
            if wanted != self._merged.get(component, ()):
                self._merged[component] = ("being changed",)  # if that fails, the next job starts anew
                self._set(component, own)
                self._confirm(own, component)
                self._merged[component] = wanted
                self._changed(getattr(self._pipeline, component))

    def _set(self, component: str, loras: Sequence[Mapping[str, Any]]) -> None:
        if component not in self._models:
            model = getattr(self._pipeline, component)
            read = None if self.stored is None else partial(self.stored.read, component)
            self._models[component] = _Model(model, keeps_on_host=self.keeps_on_host, read=read)
        wanted: dict[str, list[tuple[_Change, float]]] = {}
        for lora in loras:
            for change in self._changes(lora, component):
                wanted.setdefault(change.parameter, []).append((change, lora["scale"]))
        self._models[component].set(wanted)

    def _changes(self, lora: Mapping[str, Any], component: str) -> Sequence[_Change]:
        """What a LoRA changes in a model. It is loaded first if need be."""
        key = _key(lora, component)
        loaded = self._loaded.setdefault(key, _Loaded())
        if component not in loaded.changes:
            path = Path(lora["path"])
            checked = loaded.checked = self._hashing.submit(_check_content, lora)
            try:
                changes = self._models[component].read(path)
            except Exception:
                checked.result()  # a file that has changed is why it cannot be read
                raise
            if changes is None:
                checked.result()
                self._convert(path, loaded, is_second=component == SECOND)
            else:
                loaded.changes[component] = changes
        self._loaded.move_to_end(key)
        while len(self._loaded) > KEPT_FILES:
            _, gone = self._loaded.popitem(last=False)
            self._outlines.detach(gone.name)
        return loaded.changes[component]

    def _confirm(self, loras: Sequence[Mapping[str, Any]], component: str) -> None:
        """Raises: ModelError if one of the files is not that of admission; it is read again next time."""
        for lora in loras:
            checked = self._loaded[_key(lora, component)].checked
            assert checked is not None
            try:
                checked.result()
            except ModelError:
                del self._loaded[_key(lora, component)]
                raise

    def _convert(self, path: Path, loaded: _Loaded, *, is_second: bool) -> None:
        """Let diffusers convert a file, and attach it to the outlines."""
        name = loaded.name = next(self._names)
        self._outlines.attach(path, name, is_second=is_second)
        for component in self._outlines.components:
            if (component == SECOND) is is_second:
                loaded.changes[component] = [
                    _product(f"{layer_name}.{part}", layer, name)
                    or _OfLayer(f"{layer_name}.{part}", layer, name)
                    for layer_name, layer in self._outlines.layers(component, name)
                    for part in _parameters(layer, name)
                ]


@dataclass(slots=True)
class _Loaded:
    """What a LoRA changes."""

    name: str = ""
    """In the outlines, if it is attached to them."""
    changes: dict[str, list[_Change]] = field(default_factory=dict)
    """By model."""
    checked: Future[None] | None = None
    """Fails if the file that was read is not that of admission."""


def _key(lora: Mapping[str, Any], component: str) -> tuple[str, bool]:
    return lora["sha256"], component == SECOND


class _Model:
    """A model's weights, and the original values of those that were ever changed.

    An offloaded expert's weights may be on the device or in host memory. Its changes are always computed on
    the device, which may round differently from a CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        keeps_on_host: bool = False,
        read: Callable[..., Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self._model = model
        self._read = read
        self._host = _HostMemory() if keeps_on_host else None
        hook = getattr(model, "_hf_hook", None)
        self._device: torch.device | None = None if hook is None else hook.execution_device
        """Where an offloaded expert computes; None for a model that stays where it is."""
        self._weights: dict[str, Tensor | QuantisedRows] = {}
        """Under the names of diffusers' model."""
        self._base: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        """Weights that may not have their original values."""

    def read(self, path: Path) -> list[_Change] | None:
        """What a file with diffusers' own names changes in linear layers; None for other files."""
        factors: dict[str, dict[str, Tensor]] = {}
        with safe_open(path, framework="pt") as file:
            if ADAPTER_METADATA in (file.metadata() or ()):
                return None
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if (match := FACTOR.fullmatch(name)) is None:
                    return None
                factors.setdefault(f"{match[2]}.weight", {})[match[3]] = file.get_tensor(name)
        weights = self._weights = original_weights(self._model)
        found: list[_Change] = []
        for name, pair in factors.items():
            weight, up, down = weights.get(name), pair.get("B"), pair.get("A")
            if weight is None or up is None or down is None or weight.ndim != 2 or down.ndim != 2:
                return None
            if (up.shape[0], down.shape[1]) != weight.shape or up.shape[1] != len(down):
                return None
            up, down = (each.to(self._device or weight.device, weight.dtype) for each in (up, down))
            found.append(_Product(name, up, down, len(down), len(down)))
        return found

    @torch.no_grad()
    def set(self, wanted: Mapping[str, Sequence[tuple[_Change, float]]]) -> None:
        """Make these changes to the original weights, each times a scale, and no others."""
        if not self._weights or self._device is not None:  # an offloaded expert may have moved since
            self._weights = original_weights(self._model)
        for name in sorted(self._changed - wanted.keys()):
            weight, base = self._weights[name], self._base[name]
            if isinstance(weight, QuantisedRows):
                weight.copy_(base.to(self._place(weight), non_blocking=True))
            else:
                weight.copy_(base, non_blocking=True)
        self._changed &= wanted.keys()
        for name, base in self._originals(wanted.keys() - self._base.keys()):
            self._base[name] = base
        self._changed |= wanted.keys()
        for name, changes in wanted.items():
            weight, base = self._weights[name], self._base[name]
            if isinstance(weight, Tensor) and self._device is None:
                out = weight
            else:
                out = torch.empty(weight.shape, dtype=weight.dtype, device=self._place(weight))
            source = base if base.device == out.device else out.copy_(base, non_blocking=True)
            for change, scale in changes:
                change.add(source, scale, out=out)
                source = out
            if out is not weight:
                weight.copy_(out)
        self._changed = set(wanted)

    def _place(self, weight: Tensor | QuantisedRows) -> torch.device:
        return self._device or weight.device

    def _originals(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Copies of weights that were never changed."""
        quantised: dict[str, QuantisedRows] = {}
        for name in sorted(names):
            weight = self._weights[name]
            if isinstance(weight, QuantisedRows):
                quantised[name] = weight
            else:
                yield name, self._copy_of(weight, device=self._place(weight))
        if not quantised:
            return
        assert self._read is not None
        device = self._place(next(iter(quantised.values())))
        for name, weight in self._read(quantised, device=device):
            copy = self._copy_of(weight, device=device)
            if not quantised[name].hold(copy.to(device)):
                raise ModelError(f"{name}: the files of the model have changed since it was loaded")
            yield name, copy

    def _copy_of(self, weight: Tensor, *, device: torch.device) -> Tensor:
        if self._host is None:
            return weight.to(device, copy=True)
        return self._host.copy_of(weight, is_pinned=device.type == "cuda")


class _HostMemory:
    """Host memory for copies of weights; a GPU reads pinned memory by itself, while the host goes on."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        """The rest of the last block."""

    def copy_of(self, weight: Tensor, *, is_pinned: bool) -> Tensor:
        num_bytes = -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > len(self._left):
            num_block = max(num_bytes, _BLOCK_BYTES) if is_pinned else num_bytes
            self._left = _block(num_block, is_pinned=is_pinned)
        place, self._left = self._left[: weight.nbytes], self._left[num_bytes:]
        return place.view(weight.dtype).view(weight.shape).copy_(weight)


def _block(num_bytes: int, *, is_pinned: bool) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError:  # the system limits pinned memory, such as WSL
        if not is_pinned:
            raise
        logger.warning("no more memory can be pinned: switches of LoRAs take longer")
        return torch.empty(num_bytes, dtype=torch.uint8)


class _Change(Protocol):
    """What a LoRA changes in one parameter."""

    parameter: str

    def add(self, source: Tensor, scale: float, *, out: Tensor) -> None:
        """Do to `source` what peft's `merge` does to the layer's own parameter."""


@dataclass(slots=True)
class _Product:
    """The product of two matrices, times alpha / divisor."""

    parameter: str
    up: Tensor
    down: Tensor
    alpha: float
    divisor: float

    def add(self, source: Tensor, scale: float, *, out: Tensor) -> None:
        if self.up.device != out.device:
            self.up, self.down = self.up.to(out.device), self.down.to(out.device)
        scale = scale * self.alpha / self.divisor
        if out.is_cuda:
            from gfgen.models.lora import low_rank

            low_rank.add_product(source, self.up, self.down, scale, out=out)
            return
        dtype = torch.float32 if self.up.dtype in (torch.float16, torch.bfloat16) else self.up.dtype
        product = (self.up.to(dtype) @ self.down.to(dtype)) * scale  # in half precision, as peft does
        torch.add(source, product.to(self.up.dtype), out=out)


@dataclass(slots=True)
class _OfLayer:
    """What a layer of peft computes for its "weight" or "bias"."""

    parameter: str
    layer: Any
    adapter: str
    _device: torch.device | None = None

    def add(self, source: Tensor, scale: float, *, out: Tensor) -> None:
        layer, adapter = self.layer, self.adapter
        if out.device != self._device:
            self._move(out.device)
        layer.set_scale(adapter, scale)
        if self.parameter.endswith(".bias"):
            torch.add(source, layer.lora_B[adapter].bias * layer.scaling[adapter], out=out)
        else:
            torch.add(source, layer.get_delta_weight(adapter), out=out)

    def _move(self, device: torch.device) -> None:
        """Bring the factors to the device of the weights."""
        for parts in (getattr(self.layer, name) for name in self.layer.adapter_layer_names):
            if self.adapter in parts and isinstance(parts, nn.ModuleDict):
                parts[self.adapter].to(device)
        self._device = device


def _product(parameter: str, layer: Any, adapter: str) -> _Product | None:
    """The change of a linear layer of peft; None for other layers and parameters."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or layer.fan_in_fan_out or not parameter.endswith(".weight"):
        return None
    rank, up, down = layer.r[adapter], layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
    divisor = math.sqrt(rank) if layer.use_rslora.get(adapter) else rank
    return _Product(parameter, up.data, down.data, layer.lora_alpha[adapter], divisor)


def _check_content(lora: Mapping[str, Any]) -> None:
    """Raises ModelError if the file is gone or is another one than at admission."""
    try:
        with open(lora["path"], "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"lora {lora['path']}: cannot be read ({error.strerror})") from None
    if sha256 != lora["sha256"]:
        raise ModelError(f"lora {lora['path']}: has changed since the job was read; start the run again")


def _parameters(layer: Any, adapter: str) -> Sequence[str]:
    """The parameters of a layer that a LoRA changes."""
    return ("weight", "bias") if getattr(layer, "lora_bias", {}).get(adapter) else ("weight",)
