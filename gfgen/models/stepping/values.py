"""Local variables of a pipeline's call as plain data: named tensors, and one JSON text for all the rest.

Values that belong to the pipeline (components, their parts and configs) are stored as paths from it, all
others by content. A value that several variables share is stored once and shared again. Tensors keep the
order of their dimensions in memory, on which kernels and hence the last bits of results may depend.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers.configuration_utils import FrozenDict

from gfgen.models.families.adapter import HOST, SAMPLE, Fields
from gfgen.models.loading.components import OWN_CODE
from gfgen.models.stepping.program import NotSteppableError

TREE = "tree"
"""Name of the JSON text among an artifact's scalars."""
PACKAGES = ("diffusers", "transformers", OWN_CODE)
"""Objects of other packages' classes are not stored."""

_PLAIN = (bool, int, float, str, list, tuple, torch.Tensor)

Node = Any
"""JSON: null, true, a number or a string as itself, anything else as a list that begins with its kind."""


def pack(values: Mapping[str, Any], parts: Mapping[str, Any]) -> Fields:
    """Values as plain data; `parts` are those of the pipeline (`parts_of`).

    Raises: NotSteppableError that names a variable that cannot be stored.
    """
    packer = _Packer(parts)
    tree = {name: packer.top(name, value) for name, value in values.items()}
    return Fields(packer.tensors, {TREE: json.dumps(tree)})


def unpack(
    fields: Fields, parts: Mapping[str, Any], *, device: torch.device, is_copied: bool
) -> dict[str, Any]:
    """The values that `pack` stored, for a pipeline object with the same parts.

    With `is_copied`, tensors are copies, which may be changed.
    """
    text = fields.scalars[TREE]
    assert isinstance(text, str)
    unpacker = _Unpacker(parts, fields.tensors, device, is_copied)
    return {name: unpacker.value(node) for name, node in json.loads(text).items()}


