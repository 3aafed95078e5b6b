"""Prompts in the syntax of A1111: weights of words, and parts that are encoded apart.

    a ((red)) fox BREAK [night]  ->  [[("a", 1), ("red", 1.21), ("fox", 1)], [("night", 0.909091)]]

Source: "Attention/emphasis", "Prompt editing" and "BREAK keyword" in the documentation of A1111's features.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from itertools import groupby

from gfgen.errors import JobError, Problem
from gfgen.job.spec import JobSpec

A1111, AUTO, PLAIN = SYNTAXES = ("a1111", "auto", "plain")  # auto: `a1111` for models that take weights
NO_CLIP = "needs a model with CLIP text encoders, as Stable Diffusion 1, 2 and XL have; leave it out"
NO_PACKAGE = "needs a package: pip install 'gfgen[prompts]'; 'plain' takes prompts as they are"
Parts = list[list[tuple[str, float]]]  # of each part its texts in order, each with its weight
MAX_OPEN = 50  # brackets inside each other; texts of HTTP requests must not take seconds
_FACTORS = {"(": 1.1, "[": 1 / 1.1}
_OPENING = {")": "(", "]": "["}
_TOKEN = re.compile(
    r"\\[()\[\]\\]|(?::\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))\s*)?[)\]]|[(\[|]|\b(?:AND|BREAK)\b"
    r"|(?:(?!\b(?:AND|BREAK)\b)[^()\[\]|\\:])+|.",
    re.DOTALL,
)


def weighted(text: str) -> Parts:
    """Raises: ValueError for what is not supported."""
    found: list[tuple[str | None, float]] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}

    def scale(start: int, factor: float) -> None:
        found[start:] = [(piece, weight * factor) for piece, weight in found[start:]]

    for match in _TOKEN.finditer(text):
        token, number = match[0], match["number"]
        bracket = "" if token[0] == "\\" else _OPENING.get(token[-1], "")
        if token == "AND":
            raise ValueError("AND (composable prompts) is not supported; write one prompt without it")
        if opened["["] and (token == "|" or (number and bracket == "[")):
            shown = " ".join(text[text.rindex("[", 0, match.start()) : match.end()].split())
            raise ValueError(f"{shown} (prompt editing) is not supported; write one text without it")
        if sum(map(len, opened.values())) > MAX_OPEN:
            raise ValueError(f"more than {MAX_OPEN} open brackets: such a text is not supported; close them")
        if token in _FACTORS:
            opened[token].append(len(found))
        elif bracket and opened[bracket]:
            if number and float(number) < 0:
                raise ValueError(f"{token} is a weight below 0; name it in negative_prompt instead")
            scale(opened[bracket].pop(), float(number) if number else _FACTORS[bracket])
        else:
            found.append((None if token == "BREAK" else re.sub(r"^\\(?=.)", "", token), 1.0))
    for bracket, starts in opened.items():  # those that are never closed reach to the end
        for start in starts:
            scale(start, _FACTORS[bracket])
    parts: Parts = []
    for is_break, pieces in groupby(found, key=lambda piece: piece[0] is None):
        if not is_break:
            by_weight = groupby(pieces, key=lambda piece: round(piece[1], 6))
            texts = [("".join(str(text) for text, _ in same).strip(), weight) for weight, same in by_weight]
            parts.append([each for each in texts if each[0]])
    return [part for part in parts if part] or [[("", 1.0)]]


def with_known_syntax(spec: JobSpec, *, has_clip: bool = False) -> JobSpec:
    """The job with A1111 or None as syntax; `has_clip`: its model takes weights. Raises: JobError."""
    if spec.prompt_syntax is None:
        return spec
    if not has_clip and spec.prompt_syntax == AUTO:
        return replace(spec, prompt_syntax=None)
    if not has_clip or importlib.util.find_spec("compel") is None:
        raise JobError(Problem.of("prompt_syntax", spec.prompt_syntax, NO_PACKAGE if has_clip else NO_CLIP))
    problems = [
        Problem.of(f"args.{name}", value, "has no effect with prompt_syntax; leave it out")
        for name in ("prompt_2", "negative_prompt_2", "clip_skip")
        if (value := (spec.args or {}).get(name)) is not None
    ]
    for name in ("prompt", "negative_prompt"):
        try:
            weighted(getattr(spec, name) or "")
        except ValueError as error:
            problems.append(Problem.of(name, None, f'{error}, or give "prompt_syntax": "{PLAIN}"'))
    if problems:
        raise JobError(*problems)
    return replace(spec, prompt_syntax=A1111)
