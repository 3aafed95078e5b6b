"""How transformers are evaluated: directly, or through recorded forwards."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import BoundArguments
from typing import Any, Protocol

from diffusers import (
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves

RECORDABLE = (
    FluxTransformer2DModel,
    Flux2Transformer2DModel,
    LTXVideoTransformer3DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
"""Classes of which pipelines' own calls may go through records. Their launches depend on nothing but weights,
the shapes of tensors and the values of other arguments: they read no values on the host, and keep no tables
between calls (diffusers 0.42)."""
NOT_RECORDED = (
    "joint_attention_kwargs",
    "attention_kwargs",
    "cross_attention_kwargs",
    "down_block_additional_residuals",
    "down_intrablock_additional_residuals",
    "kv_cache",
    "kv_cache_mode",
)
"""A call with one of these arguments is not recorded: forwards change the first five in place, and the others
make a call depend on earlier ones."""


class Evaluator(Protocol):
    """`evaluate`, or `recording.Graphs`."""

    def __call__(self, transformer: Any, inputs: Mapping[str, Any]) -> Tensor:
        """A transformer's prediction, in fresh memory; the inputs are those of its `forward`."""


def evaluate(transformer: Any, inputs: Mapping[str, Any]) -> Tensor:
    predicted: Tensor = transformer(**inputs, return_dict=False)[0]
    return predicted


def is_recordable(transformer: Any) -> bool:
    """Whether calls of a transformer by pipelines may go through records."""
    return type(transformer) in RECORDABLE and not getattr(transformer, "is_quantized", False)


def evaluate_call(transformer: Any, arguments: BoundArguments, *, by: Evaluator) -> Any:
    """What a pipeline's call of a transformer returns, by an evaluator where it can be recorded.

    A tensor on the host would be read when the call is recorded, and not with each replay. A timestep that
    is a number would have a record of its own.
    """
    inputs = dict(arguments.arguments)
    if (
        not is_recordable(transformer)
        or inputs.pop("return_dict", True) is not False
        or any(inputs.get(name) for name in NOT_RECORDED)
        or not isinstance(inputs.get("timestep"), Tensor)
        or len({x.device for x in tree_leaves(inputs) if isinstance(x, Tensor)}) != 1
    ):
        return transformer(*arguments.args, **arguments.kwargs)
    return (by(transformer, inputs),)
