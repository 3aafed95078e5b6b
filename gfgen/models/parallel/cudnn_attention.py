"""Attention by cuDNN on NVIDIA GPUs, by NVIDIA's Python package: with padding left out, and in fp8.

Among the first tokens of each sample, whose number a tensor on the device holds, one CUDA graph serves
samples of all lengths that were padded to one. Without the package texts are not padded (texts.py), and each
length has a graph of its own.

In fp8 (e4m3, compute capability 9 or later) scales are fixed. Queries and keys are stored as they are: they
have a norm, so e4m3 holds them. Values and results are stored `VALUE_SCALE` times as large. No scale depends
on the tokens of a rank, so degrees differ by rounding only, and ranks exchange all four as one byte each. The
result is an average of values, so it is saturated only where values are. Heads whose dimension is no multiple
of 16 are padded with zeros, which cuDNN asks for.

Legend: B batch, L tokens, S keys, H heads, D head dimension.
Source: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from gfgen.errors import ModelError, in_one_line

logger = logging.getLogger(__name__)

MODULE = "cudnn"
"""Module of the package nvidia-cudnn-frontend."""

_FORGONE = threading.Event()

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
VALUE_SCALE = 8.0
"""Values and results above 56 are saturated; those from 1/512 on are within 1/16, by 2.6% on average."""
WEIGHT_SCALE = 256.0
"""Of the weights of keys, which are at most 1."""
_SIDE = 16


def is_fast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it works here, about as fast as attention without a mask (measured on H100 and H200).

    Ranks that share a step all pad texts, or none does: each rank reports whether it could, and calls
    `forgo` if another one cannot.
    """
    is_for_it = device.type == "cuda" and dtype == torch.bfloat16 and not _FORGONE.is_set()
    return is_for_it and _works(device)


def load(device: torch.device) -> None:
    """Load cuDNN's attention, with padding and without; compiling it takes 2 s, once a machine.

    It has two kernels of each, for lengths that are multiples of its tiles and for others.
    """
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # short of memory: it may still work
        is_padding = is_fast(device, torch.bfloat16)
        for length in (64, 1024):
            x_BLHD = torch.ones(1, length, 2, 128, dtype=torch.bfloat16, device=device)
            x_BHLD = x_BLHD.transpose(1, 2)
            scaled_dot_product_attention(x_BHLD, x_BHLD, x_BHLD)
            if is_padding:
                counts = torch.ones(1, dtype=torch.int32, device=device)
                counted_attention(x_BLHD, x_BLHD, x_BLHD, counts)


def forgo() -> None:
    """Disable it in this process."""
    _FORGONE.set()


def counted_attention(query: Tensor, key: Tensor, value: Tensor, num_tokens_B: Tensor) -> Tensor:
    """Attention among the first tokens of each sample; results of the other tokens are zero.

    Shapes: query, key, value [B, L, H, D], num_tokens_B int32 [B] -> [B, L, H, D], contiguous.
    """
    tensors = (query, key, value)
    if not is_fast(query.device, query.dtype):
        return by_mask(*tensors, num_tokens_B)
    plans = kept().plans
    call = (query.device, query.shape, *(x.stride() for x in tensors))
    if call not in plans:
        with torch.cuda.device(query.device):
            plans[call] = _plan(*tensors, head_dim=query.shape[3], has_counts=True)
    return plans[call](*tensors, num_tokens_B)


@cache
def _works(device: torch.device) -> bool:
    """Whether NVIDIA's package is installed and works with this cuDNN and GPU."""
    try:
        with torch.cuda.device(device):
            x = torch.ones(1, 64, 1, 128, dtype=torch.bfloat16, device=device)
            counts = torch.full((1,), 32, dtype=torch.int32, device=device)
            found = _plan(x, x, x, head_dim=128, has_counts=True)(x, x, x, counts)
            x[:, 32:] = 0  # attention among ones gives ones
            if not torch.equal(found, x):
                raise ValueError("its result is wrong")
    except torch.OutOfMemoryError:
        raise  # it may work all the same
    except Exception as error:
        if getattr(error, "name", None) != MODULE:
            logger.warning("cuDNN's attention with padding does not work: %s", in_one_line(error))
        return False
    return True


