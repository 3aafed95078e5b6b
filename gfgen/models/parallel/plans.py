"""How transformers of diffusers are shared among ranks: what is cut where, and which attentions exchange.

A plan names modules by patterns: `*` is one part of a name, `-1` the last module of a list, and modules
whose pattern ends in `?` may be missing. An entry of a module is for a parameter of its forward, by name, or
for one of its outputs, by index. hooks.py applies plans.

Some classes of diffusers have a `_cp_plan`, which is read as it is. `PLANS` adds to it, or replaces it. Runs
share only classes of `TOKEN_SIDES` (geometry/pipeline.py), which have been compared with one rank.

Streams are sequences of tokens that are cut: a stream has one length on the whole and one shard on each
rank, by `layout.shard_bounds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import nn

from gfgen.errors import ModelError

PICTURE, TEXT = "hidden_states", "encoder_hidden_states"
"""Streams, by diffusers' names: what is denoised (a picture or a video), and the prompt."""

ALL = "all"
"""An attention over all streams that are cut, one behind the other."""
JOINT = f"{PICTURE} {TEXT}"
"""An attention over these two streams."""
KEYS = "to "
"""`KEYS + PICTURE`: an attention whose queries every rank has, to keys and values of a cut stream."""


class Cut(NamedTuple):
    """Each rank keeps its shard of a tensor, or of each tensor in a list or dictionary.

    stream: the stream that begins with this tensor. Other tensors go along with a stream: their length along
    `dim` is its length.
    ndim: tensors with other numbers of dimensions stay whole.
    may_be_empty: whether the class works with empty shards, when there are fewer tokens than ranks.
    """

    dim: int
    stream: str | None = None
    ndim: int | None = None
    may_be_empty: bool = True


class CutStreams(NamedTuple):
    """As `Cut`, for a tensor that covers both streams, one behind the other: the shards of both."""

    dim: int
    streams: tuple[str, str]


class Count(NamedTuple):
    """A number of tokens at one end of a stream becomes the number of those in the rank's shard."""

    stream: str
    at_end: bool = False


class Refused(NamedTuple):
    """An argument that makes a forward unfit for sharing."""


class Gather(NamedTuple):
    """Every rank gets the whole stream from the shards."""

    dim: int
    stream: str = PICTURE


