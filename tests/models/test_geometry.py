"""Geometry: a job's shapes, bytes and FLOPs from config files alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gfgen.errors import JobError, ModelError
from gfgen.graph import Stage
from gfgen.job.fields import MAX_FRAMES
from gfgen.job.spec import JobSpec
from gfgen.models.geometry import rules
from gfgen.models.geometry.model import (
    CONFIGS,
    SHIPPED,
    Geometry,
    shipped_geometry,
)

GEOMETRIES = {name: shipped_geometry(name) for name in SHIPPED}
WAN_5B = GEOMETRIES["wan2.2-ti2v-5b"]
WAN_T2V = GEOMETRIES["wan2.2-t2v-a14b"]
WAN_I2V = GEOMETRIES["wan2.2-i2v-a14b"]
QWEN = GEOMETRIES["qwen-image"]
TERA = 1e12


def job(**values: Any) -> JobSpec:
    return JobSpec(id="j", prompt="a fox", seed=1, **values)


def job_for(geometry: Geometry, **values: Any) -> JobSpec:
    """A job that this family accepts when its other values are right."""
    if geometry.family == "wan-moe-i2v":
        values.setdefault("image", "fox.png")
    return job(**values)


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = ("torch", "diffusers", "transformers", "numpy", "PIL")
    code = (
        "import sys, gfgen.models.geometry.model, gfgen.models.families.registry as r;"
        "import gfgen.models.geometry.model as g; g.shipped_geometry('qwen-image'); r.MODELS;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_longest_video_fits_in_the_rotary_table() -> None:
    config = json.loads((CONFIGS / "wan2.2-ti2v-5b" / "transformer" / "config.json").read_text())
    assert (MAX_FRAMES - 1) % 4 == 0
    assert config["rope_max_seq_len"] == (MAX_FRAMES - 1) // 4 + 1


def test_defaults_are_fields_of_a_job() -> None:
    assert {field.name for field in fields(JobSpec)} >= rules.DEFAULT_KEYS


@pytest.mark.parametrize(
    ("geometry", "asked", "run"),
    [
        (WAN_5B, (1280, 720, 121), (1280, 704, 121)),
        (WAN_5B, (1279, 95, 2), (1248, 64, 1)),
        (WAN_5B, (832, 480, 48), (832, 480, 49)),
        (WAN_5B, (832, 480, 50), (832, 480, 49)),
        (WAN_5B, (832, 480, 3), (832, 480, 1)),
        (WAN_T2V, (1280, 720, 81), (1280, 720, 81)),
        (WAN_T2V, (1290, 725, 83), (1280, 720, 81)),
        (QWEN, (1000, 1023, 1), (992, 1008, 1)),
        (QWEN, (1328, 1328, 1), (1328, 1328, 1)),
    ],
)
def test_sizes_are_rounded_as_the_pipeline_would(
    geometry: Geometry, asked: tuple[int, int, int], run: tuple[int, int, int]
) -> None:
    spec = geometry.resolve(job(width=asked[0], height=asked[1], frames=asked[2]))
    assert (spec.width, spec.height, spec.frames) == run


def test_a_bare_prompt_runs_with_the_model_cards_settings() -> None:
    spec = WAN_5B.resolve(job())
    assert (spec.width, spec.height, spec.frames, spec.fps, spec.steps) == (1280, 704, 121, 24, 50)
    assert (spec.guidance_scale, spec.flow_shift, spec.guidance_scale_2, spec.boundary_ratio) == (
        5,
        5,
        None,
        None,
    )
    spec = WAN_T2V.resolve(job())
    assert (spec.width, spec.height, spec.frames, spec.fps, spec.steps) == (1280, 720, 81, 16, 40)
    assert (spec.guidance_scale, spec.guidance_scale_2, spec.boundary_ratio, spec.flow_shift) == (
        4,
        3,
        0.875,
        3,
    )
    spec = WAN_I2V.resolve(job(image="fox.png"))
    assert (spec.guidance_scale, spec.guidance_scale_2, spec.boundary_ratio) == (3.5, 3.5, 0.9)
    spec = QWEN.resolve(job())
    assert (spec.width, spec.height, spec.frames, spec.fps, spec.steps) == (1328, 1328, 1, None, 50)
    assert (spec.true_cfg_scale, spec.negative_prompt, spec.guidance_scale) == (4, " ", None)


def test_one_guidance_scale_counts_for_both_experts() -> None:
    spec = WAN_T2V.resolve(job(guidance_scale=6.0))
    assert spec.guidance_scale_2 == 6.0


@pytest.mark.parametrize(
    ("geometry", "values", "field"),
    [
        (QWEN, {"frames": 5}, "frames"),
        (QWEN, {"fps": 8}, "fps"),
        (QWEN, {"image": "a.png"}, "image"),
        (QWEN, {"guidance_scale": 4.0}, "guidance_scale"),
        (QWEN, {"flow_shift": 3.0}, "flow_shift"),
        (QWEN, {"steps": 1}, "steps"),
        (WAN_5B, {"true_cfg_scale": 4.0}, "true_cfg_scale"),
        (WAN_5B, {"guidance_scale_2": 4.0}, "guidance_scale_2"),
        (WAN_5B, {"boundary_ratio": 0.5}, "boundary_ratio"),
        (WAN_5B, {"width": 31}, "size"),
        (WAN_5B, {"width": 0}, "size"),
        (WAN_5B, {"height": -64}, "size"),
        (WAN_5B, {"width": 8193}, "size"),
        (WAN_5B, {"frames": 0}, "frames"),
        (WAN_5B, {"frames": 100_000}, "frames"),
        (WAN_5B, {"width": 8192, "height": 8192, "frames": 121}, "frames"),
        (WAN_5B, {"steps": 0}, "steps"),
        (WAN_5B, {"steps": 1001}, "steps"),
        (WAN_5B, {"fps": 0}, "fps"),
        (WAN_5B, {"guidance_scale": float("nan")}, "guidance_scale"),
        (WAN_5B, {"guidance_scale": -1.0}, "guidance_scale"),
        (WAN_5B, {"flow_shift": 0.0}, "flow_shift"),
        (WAN_T2V, {"image": "a.png"}, "image"),
        (WAN_T2V, {"boundary_ratio": 1.5}, "boundary_ratio"),
        (WAN_I2V, {}, "image"),
    ],
)
def test_what_a_family_cannot_do_names_the_field(
    geometry: Geometry, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(JobError) as caught:
        geometry.resolve(job(**values))
    assert [problem.field for problem in caught.value.problems] == [field]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SHIPPED)
@given(
    width=st.integers(32, 2000),
    height=st.integers(32, 2000),
    frames=st.integers(1, 130),
    steps=st.integers(2, 100),
    guided=st.booleans(),
)
def test_resolving_twice_changes_nothing_and_never_enlarges(
    name: str, width: int, height: int, frames: int, steps: int, guided: bool
) -> None:
    geometry = GEOMETRIES[name]
    scale = 4.0 if guided else 1.0
    scales = {"true_cfg_scale" if geometry.kind == "image" else "guidance_scale": scale}
    asked = job_for(
        geometry,
        width=width,
        height=height,
        steps=steps,
        frames=1 if geometry.kind == "image" else frames,
        **scales,
    )
    spec = geometry.resolve(asked)
    assert geometry.resolve(spec) == spec
    assert 0 <= width - rules.known(spec.width) < 32
    assert 0 <= height - rules.known(spec.height) < 32
    assert geometry.uses_cfg(spec) == guided
    assert geometry.shape_key(spec).count("+cfg") == guided
    trajectory = geometry.trajectory(spec)
    assert trajectory.num_steps == steps
    assert trajectory.artifact("frames").fields[0][1] == (spec.frames, spec.height, spec.width, 3)
    assert {artifact.name for artifact in trajectory.artifacts} == {
        "prompt",
        "condition",
        "latents",
        "frames",
    }
    assert min(geometry.flops(spec, stage) for stage in (Stage.ENCODE, Stage.DENOISE, Stage.DECODE)) > 0


@pytest.mark.parametrize("name", SHIPPED)
@given(tokens=st.integers(2, 40))
def test_more_pixels_never_cost_less(name: str, tokens: int) -> None:
    geometry = GEOMETRIES[name]
    small, large = (
        geometry.resolve(job_for(geometry, width=32 * side, height=64, frames=1))
        for side in (tokens, tokens + 1)
    )
    for stage in (Stage.DENOISE, Stage.DECODE):
        assert geometry.flops(small, stage) < geometry.flops(large, stage)
    assert geometry.num_tokens(small) < geometry.num_tokens(large)


@pytest.mark.parametrize(
    ("geometry", "shape", "tokens", "tera_flops"),
    [
        (WAN_5B, (832, 480, 49), 5_070, 111),
        (WAN_5B, (832, 480, 81), 8_190, 198),
        (WAN_5B, (1280, 720, 81), 18_480, 586),
        (QWEN, (512, 512, 1), 1_024, 31),
        (QWEN, (1024, 1024, 1), 4_096, 139),
        (QWEN, (1536, 1536, 1), 9_216, 379),
    ],
)
def test_flops_and_tokens_of_a_step(
    geometry: Geometry, shape: tuple[int, int, int], tokens: int, tera_flops: float
) -> None:
    """Two branches of guidance; rounded to a teraflop."""
    spec = geometry.resolve(job(width=shape[0], height=shape[1], frames=shape[2]))
    assert geometry.num_tokens(spec) == tokens
    assert geometry.flops(spec, Stage.DENOISE) / TERA == pytest.approx(tera_flops, abs=0.6)


def test_guidance_doubles_a_step() -> None:
    spec = WAN_5B.resolve(job())
    without = replace(spec, guidance_scale=1.0)
    assert WAN_5B.flops(spec, Stage.DENOISE) == 2 * WAN_5B.flops(without, Stage.DENOISE)


def test_latents_carry_the_solvers_state() -> None:
    """Latents with UniPC's state are 57 MB at 1280x704x81."""
    spec = WAN_5B.resolve(job(width=1280, height=704, frames=81))
    assert WAN_5B.trajectory(spec).artifact("latents").size_bytes == pytest.approx(57e6, rel=0.01)
    assert WAN_5B.trajectory(spec).artifact("condition").size_bytes == 0


def test_unknown_shipped_model_says_which_exist() -> None:
    with pytest.raises(ModelError, match=r"wan2\.2-ti2v-5b"):
        shipped_geometry("wan3")


@pytest.mark.parametrize(
    ("geometry", "spec", "tokens"),
    [
        (WAN_5B, job(width=64, height=32, frames=5), 4),
        (WAN_T2V, job(width=32, height=16, frames=5), 4),
        (QWEN, job(width=32, height=16), 2),
    ],
)
def test_tokens_are_patches_of_the_latents(geometry: Geometry, spec: JobSpec, tokens: int) -> None:
    assert geometry.num_tokens(geometry.resolve(spec)) == tokens
