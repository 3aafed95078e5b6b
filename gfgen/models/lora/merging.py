"""LoRAs merged into the weights of a pipeline's models, and taken out again.

diffusers' own loader converts a file and attaches its factors to an *outline* of each model, which has shapes
and one byte of weights. peft computes each layer's change from the factors, as in `fuse_lora`. The change is
added to the model's weight in place, also where a fused block has it as rows of a larger one (fused.py), so
recorded forwards stay valid. The base weights of changed layers are kept on the device and copied back:
nothing is subtracted, so a model without LoRAs has the bits that it was loaded with.

Results equal `load_lora_weights`, `set_adapters` and `fuse_lora`: bitwise in fp32 on a CPU.
Source: diffusers 0.42 loaders/lora_base.py and peft.py, peft 0.21 tuners/lora/layer.py.
"""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.errors import ModelError, in_one_line
from gfgen.job.spec import JobSpec
from gfgen.models.fast.fused import original_weights
from gfgen.system.wording import first_of

SECOND = "transformer_2"
"""The second expert, into which diffusers loads on request only."""
KEPT_FILES = 16
"""LoRAs whose factors stay on the device; the least recently used goes first."""


class MergedLoras:
    """The LoRAs that a pipeline's models contain. For one thread.

    `changed` is called with each model whose weights have changed.
    """

    def __init__(self, pipeline: Any, *, changed: Callable[[nn.Module], None] = lambda model: None) -> None:
        self._pipeline = pipeline
        self._changed = changed
        self._outlines: dict[str, Any] = {}
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
        for component in self._components():
            own = [lora for lora in loras if lora.get("target") in (None, component)]
            wanted = tuple((lora["sha256"], lora["scale"]) for lora in own)
            if wanted != self._merged.get(component, ()):
                self._set(component, own)
                self._merged[component] = wanted
                self._changed(getattr(self._pipeline, component))

    def _components(self) -> list[str]:
        names = getattr(self._pipeline, "_lora_loadable_modules", ())
        return [name for name in names if isinstance(getattr(self._pipeline, name, None), nn.Module)]

    @torch.no_grad()
    def _set(self, component: str, loras: Sequence[Mapping[str, Any]]) -> None:
        layers = [
            (name, layer, adapter, lora["scale"])
            for lora in loras
            for adapter in [self._adapter(lora, component)]
            for name, layer in _layers(self._outline(component), adapter)
        ]
        base = self._base.setdefault(component, {})
        is_original = set(base)
        for name in base:
            self._weight(component, name).copy_(base[name])
        for name, layer, adapter, scale in layers:
            layer.set_scale(adapter, scale)
            for parameter, change in _changes(layer, adapter, self._device(component)):
                weight = self._weight(component, f"{name}.{parameter}")
                if f"{name}.{parameter}" not in is_original:
                    base[f"{name}.{parameter}"] = weight.clone()
                    is_original.add(f"{name}.{parameter}")
                weight += change

    def _weight(self, component: str, name: str) -> Tensor:
        if component not in self._weights:
            self._weights[component] = original_weights(getattr(self._pipeline, component))
        return self._weights[component][name]

    def _device(self, component: str) -> torch.device:
        model: nn.Module = getattr(self._pipeline, component)
        return next(model.parameters()).device

    def _adapter(self, lora: Mapping[str, Any], component: str) -> str:
        """The name of a LoRA in the outlines, where it is loaded first if need be."""
        key = (lora["sha256"], component == SECOND)
        if key not in self._adapters:
            name = next(self._names)
            self._load(lora, name, component)
            self._adapters[key] = name
            while len(self._adapters) > KEPT_FILES:
                _, gone = self._adapters.popitem(last=False)
                for outlined in self._outlines.values():
                    if gone in getattr(outlined, "peft_config", {}):
                        outlined.delete_adapters(gone)
        self._adapters.move_to_end(key)
        return self._adapters[key]

    def _load(self, lora: Mapping[str, Any], name: str, component: str) -> None:
        """Attach a LoRA's factors to the outlines, under this name."""
        outlined = _copy_of(self._pipeline, {each: self._outline(each) for each in self._components()})
        path = Path(lora["path"])
        source = {"weight_name": path.name, "local_files_only": True}
        second = {"load_into_transformer_2": True} if component == SECOND else {}
        try:
            _check_fit(outlined, path, source)
            with warnings.catch_warnings():  # of peft, about several LoRAs in one model
                warnings.simplefilter("ignore")
                outlined.load_lora_weights(str(path.parent), adapter_name=name, **source, **second)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            raise ModelError(f"lora {path}: does not fit this model: {in_one_line(error)}") from error
        if not any(True for each in self._outlines.values() for _ in _layers(each, name)):
            raise ModelError(f"lora {path}: changes no layer of this model")

    def _outline(self, component: str) -> Any:
        if component not in self._outlines:
            self._outlines[component] = outline(getattr(self._pipeline, component))
        return self._outlines[component]


def outline(model: Any) -> Any:
    """A model of the same class and config, whose weights have shapes and dtypes but no memory."""
    model_class: Any = type(model)
    config: Any = model.config
    with torch.device("meta"):
        made = model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)
    in_fp32 = getattr(model_class, "_keep_in_fp32_modules", None) or ()
    for name, module in made.named_modules():
        kept = any(each in name.split(".") for each in in_fp32)
        dtype = torch.float32 if kept else model.dtype
        for parameter, value in list(module.named_parameters(recurse=False)):
            weightless = torch.zeros((), dtype=dtype).expand(value.shape)
            module.register_parameter(parameter, nn.Parameter(weightless, requires_grad=False))
    return made


def _copy_of(pipeline: Any, models: Mapping[str, nn.Module]) -> Any:
    """The pipeline with other models; registering them would change the config that both share."""
    copy = object.__new__(type(pipeline))
    copy.__dict__ = {**pipeline.__dict__, **models}
    return copy


def _check_fit(outlined: Any, path: Path, source: Mapping[str, Any]) -> None:
    """Raises ModelError for layers that the pipeline's models lack, which diffusers would leave out."""
    converted = outlined.lora_state_dict(str(path.parent), **source)
    converted = converted[0] if isinstance(converted, tuple) else converted
    changed = {key.partition(".lora_A.")[0] for key in converted if ".lora_A." in key}
    lacking = []
    for layer in sorted(changed):
        component, _, name = layer.partition(".")
        model = getattr(outlined, component, None)
        if not isinstance(model, nn.Module):
            lacking.append(layer)
            continue
        modules = dict(model.named_modules())
        if name not in modules and f"{name}.base_layer" not in modules:
            lacking.append(layer)
    if lacking:
        raise ModelError(
            f"lora {path}: made for another model, which has {', '.join(first_of(lacking, 'layer'))}; "
            f"this one is {type(outlined).__name__}"
        )


def _layers(model: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    """The layers of peft by which a LoRA changes a model, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # 1 s that only jobs with LoRAs pay

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and adapter in getattr(module, "scaling", ()):
            yield name, module


def _changes(layer: Any, adapter: str, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """What peft's `merge` adds to the layer's parameters, by their names."""
    for parts in (getattr(layer, name) for name in layer.adapter_layer_names):
        if adapter in parts and isinstance(parts, nn.ModuleDict):
            parts[adapter].to(device)
    yield "weight", layer.get_delta_weight(adapter)
    if getattr(layer, "lora_bias", {}).get(adapter):
        yield "bias", layer.lora_B[adapter].bias * layer.scaling[adapter]
