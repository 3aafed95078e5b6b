"""Checkpoints of small pipelines of the real classes with random weights, made offline.

    PYTHONPATH=tests python -m small_checkpoints DIR [NAME...]

Text encoders and tokenizers are of the pipelines' own classes, too, so that they can be saved and loaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from small_pipelines import (
    WIDTH,
    CannotBuildError,
    SmallEncoder,
    SmallImageProcessor,
    SmallProcessor,
    small_pipeline,
    small_tokenizer,
)
from tokenizers import AddedToken, pre_tokenizers

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


def save_checkpoint(name: str, folder: Path, *, changes: Mapping[str, Any] | None = None) -> Path:
    """Write a pipeline with random weights to a folder; equal names and changes give equal files.

    changes: as in `small_pipeline`.

    Raises: CannotBuildError for a class with an encoder that is not made here.
    """
    pipeline = small_pipeline(name, changes=changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pipeline.register_modules(**_real_components(pipeline))
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


def _real_components(pipeline: Any) -> dict[str, Any]:
    """Small components of the real classes for a pipeline's stand-ins, by what its constructor names."""
    kind, found = type(pipeline), {}
    named = {
        name: str(parameter.annotation)
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if isinstance(vars(pipeline).get(name), _STAND_INS)
    }
    for name, annotation in named.items():
        if re.fullmatch(r"text_encoder(_\d)?", name):
            encoder, tokenizer = _made(_ENCODERS, kind, name, annotation)
            found[name] = encoder().eval()
            if hasattr(pipeline, of_text := name.replace("text_encoder", "tokenizer")):
                found[of_text] = tokenizer()
    for name, annotation in named.items():
        if name not in found or "Processor" in annotation:
            found[name] = _made(_OTHERS, kind, name, annotation)()
    return found


def _made(makers: Mapping[str, Any], kind: Any, name: str, annotation: str) -> Any:
    annotation = f"{kind.__name__} {annotation}"
    for pattern, maker in makers.items():
        if re.search(pattern, annotation):
            return maker
    raise CannotBuildError(f"{kind.__name__}: no small {name} of {annotation}")


def _clip(*, is_projected: bool, num_positions: int = 77) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=_VOCABULARY,
        hidden_size=WIDTH,
        projection_dim=WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=num_positions,
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


def _t5_tokenizer() -> Any:
    tokenizer = t5_tokenizer()
    tokenizer.model_max_length = 512  # some pipelines pad to it
    return tokenizer


def _chat_tokenizer() -> Any:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = small_tokenizer().chat_template
    return tokenizer


def _vision_tokenizer() -> Any:
    """As `_chat_tokenizer`, with tokens for pictures."""
    tokenizer = _chat_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in _VISION])
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = tokenizer.chat_template.replace("part.text or ''", f"part.text or '{picture}'")
    return tokenizer


def _processor(name: str) -> Callable[[], Any]:
    """Makes a processor for vision and language of transformers."""
    patch_size = 16 if "Qwen3" in name else 14

    def make() -> Any:
        if importlib.util.find_spec("torchvision") is None:
            raise CannotBuildError(f"{name} needs torchvision")
        pictures = transformers.Qwen2VLImageProcessor(patch_size=patch_size, **_PICTURES)
        videos = getattr(transformers, name.replace("Processor", "VideoProcessor"), None)
        videos = (videos or transformers.Qwen2VLVideoProcessor)(patch_size=patch_size)
        tokenizer = _vision_tokenizer()
        kind = getattr(transformers, name)
        return kind(pictures, tokenizer, videos, chat_template=tokenizer.chat_template)

    return make


_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PICTURES = {"size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}}


def _vision_ids() -> dict[str, int]:
    """Where configs of models expect the tokens for pictures."""
    tokenizer = _vision_tokenizer()
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(list(_VISION)), strict=True))


def _of_qwen(name: str, config: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
    # Bria's Fibo 2 takes the outputs of layers up to the 35th.
    text = {**_DECODER, "num_hidden_layers": 36 if "Qwen3" in name else 4, "rope_parameters": rope}
    vision: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
    }
    if "Qwen3" in name:
        vision |= {
            "depth": 2,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        }
    else:
        vision |= {"depth": 1, "patch_size": 14, "embed_dim": WIDTH, "mlp_ratio": 1}
        vision |= {"window_size": 56, "fullatt_block_indexes": [0]}

    def make() -> Any:
        if "Text" in name:
            return getattr(transformers, name)(getattr(transformers, config)(**text))
        settings = {"text_config": text, "vision_config": vision, **_vision_ids()}
        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return make, _vision_tokenizer


