"""Pipelines of diffusers at small size with random weights, made offline.

Transformers, VAEs, ControlNets and schedulers are of the pipelines' own classes. Text and image encoders,
tokenizers and processors are stand-ins of a few lines: a prompt is encoded in one task either way.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
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
_HUNYUAN_DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 16,
    "patch_size": 2,
    "sample_size": 32,
    "hidden_size": 32,
    "cross_attention_dim": WIDTH,
    "cross_attention_dim_t5": WIDTH,
    "pooled_projection_dim": 4,
    "text_len": 77,
    "text_len_t5": 256,
}
_JOY_IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": WIDTH,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}
_KANDINSKY: dict[str, Any] = {
    "in_text_dim": WIDTH,
    "in_text_dim2": WIDTH,
    "time_dim": 16,
    "model_dim": 32,
    "ff_dim": 32,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
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

_UNET_SDXL = {
    "cross_attention_dim": 2 * WIDTH,
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": WIDTH + 6 * 8,
}

MODELS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        "in_channels": 16,
        "out_channels": 16,
        "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": (2, 4),
        "cross_attention_dim": WIDTH,
    },
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
    "AceStepTransformer1DModel": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "in_channels": 24,
        "audio_acoustic_hidden_dim": 8,
        "encoder_hidden_size": 32,
    },
    "AceStepConditionEncoder": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "text_hidden_dim": WIDTH,
        "timbre_hidden_dim": 8,
        "num_lyric_encoder_hidden_layers": 1,
        "num_timbre_encoder_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "AutoencoderOobleck": {
        "encoder_hidden_size": 8,
        "downsampling_ratios": [2, 4],
        "channel_multiples": [1, 2],
        "decoder_channels": 8,
        "decoder_input_channels": 8,
        "sampling_rate": 800,
    },
    "AllegroTransformer3DModel": {
        **_HEADS,
        "num_layers": 2,
        "caption_channels": WIDTH,
        "sample_height": 8,
        "sample_width": 8,
        "sample_frames": 8,
        "attention_head_dim": 24,
        "cross_attention_dim": 48,
    },
    "AutoencoderKLAllegro": {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2},
    "UVit2DModel": {
        "hidden_size": 32,
        "cond_embed_dim": WIDTH,
        "micro_cond_encode_dim": 8,
        "micro_cond_embed_dim": 40,
        "encoder_hidden_size": WIDTH,
        "vocab_size": 32,
        "codebook_size": 32,
        "block_out_channels": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "in_channels": 32,
        "num_res_blocks": 1,
        "block_num_heads": 2,
        "sample_size": 32,
    },
    "AnyFlowTransformer3DModel": _WAN,
    "AnyFlowFARTransformer3DModel": {**_WAN, "chunk_partition": (1, 2)},
    "AuraFlowTransformer2DModel": {
        **_HEADS,
        "sample_size": 32,
        "in_channels": 16,
        "out_channels": 16,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "joint_attention_dim": WIDTH,
        "caption_projection_dim": 32,
        "pos_embed_max_size": 256,
    },
    "BriaFibo2Transformer2DModel": {
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "cap_feat_dim": 3 * WIDTH,
        "injection_layer_ids": (0, 1),
        "min_num_gist_tokens": 4,
        "max_num_gist_tokens": 8,
        "gist_step": 2,
        "gist_min_text_len": 4,
        "gist_max_text_len": 16,
        "axes_dims": (4, 6, 6),
        "axes_lens": (256, 64, 64),
        "in_channels": 16,
    },
    "BriaFiboTransformer2DModel": {
        **_FLUX,
        "in_channels": 16,
        "joint_attention_dim": 2 * WIDTH,
        "text_encoder_dim": WIDTH,
    },
    "BriaTransformer2DModel": {**_FLUX, "in_channels": 64},
    "ChromaTransformer2DModel": {
        **_FLUX,
        "in_channels": 64,
        "approximator_num_channels": 16,
        "approximator_hidden_dim": 32,
        "approximator_layers": 1,
    },
    "ChronoEditTransformer3DModel": {**_WAN, "in_channels": 36, "image_dim": WIDTH},
    "CogView3PlusTransformer2DModel": {
        **_COG,
        "condition_dim": 8,
        "pos_embed_max_size": 16,
        "sample_size": 8,
    },
    "CogView4Transformer2DModel": {
        **_COG,
        "condition_dim": 8,
        "pos_embed_max_size": 16,
        "sample_size": 8,
        "rope_axes_dim": (8, 8),
    },
    "CosmosTransformer3DModel": {
        **_HEADS,
        "num_layers": 2,
        "text_embed_dim": WIDTH,
        "adaln_lora_dim": 4,
        "max_size": (16, 16, 16),
        "in_channels": 17,
        "attention_head_dim": 32,
    },
    "CosmosControlNetModel": {
        **_HEADS,
        "n_controlnet_blocks": 1,
        "model_channels": 64,
        "attention_head_dim": 32,
        "text_embed_dim": WIDTH,
        "adaln_lora_dim": 4,
        "max_size": (16, 16, 16),
    },
    "AutoencoderKLCosmos": {
        "encoder_block_out_channels": (8, 8, 8, 8),
        "decode_block_out_channels": (8, 8, 8, 8),
        "num_layers": 1,
        "attention_resolutions": (8,),
        "resolution": 64,
    },
    "Cosmos3OmniTransformer": {
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 32,
        "latent_channel": 16,
        "patch_latent_dim": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1000,
        "dtype": "float32",
    },
    "DiTTransformer2DModel": {
        **_HEADS,
        "num_layers": 2,
        "sample_size": 32,
        "in_channels": 16,
        "out_channels": 32,
        "num_embeds_ada_norm": 1000,
    },
    "EasyAnimateTransformer3DModel": {
        **_HEADS,
        "num_layers": 2,
        "mmdit_layers": 1,
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "time_embed_dim": 8,
        "text_embed_dim": WIDTH,
        "sample_width": 8,
        "sample_height": 8,
    },
    "AutoencoderKLMagvit": {
        "block_out_channels": [8, 8, 8, 8],
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "spatial_group_norm": False,
    },
    "ErnieImageTransformer2DModel": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_layers": 2,
        "ffn_hidden_size": 32,
        "in_channels": 64,
        "out_channels": 64,
        "text_in_dim": WIDTH,
        "rope_axes_dim": (4, 6, 6),
    },
    "AutoencoderKLFlux2": {
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "latent_channels": 16,
        "norm_num_groups": 4,
        "sample_size": SIDE,
    },
    "Flux2Transformer2DModel": {
        **_HEADS,
        "in_channels": 64,
        "num_layers": 2,
        "num_single_layers": 1,
        "joint_attention_dim": 3 * WIDTH,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "GlmImageTransformer2DModel": {**_COG, "condition_dim": 8, "prior_vq_quantizer_codebook_size": 100},
    "HeliosTransformer3DModel": {**_WAN, "rope_dim": (4, 6, 6)},
    "HiDreamImageTransformer2DModel": {
        **_HEADS,
        "patch_size": 2,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "caption_channels": [WIDTH, WIDTH],
        "text_emb_dim": 2 * WIDTH,
        "axes_dims_rope": (4, 6, 6),
        "max_resolution": (64, 64),
        "llama_layers": [0, 1],
    },
    "HunyuanDiT2DModel": {**_HUNYUAN_DIT, "num_layers": 2},
    "HunyuanDiT2DControlNetModel": {**_HUNYUAN_DIT, "transformer_num_layers": 2},
    "HunyuanImageTransformer2DModel": {
        **_HEADS,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": WIDTH,
        "text_embed_2_dim": WIDTH,
        "rope_axes_dim": (8, 8),
    },
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "block_out_channels": (32, 32, 32),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
        "sample_size": SIDE,
        "scaling_factor": 0.5,
    },
    "AutoencoderKLHunyuanImageRefiner": {
        "latent_channels": 16,
        "block_out_channels": (32, 32, 32, 32, 32),
        "layers_per_block": 1,
    },
    "HunyuanVideo15Transformer3DModel": {
        **_HEADS,
        "in_channels": 33,
        "out_channels": 16,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": WIDTH,
        "text_embed_2_dim": WIDTH,
        "image_embed_dim": WIDTH,
        "rope_axes_dim": (4, 6, 6),
    },
    "AutoencoderKLHunyuanVideo15": {
        "latent_channels": 16,
        "block_out_channels": (32, 32, 32, 32, 32),
        "layers_per_block": 1,
    },
    "HunyuanVideoFramepackTransformer3DModel": {
        **_HUNYUAN,
        "has_image_proj": True,
        "image_proj_dim": WIDTH,
        "has_clean_x_embedder": True,
        "image_condition_type": None,
    },
    "Ideogram4Transformer2DModel": {
        **_HEADS,
        "in_channels": 64,
        "num_layers": 2,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": WIDTH,
        "mrope_section": (4, 2, 2),
    },
    "JoyImageEditTransformer3DModel": _JOY_IMAGE,
    "JoyImageEditPlusTransformer3DModel": _JOY_IMAGE,
    "Kandinsky5Transformer3DModel": {
        "in_visual_dim": 16,
        "out_visual_dim": 16,
        **_KANDINSKY,
    },
    "Krea2Transformer2DModel": {
        **_HEADS,
        "num_layers": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "timestep_embed_dim": 16,
        "text_hidden_dim": WIDTH,
        "num_text_layers": 2,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 1,
        "text_intermediate_size": 32,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 6, 6),
    },
    "LatteTransformer3DModel": {
        **_HEADS,
        "num_layers": 1,
        "in_channels": 16,
        "out_channels": 32,
        "cross_attention_dim": 32,
        "sample_size": 32,
        "patch_size": 2,
        "caption_channels": WIDTH,
        "video_length": 9,
        "norm_type": "ada_norm_single",
        "num_embeds_ada_norm": 1000,
        "attention_bias": True,
    },
    "LongCatImageTransformer2DModel": {**_FLUX, "pooled_projection_dim": WIDTH},
    "LongCatAudioDiTTransformer": {
        "dit_dim": 32,
        "dit_depth": 2,
        "dit_heads": 2,
        "dit_text_dim": WIDTH,
        "latent_dim": 8,
    },
    "LongCatAudioDiTVae": {
        "channels": 8,
        "c_mults": [1, 2],
        "strides": [2, 4],
        "latent_dim": 8,
        "encoder_latent_dim": 16,
        "downsampling_ratio": 8,
        "sample_rate": 800,
    },
    "Lumina2Transformer2DModel": {
        "sample_size": 32,
        "hidden_size": 32,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 8,
        "axes_dim_rope": (4, 6, 6),
        "axes_lens": (256, 64, 64),
        "cap_feat_dim": WIDTH,
    },
    "LuminaNextDiT2DModel": {
        "sample_size": 32,
        "in_channels": 16,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 8,
        "cross_attention_dim": WIDTH,
    },
    "MochiTransformer3DModel": {
        **_HEADS,
        "num_layers": 2,
        "pooled_projection_dim": 16,
        "text_embed_dim": WIDTH,
        "time_embed_dim": 16,
        "max_sequence_length": TOKENS,
    },
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
    },
    "MotifVideoTransformer3DModel": {
        **_HEADS,
        "num_layers": 1,
        "num_single_layers": 1,
        "text_embed_dim": WIDTH,
        "rope_axes_dim": (4, 6, 6),
        "image_embed_dim": None,
    },
    "NucleusMoEImageTransformer2DModel": {
        **_HEADS,
        "num_layers": 4,
        "joint_attention_dim": WIDTH,
        "axes_dims_rope": (4, 6, 6),
        "num_experts": 4,
        "moe_intermediate_dim": 16,
        "capacity_factors": [2.0, 2.0, 2.0, 2.0],
        "out_channels": 16,
    },
    "OmniGenTransformer2DModel": {
        "in_channels": 16,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "num_layers": 2,
        "pad_token_id": 0,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "time_step_dim": 16,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "type": "su"},
    },
    "OvisImageTransformer2DModel": _FLUX,
    "PRXTransformer2DModel": {
        "context_in_dim": WIDTH,
        "hidden_size": 32,
        "num_heads": 2,
        "depth": 2,
        "axes_dim": (8, 8),
    },
    "PixArtTransformer2DModel": {
        **_HEADS,
        "in_channels": 16,
        "out_channels": 32,
        "num_layers": 2,
        "cross_attention_dim": 32,
        "sample_size": 32,
        "caption_channels": WIDTH,
    },
    "QwenImage21Transformer2DModel": {
        **_HEADS,
        "in_channels": 64,
        "out_channels": 64,
        "num_layers": 2,
        "context_in_dim": WIDTH,
        "axes_dims_rope": (4, 6, 6),
    },
    "AutoencoderKLQwenImage21": {
        "base_dim": 8,
        "decoder_base_dim": 8,
        "dim_mult": [1, 1, 1, 1, 1],
        "num_res_blocks": 1,
    },
    "QwenImageControlNetModel": {**_QWEN},
    "SD3ControlNetModel": {
        **_HEADS,
        "num_layers": 2,
        "joint_attention_dim": WIDTH,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 2 * WIDTH,
        "sample_size": SIDE // 2,
    },
    "SanaControlNetModel": {**_SANA, "sample_size": 32, "num_layers": 1, "in_channels": 4, "out_channels": 4},
    "SanaTransformer2DModel": {**_SANA, "sample_size": 32, "in_channels": 4, "out_channels": 4},
    "SanaVideoTransformer3DModel": {**_SANA, "sample_size": 8},
    "AutoencoderDC": {
        "attention_head_dim": 4,
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "latent_channels": 4,
    },
    "SkyReelsV2Transformer3DModel": _WAN,
    "StableAudio3DiTModel": {
        "io_channels": 16,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "cond_token_dim": WIDTH,
        "global_cond_dim": WIDTH,
        "local_add_cond_dim": 17,
        "timestep_features_dim": 16,
        "num_memory_tokens": 4,
    },
    "AutoencoderSAME": {
        "patch_size": 8,
        "encoder_channels": 16,
        "encoder_c_mults": (2,),
        "encoder_strides": (4,),
        "encoder_transformer_depths": (1,),
        "latent_dim": 16,
        "dim_heads": 16,
        "sampling_rate": 800,
    },
    "StableAudioDiTModel": {
        "sample_size": 32,
        "in_channels": 8,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_attention_heads": 1,
        "out_channels": 8,
        "cross_attention_dim": WIDTH,
        "time_proj_dim": 16,
        "global_states_input_dim": 2 * WIDTH,
        "cross_attention_input_dim": WIDTH,
    },
    "StableAudioProjectionModel": {
        "text_encoder_dim": WIDTH,
        "conditioning_dim": WIDTH,
        "min_value": 0,
        "max_value": 32,
    },
    "VQModel": {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "num_vq_embeddings": 32,
        "latent_channels": 16,
        "lookup_from_codebook": True,
    },
    "WanAnimateTransformer3DModel": {
        **_WAN,
        "image_dim": WIDTH,
        "motion_encoder_channel_sizes": {
            "4": 8,
            "8": 8,
            "16": 8,
            "32": 8,
            "64": 8,
            "128": 8,
            "256": 8,
            "512": 8,
            "1024": 8,
        },
        "motion_encoder_size": 64,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 16,
        "face_encoder_hidden_dim": 16,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
    },
    "WanVACETransformer3DModel": {**_WAN, "vace_layers": [0, 1]},
    "ZImageControlNetModel": {
        **_ZIMAGE,
        "control_layers_places": [0, 1],
        "control_refiner_layers_places": [0],
        "control_in_dim": 16,
    },
    "LTX2VideoTransformer3DModel": {
        **_HEADS,
        "in_channels": 8,
        "out_channels": 8,
        "cross_attention_dim": 32,
        "audio_in_channels": 8,
        "audio_out_channels": 8,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 2,
        "caption_channels": WIDTH,
        "rope_double_precision": False,
    },
    "AutoencoderKLLTX2Video": {
        "latent_channels": 8,
        "block_out_channels": (8, 16, 32, 64),
        "decoder_block_out_channels": (8, 16, 32),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1),
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
    },
    "LTX2TextConnectors": {
        "caption_channels": WIDTH,
        "text_proj_in_factor": 41,
        "video_connector_num_attention_heads": 2,
        "video_connector_attention_head_dim": 16,
        "video_connector_num_layers": 1,
        "video_connector_num_learnable_registers": 8,
        "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": 16,
        "audio_connector_num_layers": 1,
        "audio_connector_num_learnable_registers": 8,
        "connector_rope_base_seq_len": TOKENS,
        "rope_double_precision": False,
    },
    "LTX2Vocoder": {
        "in_channels": 32,
        "hidden_channels": 16,
        "upsample_kernel_sizes": [4, 4],
        "upsample_factors": [2, 2],
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1]],
        "output_sampling_rate": 1000,
    },
    "LTX2LatentUpsamplerModel": {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1},
    "Kandinsky6SRVAE": {
        "encoder_block_out_channels": (8, 8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8, 8),
        "layers_per_block": 1,
    },
    "Kandinsky6SRTransformer3DModel": {
        "time_dim": 16,
        "model_dim": 32,
        "ff_dim": 32,
        "num_visual_blocks": 2,
        "axes_dims": (4, 6, 6),
    },
    "Kandinsky6Transformer3DModel": {
        **_KANDINSKY,
        "visual_token_type_num_embeddings": 2,
    },
    "StableAudio3DurationEmbedder": {"output_dim": WIDTH, "fourier_dim": 16},
    "LearnedClassifierFreeSamplingEmbeddings": {"learnable": True, "hidden_size": WIDTH, "length": TOKENS},
    "Transformer2DModel": {
        **_HEADS,
        "num_layers": 2,
        "cross_attention_dim": WIDTH,
        "sample_size": 32,
        "num_vector_embeds": 32,
        "num_embeds_ada_norm": 100,
        "norm_type": "ada_norm",
        "activation_fn": "geglu-approximate",
        "attention_bias": True,
    },
    "SanaWMTransformer3DModel": {
        "in_channels": 8,
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "linear_head_dim": 16,
        "caption_channels": WIDTH,
        "image_size": SIDE,
    },
    "AutoencoderKLLTX2Audio": {
        "base_channels": 8,
        "ch_mult": (1,),
        "num_res_blocks": 1,
        "resolution": 32,
        "latent_channels": 2,
        "mel_bins": 16,
    },
}
"""Arguments of each model class; all others keep their defaults."""

SCHEDULERS: dict[str, dict[str, Any]] = {
    "AmusedScheduler": {"mask_token_id": 31},
    "VQDiffusionScheduler": {"num_vec_classes": 32, "num_train_timesteps": 100},
}

_TWO_EXPERTS = {"transformer_2": {}, "boundary_ratio": 0.5}
_VAE8 = {
    "vae": {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
}
"""A VAE of the usual factor 8, where a pipeline assumes it."""
_SPRINT = {"transformer": {"guidance_embeds": True}, "scheduler": lambda: diffusers.SCMScheduler()}
_CONTROL = {"transformer": {"in_channels": 128, "out_channels": 64}}

PIPELINES: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": {
        "feature_extractor": lambda: None,
        "scheduler": {"steps_offset": 1, "clip_sample": False},
    },
    "StableDiffusionXLPipeline": {
        "scheduler": lambda: diffusers.EulerDiscreteScheduler(),
        "unet": _UNET_SDXL,
    },
    "LatentConsistencyModelPipeline": {
        "feature_extractor": lambda: None,
        "scheduler": lambda: diffusers.LCMScheduler(),
        "unet": {"time_cond_proj_dim": 256},
    },
    "EasyAnimateInpaintPipeline": {"transformer": {"in_channels": 33, "out_channels": 16}},
    "HeliosPipeline": {"scheduler": {"stages": 1}},
    "Kandinsky5I2IPipeline": {**_VAE8, "transformer": {"visual_cond": True}},
    "MotifVideoImage2VideoPipeline": {"transformer": {"image_embed_dim": WIDTH}},
    "QwenImageControlNetInpaintPipeline": {"controlnet": {"extra_condition_channels": 4}},
    "StableDiffusion3ControlNetInpaintingPipeline": {"controlnet": {"extra_conditioning_channels": 1}},
    "HunyuanDiTControlNetPipeline": _VAE8,
    "HunyuanDiTPAGPipeline": _VAE8,
    "HunyuanDiTPipeline": _VAE8,
    "HunyuanImageRefinerPipeline": {
        "transformer": {
            "in_channels": 64,
            "out_channels": 32,
            "patch_size": (1, 1, 1),
            "rope_axes_dim": (4, 6, 6),
            "text_embed_2_dim": None,
        }
    },
    "LTX2DFRPipeline": {"transformer": {"use_keyframes_abs_pos_embedding": True}},
    "SanaImageToVideoPipeline": {"vae": lambda: diffusers.AutoencoderKLWan(**_WAN_VAE)},
    "SanaVideoPipeline": {"vae": lambda: diffusers.AutoencoderKLWan(**_WAN_VAE)},
    "SanaSprintImg2ImgPipeline": _SPRINT,
    "SanaSprintPipeline": _SPRINT,
    "SkyReelsV2ImageToVideoPipeline": {"transformer": {"in_channels": 36, "image_dim": WIDTH}},
    "VQDiffusionPipeline": {"vqvae": {"vq_embed_dim": 16, "lookup_from_codebook": False}},
    "VisualClozeGenerationPipeline": {
        "transformer": {"in_channels": 144, "out_channels": 64},
        "resolution": SIDE,
    },
    "VisualClozePipeline": {"transformer": {"in_channels": 144, "out_channels": 64}, "resolution": SIDE},
    "ZImageOmniPipeline": {"transformer": {"siglip_feat_dim": WIDTH}},
    "ZImageControlNetInpaintPipeline": {"controlnet": {"control_in_dim": 33}},
    "CogVideoXFunControlPipeline": {"transformer": {"in_channels": 32}},
    "CogVideoXImageToVideoPipeline": {"transformer": {"in_channels": 32}},
    "CogView4ControlPipeline": {"transformer": {"in_channels": 32}},
    "FluxControlImg2ImgPipeline": _CONTROL,
    "FluxControlInpaintPipeline": {"transformer": {"in_channels": 128, "out_channels": 64}},
    "FluxControlPipeline": _CONTROL,
    "FluxFillPipeline": {"transformer": {"in_channels": 144, "out_channels": 64}},
    "HunyuanSkyreelsImageToVideoPipeline": {"transformer": {"in_channels": 32}},
    "HunyuanVideoImageToVideoPipeline": {"transformer": {"image_condition_type": "token_replace"}},
    "HunyuanVideo15ImageToVideoPipeline": {"transformer": {"target_size": SIDE}},
    "HunyuanVideo15Pipeline": {"transformer": {"target_size": SIDE, "task_type": "t2v"}},
    "Krea2Pipeline": {"text_encoder_select_layers": (1, 2)},
    "LucyEditPipeline": {"transformer": {"in_channels": 32}},
    "WanImageToVideoPipeline": {
        "transformer": {"in_channels": 36},
        "transformer_2": {"in_channels": 36},
        "boundary_ratio": 0.5,
        "image_encoder": None,
    },
    "WanPipeline": _TWO_EXPERTS,
    "WanVACEPipeline": _TWO_EXPERTS,
}
"""What differs from the class's small size, by pipeline and component."""

