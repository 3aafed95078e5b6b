"""Fields that several jobs share: the defaults of a file, and the overrides of a command line.

overrides (--set) count before a line's own fields, these before the file's defaults, and these before
fallbacks (--lora).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from gfgen.errors import InputError, Problem
from gfgen.job.fields import (
    FIELDS,
    MAX_YEAR,
    MIN_YEAR,
    Refused,
    parse_duration,
    parse_fields,
    plain_name,
    shown,
    suggestion,
)
from gfgen.job.images import NoImages

OWN_FIELDS = ("id", "output")
VARIATION_FIELDS = ("vary", "seeds", "num_images")
"""Fields of a line, not of a job (variations.py)."""
SETTABLE_VARIATIONS = ("seeds", "num_images")
"""Those of the variation fields that the command line can give to all lines."""
SIDES = {"size", "width", "height"}
SEEDS = {"seed", "seeds"}
MAX_JOBS = 100_000
"""Of a file, and of a line with variations."""


def is_defaults(mapping: Mapping[str, object]) -> bool:
    return list(mapping) == ["defaults"]


def is_template(name: str, value: object) -> bool:
    """Whether the value of `output` gives each job its own name."""
    return name == "output" and isinstance(value, str) and "{id}" in value


def has_one_side(names: Set[str]) -> bool:
    """Whether these fields give only one side of a size, so that the other one comes from elsewhere."""
    return len(SIDES & names) == 1 and "size" not in names


def over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of both; those of `upper` count. A size replaces a width and a height, and the reverse.

    `seed` and `seeds` replace each other, too.
    """
    if not lower or not upper:
        return upper or lower
    for names in (SIDES, SEEDS):
        if not names.isdisjoint(upper):
            lower = {name: value for name, value in lower.items() if name not in names}
    return {**lower, **upper}


def check_defaults(defaults: object) -> list[Problem]:
    """Every problem of the defaults of a file, without the line."""
    if not isinstance(defaults, Mapping):
        example = '{"defaults": {"steps": 20, "size": "832x480"}}'
        return [Problem(None, "defaults", shown(defaults), f"an object of fields, such as {example}")]
    own = [
        Problem(None, name, shown(defaults[name]), "each job needs its own; write it on the job's line")
        for name in OWN_FIELDS
        if name in defaults and not is_template(name, defaults[name])
    ]
    # The lines check files, for which the folder counts, and the sides, which may come from both.
    alone = {
        name: value
        for name, value in defaults.items()
        if name not in ("image", "files", "lora", *VARIATION_FIELDS)
        and (name not in OWN_FIELDS or is_template(name, value))
    }
    example_job = over({"prompt": "an example"}, alone)
    _, problems = parse_fields(example_job, images=NoImages(""))
    is_half = has_one_side(alone.keys())
    return own + [
        replace(problem, field=problem.field and f"defaults.{problem.field}")
        for problem in problems
        if not (is_half and problem.field in SIDES and problem.value is None)
    ]


def parse_overrides(options: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Fields of (option, "NAME=VALUE") pairs, with which every job is read; the last value of a name counts.

    Raises: InputError for the first value that its field does not accept.
    """
    found: dict[str, Any] = {}
    for option, text in options:
        name, equals, value = text.partition("=")
        field = FIELDS.get(name)
        if not equals:
            raise InputError(f"{option} {text}: NAME=VALUE is accepted, such as {option} steps=20")
        if name in SEEDS and SEEDS & found.keys() - {name}:
            raise InputError(f"{option}: seed and seeds exclude each other; give one of them")
        if name in SETTABLE_VARIATIONS:
            found = dict(over(found, {name: value_of(name, value)}))  # the lines check it
            continue
        if field is None:
            hint = suggestion(name, FIELDS) or f"the fields of a job are {', '.join(FIELDS)}"
            raise InputError(f"{option}: {plain_name(name)}: not a field; {hint}")
        if name in OWN_FIELDS and not is_template(name, value):
            raise InputError(f"{option}: {name}: each job needs its own; write it in the job file")
        found = dict(over(found, {name: value_of(name, value)}))
        try:
            field.parse(found[name])
        except Refused as refused:
            raise InputError(f"{option}: {field.refusal(found[name], str(refused))}") from None
    return found


def parse_loras(texts: Iterable[str]) -> list[dict[str, Any]]:
    """`lora` of jobs of texts FILE[:SCALE]; relative paths count from the current folder.

    Raises: InputError for an empty path or a scale that jobs cannot have.
    """
    found: list[dict[str, Any]] = []
    for text in texts:
        path, _, scale = text.rpartition(":")
        number = number_of(scale)
        if not path or isinstance(number, str):
            path, number = text, 1
        here = Path(path).expanduser().absolute()
        found.append({"path": str(here) if here.exists() else path, "scale": number})
    try:
        if found:
            FIELDS["lora"].parse(found)
    except Refused as refused:
        raise InputError(f"--lora {' '.join(texts)}: {refused}") from None
    return found


def value_of(name: str, text: str) -> Any:
    """The value of a field that a command line or a table gives as a text."""
    field = FIELDS.get(name)
    if field is not None and field.schema.get("type") == "string":
        return text
    value = number_of(text)
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def number_of(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


_CLOCK_FORMATS = ("%H:%M", "%H:%M:%S")
_ACCEPTED = 'a time of day like "06:00", a time like "2026-11-21T06:00", or a duration like "8h" is accepted'


def closing_at(text: str, *, now: float, option: str = "--until") -> float:
    """Unix time of what an option says; a time of day is the next one on this machine's clock.

    Raises: InputError for what is no time, and for a time that has passed.
    """
    moment = _time_of_day(text, now) or _date_and_time(text)
    if moment is None:
        duration_s = parse_duration(text)
        if not duration_s:
            raise InputError(f"{option} {text!r}: {_ACCEPTED}")
        return now + duration_s
    if not MIN_YEAR <= moment.year <= MAX_YEAR:
        raise InputError(f"{option} {text!r}: a year from {MIN_YEAR} to {MAX_YEAR} is accepted")
    if moment.timestamp() <= now:
        raise InputError(f"{option} {text!r}: has passed; {_ACCEPTED}")
    return moment.timestamp()


def _time_of_day(text: str, now: float) -> datetime | None:
    today = datetime.fromtimestamp(now)
    for form in _CLOCK_FORMATS:
        try:
            at = datetime.strptime(text.strip(), form).time()
        except ValueError:
            continue
        moment = datetime.combine(today.date(), at)
        if moment.timestamp() <= now:
            moment = datetime.combine(today.date() + timedelta(days=1), at)
        return moment
    return None


def _date_and_time(text: str) -> datetime | None:
    """A date without a time of day is refused: 2026-11-21 could mean its begin or its end."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return moment if ":" in text else None
