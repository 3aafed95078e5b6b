"""The tensors of a LoRA under names of a pipeline's models.

Names that are those of the models up to a prefix are matched here (accounting.py). For the names of other
programs diffusers' converters are asked. They leave out what they do not know, so the tensors that they get
note where they go: a tensor that reaches no parameter is a problem, as any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gfgen.errors import ModelError
from gfgen.models.fast.linears import Int8Layers, Modulation, QuantisedLinear, in_e4m3, in_int8
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.weights import quantisation_in
from gfgen.models.loading.components import load_class, weightless, without_progress_bars
from gfgen.models.lora.accounting import (
    FUSED,
    Match,
    Settings,
    Shapes,
    compare,
    is_flattened,
    plain,
    split,
    unwrapped,
)
from gfgen.system.lifeline import answer_all

_REFUSALS = (OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, AssertionError)
"""What diffusers' converters raise for files that they do not expect."""


@dataclass(frozen=True, slots=True)
class Content:
    match: Match
    tensors: Mapping[str, Tensor]
    lacking: str | None
    warnings: list[str]


def components_of(pipeline: Any) -> list[str]:
    """The models that LoRAs can change: those of diffusers' loader, or the one that denoises."""
    names = getattr(pipeline, "_lora_loadable_modules", None) or ("transformer", "unet")
    return [name for name in names if isinstance(getattr(pipeline, name, None), nn.Module)]


def read_lora(path: Path, pipeline: Any, weights: Shapes) -> Content:
    """Read a file for models with these weights.

    Raises: ModelError for a file that does not fit; layers that all models lack are no reason.
    """
    name, settings = type(pipeline).__name__, Settings.of(path)
    if not weights:
        raise ModelError(f"{path}: {name} takes no LoRAs")
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    tensors = {key: x.float() if x.itemsize == 1 else x for key, x in tensors.items()}  # fp8 has no products

    def compared(tensors: Mapping[str, Tensor]) -> Match:
        return compare({name: list(tensor.shape) for name, tensor in tensors.items()}, weights, settings)

    match, found = compared(tensors), tensors
    if (match.lacking or match.odd) and not match.missing:
        taken = {name for one in match.placed for name in one.tensors.values()}
        rest = {name: tensor for name, tensor in tensors.items() if name not in taken}
        lone = {name for name in match.odd if split(name)}  # such as an alpha without factors
        asked = {name: tensor for name, tensor in rest.items() if name not in lone}
        for prefix in (None, "diffusion_model."):
            with contextlib.suppress(*_REFUSALS):
                converted, sources = _converted(pipeline, asked, prefix, weights)
                tried = compared(both := {**{name: tensors[name] for name in taken}, **converted})
                _name_sources(tried, sources, rest)
                if tried.num_problems < match.num_problems:
                    match, found = tried, both
            if not match.num_problems:
                break
    if (error := match.error(name)) is not None:
        raise ModelError(f"{path}: {error}")
    lacking = match.what_lacks(name)
    return Content(match, found, lacking and f"{path}: {lacking}", match.warnings(settings, tensors))


def _name_sources(match: Match, sources: Mapping[str, set[str]], rest: Mapping[str, Tensor]) -> None:
    """Name tensors of the file in place of converted ones, and those that reach nothing."""
    for names in (match.lacking, match.odd):
        names[:] = dict.fromkeys(each for name in names for each in sorted(sources.get(name) or {name}))
    used = {each for one in match.placed for name in one.tensors.values() for each in sources.get(name, ())}
    used |= sources[""]
    failed = {*match.lacking, *match.odd} if not match.missing and not match.misshaped else set(rest)
    match.odd += sorted(rest.keys() - used - failed)


