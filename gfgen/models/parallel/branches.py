"""A pipeline's step on several ranks, without knowledge of the pipeline's code.

The ranks share the tokens of each forward (hooks.py). A layout with two halves also cuts the guidance: the
samples of all of a step's calls of transformers, in order, are cut in two, each half evaluates its samples,
and the halves exchange results. So guidance in two calls, in a batch of two, or with more branches is alike.

Such a step runs twice. In the first run its calls return NaN in the shapes of their results, so that all
calls are known; the second run gets the results. A step must therefore change nothing that it is given. If a
call depends on the result of another one of the same step, its result is NaN.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from gfgen.errors import ModelError
from gfgen.gfc.group import Collectives
from gfgen.layout import shard_bounds
from gfgen.models.parallel.parallel import Parallel, held, rehearsal
from gfgen.models.parallel.sequence_parallel import active

T = TypeVar("T")
Evaluate = Callable[[nn.Module, inspect.BoundArguments], Any]

BATCH_ELSEWHERE = frozenset(("HiDreamImageTransformer2DModel",))
"""Classes with an argument whose batch is in another dimension than the first (a text for each layer)."""
UNBATCHED = frozenset(("img_ids", "txt_ids", "image_rotary_emb"))
"""Arguments of forwards whose first dimension is no batch."""


def evaluate_itself(transformer: nn.Module, arguments: inspect.BoundArguments) -> Any:
    return transformer(*arguments.args, **arguments.kwargs)


@dataclass(frozen=True, slots=True)
class _Call:
    transformer: nn.Module
    arguments: inspect.BoundArguments
    results: dict[object, Any]

    @property
    def samples(self) -> Any:
        """What is denoised: a tensor with a batch, or a list of samples."""
        return next(iter(self.arguments.arguments.values()))

    def evaluated(self, start: int, stop: int, evaluate: Evaluate) -> Any:
        part = inspect.BoundArguments(self.arguments.signature, self.arguments.arguments.copy())
        if stop - start < len(self.samples):
            self._check_samples()
            for name, value in part.arguments.items():
                if name not in UNBATCHED:
                    part.arguments[name] = self._part(value, slice(start, stop))
        return evaluate(self.transformer, part)

    def _check_samples(self) -> None:
        """Raises: ModelError where a part of the samples cannot be evaluated."""
        name = type(self.transformer).__name__
        if name in BATCH_ELSEWHERE:
            raise ModelError(f"{name}: a batch cannot be shared among two halves of a layout")
        processors = (type(getattr(module, "processor", None)) for module in self.transformer.modules())
        if found := next((kind.__name__ for kind in processors if kind.__name__.startswith("PAG")), None):
            raise ModelError(f"{name} with {found} cannot be shared among two halves of a layout")

    def _part(self, value: Any, own: slice) -> Any:
        size = len(self.samples)
        if isinstance(value, Tensor):
            return value[own] if value.dim() and len(value) == size else value
        if isinstance(value, dict):
            return {name: self._part(each, own) for name, each in value.items()}
        if not isinstance(value, (list, tuple)):
            return value
        has_batches = not isinstance(self.samples, list) and any(isinstance(each, Tensor) for each in value)
        if has_batches or isinstance(value, tuple):
            return type(value)(self._part(each, own) for each in value)
        return value[own] if len(value) == size else value

    def result_on_meta(self, parallel: Parallel | None) -> Any:
        """The result's shapes. The first call of its shape is evaluated for them, by this rank alone."""
        form = _form(self.arguments.arguments)
        if form not in self.results:
            with active(None if parallel is None else rehearsal(parallel)), held(_ANSWER, None):
                self.note(evaluate_itself(self.transformer, self.arguments))
        return self.results[form]

    def note(self, result: Any) -> None:
        form = _form(self.arguments.arguments)
        if form not in self.results:
            self.results[form] = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), result)

    def joined(self, own: Any, sizes: Sequence[int], parallel: Parallel) -> Any:
        """The whole result, from the parts of both halves; `own` is None if this one has no sample."""
        leaves, structure = tree_flatten(self.result_on_meta(parallel))
        own_leaves: list[Any] = [None] * len(leaves) if own is None else tree_flatten(own)[0]
        if isinstance(self.samples, list):  # and so is the result
            part = None if own is None else torch.stack(own_leaves)
            joined = self._gathered(torch.stack(leaves), part, sizes, parallel.cfg)
            return tree_unflatten(list(joined.unbind()), structure)
        made = [
            leaf if leaf is None else self._gathered(leaf, part, sizes, parallel.cfg)
            for leaf, part in zip(leaves, own_leaves, strict=True)
        ]
        return tree_unflatten(made, structure)

    def _gathered(self, whole: Any, part: Tensor | None, sizes: Sequence[int], halves: Collectives) -> Tensor:
        """One tensor of a result, from the parts of each half; `whole` is on the device `meta`."""
        if not isinstance(whole, Tensor) or not whole.dim() or len(whole) != len(self.samples):
            raise ModelError(
                f"{type(self.transformer).__name__} returns more than tensors with a batch, so two "
                "halves of a layout cannot share its calls"
            )
        if part is None:
            part = torch.empty((0, *whole.shape[1:]), dtype=whole.dtype, device=_device_of(self.samples))
        return halves.all_gather(part.contiguous(), dim=0, sizes=sizes)


