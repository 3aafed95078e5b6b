"""Parts of diffusers' transformers in fewer and larger operations: equal up to rounding, for bf16 on a GPU.

`fuse` changes a transformer in place, after `install` has put its hooks there:

    projections   query, key and value of an attention in one product
    activations   the GELU of a feed-forward in the epilogue of its product
    rotation      Qwen-Image's, in real numbers, which compilers fuse; they leave complex ones alone
    modulation    Qwen-Image's, of all blocks at once, each rank its part of the blocks: a third of the
                  transformer's weights serve nothing else, and are read once and not on every rank

The weights stay as they are, and where they are (no copies are left).

Legend: B batch, L tokens of this rank, H heads, D head dimension, C channels.
Source: diffusers 0.42 transformer_wan.py, transformer_qwenimage.py, attention.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn

from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.sequence_parallel import attend, sharing_ranks


@torch.no_grad()
def fuse(transformer: nn.Module) -> None:
    """Fuse what is known of this class; once for each instance, on the device where it stays."""
    for module in list(transformer.modules()):
        if isinstance(module, WanAttention):
            _fuse_wan_attention(module)
    fuse_activations(transformer)
    if isinstance(transformer, QwenImageTransformer2DModel):
        fuse_joint_attentions(transformer)
        fuse_modulation(transformer)


# Projections ------------------------------------------------------------------------------------


def _fuse_wan_attention(attention: WanAttention) -> None:
    attention.fuse_projections()
    for name in ("to_k", "to_v") if attention.is_cross_attention else ("to_q", "to_k", "to_v"):
        delattr(attention, name)


def _concatenated(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of several, one behind the other."""
    first = linears[0]
    with torch.device("meta"):
        fused = nn.Linear(
            first.in_features, sum(each.out_features for each in linears), bias=first.bias is not None
        )
    parts = {
        name: torch.cat([getattr(each, name).data for each in linears])
        for name, _ in fused.named_parameters()
    }
    fused.load_state_dict(parts, assign=True)
    return fused.requires_grad_(False)


# Activations ------------------------------------------------------------------------------------


def fuse_activations(transformer: nn.Module) -> None:
    """Every `Linear` with a tanh GELU behind it becomes one operation."""
    for module in list(transformer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GELU) and child.approximate == "tanh" and child.proj.bias is not None:
                setattr(module, name, LinearGelu(child.proj))


class LinearGelu(nn.Module):
    """[..., C] -> [..., features]: gelu(x W' + b), tanh approximation."""

    def __init__(self, proj: nn.Linear) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = linear_gelu(x, self.proj.weight, self.proj.bias)
        return result


