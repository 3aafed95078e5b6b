"""Generated LoRA files, formats x defects: each merges as an independent formula says, or is refused.

A file that passes `check` never gives a wrong weight, and never fails in the run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gfgen.errors import ModelError
from gfgen.job.images import LoraError, LoraFiles, lora_sha256
from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import SAMPLE
from gfgen.models.families.registry import load_adapter, resolve_checkpoint
from gfgen.models.lora.merging import MergedLoras
from gfgen.models.lora.reading import components_of, original_weights, read_lora

torch.set_num_threads(1)
RANK, ALPHA, SCALE = 2, 3.0, 0.5


def small_flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=4, num_attention_heads=2,
        joint_attention_dim=6, pooled_projection_dim=4, axes_dims_rope=(0, 2, 2),
    )  # fmt: skip


def small_wan(**image: int) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, text_dim=6, freq_dim=8,
        ffn_dim=12, num_layers=2, **image,
    )  # fmt: skip


def small_qwen() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=4, out_channels=1, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=6, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


def pipeline_of(kind: str, **models: Any) -> Any:
    """A pipeline with only the models that LoRAs change."""
    pipeline: Any = object.__new__(getattr(diffusers, kind))
    pipeline.__dict__.update(models)
    return pipeline


MODELS: Mapping[str, Callable[[], Any]] = {
    "flux": lambda: pipeline_of("FluxPipeline", transformer=small_flux()),
    "wan": lambda: pipeline_of("WanPipeline", transformer=small_wan(), transformer_2=small_wan()),
    "qwen": lambda: pipeline_of("QwenImagePipeline", transformer=small_qwen()),
}


@dataclass
class Made:
    """A file, and the changes of weights that it stands for."""

    tensors: dict[str, Tensor]
    changes: dict[str, Tensor]
    settings: dict[str, Any] | None = None


def layers(pipeline: Any) -> dict[str, nn.Linear]:
    """A few linear layers with biases."""
    modules = pipeline.transformer.named_modules()
    found = {name: layer for name, layer in modules if name.endswith(("to_q", "to_k", "to_v", "0.proj"))}
    return dict(itertools.islice(found.items(), 5))


def low_rank(
    pipeline: Any,
    noise: torch.Generator,
    *,
    down: str = "lora_A.weight",
    up: str = "lora_B.weight",
    alpha: bool = False,
) -> Made:
    made = Made({}, {})
    for name, layer in layers(pipeline).items():
        a = torch.randn(RANK, layer.in_features, generator=noise)
        b = torch.randn(layer.out_features, RANK, generator=noise)
        made.tensors |= {f"{name}.{down}": a, f"{name}.{up}": b}
        made.changes[f"{name}.weight"] = torch.einsum("or,ri->oi", b, a) * (ALPHA / RANK if alpha else 1)
        if alpha:
            made.tensors[f"{name}.alpha"] = torch.tensor(ALPHA)
    return made


def prefixed(made: Made, prefix: str) -> Made:
    return Made({f"{prefix}{name}": x for name, x in made.tensors.items()}, made.changes, made.settings)


def flattened(made: Made, prefix: str) -> Made:
    """As kohya-ss names layers."""
    kinds = ("lora_down.weight", "lora_up.weight", "alpha")
    found = {}
    for name, x in made.tensors.items():
        kind = next(kind for kind in kinds if name.endswith(f".{kind}"))
        found[f"{prefix}{name.removesuffix(f'.{kind}').replace('.', '_')}.{kind}"] = x
    return Made(found, made.changes)


def with_bias(pipeline: Any, noise: torch.Generator) -> Made:
    """In the first layer only."""
    made = low_rank(pipeline, noise)
    name, layer = next((name, each) for name, each in layers(pipeline).items() if each.bias is not None)
    made.tensors[f"{name}.lora_B.bias"] = made.changes[f"{name}.bias"] = torch.randn(
        layer.out_features, generator=noise
    )
    return prefixed(made, "transformer.")


def with_differences(pipeline: Any, noise: torch.Generator) -> Made:
    made = low_rank(pipeline, noise)
    name, layer = next((name, each) for name, each in layers(pipeline).items() if each.bias is not None)
    whole, bias = (torch.randn(shape, generator=noise) for shape in (layer.weight.shape, layer.bias.shape))
    made.tensors |= {f"{name}.diff": whole, f"{name}.diff_b": bias}
    made.changes[f"{name}.weight"] = made.changes[f"{name}.weight"] + whole
    made.changes[f"{name}.bias"] = bias
    return prefixed(made, "transformer.")


def kronecker(pipeline: Any, noise: torch.Generator, *, is_split: bool = False) -> Made:
    made = Made({}, {})
    for name, layer in layers(pipeline).items():
        first = torch.randn(2, 2, generator=noise)
        a = torch.randn(layer.out_features // 2, RANK, generator=noise)
        b = torch.randn(RANK, layer.in_features // 2, generator=noise)
        made.tensors[f"{name}.lokr_w1"] = first
        made.tensors |= (
            {f"{name}.lokr_w2_a": a, f"{name}.lokr_w2_b": b} if is_split else {f"{name}.lokr_w2": a @ b}
        )
        scale = ALPHA / RANK if is_split else 1
        made.tensors |= {f"{name}.alpha": torch.tensor(ALPHA)} if is_split else {}
        made.changes[f"{name}.weight"] = (
            torch.einsum("ab,cd->acbd", first, a @ b).reshape(layer.weight.shape) * scale
        )
    return prefixed(made, "diffusion_model." if is_split else "transformer.")


def fused(pipeline: Any, noise: torch.Generator) -> Made:
    """One Kronecker product for the three projections of an attention."""
    name = next(name for name in layers(pipeline) if name.endswith("to_q")).removesuffix(".to_q")
    parts = [pipeline.transformer.get_submodule(f"{name}.{part}").weight for part in ("to_q", "to_k", "to_v")]
    rows, inputs = sum(len(each) for each in parts), parts[0].shape[1]
    first, second = torch.randn(1, 2, generator=noise), torch.randn(rows, inputs // 2, generator=noise)
    whole = torch.einsum("ab,cd->acbd", first, second).reshape(rows, inputs)
    shares = dict(zip(("to_q", "to_k", "to_v"), whole.chunk(3), strict=True))
    tensors = {f"transformer.{name}.to_qkv.lokr_w1": first, f"transformer.{name}.to_qkv.lokr_w2": second}
    return Made(tensors, {f"{name}.{part}.weight": change for part, change in shares.items()})


def in_folder(pipeline: Any, noise: torch.Generator) -> Made:
    """As peft saves it, with rsLoRA."""
    made = prefixed(low_rank(pipeline, noise), "base_model.model.")
    made.changes = {name: change * (ALPHA / RANK**0.5) for name, change in made.changes.items()}
    made.settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_rslora": True}
    return made


_DOWN_UP: dict[str, Any] = {"down": "lora_down.weight", "up": "lora_up.weight"}
_NAMED: dict[str, Any] = {"down": "lora_A.default.weight", "up": "lora_B.default.weight"}
FORMATS: Mapping[str, Callable[[Any, torch.Generator], Made]] = {
    "diffusers": lambda *of: prefixed(low_rank(*of), "transformer."),
    "no prefix": lambda *of: low_rank(*of),
    "wrapped": lambda *of: prefixed(low_rank(*of), "base_model.model."),
    "vendor's prefix": lambda *of: prefixed(low_rank(*of), "diffusion_model."),
    "adapter's name": lambda *of: prefixed(low_rank(*of, **_NAMED), "transformer."),
    "alpha": lambda *of: prefixed(low_rank(*of, alpha=True), "transformer."),
    "alpha, down and up": lambda *of: prefixed(low_rank(*of, **_DOWN_UP, alpha=True), "transformer."),
    "kohya": lambda *of: flattened(low_rank(*of, **_DOWN_UP, alpha=True), "lora_unet_"),
    "bias": with_bias,
    "differences": with_differences,
    "lokr": kronecker,
    "lokr in parts": lambda *of: kronecker(*of, is_split=True),
    "lokr fused": fused,
    "peft's folder": in_folder,
}


def defects(made: Made, rng: random.Random) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Files with a mistake in a tensor without which the others make no whole file."""
    names = sorted(made.tensors)
    name = rng.choice([each for each in names if not each.endswith(("alpha", "bias", "diff", "diff_b"))])
    rest = {each: x for each, x in made.tensors.items() if each != name}
    x = made.tensors[name]
    yield "drop", rest
    yield "rename", rest | {name.replace("lo", "la", 1) if "lo" in name else f"{name}x": x}
    yield "rename layer", rest | {f"other_{name}": x}
    yield "add", made.tensors | {"transformer.nothing.lora_A.weight": torch.ones(RANK, 4)}
    yield "add kind", made.tensors | {f"{name.rpartition('.lo')[0]}.dora_scale": torch.ones(4)}
    yield "reshape", rest | {name: torch.cat([x, x], dim=0)}
    yield "reshape inputs", rest | {name: torch.cat([x, x], dim=1)}
    yield "empty", rest | {name: x[:0]}
    yield "whole numbers", rest | {name: x.to(torch.int32)}
    yield "nan", rest | {name: torch.where(torch.arange(x.numel()).view(x.shape) == 1, torch.nan, x)}
    yield "infinity", rest | {name: torch.where(torch.arange(x.numel()).view(x.shape) == 1, torch.inf, x)}


