"""Models without weights, with which the files of LoRAs are compared.

As a program it reads pairs of a checkpoint and a LoRA as JSON, and writes whether each fits (fit.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import AutoConfig

from gfgen.errors import GfgenError, in_one_line
from gfgen.models.geometry.checkpoint import Checkpoint, read_checkpoint
from gfgen.models.geometry.weights import has_weights
from gfgen.models.loading.components import class_of, load_class, without_progress_bars
from gfgen.models.lora.reading import components_of, read_lora


def weightless_pipeline(checkpoint: Path) -> Any:
    """A pipeline of a checkpoint's class with only the models that LoRAs can change, without weights."""
    files = read_checkpoint(checkpoint, with_weights=False)
    own = files.own_code
    kind = load_class(own["pipeline"]) if "pipeline" in own else getattr(diffusers, files.pipeline_class)
    names = getattr(kind, "_lora_loadable_modules", None) or ("transformer", "unet")
    parts = {name: weightless(files, name) for name in names if files.class_of(name) is not None}
    pipeline: Any = object.__new__(kind)
    pipeline.__dict__.update(parts)
    return pipeline


def weightless(files: Checkpoint, name: str) -> Any:
    """A component without weights; one that has none, such as a tokenizer, is whole."""
    own = files.own_code.get(name)
    kind = class_of(*files.index[name]) if own is None else load_class(own)
    folder = str(files.path / name)
    if not has_weights(name):
        return kind.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        if hasattr(kind, "load_config"):
            return kind.from_config(kind.load_config(folder))
        return kind(AutoConfig.from_pretrained(folder))


def answer(checkpoint: Path, path: Path) -> dict[str, Any]:
    """Whether a LoRA fits, as fields of `LoraFit`. Raises: as `read_lora`."""
    pipeline = weightless_pipeline(checkpoint)
    components = components_of(pipeline)
    weights = {
        f"{component}.{name}": list(weight.shape)
        for component in components
        for name, weight in getattr(pipeline, component).named_parameters()
    }
    content = read_lora(path, pipeline, weights)
    found = {"changed": content.match.changed, "components": components, "lacking": content.lacking}
    number = sum(tensor.numel() for tensor in content.tensors.values())
    return found | {"warnings": content.warnings, "num_factors": number}


def answer_all(answer: Callable[..., Any]) -> None:
    """Answer the questions that `ask_child` sends; one that fails says nothing of others."""
    answers = []
    with without_progress_bars():
        for asked in json.load(sys.stdin):
            try:
                answers.append(answer(asked))
            except Exception as error:
                said = str(error) if isinstance(error, GfgenError) else in_one_line(error)
                answers.append({"error": said})
    print(json.dumps(answers))


if __name__ == "__main__":
    answer_all(lambda asked: answer(*map(Path, asked)))