def _converted(
    pipeline: Any, rest: Mapping[str, Tensor], prefix: str | None, weights: Shapes
) -> tuple[dict[str, Tensor], dict[str, set[str]]]:
    """Tensors by names of the models, and the tensors of the file that each comes from.

    `prefix` replaces what the file has before the names of layers. Tensors of which only the value was read,
    such as alphas, come under "".
    """
    read: set[str] = set()
    traced, converted, sources = dict[str, Tensor](), dict[str, Tensor](), {"": read}
    for name, tensor in rest.items():
        own, parsed = plain(name), split(name)
        if parsed is not None and parsed[1] in ("diff", "diff_b"):
            new = _dense(pipeline, *parsed, tensor, weights)
            converted |= new
            sources |= {key: {name} for key in new}
            continue
        renamed = own if prefix is None or is_flattened(own) else f"{prefix}{unwrapped(own)}"
        traced[renamed] = _Traced.of(tensor, name, read)
    if not traced:
        return converted, sources
    config = {"unet_config": pipeline.unet.config} if "unet" in components_of(pipeline) else {}
    parts = pipeline.lora_state_dict(traced, return_alphas=True, **config)
    for part in parts if isinstance(parts, tuple) else (parts,):
        for name, value in (part or {}).items():
            if not name.startswith("text_encoder"):
                (name,) = convert_unet_state_dict_to_peft({name: value})
            with torch._C.DisableTorchFunctionSubclass():
                converted[name] = torch.as_tensor(value).as_subclass(Tensor)
            sources[name] = getattr(value, "sources", set())
    return converted, sources


def _dense(pipeline: Any, layer: str, kind: str, tensor: Tensor, weights: Shapes) -> dict[str, Tensor]:
    """A whole difference under the name that a published file's weight gets in the model."""
    component = components_of(pipeline)[0]
    known = SINGLE_FILE_LOADABLE_CLASSES.get(type(getattr(pipeline, component)).__name__, {})
    convert: Callable[..., Mapping[str, Tensor]] = known.get("checkpoint_mapping_fn", dict)
    for ending in (".bias",) if kind == "diff_b" else (".weight", ""):
        with contextlib.suppress(*_REFUSALS):
            found = convert({f"{unwrapped(layer)}{ending}": tensor})
            if found and all(f"{component}.{name}" in weights for name in found):
                return {f"{component}.{name.removesuffix(ending)}.{kind}": x for name, x in found.items()}
    return {}


class _Traced(Tensor):
    """Knows the tensors of a file that it was made from."""

    sources: set[str]
    read: set[str]
    """Shared: tensors of one number whose value was read."""

    @classmethod
    def of(cls, tensor: Tensor, name: str, read: set[str]) -> _Traced:
        made = tensor.clone().as_subclass(cls)  # some converters scale in place
        made.sources, made.read = {name}, read
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Traced)]
        sources = {name for each in given for name in each.sources}
        made = [each for each in tree_leaves(result) if isinstance(each, _Traced)]
        if result is None:  # an assignment to a part
            made = given[:1]
        elif func.__name__ in ("item", "tolist", "__float__") and isinstance(result, float | int):
            given[0].read |= sources
        for each in made:
            each.sources, each.read = sources, given[0].read
        return result


def weightless_pipeline(checkpoint: Path) -> Any:
    """A pipeline of a checkpoint's class with only the models that LoRAs can change, without weights."""
    files = read_checkpoint(checkpoint, with_weights=False)
    own = files.own_code
    kind = load_class(own["pipeline"]) if "pipeline" in own else getattr(diffusers, files.pipeline_class)
    names = getattr(kind, "_lora_loadable_modules", None) or ("transformer", "unet")
    parts = {name: weightless(files, name) for name in names if files.class_of(name) is not None}
    pipeline: Any = object.__new__(kind)
    pipeline.__dict__.update(parts)
    return pipeline


def answer(checkpoint: Path, path: Path) -> dict[str, Any]:
    """Whether a LoRA fits, as fields of `LoraFit`. Raises: as `read_lora`."""
    pipeline = weightless_pipeline(checkpoint)
    components = components_of(pipeline)
    weights = {
        f"{component}.{name}": list(weight.shape)
        for component in components
        for name, weight in getattr(pipeline, component).named_parameters()
    }
    content = read_lora(path, pipeline, weights)
    fixed = {
        f"{component}.{layer}.weight"
        for component in components
        if quantisation_in(checkpoint / component)
        for layer in fixed_layers(getattr(pipeline, component))
    }
    changed = {name: 0 if name in fixed else number for name, number in content.match.changed.items()}
    found = {"changed": changed, "components": components, "lacking": content.lacking}
    number = sum(content.tensors[x].numel() for one in content.match.placed for x in one.tensors.values())
    return found | {"warnings": content.warnings, "num_factors": number}


