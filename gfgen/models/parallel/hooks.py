"""Hooks that share a transformer of diffusers among ranks, as its plan says (plans.py).

They stay on the transformer and do nothing outside of `sequence_parallel.active`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from gfgen.errors import LayoutError, ModelError
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.parallel import plans
from gfgen.models.parallel.sequence_parallel import Sharing, attend, attend_BHLD, present_sharing


def install(transformer: torch.nn.Module) -> None:
    """Put hooks on a diffusers transformer, permanently; once for each instance.

    Raises: ModelError for a class without a plan, or with an unsupported one.
    """
    plan = plans.plan_of(transformer)
    for pattern, entry in plan.changes.items():
        for module in _modules(transformer, pattern):
            _hook(module, entry)
    attentions = [
        (module, streams)
        for pattern, streams in plan.attentions.items()
        for module in _modules(transformer, pattern)
        if hasattr(module, "processor")
    ]
    for module, streams in attentions:
        _share_attention(module, streams)
    processors = [(module, module.processor) for module, _ in attentions]
    transformer.register_forward_pre_hook(functools.partial(_check_processors, processors=processors))


def _check_processors(
    transformer: torch.nn.Module, args: object, *, processors: Sequence[tuple[Any, object]]
) -> None:
    """A pre-forward hook: pipelines and adapters may replace processors, and theirs would not share."""
    if present_sharing() is None:
        return
    for module, processor in processors:
        if module.processor is not processor:
            raise ModelError(
                f"{type(transformer).__name__} with {type(module.processor).__name__} cannot be shared among "
                "ranks"
            )


def _modules(transformer: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    """Modules whose name matches a plan's key: `**` matches all, and a key that ends in `?` perhaps none."""
    if pattern == "**":
        return list(transformer.modules())
    name, last, _ = pattern.partition(".-1")
    if last:
        return [transformer.get_submodule(name)[-1]]  # type: ignore[index]
    expression = re.compile(re.escape(pattern.removesuffix("?")).replace(r"\*", r"[^.]+"))
    found = [module for name, module in transformer.named_modules() if expression.fullmatch(name)]
    if not found and not pattern.endswith("?"):
        raise ModelError(f"{type(transformer).__name__} has no module {pattern!r}, which its plan names")
    return found


def _hook(module: torch.nn.Module, entry: plans.Entry) -> None:
    """Hooks for one module: parameters by name are changed before it runs, outputs by index after."""
    inputs = {key: change for key, change in entry.items() if isinstance(key, str)}
    outputs = {key: change for key, change in entry.items() if isinstance(key, int)}
    if inputs:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        hook = functools.partial(_change_inputs, changes=inputs, names=names)
        module.register_forward_pre_hook(hook, with_kwargs=True)
    if outputs:
        module.register_forward_hook(functools.partial(_change_outputs, changes=outputs))