def shapes_of(pipeline: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for component in components_of(pipeline):
        weights = original_weights(getattr(pipeline, component))
        found |= {f"{component}.{name}": list(x.shape) for name, x in weights.items()}
    return found


def check(path: Path, pipeline: Any) -> list[str]:
    """What admission does, without a child process; the warnings. Raises: LoraError, ModelError."""
    LoraFiles(path.parent).check(path.name, None)
    content = read_lora(path, pipeline, shapes_of(pipeline))
    if content.lacking is not None:
        raise ModelError(content.lacking)
    return content.warnings


def asked(path: Path, *, scale: float = SCALE, **entry: Any) -> JobSpec:
    lora = {"sha256": lora_sha256(path), "scale": scale, **entry}
    return JobSpec(id="job", prompt="a fox", lora=[lora], lora_files=[str(path)])


def save(made: Made, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {name: x.contiguous() for name, x in (tensors or made.tensors).items()},
        path := folder / "lora.safetensors",
    )
    if made.settings is not None:
        (folder / "adapter_config.json").write_text(json.dumps(made.settings))
    return path


@pytest.mark.parametrize("model", MODELS)
def test_every_file_merges_as_its_format_says_or_is_refused(model: str, tmp_path: Path) -> None:
    rng, count = random.Random(model), 0
    torch.manual_seed(0)
    pipeline = MODELS[model]()
    merged, experts = MergedLoras(pipeline), components_of(pipeline)
    before = {
        one: {n: x.clone() for n, x in original_weights(getattr(pipeline, one)).items()} for one in experts
    }
    noise = torch.Generator().manual_seed(0)
    for (format_, make), dtype in itertools.product(
        FORMATS.items(), (torch.float32, torch.float64, torch.bfloat16)
    ):
        made = make(pipeline, noise)
        if format_ == "bias" and dtype is torch.bfloat16:
            made.tensors = {name: x.half() for name, x in made.tensors.items()}
        folder, count = tmp_path / f"{count}", count + 1
        path = save(made, folder, {name: x.to(dtype) for name, x in made.tensors.items()})
        assert any("diffusers may leave out" in text for text in check(path, pipeline)) is (
            format_ in ("alpha", "alpha, down and up", "lokr in parts", "differences", "peft's folder")
        )
        merged.merge(asked(path))
        tolerance = 1e-5 if dtype is not torch.bfloat16 else 0.1
        for one, weights in before.items():
            now = original_weights(getattr(pipeline, one))
            for name, base in weights.items():
                change = SCALE * made.changes[name] if name in made.changes else torch.zeros_like(base)
                assert torch.allclose(now[name] - base, change, atol=tolerance), (format_, one, name)
        if dtype is not torch.float32:
            continue
        for kind, tensors in defects(made, rng):
            path, count = save(made, tmp_path / f"{count}", tensors), count + 1
            with pytest.raises((LoraError, ModelError)) as refused:
                check(path, pipeline)
            assert "\n" not in str(refused.value), (format_, kind)
            if isinstance(refused.value, ModelError):
                with pytest.raises(ModelError):
                    merged.merge(asked(path))
    merged.merge(JobSpec(id="job", prompt="a fox"))
    for one, weights in before.items():
        now = original_weights(getattr(pipeline, one))
        assert all(torch.equal(now[name], base) for name, base in weights.items())
    assert count >= 190


def weights_of(pipeline: Any) -> dict[str, Tensor]:
    return {
        f"{one}.{name}": x.clone()
        for one in components_of(pipeline)
        for name, x in original_weights(getattr(pipeline, one)).items()
    }


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"r": RANK, "lora_alpha": ALPHA, "use_dora": True}, "has use_dora, which gfgen cannot merge"),
        ({"r": RANK, "lora_alpha": "much"}, "lora_alpha much; numbers above 0 are accepted"),
        ({"r": RANK, "lora_alpha": 0}, "lora_alpha 0; numbers above 0 are accepted"),
        ({"r": RANK + 1, "lora_alpha": ALPHA}, "another rank than its settings say"),
        ({"r": RANK, "rank_pattern": {"to_q": 9}}, "another rank than its settings say in"),
        ({"r": RANK, "lora_alpha": ALPHA, "peft_type": "LOHA"}, "has peft_type LOHA"),
        ([1], "adapter_config.json cannot be read"),
    ],
)
def test_settings_that_cannot_act_are_refused(settings: Any, problem: str, tmp_path: Path) -> None:
    pipeline = MODELS["qwen"]()
    made = prefixed(low_rank(pipeline, torch.Generator()), "base_model.model.")
    made.settings = settings
    with pytest.raises(ModelError, match=problem):
        check(save(made, tmp_path / "lora"), pipeline)


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    pipeline = MODELS["qwen"]()
    name, layer = next(iter(layers(pipeline).items()))
    sizes = {"w1_a": (layer.out_features, 2), "w1_b": (2, layer.in_features)}
    factors = {f"lora_unet_{name}.hada_{kind}": torch.ones(size) for kind, size in sizes.items()}
    with pytest.raises(ModelError, match=r"is of the kind LoHa \(lora_unet_.*hada_w1_a, .* give a LoRA"):
        check(save(Made(factors, {}), tmp_path / "lora"), pipeline)