def _decoder(name: str, config: str, **changes: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What makes a text model, and what makes its tokenizer."""

    def make() -> Any:
        return getattr(transformers, name)(getattr(transformers, config)(**{**_DECODER, **changes}))

    return make, _chat_tokenizer


def _with_vision(name: str, config: str, *, num_layers: int, text: str, vision: str) -> Any:
    """As `_decoder`, of a model that takes pictures, too."""

    def make() -> Any:
        seen = {**_VISION_MODEL, "model_type": vision}
        settings = {"text_config": {**_DECODER, "model_type": text, "num_hidden_layers": num_layers}}
        return getattr(transformers, name)(getattr(transformers, config)(**settings, vision_config=seen))

    return make, _chat_tokenizer


def _vision(kind: Any, config: Any, **changes: Any) -> Callable[[], Any]:
    return lambda: kind(config(**{**_VISION_MODEL, **changes})).eval()


_VISION_MODEL = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_BERT = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}

_ENCODERS: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "HiDream.*CLIPText": (lambda: _clip(is_projected=True, num_positions=256), clip_tokenizer),
    "CLIPTextModelWithProjection": (lambda: _clip(is_projected=True), clip_tokenizer),
    "CLIPTextModel": (lambda: _clip(is_projected=False), clip_tokenizer),
    "UMT5": (lambda: transformers.UMT5EncoderModel(transformers.UMT5Config(**_T5)), _t5_tokenizer),
    "T5": (lambda: transformers.T5EncoderModel(transformers.T5Config(**_T5)), _t5_tokenizer),
    "LlamaModel": _decoder("LlamaModel", "LlamaConfig"),
    "LlamaForCausalLM": _decoder("LlamaForCausalLM", "LlamaConfig"),
    "SmolLM3ForCausalLM": _decoder("SmolLM3ForCausalLM", "SmolLM3Config", vocab_size=128_256),
    "GlmModel": (_decoder("GlmModel", "GlmConfig")[0], _t5_tokenizer),
    # Flux.2 takes the outputs of layers up to the 27th, or to the 30th.
    "Qwen3ForCausalLM": _decoder("Qwen3ForCausalLM", "Qwen3Config", num_hidden_layers=28),
    "Qwen3Model": _decoder("Qwen3Model", "Qwen3Config"),
    "Mistral3Model": _with_vision(
        "Mistral3Model", "Mistral3Config", num_layers=4, text="mistral", vision="pixtral"
    ),
    "Mistral3ForConditionalGeneration": _with_vision(
        "Mistral3ForConditionalGeneration", "Mistral3Config", num_layers=31, text="mistral", vision="pixtral"
    ),
    # LTX-2's connectors take the outputs of all 40 layers.
    "Gemma3ForConditionalGeneration": _with_vision(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        num_layers=40,
        text="gemma3_text",
        vision="siglip_vision_model",
    ),
    "Qwen2_5_VLForConditionalGeneration": _of_qwen("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
    "Qwen2_5_VLTextModel": _of_qwen("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig"),
    "Qwen2VLForConditionalGeneration": _of_qwen("Qwen2VLForConditionalGeneration", "Qwen2VLConfig"),
    "Qwen3VLForConditionalGeneration": _of_qwen("Qwen3VLForConditionalGeneration", "Qwen3VLConfig"),
    "Qwen3VLModel": _of_qwen("Qwen3VLModel", "Qwen3VLConfig"),
    "BertModel": (
        lambda: transformers.BertModel(transformers.BertConfig(vocab_size=_VOCABULARY, **_BERT)),
        _chat_tokenizer,
    ),
    "PreTrainedModel": _decoder("Qwen3Model", "Qwen3Config"),
}
"""By a part of the annotation: what makes the encoder, and what makes its tokenizer."""

_OTHERS: Mapping[str, Callable[[], Any]] = {
    "CLIPVisionModelWithProjection": _vision(
        transformers.CLIPVisionModelWithProjection, transformers.CLIPVisionConfig, projection_dim=WIDTH
    ),
    "CLIPVisionModel": _vision(transformers.CLIPVisionModel, transformers.CLIPVisionConfig),
    "Siglip2VisionModel": _vision(transformers.Siglip2VisionModel, transformers.Siglip2VisionConfig),
    "SiglipVisionModel": _vision(transformers.SiglipVisionModel, transformers.SiglipVisionConfig),
    "CLIPImageProcessor|CLIPProcessor": lambda: transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    ),
    "Siglip2ImageProcessor": lambda: transformers.Siglip2ImageProcessorPil(patch_size=14, max_num_patches=16),
    "SiglipImageProcessor": lambda: transformers.SiglipImageProcessorPil(size={"height": 56, "width": 56}),
    "Qwen3VLProcessor": _processor("Qwen3VLProcessor"),
    "Qwen2_5_VLProcessor": _processor("Qwen2_5_VLProcessor"),
    "Qwen2VLProcessor": _processor("Qwen2VLProcessor"),
    "Tokenizer|AutoProcessor": _chat_tokenizer,
}
"""As `_ENCODERS`, for all other components that `small_pipeline` has stand-ins for."""

_STAND_INS = (SmallEncoder, SmallImageProcessor, SmallProcessor, transformers.PreTrainedTokenizerFast)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=FAMILIES)
    asked = parser.parse_args()
    save_checkpoints(asked.folder, asked.names)
