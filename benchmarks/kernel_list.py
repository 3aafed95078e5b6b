"""Makes the list of specialisations of gfgen's Triton kernels that full-size models use.

    python -m benchmarks.kernel_list

writes gfgen/models/ahead/kernels.json, from which `gfgen cache fill` and runs on GPUs compile kernels before
they are needed. The models' modules run on the meta device. Their kernels are noted instead of launched, so
this needs neither a GPU nor Triton. Run it when tests/models/test_ahead.py says that the list is old.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from torch import Tensor

from gfgen.models.ahead.pool import LIST, Call, decode, denoise, encode
from gfgen.models.families.registry import WEIGHTS
from gfgen.models.fast import causal_vae, kernels
from gfgen.models.fast.flux import fuse_flux
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.rows import try_kernels
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.model import CONFIGS, SHIPPED
from gfgen.models.loading.random_weights import keep_in_fp32
from gfgen.models.parallel import shared_decode
from gfgen.models.parallel.hooks import install

MODULES = ("gfgen.models.fast.row_kernels", "gfgen.models.fast.frame_kernels", "gfgen.models.lora.low_rank")
IDENTITY = (
    ("_class_name", "num_attention_heads", "attention_head_dim", "ffn_dim"),
    ("_class_name", "base_dim", "decoder_base_dim", "z_dim", "dim_mult"),
)
"""Values of transformers' and VAEs' configs that say which kernels they take. Depth does not."""
FLUX = {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 24, "attention_head_dim": 128}
"""Of Flux.1, whose other values are diffusers' defaults."""
META = torch.device("meta")
DTYPES = (torch.float32, torch.bfloat16)
Uses = dict[str, list[Call]]
Use = Callable[[str], Any]


def main() -> None:
    listed = made_list()
    lines = [[json.dumps(each) for each in listed[name]] for name in ("kernels", "parts")]
    kernels, parts = (",\n".join(each) for each in lines)
    LIST.write_text(f'{{"kernels": [\n{kernels}\n],\n"parts": [\n{parts}\n]}}\n')
    print(f"{LIST}: {len(listed['kernels'])} kernels")


@torch.no_grad()
def made_list() -> dict[str, Any]:
    """What kernels.json should hold."""
    numbers: dict[str, int] = {}
    parts: list[dict[str, Any]] = []
    with noted() as calls:
        for config, uses in _parts(calls):
            found = {
                use: sorted({numbers.setdefault(json.dumps(call), len(numbers)) for call in of_use})
                for use, of_use in uses.items()
            }
            if {"config": config, "uses": found} not in parts:
                parts.append({"config": config, "uses": found})
    return {"kernels": [json.loads(each) for each in numbers], "parts": parts}


def _parts(calls: list[Call]) -> Iterator[tuple[Mapping[str, Any], Uses]]:
    """Values that a config has, and what its part takes for each use."""

    def use(name: str) -> list[Call]:
        taken = uses.setdefault(name, [])
        taken += calls
        calls.clear()
        return taken

    uses: Uses = {}
    try_kernels(META)
    use("start")
    _merge_loras()
    use("lora")
    yield {}, uses
    for folder in (*(CONFIGS / name for name in SHIPPED), WEIGHTS / "shapes"):
        files = read_checkpoint(folder, with_weights=False)
        for component, keys in zip(("transformer", "vae"), IDENTITY, strict=True):
            config, uses = files.configs[component], {}
            if component == "transformer":
                _denoise(config, use)
            else:
                _decode(config, use)
                _encode(config, use, has_picture=bool(files.index.get("expand_timesteps")))
            yield {key: config[key] for key in keys if key in config}, uses
    uses = {}
    _denoise_flux(use)
    yield FLUX, uses


def _merge_loras() -> None:
    low_rank = sys.modules["gfgen.models.lora.low_rank"]
    for rank in (16, 32, 64, 128):
        weight, up, down = (torch.empty(s, dtype=torch.bfloat16, device=META)
                            for s in ((256, 256), (256, rank), (rank, 256)))  # fmt: skip
        low_rank.add_product(weight, up, down, 0.5, out=weight)


def _denoise(config: Mapping[str, Any], use: Use) -> None:
    """The forwards of a Wan or Qwen-Image transformer, of the latter also both branches in one."""
    for layers in ("auto", "fp8"):
        for attention in ("auto", "fp8"):
            transformer = _made({**config, "num_layers": 1}, torch.bfloat16)
            install(transformer)
            on = META if layers == "fp8" else None
            fuse(transformer, fp8_on=on, attends_in_fp8=attention == "fp8")
            is_wan = hasattr(transformer, "condition_embedder")
            inputs = [_wan_inputs(config)] if is_wan else [_qwen_inputs(config, batch) for batch in (1, 2)]
            for given in inputs:
                transformer(**given, return_dict=False)
            use(denoise(layers, attention))
            if is_wan and config["in_channels"] == config["out_channels"]:  # a timestep for each token
                transformer(**_wan_inputs(config, has_image=True), return_dict=False)
                use(denoise(layers, attention, has_image=True))


def _wan_inputs(config: Mapping[str, Any], *, has_image: bool = False) -> dict[str, Any]:
    return {
        "hidden_states": _empty(1, config["in_channels"], 2, 16, 16),
        "timestep": torch.empty((1, 128) if has_image else (1,), device=META),
        "encoder_hidden_states": _empty(1, 512, config["text_dim"]),
    }