def test_files_in_every_order_of_three_give_what_each_gives_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipeline, noise = MODELS["flux"](), torch.Generator().manual_seed(1)
    lora, lokr, split = (FORMATS[name](pipeline, noise) for name in ("diffusers", "lokr", "lokr in parts"))
    broken, layer = (
        dict(list(lora.tensors.items())[1:]),
        next(iter(lora.tensors)).removesuffix("lora_A.weight"),
    )
    mixed = {name: x for name, x in lora.tensors.items() if not name.startswith(layer)}
    mixed |= {name: x for name, x in lokr.tensors.items() if name.startswith(layer)}
    tensors = {
        "lora": lora.tensors,
        "lokr": lokr.tensors,
        "split": split.tensors,
        "mixed": mixed,
        "broken": broken,
    }
    paths = {name: save(lora, tmp_path / name, each) for name, each in tensors.items()}

    def result(merged: MergedLoras, name: str) -> dict[str, Tensor] | None:
        try:
            merged.merge(asked(paths[name]))
        except ModelError:
            return None
        return weights_of(merged.pipeline)

    alone: dict[str, dict[str, Tensor] | None] = {}
    for name in paths:
        fresh = MergedLoras(pipeline)
        alone[name] = result(fresh, name)
        fresh.merge(JobSpec(id="job", prompt="a fox"))
    assert [name for name, found in alone.items() if found is None] == ["broken"]
    for order in itertools.permutations(paths, 3):
        merged = MergedLoras(pipeline)
        for name in order:
            found, wanted = result(merged, name), alone[name]
            assert (found is None) == (wanted is None)
            assert found is None or wanted is None or equal(found, wanted), order
        merged.merge(JobSpec(id="job", prompt="a fox"))


