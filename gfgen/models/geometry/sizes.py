"""The pixels of which a pipeline's sizes are multiples, from diffusers' source and the checkpoint's configs.

    if height % (self.vae_scale_factor * 2) != 0 ...     in check_inputs or __call__
    self.vae_scale_factor = 2 ** (len(self.vae.config.block_out_channels) - 1)     in __init__

Such expressions are evaluated over the configs, without importing diffusers. Besides, a size has whole
patches of the transformer's, which some calls do not check.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

from gfgen.models.geometry.checkpoint import Checkpoint

_FACTORS = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_scale_factor",
    "vae_spatial_compression_ratio",
)
_BUILTINS = {"len": len, "getattr": getattr, "hasattr": hasattr, "max": max, "min": min, "int": int}


def size_multiple(checkpoint: Checkpoint, method_of: Callable[[str], ast.FunctionDef | None]) -> int:
    """`method_of` finds a method of the pipeline's class by its name."""
    parts = {name: _Part(config) for name, config in checkpoint.configs.items()}
    pipeline = _Part(parts | {name: None for name in checkpoint.index if name not in parts})
    moduli: list[Any] = []
    for method in filter(None, map(method_of, ("__init__", "check_inputs", "__call__"))):
        names = {"self": pipeline}
        nodes = [node for node in ast.walk(method) if isinstance(node, (ast.Assign, ast.BinOp))]
        for node in sorted(nodes, key=lambda node: node.lineno):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    names[name] = _value(node.value, names)
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                    pipeline[name] = _value(node.value, names)
                case ast.BinOp(left=ast.Name(id="height" | "width"), op=ast.Mod()):
                    moduli.append(_value(node.right, names))
    factor = max(_whole(pipeline.get(name)) for name in _FACTORS)
    configs = [config for name, config in checkpoint.configs.items() if "transformer" in name]
    patches = [config.get("patch_size", config.get("all_patch_size")) for config in configs]
    patch = max([1, *(_whole(side[-1] if isinstance(side, list) and side else side) for side in patches)])
    return math.lcm(*map(_whole, moduli), factor * patch)


def _whole(value: Any) -> int:
    """1 for what configs do not tell."""
    return value if type(value) is int and value > 0 else 1


def _value(expression: ast.expr, names: dict[str, Any]) -> Any:
    """The value of an expression of diffusers; None if it needs more than configs."""
    try:
        return eval(compile(ast.Expression(expression), "", "eval"), {"__builtins__": _BUILTINS}, names)
    except Exception:  # whatever code raises that expects a loaded pipeline
        return None


class _Part(dict[str, Any]):
    """The pipeline or a component, whose attributes are those of its config."""

    def __getattr__(self, name: str) -> Any:
        if name != "config" and name not in self:
            raise AttributeError(name)
        return self if name == "config" else self[name]
