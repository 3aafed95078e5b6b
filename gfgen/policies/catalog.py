"""Find a policy by the text of `--policy`: NAME[,option=value...].

NAME is a built-in, `package.module:attribute`, or `path/to/file.py[:attribute]`, where the attribute is
`policy` by default. A policy is a function with one positional parameter, the snapshot. Its keyword-only
parameters are its options, each with a default and an annotation of int, float, bool or str;
`Annotated[int, range(1, 9)]` or `Annotated[int, (1, 2, 4)]` restricts the accepted values.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_origin

from gfgen.errors import PolicyError, in_one_line, nearest
from gfgen.snapshot import Choose, Policy

BUILT_IN = {
    "legacy": "gfgen.policies.fcfs:legacy",
    "fcfs": "gfgen.policies.fcfs:fcfs",
    "srtf": "gfgen.policies.srtf:srtf",
    "edf": "gfgen.policies.edf:edf",
    "triage": "gfgen.policies.triage:triage",
    "makespan": "gfgen.policies.allotment:makespan",
    "auto": "gfgen.policies.auto:auto",
}

_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy with bound options, and the text that names it."""

    name: str
    decide: Policy
    options: Mapping[str, Any] = field(default_factory=dict)
    choose: Choose | None = None
    """Chooses from time to time which policy decides; None if this policy always decides itself."""
    is_built_in: bool = False
    """Always returns within a few milliseconds, so no time limit is needed."""


def load_policy(text: str) -> NamedPolicy:
    """The policy that `text` names, with its options bound. Raises: PolicyError."""
    name, *assignments = (part.strip() for part in text.split(","))
    function = function_named(name)
    _check_signature(name, function)
    options = _options(name, function, assignments)
    decide = functools.partial(function, **options) if options else function
    return NamedPolicy(text, decide, options, _chooser_beside(function), is_built_in=name in BUILT_IN)


def policy_of(given: object) -> NamedPolicy:
    """The policy that a program gives: a name, a function, or a class whose instances are such functions.

    Raises: PolicyError.
    """
    if isinstance(given, str):
        return load_policy(given)
    name = str(getattr(given, "__name__", type(given).__name__))
    try:
        decide: Any = given() if inspect.isclass(given) else given
    except Exception as error:  # a user's class may raise anything
        raise PolicyError(f"policy {name}: {in_one_line(error)}") from error
    if not callable(decide):
        raise PolicyError(f"policy {name}: a function, or a class with __call__(self, snapshot), is accepted")
    _check_signature(name, decide)
    return NamedPolicy(name, decide)


def describe(name: str) -> tuple[str, str]:
    """(signature of the options, docstring) of a policy, for `gfgen policies`."""
    function = function_named(name)
    options = ", ".join(f"{key}={parameter.default}" for key, parameter in _parameters(function).items())
    return options, inspect.getdoc(function) or ""


def function_named(name: str, *, option: str = "--policy") -> Callable[..., Any]:
    """What an option names. Raises: PolicyError."""
    target = BUILT_IN.get(name, name)
    module_name, _, attribute = target.rpartition(":") if ":" in target else (target, "", "policy")
    if module_name.endswith(".py") or Path(module_name).is_file():
        module = _imported(module_name, Path(module_name), option)
    elif ":" in target:
        module = _imported(module_name, None, option)
    else:
        near = nearest(name, BUILT_IN)
        hint = f"did you mean {near}? " if near else ""
        raise PolicyError(
            f"--policy {name}: unknown; {hint}built in: {', '.join(BUILT_IN)}; "
            "or package.module:attribute, or a file's path"
        )
    function = getattr(module, attribute, None)
    if not callable(function):
        raise PolicyError(f"{option} {name}: {module_name} has no function {attribute}")
    return function  # type: ignore[no-any-return]


def _chooser_beside(function: Callable[..., Any]) -> Choose | None:
    """The function `choose_NAME` of the module in which the policy NAME is defined."""
    module: Mapping[str, Any] = getattr(function, "__globals__", {})
    return module.get(f"choose_{getattr(function, '__name__', '')}")


def _imported(name: str, path: Path | None, option: str) -> Any:
    """The module of this name, or in this file, a user's, which may raise anything."""
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        if path is None:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise PolicyError("not a Python file" if path.is_file() else "no such file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = str(error) if isinstance(error, PolicyError) else in_one_line(error)
        raise PolicyError(f"{option}: cannot import {name}: {reason}") from error


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    accepted = "a function policy(snapshot, *, option: int = 1) is accepted"
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "a class" if inspect.isclass(function) else "asynchronous"
        raise PolicyError(f"--policy {name}: it is {kind}; {accepted}")
    try:
        _signature(function).bind(None)
    except (TypeError, ValueError) as error:
        reason = f"it cannot be called with a snapshot alone ({error})"
        raise PolicyError(f"--policy {name}: {reason}; {accepted}") from None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature with annotations as types, or as text if they cannot be evaluated."""
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # an annotation may exist only for type checkers
        return inspect.signature(function)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = _signature(function).parameters
    return {key: p for key, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _options(name: str, function: Callable[..., Any], assignments: list[str]) -> dict[str, Any]:
    parameters = _parameters(function)
    options = {}
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals or key not in parameters:
            accepted = ", ".join(parameters) or "none"
            raise PolicyError(f"--policy {name}: no option {assignment!r}; options: {accepted}")
        if key in options:
            raise PolicyError(f"--policy {name}: {key} is given twice")
        options[key] = _converted(name, key, value, parameters[key])
    return options


def _converted(name: str, key: str, value: str, parameter: inspect.Parameter) -> Any:
    annotation, accepted = parameter.annotation, list[range | tuple[Any, ...]]()
    if get_origin(annotation) is Annotated:
        accepted = [note for note in annotation.__metadata__ if isinstance(note, range | tuple) and note]
        annotation = annotation.__origin__
    kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "str")
    if kind == "bool":
        if value.lower() in ("true", "false", "1", "0", "yes", "no"):
            return value.lower() in ("true", "1", "yes")
        raise PolicyError(f"--policy {name}: {key} = {value}: true or false is accepted")
    try:
        converted = _TYPES.get(kind, str)(value)
    except ValueError:
        raise PolicyError(f"--policy {name}: {key} = {value}: a value of type {kind} is accepted") from None
    for values in accepted:
        if converted not in values:
            raise PolicyError(f"--policy {name}: {key} = {value}: {_words(values)} is accepted")
    return converted


def _words(values: range | tuple[Any, ...]) -> str:
    if isinstance(values, range):
        return f"a whole number from {values.start} to {values.stop - 1}"
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