def test_layers_of_the_second_expert_go_there_and_all_others_to_both(tmp_path: Path) -> None:
    pipeline, noise = MODELS["wan"](), torch.Generator().manual_seed(1)
    one, other = low_rank(pipeline, noise), low_rank(pipeline, noise)
    both = prefixed(one, "transformer.").tensors | prefixed(other, "transformer_2.").tensors
    cases = {
        "both": (both, {"transformer": one, "transformer_2": other}),
        "first": (prefixed(one, "transformer.").tensors, {"transformer": one, "transformer_2": one}),
        "second": (prefixed(one, "transformer_2.").tensors, {"transformer_2": one}),
    }
    before = weights_of(pipeline)
    for name, (tensors, wanted) in cases.items():
        merged = MergedLoras(pipeline)
        merged.merge(asked(save(one, tmp_path / name, tensors)))
        for key, x in weights_of(pipeline).items():
            component, _, parameter = key.partition(".")
            changes = wanted[component].changes if component in wanted else {}
            change = SCALE * changes.get(parameter, torch.zeros_like(x))
            assert torch.allclose(x - before[key], change, atol=1e-5), (name, key)
        merged.merge(JobSpec(id="job", prompt="a fox"))


def vendors_wan(noise: torch.Generator, width: int = 16) -> dict[str, Tensor]:
    """A Wan LoRA under the names of the published model, as trainers write it."""
    found: dict[str, Tensor] = {}
    for block, kind, layer in itertools.product(range(2), ("self_attn", "cross_attn"), "qkvo"):
        name = f"diffusion_model.blocks.{block}.{kind}.{layer}"
        found[f"{name}.lora_down.weight"] = torch.randn(RANK, width, generator=noise)
        found[f"{name}.lora_up.weight"] = torch.randn(width, RANK, generator=noise)
        found[f"{name}.alpha"] = torch.tensor(ALPHA)
    return found