_LARGER = {"height": 2 * SIDE, "width": 2 * SIDE}
_LONG = {"num_frames": 17, "base_num_frames": 9, "overlap_history": 5}
"""A video in two sections."""
_CLOZE = {
    "task_prompt": "a red cat",
    "content_prompt": "a blue cat",
    "image": lambda: [[picture(), picture(1)], [picture(2), None]],
}

CALLS: dict[str, dict[str, Any]] = {
    "AnyFlowFARPipeline": {"video": None},
    "BriaFiboEditPipeline": {"prompt": '{"edit_instruction": "a red cat"}'},
    "Cosmos2_5_TransferPipeline": {"controls": lambda: movie(), "num_frames_per_chunk": FRAMES},
    "Cosmos3OmniPipeline": {"video": None},
    "CosmosVideoToWorldPipeline": {"video": None},
    "HunyuanVideoFramepackPipeline": {"num_frames": 17, "latent_window_size": 2},
    "Kandinsky6SRPipeline": {
        "video": lambda: [picture(seed, width=256, height=256) for seed in range(FRAMES)]
    },
    "Kandinsky6TI2VAPipeline": {"sample_audio": False},
    "LongCatImagePipeline": {"enable_prompt_rewrite": False},
    "LTX2DFRPipeline": {**_LARGER, "num_frames": 17},
    "LTX2HDRPipeline": _LARGER,
    "LTX2Pipeline": _LARGER,
    "LTX2ConditionPipeline": _LARGER,
    "LTX2InContextPipeline": _LARGER,
    "LTXI2VLongMultiPromptPipeline": {
        "decode_horizontal_tiles": 1,
        "decode_vertical_tiles": 1,
        "num_inference_steps": STEPS + 1,
    },
    "LTX2ImageToVideoPipeline": {**_LARGER, "image_crf": 0},
    "GlmImagePipeline": {"image": lambda: [picture()]},
    "SanaSprintImg2ImgPipeline": {"intermediate_timesteps": lambda: None},
    "SanaSprintPipeline": {"intermediate_timesteps": lambda: None},
    "SanaWMPipeline": {
        "c2w": lambda: np.tile(np.eye(4, dtype=np.float32), (FRAMES, 1, 1)),
        "intrinsics": [50.0, 50.0, 32.0, 32.0],
    },
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": _LONG,
    "SkyReelsV2DiffusionForcingPipeline": _LONG,
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": _LONG,
    "StableAudio3AudioToAudioPipeline": {"audio": lambda: torch.linspace(-1, 1, 1600).view(1, 2, 800)},
    "StableAudio3InpaintPipeline": {
        "audio": lambda: torch.linspace(-1, 1, 1600).view(1, 2, 800),
        "mask_start_seconds": 0.2,
        "mask_end_seconds": 0.5,
    },
    "VisualClozeGenerationPipeline": _CLOZE,
    "VisualClozePipeline": _CLOZE,
    "WanAnimatePipeline": {
        "pose_video": lambda: movie(),
        "face_video": lambda: movie(),
        "segment_frame_length": 5,
        "num_frames": None,
    },
    "CogVideoXFunControlPipeline": {"control_video": lambda: movie()},
    "DiTPipeline": {"class_labels": [1]},
    "EasyAnimateInpaintPipeline": {
        "video": lambda: movie_tensor(),
        "mask_video": lambda: movie_tensor() * 0 + 255,
    },
    "FluxKontextInpaintPipeline": {"_auto_resize": False},
    "FluxKontextPipeline": {"_auto_resize": False, "max_area": SIDE * SIDE},
    "HeliosPipeline": {"video": None},
    "HeliosPyramidPipeline": {"video": None},
    "Ideogram4Pipeline": {"guidance_scale": None, "guidance_schedule": [3.0] * STEPS},
}
"""Arguments of a pipeline's call that replace those from `ARGUMENTS`."""

