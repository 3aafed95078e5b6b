"""The pixels of which a pipeline's sizes are multiples, from diffusers' source and the checkpoint's configs.

    if height % (self.vae_scale_factor * 2) != 0 ...     in check_inputs or __call__
    self.vae_scale_factor = 2 ** (len(self.vae.config.block_out_channels) - 1)     in __init__

Such expressions are evaluated over the configs, without importing diffusers. Besides, a size has whole
patches of the transformer's, which some calls do not check.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gfgen.models.geometry.checkpoint import Checkpoint

_FACTORS = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
_BUILTINS = {"len": len, "getattr": getattr, "hasattr": hasattr, "max": max, "min": min, "int": int}
_FAILURES = (AttributeError, KeyError, NameError, TypeError, ValueError, IndexError, RecursionError)
"""What evaluating raises where an expression needs more than configs."""


def size_multiple(checkpoint: Checkpoint, method_of: Callable[[str], ast.FunctionDef | None]) -> int:
    """`method_of` finds a method of the pipeline's class by its name."""
    pipeline = _Pipeline(checkpoint, _assigned(method_of("__init__")))
    found = [1]
    for method in filter(None, map(method_of, ("check_inputs", "__call__"))):
        names = _Names(pipeline, _assigned(method))
        found += [_number(modulus, names) for modulus in _moduli(method)]
    factor = max(_number(ast.parse(f"self.{name}", mode="eval").body, pipeline.names) for name in _FACTORS)
    return math.lcm(*found, factor * _patch_side(checkpoint))


def _moduli(method: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a method divides height or width by to look at the remainder."""
    for node in ast.walk(method):
        match node:
            case ast.BinOp(left=ast.Name(id="height" | "width"), op=ast.Mod(), right=modulus):
                yield modulus


def _assigned(method: ast.FunctionDef | None) -> Mapping[str, ast.expr]:
    """The values that a method gives to its variables and to attributes."""
    nodes = list(ast.walk(method)) if method is not None else []
    return {ast.unparse(node.targets[0]): node.value for node in nodes[::-1] if isinstance(node, ast.Assign)}


def _number(expression: ast.expr, names: Mapping[str, Any]) -> int:
    """The value of an expression; 1 if configs do not tell."""
    try:
        value = _value(expression, names)
    except _FAILURES:
        return 1
    return value if isinstance(value, int) and value > 0 else 1


def _value(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    code = compile(ast.Expression(expression), "diffusers", "eval")
    return eval(code, {"__builtins__": _BUILTINS}, names)


def _patch_side(checkpoint: Checkpoint) -> int:
    """Latent pixels along a side of a patch, in the transformer with the largest."""
    configs = [config for name, config in checkpoint.configs.items() if "transformer" in name]
    sides = [config.get("patch_size", config.get("all_patch_size", 1)) for config in configs]
    lasts = [side[-1] if isinstance(side, list) and side else side for side in sides]
    return max([1, *(side for side in lasts if isinstance(side, int))])


class _Names(dict[str, Any]):
    """The variables of a method, evaluated as they are read."""

    def __init__(self, pipeline: _Pipeline, assigned: Mapping[str, ast.expr]) -> None:
        super().__init__(self=pipeline)
        self._assigned = assigned

    def __missing__(self, name: str) -> Any:
        return _value(self._assigned[name], self)


class _Part(dict[str, Any]):
    """A component, whose attributes are those of its config."""

    @property
    def config(self) -> _Part:
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class _Pipeline:
    """`self` of the pipeline: its components, and what `__init__` derives from their configs."""

    def __init__(self, checkpoint: Checkpoint, assigned: Mapping[str, ast.expr]) -> None:
        self.names = _Names(self, {})
        self._checkpoint, self._assigned = checkpoint, assigned

    def __getattr__(self, name: str) -> Any:
        if name in self._checkpoint.configs:
            return _Part(self._checkpoint.configs[name])
        if isinstance(self._checkpoint.index.get(name), list):
            return None  # left out
        try:
            return _value(self._assigned[f"self.{name}"], self.names)
        except _FAILURES:
            raise AttributeError(name) from None
