"""Models without weights, to which diffusers' loaders attach LoRAs.

As a program it reads pairs of a checkpoint and a LoRA as JSON, and writes whether each fits (fit.py).
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn
from transformers import AutoConfig

from gfgen.errors import GfgenError, ModelError, in_one_line
from gfgen.models.geometry.checkpoint import Checkpoint, read_checkpoint
from gfgen.models.geometry.weights import has_weights
from gfgen.models.loading.components import load_class, without_progress_bars
from gfgen.models.lora.fit import SECOND
from gfgen.system.wording import first_of

_REFUSALS = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, AssertionError)
"""What diffusers' converters raise for files that they do not expect."""


class Outlines:
    """A pipeline whose models have no memory for weights, with the LoRAs attached to them."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._models: dict[str, Any] = {}

    @property
    def components(self) -> list[str]:
        """The models that LoRAs can change."""
        names = getattr(self._pipeline, "_lora_loadable_modules", ())
        return [name for name in names if isinstance(getattr(self._pipeline, name, None), nn.Module)]

    def attach(self, path: Path, name: str, *, is_second: bool) -> None:
        """Attach a LoRA's factors under this name, to the second expert or to the other models.

        Raises: ModelError for a file that does not fit the models.
        """
        outlined = _copy_of(self._pipeline, {each: self._model(each) for each in self.components})
        source = {"weight_name": path.name, "local_files_only": True}
        second = {"load_into_transformer_2": True} if is_second else {}
        try:
            if not self.components:
                raise ModelError(f"{path}: {type(self._pipeline).__name__} takes no LoRAs")
            _check_fit(outlined, path, source)
            with warnings.catch_warnings():  # of peft, about several LoRAs in one model
                warnings.simplefilter("ignore")
                outlined.load_lora_weights(str(path.parent), adapter_name=name, **source, **second)
        except _REFUSALS as error:
            raise ModelError(f"{path}: {_misfit(error, type(self._pipeline).__name__)}") from error
        layers = [layer for each in self._models.values() for _, layer in layers_of(each, name)]
        if not layers:
            raise ModelError(f"{path}: changes no layer of this model")
        if any(name in getattr(layer, "lora_variant", ()) for layer in layers):
            raise ModelError(f"{path}: is a DoRA (lora_magnitude_vector), which gfgen cannot merge")

    def detach(self, name: str) -> None:
        for model in self._models.values():
            if name in getattr(model, "peft_config", {}):
                model.delete_adapters(name)

    def layers(self, component: str, name: str) -> Iterator[tuple[str, Any]]:
        """The layers of peft by which an attached LoRA changes a model, by name."""
        return layers_of(self._model(component), name)

    def _model(self, component: str) -> Any:
        if component not in self._models:
            self._models[component] = outline(getattr(self._pipeline, component))
        return self._models[component]


def outline(model: Any) -> Any:
    """A model of the same class and config, whose weights have shapes and dtypes but no memory."""
    made = _on_meta(type(model), model.config)
    in_fp32 = getattr(type(model), "_keep_in_fp32_modules", None) or ()
    for name, module in made.named_modules():
        kept = any(each in name.split(".") for each in in_fp32)
        dtype = torch.float32 if kept else model.dtype
        for parameter, value in list(module.named_parameters(recurse=False)):
            weightless = torch.zeros((), dtype=dtype).expand(value.shape)
            module.register_parameter(parameter, nn.Parameter(weightless, requires_grad=False))
        for buffer, value in module.named_buffers(recurse=False):
            setattr(module, buffer, torch.zeros((), dtype=value.dtype).expand(value.shape))
    return made


def layers_of(model: nn.Module, adapter: str) -> Iterator[tuple[str, Any]]:
    """The layers of peft by which a LoRA changes a model, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # 1 s that only jobs with LoRAs pay

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and adapter in getattr(module, "scaling", ()):
            yield name, module


def _on_meta(model_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)


def _copy_of(pipeline: Any, models: Mapping[str, nn.Module]) -> Any:
    """The pipeline with other models; registering them would change the config that both share."""
    copy = object.__new__(type(pipeline))
    copy.__dict__ = {**pipeline.__dict__, **models}
    return copy


