"""The weights of models under the names of diffusers' model, also where blocks are fused or in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.models.fast.linears import Int8Layers, Modulation, QuantisedLinear, in_e4m3, in_int8
from gfgen.models.lora.accounting import FUSED


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows of a layer's weight in 8 bits, which take other values in place."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype
    """Of weights that they take."""
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
            torch.equal(own.view(torch.uint8), new.to(own.device).view_as(own).view(torch.uint8))
            for own, new in both
        )


@dataclass(frozen=True, slots=True)
class FixedWeight:
    """The weight of a linear layer that keeps it: changes run beside the layer.

    In the few bits of GGUF the sum of a weight and a small change would be the weight again.
    """

    layer: nn.Module
    shape: torch.Size
    dtype: torch.dtype
    """That the layer computes in."""
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
