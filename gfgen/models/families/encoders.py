"""Text encoders on GPUs: a prompt's own tokens, in recorded forwards.

Reading the weights of a text encoder takes 4 ms, launching it 28, so its forwards may be recorded
(fast/recording.py). A record serves one shape: prompts are padded to one of `LENGTHS`, which depends on
nothing but the prompt, so every rank gets the same bits. The pipelines evaluate more: 512 tokens for each
prompt (Wan), and the odds of 152,000 next words for each token (Qwen-Image). Nothing waits for the device.

Legend: B batch (1), L tokens, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen2_5_VLForConditionalGeneration, UMT5EncoderModel
from transformers.activations import NewGELUActivation
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention, Qwen2_5_VLRotaryEmbedding
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from gfgen.models.fast.evaluation import Evaluator
from gfgen.models.fast.linears import joined_in_place
from gfgen.models.streaming.placing import placing_of

LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512, 640)
"""A few, since each is a record; close together, since from about 300 tokens on time grows with the length.
The last one holds Qwen-Image's longest prompt: 512 tokens after a template of 34."""
FOR_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's attention, which plans 42 ms for each new length of prompt on an H100."""


class TextEncoder:
    """The part of a text encoder that makes hidden states."""

    def __init__(self, stack: Any, *, is_causal: bool) -> None:
        self._stack = stack
        self._is_causal = is_causal

    @torch.no_grad()
    def __call__(self, ids: Sequence[int], forward: Evaluator) -> Tensor:
        """The last hidden states of these tokens: [1, L, C]."""
        length = next(each for each in LENGTHS if each >= len(ids))
        padded = torch.tensor([[*ids, *[0] * (length - len(ids))]])
        if self._stack.device.type == "cuda":
            padded = padded.pin_memory().to(self._stack.device, non_blocking=True)
        inputs = {"input_ids": padded, "attention_mask": self._mask(len(ids), length), "use_cache": False}
        with sdpa_kernel(FOR_ANY_LENGTH):
            return forward(self._stack, inputs)[:, : len(ids)]

    def rehearsals(self, forward: Evaluator) -> Sequence[Callable[[], Tensor]]:
        """Functions that evaluate each length once, so that there are records of them."""
        return [functools.partial(self, [0] * length, forward) for length in LENGTHS]

    def _mask(self, count: int, length: int) -> Any:
        """Hides the padding; where tokens see only those before them, it is hidden from the others anyway."""
        if self._is_causal:
            return {"full_attention": None, "sliding_attention": None}
        mask_BHLL = torch.zeros(1, 1, 1, length, device=self._stack.device, dtype=self._stack.dtype)
        mask_BHLL[..., count:] = torch.finfo(mask_BHLL.dtype).min
        return mask_BHLL


@torch.no_grad()
def use_fewer_kernels(stack: Any) -> None:
    """Make one kernel of each norm and activation, and one product of queries, keys and values, permanently.

    Fewer results are rounded then. Relative positions are found once for all layers.
    """
    for module in stack.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(_rms_norm, module)
        if isinstance(getattr(module, "act", None), NewGELUActivation):
            module.act = torch.nn.GELU(approximate="tanh")
        if isinstance(module, Qwen2_5_VLRotaryEmbedding):
            module.forward = functools.partial(_signed_turns, module.forward)
    relative = [module for module in stack.modules() if isinstance(module, UMT5Attention)]

    @functools.cache
    def buckets_LL(length: int) -> Tensor:
        positions = torch.arange(length, device=stack.device)
        buckets: Tensor = relative[0]._relative_position_bucket(positions[None] - positions[:, None])
        return buckets

    for layer in stack.block if relative else stack.layers:
        with placing_of(layer).final(layer):
            for module in list(layer.modules()):
                if isinstance(module, Qwen2_5_VLAttention):
                    qkv = _joined(module, module.q_proj, module.k_proj, module.v_proj)
                    module.forward = functools.partial(_attend_before, module, qkv)
                elif isinstance(module, UMT5Attention):
                    qkv = _joined(module, module.q, module.k, module.v)
                    module.forward = functools.partial(_attend_all, module, qkv, buckets_LL)


def _joined(attention: Any, *layers: torch.nn.Linear) -> torch.nn.Linear:
    whole = joined_in_place(layers)
    object.__setattr__(attention, "to_qkv", whole)  # no submodule: state dicts have the parts
    return whole


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _signed_turns(forward: Callable[..., tuple[Tensor, Tensor]], *args: Any) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, L, 1, D], with the sign of the half that a sine's product is added to."""
    cos, sin = forward(*args)
    first, second = sin.chunk(2, dim=-1)
    return cos[:, :, None], torch.cat((-first, second), dim=-1)[:, :, None]


def _attend_before(
    attention: Any,
    qkv: torch.nn.Linear,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each token to those before it; queries and keys are turned together."""
    (cos, sin), num_shared = position_embeddings, attention.num_key_value_heads
    batch, length = hidden_states.shape[:2]
    qkv_BLHD = qkv(hidden_states).view(batch, length, -1, attention.head_dim)
    qk_BLHD, v_BLHD = qkv_BLHD[:, :, :-num_shared], qkv_BLHD[:, :, -num_shared:]
    qk_BLHD = torch.addcmul(qk_BLHD * cos, qk_BLHD.roll(attention.head_dim // 2, dims=-1), sin)
    q_BLHD, k_BLHD = qk_BLHD[:, :, :-num_shared], qk_BLHD[:, :, -num_shared:]
    q, k, v = (each.transpose(1, 2) for each in (q_BLHD, k_BLHD, v_BLHD))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attention.o_proj(attended.transpose(1, 2).flatten(2)), None


def _attend_all(
    attention: Any,
    qkv: torch.nn.Linear,
    buckets_LL: Callable[[int], Tensor],
    hidden_states: Tensor,
    *,
    attention_mask: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention to all tokens, with a bias for relative positions and nothing else that scales."""
    batch, length = hidden_states.shape[:2]
    qkv_BL3HD = qkv(hidden_states).view(batch, length, 3, attention.n_heads, -1)
    bias_LLH = attention.relative_attention_bias(buckets_LL(length))
    bias_BHLL = bias_LLH.permute(2, 0, 1).contiguous() + attention_mask  # others take a slow kernel
    q, k, v = qkv_BL3HD.permute(2, 0, 3, 1, 4)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias_BHLL, scale=1.0)
    return attention.o(attended.transpose(1, 2).flatten(2)), None


def text_encoder_of(model: Any) -> TextEncoder | None:
    """None for classes that are not known here."""
    if isinstance(model, Qwen2_5_VLForConditionalGeneration):
        stack, is_causal = model.model.language_model, True
    elif isinstance(model, UMT5EncoderModel):
        stack, is_causal = model.encoder, False
    else:
        return None
    if stack.config._attn_implementation != "sdpa":
        return None
    use_fewer_kernels(stack)
    return TextEncoder(stack, is_causal=is_causal)
