"""Linear layers with a GELU behind them, and both in fp8 (e4m3) with half the memory of bf16.

Weights are quantised once, with one scale for each output channel. Those that a file has in e4m3 keep its
values and scales; loading leaves the scales at the layers as `file_scales` (components.py). Activations are
quantised with one scale for each token: by the norm before the layer (rows.py), or else in one pass over the
rows. So a token's numbers do not depend on the other tokens of a rank, and degrees differ by rounding only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.fast.rows import Fp8Rows, to_fp8
from gfgen.models.parallel.sequence_parallel import sharing_ranks
from gfgen.models.streaming.placing import placing_of
from gfgen.models.streaming.turns import CallLocal


def joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of several, concatenated."""
    first = layers[0]
    with torch.device("meta"):
        width = sum(each.out_features for each in layers)
        whole = nn.Linear(first.in_features, width, bias=first.bias is not None)
    names = [name for name, _ in whole.named_parameters()]
    parts = {name: torch.cat([getattr(each, name).data for each in layers]) for name in names}
    whole.load_state_dict(parts, assign=True)
    if any("file_scales" in each.__dict__ for each in layers):
        scales = [getattr(each, "file_scales", in_e4m3(each.weight)[1]) for each in layers]
        whole.file_scales = torch.cat([each.flatten().to(whole.weight.device) for each in scales])
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
        has_gelu = isinstance(layer, LinearGelu)
        setattr(parent, name, QuantisedGelu(layer.proj) if has_gelu else QuantisedLinear(layer))


def takes_fp8(layer: Any) -> bool:
    return isinstance(layer, (QuantisedLinear, QuantisedGelu))


class QuantisedLinear(nn.Module):
    """[.., C] -> [.., features] in bf16: x W' + b, from bf16 or from `Fp8Rows`."""

    weight: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.file_scales: Tensor | None = getattr(layer, "file_scales", None)
        values, scales = in_e4m3(layer.weight, self.file_scales)
        self.register_buffer("weight", values)
        self.register_buffer("scales", scales.view(1, -1))
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


class QuantisedGelu(nn.Module):
    """[.., C] -> `Fp8Rows` [.., features]: gelu(x W' + b), tanh approximation, for the layer behind it."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = QuantisedLinear(proj)

    def forward(self, x: Tensor | Fp8Rows) -> Fp8Rows:
        return to_fp8(self.proj(x), has_gelu=True)


def _linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each layer with its parent and its name there."""
    for name, child in module.named_children():
        if isinstance(child, (nn.Linear, LinearGelu)):
            yield module, name, child
        else:
            yield from _linears(child)


GROUP = 64
"""Inputs with one scale."""


def fuse_modulation(transformer: Any, *, int8_on: torch.device | None = None) -> None:
    """Compute the modulation of all blocks at the start of a forward, not in each block.

    int8_on: keeps its weights in int8 on this device.
    """
    blocks = transformer.transformer_blocks
    assert not transformer.zero_cond_t
    layers = [part[1] for block in blocks for part in (block.img_mod, block.txt_mod)]
    modulation = transformer.modulation = Modulation(layers)
    del layers  # so that a weight in bf16 goes when it is quantised
    for idx, block in enumerate(blocks):
        del block.img_mod, block.txt_mod  # likewise
        hook = functools.partial(_hand_over, modulation=modulation, idx=idx)
        block.register_forward_pre_hook(hook, with_kwargs=True)
    if int8_on is not None:
        modulation.quantise(int8_on)
    for layer in modulation.layers:
        placing_of(layer).bring(layer)
    transformer.time_text_embed.register_forward_hook(functools.partial(_modulate, modulation=modulation))


