"""LoRAs merged into the weights of a pipeline's models, and taken out again.

diffusers' own loader converts a file and attaches its factors to an *outline* of each model, which has shapes
but no weights (outlines.py). The base weights of changed layers are kept on the device. A switch writes base
weight plus change to the model's weight in place, also where a fused block has it as rows of a larger one
(fused.py), so recorded forwards stay valid. Nothing is subtracted, so a model without LoRAs has the bits that
it was loaded with. peft computes the change of a layer as in `fuse_lora`; for linear layers on a GPU, one
kernel reads the base weight once and adds the product of the factors (low_rank.py).

Results equal `load_lora_weights`, `set_adapters` and `fuse_lora`: bitwise in fp32 on a CPU.
Source: diffusers 0.42 loaders/lora_base.py and peft.py, peft 0.21 tuners/lora/layer.py.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.models.fast.fused import original_weights
from gfgen.models.lora.fit import KEPT_FILES, SECOND
from gfgen.models.lora.outlines import Outlines


class MergedLoras:
    """The LoRAs that a pipeline's models contain. For one thread.

    `changed` is called with each model whose weights have changed.
    """

    def __init__(self, pipeline: Any, *, changed: Callable[[nn.Module], None] = lambda model: None) -> None:
        self._pipeline = pipeline
        self._changed = changed
        self._outlines = Outlines(pipeline)
        self._models: dict[str, _Model] = {}
        self._merged: dict[str, tuple[object, ...]] = {}
        self._loaded: OrderedDict[tuple[str, bool], _Loaded] = OrderedDict()
        """By the file's hash and whether it was loaded for the second expert."""
        self._names = (f"file{idx}" for idx in itertools.count())

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
                self._merged[component] = wanted
                self._changed(getattr(self._pipeline, component))

    def _set(self, component: str, loras: Sequence[Mapping[str, Any]]) -> None:
        wanted: dict[str, list[tuple[_Change, float]]] = {}
        for lora in loras:
            for change in self._changes(lora, component):
                wanted.setdefault(change.parameter, []).append((change, lora["scale"]))
        if component not in self._models:
            self._models[component] = _Model(getattr(self._pipeline, component))
        self._models[component].set(wanted)

    def _changes(self, lora: Mapping[str, Any], component: str) -> Sequence[_Change]:
        """What a LoRA changes in a model. It is loaded first if need be."""
        key = (lora["sha256"], component == SECOND)
        if key not in self._loaded:
            loaded = _Loaded(next(self._names))
            _check_content(lora)
            self._outlines.attach(Path(lora["path"]), loaded.name, is_second=component == SECOND)
            self._loaded[key] = loaded
            while len(self._loaded) > KEPT_FILES:
                _, gone = self._loaded.popitem(last=False)
                self._outlines.detach(gone.name)
        self._loaded.move_to_end(key)
        loaded = self._loaded[key]
        if component not in loaded.changes:
            loaded.changes[component] = [
                _Change(f"{name}.{part}", layer, loaded.name)
                for name, layer in self._outlines.layers(component, loaded.name)
                for part in _parameters(layer, loaded.name)
            ]
        return loaded.changes[component]


@dataclass(slots=True)
class _Loaded:
    """A LoRA that is attached to the outlines."""

    name: str
    changes: dict[str, list[_Change]] = field(default_factory=dict)
    """By model."""


class _Model:
    """A model's weights, and the original values of those that were ever changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights: dict[str, Tensor] = {}
        """Under the names of diffusers' model."""
        self._base: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        """Weights that may not have their original values."""

    @torch.no_grad()
    def set(self, wanted: Mapping[str, Sequence[tuple[_Change, float]]]) -> None:
        """Make these changes to the original weights, each times a scale, and no others."""
        if not self._weights or hasattr(self._model, "_hf_hook"):  # an offloaded expert may have moved since
            self._weights = original_weights(self._model)
        for name in sorted(self._changed - wanted.keys()):
            self._weights[name].copy_(self._base[name])
        self._changed |= wanted.keys()
        for name, changes in wanted.items():
            weight = self._weights[name]
            if name not in self._base:
                self._base[name] = weight.clone()
            source = self._base[name]
            for change, scale in changes:
                change.add(source, scale, out=weight)
                source = weight
        self._changed = set(wanted)


class _Change:
    """What a LoRA changes in one parameter: "weight" or "bias" of a layer of peft."""

    def __init__(self, parameter: str, layer: Any, adapter: str) -> None:
        self.parameter = parameter
        self._layer = layer
        self._adapter = adapter
        self._device = torch.device("cpu")
        self._factors = _factors(layer, adapter) if parameter.endswith(".weight") else None

    def add(self, source: Tensor, scale: float, *, out: Tensor) -> None:
        """Do to `source` what peft's `merge` does to the layer's own parameter."""
        layer, adapter = self._layer, self._adapter
        layer.set_scale(adapter, scale)
        if out.device != self._device:
            self._move(out.device)
        if self.parameter.endswith(".bias"):
            torch.add(source, layer.lora_B[adapter].bias * layer.scaling[adapter], out=out)
        elif self._factors is not None and out.is_cuda:
            from gfgen.models.lora import low_rank

            up, down = self._factors
            low_rank.add_product(source, up.data, down.data, layer.scaling[adapter], out=out)
        else:
            torch.add(source, layer.get_delta_weight(adapter), out=out)

    def _move(self, device: torch.device) -> None:
        """Bring the factors to the device of the weights."""
        for parts in (getattr(self._layer, name) for name in self._layer.adapter_layer_names):
            if self._adapter in parts and isinstance(parts, nn.ModuleDict):
                parts[self._adapter].to(device)
        self._device = device


def _factors(layer: Any, adapter: str) -> tuple[Tensor, Tensor] | None:
    """The two matrices whose product is the change of a linear layer; None for other layers."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or layer.fan_in_fan_out:
        return None
    return layer.lora_B[adapter].weight, layer.lora_A[adapter].weight


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
