"""Text encoders on GPUs: a prompt's own tokens, in recorded forwards.

Reading the weights of a text encoder takes 4 ms, launching it 28. So its forwards are evaluated like those of
transformers, through records if there are any (fast/recording.py). A record serves one shape: prompts are
padded to one of `LENGTHS`, which depends on nothing but the prompt, so every rank gets the same bits.

The pipelines evaluate more: 512 tokens for each prompt (Wan), and the odds of 152,000 next words for each
token (Qwen-Image). Neither changes embeddings, except by rounding. Nothing here waits for the device.

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

from gfgen.models.fast.evaluation import Evaluator

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

    def rehearse(self, forward: Evaluator) -> None:
        """Evaluate all lengths, so that there are records of them."""
        for length in LENGTHS:
            self([0] * length, forward)

    def _mask(self, count: int, length: int) -> Any:
        """Hides the padding; where tokens see only those before them, it is hidden from the others anyway."""
        if self._is_causal:
            return {"full_attention": None, "sliding_attention": None}
        mask_BHLL = torch.zeros(1, 1, 1, length, device=self._stack.device, dtype=self._stack.dtype)
        mask_BHLL[..., count:] = torch.finfo(mask_BHLL.dtype).min
        return mask_BHLL


def use_fewer_kernels(stack: Any) -> None:
    """Make one kernel of each norm and activation, permanently; find relative positions once for all layers.

    Nothing is rounded inside a norm or activation then, so results are nearer to those in fp32.
    """
    modules = list(stack.modules())
    for module in modules:
        if hasattr(module, "variance_epsilon"):
            module.forward = functools.partial(_rms_norm, module)
        if isinstance(getattr(module, "act", None), NewGELUActivation):
            module.act = torch.nn.GELU(approximate="tanh")
    relative = [module for module in modules if hasattr(module, "relative_attention_bias")]

    @functools.cache
    def buckets_LL(length: int) -> Tensor:
        positions = torch.arange(length, device=stack.device)
        buckets: Tensor = relative[0]._relative_position_bucket(positions[None] - positions[:, None])
        return buckets

    for module in relative:
        module.compute_bias = functools.partial(_position_bias, module.relative_attention_bias, buckets_LL)


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _position_bias(
    table: Any, buckets_LL: Callable[[int], Tensor], length: int, *_: Any, **__: Any
) -> Tensor:
    """[1, heads, L, L], contiguous: otherwise attention takes a slow kernel."""
    bias_LLH: Tensor = table(buckets_LL(length))
    return bias_LLH.permute(2, 0, 1).contiguous()[None]


def text_encoder_on(device: torch.device, model: Any) -> TextEncoder | None:
    """None where the pipeline's own forward is used: on CPUs, whose results equal the pipeline's bitwise, for
    weights that accelerate's hooks bring to the device, and for other classes of models."""
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return None if device.type != "cuda" or is_offloaded else text_encoder_of(model)


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
