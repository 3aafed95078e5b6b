"""Sequence parallelism over unmodified diffusers transformers, without a process group.

`install` reads a transformer's own `_cp_plan` once and adds hooks that cut tokens as the plan says, and
join them again. Inside `with active(parallel)` they cut for this rank's slot; outside, and on other
threads, they do nothing. Attentions that diffusers' own context parallelism would share go through one
operator (shared_attention.py).

Every cut follows from global shapes (`layout.shard_bounds`): shards may be uneven, nothing is padded, and
ranks never exchange sizes.

Legend: B batch, L tokens of this rank, H heads, D head dimension.
Source: diffusers 0.42 hooks/context_parallel.py and ModelMixin.enable_parallelism.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn

from gfgen.errors import LayoutError, ModelError
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import Sizes, shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.parallel.chunked_attention import Attend
from gfgen.models.parallel.counted_attention import counted_attention
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.shared_attention import shared_attention

PICTURE, TEXT = "hidden_states", "encoder_hidden_states"
"""What diffusers calls the streams of tokens: the one that is denoised, whose shards the output is
gathered from, and the prompt's. What else a plan cuts (rotary tables, timesteps, masks) goes
along with one of them."""

SHARED = object()
"""Marks an attention to share."""


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
        """All ranks that share the tokens."""
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


@contextmanager
def active(parallel: Parallel, *, slot_1: torch.Tensor | None = None) -> Iterator[None]:
    """Inside, forwards of transformers with hooks are shared among the ranks of one branch.

    All of the ranks must make the same forwards with the same inputs, whole on each; outputs
    are whole on each, too, and bitwise the same. One rank alone is as if nothing were active.
    slot_1: an int64 tensor that is to hold this rank's slot among those who share the tokens, for
    forwards that are recorded in one slot and replayed in another one.
    """
    token = _SHARING.set(Sharing(parallel, slot_1) if parallel.sequence.size > 1 else None)
    try:
        yield
    finally:
        _SHARING.reset(token)


def sharing_ranks() -> Collectives | None:
    """The ranks that share this thread's forward; None if the rank is alone."""
    sharing = _SHARING.get()
    return None if sharing is None else sharing.ranks


def present_sharing() -> Sharing | None:
    """The `Sharing` of the `with active(...)` around the caller; None if the rank is alone."""
    return _SHARING.get()


def present_degrees() -> tuple[int, int, int]:
    """(cfg, ulysses, ring) of the layout that shares the caller's forward; ones for a rank alone."""
    sharing = _SHARING.get()
    return (1, 1, 1) if sharing is None else sharing.parallel.degrees


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


def install(transformer: torch.nn.Module) -> None:
    """Put hooks on a diffusers transformer, permanently; once for each instance.

    Raises: ModelError for a class without a `_cp_plan`, or with an unsupported one.
    """
    name = type(transformer).__name__
    plan: Mapping[str, Any] | None = getattr(transformer, "_cp_plan", None)
    if plan is None:
        raise ModelError(f"{name}: has no _cp_plan, so its tokens cannot be shared among ranks")
    for pattern, entry in plan.items():
        for module in _modules(transformer, pattern):
            if isinstance(entry, ContextParallelOutput):
                module.register_forward_hook(functools.partial(_gather_output, spec=entry))
            elif isinstance(entry, Mapping):
                _install_splits(module, entry)
            else:
                raise ModelError(f"{name}: _cp_plan of {pattern!r} is not supported: {entry!r}")
    for module in transformer.modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            # A mark, not a configuration: processors hand it to those attentions that are to be
            # shared, and `attend` takes it away again.
            processor._parallel_config = SHARED
    _wrap_globals(sys.modules[type(transformer).__module__])


