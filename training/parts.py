"""The untrained parts of `shapes`, and its directory: diffusers' own classes at a small size.

Like Wan2.2-TI2V-5B: a timestep per token, so that one model takes a prompt, or a prompt and an
image. 24 heads, so that every degree from 1 to 8 works.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from gfgen.models.geometry.checkpoint import SETTINGS_NAME
from gfgen.models.loading.components import load_pipeline, without_progress_bars
from training.supply import vocabulary

NUM_HEADS = 24
STEPS = 6
GUIDANCE_SCALE = 2.0
DEFAULTS = {
    "width": 128,
    "height": 128,
    "frames": 17,
    "fps": 8,
    "steps": STEPS,
    "guidance_scale": GUIDANCE_SCALE,
}
"""What a job does not say."""
FLOW_SHIFT = 12.0
PADDING_KEY = 0.1
"""How long the key of padding is at first; next to nothing beside words, and all there is without one."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """How large the parts are."""

    head_dim: int = 12
    """Of 12, the rotary embedding gives 4 to time, rows and columns each; of 8, 2 to rows and columns."""
    num_layers: int = 6
    ffn_dim: int = 576
    text_dim: int = 128
    text_layers: int = 3
    latent_channels: int = 16
    encoder_dim: int = 24
    decoder_dim: int = 32
    dim_mult: tuple[int, ...] = (1, 2, 2)
    """The last two are equal: the residual VAE's shortcuts cannot add channels without halving sides."""


FULL = Dimensions()
MINIATURE = Dimensions(
    head_dim=8, num_layers=1, ffn_dim=64, text_dim=32, text_layers=1, encoder_dim=8, decoder_dim=8
)
"""For rehearsals and tests: it learns nothing worth having."""


@dataclass(slots=True)
class Parts:
    """The components of the pipeline that have weights, and its tokenizer."""

    tokenizer: Any
    text_encoder: Any
    vae: Any
    transformer: Any

    def pipeline(self, *, flow_shift: float = FLOW_SHIFT) -> Any:
        return WanPipeline(
            tokenizer=self.tokenizer,
            text_encoder=self.text_encoder,
            vae=self.vae,
            scheduler=unipc(flow_shift=flow_shift),
            transformer=self.transformer,
            expand_timesteps=True,
        )


def new_parts(dimensions: Dimensions = FULL) -> Parts:
    """All parts with their first weights, drawn from torch's global generator."""
    tokenizer = new_tokenizer()
    return Parts(
        tokenizer=tokenizer,
        text_encoder=_text_encoder(dimensions, vocab_size=len(tokenizer)),
        vae=_vae(dimensions),
        transformer=_transformer(dimensions),
    )


def unipc(*, flow_shift: float) -> Any:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=flow_shift,
    )


def new_tokenizer() -> Any:
    """A token for each word of the prompts' language; capitals do not count, other words are <unk>."""
    ids = dict(vocabulary())
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", ids["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def save(
    parts: Parts, directory: Path, *, flow_shift: float = FLOW_SHIFT, dtype: torch.dtype = torch.float16
) -> None:
    """Write the pipeline's directory, its weights in this dtype."""
    pipeline = parts.pipeline(flow_shift=flow_shift)
    with without_progress_bars():
        for module in (parts.text_encoder, parts.vae, parts.transformer):
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype).contiguous()
        pipeline.save_pretrained(str(directory))
    text = json.dumps({"defaults": DEFAULTS}, indent=2) + "\n"
    (directory / SETTINGS_NAME).write_text(text, encoding="utf-8")


def load(directory: Path, *, device: str = "cpu") -> Parts:
    """The parts of a pipeline's directory in fp32, ready to be used."""
    loaded = load_pipeline(WanPipeline, directory, device=device, dtype=torch.float32)
    parts = Parts(loaded.tokenizer, loaded.text_encoder, loaded.vae, loaded.transformer)
    for module in (parts.text_encoder, parts.vae, parts.transformer):
        module.eval().requires_grad_(False)
    return parts


def set_latent_scale(vae: Any, mean: Sequence[float], std: Sequence[float]) -> None:
    """What latents are normalized by, from now on and in the saved config."""
    vae.register_to_config(latents_mean=list(mean), latents_std=list(std))


def _text_encoder(dimensions: Dimensions, *, vocab_size: int) -> Any:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocab_size,
            d_model=dimensions.text_dim,
            d_kv=32,
            d_ff=2 * dimensions.text_dim,
            num_layers=dimensions.text_layers,
            num_heads=max(1, dimensions.text_dim // 32),
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def _vae(dimensions: Dimensions) -> Any:
    """Pixels are folded into patches of 2 x 2, then halved twice: 1/8 in space, 1/4 in time."""
    channels = dimensions.latent_channels
    return AutoencoderKLWan(
        base_dim=dimensions.encoder_dim,
        decoder_base_dim=dimensions.decoder_dim,
        z_dim=channels,
        dim_mult=list(dimensions.dim_mult),
        num_res_blocks=1,
        temperal_downsample=[True] * (len(dimensions.dim_mult) - 1),
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=2 ** len(dimensions.dim_mult),
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
    )


def _transformer(dimensions: Dimensions) -> Any:
    model = WanTransformer3DModel(
        num_attention_heads=NUM_HEADS,
        attention_head_dim=dimensions.head_dim,
        in_channels=dimensions.latent_channels,
        out_channels=dimensions.latent_channels,
        text_dim=dimensions.text_dim,
        freq_dim=128,
        ffn_dim=dimensions.ffn_dim,
        num_layers=dimensions.num_layers,
    )
    _start_well(model)
    return model


@torch.no_grad()
def _start_well(model: Any) -> None:
    """First weights of the transformer from which it learns fast.

    Blocks begin as the identity and the output as zero. Prompts are padded to 512 tokens that
    cross-attention does see, some 500 of them without a word: all the same, as their embedding is 0.
    So these begin without a value, and with a key that points away from all queries; else nearly all
    attention would go to them, and little be learned from words.

    Source: https://arxiv.org/abs/2212.09748 (adaLN-Zero)
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    model.scale_shift_table.zero_()
    nn.init.normal_(model.condition_embedder.time_proj.weight, std=0.02)
    nn.init.zeros_(model.proj_out.weight)
    for block in model.blocks:
        block.scale_shift_table.zero_()
        block.attn2.norm_k.weight.fill_(2.0)
        towards = torch.randn_like(block.attn2.to_q.bias).sign()
        block.attn2.to_q.bias.copy_(towards)
        block.attn2.to_k.bias.copy_(-PADDING_KEY * towards)
