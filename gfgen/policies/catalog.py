"""Finding a policy by the text of `--policy`: NAME[,option=value...].

NAME is a built-in, `package.module:attribute`, or `path/to/file.py[:attribute]` (the
attribute is `policy` unless named). A policy is a function whose first parameter is the
snapshot and whose keyword-only parameters are its options, with a default and an annotation
of int, float, bool or str.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfgen.errors import PolicyError
from gfgen.snapshot import Policy

BUILT_IN = {
    "legacy": "gfgen.policies.legacy:legacy",
    "fcfs": "gfgen.policies.fcfs:fcfs",
    "srtf": "gfgen.policies.srtf:srtf",
    "edf": "gfgen.policies.edf:edf",
}

_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy with its options bound, and the text that names it."""

    name: str
    decide: Policy


def load_policy(text: str) -> NamedPolicy:
    """The policy that `text` names, options bound.

    Raises: PolicyError when there is none, or an option is unknown or has a wrong value.
    """
    name, *assignments = (part.strip() for part in text.split(","))
    function = _find(name)
    options = _options(name, function, assignments)
    return NamedPolicy(text, functools.partial(function, **options) if options else function)


def describe(name: str) -> tuple[str, str]:
    """(signature of the options, docstring) of a policy, for `gfgen policies`."""
    function = _find(name)
    options = ", ".join(f"{key}={parameter.default}" for key, parameter in _parameters(function).items())
    return options, inspect.getdoc(function) or ""


def _find(name: str) -> Callable[..., Any]:
    target = BUILT_IN.get(name, name)
    module_name, _, attribute = target.rpartition(":") if ":" in target else (target, "", "policy")
    if module_name.endswith(".py") or Path(module_name).is_file():
        module = _import_file(Path(module_name))
    elif ":" in target:
        module = _import_module(module_name)
    else:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise PolicyError(
            f"--policy {name}: unknown; {hint}built in: {', '.join(BUILT_IN)}; "
            "or package.module:attribute, or a file's path"
        )
    function = getattr(module, attribute, None)
    if not callable(function):
        raise PolicyError(f"--policy {name}: {module_name} has no function {attribute}")
    return function  # type: ignore[no-any-return]


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise PolicyError(f"--policy: cannot import {name}: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise PolicyError(f"--policy {path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"--policy {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything while it is imported
        raise PolicyError(f"--policy {path}: {type(error).__name__}: {error}") from error
    return module


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {key: p for key, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _options(name: str, function: Callable[..., Any], assignments: list[str]) -> dict[str, Any]:
    parameters = _parameters(function)
    options = {}
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or key not in parameters:
            accepted = ", ".join(parameters) or "none"
            raise PolicyError(f"--policy {name}: no option {assignment!r}; options: {accepted}")
        options[key] = _converted(name, key, value, parameters[key])
    return options


def _converted(name: str, key: str, value: str, parameter: inspect.Parameter) -> Any:
    annotation = parameter.annotation
    kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "str")
    if kind == "bool":
        if value.lower() in ("true", "false", "1", "0", "yes", "no"):
            return value.lower() in ("true", "1", "yes")
        raise PolicyError(f"--policy {name}: {key} = {value}: true or false is accepted")
    try:
        return _TYPES.get(kind, str)(value)
    except ValueError:
        raise PolicyError(f"--policy {name}: {key} = {value}: a value of type {kind} is accepted") from None