MORE_CALLS: dict[str, list[dict[str, Any]]] = {
    "AnyFlowFARPipeline": [{"video": lambda: movie_tensor()[:, :, :1].transpose(1, 2)}],
    "BriaFibo2Pipeline": [
        {"mask": lambda: mask()},
        {
            "prompt": '{"short_description": "a red cat", "text_render": [{"text": "cat"}]}',
            "image": None,
            "text_images": lambda: [picture(2)],
        },
    ],
    "BriaFiboEditPipeline": [{"mask": lambda: mask()}],
    "Cosmos3OmniPipeline": [{"image": None, "video": lambda: movie()}],
    "Flux2KleinInpaintPipeline": [{"image_reference": lambda: picture(2)}],
    "FluxKontextInpaintPipeline": [{"image_reference": lambda: picture(2)}],
    "HeliosPipeline": [{"image": None, "video": lambda: movie(33)}],
    "HeliosPyramidPipeline": [{"image": None, "video": lambda: movie(33)}],
    "HunyuanVideoFramepackPipeline": [{"last_image": lambda: picture(2)}],
    "JoyImageEditPlusPipeline": [{"images": lambda: [picture(), picture(1)]}],
    "LTXI2VLongMultiPromptPipeline": [{"cond_image": lambda: picture()}],
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": [
        {"last_image": lambda: picture(2), "base_num_frames": 17, "overlap_history": None}
    ],
    "StableAudio3InpaintPipeline": [
        {"mask_start_seconds": None, "mask_end_seconds": None, "mask": lambda: torch.ones(1, 1, 800)}
    ],
    "WanAnimatePipeline": [
        {"mode": "replace", "background_video": lambda: movie(), "mask_video": lambda: movie()}
    ],
    "WanImageToVideoPipeline": [{"last_image": lambda: picture(2)}],
    "WanVACEPipeline": [
        {"mask": lambda: [mask() for _ in range(FRAMES)]},
        {"reference_images": lambda: [picture(2)]},
    ],
}
"""Further calls with files that the first one lacks: what replaces its arguments."""


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

    def __init__(self, width: int = WIDTH, num_layers: int = 40, *, is_pooled: bool = False) -> None:
        """`is_pooled`: the first output is the pooled one, as in CLIP with projection."""
        super().__init__()
        self.is_pooled = is_pooled
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
            image_token_index=20,
            pad_token_id=0,
            use_attention_mask=False,
        )
        inner = torch.nn.Module()
        inner.layers, inner.norm = torch.nn.ModuleList([torch.nn.Identity()]), torch.nn.Identity()
        self.model = torch.nn.Module()
        self.model.language_model = inner
        self.config["text_config"] = self.config["vision_config"] = self.config

    @property
    def dtype(self) -> torch.dtype:
        return self.mixing.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.mixing.weight.device

    @property
    def vision_tower(self) -> SmallEncoder:
        return self

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def forward(self, input_ids: Any = None, *args: Any, pixel_values: Any = None, **others: Any) -> Output:
        if input_ids is not None and input_ids.is_floating_point():
            input_ids, pixel_values = None, input_ids
        if input_ids is None:
            flat = pixel_values.flatten(1)[:, : TOKENS * 7 : 7]
            input_ids = (flat.abs() * 50).long() % 1000
        hidden = self.embedding(input_ids % 1000)
        hidden = hidden + torch.tanh(self.mixing(hidden.mean(dim=1, keepdim=True)))
        inner: Any = self.model.language_model
        hidden = inner.norm(inner.layers[-1](hidden))
        layers = tuple(hidden * (1 + idx / 64) for idx in range(self.num_layers + 1))
        pooled = hidden.mean(dim=1)
        first = {"text_embeds": pooled} if self.is_pooled else {}
        return Output(
            **first,
            last_hidden_state=hidden,
            hidden_states=layers,
            pooler_output=pooled,
            **({} if first else {"text_embeds": pooled}),
            image_embeds=pooled,
            logits=hidden,
        )