def _modules(transformer: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    """Modules whose name matches a plan's key; `*` matches one part of a name."""
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    found = [module for name, module in transformer.named_modules() if expression.fullmatch(name)]
    if not found:
        raise ModelError(f"{type(transformer).__name__}: its _cp_plan names {pattern!r}, which it has not")
    return found


def _install_splits(module: torch.nn.Module, entry: Mapping[str | int, Any]) -> None:
    """Hooks for one module: parameters by name are cut before it runs, outputs by index after."""
    inputs = {key: spec for key, spec in entry.items() if isinstance(key, str)}
    outputs = {key: spec for key, spec in entry.items() if isinstance(key, int)}
    if inputs:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        hook = functools.partial(_split_inputs, specs=inputs, names=names)
        module.register_forward_pre_hook(hook, with_kwargs=True)
    if outputs:
        module.register_forward_hook(functools.partial(_split_outputs, specs=outputs))


def _split_inputs(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    specs: Mapping[str, ContextParallelInput],
    names: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A pre-forward hook; a parameter may come by position or by name."""
    sharing = _SHARING.get()
    if sharing is None:
        return None
    by_name = dict(zip(names, args, strict=False)) | kwargs
    for name, spec in specs.items():
        value = by_name.get(name)
        if value is None:
            continue
        if name in (PICTURE, TEXT):
            sharing.stream_lengths[name] = _stream_length(name, value, spec, sharing.ranks)
        by_name[name] = _shard(value, spec, sharing)
    given = names[: len(args)]
    return tuple(by_name.pop(name) for name in given), by_name


def _split_outputs(
    module: torch.nn.Module, args: Any, output: Any, *, specs: Mapping[int, ContextParallelInput]
) -> Any:
    """A forward hook, for what a module computes for all tokens (rotary tables)."""
    sharing = _SHARING.get()
    if sharing is None:
        return None
    values = [output] if isinstance(output, torch.Tensor) else list(output)
    for idx, spec in specs.items():
        values[idx] = _shard(values[idx], spec, sharing)
    return values[0] if isinstance(output, torch.Tensor) else tuple(values)


def _gather_output(
    module: torch.nn.Module, args: Any, output: torch.Tensor, *, spec: ContextParallelOutput
) -> torch.Tensor | None:
    """A forward hook: the whole picture on every rank."""
    sharing = _SHARING.get()
    if sharing is None:
        return None
    sizes = shard_sizes(sharing.stream_lengths[PICTURE], sharing.ranks.size)
    return sharing.ranks.all_gather(output, dim=spec.gather_dim, sizes=sizes)


def _stream_length(name: str, value: torch.Tensor, spec: ContextParallelInput, ranks: Collectives) -> int:
    length = int(value.shape[spec.split_dim])
    if name == PICTURE and length < ranks.size:
        raise LayoutError(f"{length} tokens cannot be shared among {ranks.size} ranks")
    return length


def _shard(x: torch.Tensor, spec: ContextParallelInput, sharing: Sharing) -> torch.Tensor:
    """This rank's part; all of it when the tensor is not of the kind the plan means.

    Text may be shorter than there are ranks. Its last shards are then empty, and flow through
    the blocks as tensors of no rows. A copy and no view: compiled blocks depend on strides, and
    those of a view would tell them the whole length.
    """
    if spec.expected_dims is not None and x.dim() != spec.expected_dims:
        return x
    if sharing.slot_1 is not None:
        return x.index_select(spec.split_dim, sharing.positions_L(x.shape[spec.split_dim]))
    start, stop = shard_bounds(x.shape[spec.split_dim], sharing.ranks.size, sharing.ranks.slot)
    return x.narrow(spec.split_dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _wrap_globals(module: Any) -> None:
    """Wrap what the model's module calls by its global names, unless that was done before."""
    if module.dispatch_attention_fn is attend:
        return
    assert module.dispatch_attention_fn is dispatch_attention_fn, f"{module.__name__} is wrapped already"
    module.dispatch_attention_fn = attend
    for name, function in list(vars(module).items()):
        if name.startswith("apply_rotary_emb"):
            setattr(module, name, _passing_empty(function))


def _passing_empty(function: Callable[..., Any]) -> Callable[..., Any]:
    """Rotation that also accepts an empty tensor.

    It reshapes with an inferred dimension, which is undefined for a tensor of no elements. This
    is all that keeps a text shorter than the degree from being cut like any other, and cheaper
    than keeping such a text whole on every rank, which would need an exchange of its own.
    """

    @functools.wraps(function)
    def rotate(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(x, *args, **kwargs) if x.numel() else x

    return rotate


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    backend: str | None = None,
    parallel_config: object | None = None,
    scale: float | None = None,
    text_length: int | None = None,
    num_tokens_B: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """In place of diffusers' `dispatch_attention_fn`: the same function, shared where marked.

    text_length: of the whole text, where what was cut has padding that is left out here.
    num_tokens_B: how many tokens of each sample there are, of all ranks; padding is behind them.
    Shapes: query, key, value [B, L, H, D], attn_mask [B, 1, 1, L] or None, num_tokens_B int32 [B] or None
            -> [B, L, H, D].
    """
    # Compiled code must not depend on who shares: there the operator decides when it runs, and
    # one compiled block serves every degree at which its shard has the same shape.
    is_shared = torch.compiler.is_compiling() or _SHARING.get() is not None
    if parallel_config is None or not is_shared:
        if num_tokens_B is not None:
            return _counted(query, key, value, attn_mask, num_tokens_B, scale=scale, backend=backend)
        result: torch.Tensor = dispatch_attention_fn(
            query, key, value, attn_mask, *args, backend=backend, scale=scale, **kwargs
        )
        return result
    unusual = [*args, *(name for name, given in kwargs.items() if given)]
    assert not unusual, f"a shared attention with {unusual}"
    name = None if backend is None else str(getattr(backend, "value", backend))
    shared: torch.Tensor = sharded_attention(
        query, key, value, attn_mask, scale, name, text_length, num_tokens_B
    )
    return shared


def _counted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    num_tokens_B: torch.Tensor,
    *,
    scale: float | None,
    backend: object | None,
) -> torch.Tensor:
    unusual = [given for given in (attn_mask, scale, backend) if given is not None]
    assert not unusual, f"{unusual} beside a number of tokens"
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
) -> torch.Tensor:
    """Attend with diffusers' own dispatch, shared as what is active says.

    One operator, opaque to compilers: what lies in an arena never crosses its boundary. Its
    arguments know nothing of degrees, slots or ranks, which it finds in what is active when it
    runs; for a captured graph that is when it is captured, by ranks whose launches read a
    descriptor at a fixed address.

    Shapes: query, key, value [B, L, H, D], attn_mask bool [B, 1, 1, L] or None, num_tokens_B int32 [B] or
            None -> [B, L, H, D], fresh memory.
    Raises: LayoutError when a rank would have no head; ModelError for an attention that is not
            over all streams that were cut, or whose backend cannot be had.
    """
    own: Attend = functools.partial(dispatch_attention_fn, scale=scale, backend=backend)
    sharing = _SHARING.get()
    if num_tokens_B is not None:
        assert sharing is None or sharing.parallel.ring.size == 1, "a number of tokens in a ring"
        own = functools.partial(_counted, num_tokens_B=num_tokens_B, scale=scale, backend=backend)
    if sharing is None:
        alone: torch.Tensor = own(query, key, value, attn_mask)
        return alone.contiguous()
    if backend is not None and sharing.parallel.ring.size > 1:
        raise ModelError(f"attention backend {backend!r} does not work in a ring, which needs log-sum-exps")
    assert key.shape[2] == query.shape[2], "a shared attention whose queries and keys differ in heads"
    return shared_attention(
        query,
        key,
        value,
        attn_mask,
        parallel=sharing.parallel,
        token_sizes=_token_sizes(sharing, query, key, text_length),
        attend=own,
        scale=scale,
    )


@sharded_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    backend: str | None,
    text_length: int | None = None,
    num_tokens_B: torch.Tensor | None = None,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


def _token_sizes(sharing: Sharing, query: torch.Tensor, key: torch.Tensor, text_length: int | None) -> Sizes:
    """By slot, the tokens of a shared attention: all streams that are cut, one behind the other.

    Wan cuts the video alone, and attends to it alone; joint attentions (Qwen-Image) attend to
    text and picture, and cut both. Of a padded text only the first `text_length` tokens take part.
    """
    ranks = sharing.ranks
    taking_part = dict(sharing.stream_lengths)
    if text_length is not None:
        taking_part[TEXT] = text_length
    shards = [
        _shares(length, ranks.size, of_first=taking_part[name])
        for name, length in sharing.stream_lengths.items()
    ]
    sizes = [sum(lengths) for lengths in zip(*shards, strict=True)]
    if not sizes or not query.shape[1] == key.shape[1] == sizes[ranks.slot]:
        raise ModelError(
            f"an attention of {query.shape[1]} to {key.shape[1]} tokens cannot be shared: it is not over "
            f"the {ranks.slot + 1}. of {ranks.size} shards of {sharing.stream_lengths}"
        )
    return sizes
