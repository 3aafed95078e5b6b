"""A long list of records, each kept as its differences from one that is like it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

from gfgen.job.spec import JobSpec

T = TypeVar("T")
FEW = 10_000  # records that are kept as they are, and the most that are unpacked at once


class Form:
    """What records of one kind consist of: frozen dataclasses with slots, by their path, inner ones first."""

    def __init__(self, parts: Mapping[str, type[Any]], alike: Callable[[Any], object]) -> None:
        named = {
            part: [(f"{part}.{each.name}".lstrip("."), getattr(kind, each.name)) for each in fields(kind)]
            for part, kind in parts.items()
        }
        self._setters = [
            (part, parts[part], [(path, slot.__set__) for path, slot in slots])
            for part, slots in named.items()
        ]
        self.values = attrgetter(
            *[path for slots in named.values() for path, _ in slots if path not in parts]
        )
        self.alike = alike  # equal for records with few differences

    def made(self, values: Iterator[Any]) -> Any:
        known: dict[str, Any] = {}
        for part, kind, setters in self._setters:
            record: Any = object.__new__(kind)
            for path, set_value in setters:
                set_value(record, known[path] if path in known else next(values))
            known[part] = record
        return known[""]


SPECS = Form({"": JobSpec}, lambda spec: (spec.model, spec.width, spec.height, spec.frames, spec.steps))


class Packed(Sequence[T]):
    """Each access makes a record anew, in 5 to 15 us; a job takes a quarter of a kilobyte instead of two."""

    def __init__(self, form: Form, records: Iterable[T] = ()) -> None:
        self._form = form
        self._rows: list[bytes] = []
        self._examples: list[tuple[Any, ...]] = []
        self._numbers: dict[object, int] = {}
        self.extend(records)

    def extend(self, records: Iterable[T]) -> None:
        for record in records:
            values = self._form.values(record)
            number = self._numbers.setdefault(self._form.alike(record), len(self._examples))
            if number == len(self._examples):
                self._examples.append(values)
            pairs = enumerate(zip(values, self._examples[number], strict=True))
            own = [(idx, value) for idx, (value, like) in pairs if value is not like and value != like]
            self._rows.append(pickle.dumps((number, own), pickle.HIGHEST_PROTOCOL))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        number, own = pickle.loads(self._rows[place])
        values = list(self._examples[number])
        for idx, value in own:
            values[idx] = value
        return self._form.made(iter(values))
