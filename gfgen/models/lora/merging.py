"""LoRAs merged into the weights of a pipeline's models, and taken out again.

diffusers' own loader converts a file and attaches its factors to an *outline* of each model, which has shapes
but no weights (outlines.py). peft computes each layer's change from the factors, as in `fuse_lora`. It
is added to the model's weight in place, also where a fused block has it as rows of a larger one (fused.py),
so recorded forwards stay valid. The base weights of changed layers are kept on the device and copied back:
nothing is subtracted, so a model without LoRAs has the bits that it was loaded with.

Results equal `load_lora_weights`, `set_adapters` and `fuse_lora`: bitwise in fp32 on a CPU.
Source: diffusers 0.42 loaders/lora_base.py and peft.py, peft 0.21 tuners/lora/layer.py.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
        self._weights: dict[str, dict[str, Tensor]] = {}
        """By model: its weights under the names of diffusers' model."""
        self._base: dict[str, dict[str, Tensor]] = {}
        """By model: the original values of weights that were ever changed."""
        self._merged: dict[str, tuple[object, ...]] = {}
        self._adapters: OrderedDict[tuple[str, bool], str] = OrderedDict()
        """By the file's hash and whether it was loaded for the second expert: its name in the outlines."""
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

    @torch.no_grad()
    def _set(self, component: str, loras: Sequence[Mapping[str, Any]]) -> None:
        layers = [
            (name, layer, adapter, lora["scale"])
            for lora in loras
            for adapter in [self._adapter(lora, component)]
            for name, layer in self._outlines.layers(component, adapter)
        ]
        self._weights.pop(component, None)  # an offloaded expert may have moved since
        base = self._base.setdefault(component, {})
        for name in base:
            self._weight(component, name).copy_(base[name])
        for name, layer, adapter, scale in layers:
            layer.set_scale(adapter, scale)
            for part in _parameters(layer, adapter):
                weight = self._weight(component, f"{name}.{part}")
                if f"{name}.{part}" not in base:
                    base[f"{name}.{part}"] = weight.clone()
                _change(weight, layer, adapter, part=part)

    def _weight(self, component: str, name: str) -> Tensor:
        if component not in self._weights:
            self._weights[component] = original_weights(getattr(self._pipeline, component))
        return self._weights[component][name]

    def _adapter(self, lora: Mapping[str, Any], component: str) -> str:
        """The name of a LoRA in the outlines, where it is loaded first if need be."""
        key = (lora["sha256"], component == SECOND)
        if key not in self._adapters:
            name = next(self._names)
            _check_content(lora)
            self._outlines.attach(Path(lora["path"]), name, is_second=component == SECOND)
            self._adapters[key] = name
            while len(self._adapters) > KEPT_FILES:
                _, gone = self._adapters.popitem(last=False)
                self._outlines.detach(gone)
        self._adapters.move_to_end(key)
        return self._adapters[key]


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


def _change(weight: Tensor, layer: Any, adapter: str, *, part: str) -> None:
    """Do to a parameter what peft's `merge` does to the layer's own."""
    for parts in (getattr(layer, name) for name in layer.adapter_layer_names):
        if adapter in parts and isinstance(parts, nn.ModuleDict):
            parts[adapter].to(weight.device)
    if part == "bias":
        weight += layer.lora_B[adapter].bias * layer.scaling[adapter]
    else:
        weight += layer.get_delta_weight(adapter)
