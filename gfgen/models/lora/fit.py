"""Whether LoRAs fit a model, before anything is loaded. Imports no torch.

Headers answer for files with diffusers' own names, of linear layers. For other formats a child process
(outlines.py) lets diffusers convert the file and attach it to a model without weights.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gfgen.errors import ModelError
from gfgen.models.geometry.weight_files import read_header
from gfgen.models.geometry.weights import component_files
from gfgen.system.lifeline import module_command, module_environment

TIMEOUT_S = 300.0
SECOND = "transformer_2"
"""The second expert, into which diffusers loads on request only."""
KEPT_FILES = 16
"""LoRAs whose factors stay on a rank's device; the least recently used goes first."""
FACTOR = re.compile(r"(transformer|unet)\.(.+)\.lora_([AB])\.weight")
"""Names of factors as diffusers saves them."""
ADAPTER_METADATA = "lora_adapter_metadata"
"""Key of a file's metadata with settings of peft, such as alpha."""


@dataclass(frozen=True, slots=True)
class LoraFit:
    """What a LoRA changes in a model."""

    error: str | None = None
    """Why it does not fit; the rest is empty then."""
    changed: Mapping[str, int] = field(default_factory=dict)
    """By weight, such as "transformer.blocks.0.attn1.to_q.weight": its parameters."""
    num_factors: int = 0
    """Parameters of the file."""
    components: tuple[str, ...] = ()
    """The models of the pipeline that LoRAs can change."""

    def changed_in(self, target: str | None) -> Mapping[str, int]:
        """The weights that it changes in one model, or in all."""
        if target is None:
            return self.changed
        return {name: number for name, number in self.changed.items() if name.startswith(f"{target}.")}


class LoraFits:
    """Answers for pairs of a model and a LoRA; each is looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, str], LoraFit] = {}

    def look(self, wanted: Iterable[tuple[Path, str, Path]]) -> None:
        """Look at pairs of a checkpoint and a LoRA, given by its hash and path, all at once.

        Raises: ModelError when the child process fails.
        """
        new = {(checkpoint, sha256): path for checkpoint, sha256, path in wanted}
        new = {key: path for key, path in new.items() if key not in self._known}
        for (checkpoint, sha256), path in list(new.items()):
            if (fit := by_headers(checkpoint, path)) is not None:
                self._known[checkpoint, sha256] = fit
                del new[checkpoint, sha256]
        if new:
            found = _by_child([(checkpoint, path) for (checkpoint, _), path in new.items()])
            self._known |= dict(zip(new, found, strict=True))

    def of(self, checkpoint: Path, sha256: str) -> LoraFit:
        """The answer for a pair that was looked at."""
        return self._known[checkpoint, sha256]


def by_headers(checkpoint: Path, path: Path) -> LoraFit | None:
    """The answer if headers show that the LoRA fits; None if diffusers has to be asked."""
    try:
        entries = read_header(path)
        files = component_files(checkpoint)
        if any(file.suffix == ".gguf" for each in files.values() for file in each.files):
            return LoraFit(error=f"{path}: cannot be merged into a GGUF model; give bf16 or fp16 weights")
        shapes: dict[str, dict[str, list[int]]] = {}
        for name, entry in entries.items():
            if (match := FACTOR.fullmatch(name)) is None:
                return None
            shapes.setdefault(f"{match[1]}.{match[2]}.weight", {})[match[3]] = entry["shape"]
        weights = {
            f"{component}.{name}": entry["shape"]
            for component in {name.partition(".")[0] for name in shapes} & files.keys()
            for file in files[component].files
            for name, entry in read_header(file).items()
        }
    except (ModelError, KeyError):
        return None
    if not all(_is_fitting(weights.get(name), factors) for name, factors in shapes.items()):
        return None
    changed = {name: math.prod(weights[name]) for name in shapes}
    components = tuple(name for name in ("transformer", "unet", SECOND) if name in files)
    if SECOND in files:  # of the same architecture
        changed |= {name.replace("transformer.", f"{SECOND}.", 1): size for name, size in changed.items()}
    return LoraFit(changed=changed, num_factors=_num_parameters(entries), components=components)


def _is_fitting(weight: list[int] | None, factors: Mapping[str, list[int]]) -> bool:
    down, up = factors.get("A"), factors.get("B")
    if weight is None or down is None or up is None or not len(weight) == len(down) == len(up) == 2:
        return False
    return weight == [up[0], down[1]] and up[1] == down[0]


def _num_parameters(entries: Mapping[str, Any]) -> int:
    return sum(math.prod(entry["shape"]) for entry in entries.values())


def _by_child(pairs: Collection[tuple[Path, Path]]) -> list[LoraFit]:
    """The answers of diffusers' own loaders, from a process that imports torch."""
    asked = [[str(checkpoint), str(path)] for checkpoint, path in pairs]
    answers = ask_child("gfgen.models.lora.outlines", asked, "LoRAs")
    found = []
    for (_, path), answer in zip(pairs, answers, strict=True):
        answer["components"] = tuple(answer.get("components", ()))
        number = 0 if answer.get("error") else _num_parameters(read_header(path))
        found.append(LoraFit(**answer, num_factors=number))
    return found


def ask_child(module: str, asked: object, what: str) -> Any:
    """The answers of a module that runs as a program and imports torch, as JSON.

    Raises: ModelError, which says what cannot be checked.
    """
    try:
        done = subprocess.run(
            module_command(module),
            input=json.dumps(asked),
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=module_environment(),
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"checking {what} took over {TIMEOUT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(f"{what} cannot be checked: {reason}") from None
    return json.loads(done.stdout.splitlines()[-1])
