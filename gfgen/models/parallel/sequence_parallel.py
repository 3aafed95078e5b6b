"""Sequence parallelism over unmodified diffusers transformers, without a process group.

`hooks.install` prepares a transformer once. Inside `with active(parallel)` its hooks cut tokens for this
rank's slot, by global shapes alone (`layout.shard_bounds`); shards may be uneven, and nothing is padded.
Attentions that are to be shared go through one operator here (shared_attention.py).

Legend: B batch, L tokens of this rank, H heads, D head dimension.
Source: diffusers 0.42 hooks/context_parallel.py and ModelMixin.enable_parallelism.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from gfgen.errors import ModelError
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import Sizes
from gfgen.layout import ALONE, Degrees, shard_bounds
from gfgen.models.parallel.cudnn_attention import E4M3, counted_attention, fp8_attention
from gfgen.models.parallel.parallel import Parallel, held
from gfgen.models.parallel.plans import ALL, KEYS, TEXT
from gfgen.models.parallel.shared_attention import Attend, attention_to_shards, shared_attention


@dataclass(slots=True)
class Sharing:
    """The ranks that share the forwards of a `with active(...)`, and what the current forward has cut."""

    parallel: Parallel
    slot_1: torch.Tensor | None = None
    """For recorded forwards: holds this rank's slot during a replay. Other forwards use `parallel`."""
    stream_lengths: dict[str, int] = field(default_factory=dict)
    """Whole length of each stream; each forward writes them before its first attention."""
    _positions: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def ranks(self) -> Collectives:
        return self.parallel.sequence

    def positions_L(self, length: int) -> torch.Tensor:
        """Positions of this rank's tokens among `length`, computed on the device from the slot there.

        As `shard_bounds`, for all slots with equally long shards.
        """
        assert self.slot_1 is not None
        if length not in self._positions:
            base, num_longer = divmod(length, self.ranks.size)
            start, stop = shard_bounds(length, self.ranks.size, self.ranks.slot)
            first_1 = self.slot_1 * base + self.slot_1.clamp(max=num_longer)
            self._positions[length] = torch.arange(stop - start, device=self.slot_1.device) + first_1
        return self._positions[length]


# Per context and so per thread: ranks may be threads around one model. It is not an argument
# because it must pass through forwards that are not ours.
_SHARING: ContextVar[Sharing | None] = ContextVar("sharing", default=None)


def active(parallel: Parallel | None, *, slot_1: torch.Tensor | None = None) -> AbstractContextManager[None]:
    """Inside, the ranks of one branch share the forwards of transformers with hooks.

    All of these ranks make the same forwards. Each gives the whole inputs and gets the whole outputs, with
    the same bits. If the branch has one rank, or without `parallel`, nothing is active.
    slot_1: an int64 tensor that holds this rank's slot among those that share tokens, for forwards that are
    recorded in one slot and replayed in another one.
    """
    if parallel is None or parallel.sequence.size == 1:
        return held(_SHARING, None)
    return held(_SHARING, Sharing(parallel, slot_1))


def sharing_ranks() -> Collectives | None:
    """The ranks that share this thread's forward; None if the rank is alone."""
    sharing = _SHARING.get()
    return None if sharing is None else sharing.ranks


def present_sharing() -> Sharing | None:
    """The `Sharing` of the `with active(...)` around the caller; None if the rank is alone."""
    return _SHARING.get()


def present_degrees() -> Degrees:
    """Of the layout that shares the caller's forward; ones for a rank alone."""
    sharing = _SHARING.get()
    return ALONE if sharing is None else sharing.parallel.degrees


def own_length(stream: str, length: int) -> int:
    """How many of the first `length` tokens of a stream are this rank's; all if it is alone."""
    sharing = _SHARING.get()
    if sharing is None:
        return length
    return _shares(sharing.stream_lengths[stream], sharing.ranks.size, of_first=length)[sharing.ranks.slot]


def _shares(length: int, num_shards: int, *, of_first: int) -> Sizes:
    """By shard of a stream of this length, how many of its first tokens are in it."""
    bounds = [shard_bounds(length, num_shards, idx) for idx in range(num_shards)]
    return tuple(max(0, min(stop, of_first) - start) for start, stop in bounds)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    backend: str | None = None,
    parallel_config: str | None = None,
    scale: float | None = None,
    text_length: int | None = None,
    num_tokens_B: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """In place of diffusers' `dispatch_attention_fn`: the same function, shared where marked.

    parallel_config: the mark, which streams the attention is over (`plans.Plan.attentions`).
    text_length: length of the whole text without padding, if the cut text has padding.
    num_tokens_B: number of tokens of each sample, on all ranks together; padding follows them.
    Shapes: query, key, value [B, L, H, D], attn_mask [B, 1, 1, L] or None, num_tokens_B int32 [B] or None
            -> [B, L, H, D].
    """
    # Compiled code must not depend on the ranks: its operator decides when it runs, and one compiled
    # block serves every degree at which its shard has the same shape.
    is_shared = torch.compiler.is_compiling() or _SHARING.get() is not None
    if parallel_config is None or not is_shared:
        if num_tokens_B is not None or query.dtype == E4M3:
            return _counted(query, key, value, attn_mask, num_tokens_B, scale=scale, backend=backend)
        result: torch.Tensor = dispatch_attention_fn(
            query, key, value, attn_mask, *args, backend=backend, scale=scale, **kwargs
        )
        return result
    unusual = [*args, *(name for name, given in kwargs.items() if given)]
    assert not unusual, f"a shared attention with {unusual}"
    name = None if backend is None else str(getattr(backend, "value", backend))
    shared: torch.Tensor = sharded_attention(
        query, key, value, attn_mask, scale, name, text_length, num_tokens_B, parallel_config
    )
    return shared


