"""Whether LoRAs fit a model, before anything is loaded. Imports no torch.

Headers answer for files whose names are those of the model's layers (accounting.py). For others a child
process (reading.py) lets diffusers convert the file and compares it with a model without weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gfgen.errors import ModelError
from gfgen.models.geometry.weight_files import read_header
from gfgen.models.geometry.weights import EXPERTS, component_files, quantisation_in
from gfgen.models.lora.accounting import SECOND, Settings, compare
from gfgen.system.lifeline import ask_child

KEPT_FILES = 16
"""LoRAs whose factors stay on a rank's device; the least recently used goes first."""


@dataclass(frozen=True, slots=True)
class LoraFit:
    """What a LoRA changes in a model."""

    error: str | None = None
    """Why it does not fit; the rest is empty then."""
    changed: Mapping[str, int] = field(default_factory=dict)
    """By weight, such as "transformer.blocks.0.attn1.to_q.weight": its parameters; 0 if it stays as it is and
    the change runs beside its layer."""
    num_factors: int = 0
    """Parameters of the file."""
    components: Sequence[str] = ()
    """The models of the pipeline that LoRAs can change."""
    lacking: str | None = None
    """About the layers that the models lack; they are an error unless a job says that this is right."""
    warnings: Sequence[str] = ()

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
        unclear = dict[tuple[Path, str], Path]()
        for checkpoint, sha256, path in wanted:
            if (key := (checkpoint, sha256)) in self._known or key in unclear:
                continue
            if (fit := by_headers(checkpoint, path)) is not None:
                self._known[key] = fit
            else:
                unclear[key] = path
        if unclear:
            asked = [[str(checkpoint), str(path)] for (checkpoint, _), path in unclear.items()]
            answers = ask_child("gfgen.models.lora.reading", asked, "LoRAs")
            self._known |= {key: LoraFit(**found) for key, found in zip(unclear, answers, strict=True)}

    def of(self, checkpoint: Path, sha256: str) -> LoraFit:
        """The answer for a pair that was looked at."""
        return self._known[checkpoint, sha256]


def by_headers(checkpoint: Path, path: Path) -> LoraFit | None:
    """The answer if headers show that the LoRA fits; None if the child process has to be asked."""
    try:
        entries = read_header(path)
        files = component_files(checkpoint)
        for form in (quantisation_in(checkpoint / name) for name in (*EXPERTS, "unet")):
            if form not in (None, "GGUF"):
                return LoraFit(error=f"{path}: cannot be merged into a {form} model; give GGUF, bf16 or fp16")
        components = tuple(name for name in ("transformer", "unet", SECOND) if name in files)
        weights = {
            f"{component}.{name}": entry["shape"]
            for component in components
            for file in files[component].files
            for name, entry in read_header(file).items()
        }
        settings = Settings.of(path)
        match = compare({name: entry["shape"] for name, entry in entries.items()}, weights, settings)
    except (ModelError, KeyError):
        return None
    if match.num_problems or not match.placed:
        return None
    size = sum(math.prod(entry["shape"]) for entry in entries.values())
    return LoraFit(None, match.changed, size, components, warnings=match.warnings(settings, entries))
