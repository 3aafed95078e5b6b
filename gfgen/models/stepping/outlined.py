"""Calls on a pipeline without weights: which arguments it refuses, and how much of a prompt it reads.

As a program it reads questions about checkpoints as JSON and writes the answers (session/calls.py). It runs
the calls up to their first step, with the real schedulers and tokenizers. Networks compute only shapes.
"""

from __future__ import annotations

import copy
import re
import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gfgen.errors import REFUSALS, in_one_line
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.model import load_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.qwen import MAX_TEXT_TOKENS
from gfgen.models.geometry.rules import max_text_tokens
from gfgen.models.loading.components import weightless, without_progress_bars
from gfgen.models.stepping.adapter import PipelineAdapter, WholeCall, load_any
from gfgen.models.stepping.check import pictures, resolved
from gfgen.models.stepping.stepper import NUM_ITERATIONS
from gfgen.system.lifeline import answer_all

MARK = "gfgen"
"""The prompt of all calls here; what tokenizers get around it are their templates."""
SPECIAL = 2
"""Tokens that a tokenizer adds at most."""
_COMPUTING = ("forward", "encode", "decode")

Limits = dict[str, tuple[str, int]]
"""By tokenizer: what stands before a prompt, and the tokens that it keeps; empty if one keeps all."""


def outlined_pipeline(kind: Any, checkpoint: Path, *, own_code: Any = None, **_: Any) -> Any:
    """As `load_pipeline`, without weights."""
    files = read_checkpoint(checkpoint, with_weights=False)
    parts: dict[str, Any] = {}
    for name, value in files.index.items():
        if name.startswith("_"):
            continue
        parts[name] = value if not isinstance(value, list) else value[0] and weightless(files, name)
        if isinstance(parts[name], nn.Module):
            parts[name] = _without_computing(parts[name])
    return kind(**parts)


def _without_computing(shapes: nn.Module) -> Any:
    """A network on the CPU without memory, whose outputs are zeros in the shapes that this one gives."""
    network = copy.deepcopy(shapes)
    for module in network.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(_without_memory(value), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _without_memory(buffer))
    for name in _COMPUTING:
        if (method := getattr(shapes, name, None)) is not None:
            setattr(network, name, _zeros_of(shapes if name == "forward" else method))
    return network.eval()


def _without_memory(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def _zeros_of(method: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}  # by shapes and other arguments: the Python of a network takes long

    def outlined(*args: Any, **options: Any) -> Any:
        key = repr(tree_map_only(torch.Tensor, lambda x: (x.shape, x.dtype), (args, options)))
        if key not in known:
            known[key] = compute(*args, **options)
        return copy.deepcopy(known[key])

    def compute(*args: Any, **options: Any) -> Any:
        args, options = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, options))
        try:
            made = method(*args, **options)
        except RuntimeError:  # transformers looks into masks, which have no values here
            made = method(*args[:1], **{name: None if "mask" in name else x for name, x in options.items()})
        if (spread := getattr(made, "latent_dist", None)) is not None:
            made.latent_dist = type(spread)(torch.zeros_like(spread.parameters, device="cpu"))
            return made
        return tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device="cpu"), made)

    return outlined


@contextmanager
def _noting(pipeline: Any) -> Iterator[dict[str, list[tuple[str, int | None]]]]:
    found: dict[str, list[tuple[str, int | None]]] = {}
    kinds = {}
    for name, part in pipeline.components.items():
        if not isinstance(part, PreTrainedTokenizerBase):
            continue
        found[name], kinds[name] = [], type(part)

        def call(self: Any, text: Any = None, *args: Any, name: str = name, **options: Any) -> Any:
            head, mark, _ = str(text[0] if isinstance(text, list) and text else text).partition(MARK)
            if mark:
                limit = options.get("max_length") or self.model_max_length
                found[name].append((head, limit if options.get("truncation") else None))
            return kinds[name].__call__(self, text, *args, **options)

        part.__class__ = type(kinds[name].__name__, (kinds[name],), {"__call__": call})
    try:
        yield found
    finally:
        for name, kind in reversed(kinds.items()):
            pipeline.components[name].__class__ = kind