def _qwen_inputs(config: Mapping[str, Any], batch: int) -> dict[str, Any]:
    return {
        "hidden_states": _empty(batch, 64, config["in_channels"]),
        "timestep": torch.empty(1, device=META, dtype=torch.bfloat16),
        "encoder_hidden_states": _empty(batch, 32, config["joint_attention_dim"]),
        "encoder_hidden_states_mask": None,
        "img_shapes": [[(1, 8, 8)]] * batch,
        "attention_kwargs": {"text_lengths": (32,) * batch},
    }


def _denoise_flux(use: Use) -> None:
    transformer = _made({**FLUX, "num_layers": 1, "num_single_layers": 1}, torch.bfloat16)
    fuse_flux(transformer)
    with kernels.using("fused"):
        for batch in (1, 2):
            times = torch.empty(batch, device=META, dtype=torch.bfloat16)
            transformer(
                hidden_states=_empty(batch, 64, 64),
                encoder_hidden_states=_empty(batch, 32, 4096),
                pooled_projections=_empty(batch, 768),
                timestep=times,
                img_ids=torch.empty(64, 3, device=META),
                txt_ids=torch.empty(32, 3, device=META),
                return_dict=False,
            )
    use(denoise("auto", "auto"))


def _decode(config: Mapping[str, Any], use: Use) -> None:
    for dtype in DTYPES:
        vae = _vae(config, dtype)
        vae.decode(_empty(1, config["z_dim"], 1, 16, 16, dtype=dtype))
        use(decode(_name(dtype), "picture"))
        if config["_class_name"] == "AutoencoderKLWan":
            vae.decode(_empty(1, config["z_dim"], 2, 16, 16, dtype=dtype))
            use(decode(_name(dtype), "video"))


def _encode(config: Mapping[str, Any], use: Use, *, has_picture: bool) -> None:
    """Encodes of what a Wan pipeline is given: a picture, or a video that begins with it."""
    if config["_class_name"] == "AutoencoderKLWan":
        for dtype in DTYPES:
            _vae(config, dtype).encode(_empty(1, 3, 1 if has_picture else 9, 256, 256, dtype=dtype))
            use(encode(_name(dtype)))


def _vae(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    vae = _made(config, dtype)
    shared_decode.install(vae)
    causal_vae.install(vae)
    return vae


def _made(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with META:
            model = getattr(diffusers, config["_class_name"]).from_config(dict(config))
    finally:
        torch.set_default_dtype(before)
    keep_in_fp32(model)
    return model.eval().requires_grad_(False)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device=META)


# Notes instead of launches --------------------------------------------------------------------------


@contextmanager
def noted() -> Iterator[list[Call]]:
    """Inside, launches of kernels are noted in the list; the modules with kernels are loaded again."""
    calls: list[Call] = []
    language = types.ModuleType("triton.language")
    triton = types.ModuleType("triton")
    vars(triton).update(
        jit=lambda kernel=None, **options: _jit(calls, kernel, **options),
        cdiv=lambda x, y: -(-x // y),
        next_power_of_2=lambda x: 1 << (x - 1).bit_length(),
        language=language,
    )
    places = [name.rpartition(".") for name in MODULES]
    parents = [(importlib.import_module(parent), attribute) for parent, _, attribute in places]
    before = {name: sys.modules.pop(name, None) for name in (*MODULES, "triton", "triton.language")}
    sys.modules |= {"triton": triton, "triton.language": language}
    try:
        for name in MODULES:
            importlib.import_module(name)
        _put_back(before, "triton", "triton.language")
        yield calls
    finally:
        _put_back(before, *before)
        for (parent, attribute), name in zip(parents, MODULES, strict=True):
            delattr(parent, attribute)
            if before[name] is not None:
                setattr(parent, attribute, before[name])


def _put_back(before: Mapping[str, Any], *names: str) -> None:
    for name in names:
        sys.modules.pop(name, None)
        if before[name] is not None:
            sys.modules[name] = before[name]


def _jit(calls: list[Call], kernel: Any = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    if kernel is None:
        return lambda each: _jit(calls, each, do_not_specialize=do_not_specialize)
    return _Noted(calls, kernel, do_not_specialize)


class _Noted:
    """A kernel of Triton; each launch is noted."""

    def __init__(self, calls: list[Call], kernel: Any, not_specialised: Sequence[str]) -> None:
        self._calls, self._not_specialised = calls, not_specialised
        self._name = f"{kernel.__module__}:{kernel.__name__}"
        self._parameters = kernel.__code__.co_varnames

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **keywords: Any) -> None:
            kinds = [
                kind_of(value, is_specialised=name not in self._not_specialised)
                for name, value in zip(self._parameters, arguments, strict=False)
            ]
            self._calls.append((self._name, kinds, keywords))

        return launch


def kind_of(value: Tensor | int | float, *, is_specialised: bool = True) -> str | int | float:
    """An argument that Triton specialises in the same way.

    Source: triton 3.6 specialize.cc: addresses and integers divisible by 16, and 1; int32 or wider.
    """
    if isinstance(value, Tensor):
        address = value.storage_offset() * value.element_size() % 16
        return _name(value.dtype) + (f"+{address}" if address else "")
    if isinstance(value, float):
        return 0.5
    assert abs(value) < 2**31
    if not is_specialised:
        return 2
    return 1 if value == 1 else 16 if value % 16 == 0 else 2


if __name__ == "__main__":
    main()
