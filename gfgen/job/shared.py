"""Fields that several jobs share: the defaults of a file, the overrides of a command line, and variations.

overrides (--set) count before a line's own fields, these before the file's defaults, and these before
fallbacks (--lora). A line with variations stands for several jobs, in the order: matrix, prompts, seeds,
number of images.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from gfgen.errors import InputError, JobError, Problem
from gfgen.job.fields import (
    FIELDS,
    Exponential,
    Refused,
    in_range,
    parse_duration,
    parse_fields,
    parse_moment,
    plain_name,
    shown,
    suggestion,
)
from gfgen.job.images import NoImages
from gfgen.job.spec import later_seed, numbered_name

OWN_FIELDS = ("id", "output")
VARIATION_FIELDS = ("vary", "seeds", "num_images")  # fields of a line, not of a job
SIDES = {"size", "width", "height"}
SEEDS = {"seed", "seeds"}
MAX_JOBS = 1_000_000
MAX_VARIATIONS = 100_000  # jobs of a file, and of one line
MAX_LIST_BYTES = 2**24
_NUM_IMAGES = in_range("num_images", 1, MAX_VARIATIONS, is_whole=True)
CHOICE = re.compile(r"\{([^{}]*)\}")
SEED_RANGE = re.compile(r" *([0-9]{1,20}) *\.\. *([0-9]{1,20}) *")
TEXTS = ("prompt", "negative_prompt")


def is_template(name: str, value: object) -> bool:
    """Whether the value of `output` gives each job its own name."""
    return name == "output" and isinstance(value, str) and re.search(r"\{(id|index)[:}]", value) is not None


def has_one_side(names: Set[str]) -> bool:
    """Whether these fields give only one side of a size, so that the other one comes from elsewhere."""
    return len(SIDES & names) == 1 and "size" not in names


def over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of both; those of `upper` count. Width and height, or seeds, replace `size` or `seed`."""
    if not lower or not upper:
        return upper or lower
    for names in (SIDES, SEEDS):
        if not names.isdisjoint(upper):
            lower = {name: value for name, value in lower.items() if name not in names}
    return {**lower, **upper}


def check_defaults(defaults: object) -> list[Problem]:
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
    """Fields of (option, "NAME=VALUE") pairs, whose last value counts. Raises: InputError."""
    found: dict[str, Any] = {}
    for option, text in options:
        name, equals, value = text.partition("=")
        field = FIELDS.get(name)
        if not equals:
            raise InputError(f"{option} {text}: NAME=VALUE is accepted, such as {option} steps=20")
        if name in SEEDS and SEEDS & found.keys() - {name}:
            raise InputError(f"{option}: seed and seeds exclude each other; give one of them")
        if name in VARIATION_FIELDS[1:]:
            found = dict(over(found, {name: value_of(name, value)}))  # the lines check it
            continue
        if field is None:
            hint = suggestion(name) or f"the fields of a job are {', '.join(FIELDS)}"
            raise InputError(f"{option}: {plain_name(name)}: not a field; {hint}")
        if name in OWN_FIELDS and not is_template(name, value) and option == "--set":
            raise InputError(f"{option}: {name}: each job needs its own; write it in the job file")
        found = dict(over(found, {name: value_of(name, value)}))
        try:
            field.parse(found[name])
        except Refused as refused:
            raise InputError(f"{option}: {field.refusal(found[name], str(refused))}") from None
    return found


def parse_loras(texts: Iterable[str]) -> list[dict[str, Any]]:
    """`lora` of jobs of texts FILE[:SCALE]. Raises: InputError for an empty path or a wrong scale."""
    found: list[dict[str, Any]] = []
    for text in texts:
        path, _, scale = text.rpartition(":")
        number = number_of(scale)
        if not path or isinstance(number, str):
            path, number = text, 1
        here = Path(os.path.expanduser(path)).absolute()
        found.append({"path": str(here) if here.exists() else path, "scale": number})
    try:
        if found:
            FIELDS["lora"].parse(found)
    except Refused as refused:
        raise InputError(f"--lora {' '.join(texts)}: {refused}") from None
    return found


def value_of(name: str, text: Any) -> Any:
    """The value of a field that a command line, a table or a form may give as a text."""
    field = FIELDS.get(name)
    if not isinstance(text, str) or (field is not None and field.schema.get("type") == "string"):
        return text
    value = number_of(text)
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def number_of(text: str) -> int | float | str:
    for kind in (int, Exponential if "e" in text.lower() else float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def variations(
    mapping: Mapping[str, Any], *, fixed: Mapping[str, Any], folder: Path | None
) -> Iterator[Mapping[str, Any]]:
    """The single jobs of a line: the line itself, unless it asks for more.

    A matrix does not vary the fields in `fixed`; one side there fixes the size. Lists are files in `folder`;
    None refuses them. Raises: JobError when the line asks for something that it cannot have.
    """
    asked = [name for name in VARIATION_FIELDS if mapping.get(name) is not None]
    if not asked:
        return iter((mapping,))
    plain = {name: value for name, value in mapping.items() if name not in VARIATION_FIELDS}
    axes = _axes(mapping, plain, fixed, folder)
    try:
        number: Any = _NUM_IMAGES.parse(1 if mapping.get("num_images") is None else mapping["num_images"])
    except Refused as refused:
        raise JobError(_NUM_IMAGES.refusal(mapping["num_images"], str(refused))) from None
    count = number * math.prod(len(values) for values in axes.values())
    if count > MAX_VARIATIONS:
        raise _refused(
            asked[0], mapping[asked[0]], f"this line makes {count:,} jobs; at most {MAX_VARIATIONS:,}"
        )
    return _jobs(plain, axes, number, is_numbered=count > 1)


def _jobs(
    plain: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], number: int, *, is_numbered: bool
) -> Iterator[Mapping[str, Any]]:
    is_half = has_one_side(axes.keys())
    sides = {name: plain[name] for name in ("width", "height") if is_half and name in plain}
    combinations = itertools.product(*axes.values(), range(number))
    for position, (*values, image) in enumerate(combinations, start=1):
        job = dict(over(plain, sides | dict(zip(axes, values, strict=True))))
        if image and job.get("seed") is not None:
            with contextlib.suppress(Refused):  # the job's own check reports it
                job["seed"] = later_seed(FIELDS["seed"].parse(job["seed"]), image)  # type: ignore[arg-type]
        if is_numbered and isinstance(job.get("id"), str):
            job["id"] += f"-{position}"
        output = job.get("output")
        if is_numbered and isinstance(output, str) and not is_template("output", output):
            job["output"] = numbered_name(output, position)
        yield over(plain, job)


