"""Pipelines of diffusers at small size with random weights, made offline.

Transformers, VAEs, ControlNets and schedulers are of the pipelines' own classes. Text and image encoders,
tokenizers and processors are stand-ins of a few lines: a prompt is encoded in one task either way.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import torch
import transformers
from diffusers import DiffusionPipeline

WIDTH = 32
"""Length of a token's embedding in every text encoder."""
TOKENS = 16
"""Tokens of every prompt."""
SIDE = 64
"""Height and width of pictures, in pixels."""
FRAMES = 9
STEPS = 5

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_FLUX = {
    **_HEADS,
    "num_layers": 2,
    "num_single_layers": 1,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": (4, 6, 6),
}
_WAN = {**_HEADS, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
_WAN_VAE = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_QWEN = {**_HEADS, "num_layers": 2, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 6, 6)}
_COG = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_embed_dim": WIDTH,
    "time_embed_dim": 16,
}
_HUNYUAN = {
    **_HEADS,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
    "rope_axes_dim": (4, 6, 6),
}
_KL3D = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
_SANA = {
    **_HEADS,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": WIDTH,
}
_ZIMAGE = {"dim": 32, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}

MODELS: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": 16,
        "shift_factor": 0.1,
        "sample_size": SIDE,
    },
    "FluxTransformer2DModel": {**_FLUX, "in_channels": 64, "pooled_projection_dim": WIDTH},
    "FluxControlNetModel": {**_FLUX, "in_channels": 64, "pooled_projection_dim": WIDTH},
    "SD3Transformer2DModel": {
        **_HEADS,
        "num_layers": 2,
        "joint_attention_dim": WIDTH,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 2 * WIDTH,
        "sample_size": SIDE // 2,
    },
    "WanTransformer3DModel": _WAN,
    "AutoencoderKLWan": _WAN_VAE,
    "AutoencoderKLQwenImage": _WAN_VAE,
    "QwenImageTransformer2DModel": _QWEN,
    "CogVideoXTransformer3DModel": {
        **_COG,
        "max_text_seq_length": TOKENS,
        "sample_height": 8,
        "sample_width": 8,
        "sample_frames": FRAMES,
    },
    "AutoencoderKLCogVideoX": _KL3D,
    "LTXVideoTransformer3DModel": {
        **_HEADS,
        "cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": WIDTH,
        "in_channels": 8,
        "out_channels": 8,
    },
    "AutoencoderKLLTXVideo": {
        "latent_channels": 8,
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
    },
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "AutoencoderKLHunyuanVideo": {**_KL3D, "block_out_channels": (8, 8, 8, 8)},
    "ZImageTransformer2DModel": {
        **_ZIMAGE,
        "n_layers": 2,
        "cap_feat_dim": WIDTH,
        "axes_dims": [4, 6, 6],
        "axes_lens": [256, 64, 64],
    },
}
"""Arguments of each model class; all others keep their defaults."""

SCHEDULERS: dict[str, dict[str, Any]] = {}

PIPELINES: dict[str, dict[str, dict[str, Any]]] = {}
"""What differs from the class's small size, by pipeline and component."""

CALLS: dict[str, dict[str, Any]] = {}
"""Arguments of a pipeline's call that replace those from `ARGUMENTS`."""


class CannotBuildError(Exception):
    """A pipeline that is not made here; the message says why."""


class Output(dict[str, Any]):
    """What a text encoder returns, under every name that pipelines read."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class SmallEncoder(torch.nn.Module):
    """Stand-in for a text or image encoder."""

    def __init__(self, width: int = WIDTH, num_layers: int = 40) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, width)
        self.mixing = torch.nn.Linear(width, width)
        self.num_layers = num_layers
        self.config = Config(
            hidden_size=width,
            projection_dim=width,
            d_model=width,
            num_hidden_layers=num_layers,
            image_size=SIDE,
            eos_token_id=1,
            use_attention_mask=False,
        )
        self.config["text_config"] = self.config["vision_config"] = self.config

    @property
    def dtype(self) -> torch.dtype:
        return self.mixing.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.mixing.weight.device

    def forward(self, input_ids: Any = None, *args: Any, pixel_values: Any = None, **others: Any) -> Output:
        if input_ids is not None and input_ids.is_floating_point():
            input_ids, pixel_values = None, input_ids
        if input_ids is None:
            flat = pixel_values.flatten(1)[:, : TOKENS * 7 : 7]
            input_ids = (flat.abs() * 50).long() % 1000
        hidden = self.embedding(input_ids % 1000)
        hidden = hidden + torch.tanh(self.mixing(hidden.mean(dim=1, keepdim=True)))
        layers = tuple(hidden * (1 + idx / 64) for idx in range(self.num_layers + 1))
        pooled = hidden.mean(dim=1)
        return Output(
            last_hidden_state=hidden,
            hidden_states=layers,
            pooler_output=pooled,
            text_embeds=pooled,
            image_embeds=pooled,
            logits=hidden,
        )


class Config(dict[str, Any]):
    """Attributes of a stand-in's config."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def small_tokenizer() -> Any:
    """A tokenizer of words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "</s>", "<s>", "<unk>"]
    words = ["a", "red", "blue", "cat", "blurry", "of", "the", "system", "user", "assistant", "describe"]
    vocabulary = {word: idx for idx, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        model_max_length=TOKENS,
    )
    made.chat_template = (
        "{% for message in messages %}{{ message['role'] }} {% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{{ part.text or '' }}"
        "{% endfor %}{% endif %} {% endfor %}"
    )
    return made


class SmallImageProcessor:
    """Stand-in for a CLIP or SigLIP image processor."""

    size: typing.ClassVar[dict[str, int]] = {"height": SIDE, "width": SIDE, "shortest_edge": SIDE}

    def __call__(self, images: Any = None, *args: Any, **options: Any) -> Any:
        images = images if isinstance(images, list) else [images]
        arrays = [
            np.asarray(image.resize((8, 8)) if hasattr(image, "resize") else image, dtype=np.float32)
            for image in images
        ]
        pixels = torch.stack([torch.from_numpy(np.resize(array, (3, 8, 8))) / 255 for array in arrays])
        return transformers.BatchFeature({"pixel_values": pixels})

    preprocess = __call__


def picture(seed: int = 0, *, width: int = SIDE, height: int = SIDE) -> Any:
    """A picture of smooth noise."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
    return PIL.Image.fromarray(small).resize((width, height))


