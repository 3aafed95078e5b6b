"""Shares forwards of small random transformers among ranks, and compares them with one rank.

    python -m benchmarks.shared_transformers [--only flux] [--degrees 2 3 5 8]

One row per transformer: the largest difference from one rank's forward in fp32, relative to its largest
magnitude, for each degree (Ulysses; `2x2` is a ring of two Ulysses pairs). Ranks are threads with arenas of
their own. Sizes are small, real classes of diffusers with two blocks of each kind, 24 heads of 16 and uneven
numbers of tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import diffusers
import torch
from torch import Tensor, nn

from benchmarks.measured import head, row
from gfgen.gfc.arena import ArenaPlan, create_arena
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.endpoint import Endpoint
from gfgen.layout import Layout
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.parallel.plans import PLANS
from gfgen.models.parallel.sequence_parallel import active

T = TypeVar("T")
Inputs = dict[str, Any]
Case = tuple[nn.Module, Inputs]

PLAN = ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 12)
HEADS: dict[str, Any] = {"num_attention_heads": 24, "attention_head_dim": 16}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(num_tokens: int, axes: int) -> Tensor:
    return torch.arange(num_tokens * axes).view(num_tokens, axes) % 7 * 1.0


def when(batch: int = 1) -> Tensor:
    return torch.full((batch,), 500.0)


def text_mask(num_tokens: int, num_valid: int) -> Tensor:
    return torch.arange(num_tokens)[None] < num_valid


SMALL: dict[str, Any] = {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2}
WAN: dict[str, Any] = {**SMALL, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64}
FLUX: dict[str, Any] = {**HEADS, "in_channels": 8, "num_layers": 2, "num_single_layers": 2}
FLUX |= {"joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)}
HUNYUAN: dict[str, Any] = {**SMALL, "num_single_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0}
HUNYUAN |= {"text_embed_dim": 32}
FIRST_GIVEN = torch.cat((torch.zeros(1, 15), torch.full((1, 30), 500.0)), 1)
"""A timestep for each token, as from an image."""


def video(num_frames: int = 3, text_tokens: int = 7, **others: Any) -> Inputs:
    inputs = {"hidden_states": random(1, 4, num_frames, 6, 10), "timestep": when()}
    return inputs | {"encoder_hidden_states": random(1, text_tokens, 32)} | others


def tokens(number: int, text_tokens: int, *, channels: int = 8, **others: Any) -> Inputs:
    inputs = {"hidden_states": random(1, number, channels), "timestep": when() / 1000}
    return inputs | {"encoder_hidden_states": random(1, text_tokens, 32)} | others


def chronoedit() -> Case:
    return diffusers.ChronoEditTransformer3DModel(**WAN), video(2)


def cogvideox(**config: Any) -> Case:
    sizes = {"sample_width": 10, "sample_height": 6, "sample_frames": 9, "max_text_seq_length": 11}
    widths = {"time_embed_dim": 16, "text_embed_dim": 32}
    model = diffusers.CogVideoXTransformer3DModel(**SMALL, **sizes, **widths, **config)
    return model, video(text_tokens=11, hidden_states=random(1, 3, 4, 6, 10))


def cogvideox_rotary() -> Case:
    model, inputs = cogvideox(use_rotary_positional_embeddings=True)
    return model, inputs | {"image_rotary_emb": (random(45, 16), random(45, 16))}


def flux() -> Case:
    model = diffusers.FluxTransformer2DModel(**FLUX, pooled_projection_dim=16, guidance_embeds=True)
    given: Inputs = {"pooled_projections": random(1, 16), "guidance": torch.tensor([3.5])}
    return model, tokens(21, 5, img_ids=ids(21, 3), txt_ids=ids(5, 3) * 0, **given)


def flux_controlnet() -> Case:
    model, inputs = flux()
    names = ("controlnet_block_samples", "controlnet_single_block_samples")
    return model, inputs | {name: [random(1, 21, 384)] for name in names}


def flux2() -> Case:
    config = FLUX | {"timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)}
    model, guidance = diffusers.Flux2Transformer2DModel(**config), torch.tensor([3.5])
    return model, tokens(21, 5, img_ids=ids(21, 4)[None], txt_ids=ids(5, 4)[None], guidance=guidance)


def helios(**config: Any) -> Case:
    """Chunks of a video with the frames before them, short and long ago."""
    model = diffusers.HeliosTransformer3DModel(**WAN, rope_dim=(4, 6, 6), **config)
    inputs = video(timestep=torch.tensor([500]), indices_hidden_states=torch.arange(6, 9)[None])
    for name, first, last in (("short", 4, 6), ("mid", 2, 4), ("long", 0, 4)):
        inputs[f"indices_latents_history_{name}"] = torch.arange(first, last)[None]
        inputs[f"latents_history_{name}"] = random(1, 4, last - first, 6, 10)
    return model, inputs


def helios_history() -> Case:
    return helios(is_amplify_history=True)


def hunyuan(**config: Any) -> Case:
    options = {"pooled_projection_dim": 16, "rope_axes_dim": (4, 6, 6), **config}
    given: Inputs = {"pooled_projections": random(1, 16), "guidance": torch.tensor([6000.0])}
    model = diffusers.HunyuanVideoTransformer3DModel(**HUNYUAN, **options)
    return model, video(text_tokens=11, encoder_attention_mask=text_mask(11, 6), **given)


def hunyuan_image() -> Case:
    """From an image, whose tokens have a timestep of their own."""
    return hunyuan(image_condition_type="token_replace")


def hunyuan_still() -> Case:
    model = diffusers.HunyuanImageTransformer2DModel(**HUNYUAN, rope_axes_dim=(8, 8))
    given: Inputs = {"hidden_states": random(1, 4, 3, 7), "encoder_attention_mask": text_mask(11, 6)}
    return model, video(text_tokens=11, **given)


def ovis() -> Case:
    _, inputs = flux()
    given = {name: x for name, x in inputs.items() if name not in ("pooled_projections", "guidance")}
    return diffusers.OvisImageTransformer2DModel(**FLUX, out_channels=8), given


def skyreels() -> Case:
    """A timestep for each frame."""
    given: Inputs = {"timestep": torch.tensor([[0, 300, 900]]), "enable_diffusion_forcing": True}
    return diffusers.SkyReelsV2Transformer3DModel(**WAN), video(**given)


def ltx() -> Case:
    """A timestep for each token, and a padded text."""
    widths = {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 384, "caption_channels": 32}
    model = diffusers.LTXVideoTransformer3DModel(**SMALL | widths)
    given: Inputs = {"timestep": FIRST_GIVEN, "encoder_attention_mask": text_mask(7, 4)}
    return model, tokens(45, 7, num_frames=3, height=3, width=5, **given)


def ltx2(**config: Any) -> Case:
    widths = {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 384, "caption_channels": 32}
    audio = {"in_channels": 8, "out_channels": 8, "num_attention_heads": 24, "attention_head_dim": 8}
    widths |= {f"audio_{name}": value for name, value in {**audio, "cross_attention_dim": 192}.items()}
    model = diffusers.LTX2VideoTransformer3DModel(**SMALL | widths, **config)
    _, inputs = ltx()
    inputs |= {"audio_encoder_hidden_states": random(1, 7, 32), "audio_timestep": when()}
    inputs |= {"audio_encoder_attention_mask": text_mask(7, 4), "audio_num_frames": 13}
    return model, inputs | {"audio_hidden_states": random(1, 13, 8)}


def ltx2_split() -> Case:
    return ltx2(rope_type="split")


def qwen(**config: Any) -> Case:
    widths = {"in_channels": 16, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)}
    given: Inputs = {"encoder_hidden_states_mask": text_mask(7, 5), "img_shapes": [[(1, 3, 7)]]}
    model = diffusers.QwenImageTransformer2DModel(**SMALL | widths, **config)
    return model, tokens(21, 7, channels=16, **given)


def qwen_controlnet() -> Case:
    model, inputs = qwen()
    return model, inputs | {"controlnet_block_samples": [random(1, 21, 384)]}


def qwen_edit() -> Case:
    """The noise and an image to edit, whose tokens have a timestep of their own."""
    model, inputs = qwen(zero_cond_t=True)
    return model, inputs | {"hidden_states": random(1, 27, 16), "img_shapes": [[(1, 3, 7), (1, 2, 3)]]}


def qwen_layered() -> Case:
    model, inputs = qwen(use_additional_t_cond=True, use_layer3d_rope=True)
    shapes = {"img_shapes": [[(1, 3, 7), (1, 3, 7), (1, 2, 3)]], "hidden_states": random(1, 48, 16)}
    return model, inputs | shapes | {"additional_t_cond": torch.tensor([0])}


def sd3() -> Case:
    """As 3.5 medium: the first block has a second attention, to the picture alone."""
    widths = {"joint_attention_dim": 32, "caption_projection_dim": 384, "pooled_projection_dim": 16}
    sizes = {"sample_size": 16, "pos_embed_max_size": 16}
    model = diffusers.SD3Transformer2DModel(
        **SMALL, **widths, **sizes, dual_attention_layers=(0,), qk_norm="rms_norm"
    )
    given: Inputs = {"hidden_states": random(1, 4, 6, 14), "pooled_projections": random(1, 16)}
    return model, video(text_tokens=11, **given)


def sd3_controlnet() -> Case:
    model, inputs = sd3()
    return model, inputs | {"block_controlnet_hidden_states": [random(1, 21, 384)]}


def wan() -> Case:
    return diffusers.WanTransformer3DModel(**WAN), video()


def wan_vace() -> Case:
    config = WAN | {"num_layers": 3, "vace_layers": [0, 2], "vace_in_channels": 6}
    model = diffusers.WanVACETransformer3DModel(**config)
    return model, video(control_hidden_states=random(1, 6, 3, 6, 10))


def z_image() -> Case:
    numbers = {"n_layers": 2, "n_refiner_layers": 2, "n_heads": 24, "n_kv_heads": 24}
    axes = {"axes_dims": [4, 6, 6], "axes_lens": [128, 32, 32]}
    model = diffusers.ZImageTransformer2DModel(in_channels=4, dim=384, cap_feat_dim=32, **numbers, **axes)
    return model, {"x": [random(4, 1, 6, 14)], "t": torch.tensor([0.5]), "cap_feats": [random(9, 32)]}


def z_image_controlnet() -> Case:
    model, inputs = z_image()
    return model, inputs | {"controlnet_block_samples": {0: random(1, 64, 384), 1: random(1, 64, 384)}}


CASES: Mapping[str, Callable[[], Case]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        *(chronoedit, cogvideox, cogvideox_rotary, flux, flux_controlnet, flux2, helios, helios_history),
        *(hunyuan, hunyuan_image, hunyuan_still, ltx, ltx2, ltx2_split, ovis, qwen),
        *(qwen_controlnet, qwen_edit, qwen_layered, sd3, sd3_controlnet, skyreels, wan, wan_vace, z_image),
        z_image_controlnet,
    )
}


def make(name: str) -> Case:
    """A case's transformer with hooks, and the inputs of a forward."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    # Some classes begin with zeros, which would hide what happens before.
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    install(model.eval())
    return model, inputs