def changes_by_use(value: Any) -> bool:
    """Whether a value is, or has in it, an object that calls may change: a generator, a scheduler."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, Mapping):
        return any(map(changes_by_use, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(changes_by_use, value))
    is_ours = type(value).__module__.partition(".")[0] in PACKAGES
    return is_ours and not isinstance(value, torch.nn.Module) and not dataclasses.is_dataclass(value)


def changes_in_calls(part: Any) -> bool:
    """Whether calls set attributes of a part: the pipeline, a scheduler, a guider; not a network."""
    is_ours = type(part).__module__.partition(".")[0] in ("diffusers", OWN_CODE)
    return is_ours and not isinstance(part, torch.nn.Module) and not isinstance(part, FrozenDict)


class _Packer:
    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._parts = parts
        self._name = ""
        """Of the next tensor, if it has one."""
        self._paths = {id(part): name for name, part in parts.items()} | {
            id(config): f"{name}._internal_dict"
            for name, part in parts.items()
            if (config := getattr(part, "_internal_dict", None)) is not None
        }
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        """Shared values by their number; they stay alive, since `_seen` knows them by address."""

    def top(self, name: str, value: Any) -> Node:
        self._name = SAMPLE if name == "latents" else ""
        try:
            return self.value(value)
        except NotSteppableError as error:
            raise NotSteppableError(f"variable {name!r} {error}") from None

    def value(self, value: Any) -> Node:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if (path := self._path(value)) is not None:
            return ["path", path]
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        number = self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        return [*self._content(value), number]

    def _content(self, value: Any) -> list[Node]:
        if isinstance(value, torch.Tensor):
            return ["tensor", *self._tensor(value)]
        if isinstance(value, np.ndarray):
            return ["array", *self._tensor(torch.from_numpy(np.ascontiguousarray(value)))]
        if isinstance(value, np.generic):
            return ["number", value.dtype.name, value.item()]
        if isinstance(value, PIL.Image.Image):
            return ["image", value.mode, *self._tensor(torch.from_numpy(np.array(value)))]
        if isinstance(value, torch.Generator):
            return ["generator", str(value.device), *self._tensor(value.get_state())]
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__module__, type(value).__qualname__, value.name]
        if isinstance(value, (torch.dtype, torch.device)):
            return [type(value).__name__, str(value).removeprefix("torch.")]
        if type(value) in (list, tuple, set, torch.Size):
            return [type(value).__name__, [self.value(item) for item in value]]
        if type(value) is dict:
            return ["dict", self._items(value)]
        if isinstance(value, slice):
            return ["slice", [self.value(x) for x in (value.start, value.stop, value.step)]]
        if isinstance(value, range):
            return ["range", [value.start, value.stop, value.step]]
        return self._by_name(value)

    def _by_name(self, value: Any) -> list[Node]:
        if isinstance(value, types.MethodType):
            return ["method", self.value(value.__self__), value.__name__]
        if isinstance(value, functools.partial):
            return ["partial", self.value(value.func), self.value(value.args), self.value(value.keywords)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            if "<" not in value.__qualname__:
                return ["named", value.__module__, value.__qualname__]
            raise NotSteppableError(f"holds the local function {value.__qualname__}")
        kind = type(value)
        if kind.__module__.partition(".")[0] not in PACKAGES or isinstance(value, torch.nn.Module):
            raise NotSteppableError(f"holds a {kind.__module__}.{kind.__qualname__}")
        items = self._items(value) if isinstance(value, dict) else None
        if isinstance(value, (list, tuple)):
            items = [self.value(item) for item in value]
        return ["object", kind.__module__, kind.__qualname__, self._items(vars_of(value)), items]

    def _path(self, value: Any) -> str | None:
        """Where a value is found in the pipeline, such as "transformer_2"; None if it is not part of it."""
        if (path := self._paths.get(id(value))) is not None or not isinstance(value, torch.nn.Module):
            return path
        for name, part in self._parts.items():
            for inner, module in part.named_modules() if isinstance(part, torch.nn.Module) else ():
                if module is value:
                    return f"{name}.{inner}"
        return None

    def _items(self, value: Mapping[Any, Any]) -> list[Node]:
        return [[self.value(key), self.value(item)] for key, item in value.items()]

    def _tensor(self, value: torch.Tensor) -> list[Node]:
        """Name, order of the dimensions in memory (null for the usual one), and "cpu" if it stays there."""
        value = value.detach()
        place = HOST if value.device.type == "cpu" else ""
        name = self._name or f"{place}t{len(self.tensors)}"
        self._name = ""
        order = None
        if not value.is_contiguous():
            by_stride = sorted(range(value.dim()), key=value.stride, reverse=True)
            order = by_stride if value.permute(by_stride).is_contiguous() else None
        self.tensors[name] = value.permute(order) if order else value.contiguous()
        return [name, order, value.device.type]


class _Unpacker:
    def __init__(
        self,
        parts: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        is_copied: bool,
    ) -> None:
        self._parts, self._tensors = parts, tensors
        self._target, self._is_copied = device, is_copied
        self._shared: dict[int, Any] = {}

    def value(self, node: Node) -> Any:
        found: Any = node
        match node:
            case ["path", path]:
                name, *attributes = path.split(".")
                return functools.reduce(getattr, attributes, self._parts[name])
            case ["same", number]:
                return self._shared[number]
            case ["list", items, number]:  # these three may hold themselves
                self._shared[number] = found = []
                found.extend(map(self.value, items))
            case ["dict", items, number]:
                self._shared[number] = found = {}
                found.update(self._pairs(items))
            case ["object", module, name, attributes, items, number]:
                assert module.partition(".")[0] in PACKAGES
                kind = _named(module, name)
                self._shared[number] = found = kind.__new__(kind)
                self._fill(found, attributes, items)
            case [kind, *given, number]:
                self._shared[number] = found = self._made(kind, given)
        return found

    def _made(self, kind: str, given: list[Any]) -> Any:
        match kind, *given:
            case "tensor", *tensor:
                return self._tensor(*tensor)
            case "array", *tensor:
                return self._tensor(*tensor).numpy()
            case "number", dtype, number:
                return np.dtype(dtype).type(number)
            case "image", mode, *tensor:
                return PIL.Image.fromarray(self._tensor(*tensor).numpy()).convert(mode)
            case "generator", device, *tensor:
                generator = torch.Generator(self._device(device))
                generator.set_state(self._tensor(*tensor))
                return generator
            case "dtype", name:
                return getattr(torch, name)
            case "device", name:
                return self._device(name)
            case "tuple" | "set" | "Size", items:
                makers: dict[str, Any] = {"tuple": tuple, "set": set, "Size": torch.Size}
                return makers[kind](list(map(self.value, items)))
            case "slice" | "range", bounds:
                return (slice if kind == "slice" else range)(*map(self.value, bounds))
            case "method", owner, name:
                return getattr(self.value(owner), name)
            case "partial", *parts:
                func, args, keywords = map(self.value, parts)
                return functools.partial(func, *args, **keywords)
            case "module", name:
                return importlib.import_module(name)
            case "enum", module, name, member:
                return _named(module, name)[member]
        module, name = given
        return _named(module, name)

    def _fill(self, found: Any, attributes: list[Node], items: Node) -> None:
        if isinstance(found, dict):
            for key, value in self._pairs(items).items():
                dict.__setitem__(found, key, value)
        elif isinstance(found, list):
            found.extend(map(self.value, items))
        for key, value in self._pairs(attributes).items():
            object.__setattr__(found, key, value)

    def _pairs(self, items: list[Node]) -> dict[Any, Any]:
        return {self.value(key): self.value(value) for key, value in items}

    def _tensor(self, name: str, order: list[int] | None, device: str) -> torch.Tensor:
        value = self._tensors[name]
        moved = value.to(self._device(device))
        if self._is_copied and moved is value:
            moved = value.clone()
        return moved.permute([order.index(dim) for dim in range(len(order))]) if order else moved

    def _device(self, name: str) -> torch.device:
        return torch.device("cpu") if name == "cpu" else self._target


def _named(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def vars_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, with or without slots."""
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )


def parts_of(pipeline: Any) -> dict[str, Any]:
    """The pipeline, its components and its processors of pictures, by name."""
    parts = {
        name: part
        for name, part in vars(pipeline).items()
        if name in pipeline.components or type(part).__module__.partition(".")[0] in PACKAGES
        if part is not None and not inspect.isclass(part) and not isinstance(part, (*_PLAIN, Mapping))
    }
    return {"self": pipeline, **parts}
