"""How an adapter evaluates its transformers: directly, or through recorded forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class Evaluator(Protocol):
    """`evaluate`, or `recording.Graphs`."""

    def __call__(self, transformer: Any, inputs: Mapping[str, Any]) -> Tensor:
        """A transformer's prediction, in fresh memory; the inputs are those of its `forward`."""
        ...


def evaluate(transformer: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The transformer's own forward."""
    predicted: Tensor = transformer(**inputs, return_dict=False)[0]
    return predicted
