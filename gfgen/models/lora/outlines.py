"""Models without weights, with which the files of LoRAs are compared.

As a program it reads pairs of a checkpoint and a LoRA as JSON, and writes whether each fits (fit.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn
from transformers import AutoConfig

from gfgen.errors import GfgenError
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
    is_own_kind = hasattr(kind, "load_config")
    return _on_meta(kind, kind.load_config(folder) if is_own_kind else AutoConfig.from_pretrained(folder))


def outline(model: Any) -> Any:
    """A model of the same class and config, whose weights have shapes and dtypes but no memory."""
    made = _on_meta(type(model), model.config)
    in_fp32 = getattr(type(model), "_keep_in_fp32_modules", None) or ()
    for name, module in made.named_modules():
        kept = any(each in name.split(".") for each in in_fp32)
        dtype = torch.float32 if kept else model.dtype
        for parameter, value in list(module.named_parameters(recurse=False)):
            weightless = torch.zeros((), dtype=dtype).expand(value.shape)
            module.register_parameter(parameter, nn.Parameter(weightless, requires_grad=False))
        for buffer, value in module.named_buffers(recurse=False):
            setattr(module, buffer, torch.zeros((), dtype=value.dtype).expand(value.shape))
    return made


def _on_meta(model_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)


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


def main() -> None:
    answers = []
    with without_progress_bars():
        for checkpoint, path in json.load(sys.stdin):
            try:
                answers.append(answer(Path(checkpoint), Path(path)))
            except GfgenError as error:
                answers.append({"error": str(error)})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
