"""Local variables of a pipeline's call as plain data: named tensors, and one text for all the rest.

The text is a pickle. Values that belong to the pipeline (components, their parts and configs) are stored as
paths from it, all others by content. A value that several variables share is stored once and shared again.
Tensors keep the order of their dimensions in memory, on which kernels and hence the last bits of results may
depend.
"""

from __future__ import annotations

import base64
import copyreg
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import pickle
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
"""Name of the pickle (base64) among an artifact's scalars."""
PACKAGES = ("diffusers", "transformers", OWN_CODE)
"""Objects of other packages' classes are not stored."""

_PLAIN = (bool, int, float, str, list, tuple, torch.Tensor)
_BY_PICKLE = frozenset((type(None), bool, int, float, str, list, tuple, dict, torch.dtype))
_AS_USUAL = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(enum.Enum, set, slice, range, torch.dtype, torch.Size, np.generic, np.dtype),
)
"""What pickle stores by itself, besides what is in `_PLAIN`."""


def pack(values: Mapping[str, Any], parts: Mapping[str, Any]) -> Fields:
    """Values as plain data; `parts` are those of the pipeline (`parts_of`).

    Raises: NotSteppableError that names a variable that cannot be stored.
    """
    content = io.BytesIO()
    packer = _Packer(content, parts)
    packer.dump(list(values))
    for name, value in values.items():
        packer.name = SAMPLE if name == "latents" else ""
        try:
            packer.dump(value)
        except (NotSteppableError, pickle.PicklingError, AttributeError, TypeError) as error:
            raise NotSteppableError(f"variable {name!r} {error}") from None
    return Fields(packer.tensors, {TREE: base64.b64encode(content.getvalue()).decode()})


def unpack(
    fields: Fields, parts: Mapping[str, Any], *, device: torch.device, is_copied: bool
) -> dict[str, Any]:
    """The values that `pack` stored, for a pipeline object with the same parts.

    With `is_copied`, tensors are copies, which may be changed.
    """
    text = fields.scalars[TREE]
    assert isinstance(text, str)
    unpacker = _Unpacker(io.BytesIO(base64.b64decode(text)), parts, fields.tensors, device, is_copied)
    return {name: unpacker.load() for name in unpacker.load()}


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


class _Packer(pickle.Pickler):
    """Several values that share what they have in common."""

    def __init__(self, file: io.BytesIO, parts: Mapping[str, Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[str, torch.Tensor] = {}
        self.name = ""
        """Of the next tensor, if it has one."""
        self._parts = parts
        self._paths = {id(part): name for name, part in parts.items()} | {
            id(config): f"{name}._internal_dict"
            for name, part in parts.items()
            if (config := getattr(part, "_internal_dict", None)) is not None
        }
        self._stored: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        """By address, what is stored beside the pickle, kept alive, and what the pickle says of it."""

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) in _BY_PICKLE:
            return None
        if (path := self._path(value)) is not None:
            return "path", path
        if id(value) in self._stored:
            return self._stored[id(value)][1]
        content = self._content(value)
        if content is not None:
            self._stored[id(value)] = value, (len(self._stored), *content)
            return self._stored[id(value)][1]
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, _AS_USUAL):
            return NotImplemented
        kind = type(value)
        if kind.__module__.partition(".")[0] not in PACKAGES or isinstance(value, torch.nn.Module):
            raise NotSteppableError(f"holds a {kind.__module__}.{kind.__qualname__}")
        items = list(value.items()) if isinstance(value, dict) else value
        state = vars_of(value), list(items) if isinstance(value, (dict, list)) else None
        return copyreg.__newobj__, (kind,), state, None, None, _restore  # type: ignore[attr-defined]

    def _content(self, value: Any) -> tuple[Any, ...] | None:
        """What is needed to make a value again, with its tensors; None if the pickle has it all."""
        if isinstance(value, torch.Tensor):
            return "tensor", *self._tensor(value)
        if isinstance(value, np.ndarray):
            return "array", *self._tensor(torch.from_numpy(np.ascontiguousarray(value)))
        if isinstance(value, PIL.Image.Image):
            return "image", value.mode, *self._tensor(torch.from_numpy(np.array(value)))
        if isinstance(value, torch.Generator):
            return "generator", value.device.type, *self._tensor(value.get_state())
        return ("device", value.type) if isinstance(value, torch.device) else None

    def _path(self, value: Any) -> str | None:
        """Where a value is found in the pipeline, such as "transformer_2"; None if it is not part of it."""
        if (path := self._paths.get(id(value))) is not None or not isinstance(value, torch.nn.Module):
            return path
        for name, part in self._parts.items():
            for inner, module in part.named_modules() if isinstance(part, torch.nn.Module) else ():
                if module is value:
                    return f"{name}.{inner}"
        return None

    def _tensor(self, value: torch.Tensor) -> tuple[str, list[int] | None, str]:
        """Name, order of the dimensions in memory (None for the usual one), and "cpu" if it stays there."""
        value = value.detach()
        place = HOST if value.device.type == "cpu" else ""
        name = self.name or f"{place}t{len(self.tensors)}"
        self.name = ""
        order = None
        if not value.is_contiguous():
            by_stride = sorted(range(value.dim()), key=value.stride, reverse=True)
            order = by_stride if value.permute(by_stride).is_contiguous() else None
        self.tensors[name] = value.permute(order) if order else value.contiguous()
        return name, order, value.device.type


def _restore(found: Any, state: tuple[dict[str, Any], list[Any] | None]) -> None:
    """Give a new object its attributes and items, whatever its class does when they are set."""
    attributes, items = state
    if isinstance(found, dict):
        for key, value in items or ():
            dict.__setitem__(found, key, value)
    elif isinstance(found, list):
        found.extend(items or ())
    for key, value in attributes.items():
        object.__setattr__(found, key, value)


class _Unpacker(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        parts: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        is_copied: bool,
    ) -> None:
        super().__init__(file)
        self._parts = parts
        self._tensors = tensors
        self._target = device
        self._is_copied = is_copied
        self._made: dict[int, Any] = {}

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        number, *content = pid
        if number == "path":
            name, *attributes = content[0].split(".")
            return functools.reduce(getattr, attributes, self._parts[name])
        if number not in self._made:
            self._made[number] = self._value(*content)
        return self._made[number]

    def _value(self, kind: str, *content: Any) -> Any:
        match kind:
            case "tensor":
                return self._tensor(*content)
            case "array":
                return self._tensor(*content).numpy()
            case "image":
                mode, *tensor = content
                return PIL.Image.fromarray(self._tensor(*tensor).numpy()).convert(mode)
            case "generator":
                device, *tensor = content
                generator = torch.Generator(self._device(device))
                generator.set_state(self._tensor(*tensor))
                return generator
        return self._device(*content)

    def _tensor(self, name: str, order: list[int] | None, device: str) -> torch.Tensor:
        value = self._tensors[name]
        moved = value.to(self._device(device))
        if self._is_copied and moved is value:
            moved = value.clone()
        return moved.permute([order.index(dim) for dim in range(len(order))]) if order else moved

    def _device(self, kind: str) -> torch.device:
        return torch.device("cpu") if kind == "cpu" else self._target


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
