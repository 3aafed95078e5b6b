"""The built-in model as it comes with gfgen."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import WEIGHTS, find_configs, resolve_checkpoint
from gfgen.models.geometry.model import load_geometry, weightless_geometry
from training.card import BEGIN, END, figures_table
from training.parts import DEFAULTS, FLOW_SHIFT, new_tokenizer

MAX_BYTES = 20_000_000
FILES = sorted(path for path in WEIGHTS.rglob("*") if path.is_file())


def test_it_is_complete() -> None:
    folder = WEIGHTS / "shapes"
    assert {folder / "model_index.json", folder / "gfgen.json", WEIGHTS / "README.md"} <= set(FILES)
    weights = {path.parent.name for path in FILES if path.suffix == ".safetensors"}
    assert weights == {"text_encoder", "transformer", "vae"}


def test_all_of_it_is_small_enough_for_a_package() -> None:
    assert sum(path.stat().st_size for path in FILES) <= MAX_BYTES


def test_it_is_stored_in_fp16_and_holds_numbers_only() -> None:
    for path in FILES:
        assert path.suffix in (".json", ".safetensors", ".md", ".png"), path
        if path.suffix == ".safetensors":
            for name, tensor in load_file(path).items():
                assert tensor.dtype == torch.float16, name
                assert tensor.isfinite().all(), name


def test_its_defaults_are_those_of_the_training_code() -> None:
    folder = resolve_checkpoint("shapes")
    assert json.loads((folder / "gfgen.json").read_text()) == {"defaults": DEFAULTS}
    scheduler = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    assert scheduler["flow_shift"] == FLOW_SHIFT
    job = JobSpec(id="a", prompt="a red circle", model="shapes", seed=1)
    run = load_geometry(folder).resolve(job)
    assert run == weightless_geometry(find_configs("shapes")).resolve(job)
    shape = {"width": run.width, "height": run.height, "frames": run.frames, "fps": run.fps}
    assert shape | {"steps": run.steps, "guidance_scale": run.guidance_scale} == DEFAULTS


def test_its_vocabulary_is_that_of_the_prompts() -> None:
    text = (resolve_checkpoint("shapes") / "tokenizer/tokenizer.json").read_text()
    assert json.loads(text)["model"] == json.loads(new_tokenizer().backend_tokenizer.to_str())["model"]


def test_any_number_of_ranks_may_share_a_step() -> None:
    assert load_geometry(resolve_checkpoint("shapes")).num_heads % 8 == 0


def test_its_card_names_what_it_understands_and_tells_the_figures_that_were_measured() -> None:
    card = (WEIGHTS / "README.md").read_text()
    figures = WEIGHTS / "figures.json"
    table = card.partition(BEGIN)[2].partition(END)[0]
    assert table == figures_table(json.loads(figures.read_text()))
