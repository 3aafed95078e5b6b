"""Checkpoints that bring Python code of their own."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from small_checkpoints import save_checkpoint

from gfgen.cli.listings import models
from gfgen.errors import JobError, ModelError
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.model import load_geometry
from gfgen.models.stepping.adapter import PipelineAdapter

PIPELINE = """
import torch
from diffusers import LTXPipeline


class MyPipeline(LTXPipeline):
    @torch.no_grad()
    def __call__(self, prompt: str, width: int = 64, height: int = 64, num_inference_steps: int = 3,
                 strength_of_red: float = 0.5, generator=None, output_type: str = "np"):
        self.level = strength_of_red
        pixels = torch.randn(1, height, width, 3, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps, mu=1.0)
        for i, t in enumerate(self.scheduler.timesteps):
            self.count = i
            step = self.transformer.half(pixels) * self.level
            pixels = self.scheduler.step(step, t, pixels, return_dict=False)[0]
        pixels[..., 0] += self.count
        return (pixels.clamp(0, 1).numpy(),)
"""
TRANSFORMER = """
from diffusers import LTXVideoTransformer3DModel


class MyTransformer(LTXVideoTransformer3DModel):
    def half(self, value):
        return 0.5 * value + self.proj_out.bias.mean()
"""
JOB = JobSpec(id="a", prompt="a red cat", seed=3, args={"strength_of_red": 0.25})


def with_code(checkpoint: Path, folder: Path, change: Mapping[str, Any], code: Mapping[str, str]) -> Path:
    """A copy whose model_index.json names classes of its own, in these files."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    index = json.loads((checkpoint / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, **change}))
    for name, text in code.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("LTXPipeline", tmp_path_factory.mktemp("ltx"))


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Path:
    change = {
        "_class_name": ["pipeline", "MyPipeline"],
        "transformer": ["my_transformer", "MyTransformer"],
    }
    code = {"pipeline.py": PIPELINE, "transformer/my_transformer.py": TRANSFORMER}
    return with_code(checkpoint, tmp_path, change, code)


def test_code_runs_only_if_it_is_trusted(own: Path) -> None:
    with pytest.raises(ModelError) as refused:
        load_geometry(own)
    assert str(refused.value) == (
        f"{own}/model_index.json: brings code of its own: pipeline (pipeline.py), transformer "
        "(transformer/my_transformer.py); if you trust it, run, serve and models check run it with "
        "--trust-remote-code"
    )


def test_a_pipeline_with_code_of_its_own_runs_in_steps(own: Path) -> None:
    adapter = load_adapter(own, trusts_code=True)
    assert isinstance(adapter, PipelineAdapter)
    spec = adapter.geometry.resolve(JOB)
    assert (spec.width, spec.steps) == (64, 3)
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    for step in range(3):
        latents = adapter.denoise(spec, prompt, condition, latents, step=step)
        assert latents.number("num_done") == step + 1
    found = adapter.decode(spec, latents).tensors["frames"].numpy()
    import torch

    made = adapter.pipeline(
        "a red cat",
        num_inference_steps=3,
        strength_of_red=0.25,
        generator=torch.Generator().manual_seed(3),
    )
    assert np.array_equal(found, (made[0] * 255).round().astype(np.uint8))


def test_two_checkpoints_may_have_files_of_one_name(
    own: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(own, other, dirs_exist_ok=True)
    (other / "pipeline.py").write_text(PIPELINE.replace("i, t in enumerate", "number, t in enumerate"))
    adapters = [load_adapter(folder, trusts_code=True) for folder in (own, other)]
    spec = adapters[0].geometry.resolve(JOB)
    adapters[0].prepare(spec, adapters[0].encode(spec))
    prompt = adapters[1].encode(spec)
    artifacts = prompt, *adapters[1].prepare(spec, prompt)
    with pytest.raises(NameError, match="'i' is not defined"):
        adapters[1].denoise(spec, *artifacts, step=0)
    assert list(own.glob("__pycache__")) == []


def test_arguments_are_those_of_its_own_call(own: Path) -> None:
    with pytest.raises(JobError, match=r"did you mean strength_of_red\?"):
        load_geometry(own, trusts_code=True).resolve(
            JobSpec(id="a", prompt="a", seed=1, args={"strength_of_rd": 1})
        )


def test_a_class_that_diffusers_lacks_may_be_in_pipeline_py(checkpoint: Path, tmp_path: Path) -> None:
    own = with_code(checkpoint, tmp_path, {"_class_name": "MyPipeline"}, {"pipeline.py": PIPELINE})
    with pytest.raises(ModelError, match=r"own: pipeline \(pipeline\.py\)"):
        load_geometry(own)
    assert load_geometry(own, trusts_code=True).family == "MyPipeline"


def test_code_that_nothing_names_is_ignored(checkpoint: Path, tmp_path: Path) -> None:
    own = with_code(checkpoint, tmp_path, {}, {"pipeline.py": PIPELINE})
    assert load_geometry(own).family == "LTXPipeline"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "its code is missing: there is no .*pipeline.py"),
        ({"pipeline.py": "class Other: pass"}, "'MyPipeline' is not in .*pipeline.py"),
        ({"pipeline.py": "class MyPipeline("}, "cannot be read as Python"),
    ],
)
def test_one_line_says_what_is_wrong_with_the_code(
    checkpoint: Path, tmp_path: Path, files: Mapping[str, str], message: str
) -> None:
    own = with_code(checkpoint, tmp_path, {"_class_name": ["pipeline", "MyPipeline"]}, files)
    with pytest.raises(ModelError, match=message):
        load_geometry(own, trusts_code=True)


def test_code_that_fails_is_a_problem_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    code = f"{PIPELINE}\nraise KeyError('no')"
    own = with_code(checkpoint, tmp_path, {"_class_name": ["pipeline", "MyPipeline"]}, {"pipeline.py": code})
    with pytest.raises(ModelError, match=r"pipeline\.py: MyPipeline cannot be loaded: KeyError: 'no'"):
        load_adapter(own, trusts_code=True)


def test_an_automatic_class_that_maps_to_code_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    own = with_code(checkpoint, tmp_path, {"text_encoder": ["transformers", "AutoModel"]}, {})
    config = json.loads((own / "text_encoder/config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_mine.MyEncoder"}
    (own / "text_encoder/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"own: text_encoder \(text_encoder/modeling_mine\.py\)"):
        load_geometry(own)


def test_models_check_needs_the_same_trust(own: Path) -> None:
    words = ["check", str(own), "--device", "cpu", "--json"]
    with pytest.raises(ModelError, match="--trust-remote-code"):
        CliRunner().invoke(models, words, standalone_mode=False, catch_exceptions=False)
    result = CliRunner().invoke(models, [*words, "--trust-remote-code"], standalone_mode=False)
    assert json.loads(result.stdout)["in_steps"], result.exception