def attend_BHLD(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    streams: str,
    **options: Any,
) -> torch.Tensor:
    """In place of torch's `scaled_dot_product_attention`, shared over these streams."""
    if _SHARING.get() is None and not torch.compiler.is_compiling():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, attn_mask, parallel_config=streams, **options).transpose(1, 2)


def _counted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    num_tokens_B: torch.Tensor | None,
    *,
    scale: float | None,
    backend: object | None,
) -> torch.Tensor:
    unusual = [given for given in (attn_mask, scale, backend) if given is not None]
    assert not unusual, f"{unusual} beside a number of tokens or fp8"
    if num_tokens_B is None or query.dtype == E4M3:
        return fp8_attention(query, key, value, num_tokens_B)
    return counted_attention(query, key, value, num_tokens_B)


@torch.library.custom_op("gfgen::sharded_attention", mutates_args=())
def sharded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    backend: str | None,
    text_length: int | None = None,
    num_tokens_B: torch.Tensor | None = None,
    streams: str = ALL,
) -> torch.Tensor:
    """Attention by diffusers' own dispatch, shared among the active ranks.

    One operator, opaque to compilers, so memory of an arena never crosses its boundary. Its arguments do not
    depend on degrees, slots or ranks: it takes them from what is active when it runs. For a captured graph
    that is its capture, by ranks whose launches read a descriptor at a fixed address.

    Shapes: query, key, value [B, L, H, D], attn_mask bool [B, 1, 1, L] or None, num_tokens_B int32 [B] or
            None -> [B, L, H, D], fresh memory.
    Raises: LayoutError when a rank would have no head; ModelError for an attention that is not
            over these streams, or whose backend cannot be had.
    """
    own: Attend = functools.partial(dispatch_attention_fn, scale=scale, backend=backend)
    sharing = _SHARING.get()
    if num_tokens_B is not None or query.dtype == E4M3:
        assert num_tokens_B is None or not _needs_lse(sharing), "a number of tokens in a ring or torus"
        own = functools.partial(_counted, num_tokens_B=num_tokens_B, scale=scale, backend=backend)
    if sharing is None:
        alone: torch.Tensor = own(query, key, value, attn_mask)
        return alone.contiguous()
    if backend is not None and _needs_lse(sharing):
        raise ModelError(
            f"attention backend {backend!r} does not work in a ring or torus, which need log-sum-exps"
        )
    if streams.startswith(KEYS):
        unusual = [given for given in (attn_mask, backend) if given is not None]
        assert not unusual, f"an attention to shards with {unusual}"
        return attention_to_shards(query, key, value, ranks=sharing.ranks, scale=scale)
    assert key.shape[2] == query.shape[2], "a shared attention whose queries and keys differ in heads"
    return shared_attention(
        query,
        key,
        value,
        attn_mask,
        parallel=sharing.parallel,
        token_sizes=_token_sizes(sharing, query, key, streams, text_length),
        attend=own,
        scale=scale,
    )


@sharded_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


def _needs_lse(sharing: Sharing | None) -> bool:
    """Whether ranks attend to a part of the keys at a time, and merge."""
    return sharing is not None and max(sharing.parallel.ring.size, sharing.parallel.torus.size) > 1


def _token_sizes(
    sharing: Sharing, query: torch.Tensor, key: torch.Tensor, streams: str, text_length: int | None
) -> Sizes:
    """By slot, the tokens of a shared attention: its streams, one behind the other.

    Of a padded text only the first `text_length` tokens take part.
    """
    ranks, lengths = sharing.ranks, sharing.stream_lengths
    names = list(lengths) if streams == ALL else streams.split()
    taking_part = dict(lengths) if text_length is None else lengths | {TEXT: text_length}
    shards = [_shares(lengths[name], ranks.size, of_first=taking_part[name]) for name in names]
    sizes = [sum(each) for each in zip(*shards, strict=True)]
    if not sizes or not query.shape[1] == key.shape[1] == sizes[ranks.slot]:
        raise ModelError(
            f"an attention of {query.shape[1]} to {key.shape[1]} tokens cannot be shared: it is not over "
            f"the {ranks.slot + 1}. of {ranks.size} shards of {lengths}"
        )
    return sizes