class Modulation(nn.Module):
    """Shifts, scales and gates of all blocks of a Qwen-Image, computed at the start of a forward.

    Layers of picture and text alternate. With fp8 the weights are in int8. They are read for a single row,
    so their bytes are what they cost. With a scale for each 64 inputs, their error is a fifth of fp8's; an
    error of a scale or a gate reaches every token.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.in_int8: Int8Layers | None = None
        self.current = CallLocal()
        """`rows`: the modulation in the present forward."""

    def quantise(self, device: torch.device) -> None:
        """Keep the weights in int8 on this device; those in bf16 are freed."""
        self.in_int8 = Int8Layers(self.layers, device)

    def forward(self, temb: Tensor) -> Tensor:
        """[1, C] -> [layers, 6 C] on every rank; each computes some of the layers."""
        activated = nn.functional.silu(temb)
        ranks = sharing_ranks()
        size, slot = (1, 0) if ranks is None else (ranks.size, ranks.slot)
        start, stop = shard_bounds(len(self.layers), size, slot)
        if self.in_int8 is not None:
            rows: Tensor = self.in_int8(activated, start, stop)
        else:
            own = [self.layers[idx](activated) for idx in range(start, stop)]
            if not own:  # a small model has fewer layers than ranks
                own = [activated.new_empty(0, 6 * activated.shape[1])]
            rows = torch.cat(own)
        if ranks is None:
            return rows
        return ranks.all_gather(rows, dim=0, sizes=shard_sizes(len(self.layers), size))


def _modulate(module: nn.Module, args: Any, temb: Tensor, *, modulation: Modulation) -> None:
    """A forward hook of the timestep's embedding; does not change its output."""
    assert temb.shape[0] == 1, "a batch has one timestep"
    modulation.current.rows = modulation(temb)


def _hand_over(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, modulation: Modulation, idx: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pre-forward hook of a block: replaces the timestep's embedding by the block's modulation."""
    return args, {**kwargs, "temb": modulation.current.rows[2 * idx : 2 * idx + 2]}


_ROWS_AT_ONCE = 4096
"""Of a weight that is quantised in fp32, which takes several times the memory of these rows."""


class Int8Layers(nn.Module):
    """Linear layers of one size in int8, for a single row.

    Legend: N layers, F features, C channels, G groups.
    """

    weight_NFC: Tensor
    scale_NFG: Tensor
    bias_NF: Tensor

    def __init__(self, layers: nn.ModuleList, device: torch.device) -> None:
        super().__init__()
        first: Any = layers[0]
        size = (len(layers), *first.weight.shape)
        new = functools.partial(torch.empty, device=device)
        self.register_buffer("weight_NFC", new(size, dtype=torch.int8))
        self.register_buffer("scale_NFG", new((*size[:2], size[2] // GROUP), dtype=torch.bfloat16))
        self.register_buffer("bias_NF", new(size[:2], dtype=first.bias.dtype))
        del first
        for idx in range(len(layers)):
            layer: Any = layers[idx]
            placing_of(layer).bring(layer)
            for start in range(0, size[1], _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                self.weight_NFC[idx, rows], self.scale_NFG[idx, rows] = in_int8(layer.weight[rows].to(device))
            self.bias_NF[idx] = layer.bias
            layers[idx] = nn.Identity()  # frees its weights

    def forward(self, x: Tensor, start: int, stop: int) -> Tensor:
        """[1, C] -> [stop - start, F]: the results of some of the layers."""
        weight_NFC, scale_NFG, bias_NF = (
            each[start:stop] for each in (self.weight_NFC, self.scale_NFG, self.bias_NF)
        )
        if x.is_cpu:
            weight = weight_NFC.float() * scale_NFG.float().repeat_interleave(GROUP, dim=2)
            return (weight @ x[0].float() + bias_NF.float()).type_as(x)
        result = x.new_empty(bias_NF.shape)
        if result.numel():
            from gfgen.models.fast import row_kernels

            row_kernels.int8_layers(x[0], weight_NFC, scale_NFG, bias_NF, result)
        return result


def in_e4m3(weight: Tensor, file_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[F, C] -> e4m3 [F, C] and scales [F, 1] in fp32.

    file_scales: [F], if the weight is a file's values in e4m3 times these, rounded to bf16. The result has
    the file's values: rounding moved them by 1/512 at most, and half a step of e4m3 is at least 1/32.
    """
    if file_scales is None:
        rows = to_fp8(weight)
        return rows.values, rows.scales
    scales = file_scales.to(weight.device, copy=True).view(-1, 1)
    return (weight.float() / scales.where(scales != 0, 1)).to(torch.float8_e4m3fn), scales


def in_int8(weight: Tensor, file_scales: None = None) -> tuple[Tensor, Tensor]:
    """[F, C] -> int8 [F, C] and scales [F, G] in bf16. No file has these."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=2) / 127).clamp(min=1e-20).bfloat16()
    values = (groups / scales.float()[..., None]).round().clamp(-127, 127)
    return values.flatten(1).to(torch.int8), scales