class Config(dict[str, Any]):
    """Attributes of a stand-in's config."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

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

    merge_size = 1
    size: typing.ClassVar[dict[str, int]] = {"height": SIDE, "width": SIDE, "shortest_edge": SIDE}

    def __call__(self, images: Any = None, *args: Any, **options: Any) -> Any:
        images = images if isinstance(images, list) else [images]
        arrays = [
            np.asarray(
                image.resize((8, 8)) if isinstance(image, PIL.Image.Image) else image, dtype=np.float32
            )
            for image in images
        ]
        pixels = torch.stack([torch.from_numpy(np.resize(array, (3, 8, 8))) / 255 for array in arrays])
        found = {"image_grid_thw": torch.tensor([[1, 2, 2]]), "spatial_shapes": torch.tensor([[4, 4]])}
        return transformers.BatchFeature({"pixel_values": pixels, **found})

    preprocess = __call__


class SmallProcessor:
    """Stand-in for a processor of prompts and pictures."""

    def __init__(self) -> None:
        self.tokenizer = small_tokenizer()
        self.image_processor = SmallImageProcessor()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: Any = None, images: Any = None, **options: Any) -> Any:
        texts = [text or ""] if isinstance(text or "", str) else text
        found = self.tokenizer(texts, padding=True, return_tensors="pt")
        if images is not None:
            found["pixel_values"] = self.image_processor(images)["pixel_values"]
            found["image_grid_thw"] = torch.tensor([[1, 2, 2]])
        return found

    def apply_chat_template(self, messages: Any, *, tokenize: bool = False, **options: Any) -> Any:
        return self("a red cat") if tokenize else "a red cat"


class SmallSafetyChecker:
    """Stand-in for Cosmos's guardrail: lets everything through."""

    def to(self, device: Any) -> SmallSafetyChecker:
        return self

    def check_text_safety(self, text: str) -> bool:
        return True

    def check_video_safety(self, video: Any) -> Any:
        return video