@torch.no_grad()
def forward(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a forward returns."""
    torch.set_num_threads(1)  # counts for the calling thread, and rounding depends on it
    outputs = model(**inputs, return_dict=False)
    return [x for output in outputs for x in (output if isinstance(output, list) else [output])]


class Ranks:
    """Threads with arenas, as ranks of one machine."""

    def __init__(self, num_ranks: int = 8) -> None:
        fds = {rank: create_arena(PLAN, rank=rank, incarnation=1) for rank in range(num_ranks)}
        incarnations = dict.fromkeys(fds, 1)
        self._endpoints = [Endpoint(PLAN, rank=rank, fds=fds, incarnations=incarnations) for rank in fds]
        for fd in fds.values():
            os.close(fd)
        self._num_dispatches = 0

    def run(self, layout: Layout, program: Callable[[Parallel], T]) -> list[T]:
        """What a program returns on each rank of the layout, by slot.

        Raises: the first error of a rank; the other ranks stop waiting for it.
        """
        self._num_dispatches += 1
        failures: list[Exception] = []
        descriptor = Descriptor(self._num_dispatches, layout, (1,) * layout.degree)

        def one(rank: int) -> T:
            try:
                group = self._endpoints[rank].group(descriptor)
                group.enter()
                return program(parallel_from(group))
            except Exception as error:
                failures.append(error)
                for endpoint in self._endpoints:
                    endpoint.abort_through(descriptor.dispatch)
                raise

        with ThreadPoolExecutor(layout.degree) as pool:
            futures = [pool.submit(one, rank) for rank in layout.ranks]
        if failures:
            raise failures[0]
        return [future.result() for future in futures]


def shared_forward(
    ranks: Ranks, layout: Layout, model: nn.Module, inputs: Mapping[str, Any]
) -> list[list[Tensor]]:
    """The outputs of each rank."""

    def program(parallel: Parallel) -> list[Tensor]:
        with active(parallel):
            return forward(model, inputs)

    return ranks.run(layout, program)


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest one of all outputs, relative to each output's largest magnitude."""
    pairs = zip(found, wanted, strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in pairs)


def layout_of(degree: str, first: int = 0) -> Layout:
    """`4`: four Ulysses ranks; `2x2`: Ulysses degree, times the ring's."""
    ulysses, _, ring = degree.partition("x")
    size = int(ulysses) * int(ring or 1)
    return Layout(tuple(range(first, first + size)), ulysses=int(ulysses), ring=int(ring or 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--degrees", nargs="*", default=["2", "3", "5", "8", "2x2", "1x5", "3x2"])
    options = parser.parse_args()
    ranks = Ranks()
    print(f"diffusers {diffusers.__version__}, PyTorch {torch.__version__}, fp32 on a CPU\n")
    print(head("case", "class", "plan", *options.degrees))
    for name in options.only:
        model, inputs = make(name)
        wanted = forward(model, inputs)
        cells = []
        for degree in options.degrees:
            found = shared_forward(ranks, layout_of(degree), model, inputs)
            assert all(map(torch.equal, found[0], other) for other in found)
            cells.append(f"{difference(found[0], wanted):.1e}")
        own, has_class_plan = PLANS.get(type(model).__name__), getattr(model, "_cp_plan", None) is not None
        source = "class" if own is None else "own" if own.replaces_class or not has_class_plan else "both"
        print(row(name, f"`{type(model).__name__}`", source, *cells), flush=True)


if __name__ == "__main__":
    main()