def _misfit(error: Exception, pipeline_class: str) -> str:
    """What a loader says, in one line."""
    if other_sizes := sorted(set(re.findall(r"size mismatch for (\S+?)\.lora_", str(error)))):
        layers = ", ".join(first_of(other_sizes, "layer"))
        return f"made for another model, with other sizes of {layers}; this one is {pipeline_class}"
    return f"does not fit this model: {in_one_line(error)}"


def _check_fit(outlined: Any, path: Path, source: Mapping[str, Any]) -> None:
    """Raises ModelError for layers that the pipeline's models lack, which diffusers would leave out."""
    converted = outlined.lora_state_dict(str(path.parent), **source)
    converted = converted[0] if isinstance(converted, tuple) else converted
    changed = {key.partition(".lora_A.")[0] for key in converted if ".lora_A." in key}
    models = {name: getattr(outlined, name, None) for name in {layer.partition(".")[0] for layer in changed}}
    modules = {
        name: {module for module, _ in model.named_modules()} if isinstance(model, nn.Module) else set()
        for name, model in models.items()
    }
    lacking = []
    for layer in sorted(changed):
        component, _, name = layer.partition(".")
        own = name.removeprefix("text_model.")  # transformers 5 leaves it out
        if modules[component].isdisjoint({name, own, f"{name}.base_layer", f"{own}.base_layer"}):
            lacking.append(layer)
    if lacking:
        raise ModelError(
            f"{path}: made for another model, which has {', '.join(first_of(lacking, 'layer'))}; "
            f"this one is {type(outlined).__name__}"
        )


# Without a loaded pipeline --------------------------------------------------------------------------


def weightless_pipeline(checkpoint: Path) -> Any:
    """A pipeline of a checkpoint's class with only the models that LoRAs can change, without weights."""
    files = read_checkpoint(checkpoint, with_weights=False)
    own = files.own_code
    kind = load_class(own["pipeline"]) if "pipeline" in own else getattr(diffusers, files.pipeline_class)
    names = getattr(kind, "_lora_loadable_modules", ())
    parts = {name: weightless(files, name) for name in names if files.class_of(name) is not None}
    bare = type(kind.__name__, (kind,), {"components": property(lambda self: parts)})
    pipeline: Any = object.__new__(bare)
    pipeline.__dict__.update(parts)
    return pipeline


def weightless(files: Checkpoint, name: str) -> Any:
    """A component without weights; one that has none, such as a tokenizer, is whole."""
    library, class_name = files.index[name]
    if (own := files.own_code.get(name)) is not None:
        kind = load_class(own)
    else:
        module = library if library in ("diffusers", "transformers") else f"diffusers.pipelines.{library}"
        kind = getattr(importlib.import_module(module), class_name)
    folder = str(files.path / name)
    if not has_weights(name):
        return kind.from_pretrained(folder, local_files_only=True)
    is_own_kind = hasattr(kind, "load_config")
    return _on_meta(kind, kind.load_config(folder) if is_own_kind else AutoConfig.from_pretrained(folder))


def changed_by(outlines: Outlines, path: Path) -> dict[str, int]:
    """The weights that a LoRA changes, and their parameters. Raises: as `Outlines.attach`."""
    changed: dict[str, int] = {}
    outlines.attach(path, "first", is_second=False)
    if SECOND in outlines.components:
        outlines.attach(path, "second", is_second=True)
    for component in outlines.components:
        for name, layer in outlines.layers(component, "second" if component == SECOND else "first"):
            base = layer.get_base_layer()
            changed[f"{component}.{name}.weight"] = base.weight.numel()
    return changed


def main() -> None:
    answers = []
    with without_progress_bars():
        for checkpoint, path in json.load(sys.stdin):
            try:
                outlines = Outlines(weightless_pipeline(Path(checkpoint)))
                changed = changed_by(outlines, Path(path))
                answers.append({"changed": changed, "components": outlines.components})
            except GfgenError as error:
                answers.append({"error": str(error)})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