def movie_tensor() -> torch.Tensor:
    """[B, C, F, H, W]"""
    frames = [torch.from_numpy(np.array(frame)) for frame in movie()]
    return torch.stack(frames).permute(3, 0, 1, 2)[None].float()


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
    "guidance_scale": 3.0,
    "true_cfg_scale": 2.0,
    "max_sequence_length": TOKENS,
    "output_type": "np",
    "image": lambda: picture(),
    "control_image": lambda: picture(1),
    "mask_image": lambda: mask(),
    "control_mask": lambda: mask(),
    "video_length": FRAMES,
    "use_resolution_binning": False,
    "video": lambda: movie(),
}
"""Arguments of calls, for every pipeline that takes them; functions are called."""


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


def small_pipeline(name: str, *, seed: int = 0, changes: Mapping[str, Any] | None = None) -> Any:
    """A pipeline with random weights; equal seeds give equal weights.

    changes: what differs from `PIPELINES`, by component.

    Raises: CannotBuildError.
    """
    kind = getattr(diffusers, name)
    changes = {**PIPELINES.get(name, {}), **(changes or {})}
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = {p.name: _part(p, changes.get(p.name, {})) for p in parameters if _is_made(p, changes)}
    pipeline = kind(**parts)
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipeline.set_progress_bar_config(disable=True)
    if name == "AllegroPipeline":
        pipeline.vae.enable_tiling()
    if name.startswith("Kandinsky5"):
        pipeline.resolutions = [(SIDE, SIDE)]
    if name == "ZImageOmniPipeline":  # casts its inputs, whatever the weights have
        pipeline.to(torch.bfloat16)
    return pipeline