@torch.library.custom_op("gfgen::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[..., C], [features, C], [features] -> [..., features]. Opaque, since compilers take it apart again."""
    if not x.is_cuda:  # where that epilogue is the exact GELU
        return nn.functional.gelu(nn.functional.linear(x, weight, bias), approximate="tanh")
    flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return flat.view(*x.shape[:-1], weight.shape[0])


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


# Qwen-Image: joint attention --------------------------------------------------------------------


def fuse_joint_attentions(transformer: QwenImageTransformer2DModel) -> None:
    """Projections in one product for each stream, rotation in real numbers."""
    for block in transformer.transformer_blocks:
        attention = block.attn
        attention.to_qkv = _concatenated([attention.to_q, attention.to_k, attention.to_v])
        attention.to_added_qkv = _concatenated(
            [attention.add_q_proj, attention.add_k_proj, attention.add_v_proj]
        )
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            delattr(attention, name)
        attention.set_processor(JointAttention(attention.processor))
    transformer.pos_embed.register_forward_hook(_as_real)


def _as_real(module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward hook, behind the one that cuts: complex [L, D/2] -> [L, D/2, 2]."""
    return tuple(torch.view_as_real(frequencies) for frequencies in output)


class JointAttention:
    """Processor of an attention over text and picture, with fused projections.

    Shapes: hidden_states [B, L picture, C], encoder_hidden_states [B, L text, C],
            image_rotary_emb (picture, text) [L, D/2, 2] -> picture, text as given.
    """

    def __init__(self, replaced: Any) -> None:
        self._attention_backend = replaced._attention_backend
        self._parallel_config = replaced._parallel_config

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert encoder_hidden_states_mask is None, "one prompt per task is never padded"
        assert attention_mask is None
        assert image_rotary_emb is not None
        picture_turns, text_turns = image_rotary_emb
        text = _projected(
            attn.to_added_qkv(encoder_hidden_states),
            attn.heads,
            (attn.norm_added_q, attn.norm_added_k),
            text_turns,
        )
        picture = _projected(
            attn.to_qkv(hidden_states), attn.heads, (attn.norm_q, attn.norm_k), picture_turns
        )
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(text, picture, strict=True))
        joint = attend(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        ).flatten(2, 3)
        text_length = encoder_hidden_states.shape[1]
        to_out, _dropout = attn.to_out
        return to_out(joint[:, text_length:]), attn.to_add_out(joint[:, :text_length])


def _projected(
    fused: Tensor, num_heads: int, norms: tuple[nn.Module, nn.Module], turns: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, L, 3 H D] -> query, key, value [B, L, H, D]; query and key normalised and turned."""
    head_dim = fused.shape[-1] // (3 * num_heads)
    query, key, value = fused.reshape(*fused.shape[:-1], 3, num_heads, head_dim).unbind(2)
    query, key = (_turned(norm(x), turns) for norm, x in zip(norms, (query, key), strict=True))
    return query, key, value


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs of channels: [B, L, H, D] by cosines and sines [L, D/2, 2]."""
    even, odd = x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
    cos, sin = turns[:, None].unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(3).type_as(x)


# Qwen-Image: modulation -------------------------------------------------------------------------


def fuse_modulation(transformer: QwenImageTransformer2DModel) -> None:
    """The modulation of all blocks at the start of a forward, in place of each block's own."""
    transformer.modulation = Modulation(
        [layers[1] for block in transformer.transformer_blocks for layers in (block.img_mod, block.txt_mod)]
    )
    for idx, block in enumerate(transformer.transformer_blocks):
        block.img_mod, block.txt_mod = _Part(0), _Part(1)
        hook = functools.partial(_hand_over, modulation=transformer.modulation, idx=idx)
        block.register_forward_pre_hook(hook, with_kwargs=True)
    transformer.time_text_embed.register_forward_hook(
        functools.partial(_modulate, modulation=transformer.modulation)
    )


class Modulation(nn.Module):
    """Scales, shifts and gates of all blocks: those of picture and text take turns among the layers."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.current = threading.local()
        """`rows`: of the forward that this thread is in."""

    def forward(self, temb: Tensor) -> Tensor:
        """[1, C] -> [layers, 6 C], whole on each rank; each computes its part of the layers."""
        activated = nn.functional.silu(temb)
        ranks = sharing_ranks()
        size, slot = (1, 0) if ranks is None else (ranks.size, ranks.slot)
        start, stop = shard_bounds(len(self.layers), size, slot)
        rows = torch.cat([self.layers[idx](activated) for idx in range(start, stop)])
        if ranks is None:
            return rows
        return ranks.all_gather(rows, dim=0, sizes=shard_sizes(len(self.layers), size))


def _modulate(module: nn.Module, args: Any, temb: Tensor, *, modulation: Modulation) -> None:
    """A forward hook of the timestep's embedding, whose output goes on as it is."""
    assert temb.shape[0] == 1, "one prompt per task"
    modulation.current.rows = modulation(temb)


def _hand_over(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, modulation: Modulation, idx: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A pre-forward hook of a block: its modulation in place of the timestep's embedding."""
    return args, {**kwargs, "temb": modulation.current.rows[2 * idx : 2 * idx + 2]}


class _Part(nn.Module):
    """[2, 6 C] -> [1, 6 C]: the picture's modulation, or the text's."""

    def __init__(self, idx: int) -> None:
        super().__init__()
        self.idx = idx

    def forward(self, rows: Tensor) -> Tensor:
        return rows[self.idx : self.idx + 1]
