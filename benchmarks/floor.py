"""How far is a forward of Flux.1 or CogVideoX from its products and attentions alone?

    python -m benchmarks.floor flux|cogvideox [--tiny]

The products and attentions of diffusers' own forward are noted, and made again in its order in one CUDA
graph, with the model's weights and random inputs of the same shapes. Beside them is gfgen's forward, launched
and in a graph: random weights at full size, bf16. `--tiny` tries it out on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measured import device_ms, host_s
from gfgen.gfc.cuda.captured import CapturedAlone
from gfgen.models.fast.kernels import using
from gfgen.models.parallel.hooks import install
from gfgen.models.stepping.adapter import prepare_kernels

WARM_UPS, REPEATS = 3, 7
PRODUCTS = ("addmm", "mm", "bmm")
Run = Callable[[], Any]


def flux(*, is_tiny: bool) -> tuple[Any, Mapping[str, Any]]:
    """Flux.1-dev at 1024x1024 with 512 text tokens."""
    heads, layers, side, text = (2, 1, 4, 8) if is_tiny else (24, 19, 64, 512)
    model = diffusers.FluxTransformer2DModel(
        num_attention_heads=heads, num_layers=layers, num_single_layers=2 * layers, guidance_embeds=True
    )
    rows, columns = torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij")
    return model, {
        "hidden_states": torch.randn(1, side * side, 64),
        "encoder_hidden_states": torch.randn(1, text, 4096),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.stack((torch.zeros(side, side), rows, columns), dim=-1).view(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def cogvideox(*, is_tiny: bool) -> tuple[Any, Mapping[str, Any]]:
    """CogVideoX-5B at 720x480x49 with both branches of guidance."""
    heads, layers, frames, height, width = (2, 2, 2, 4, 4) if is_tiny else (48, 42, 13, 60, 90)
    model = diffusers.CogVideoXTransformer3DModel(
        heads, 64, num_layers=layers, use_rotary_positional_embeddings=True, sample_frames=49
    )
    ends = ((0, 0), (height // 2, width // 2))
    return model, {
        "hidden_states": torch.randn(2, frames, 16, height, width),
        "encoder_hidden_states": torch.randn(2, 226, 4096),
        "timestep": torch.full((2,), 500),
        "image_rotary_emb": get_3d_rotary_pos_embed(
            64, ends, ends[1], frames, device=torch.get_default_device()
        ),
    }


class Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products and attentions, each as a call with inputs of its own, by what they are."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, Run]] = []
        self._weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
        self._inputs: dict[object, Tensor] = {}

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kind = "attentions" if "attention" in name else "products" if name in PRODUCTS else None
        if kind is not None:
            given = [self._input(idx, x) if isinstance(x, Tensor) else x for idx, x in enumerate(args)]
            self.calls.append((kind, lambda: func(*given, **(kwargs or {}))))
        return func(*args, **(kwargs or {}))

    def _input(self, idx: int, x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() in self._weights:
            return x
        key = idx, x.shape, x.stride()
        if key not in self._inputs:
            made = torch.randn(1 + sum((n - 1) * m for n, m in zip(x.shape, x.stride(), strict=True)))
            self._inputs[key] = made.to(x).as_strided(x.shape, x.stride())
        return self._inputs[key]

    def run(self, *kinds: str) -> None:
        for kind, call in self.calls:
            if kind in kinds:
                call()


def median_ms(run: Run, *, is_on_gpu: bool) -> float:
    times_ms = [device_ms(run) if is_on_gpu else 1e3 * host_s(run) for _ in range(WARM_UPS + REPEATS)]
    return statistics.median(times_ms[WARM_UPS:])


def in_graph(run: Run, *, is_on_gpu: bool) -> Run:
    if not is_on_gpu:
        return run
    run()
    return CapturedAlone(run).replay


@torch.no_grad()
def main() -> None:
    """Print the times, in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=("flux", "cogvideox"))
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    torch.set_default_device("cpu" if asked.tiny else "cuda")
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(1)
    model, inputs = {"flux": flux, "cogvideox": cogvideox}[asked.model](is_tiny=asked.tiny)
    on_gpu = {"is_on_gpu": not asked.tiny}
    with Noted(model) as noted, using("own"):
        model(**inputs)
    for kinds in (("products",), ("attentions",), ("products", "attentions")):
        alone = in_graph(lambda kinds=kinds: noted.run(*kinds), **on_gpu)  # type: ignore[misc]
        print(f"{' and '.join(kinds)}: {median_ms(alone, **on_gpu):.1f} ms", flush=True)
    install(model)
    prepare_kernels(model, may_copy=True)
    with using("fused" if asked.model == "flux" else "compiled"):
        model(**inputs)
        print(f"gfgen: {median_ms(lambda: model(**inputs), **on_gpu):.1f} ms", flush=True)
        print(f"gfgen in a graph: {median_ms(in_graph(lambda: model(**inputs), **on_gpu), **on_gpu):.1f} ms")


if __name__ == "__main__":
    main()
