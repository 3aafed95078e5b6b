"""Linear layers with a GELU behind them, and both in fp8 (e4m3) with half the memory of bf16.

Weights are quantised once, with one scale for each output channel. Activations are quantised with one scale
for each token: by the norm before the layer (rows.py), or else in one pass over the rows. So a token's
numbers do not depend on the other tokens of a rank, and degrees differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.models.fast.rows import Fp8Rows, to_fp8


def joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of several, concatenated."""
    first = layers[0]
    with torch.device("meta"):
        width = sum(each.out_features for each in layers)
        whole = nn.Linear(first.in_features, width, bias=first.bias is not None)
    names = [name for name, _ in whole.named_parameters()]
    parts = {name: torch.cat([getattr(each, name).data for each in layers]) for name in names}
    whole.load_state_dict(parts, assign=True)
    return whole.requires_grad_(False)


def joined_in_place(layers: Sequence[nn.Linear]) -> nn.Linear:
    """As `joined`; the weights of the layers become parts of its own, so both may be used."""
    whole, sizes = joined(layers), [each.out_features for each in layers]
    for name, values in whole.named_parameters():
        for layer, own in zip(layers, torch.split(values.data, sizes), strict=True):
            getattr(layer, name).data = own
    return whole


class LinearGelu(nn.Module):
    """[..., C] -> [..., features]: gelu(x W' + b), tanh approximation."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor) -> Tensor:
        return linear_gelu(x, self.proj.weight, self.proj.bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As `LinearGelu`."""
    if not x.is_cuda or not x.numel():  # on a CPU the epilogue is the exact GELU
        return nn.functional.gelu(nn.functional.linear(x, weight, bias), approximate="tanh")
    flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return flat.view(*x.shape[:-1], weight.shape[0])


@torch.no_grad()
def quantise(blocks: nn.Module) -> None:
    """Replace all linear layers inside; their weights in bf16 are freed."""
    for parent, name, layer in list(_linears(blocks)):
        setattr(parent, name, Fp8Gelu(layer.proj) if isinstance(layer, LinearGelu) else Fp8Linear(layer))


def takes_fp8(layer: Any) -> bool:
    """Whether a layer takes `Fp8Rows` as they are."""
    return isinstance(layer, (Fp8Linear, Fp8Gelu))


class Fp8Linear(nn.Module):
    """[.., C] -> [.., features] in bf16: x W' + b, from bf16 or from `Fp8Rows`."""

    weight: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        rows = to_fp8(layer.weight)
        self.register_buffer("weight", rows.values)
        self.register_buffer("scales", rows.scales.view(1, -1))
        self.bias = layer.bias
        self.dtype = layer.weight.dtype
        self._refused: set[int] = set()
        """Numbers of rows for which cuBLAS has no product with a scale for each row. Seen on H100s with
        PyTorch 2.11 for few rows and many inputs, as in pytorch/ao issue 4582."""

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        rows = x if isinstance(x, Fp8Rows) else to_fp8(x)
        shape, features = rows.values.shape, self.weight.shape[0]
        if not rows.values.numel():
            return self.scales.new_empty((*shape[:-1], features), dtype=self.dtype)
        return self._product(rows.values.view(-1, shape[-1]), rows.scales).view(*shape[:-1], features)

    def _product(self, values: Tensor, scales: Tensor) -> Tensor:
        """[N, C] and [N, 1] -> [N, features]; where cuBLAS has no scales by row, they come afterwards."""
        multiply = partial(torch._scaled_mm, values, self.weight.t(), use_fast_accum=True)
        if len(values) not in self._refused:
            try:
                return multiply(scales, self.scales, bias=self.bias, out_dtype=self.dtype)
            except RuntimeError as error:
                if "CUBLAS_STATUS_NOT_SUPPORTED" not in str(error):
                    raise
                self._refused.add(len(values))
        one = self.scales.new_ones(())
        result = multiply(one, one, out_dtype=torch.float32) * scales * self.scales
        return (result if self.bias is None else result + self.bias).to(self.dtype)


class Fp8Gelu(nn.Module):
    """[.., C] -> `Fp8Rows` [.., features]: gelu(x W' + b), tanh approximation, for the layer behind it."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = Fp8Linear(proj)

    def forward(self, x: Tensor | Fp8Rows) -> Fp8Rows:
        return to_fp8(self.proj(x), has_gelu=True)


def _linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each layer with its parent and its name there."""
    for name, child in module.named_children():
        if isinstance(child, (nn.Linear, LinearGelu)):
            yield module, name, child
        else:
            yield from _linears(child)