def mask() -> Any:
    """A mask whose right half is white."""
    array = np.zeros((SIDE, SIDE), dtype=np.uint8)
    array[:, SIDE // 2 :] = 255
    return PIL.Image.fromarray(array, mode="L")


def movie(num_frames: int = FRAMES) -> list[Any]:
    return [picture(seed) for seed in range(num_frames)]


ARGUMENTS: dict[str, Any] = {
    "prompt": "a red cat",
    "negative_prompt": "blurry",
    "height": SIDE,
    "width": SIDE,
    "num_frames": FRAMES,
    "num_inference_steps": STEPS,
    "guidance_scale": 3.0,
    "true_cfg_scale": 2.0,
    "max_sequence_length": TOKENS,
    "output_type": "np",
    "image": picture,
    "control_image": lambda: picture(1),
    "mask_image": mask,
    "video": movie,
}
"""Arguments of calls, for every pipeline that takes them; functions are called."""


@dataclass(frozen=True, slots=True)
class SmallPipeline:
    """A pipeline, and the arguments of a call."""

    pipeline: Any
    args: dict[str, Any]


def pipeline_names() -> list[str]:
    """Names of all pipelines of diffusers with a transformer."""
    found = [name for name in dir(diffusers) if "Pipeline" in name]
    classes = {name: getattr(diffusers, name) for name in found}
    return [
        name
        for name, kind in classes.items()
        if inspect.isclass(kind) and issubclass(kind, DiffusionPipeline) and kind is not DiffusionPipeline
        if any("transformer" in part for part in inspect.signature(kind.__init__).parameters)
    ]


def small_pipeline(name: str, *, seed: int = 0) -> Any:
    """A pipeline with random weights; equal seeds give equal weights.

    Raises: CannotBuildError.
    """
    kind = getattr(diffusers, name)
    changes = PIPELINES.get(name, {})
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = {p.name: _part(p, changes.get(p.name, {})) for p in parameters if _is_made(p, changes)}
    pipeline = kind(**parts)
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def small_call(name: str) -> dict[str, Any]:
    """Arguments of a call, with guidance and every file that it takes."""
    parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
    chosen = {**{key: value for key, value in ARGUMENTS.items() if key in parameters}, **CALLS.get(name, {})}
    return {key: value() if callable(value) else value for key, value in chosen.items() if value is not None}


def _is_made(parameter: inspect.Parameter, changes: Mapping[str, Any]) -> bool:
    if parameter.name in changes:
        return changes[parameter.name] is not None
    return parameter.default is inspect.Parameter.empty


def _part(parameter: inspect.Parameter, changes: Any) -> Any:
    name = parameter.name
    if callable(changes):
        return changes()
    if not isinstance(changes, dict):
        return changes
    if "tokenizer" in name:
        return small_tokenizer()
    if name == "feature_extractor" or name == "image_processor":
        return SmallImageProcessor()
    if re.search("text_encoder|image_encoder", name):
        return SmallEncoder(**changes)
    if name in ("requires_safety_checker", "safety_checker"):
        return None if name == "safety_checker" else False
    kind = _class_of(parameter.annotation, name)
    if "scheduler" in name:
        return kind(**{**SCHEDULERS.get(kind.__name__, {}), **changes})
    return kind(**{**MODELS.get(kind.__name__, {}), **changes})


def _class_of(annotation: Any, name: str) -> Any:
    """The class of a component, the first one where there are several."""
    if isinstance(annotation, str):
        annotation = getattr(diffusers, annotation, None) or annotation
    for kind in [annotation, *typing.get_args(annotation)]:
        for inner in [kind, *typing.get_args(kind)]:
            if (
                inspect.isclass(inner)
                and inner is not type(None)
                and inner.__module__.startswith("diffusers")
            ):
                if inner.__name__ == "KarrasDiffusionSchedulers":
                    return diffusers.DDIMScheduler
                return inner
    raise CannotBuildError(f"no small {name}: {annotation}")