if __name__ == "__main__":
    with without_progress_bars():
        answer_all(lambda asked: answer(*map(Path, asked)))


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows of a layer's weight in 8 bits, which take other values in place."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype
    quantise: Callable[..., tuple[Tensor, Tensor]]
    file_scales: Tensor | None = None
    """Of original values, if the model's files have them in as few bits."""

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def device(self) -> torch.device:
        return self.values.device

    def chunk(self, number: int) -> list[QuantisedRows]:
        of_file = [None] * number if self.file_scales is None else self.file_scales.chunk(number)
        parts = zip(self.values.chunk(number), self.scales.chunk(number), of_file, strict=True)
        return [QuantisedRows(x, scales, self.dtype, self.quantise, own) for x, scales, own in parts]

    def copy_(self, weight: Tensor, *, is_original: bool = False) -> None:
        """Take these values, which are quantised on their own device."""
        found = self.quantise(weight, self.file_scales if is_original else None)
        for own, new in zip((self.values, self.scales), found, strict=True):
            own.copy_(new.view_as(own))

    def hold(self, weight: Tensor) -> bool:
        """Whether `copy_` of this original weight would change nothing."""
        both = zip((self.values, self.scales), self.quantise(weight, self.file_scales), strict=True)
        return all(
            torch.equal(own.to(new.device).view(torch.uint8), new.view_as(own).view(torch.uint8))
            for own, new in both
        )

    def at(self, place: Callable[[Tensor], Tensor]) -> QuantisedRows:
        """The same rows in other memory."""
        return replace(self, values=place(self.values), scales=place(self.scales))


@dataclass(frozen=True, slots=True)
class FixedWeight:
    """The weight of a linear layer that keeps it: changes run beside the layer.

    In the few bits of GGUF the sum of a weight and a small change would be the weight again.
    """

    layer: nn.Module
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(layer: Any) -> FixedWeight:
        dtype = getattr(layer, "compute_dtype", layer.weight.dtype)
        return FixedWeight(
            layer, torch.Size((layer.out_features, layer.in_features)), dtype, layer.weight.device
        )

    def run_beside(self, add: Callable[..., Tensor] | None) -> None:
        """From now on the layer's result is `add(input, result)`; None: its own."""
        if (handle := self.layer.__dict__.pop("_beside", None)) is not None:
            handle.remove()
        if add is not None:
            handle = self.layer.register_forward_hook(lambda _, args, result: add(*args, result))
            self.layer.__dict__["_beside"] = handle


def fixed_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers of a GGUF model that keep their weights; also those few that are not in few bits."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def original_weights(model: nn.Module) -> dict[str, Any]:
    """All weights by name, `Tensor`, `QuantisedRows` or `FixedWeight`.

    Those of merged layers are rows of the fused ones.
    """
    found: dict[str, Any] = {}
    for name, weight in _own_weights(model):
        layer = name.split(".")[-2:][0]
        parts = FUSED.get(layer, (layer,))
        for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
            found[name.replace(f".{layer}.", f".{part}.")] = rows
    if getattr(model, "is_quantized", False):
        found |= {f"{name}.weight": FixedWeight.of(layer) for name, layer in fixed_layers(model).items()}
    modulation = getattr(model, "modulation", None)
    for idx in range(len(modulation.layers) // 2 if isinstance(modulation, Modulation) else 0):
        for offset, part in enumerate(("img_mod", "txt_mod")):
            for kind in ("weight", "bias"):
                fused = f"modulation.layers.{2 * idx + offset}.{kind}"
                found[f"transformer_blocks.{idx}.{part}.1.{kind}"] = found.pop(fused)
    return found


def _own_weights(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.data
    for name, layer in model.named_modules():
        if isinstance(layer, QuantisedLinear):
            scales = layer.scales.view(-1)
            rows = QuantisedRows(layer.weight, scales, layer.dtype, in_e4m3, layer.file_scales)
            yield f"{name}.weight", rows
        elif isinstance(layer, Int8Layers):
            for idx, (values, scales, bias) in enumerate(
                zip(layer.weight_NFC, layer.scale_NFG, layer.bias_NF, strict=True)
            ):
                yield f"modulation.layers.{idx}.weight", QuantisedRows(values, scales, bias.dtype, in_int8)
                yield f"modulation.layers.{idx}.bias", bias
