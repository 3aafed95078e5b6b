"""Pipelines of any size with random weights, made on their device from config files alone.

They are for measurements and for trying a machine without a checkpoint: speed does not depend on the values
of weights. Such a model draws noise, but the same noise on every rank and in every run on the same kind of
device: the seed of each parameter follows from its name.

Activations stay finite at any depth: matrices have the spread of torch's linear layers, norms are 1,
biases 0.

    python -m gfgen.models.loading.random_weights DIR [NAME...]

makes the tiny models. They run the same code as the full-size models, at a size for one CPU core. 24 heads
allow every degree from 1 to 8. The bytes are reproducible.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from tokenizers import AddedToken, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, Qwen2Tokenizer, T5Tokenizer
from transformers.initialization import no_init_weights

from gfgen.errors import ModelError
from gfgen.models.geometry.checkpoint import SETTINGS_NAME, VOCABULARIES, Checkpoint, read_checkpoint
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.geometry.weight_files import is_published
from gfgen.models.geometry.weights import component_files, has_weights
from gfgen.models.loading.components import (
    first_line,
    load_component,
    read_scales,
    scaled,
    without_progress_bars,
)
from gfgen.models.streaming.placing import IN_PLACE, Placing
from gfgen.system.wording import named

WORD_LIST = """
a an the of in on at with and over under through from to by into is are red orange yellow green blue
purple pink black white gold silver cat dog fox bird horse fish whale tree forest mountain river
lake sea ocean beach city street house castle bridge tower train car boat ship robot astronaut girl
boy woman man child people sun moon star stars sky cloud clouds rain snow storm fire water light
shadow night day dawn sunset sunrise morning evening spring summer autumn winter flower flowers
garden field desert island road running walking flying swimming dancing sleeping looking sitting
standing slowly fast small big old new ancient modern wide close shot view portrait landscape
cinematic photo painting watercolor oil style bright dark soft warm cold blurry quality detailed
colourful colorful waves glass neon lantern lanterns
"""
"""Frequent words of prompts; all others are split into characters."""

QWEN_TEMPLATE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background: system user assistant"
)
"""Words of the pipeline's template. Each must be one token, as it is in the real tokenizer:
the pipeline cuts off the first 34 tokens without looking."""

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def t5_tokenizer() -> Any:
    """From pieces and their log probabilities; the first three are where T5 expects them."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"\u2581{word}", -4.0) for word in WORD_LIST.split()]
    characters = [("\u2581", -6.0)] + [(chr(code), -9.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=special + words + characters, extra_ids=0)


def qwen_tokenizer() -> Any:
    """A byte-pair tokenizer whose fixed prefix of the pipeline's template has 34 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _qwen_merges()
    pieces = [*alphabet, *("".join(pair) for pair in merges), *QWEN_SPECIAL]
    vocab = {piece: idx for idx, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer: Any = Qwen2Tokenizer(vocab=vocab, merges=merges)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIAL])
    return tokenizer


def _qwen_merges() -> list[tuple[str, str]]:
    """Merges that build each word letter by letter; those of the template come first."""
    space = "\u0120"  # how byte-level tokenizers write a blank
    template = QWEN_TEMPLATE.replace(",", "").replace(":", "").split()
    starts = ["Describe", "system", "user", "assistant"]
    others = [word for word in template if word not in starts] + WORD_LIST.split()
    words = starts + [space + word for word in others]
    merges = {(word[:end], word[end]): None for word in words for end in range(1, len(word))}
    return list(merges)


logger = logging.getLogger(__name__)

SEED = 20260613

SPREAD = 1 / math.sqrt(3)
"""Standard deviation of a matrix's entries, times the root of the number of its inputs.
Source: torch.nn.Linear.reset_parameters, whose values are uniform within 1 / sqrt(inputs)."""

_TOKENIZERS = {"T5": t5_tokenizer, "Qwen2": qwen_tokenizer}
"""By the beginning of a tokenizer's class name; all tokens have a row in the full-size table."""


def random_pipeline(
    pipeline_class: Any,
    checkpoint: Path,
    *,
    device: str,
    dtype: torch.dtype,
    dtypes: Mapping[str, str] | None = None,
    placing: Placing = IN_PLACE,
) -> Any:
    """A pipeline of this class with random weights, from config files; options as in `load_pipeline`.

    Blocks that `placing` takes are drawn on the device when they are brought there.

    Raises: ModelError for configs that the pipeline's classes reject.
    """
    files = read_checkpoint(checkpoint, with_weights=False)
    own = {name: getattr(torch, each) for name, each in (dtypes or {}).items()}
    try:
        with without_progress_bars():
            given = {name: value for name, value in files.index.items() if not name.startswith("_")}
            for name in [name for name, value in given.items() if isinstance(value, list)]:
                given[name] = _made(files, name, device=device, dtype=own.get(name, dtype), placing=placing)
            pipeline = pipeline_class(**given)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"cannot be made as {pipeline_class.__name__}: {first_line(error)}"
        raise ModelError(f"model {checkpoint}: {reason}") from error
    name = pipeline_class.__name__
    logger.info("made %s of %s on %s in %s: random weights", name, checkpoint, device, dtype)
    return pipeline


def random_component(checkpoint: Path, name: str, *, device: str, dtype: torch.dtype) -> Any:
    return _made(read_checkpoint(checkpoint, with_weights=False), name, device=device, dtype=dtype)


def draw_weights(model: torch.nn.Module, *, name: str) -> None:
    """Random values for every parameter, seeded by its name and `name`."""
    tables = _tables(model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            draw_weight(parameter, f"{name}.{parameter_name}", is_table=parameter_name in tables)


def _tables(model: torch.nn.Module) -> Collection[str]:
    return {
        f"{prefix}.weight".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }


def draw_weight(parameter: Any, name: str, *, is_table: bool = False) -> None:
    """Random values for one parameter; its name begins with that of the component."""
    digest = hashlib.sha256(f"{SEED} {name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "little"))
    last = name.rpartition(".")[2]
    if last.endswith("bias"):
        parameter.zero_()
    elif last == "scale_shift_table":
        parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)  # as diffusers does
    elif is_table:
        parameter.normal_(0, 1, generator=generator)
    elif parameter.dim() == 1 or last == "gamma":
        parameter.fill_(1)
    else:
        num_inputs = parameter.numel() // parameter.shape[0]
        parameter.normal_(0, SPREAD / math.sqrt(num_inputs), generator=generator)


def _made(
    files: Checkpoint, name: str, *, device: str, dtype: torch.dtype, placing: Placing = IN_PLACE
) -> Any:
    library, class_name = files.index[name]
    if class_name is None:
        return None
    if name.startswith("tokenizer"):
        return _tokenizer(files.path / name, class_name)
    kind = getattr(importlib.import_module(library), class_name)
    if not has_weights(name):
        return kind.from_config(dict(files.configs[name]))
    is_placed = placing.takes(name)
    without_memory = init_empty_weights(include_buffers=False) if is_placed else nullcontext()
    with torch.device(device), _default_dtype(dtype), no_init_weights(), without_memory:
        if library == "transformers":
            model = kind._from_config(AutoConfig.from_pretrained(files.path / name), dtype=dtype)
        else:
            model = kind.from_config(dict(files.configs[name]))
    if library == "transformers":
        model.tie_weights()  # part of the initialisation that was skipped
    keep_in_fp32(model)
    if not is_placed:
        draw_weights(model, name=name)
        return model.eval()
    tables = _tables(model)

    @torch.no_grad()
    def draw(parameter_name: str, like: Any) -> Any:
        drawn = torch.nn.Parameter(torch.empty_like(like, device=device), requires_grad=like.requires_grad)
        draw_weight(drawn, f"{name}.{parameter_name}", is_table=parameter_name in tables)
        return drawn

    placing.begin(name, model, draw)
    return model.eval()


def keep_in_fp32(model: Any) -> None:
    """Convert the parameters that diffusers keeps in fp32 when it loads weights.

    transformers has a list of this name, too, but uses it for fp16 only.
    Source: diffusers 0.42 load_model_dict_into_meta: parts of a parameter's name.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not type(model).__module__.startswith("diffusers"):
        return
    for name, parameter in model.named_parameters():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.float()


def _tokenizer(folder: Path, class_name: str) -> Any:
    """The directory's tokenizer, or a substitute if it has no vocabulary."""
    if any((folder / name).is_file() for name in VOCABULARIES):
        import transformers

        return getattr(transformers, class_name).from_pretrained(str(folder))
    for beginning, make in _TOKENIZERS.items():
        if class_name.startswith(beginning):
            return make()
    raise ModelError(f"{folder}: no vocabulary, and there is no substitute for {class_name}")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights that a pipeline of this checkpoint has after loading."""

    checkpoint: Path
    has_random_weights: bool = False

    def read(
        self, component: str, wanted: Mapping[str, Any], *, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Weights by name, in shape and dtype of those in `wanted`.

        Weights of files are in host memory. Random ones are drawn on the device, since another device would
        draw other values. A pickled or single file is loaded as a whole meanwhile.

        Raises: ModelError as `load_component`, and for a weight that the files lack.
        """
        if self.has_random_weights:
            for name, like in wanted.items():
                weight = torch.empty(like.shape, dtype=like.dtype, device=device)
                draw_weight(weight, f"{component}.{name}")
                yield name, weight
            return
        files = component_files(self.checkpoint)[component].files
        if files[0].suffix != ".safetensors" or is_published(files[0]):
            dtype = next(iter(wanted.values())).dtype
            weights = dict(load_component(self.checkpoint, component, dtype=dtype).named_parameters())
            _check_there(f"{files[0]}", wanted.keys() - weights.keys())
            yield from ((name, weights[name].data.to(like.dtype)) for name, like in wanted.items())
            return
        left, scales = set(wanted), read_scales(files)
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in sorted(left & set(file.keys())):
                    left.discard(name)
                    weight, dtype = file.get_tensor(name), wanted[name].dtype
                    scale = scales.get(name)
                    yield name, weight.to(dtype) if scale is None else scaled(weight, scale, dtype=dtype)
        _check_there(f"{files[0].parent}", left)


def _check_there(where: str, lacking: Collection[str]) -> None:
    if lacking:
        reason = "the files of the model have changed since it was loaded"
        raise ModelError(f"{where}: lacks {named(sorted(lacking), 'weight')}; {reason}")


TINY = tuple(sorted(path.name for path in CONFIGS.glob("tiny-*")))


def make_tiny(directory: Path, names: Sequence[str] = TINY) -> list[Path]:
    """The directories of the tiny models of these names (all by default), made where missing.

    Each is written to a temporary folder and renamed, so it appears complete or not at all.

    Raises: ModelError for a directory that cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [_make_one(directory, name) for name in names]
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); give a directory that can"
        raise ModelError(f"{directory}: {reason}") from error


def _make_one(directory: Path, name: str) -> Path:
    final = directory / name
    if final.is_dir():
        return final
    os.umask(umask := os.umask(0))
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory))
    try:
        write_tiny(CONFIGS / name, partial)
        for path in (partial, *partial.rglob("*")):  # mkdtemp and safetensors make them private
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        os.rename(partial, final)
    except OSError:
        if not final.is_dir():  # else another process made the same bytes first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def write_tiny(configs: Path, folder: Path) -> None:
    kind = getattr(diffusers, read_checkpoint(configs, with_weights=False).pipeline_class)
    pipeline = random_pipeline(kind, configs, device="cpu", dtype=torch.float32)
    pipeline.save_pretrained(str(folder))
    shutil.copyfile(configs / SETTINGS_NAME, folder / SETTINGS_NAME)


if __name__ == "__main__":
    try:
        make_tiny(Path(sys.argv[1]), sys.argv[2:] or TINY)
    except ModelError as error:
        sys.exit(str(error))
