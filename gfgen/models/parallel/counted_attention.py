"""Attention among the first tokens of each sample; a tensor on the device holds their number.

So one CUDA graph serves samples of all lengths that were padded to one. On NVIDIA GPUs it is cuDNN's
attention with a padding mask, called through NVIDIA's Python package. Without that package texts are not
padded (texts.py), and each length has a graph of its own.

Legend: B batch, L tokens, H heads, D head dimension.
Source: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gfgen.errors import in_one_line

logger = logging.getLogger(__name__)

MODULE = "cudnn"
"""Module of the package nvidia-cudnn-frontend."""

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_FORGONE = threading.Event()


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
            plans[call] = _plan(*tensors)
    return plans[call](*tensors, num_tokens_B)


@cache
def _works(device: torch.device) -> bool:
    """Whether NVIDIA's package is installed and works with this cuDNN and GPU."""
    try:
        with torch.cuda.device(device):
            x = torch.ones(1, 64, 1, 128, dtype=torch.bfloat16, device=device)
            found = _plan(x, x, x)(x, x, x, torch.full((1,), 32, dtype=torch.int32, device=device))
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


def _plan(query: Tensor, key: Tensor, value: Tensor) -> Attention:
    """A function for tensors of these shapes, on the current device; building it takes about 40 ms."""
    import cudnn

    handle, (batch, length, num_heads, head_dim) = handle_of(query.device), query.shape
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    q, k, v = (
        graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=cudnn.data_type.BFLOAT16)
        for x in (each.transpose(1, 2) for each in (query, key, value))
    )
    counts = graph.tensor(dim=[batch, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32)
    result, _ = graph.sdpa(
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=head_dim**-0.5,
        use_padding_mask=True,
        seq_len_q=counts,
        seq_len_kv=counts,
    )
    shape = (batch, length, num_heads, head_dim)
    row = num_heads * head_dim
    result.set_output(True).set_dim([batch, num_heads, length, head_dim])
    result.set_stride([length * row, head_dim, row, 1])
    graph.build([cudnn.heur_mode.A])
    num_bytes = max(1, graph.get_workspace_size())

    def attend(query: Tensor, key: Tensor, value: Tensor, num_tokens_B: Tensor) -> Tensor:
        attended = query.new_empty(shape)
        workspace = query.new_empty(num_bytes, dtype=torch.uint8)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
        tensors = {q: query, k: key, v: value, counts: num_tokens_B, result: attended}
        graph.execute(tensors, workspace, handle=handle)
        return attended

    return attend
