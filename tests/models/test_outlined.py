"""Calls on pipelines without weights tell what pipelines refuse, and how much of a prompt they read."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from small_checkpoints import save_checkpoint

from benchmarks.draws import draws_of
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import stop_checks
from gfgen.models.geometry.call import signature_of
from gfgen.models.geometry.model import load_geometry
from gfgen.models.stepping.adapter import load_any
from gfgen.models.stepping.outlined import (
    _without_computing,
    answers,
    outlined_pipeline,
    read_characters,
    tried,
)

pytestmark = pytest.mark.filterwarnings("ignore:Accessing config attribute:FutureWarning")  # of diffusers


@functools.cache
def checkpoint(folder: Path, name: str) -> Path:
    return save_checkpoint(name, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outlined")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["LTXPipeline", "PixArtSigmaPipeline", "Lumina2Pipeline"])
def test_a_clean_check_implies_that_the_job_runs(folder, name):
    made = draws_of(name, checkpoint(folder, name), num=16)
    assert made.counts["ran"] >= 4
    assert not made.failed
    assert not made.refused_in_vain


def test_answers_say_what_is_refused_and_what_is_read(folder):
    job: dict[str, Any] = {
        "id": "a",
        "prompt": "a fox",
        "width": 64,
        "height": 64,
        "steps": 2,
        "seed": 0,
        "frames": 1,
    }
    job["args"] = {"use_resolution_binning": False}
    asked = {
        "checkpoint": str(checkpoint(folder, "PixArtSigmaPipeline")),
        "trusts_code": False,
        "calls": {
            "plain": job,
            "odd": job | {"height": 65},
            "sigmas": job | {"scheduler": {"class": "DDIMScheduler"}, "sigmas": [1.0, 0.5]},
            "short": job | {"args": {**job["args"], "max_sequence_length": 8}},
        },
        "texts": {
            "long": ("plain", "prompt", "fox " * 400),
            "fits": ("plain", "prompt", "fox " * 50),
            "cut": ("short", "negative_prompt", "fox " * 50),
        },
        "characters": ["狐", "x"],
    }
    found = answers(asked)
    calls = found["calls"]
    assert (calls["plain"]["unknown"], calls["plain"]["most_bytes"]) == (None, 298)
    assert calls["odd"]["refused"].startswith("`height` and `width` have to be divisible by 8")
    assert "does not support custom sigmas" in calls["sigmas"]["refused"]
    assert found["texts"]["fits"] == 200
    assert found["texts"]["long"] < 1600
    assert found["texts"]["cut"] < 200
    assert found["unknown"] == {"狐": True, "x": False}


def test_prompts_that_no_encoder_gets_and_options_without_effect_are_found(folder):
    checkpoint = save_checkpoint("StableDiffusion3Pipeline", folder / "without_t5")
    index = json.loads((checkpoint / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (checkpoint / "model_index.json").write_text(json.dumps(index))
    size = {"id": "a", "prompt": "a fox", "width": 64, "height": 64, "steps": 3, "seed": 0}
    others = {"prompt_2": "an owl", "prompt_3": "a bear"}
    calls = {
        "texts": size | {"args": others},
        "options": size | {"scheduler": {"shift": 2.0, "base_shift": 0.1, "max_shift": 3.0}},
        "class": size | {"scheduler": {"class": "DPMSolverMultistepScheduler", "use_lu_lambdas": False}},
    }
    texts = {name: ("texts", name, "a fox " * 30) for name in ("prompt", *others)}
    asked = {"checkpoint": str(checkpoint), "trusts_code": False, "calls": calls, "texts": texts}
    found = answers(asked)
    assert found["calls"]["texts"] == {"unknown": None, "most_bytes": 0, "idle": []}
    assert found["texts"]["prompt_3"] == 0
    assert 0 < found["texts"]["prompt"] == found["texts"]["prompt_2"] < 180
    assert found["calls"]["options"]["idle"] == ["base_shift", "max_shift"]
    assert found["calls"]["class"]["idle"] == []
    pipeline = load_any(checkpoint, load_geometry(checkpoint), device="cpu", dtype=torch.float32).pipeline
    assert pipeline.text_encoder_3 is None


def refusals(folder: Path, name: str, **jobs: dict[str, Any]) -> dict[str, str | None]:
    """By job, why the call of a class refuses it, with fields beside the usual ones."""
    usual: dict[str, Any] = {"id": "a", "prompt": "a fox", "width": 64, "height": 64, "steps": 2, "seed": 0}
    calls = {key: usual | fields for key, fields in jobs.items()}
    asked = {"checkpoint": str(checkpoint(folder, name)), "trusts_code": False, "calls": calls, "texts": {}}
    found = answers(asked)["calls"]
    assert all(answer.get("unknown") is None for answer in found.values())
    return {key: answer.get("refused") for key, answer in found.items()}


def test_what_the_first_step_refuses_is_refused(folder):
    odd: dict[str, Any] = {"use_resolution_binning": False, "num_images_per_prompt": 2}
    found = refusals(
        folder, "PRXPixelPipeline", one={"args": odd | {"num_images_per_prompt": 1}}, two={"args": odd}
    )
    assert found["one"] is None
    assert found["two"]


def test_what_a_later_step_or_the_decode_refuses_is_refused(folder):
    name, tiles = "LTXI2VLongMultiPromptPipeline", {"decode_horizontal_tiles": 1, "decode_vertical_tiles": 1}
    found = refusals(
        folder,
        name,
        whole={"frames": 9, "args": tiles},
        short={"frames": 9, "args": tiles | {"temporal_tile_size": 1}},
    )
    assert found["whole"] is None
    assert found["short"]
    found = refusals(folder, "AllegroPipeline", few={"frames": 4}, more={"frames": 9})
    assert "negative dimension" in (found["few"] or "")
    assert found["more"] is None


def test_a_class_that_reads_prompts_as_json_is_tried_with_the_prompt_of_a_job(folder, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "0.png")
    job = {"image": str(tmp_path / "0.png"), "prompt": '{"edit_instruction": "a fox"}'}
    odd = {**job, "scheduler": {"class": "LCMScheduler"}}
    found = refusals(folder, "BriaFiboEditPipeline", plain=job, odd=odd)
    assert found["plain"] is None
    assert "does not support custom sigmas" in (found["odd"] or "")


class Vision(torch.nn.Module):
    """As towers for vision do: shapes depend on the values of a grid and of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 8)

    def forward(self, patches_LC: torch.Tensor, grid: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        places = torch.cat([torch.arange(h * w, device=grid.device) for h, w in grid.tolist()])
        rows = torch.arange(2, device=grid.device)[:, None].expand(2, 3).reshape(-1)
        scale = torch.tensor([rows.max() + 1], device=grid.device).expand(len(grid)).tolist()
        found = self.layer(patches_LC)[places][:: scale[0]]
        return found[: len(ids[ids == 7])]


def test_networks_whose_shapes_depend_on_values_of_integers_are_tried():
    with torch.device("meta"):
        network = _without_computing(Vision())
    grid, ids = torch.tensor([[2, 3], [1, 2]]), torch.tensor([7, 1, 7, 7])
    made = network(torch.ones(8, 4), grid, ids)
    assert (tuple(made.shape), made.device.type) == ((3, 8), "cpu")


def test_a_call_whose_decode_takes_long_is_tried_up_to_there(folder, monkeypatch):
    geometry = load_geometry(checkpoint(folder, "LTXPipeline"))
    job = geometry.resolve(JobSpec(id="a", prompt="a fox", width=64, height=64, frames=9, steps=2, seed=0))
    path, load = checkpoint(folder, "LTXPipeline"), outlined_pipeline
    adapter = load_any(path, geometry, device="cpu", dtype=torch.float32, load=load)
    monkeypatch.setattr(adapter, "decode", lambda *_: [stop_checks.check() for _ in itertools.count()])
    assert tried(adapter, job, rest_s=0.1)[0] is None


def test_a_usual_job_has_the_pictures_and_texts_that_a_call_needs(folder, tmp_path):
    found = refusals(folder, "EasyAnimatePipeline", none={}, some={"negative_prompt": "grey"})
    assert "NoneType" in (found["none"] or "")
    assert found["some"] is None
    for name, size in (("equal", (64, 64)), ("other", (80, 48))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    jobs = {name: {"image": str(tmp_path / f"{name}.png")} for name in ("equal", "other")}
    found = refusals(folder, "ZImageImg2ImgPipeline", **jobs)
    assert found["equal"] is None
    assert "must match" in (found["other"] or "")


def test_text_encoders_without_masks_and_settings_that_are_lists_are_tried(folder):
    for name in ("Flux2KleinPipeline", "Krea2Pipeline"):
        assert refusals(folder, name, plain={}) == {"plain": None}


def test_a_vae_that_decodes_in_tiles_alone_does_so(folder):
    path = checkpoint(folder, "AllegroPipeline")
    assert load_adapter(path, device="cpu").pipeline.vae.use_tiling  # type: ignore[attr-defined]


def test_a_crop_that_needs_pictures_of_pillow_is_refused():
    args = signature_of("StableDiffusion3InpaintPipeline").args
    assert "strength" in args
    assert "padding_mask_crop" not in args


def tokenizer_of(per_word):
    return lambda text: {"input_ids": [0] * (per_word * len(text.split()) + 1)}


def test_what_one_of_the_encoders_keeps_is_read():
    text = " one two  three\nfour"
    clip, t5 = tokenizer_of(2), tokenizer_of(1)
    limits = {"clip": ("", 3), "t5": ("template ", 4)}
    assert read_characters(text, limits, {"clip": clip, "t5": t5}) == len(" one two")
    assert read_characters(text, {"t5": ("", 5)}, {"t5": t5}) == len(text)
    assert read_characters(text, {"t5": ("", 1)}, {"t5": t5}) == 0