def small_calls(name: str) -> list[dict[str, Any]]:
    """Arguments of calls that together have every file that the pipeline takes, if this is possible."""
    return [small_call(name), *(small_call(name, more) for more in MORE_CALLS.get(name, ()))]


def small_call(name: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of a call, with guidance and the files that it takes at once."""
    parameters = inspect.signature(getattr(diffusers, name).__call__).parameters
    steps = 2 * STEPS if "strength" in parameters else STEPS  # it leaves out the first ones
    common = {**ARGUMENTS, "num_inference_steps": steps}
    known = {key: value for key, value in common.items() if key in parameters}
    chosen = {**known, **CALLS.get(name, {}), **(more or {})}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    return {key: value() if callable(value) else value for key, value in chosen.items()}


def _is_made(parameter: inspect.Parameter, changes: Mapping[str, Any]) -> bool:
    if parameter.name in changes:
        return changes[parameter.name] is not None
    is_needed = re.fullmatch(
        r"(text_encoder|tokenizer|transformer)(_[2-4])?|safety_checker|vae", parameter.name
    )
    return parameter.default is inspect.Parameter.empty or bool(
        is_needed and parameter.name != "transformer_2"
    )


def _part(parameter: inspect.Parameter, changes: Any) -> Any:
    name, annotation = parameter.name, str(parameter.annotation)
    if callable(changes):
        return changes()
    if not isinstance(changes, dict):
        return changes
    if "tokenizer" in name and name not in ("audio_tokenizer", "sound_tokenizer"):
        return SmallProcessor() if "Processor" in annotation else small_tokenizer()
    if name in ("feature_extractor", "image_processor", "siglip_processor"):
        return SmallImageProcessor()
    if "processor" in name:
        return SmallProcessor()
    if re.search("text_encoder|image_encoder|siglip|vision_language", name):
        return SmallEncoder(is_pooled="WithProjection" in annotation and "text" in name, **changes)
    if name == "requires_safety_checker":
        return False
    if name == "safety_checker":
        return SmallSafetyChecker() if "Cosmos" in annotation else None
    if name == "guider":
        from diffusers.guiders import ClassifierFreeGuidance

        return ClassifierFreeGuidance(guidance_scale=3.0)
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
                if inner.__name__ == "SchedulerMixin":
                    return diffusers.FlowMatchEulerDiscreteScheduler
                return inner
    raise CannotBuildError(f"no small {name}: {annotation}")