def test_a_vendors_names_give_what_diffusers_gives_and_what_it_leaves_out_acts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipeline, noise = MODELS["wan"](), torch.Generator().manual_seed(1)
    before, tensors = weights_of(pipeline), vendors_wan(noise)
    theirs = MODELS["wan"]()
    theirs.transformer.load_state_dict(pipeline.transformer.state_dict())
    theirs.transformer.load_lora_adapter(
        diffusers.WanPipeline.lora_state_dict({name: x.clone() for name, x in tensors.items()}),
        adapter_name="one",
    )
    theirs.transformer.set_adapters(["one"], SCALE)
    theirs.transformer.fuse_lora(adapter_names=["one"])
    fused_weights = {
        name.replace(".base_layer.", "."): x
        for name, x in theirs.transformer.named_parameters()
        if ".lora_" not in name
    }
    differences = {
        "blocks.0.norm3.diff": "blocks.0.norm2.weight",
        "blocks.1.self_attn.q.diff_b": "blocks.1.attn1.to_q.bias",
    }
    differences["head.modulation.diff"] = "scale_shift_table"
    new = {
        name: torch.randn(before[f"transformer.{own}"].shape, generator=noise)
        for name, own in differences.items()
    }
    tensors |= {f"diffusion_model.{name}": x for name, x in new.items()}
    for prefix in ("diffusion_model.", "", "base_model.model."):
        renamed = {name.replace("diffusion_model.", prefix): x for name, x in tensors.items()}
        path = save(Made(renamed, {}), tmp_path / f"at{prefix}")
        assert any("whole differences of" in text for text in check(path, pipeline))
        merged = MergedLoras(pipeline)
        merged.merge(asked(path))
        found = original_weights(pipeline.transformer)
        for name, x in fused_weights.items():
            wanted = x + SCALE * sum(new[key] for key, own in differences.items() if own == name)
            assert torch.equal(found[name], wanted), name
        merged.merge(JobSpec(id="job", prompt="a fox"))
    lost = {**tensors, "diffusion_model.blocks.0.self_attn.qq.alpha": torch.tensor(ALPHA)}
    with pytest.raises(
        ModelError, match=r"1 tensor of it fill nothing: diffusion_model\.blocks\.0\.self_attn\.qq\.alpha"
    ):
        check(save(Made(lost, {}), tmp_path / "lost"), pipeline)


def test_layers_that_the_model_lacks_are_left_out_if_the_entry_says_so(tmp_path: Path) -> None:
    """An image-to-video LoRA of Wan2.1 on a model without image embeddings."""
    pipeline, noise = MODELS["wan"](), torch.Generator().manual_seed(1)
    tensors = vendors_wan(noise)
    plain = save(Made(tensors, {}), tmp_path / "plain")
    for block, layer in itertools.product(range(2), ("k_img", "v_img")):
        name = f"diffusion_model.blocks.{block}.cross_attn.{layer}"
        tensors |= {
            f"{name}.lora_{kind}.weight": x
            for kind, x in (("down", torch.ones(2, 16)), ("up", torch.ones(16, 2)))
        }
    path = save(Made(tensors, {}), tmp_path / "image")
    with pytest.raises(
        ModelError, match=r"8 tensors that fill nothing here: .*k_img.*and 3 more; this one is Wan"
    ):
        check(path, pipeline)
    merged = MergedLoras(pipeline)
    with pytest.raises(ModelError, match="8 tensors that fill nothing"):
        merged.merge(asked(path))
    merged.merge(asked(path, partial=True))
    found = weights_of(pipeline)
    merged.merge(asked(plain))
    assert equal(found, weights_of(pipeline))


def test_pictures_of_ten_files_are_finite_and_differ(tmp_path: Path) -> None:
    adapter: Any = load_adapter(resolve_checkpoint("tiny-qwen-image"))
    pipeline, noise, found = adapter.patches.pipeline, torch.Generator().manual_seed(1), set()
    formats = [name for name in FORMATS if name != "kohya"][:10]
    for idx, name in enumerate(formats):
        made = FORMATS[name](pipeline, noise)
        path = save(made, tmp_path / f"{idx}")
        check(path, pipeline)
        job = adapter.geometry.resolve(replace(asked(path), width=32, height=32, steps=2, seed=1))
        prompt = adapter.encode(job)
        condition, latents = adapter.prepare(job, prompt)
        latents = adapter.denoise(job, prompt, condition, latents, step=0)
        frames = adapter.decode(job, latents).tensors["frames"]
        assert torch.isfinite(latents.tensors[SAMPLE]).all()
        found.add(hashlib.sha256(frames.numpy().tobytes()).hexdigest())
    assert len(found) > 5
