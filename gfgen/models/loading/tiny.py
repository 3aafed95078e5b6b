"""Small random-weight pipelines of the real classes, made offline in seconds.

    python -m gfgen.models.loading.tiny DIR [NAME...]

They run the same code as the full-size models, at a size for one CPU core. Their pictures show colourful
shapes instead of noise, so that people see progress. 24 heads allow every degree from 1 to 8. The bytes are
reproducible.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)

from gfgen.errors import ModelError
from gfgen.models.geometry.checkpoint import SETTINGS_NAME
from gfgen.models.loading import tiny_text, tiny_weights
from gfgen.models.loading.components import without_progress_bars

SEED = 20260613
NUM_HEADS = 24
HEAD_DIM = 8
"""24 heads of 8: the smallest even split of a head over three rotary axes."""


def make_tiny(directory: Path, names: Sequence[str] | None = None) -> list[Path]:
    """The directories of the tiny models of these names (all by default), made where missing.

    Each is written to a temporary folder and renamed, so it appears complete or not at all.

    Raises: ModelError for an unknown name or a directory that cannot be written.
    """
    chosen = tuple(MAKERS) if names is None else tuple(names)
    for name in chosen:
        if name not in MAKERS:
            raise ModelError(f"tiny model {name!r} is unknown; there are {', '.join(MAKERS)}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [_make_one(directory, name) for name in chosen]
    except OSError as error:
        raise ModelError(
            f"{directory}: cannot be written ({error.strerror}); give a directory that can"
        ) from error


def _make_one(directory: Path, name: str) -> Path:
    final = directory / name
    if final.is_dir():
        return final
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory))
    try:
        with _same_numbers_each_time(), without_progress_bars():
            defaults = MAKERS[name](partial)
        (partial / SETTINGS_NAME).write_text(
            json.dumps({"defaults": defaults}, indent=2) + "\n", encoding="utf-8"
        )
        partial.chmod(0o755)  # mkdtemp makes it private
        os.rename(partial, final)
    except OSError:
        if not final.is_dir():  # else another process made the same bytes first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


@contextmanager
def _same_numbers_each_time() -> Iterator[None]:
    """A fixed seed and one thread: with more, factorizations round differently."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            yield
    finally:
        torch.set_num_threads(num_threads)


def _make_wan(directory: Path) -> dict[str, Any]:
    """Like Wan2.2-TI2V-5B: a timestep per token, the residual VAE of 48 channels."""
    WanPipeline(
        tokenizer=tiny_text.t5_tokenizer(),
        text_encoder=tiny_text.umt5(),
        vae=_wan22_vae(),
        scheduler=_unipc(flow_shift=5.0),
        transformer=_wan_transformer(in_channels=48, out_channels=48),
        expand_timesteps=True,
    ).save_pretrained(str(directory))
    return VIDEO_DEFAULTS


def _make_wan_moe(directory: Path) -> dict[str, Any]:
    """Like Wan2.2-T2V-A14B: two experts, the VAE of Wan 2.1."""
    return _make_two_experts(WanPipeline, directory, in_channels=16, boundary_ratio=0.875)


def _make_wan_moe_i2v(directory: Path) -> dict[str, Any]:
    """Like Wan2.2-I2V-A14B: 20 channels of condition in addition to the 16 of the latents."""
    return _make_two_experts(WanImageToVideoPipeline, directory, in_channels=36, boundary_ratio=0.9)


def _make_two_experts(
    pipeline_class: Any, directory: Path, *, in_channels: int, boundary_ratio: float
) -> dict[str, Any]:
    pipeline_class(
        tokenizer=tiny_text.t5_tokenizer(),
        text_encoder=tiny_text.umt5(),
        vae=_wan21_vae(),
        scheduler=_unipc(flow_shift=3.0),
        transformer=_wan_transformer(in_channels=in_channels, out_channels=16),
        transformer_2=_wan_transformer(in_channels=in_channels, out_channels=16),
        boundary_ratio=boundary_ratio,
    ).save_pretrained(str(directory))
    return VIDEO_DEFAULTS


def _make_qwen_image(directory: Path) -> dict[str, Any]:
    tokenizer = tiny_text.qwen_tokenizer()
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=_qwen_vae(),
        text_encoder=tiny_text.qwen_encoder(vocab_size=len(tokenizer)),
        tokenizer=tokenizer,
        transformer=_qwen_transformer(),
    ).save_pretrained(str(directory))
    return {"width": 256, "height": 256, "steps": 8}


def _unipc(*, flow_shift: float) -> Any:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=flow_shift,
    )


def _wan_transformer(*, in_channels: int, out_channels: int) -> Any:
    model = WanTransformer3DModel(
        num_attention_heads=NUM_HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=in_channels,
        out_channels=out_channels,
        text_dim=tiny_text.TEXT_DIM,
        freq_dim=64,
        ffn_dim=384,
        num_layers=2,
    )
    tiny_weights.shape_wan_transformer(model)
    return model.eval()


def _qwen_transformer() -> Any:
    model = QwenImageTransformer2DModel(
        num_attention_heads=NUM_HEADS,
        attention_head_dim=HEAD_DIM,
        axes_dims_rope=(4, 2, 2),
        in_channels=64,
        out_channels=16,
        joint_attention_dim=tiny_text.TEXT_DIM,
        num_layers=2,
    )
    tiny_weights.shape_qwen_transformer(model)
    return model.eval()


def _wan22_vae() -> Any:
    vae = AutoencoderKLWan(
        base_dim=16,
        z_dim=48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
    )
    return _shaped(vae)


def _wan21_vae() -> Any:
    return _shaped(AutoencoderKLWan(**SMALL_VAE))


def _qwen_vae() -> Any:
    return _shaped(AutoencoderKLQwenImage(**SMALL_VAE))


def _shaped(vae: Any) -> Any:
    tiny_weights.shape_vae(vae)
    return vae.eval()


VIDEO_DEFAULTS = {"width": 128, "height": 128, "frames": 17, "fps": 8, "steps": 8}
SMALL_VAE: dict[str, Any] = {
    "base_dim": 12,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "z_dim": 16,
    "latents_mean": [0.1] * 16,
    "latents_std": [0.9] * 16,
}

MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tiny-wan": _make_wan,
    "tiny-wan-moe": _make_wan_moe,
    "tiny-wan-moe-i2v": _make_wan_moe_i2v,
    "tiny-qwen-image": _make_qwen_image,
}


if __name__ == "__main__":
    try:
        make_tiny(Path(sys.argv[1]), sys.argv[2:] or None)
    except ModelError as error:
        sys.exit(str(error))
