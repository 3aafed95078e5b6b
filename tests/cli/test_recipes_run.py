"""`gfgen run` with six recipes: tiny checkpoints of the classes that they are for, each with a LoRA."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from commands import gfgen
from safetensors.torch import save_file
from small_checkpoints import save_checkpoint

from gfgen.runtime.files.manifest import MANIFEST_NAME, read_manifest

OWN = "[recipes.fast.qwen-image]\nsteps = 3\ntrue_cfg_scale = 1\nscheduler = 'lcm'\n"
STEPS = {"fast": 3, "lightning-8": 8}


def test_a_file_with_six_recipes_runs_at_first_try(tiny_models: Mapping[str, Path], tmp_path: Path) -> None:
    sd, sdxl = (
        save_checkpoint(name, tmp_path / name)
        for name in ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
    )
    qwen, wan = tiny_models["tiny-qwen-image"], tiny_models["tiny-wan-moe"]
    models = [
        ("lightning-4", wan, {"frames": 5}),
        ("lightning-4", qwen, {}),
        ("lightning-8", qwen, {}),
        ("fast", qwen, {}),
        ("lightning-4", sdxl, {}),
        ("lcm-4", sd, {}),
    ]
    jobs = [
        {
            "id": f"job-{idx}",
            "prompt": "a fox",
            "size": "64x64",
            "recipe": recipe,
            "model": str(model),
            **more,
        }
        | {"lora": [{"path": str(lora), "target": target} for target, lora in loras(model, tmp_path)]}
        for idx, (recipe, model, more) in enumerate(models)
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(f"{json.dumps(job)}\n" for job in jobs))
    (tmp_path / "gfgen.toml").write_text(OWN)
    options = ["--ranks", "2", "--device", "cpu", "-o", "out"]
    code, _, err = gfgen(tmp_path, "run", "jobs.jsonl", *options)
    assert code == 0, err
    lines = read_manifest(tmp_path / "out" / MANIFEST_NAME)
    for job, (recipe, _, _) in zip(jobs, models, strict=True):
        line = lines[str(job["id"])]
        assert (line["status"], line["steps"]) == ("done", STEPS.get(recipe, 4))


def loras(model: Path, folder: Path) -> Iterator[tuple[str | None, Path]]:
    """A LoRA of the first attentions' queries for each part that steps call, with its target."""
    for part in ("transformer", "transformer_2", "unet"):
        if not (model / part).is_dir():
            continue
        config = json.loads((model / part / "config.json").read_text())
        kind: Any = getattr(diffusers, config["_class_name"])
        layers = {
            name: layer
            for name, layer in kind.from_config(config).named_modules()
            if isinstance(layer, torch.nn.Linear) and name.endswith("to_q")
        }
        shapes = {name: {"A": (2, x.in_features), "B": (x.out_features, 2)} for name, x in layers.items()}
        prefix = "unet" if part == "unet" else "transformer"
        tensors = {
            f"{prefix}.{name}.lora_{side}.weight": 0.1 * torch.randn(size)
            for name, sides in shapes.items()
            for side, size in sides.items()
        }
        save_file(tensors, path := folder / f"{model.name}-{part}.safetensors")
        yield (part if (model / "transformer_2").is_dir() else None), path