def by_mask(query: Tensor, key: Tensor, value: Tensor, num_tokens_B: Tensor) -> Tensor:
    positions_L = torch.arange(query.shape[1], device=query.device)
    is_there_BL = positions_L < num_tokens_B[:, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    result = scaled_dot_product_attention(q, k, v, attn_mask=is_there_BL[:, None, None])
    return result.transpose(1, 2).masked_fill(~is_there_BL[:, :, None, None], 0)


class Kept:
    """cuDNN's handles, and plans by shapes and strides, of one thread.

    Plans are kept, since graphs launch their kernels. Texts have 16 lengths for each size of picture.
    """

    def __init__(self) -> None:
        self.handles: dict[torch.device, Any] = {}
        self.plans: dict[object, Callable[..., Tensor]] = {}


# Threads that run in a copy of another one's context, and never at the same time, share what it keeps.
_KEPT: ContextVar[Kept] = ContextVar("kept")


def kept() -> Kept:
    """What the calling thread keeps, from now on."""
    if _KEPT.get(None) is None:
        _KEPT.set(Kept())
    return _KEPT.get()


def handle_of(device: torch.device) -> Any:
    import cudnn

    handles = kept().handles
    if device not in handles:
        handles[device] = cudnn.create_handle()
    return handles[device]


def in_fp8(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """x times the scale, saturated."""
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3)


def from_fp8(x: Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> Tensor:
    """What `in_fp8` took, up to rounding; in bf16 nothing is rounded once more."""
    return x.to(dtype) * (1 / scale)


def like_query(result: Tensor, query: Tensor) -> Tensor:
    """A result in the query's dtype: values in fp8 have a scale."""
    if query.dtype == E4M3 != result.dtype:
        return in_fp8(result, scale=VALUE_SCALE)
    return result.type_as(query)


def opened(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in fp8, for other kernels."""
    return query.to(dtype), key.to(dtype), from_fp8(value, dtype, scale=VALUE_SCALE)


def fp8_attention(query: Tensor, key: Tensor, value: Tensor, num_tokens_B: Tensor | None = None) -> Tensor:
    """Attention to all keys, or among the first tokens of each sample.

    Shapes: query [B, L, H, D], key, value [B, S, H, D] in fp8, num_tokens_B int32 [B] -> [B, L, H, D] in
            fp8, contiguous, times `VALUE_SCALE`.
    """
    if not query.is_cuda:
        return _in_steps(query, key, value, num_tokens_B)
    head_dim = query.shape[-1]
    tensors = [_padded(x) for x in (query, key, value)]
    plans = kept().plans
    call = (query.device, num_tokens_B is None, head_dim, *((x.shape, x.stride()) for x in tensors))
    if call not in plans:
        with torch.cuda.device(query.device):
            plans[call] = _plan(*tensors, head_dim=head_dim, has_counts=num_tokens_B is not None)
    result = plans[call](*tensors, num_tokens_B)
    return result if result.shape[-1] == head_dim else result[..., :head_dim].contiguous()


def check_fp8_attention(device: torch.device) -> None:
    """Try it where it will be used. If only padding is not left out, texts are not padded in this process.

    Raises: ModelError where it does not work.
    """
    if device.type != "cuda":
        return
    if reason := _why_not(device):
        raise ModelError(f"--attention fp8: cuDNN's attention in fp8 does not work here: {reason}")
    if reason := _why_not(device, num_tokens=700):
        logger.warning("cuDNN's attention in fp8 does not leave padding out (%s): no text is padded", reason)
        forgo()


@cache
def _why_not(device: torch.device, *, num_tokens: int | None = None) -> str:
    if find_spec(MODULE) is None:
        return "nvidia-cudnn-frontend is not installed"
    try:
        return "" if _is_right(device, num_tokens) else "its result is wrong"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return in_one_line(error)


def _is_right(device: torch.device, num_tokens: int | None) -> bool:
    """Whether attention among ones gives ones, and no sevens of padding behind the tokens."""
    x = torch.ones(1, 1024, 1, 128, device=device)
    query = in_fp8(x)
    counts = None
    if num_tokens is not None:
        x[:, num_tokens:] = 7
        counts = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
    found = fp8_attention(query, query, in_fp8(x, scale=VALUE_SCALE), counts)
    return torch.equal(from_fp8(found, torch.float32, scale=VALUE_SCALE), x.masked_fill(x == 7, 0))


def _in_steps(query: Tensor, key: Tensor, value: Tensor, num_tokens_B: Tensor | None) -> Tensor:
    q, k, v = opened(query, key, value, torch.float32)
    if num_tokens_B is not None:
        result = by_mask(q, k, v, num_tokens_B)
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        result = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return in_fp8(result, scale=VALUE_SCALE).contiguous()


def _padded(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % _SIDE
    return functional.pad(x.view(torch.uint8), (0, missing)).view(E4M3) if missing else x


def _plan(
    query: Tensor, key: Tensor, value: Tensor, *, head_dim: int, has_counts: bool
) -> Callable[..., Tensor]:
    """A function for tensors of these shapes, on the current device; building it takes about 40 ms."""
    import cudnn

    handle, (batch, length, num_heads, width) = handle_of(query.device), query.shape
    is_fp8, number, one = query.dtype == E4M3, cudnn.data_type.FLOAT, [1, 1, 1, 1]
    kind = cudnn.data_type.FP8_E4M3 if is_fp8 else cudnn.data_type.BFLOAT16
    graph = cudnn.pygraph(
        handle=handle, io_data_type=kind, intermediate_data_type=number, compute_data_type=number
    )
    inputs = [
        graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)
        for x in (each.transpose(1, 2) for each in (query, key, value))
    ]
    options: dict[str, Any] = {"generate_stats": False, "attn_scale": head_dim**-0.5}
    if has_counts:
        counts = graph.tensor(dim=[batch, 1, 1, 1], stride=one, data_type=cudnn.data_type.INT32)
        options |= {"use_padding_mask": True, "seq_len_q": counts, "seq_len_kv": counts}
    fixed: dict[Any, Tensor] = {}
    if is_fp8:
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        factors = (1.0, 1.0, 1 / VALUE_SCALE, 1 / WEIGHT_SCALE, WEIGHT_SCALE, VALUE_SCALE)
        scales = {name: graph.tensor(dim=one, stride=one, data_type=number) for name in names}
        values = torch.tensor(factors, device=query.device)[:, None].repeat(1, 4)  # 16 bytes apart
        result, _, *largest = graph.sdpa_fp8(*inputs, **scales, **options)
        for each in largest:
            each.set_output(True).set_dim(one).set_stride(one).set_data_type(number)
        unused = values.new_zeros((len(largest), 4))
        fixed = dict(zip((*scales.values(), *largest), (*values, *unused), strict=True))
    else:
        result, _ = graph.sdpa(**dict(zip("qkv", inputs, strict=True)), **options)
    row = num_heads * width
    result.set_output(True).set_dim([batch, num_heads, length, width])
    result.set_stride([length * row, width, row, 1]).set_data_type(kind)
    graph.build([cudnn.heur_mode.A])
    num_bytes = max(1, graph.get_workspace_size())

    def attend(query: Tensor, key: Tensor, value: Tensor, num_tokens_B: Tensor | None) -> Tensor:
        # In fp8 cuDNN leaves what is behind the counts.
        make = query.new_zeros if is_fp8 and has_counts else query.new_empty
        attended = make((batch, length, num_heads, width))
        workspace = query.new_empty(num_bytes, dtype=torch.uint8)
        tensors = dict(zip(inputs, (query, key, value), strict=True)) | fixed | {result: attended}
        if has_counts:
            tensors[counts] = num_tokens_B
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
        graph.execute(tensors, workspace, handle=handle)
        return attended

    return attend
