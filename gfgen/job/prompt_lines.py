"""Lines of prompts as A1111 and kohya write them: options, and LoRAs in angle brackets.

    --prompt "a fox" --steps 4 --sampler_name "Euler a"       A1111, "prompts from file or textbox"
    a fox --n blurry --w 640 --h 480 --d 7 --s 4 --l 3        kohya, sample prompts
    <lora:ink:0.8> a fox                                      a file of a folder (--lora-dir)

Source: the options that the scripts of both projects document.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gfgen.errors import JobError, Problem, nearest
from gfgen.job.shared import number_of
from gfgen.job.weighted import AUTO, PLAIN

A1111, KOHYA, LORAS = "options of A1111", "options of kohya", "<lora:...>"
OF_WEIGHTS = "; weights such as (red:1.3) act on models with CLIP encoders (--prompt-syntax plain: on none)"
OF_A1111 = {
    **{name: name for name in ("prompt", "negative_prompt", "seed", "steps", "width", "height")},
    "cfg_scale": "guidance_scale",
    "sampler_name": "scheduler",
    "sd_model": "model",
    "batch_size": "num_images",
    "n_iter": "num_images",
}
OF_KOHYA = dict(n="negative_prompt", w="width", h="height", d="seed", s="steps", l="guidance_scale")
SUFFIX = ".safetensors"
_TEXTS = ("prompt", "negative_prompt", "scheduler", "model")
_OPTION = re.compile(r"(?:^|\s)--([A-Za-z]\w*)(?=\s|$)")
_LORA = re.compile(r"<lora:([^<>:]+)(?::([^<>:]*))?>")


@dataclass(slots=True)
class PromptLines:
    """Reads lines of prompts, and counts what it recognised in them."""

    is_plain: bool = False
    """Take lines as they are."""
    loras: Path | None = None
    """The folder of LoRAs; without it, <lora:...> stays text."""
    syntax: str = AUTO
    """Of prompts on lines of A1111."""
    recognised: Counter[str] = field(default_factory=Counter)

    def told(self, kind: str) -> str:
        """The kind of a file with what was recognised in it."""
        weights = OF_WEIGHTS if A1111 in self.recognised and self.syntax != PLAIN else ""
        return f"{kind} with {', '.join(self.recognised)}{weights}" if self.recognised else kind

    def job(self, line: str) -> Mapping[str, Any]:
        """The fields of a line. Raises: JobError for an option that is not known, or has no value."""
        if self.is_plain:
            return {"prompt": line}
        lora: dict[str, Any] = {}
        if self.loras is not None and (loras := _LORA.findall(line)):
            self.recognised[LORAS] += 1
            line = " ".join(_LORA.sub("", line).split())
            files = [(f"{name.removesuffix(SUFFIX)}{SUFFIX}", scale or "1") for name, scale in loras]
            lora["lora"] = [
                {"path": str(self.loras / file), "scale": number_of(scale)} for file, scale in files
            ]
        names = _OPTION.findall(line)
        found: dict[str, Any] = {"prompt": line}
        if line.startswith("--") and "prompt" in names:
            found = {**dict(self._options(A1111, OF_A1111, _words(line))), "prompt_syntax": self.syntax}
        elif OF_KOHYA.keys() & names and not line.startswith("--"):
            prompt, *rest = _OPTION.split(line)
            options = zip(rest[::2], map(str.strip, rest[1::2]), strict=True)
            found = {"prompt": prompt.strip(), **dict(self._options(KOHYA, OF_KOHYA, options))}
        return found | lora

    def _options(
        self, kind: str, known: Mapping[str, str], options: Iterator[tuple[str, str]]
    ) -> Iterator[tuple[str, Any]]:
        self.recognised[kind] += 1
        num_images, given = 1, set[str]()
        for name, text in options:
            if name not in known:
                near = nearest(name, known)
                accepted = f"did you mean --{near}?" if near else f"--{', --'.join(known)} are accepted"
                accepted = f"is none of the {kind}; {accepted}; with --plain, lines are taken as they are"
                raise JobError(Problem.of(f"--{name}", text or None, accepted))
            if name in given:
                raise JobError(Problem.of(f"--{name}", text or None, "is there twice"))
            given.add(name)
            field_name, value = known[name], text if known[name] in _TEXTS else number_of(text)
            if field_name == "num_images" and isinstance(value, int):
                value = num_images = num_images * value
            yield field_name, value


def _words(line: str) -> Iterator[tuple[str, str]]:
    """The options of a line and their values: all words up to the next option, in quotes or not."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise JobError(Problem.of(None, line, f"its quotes are not closed ({error})")) from None
    while words:
        name = words.pop(0)
        value = []
        while words and not words[0].startswith("--"):
            value.append(words.pop(0))
        yield name.removeprefix("--"), " ".join(value)
