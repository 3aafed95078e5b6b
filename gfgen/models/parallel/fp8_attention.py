"""Attention in fp8 (e4m3) with fixed scales, by cuDNN on NVIDIA GPUs of compute capability 9 or later.

Queries and keys are stored as they are: they have a norm, so e4m3 holds them. Values and results are stored
`VALUE_SCALE` times as large. No scale depends on the tokens of a rank, so degrees differ by rounding only,
and ranks exchange all four as one byte each. The result is an average of values, so it is saturated only
where values are.

Heads whose dimension is no multiple of 16 are padded with zeros, which cuDNN asks for.

Legend: B batch, L tokens, S keys, H heads, D head dimension.
Source: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gfgen.errors import ModelError, in_one_line
from gfgen.models.parallel.counted_attention import MODULE, by_mask, forgo, handle_of, kept

logger = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
VALUE_SCALE = 8.0
"""Values and results above 56 are saturated; those from 1/512 on are within 1/16, by 2.6% on average."""
WEIGHT_SCALE = 256.0
"""Of the weights of keys, which are at most 1."""
_SIDE = 16


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
        result = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return in_fp8(result, scale=VALUE_SCALE).contiguous()


def _padded(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % _SIDE
    return functional.pad(x.view(torch.uint8), (0, missing)).view(E4M3) if missing else x


def _plan(
    query: Tensor, key: Tensor, value: Tensor, *, head_dim: int, has_counts: bool
) -> Callable[..., Tensor]:
    """A function for tensors of these shapes, on the current device."""
    import cudnn

    handle, (batch, length, num_heads, width) = handle_of(query.device), query.shape
    number, kind = cudnn.data_type.FLOAT, cudnn.data_type.FP8_E4M3
    graph = cudnn.pygraph(
        handle=handle, io_data_type=kind, intermediate_data_type=number, compute_data_type=number
    )
    inputs = [
        graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=kind)
        for x in (each.transpose(1, 2) for each in (query, key, value))
    ]
    one = [1, 1, 1, 1]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    factors = (1.0, 1.0, 1 / VALUE_SCALE, 1 / WEIGHT_SCALE, WEIGHT_SCALE, VALUE_SCALE)
    scales = {name: graph.tensor(dim=one, stride=one, data_type=number) for name in names}
    values = torch.tensor(factors, device=query.device)[:, None].repeat(1, 4)  # 16 bytes apart
    options: dict[str, Any] = {}
    if has_counts:
        counts = graph.tensor(dim=[batch, 1, 1, 1], stride=one, data_type=cudnn.data_type.INT32)
        options = {"use_padding_mask": True, "seq_len_q": counts, "seq_len_kv": counts}
    result, _, *largest = graph.sdpa_fp8(
        *inputs, **scales, generate_stats=False, attn_scale=head_dim**-0.5, **options
    )
    row = num_heads * width
    result.set_output(True).set_dim([batch, num_heads, length, width])
    result.set_stride([length * row, width, row, 1]).set_data_type(kind)
    for each in largest:
        each.set_output(True).set_dim(one).set_stride(one).set_data_type(number)
    graph.build([cudnn.heur_mode.A])
    num_bytes = max(1, graph.get_workspace_size())
    unused = values.new_zeros((len(largest), 4))
    fixed = dict(zip((*scales.values(), *largest), (*values, *unused), strict=True))

    def attend(query: Tensor, key: Tensor, value: Tensor, num_tokens_B: Tensor | None) -> Tensor:
        make = query.new_zeros if has_counts else query.new_empty  # cuDNN leaves what is behind the counts
        attended = make((batch, length, num_heads, width))
        workspace = query.new_empty(num_bytes, dtype=torch.uint8)
        tensors = dict(zip(inputs, (query, key, value), strict=True)) | fixed | {result: attended}
        if has_counts:
            tensors[counts] = num_tokens_B
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
        graph.execute(tensors, workspace, handle=handle)
        return attended

    return attend