def _change_inputs(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    changes: Mapping[str, plans.Change],
    names: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A pre-forward hook; a parameter may come by position or by name."""
    sharing = present_sharing()
    if sharing is None:
        return None
    by_name = dict(zip(names, args, strict=False)) | kwargs
    for name, change in changes.items():
        if by_name.get(name) is not None:
            if isinstance(change, plans.Refused):
                raise ModelError(f"{type(module).__name__} with {name} cannot be shared among ranks")
            by_name[name] = _changed(by_name[name], change, sharing)
    positional = tuple(by_name.pop(name) for name in names[: len(args)])
    return positional + args[len(names) :], by_name


def _change_outputs(
    module: torch.nn.Module, args: Any, output: Any, *, changes: Mapping[int, plans.Change]
) -> Any:
    """A forward hook: of what a module computes for all tokens (rotary tables), or for a shard."""
    sharing = present_sharing()
    if sharing is None:
        return None
    values = [output] if isinstance(output, torch.Tensor) else list(output)
    for idx, change in changes.items():
        values[idx] = _changed(values[idx], change, sharing)
    return values[0] if isinstance(output, torch.Tensor) else tuple(values)


def _changed(value: Any, change: plans.Change, sharing: Sharing) -> Any:
    """What the rank has instead of a value."""
    if isinstance(value, dict):
        return {key: _changed(each, change, sharing) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(each, change, sharing) for each in value)
    lengths, ranks = sharing.stream_lengths, sharing.ranks
    match change:
        case plans.Gather(dim, stream):
            return ranks.all_gather(value, dim=dim, sizes=shard_sizes(lengths[stream], ranks.size))
        case plans.Count(stream, at_end):
            assert sharing.slot_1 is None, "a number of tokens depends on the slot, so nothing is recorded"
            return _count(value, lengths[stream], sharing, at_end=at_end)
        case plans.CutStreams(dim, streams):
            parts = value.split([lengths[stream] for stream in streams], dim)
            return torch.cat([_shard(part, dim, sharing) for part in parts], dim)
        case plans.Cut(dim, stream, ndim, may_be_empty) if ndim in (None, value.dim()):
            if stream is not None:
                length = lengths[stream] = int(value.shape[dim])
                if length < ranks.size and (stream == plans.PICTURE or not may_be_empty):
                    raise LayoutError(f"{length} tokens cannot be shared among {ranks.size} ranks")
            return _shard(value, dim, sharing)
    return value


def _count(count: int, length: int, sharing: Sharing, *, at_end: bool) -> int:
    """How many of the first (or last) `count` tokens of a stream are this rank's."""
    start, stop = shard_bounds(length, sharing.ranks.size, sharing.ranks.slot)
    first, last = (length - count, length) if at_end else (0, count)
    return max(0, min(stop, last) - max(start, first))


def _shard(x: torch.Tensor, dim: int, sharing: Sharing) -> torch.Tensor:
    """This rank's part.

    If a text has fewer tokens than there are ranks, its last shards are empty tensors, which pass through the
    blocks. The part is a copy, because compiled blocks depend on strides, and those of a view depend on the
    whole length.
    """
    length = x.shape[dim]
    if sharing.slot_1 is not None:
        return x.index_select(dim, sharing.positions_L(length))
    start, stop = shard_bounds(length, sharing.ranks.size, sharing.ranks.slot)
    return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _share_attention(module: Any, streams: str) -> None:
    """Mark a module's attention as one over these streams."""
    processor = module.processor
    if hasattr(processor, "_parallel_config"):
        # Processors hand it to those attentions that are to be shared.
        processor._parallel_config = streams
        _wrap_globals(sys.modules[type(processor).__module__])
        return
    if "scaled_dot_product_attention" not in type(processor).__call__.__code__.co_names:
        raise ModelError(f"attention of {type(processor).__name__} cannot be shared among ranks")
    module.processor = copy.copy(processor)
    kind: Any = type(processor)
    module.processor.__class__ = _sharing_class(kind, streams)


@functools.cache
def _sharing_class(processor_class: Any, streams: str) -> type:
    """A processor class that calls torch's attention itself, with ours in its place.

    Only its `__call__` finds ours as `F.scaled_dot_product_attention`, so torch and other users of the
    processor's module stay as they are.
    """
    call: types.FunctionType = processor_class.__call__
    functional: Any = types.ModuleType("F")
    vars(functional).update(vars(torch.nn.functional))
    functional.scaled_dot_product_attention = functools.partial(attend_BHLD, streams=streams)
    own = types.FunctionType(call.__code__, call.__globals__ | {"F": functional}, argdefs=call.__defaults__)
    own.__kwdefaults__ = call.__kwdefaults__
    own_names = {"__call__": own, "__module__": processor_class.__module__}
    return type(processor_class.__name__, (processor_class,), own_names)


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
    """Rotation that also accepts an empty tensor, for which diffusers' reshape is undefined.

    So a text that is shorter than the degree is cut like any other. On every rank whole, it would need an
    exchange of its own.
    """

    @functools.wraps(function)
    def rotate(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(x, *args, **kwargs) if x.numel() else x

    return rotate