def _axes(
    mapping: Mapping[str, Any], plain: Mapping[str, Any], fixed: Mapping[str, Any], folder: Path | None
) -> dict[str, Sequence[Any]]:
    vary = mapping.get("vary")
    if vary is not None and not isinstance(vary, (bool, Mapping)):
        raise _refused("vary", vary, 'true, or lists of values, such as {"steps": [4, 8]}')
    matrix = vary if isinstance(vary, Mapping) else {}
    for name, values in matrix.items():
        if name not in FIELDS or name in OWN_FIELDS:
            hint = "each job needs its own" if name in OWN_FIELDS else suggestion(name)
            accepted = f"not a field that can vary; {hint}" if hint else "not a field that can vary"
            raise JobError(Problem(None, f"vary.{plain_name(name)}", None, accepted))
        if not isinstance(values, list) or not values:
            raise _refused(f"vary.{name}", values, "a list of values")
    constant = set(fixed) if SIDES.isdisjoint(fixed) else {*fixed, *SIDES}
    axes: dict[str, Sequence[Any]] = {name: matrix[name] for name in matrix if name not in constant}
    if vary not in (None, False):
        for name in TEXTS:
            texts = axes.get(name, [plain[name]] if name in plain else [])
            expanded = [one for text in texts for one in _expanded(name, text, folder)]
            if expanded and expanded != [plain.get(name)]:
                axes[name] = expanded
    if (seeds := mapping.get("seeds")) is not None:
        if plain.get("seed") is not None or "seed" in axes or mapping.get("num_images") is not None:
            raise JobError(Problem(None, "seeds", None, "give only one of seeds, seed and num_images"))
        axes["seed"] = _seeds(seeds)
    return axes


def _seeds(seeds: object) -> Sequence[Any]:
    if isinstance(seeds, list) and seeds:
        return seeds
    match = SEED_RANGE.fullmatch(seeds) if isinstance(seeds, str) else None
    found = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not 1 <= found.stop - found.start <= MAX_VARIATIONS:
        raise _refused(
            "seeds", seeds, f'a range like "1..8" of at most {MAX_VARIATIONS:,} seeds, or a list like [3, 5]'
        )
    return found


def _expanded(name: str, text: object, folder: Path | None) -> list[Any]:
    """The texts that `{a|b}` and `{@file}` in a text stand for; braces around anything else stay."""
    if not isinstance(text, str):
        return [text]
    pieces = CHOICE.split(text)
    choices = [
        _choices(name, piece, folder) if position % 2 else [piece] for position, piece in enumerate(pieces)
    ]
    if any(char in piece for piece in pieces[::2] for char in "{}"):
        raise _refused(name, text, 'braces around choices, such as "a {red|blue} fox"; not nested')
    if math.prod(map(len, choices)) > MAX_VARIATIONS:
        raise _refused(name, text, f"a text that stands for at most {MAX_VARIATIONS:,} texts")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(name: str, inside: str, folder: Path | None) -> list[str]:
    if not inside.startswith("@"):
        return inside.split("|") if "|" in inside else [f"{{{inside}}}"]
    if folder is None:
        raise _refused(name, f"{{{inside}}}", "lists in files are not accepted over HTTP; write {a|b}")
    path = folder / os.path.expanduser(inside[1:])
    try:
        if not path.is_file():  # a pipe could block
            raise _refused(name, f"{{{inside}}}", f"there is no file {path}")
        with path.open("rb") as file:
            content = file.read(MAX_LIST_BYTES + 1)
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        raise _refused(name, f"{{{inside}}}", f"{path} cannot be read ({error})") from None
    if len(content) > MAX_LIST_BYTES:
        raise _refused(name, f"{{{inside}}}", f"{path} has more than {MAX_LIST_BYTES // 2**20} MiB")
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise _refused(name, f"{{{inside}}}", f"{path} is empty; write one choice per line")
    return found


def _refused(name: str, value: object, accepted: str) -> JobError:
    return JobError(Problem(None, name, shown(value), accepted))


_ACCEPTED = 'a time of day like "06:00", a time like "2026-11-21T06:00", or a duration like "8h" is accepted'


def closing_at(text: str, *, now: float, option: str = "--until") -> float:
    """Unix time of what an option says, or of the next such time of day. Raises: InputError."""
    try:
        moment = parse_moment(text, now=now)
    except Refused as refused:
        raise InputError(f"{option} {text!r}: {refused} is accepted") from None
    if moment is None:
        duration_s = parse_duration(text)
        if not duration_s:
            raise InputError(f"{option} {text!r}: {_ACCEPTED}")
        return now + duration_s
    if moment.timestamp() <= now:
        raise InputError(f"{option} {text!r}: has passed; {_ACCEPTED}")
    return moment.timestamp()