def tried(adapter: PipelineAdapter, spec: JobSpec) -> tuple[BaseException | None, Limits]:
    """What a call raises before its first step, or without any, and how much of the prompt it reads."""
    negative = MARK if spec.negative_prompt else None
    spec = replace(spec.without_patches(), prompt=MARK, negative_prompt=negative)
    with _noting(adapter.pipeline) as notes:
        try:
            prompt = adapter.encode(spec)
            limits: Limits = {}
            for name, calls in notes.items():
                cut = [(head, limit) for head, limit in calls if limit is not None]
                if (calls and not cut) or spec.prompt_syntax:  # it keeps everything
                    limits.clear()
                    break
                limits |= {name: min(cut, key=lambda call: call[1])} if cut else {}
            _, latents = adapter.prepare(spec, prompt)
            if latents.number(NUM_ITERATIONS) == 0 and not isinstance(adapter._call(spec), WholeCall):
                adapter.decode(spec, latents)
        except Exception as error:  # of any kind: it is judged by the caller
            return error, {}
    return None, limits


def is_refusal(error: BaseException, usual: BaseException | None) -> bool:
    """Whether the pipeline would raise this, too. `usual` is what usual arguments raise here, if anything."""
    if usual is None:
        return "meta" not in str(error)  # whatever it is, it comes of the arguments
    frames = traceback.extract_tb(error.__traceback__)
    is_of_network = any(frame.name == "outlined" for frame in frames)
    return isinstance(error, REFUSALS) and not is_of_network and _place_of(error) != _place_of(usual)


def _place_of(error: BaseException) -> tuple[object, ...]:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), frame.filename, frame.lineno


def read_characters(text: str, limits: Mapping[str, tuple[str, int]], tokenizers: Mapping[str, Any]) -> int:
    """How many characters of a prompt at least one tokenizer keeps, in whole words."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    kept = 0
    for name, (head, limit) in limits.items():

        def num_tokens(end: int, name: str = name, head: str = head) -> int:
            return len(tokenizers[name](head + text[:end])["input_ids"])

        kept = max(kept, bisect_right(ends, limit, key=num_tokens))
    return len(text) if kept == len(ends) else ends[kept - 1] if kept else 0


def answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint = Path(asked["checkpoint"])
    calls: dict[str, dict[str, Any]] = {}
    limits_of: dict[str, Limits] = {}
    geometry = load_geometry(checkpoint, trusts_code=asked["trusts_code"])
    if isinstance(geometry, PipelineGeometry):
        adapter = load_any(checkpoint, geometry, device="cpu", dtype=torch.float32, load=outlined_pipeline)
        tokenizers = adapter.pipeline.components
        with pictures() as folder:
            usual, _ = tried(adapter, resolved(geometry, JobSpec(id=MARK, prompt=MARK, seed=0), folder))
        for key, fields in asked["calls"].items():
            error, limits_of[key] = tried(adapter, JobSpec(**fields))
            refused = error is not None and is_refusal(error, usual)
            text = None if error is None else str(error) if refused else in_one_line(error)
            calls[key] = {"refused" if refused else "unknown": text}
            sure = [limit - SPECIAL - len(head.encode()) for head, limit in limits_of[key].values()]
            calls[key]["most_bytes"] = max(0, *sure) if sure else sys.maxsize
    else:
        tokenizers = {"tokenizer": AutoTokenizer.from_pretrained(str(checkpoint / "tokenizer"))}
        most = {
            key: max_text_tokens(JobSpec(**fields), MAX_TEXT_TOKENS) for key, fields in asked["calls"].items()
        }
        limits_of = {key: {"tokenizer": ("", number)} for key, number in most.items()}
        calls = {key: {"most_bytes": max(0, number - SPECIAL)} for key, number in most.items()}
    texts = {
        name: read_characters(text, limits_of[key], tokenizers) if limits_of[key] else len(text)
        for name, (key, text) in asked["texts"].items()
    }
    return {"calls": calls, "texts": texts}


if __name__ == "__main__":
    with without_progress_bars():
        answer_all(answers)