Change = Cut | CutStreams | Count | Refused | Gather
Entry = Mapping[str | int, Change]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one class is shared.

    attentions: module pattern -> the streams it attends over: `ALL`, names of streams, or `KEYS` and a name.
    replaces_class: whether the class's `_cp_plan` is ignored.
    """

    changes: Mapping[str, Entry] = field(default_factory=dict)
    attentions: Mapping[str, str] = field(default_factory=dict)
    replaces_class: bool = False


OUT: Entry = {0: Gather(1)}
BOTH: Entry = {PICTURE: Cut(1, PICTURE), TEXT: Cut(1, TEXT)}

HUNYUAN = Plan(
    {
        "rope": {0: Cut(0), 1: Cut(0)},
        "transformer_blocks.0": {PICTURE: Cut(1, PICTURE), TEXT: Cut(1, TEXT, may_be_empty=False)},
        "transformer_blocks.*": {
            "attention_mask": CutStreams(3, (PICTURE, TEXT)),
            "num_tokens": Count(PICTURE),
        },
        "single_transformer_blocks.*": {
            "attention_mask": CutStreams(3, (PICTURE, TEXT)),
            "num_tokens": Count(PICTURE),
        },
        "proj_out": OUT,
    },
    {"transformer_blocks.*.attn": JOINT, "single_transformer_blocks.*.attn": JOINT},
)

PLANS: Mapping[str, Plan] = {
    "CogVideoXTransformer3DModel": Plan(
        {"": {"image_rotary_emb": Cut(0)}, "transformer_blocks.0": BOTH, "proj_out": OUT},
        {"transformer_blocks.*.attn1": JOINT},
    ),
    "FluxTransformer2DModel": Plan(
        {"": {"controlnet_block_samples": Cut(1), "controlnet_single_block_samples": Cut(1)}}
    ),
    # Its attention with a cache of reference tokens is not marked as one to share.
    "Flux2Transformer2DModel": Plan(
        {"": {"img_ids": Cut(-2), "txt_ids": Cut(-2), "kv_cache_mode": Refused()}}
    ),
    # The class gathers the tokens behind each attention and feed-forward.
    "HeliosTransformer3DModel": Plan(
        {
            "blocks.0": {PICTURE: Cut(1, PICTURE)},
            "blocks.*": {
                "temb": Cut(1, ndim=4),
                "rotary_emb": Cut(1),
                "original_context_length": Count(PICTURE, at_end=True),
            },
            "blocks.-1": OUT,
        },
        {"blocks.*.attn1": PICTURE},
        replaces_class=True,
    ),
    "HunyuanImageTransformer2DModel": HUNYUAN,
    "HunyuanVideoTransformer3DModel": HUNYUAN,
    # The classes of LTX cut the text, too. Whole, it needs no exchange: video attends to it alone.
    "LTXVideoTransformer3DModel": Plan(
        {
            "": {PICTURE: Cut(1, PICTURE), "timestep": Cut(1, ndim=2)},
            "rope": {0: Cut(1), 1: Cut(1)},
            "proj_out": OUT,
        },
        {"transformer_blocks.*.attn1": PICTURE},
        replaces_class=True,
    ),
    # Every rank has all of the audio, which is short.
    "LTX2VideoTransformer3DModel": Plan(
        {
            "": {
                PICTURE: Cut(1, PICTURE),
                "timestep": Cut(1, ndim=2),
                "video_keyframes_mask": Cut(1),
                "video_self_attention_mask": Refused(),
            },
            "rope": {0: Cut(-2), 1: Cut(-2)},
            "cross_attn_rope": {0: Cut(-2), 1: Cut(-2)},
            "proj_out": OUT,
        },
        {"transformer_blocks.*.attn1": PICTURE, "transformer_blocks.*.video_to_audio_attn": KEYS + PICTURE},
        replaces_class=True,
    ),
    "OvisImageTransformer2DModel": Plan(
        {"": {**BOTH, "img_ids": Cut(-2), "txt_ids": Cut(-2)}, "proj_out": OUT},
        {"transformer_blocks.*.attn": JOINT, "single_transformer_blocks.*.attn": JOINT},
    ),
    "QwenImageTransformer2DModel": Plan({"": {"controlnet_block_samples": Cut(1)}}),
    "SD3Transformer2DModel": Plan(
        {
            "": {"block_controlnet_hidden_states": Cut(1)},
            "pos_embed": {0: Cut(1, PICTURE)},
            "context_embedder": {0: Cut(1, TEXT)},
            "proj_out": OUT,
        },
        {"transformer_blocks.*.attn": JOINT, "transformer_blocks.*.attn2?": PICTURE},
    ),
    # With a timestep for each frame, the last modulation is for all tokens.
    "SkyReelsV2Transformer3DModel": Plan(
        {
            "rope": {0: Cut(1), 1: Cut(1)},
            "blocks.0": {PICTURE: Cut(1, PICTURE)},
            "blocks.*": {"temb": Cut(2, ndim=4), "attention_mask": Refused()},
            "blocks.-1": OUT,
        },
        {"blocks.*.attn1": PICTURE},
    ),
    "WanVACETransformer3DModel": Plan(
        {
            "rope": {0: Cut(1), 1: Cut(1)},
            "vace_blocks.0": {PICTURE: Cut(1, PICTURE), "control_hidden_states": Cut(1)},
            "blocks.0": {PICTURE: Cut(1, PICTURE)},
            "proj_out": OUT,
        },
        {"vace_blocks.*.attn1": PICTURE, "blocks.*.attn1": PICTURE},
    ),
    # Its layers are for text and picture as one sequence.
    "ZImageTransformer2DModel": Plan(
        {
            "": {"controlnet_block_samples": Cut(1)},
            "noise_refiner.0": {"x": Cut(1, PICTURE)},
            "noise_refiner.*": {"attn_mask": Cut(1), "freqs_cis": Cut(1), "noise_mask": Cut(1)},
            "noise_refiner.-1": OUT,
            "layers.0": {"x": Cut(1, PICTURE)},
            "layers.*": {"attn_mask": Cut(1), "freqs_cis": Cut(1), "noise_mask": Cut(1)},
            "all_final_layer.*": {"x": Gather(1)},
        },
        {"noise_refiner.*.attention": PICTURE, "layers.*.attention": PICTURE},
    ),
}
"""By class. Sources: the forwards of these classes in diffusers 0.42."""


def plan_of(transformer: nn.Module) -> Plan:
    """The plan of a transformer's class.

    Raises: ModelError for a class without one, or with an unsupported `_cp_plan`.
    """
    name = type(transformer).__name__
    classes = (each.__name__ for each in type(transformer).__mro__)
    own = next((PLANS[each] for each in classes if each in PLANS), None)
    cp_plan: Mapping[str, Any] | None = getattr(transformer, "_cp_plan", None)
    if own is not None and (own.replaces_class or cp_plan is None):
        return own
    if cp_plan is None:
        raise ModelError(f"{name}: has no _cp_plan, so its tokens cannot be shared among ranks")
    changes: dict[str, Entry] = {pattern: _entry(name, pattern, given) for pattern, given in cp_plan.items()}
    attentions: Mapping[str, str] = {"**": ALL}
    if own is None:
        return Plan(changes, attentions)
    for pattern, entry in own.changes.items():
        changes[pattern] = {**changes.get(pattern, {}), **entry}
    return Plan(changes, own.attentions or attentions)


def _entry(name: str, pattern: str, given: object) -> Entry:
    """One of a `_cp_plan`; parameters with the names of streams are these streams."""
    if isinstance(given, ContextParallelOutput):
        return {0: Gather(given.gather_dim)}
    if not isinstance(given, Mapping) or not all(isinstance(x, ContextParallelInput) for x in given.values()):
        raise ModelError(f"{name}: _cp_plan of {pattern!r} is not supported: {given!r}")
    return {
        key: Cut(spec.split_dim, key if key in (PICTURE, TEXT) else None, spec.expected_dims)
        for key, spec in given.items()
    }