_Answer = Callable[[_Call], Any]
# Per context and so per thread: ranks may be threads around one model.
_ANSWER: ContextVar[_Answer | None] = ContextVar("answer", default=None)
"""What calls of watched transformers get; None: their own."""


def watch(transformer: nn.Module) -> None:
    """Let `shared_step` see the calls of a transformer, permanently; once for each instance."""
    forward, signature = transformer.forward, inspect.signature(transformer.forward)
    results: dict[object, Any] = {}

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        answer = _ANSWER.get()
        if answer is None:
            return forward(*args, **kwargs)
        return answer(_Call(transformer, signature.bind(*args, **kwargs), results))

    transformer.forward = watched


@contextmanager
def unevaluated() -> Iterator[None]:
    """Inside, watched transformers return zeros; only the first call of an unknown shape is evaluated."""

    def zeros(call: _Call) -> Any:
        device = _device_of(call.samples)
        return tree_map_only(Tensor, lambda x: torch.zeros_like(x, device=device), call.result_on_meta(None))

    with held(_ANSWER, zeros):
        yield


def shared_step(
    step: Callable[[], T],
    parallel: Parallel | None,
    evaluate: Evaluate = evaluate_itself,
    *,
    notes_shapes: bool = False,
) -> T:
    """What a step returns, on every rank of the layout.

    All ranks call it with the same step. Transformers that the step calls have hooks if ranks share tokens,
    and are watched if the layout has two halves or one of the last two arguments is given.

    evaluate: makes each of their results; the ranks that share the tokens are active inside.
    notes_shapes: `unevaluated` learns the shapes of the results.
    """
    if parallel is None or parallel.cfg.size == 1:

        def answer(call: _Call) -> Any:
            with active(parallel), held(_ANSWER, None):
                result = evaluate(call.transformer, call.arguments)
            if notes_shapes:
                call.note(result)
            return result

        is_answered = notes_shapes or evaluate is not evaluate_itself
        with held(_ANSWER, answer) if is_answered else active(parallel):
            return step()
    calls: list[_Call] = []

    def note(call: _Call) -> Any:
        # What the step changes in place later is not what it has called with.
        given = tree_map_only(Tensor, torch.clone, dict(call.arguments.arguments))
        calls.append(replace(call, arguments=inspect.BoundArguments(call.arguments.signature, given)))
        return _unknown(call.result_on_meta(parallel), _device_of(call.samples))

    with held(_ANSWER, note):
        step()
    results: list[Any] = []

    def reply(call: _Call) -> Any:
        # Here and not before, because the step may prepare the transformers for its calls.
        if calls:
            with held(_ANSWER, None):
                results.extend(_evaluated(calls, parallel, evaluate))
            calls.clear()
        return results.pop(0)

    with held(_ANSWER, reply):
        return step()


def _evaluated(calls: Sequence[_Call], parallel: Parallel, evaluate: Evaluate) -> list[Any]:
    halves, total, first = parallel.cfg, sum(len(call.samples) for call in calls), 0
    bounds = [shard_bounds(total, halves.size, half) for half in range(halves.size)]
    parts: list[tuple[_Call, Any, list[int]]] = []
    with active(parallel):
        for call in calls:
            size = len(call.samples)
            by_half = [[min(max(bound - first, 0), size) for bound in own] for own in bounds]
            start, stop = by_half[halves.slot]
            own = call.evaluated(start, stop, evaluate) if start < stop else None
            parts.append((call, own, [stop - start for start, stop in by_half]))
            first += size
    return [call.joined(own, sizes, parallel) for call, own, sizes in parts]


def _unknown(result: Any, device: torch.device) -> Any:
    def unknown(x: Tensor) -> Tensor:
        is_number = x.is_floating_point() or x.is_complex()
        return torch.full_like(x, torch.nan if is_number else 0, device=device)

    return tree_map_only(Tensor, unknown, result)


def _form(arguments: Any) -> object:
    leaves, structure = tree_flatten(arguments)
    kinds = [
        (x.shape, x.dtype) if isinstance(x, Tensor) else x if isinstance(x, bool) else type(x) for x in leaves
    ]
    return str(structure), tuple(kinds)


def _device_of(samples: Any) -> torch.device:
    while isinstance(samples, list):
        samples = samples[0]
    return samples.device  # type: ignore[no-any-return]
