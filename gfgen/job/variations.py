"""Variations: a line of a job file that stands for several jobs.

mapping -> variations -> mappings of single jobs, in the order: matrix, prompts, seeds, number of images
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gfgen.errors import JobError, Problem
from gfgen.job.fields import FIELDS, Refused, plain_name, shown, suggestion
from gfgen.job.shared import MAX_JOBS, OWN_FIELDS, SIDES, VARIATION_FIELDS, has_one_side, over

MAX_LIST_BYTES = 2**24
CHOICE = re.compile(r"\{([^{}]*)\}")
SEED_RANGE = re.compile(r" *([0-9]{1,19}) *\.\. *([0-9]{1,19}) *")
TEXTS = ("prompt", "negative_prompt")


def variations(
    mapping: Mapping[str, Any], *, fixed: Mapping[str, Any], folder: Path | None
) -> Iterator[Mapping[str, Any]]:
    """The single jobs of a line: the line itself, unless it asks for more.

    A matrix does not vary the fields in `fixed`; a size or a side in it fixes all of them. Lists of texts
    are files relative to `folder`; None refuses them.

    Raises: JobError when the line asks for something that it cannot have.
    """
    asked = [name for name in VARIATION_FIELDS if mapping.get(name) is not None]
    if not asked:
        return iter((mapping,))
    plain = {name: value for name, value in mapping.items() if name not in VARIATION_FIELDS}
    axes = _axes(mapping, plain, fixed, folder)
    number = _number_of_images(mapping.get("num_images"))
    count = number * math.prod(len(values) for values in axes.values())
    if count > MAX_JOBS:
        raise _refused(asked[0], mapping[asked[0]], f"this line makes {count:,} jobs; at most {MAX_JOBS:,}")
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
            job["seed"] = _later_seed(job["seed"], image)
        if is_numbered and isinstance(job.get("id"), str):
            job["id"] += f"-{position}"
        if is_numbered and isinstance(job.get("output"), str) and "{id}" not in job["output"]:
            stem, dot, suffix = job["output"].rpartition(".")
            job["output"] = f"{stem}-{position}{dot}{suffix}"
        yield over(plain, job)


def _later_seed(seed: object, image: int) -> object:
    try:
        return (FIELDS["seed"].parse(seed) + image) % 2**63  # type: ignore[operator]
    except Refused:
        return seed  # the job's own check reports it


def _axes(
    mapping: Mapping[str, Any], plain: Mapping[str, Any], fixed: Mapping[str, Any], folder: Path | None
) -> dict[str, Sequence[Any]]:
    vary = mapping.get("vary")
    if vary is not None and not isinstance(vary, (bool, Mapping)):
        raise _refused("vary", vary, 'true, or lists of values, such as {"steps": [4, 8]}')
    matrix = vary if isinstance(vary, Mapping) else {}
    for name, values in matrix.items():
        if name not in FIELDS or name in OWN_FIELDS:
            hint = "each job needs its own" if name in OWN_FIELDS else suggestion(name, FIELDS)
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
    if not 1 <= found.stop - found.start <= MAX_JOBS:
        raise _refused(
            "seeds", seeds, f'a range like "1..8" of at most {MAX_JOBS:,} seeds, or a list like [3, 5]'
        )
    return found


def _number_of_images(number: object) -> int:
    if number is None:
        return 1
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_JOBS:
        raise _refused("num_images", number, f"a whole number from 1 to {MAX_JOBS:,}")
    return number


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
    if math.prod(map(len, choices)) > MAX_JOBS:
        raise _refused(name, text, f"a text that stands for at most {MAX_JOBS:,} texts")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(name: str, inside: str, folder: Path | None) -> list[str]:
    if not inside.startswith("@"):
        return inside.split("|") if "|" in inside else [f"{{{inside}}}"]
    if folder is None:
        raise _refused(name, f"{{{inside}}}", "lists in files are not accepted over HTTP; write {a|b}")
    path = folder / inside[1:]
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
