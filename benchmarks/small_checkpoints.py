"""Checkpoints of small pipelines of the real classes with random weights, made offline.

    python -m benchmarks.small_checkpoints DIR [NAME...]

Text encoders and tokenizers are of the pipelines' own classes, too, so that they can be saved and loaded.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers

from benchmarks.small_pipelines import WIDTH, CannotBuildError, small_pipeline, small_tokenizer
from gfgen.models.loading.components import without_progress_bars
from gfgen.models.loading.random_weights import qwen_tokenizer, t5_tokenizer

FAMILIES = (
    "FluxPipeline",
    "StableDiffusion3Pipeline",
    "CogVideoXPipeline",
    "LTXPipeline",
    "HunyuanVideoPipeline",
    "ZImagePipeline",
    "WanPipeline",
    "PixArtSigmaPipeline",
)
"""Eight families, one of them (Wan, two experts) with an adapter of its own."""

_VOCABULARY = 1000
_DECODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_T5 = {"vocab_size": _VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


def save_checkpoint(name: str, folder: Path) -> Path:
    """Write a pipeline with random weights to a folder; equal names give equal files.

    Raises: CannotBuildError for a class with an encoder that is not made here.
    """
    pipeline = small_pipeline(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pipeline.register_modules(**_text_components(type(pipeline)))
    with without_progress_bars():
        pipeline.save_pretrained(folder)
    return folder


def save_checkpoints(folder: Path, names: Iterable[str] = FAMILIES) -> Mapping[str, Path]:
    """The checkpoints of several pipelines by name, in folders of their names; those that exist are kept."""
    found = {name: folder / name for name in names}
    for name, path in found.items():
        if not (path / "model_index.json").exists():
            save_checkpoint(name, path)
    return found


def _text_components(kind: Any) -> dict[str, Any]:
    """The text encoders and tokenizers of a pipeline class, by the classes that its constructor names."""
    named = {
        name: str(parameter.annotation)
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if re.fullmatch(r"(text_encoder|tokenizer)(_\d)?", name)
    }
    found: dict[str, Any] = {}
    for name, annotation in named.items():
        if name.startswith("text_encoder"):
            encoder, tokenizer = next(
                (pair for pattern, pair in _ENCODERS.items() if re.search(pattern, annotation)),
                (None, None),
            )
            if encoder is None or tokenizer is None:
                raise CannotBuildError(f"{kind.__name__}: no small {name} of {annotation}")
            found[name] = encoder().eval()
            found[name.replace("text_encoder", "tokenizer")] = tokenizer()
    return found


def _clip(*, is_projected: bool) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=_VOCABULARY,
        hidden_size=WIDTH,
        projection_dim=WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    kind = transformers.CLIPTextModelWithProjection if is_projected else transformers.CLIPTextModel
    return kind(config)


def clip_tokenizer() -> Any:
    """A byte-pair tokenizer without merges: letters, and letters at the end of a word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {piece: idx for idx, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _chat_tokenizer() -> Any:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = small_tokenizer().chat_template
    return tokenizer


_ENCODERS: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "CLIPTextModelWithProjection": (lambda: _clip(is_projected=True), clip_tokenizer),
    "CLIPTextModel": (lambda: _clip(is_projected=False), clip_tokenizer),
    "UMT5": (lambda: transformers.UMT5EncoderModel(transformers.UMT5Config(**_T5)), t5_tokenizer),
    "T5": (lambda: transformers.T5EncoderModel(transformers.T5Config(**_T5)), t5_tokenizer),
    "LlamaModel": (lambda: transformers.LlamaModel(transformers.LlamaConfig(**_DECODER)), _chat_tokenizer),
    # Flux.2 takes the outputs of layers up to the 27th.
    "Qwen3ForCausalLM": (
        lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**{**_DECODER, "num_hidden_layers": 28})
        ),
        _chat_tokenizer,
    ),
    "PreTrainedModel": (
        lambda: transformers.Qwen3Model(transformers.Qwen3Config(**_DECODER)),
        _chat_tokenizer,
    ),
}
"""By a part of the annotation: what makes the encoder, and what makes its tokenizer."""


if __name__ == "__main__":
    save_checkpoints(Path(sys.argv[1]), sys.argv[2:] or FAMILIES)
