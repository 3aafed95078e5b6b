"""Calls on a pipeline without weights: which arguments it refuses, and how much of a prompt it reads.

As a program it reads questions about checkpoints as JSON and writes answers (session/admission.py). It runs
calls to the end of their first step, with the real schedulers and tokenizers. Networks compute only shapes.
"""

from __future__ import annotations

import copy
import re
import sys
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gfgen.errors import REFUSALS, JobError, in_one_line
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.model import load_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.qwen import MAX_TEXT_TOKENS
from gfgen.models.geometry.rules import max_text_tokens
from gfgen.models.geometry.weights import components_of
from gfgen.models.loading.components import weightless, without_progress_bars
from gfgen.models.stepping.adapter import PipelineAdapter, WholeCall, load_any
from gfgen.models.stepping.check import pictures, resolved, with_files
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
    parts = {name: value for name, value in files.index.items() if not name.startswith("_")}
    parts |= {name: None for name, value in parts.items() if value == [None, None]}
    for name in components_of(files.index):
        part = weightless(files, name)
        parts[name] = _without_computing(part) if isinstance(part, nn.Module) else part
    return kind(**parts)


def _without_computing(shapes: nn.Module) -> Any:
    """A network on the CPU without memory, whose outputs are zeros in the shapes that this one gives."""
    network = copy.deepcopy(shapes)
    for module in network.modules():
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            empty = torch.zeros((), dtype=value.dtype).expand(value.shape)
            is_buffer = not isinstance(value, nn.Parameter)
            setattr(module, name, empty if is_buffer else nn.Parameter(empty, requires_grad=False))
    for name in _COMPUTING:
        if (method := getattr(shapes, name, None)) is not None:
            setattr(network, name, _zeros_of(shapes if name == "forward" else method))
    return network.eval()


def _zeros_of(method: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {}  # by shapes and other arguments: the Python of a network takes long

    def outlined(*args: Any, **options: Any) -> Any:
        key = repr(tree_map_only(torch.Tensor, lambda x: (x.shape, x.dtype), (args, options)))
        if key not in known:
            known[key] = compute(*args, **options)
        return copy.deepcopy(known[key])

    def compute(*args: Any, **options: Any) -> Any:
        args, options = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, options))
        unmasked = patch("transformers.masking_utils.is_tracing", lambda *_: True)  # masks have no values
        whole = patch("torch.fx.experimental._config.meta_nonzero_assume_all_nonzero", True)
        with unmasked, whole, patch("torch.autocast", lambda *_, **__: nullcontext()):
            made = method(*args, **options)
        if (spread := getattr(made, "latent_dist", None)) is not None:
            made.latent_dist = type(spread)(torch.zeros_like(spread.parameters, device="cpu"))
            return made
        return tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device="cpu"), made)

    return outlined


@contextmanager
def _noting(pipeline: Any) -> Iterator[dict[str, list[tuple[str, int]]]]:
    parts, whole = pipeline.components.items(), PreTrainedTokenizerBase.__call__
    names = {id(part): name for name, part in parts if isinstance(part, PreTrainedTokenizerBase)}
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in names.values()}

    def call(self: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        head, mark, _ = str(text[0] if isinstance(text, list) and text else text).partition(MARK)
        if mark and id(self) in names:
            limit = options.get("max_length") or self.model_max_length
            found[names[id(self)]].append((head, limit if options.get("truncation") else sys.maxsize))
        return whole(self, text, *args, **options)

    with patch.object(PreTrainedTokenizerBase, "__call__", call):
        yield found


def tried(adapter: PipelineAdapter, spec: JobSpec) -> tuple[BaseException | None, Limits]:
    """What a call raises up to its first step, or without any, and how much of the prompt it reads."""
    negative = MARK if spec.negative_prompt else None
    spec = replace(spec.without_patches(), prompt=MARK, negative_prompt=negative)
    limits: Limits = {}
    with _noting(adapter.pipeline) as notes:
        try:
            prompt = adapter.encode(spec)
            least = {name: min(calls, key=lambda call: call[1]) for name, calls in notes.items() if calls}
            if not spec.prompt_syntax and all(limit < sys.maxsize for _, limit in least.values()):
                limits = least  # or one of them keeps everything
            condition, latents = adapter.prepare(spec, prompt)
            if latents.number(NUM_ITERATIONS) or isinstance(adapter._call(spec), WholeCall):
                adapter.denoise(spec, prompt, condition, latents, step=0)
            else:
                adapter.decode(spec, latents)
        except Exception as error:  # of any kind: it is judged by the caller
            return None if _is_in("denoise", error) and "meta" in str(error).lower() else error, limits
    return None, limits


def usual_jobs(geometry: PipelineGeometry, folder: Path, side: int = 256, **more: Any) -> Iterator[JobSpec]:
    """Jobs without pictures, with some and with all that the call takes, as far as it accepts them."""
    files, taken = geometry.signature.files, geometry.signature.arguments
    negative, size = MARK if "negative_prompt" in taken else None, side if geometry.takes_size else None
    job = JobSpec(id=MARK, prompt=MARK, seed=0, negative_prompt=negative, width=size, height=size, **more)
    for names in ([], [name for name in files if name in ("image", "mask_image")], files):
        with suppress(JobError):
            yield resolved(geometry, with_files(job, names, folder), folder)


def usual_failure(adapter: PipelineAdapter, *usual: Any, **fields: Any) -> BaseException | None:
    """What the first of these jobs raises here, unless one of them runs."""
    failures = (tried(adapter, job)[0] for job in usual_jobs(*usual, **fields))
    first = next(failures, None)
    return None if first is None or None in failures else first


def is_refusal(error: BaseException, usual: BaseException | None) -> bool:
    """Whether the pipeline would raise this, too. `usual` is what usual arguments raise here, if anything."""
    if usual is None or _is_in("denoise", usual) > _is_in("denoise", error):
        return "meta" not in str(error)  # whatever it is, it comes of the arguments
    is_of_network = _is_in("outlined", error)
    return isinstance(error, REFUSALS) and not is_of_network and _place_of(error) != _place_of(usual)


def _is_in(name: str, error: BaseException) -> bool:
    return any(frame.name == name for frame in traceback.extract_tb(error.__traceback__))


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
            usual = usual_failure(adapter, geometry, folder)
        for key, fields in asked["calls"].items():
            error, limits_of[key] = tried(adapter, JobSpec(**fields))
            refused = error is not None and is_refusal(error, usual)
            text = None if error is None else str(error) if refused else in_one_line(error)
            calls[key] = {"refused" if refused else "unknown": text}
            sure = [limit - SPECIAL - len(head.encode()) for head, limit in limits_of[key].values()]
            calls[key]["most_bytes"] = max(0, *sure) if sure else sys.maxsize
    else:
        tokenizers = {"tokenizer": AutoTokenizer.from_pretrained(str(checkpoint / "tokenizer"))}
        for key, fields in asked["calls"].items():
            number = max_text_tokens(JobSpec(**fields), MAX_TEXT_TOKENS)
            limits_of[key] = {"tokenizer": ("", number)}
            calls[key] = {"most_bytes": max(0, number - SPECIAL)}
    texts = {
        name: read_characters(text, limits_of[key], tokenizers) if limits_of[key] else len(text)
        for name, (key, text) in asked["texts"].items()
    }
    return {"calls": calls, "texts": texts}


if __name__ == "__main__":
    with without_progress_bars():
        answer_all(answers)
