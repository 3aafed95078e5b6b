"""The modulation of Qwen-Image's blocks, computed for all of them at the start of a forward.

With fp8 its weights are in int8. They are read for a single row, so their bytes are what they cost. With a
scale for each 64 inputs, their error is a fifth of fp8's; an error of a scale or a gate reaches every token.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.parallel.sequence_parallel import sharing_ranks

GROUP = 64
"""Inputs with one scale."""


def fuse_modulation(transformer: Any, *, int8_on: torch.device | None = None) -> None:
    """Compute the modulation of all blocks at the start of a forward, not in each block.

    int8_on: keeps its weights in int8 on this device.
    """
    blocks = transformer.transformer_blocks
    assert not transformer.zero_cond_t
    transformer.modulation = Modulation(
        [part[1] for block in blocks for part in (block.img_mod, block.txt_mod)]
    )
    if int8_on is not None:
        transformer.modulation.quantise(int8_on)
    for idx, block in enumerate(blocks):
        del block.img_mod, block.txt_mod
        hook = functools.partial(_hand_over, modulation=transformer.modulation, idx=idx)
        block.register_forward_pre_hook(hook, with_kwargs=True)
    transformer.time_text_embed.register_forward_hook(
        functools.partial(_modulate, modulation=transformer.modulation)
    )


class Modulation(nn.Module):
    """Shifts, scales and gates of all blocks: layers of picture and text alternate."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.in_int8: Int8Layers | None = None
        self.current = threading.local()
        """`rows`: the modulation in this thread's present forward."""

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
        for idx in range(len(layers)):
            layer: Any = layers[idx]
            self.weight_NFC[idx], self.scale_NFG[idx] = in_int8(layer.weight.to(device))
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


def in_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[F, C] -> int8 [F, C] and scales [F, G] in bf16."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=2) / 127).clamp(min=1e-20).bfloat16()
    values = (groups / scales.float()[..., None]).round().clamp(-127, 127)
    return values.flatten(1).to(torch.int8), scales
