"""Calls on a pipeline without weights: which arguments it refuses, and how much of a prompt it reads.

As a program it reads questions about checkpoints as JSON and writes answers (session/admission.py). It runs
calls with the real schedulers and tokenizers: the first two steps of each pass, the last one and the
decode. Networks compute only shapes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import time
import traceback
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gfgen.errors import REFUSALS, AbortedError, JobError, in_one_line
from gfgen.job.spec import JobSpec, prompts_of
from gfgen.models.families.adapter import Fields
from gfgen.models.families.solver import scheduler_like
from gfgen.models.fast import stop_checks
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.model import load_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.qwen import MAX_TEXT_TOKENS
from gfgen.models.geometry.rules import known, max_text_tokens
from gfgen.models.geometry.weights import components_of
from gfgen.models.loading.components import weightless, without_progress_bars
from gfgen.models.stepping.adapter import PipelineAdapter, load_any
from gfgen.models.stepping.small_job import pictures, resolved, with_files
from gfgen.models.stepping.stepper import NUM_DONE, NUM_ITERATIONS, PLACE
from gfgen.system.lifeline import answer_all

MARK = "gfgen"
"""The prompt of all calls here; what tokenizers get around it are their templates."""
SPECIAL = 2
"""Tokens that a tokenizer adds at most."""
_COMPUTING = ("forward", "encode", "decode")
_STAGES, _SETTINGS = ("encode", "prepare", "denoise", "decode"), (bool, int, float, str)
_MOST_VALUES, _FEW = 2**24, 256
"""Of frames that become pictures, and of tensors of integers that have values: both take long."""
REST_S, ALL_RESTS_S = 3.0, 60.0
"""Time for what follows the first step of a call, and of all calls: a decode may have a thousand tiles."""

_MARK = re.compile(rf"{MARK}(?:_((?:negative_)?prompt_\d))?")
Limits = dict[str, tuple[str, int]]
"""By tokenizer: what stands before a prompt, and the tokens that it keeps."""


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
    stop_checks.install(shapes)
    for module in network.modules():
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            empty = torch.zeros((), dtype=value.dtype).expand(value.shape)
            is_buffer = not isinstance(value, nn.Parameter)
            setattr(module, name, empty if is_buffer else nn.Parameter(empty, requires_grad=False))
    for name in _COMPUTING:
        if hasattr(shapes, name):
            setattr(network, name, _zeros_of(shapes, name, seen=network))
    return network.eval()


def _zeros_of(shapes: nn.Module, name: str, *, seen: nn.Module) -> Callable[..., Any]:
    """A method of a network without memory, with the settings of `seen`, which the pipeline changes."""
    method, most = (shapes, sys.maxsize) if name == "forward" else (getattr(shapes, name), _MOST_VALUES)
    found: dict[str, Any] = {}  # by shapes and other arguments: the Python of a network takes long

    @functools.wraps(getattr(shapes, name))
    def outlined(*args: Any, **options: Any) -> Any:
        settings = {name: value for name, value in vars(seen).items() if isinstance(value, _SETTINGS)}
        vars(shapes).update(settings)  # such as a VAE's tiles
        key = repr((settings, tree_map_only(torch.Tensor, _described, (args, options))))
        if key not in found:
            found[key] = compute(args, options)
        return copy.deepcopy(found[key])

    def compute(*given: Any, values: _Values | None = None) -> Any:
        moved = values.outline if values else lambda x: x.to("meta")
        args, options = tree_map_only(torch.Tensor, moved, given)
        unmasked = patch("transformers.masking_utils.is_tracing", lambda *_: True)  # masks have no values
        whole = patch("torch.fx.experimental._config.meta_nonzero_assume_all_nonzero", True)
        flex = patch("torch.nn.attention.flex_attention.flex_attention", lambda query, *_, **__: query)
        try:
            with unmasked, whole, flex, patch("torch.autocast", lambda *_, **__: nullcontext()):
                made = method(*args, **options)
        except Exception as error:
            if values or "meta" not in str(error).lower():
                raise
            with _Values() as values, patch("torch.tensor", values.tensor):  # shapes depend on values
                return compute(*given, values=values)
        if (spread := getattr(made, "latent_dist", None)) is not None:
            made.latent_dist = type(spread)(torch.zeros_like(spread.parameters, device="cpu"))
            return made
        return tree_map_only(torch.Tensor, zeros, made)

    def zeros(made: torch.Tensor) -> torch.Tensor:
        return made if made.numel() > most else torch.zeros_like(made, device="cpu")

    return outlined


def _described(x: torch.Tensor) -> object:
    """What a result's shape may depend on: grids and masks have few, whole numbers."""
    has_values = x.device.type == "cpu" and not x.is_floating_point() and x.numel() <= _FEW
    return x.shape, x.dtype, x.tolist() if has_values else None


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors without memory have values that follow from integers alone: grids, masks, positions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakTensorKeyDictionary()

    def tensor(self, *args: Any, make: Any = torch.tensor, device: Any = None, **options: Any) -> Any:
        """As torch.tensor, but on the CPU first, where values are seen."""
        return make(*self._with_values(args), **options).to(device or "cpu")

    def outline(self, value: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if value.numel() <= _MOST_VALUES and not value.is_floating_point():
            self._values[made] = value
        return made

    def _with_values(self, given: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: self._values.get(x, x), given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        all_given = args, options = args, kwargs or {}
        given = [x for x in tree_leaves(all_given) if isinstance(x, torch.Tensor)]
        if any(x.is_meta and x not in self._values for x in given):
            for tensor in given if func._schema.is_mutable else ():
                self._values.pop(tensor, None)
            return func(*args, **options)
        device = options.get("device") or ("meta" if any(x.is_meta for x in given) else "cpu")
        own = {id(self._values[x]): x for x in given if x.is_meta}
        args, options = self._with_values(all_given)
        made = func(*args, **(options | {"device": "cpu"} if options.get("device") else options))
        if torch.device(device).type != "meta":
            return made
        return tree_map_only(torch.Tensor, lambda x: own[id(x)] if id(x) in own else self.outline(x), made)


@contextmanager
def _noting(pipeline: Any) -> Iterator[Mapping[str, Mapping[str, list[tuple[str, int]]]]]:
    """By prompt, "" for the first ones, and by tokenizer."""
    parts, whole = pipeline.components.items(), PreTrainedTokenizerBase.__call__
    names = {id(part): name for name, part in parts if isinstance(part, PreTrainedTokenizerBase)}
    found: Any = defaultdict(lambda: defaultdict(list))

    def call(self: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        first = str(text[0] if isinstance(text, list) and text else text)
        if (mark := _MARK.search(first)) and id(self) in names:
            limit = options.get("max_length") or self.model_max_length
            limit = limit if options.get("truncation") else sys.maxsize
            found[mark[1] or ""][names[id(self)]].append((first[: mark.start()], limit))
        return whole(self, text, *args, **options)

    with patch.object(PreTrainedTokenizerBase, "__call__", call):
        yield found


def tried(
    adapter: PipelineAdapter, spec: JobSpec, *, prompt: str = MARK, rest_s: float = REST_S
) -> tuple[BaseException | None, dict[str, Limits]]:
    """What a call with such a prompt raises, and how much of each prompt it reads, if that is limited."""
    negative = MARK if spec.negative_prompt else None
    others = {name: f"{MARK}_{name}" for name in spec.args or () if prompts_of(spec).get(name)}
    args = {**(spec.args or {}), **others} or None
    spec = replace(spec.without_patches(), prompt=prompt, negative_prompt=negative, args=args)
    limits: dict[str, Limits] = {}
    with _noting(adapter.pipeline) as notes:
        try:
            encoded = adapter.encode(spec)
            for name in ("", *others) if prompt == MARK and "" in notes and not spec.prompt_syntax else ():
                calls = notes.get(name, {})  # none: no tokenizer gets this prompt
                least = {each: min(own, key=lambda call: call[1]) for each, own in calls.items()}
                if all(limit < sys.maxsize for _, limit in least.values()):
                    limits[name] = least  # or one of them keeps everything
            condition, latents = adapter.prepare(spec, encoded)
            latents = adapter.denoise(spec, encoded, condition, latents, step=0)
            until = time.process_time() + rest_s  # of this process, so other programs do not count
            watch = stop_checks.Watch(lambda: time.process_time() > until)
            with suppress(AbortedError), stop_checks.watching(watch):
                for step in range(1, known(spec.steps) + spec.num_refined):
                    _skip_middle(latents)
                    latents = adapter.denoise(spec, encoded, condition, latents, step=step)
                adapter.decode(spec, latents)
        except Exception as error:  # of any kind: it is judged by the caller
            lacks_values = _stage_of(error) > _STAGES.index("prepare") and "meta" in str(error).lower()
            return None if lacks_values else error, limits
    return None, limits


def idle_options(adapter: PipelineAdapter, spec: JobSpec) -> list[str]:
    """The options of a job's scheduler that change none of its steps, because of other options."""
    own, given, found = adapter.pipeline.components.get("scheduler"), spec.scheduler or {}, []
    with suppress(Exception):  # then nothing is known of them
        for name in sorted(given.keys() - {"class"}):
            rest = {each: value for each, value in given.items() if each != name}
            if scheduler_like(own, rest).config.get(name) != given[name]:
                paths = [_path(adapter, replace(spec, scheduler=each)) for each in (given, rest)]
                found += [name] if all(map(torch.equal, *paths)) else []
    return found


def _path(adapter: PipelineAdapter, spec: JobSpec) -> list[torch.Tensor]:
    """The timesteps of a job, and where they lead with noise as the outputs of the model."""
    made = scheduler_like(adapter.pipeline.scheduler, known(spec.scheduler))
    kind = type(made)
    with patch.object(kind, "set_timesteps", autospec=True, side_effect=kind.set_timesteps) as noted:
        adapter.prepare(spec, adapter.encode(spec))
    made.set_timesteps(*noted.call_args.args[1:], **noted.call_args.kwargs)
    torch.manual_seed(0)
    path = [torch.randn(1, 4, 8, 8)]
    for timestep in made.timesteps:
        seen = getattr(made, "scale_model_input", lambda x, _: x)(path[-1], timestep)
        path += made.step(seen + torch.randn_like(seen), timestep, path[-1], return_dict=False)[:1]
    return [made.timesteps, torch.as_tensor(getattr(made, "init_noise_sigma", 1.0)), *path]


def _skip_middle(latents: Fields) -> None:
    """After two iterations of a call's only loop, go to the last one; so in a second pass."""
    place, last = latents.scalars.get(PLACE), latents.number(NUM_ITERATIONS) - 1
    if isinstance(place, list) and len(place) == 1 and 1 < int(place[0]) < last:
        latents.scalars |= {PLACE: [last], NUM_DONE: last}


def usual_jobs(geometry: PipelineGeometry, folder: Path, side: int = 256, **more: Any) -> Iterator[JobSpec]:
    """Jobs without pictures, with some and with all that the call takes, as far as it accepts them."""
    files, taken = geometry.signature.files, geometry.signature.arguments
    negative, size = MARK if "negative_prompt" in taken else None, side if geometry.takes_size else None
    job = JobSpec(id=MARK, prompt=MARK, seed=0, negative_prompt=negative, width=size, height=size, **more)
    for names in ([], [name for name in files if name in ("image", "mask_image")], files):
        with suppress(JobError):
            yield resolved(geometry, with_files(job, names, folder), folder)


def usual_failure(
    adapter: PipelineAdapter, *usual: Any, prompts: Iterable[str] = (), **fields: Any
) -> tuple[BaseException | None, str]:
    """What the first of the usual jobs raises unless one runs, with MARK or a prompt of these, and that."""
    failures = []
    for prompt, job in product((MARK, *prompts), usual_jobs(*usual, **fields)):
        if (failure := tried(adapter, job, prompt=prompt)[0]) is None:
            return None, prompt
        failures.append(failure)
    return next(iter(failures), None), MARK


def is_refusal(error: BaseException, usual: BaseException | None) -> bool:
    """Whether the pipeline would raise this, too. `usual` is what usual arguments raise here, if anything."""
    if usual is None or _stage_of(usual) > _stage_of(error):
        return "meta" not in str(error)  # whatever it is, it comes of the arguments
    is_of_network = any(frame.name == "outlined" for frame in traceback.extract_tb(error.__traceback__))
    return isinstance(error, REFUSALS) and not is_of_network and _place_of(error) != _place_of(usual)


def _stage_of(error: BaseException) -> int:
    """The index of the method of the adapter that raises it."""
    frames, place = traceback.extract_tb(error.__traceback__), inspect.getfile(PipelineAdapter)
    return next((_STAGES.index(x.name) for x in frames if x.filename == place and x.name in _STAGES), 0)


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


def unknown_of(characters: Iterable[str], tokenizers: Mapping[str, Any]) -> dict[str, bool]:
    """Which characters become the token for unknown text in one of the tokenizers."""
    kept = [each for each in tokenizers.values() if isinstance(each, PreTrainedTokenizerBase)]
    return {
        one: any(each.unk_token_id in each(one, add_special_tokens=False)["input_ids"] for each in kept)
        for one in characters
    }


def answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint = Path(asked["checkpoint"])
    calls: dict[str, dict[str, Any]] = {}
    limits_of: dict[str, dict[str, Limits]] = {}
    geometry = load_geometry(checkpoint, trusts_code=asked["trusts_code"])
    if isinstance(geometry, PipelineGeometry):
        adapter = load_any(checkpoint, geometry, device="cpu", dtype=torch.float32, load=outlined_pipeline)
        tokenizers = adapter.pipeline.components
        with pictures() as folder:
            prompts = [fields["prompt"] for fields in asked["calls"].values()][:3]
            usual, prompt = usual_failure(adapter, geometry, folder, prompts=prompts)
        for key, fields in asked["calls"].items():
            rest_s = min(REST_S, ALL_RESTS_S / len(asked["calls"]))
            error, limits_of[key] = tried(adapter, JobSpec(**fields), prompt=prompt, rest_s=rest_s)
            refused = error is not None and is_refusal(error, usual)
            text = None if error is None else (str(error) if refused else "") or in_one_line(error)
            calls[key] = {"refused" if refused else "unknown": text}
            kept = [[(limit, head.encode()) for head, limit in x.values()] for x in limits_of[key].values()]
            sure = [max((limit - SPECIAL - len(head) for limit, head in own), default=0) for own in kept]
            calls[key]["most_bytes"] = max(0, min(sure, default=sys.maxsize))
            calls[key]["idle"] = idle_options(adapter, JobSpec(**fields)) if error is None else []
    else:
        tokenizers = {"tokenizer": AutoTokenizer.from_pretrained(str(checkpoint / "tokenizer"))}
        for key, fields in asked["calls"].items():
            number = max_text_tokens(JobSpec(**fields), MAX_TEXT_TOKENS)
            limits_of[key] = {"": {"tokenizer": ("", number)}}
            calls[key] = {"most_bytes": max(0, number - SPECIAL)}
    texts = {
        name: len(text) if limits is None else read_characters(text, limits, tokenizers)
        for name, (key, prompt, text) in asked["texts"].items()
        for limits in [limits_of[key].get(prompt if _MARK.fullmatch(f"{MARK}_{prompt}") else "")]
    }
    return {"calls": calls, "texts": texts, "unknown": unknown_of(asked.get("characters", ()), tokenizers)}


if __name__ == "__main__":
    with without_progress_bars():
        answer_all(answers)
