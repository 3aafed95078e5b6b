"""Jobs as asked become jobs as run, or problems: all of them at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import geometry_of, make_job

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec, spec_hash
from gfgen.models.geometry.model import CONFIGS, shipped_geometry
from gfgen.runtime.core.admission import (
    AdmittedJob,
    ResolvedModel,
    admit,
    arriving_after,
)


def find_model(name: str) -> ResolvedModel:
    if name.startswith("gone"):
        raise ModelError(f"model {name}: unknown; accepted: a directory")
    return ResolvedModel(name, CONFIGS / name, shipped_geometry(name))


def job(line: int, **fields: object) -> JobSpec:
    return JobSpec(id=f"job-{line}", prompt="a fox", line=line, **fields)  # type: ignore[arg-type]


def problems_of(*specs: JobSpec) -> list[str]:
    _, problems = admit(specs, default_model="wan2.2-ti2v-5b", find_model=find_model)
    return [str(problem) for problem in problems]


def test_all_problems_of_a_job_are_reported_at_once() -> None:
    wrong = job(
        3,
        width=16,
        height=64,
        frames=0,
        steps=5000,
        guidance_scale=-1.0,
        true_cfg_scale=4.0,
        boundary_ratio=0.5,
        output="fox.mp4",
    )
    fields = [text.split()[2].rstrip(":") for text in problems_of(wrong)]
    assert sorted(fields) == [
        "boundary_ratio",
        "frames",
        "guidance_scale",
        "output",
        "size",
        "steps",
        "true_cfg_scale",
    ]


def test_a_wrong_file_name_is_reported_beside_the_models_own_problems() -> None:
    texts = problems_of(job(1, model="qwen-image", fps=8, output="fox.mp4"), job(2, output="fox.jpg"))
    assert [text.partition(":")[0] for text in texts] == ["line 1", "line 1", "line 2"]
    assert "output = fox.mp4: a name that ends in .png" in texts[1]
    assert "output = fox.jpg: a name that ends in .mp4" in texts[2]


def test_a_video_of_one_frame_is_a_picture() -> None:
    (admitted,), problems = admit(
        [job(1, frames=2, output="fox.png")], default_model="wan2.2-ti2v-5b", find_model=find_model
    )
    assert (admitted.spec.frames, admitted.info.file, problems) == (1, "fox.png", ())


def test_too_many_tokens_are_reported_where_size_and_frames_are_right_by_themselves() -> None:
    (text,) = problems_of(job(1, width=8192, height=8192))
    assert text.startswith("line 1: frames = 121: is 2,031,616 tokens")
    assert len(problems_of(job(1, width=8192, height=8192, steps=0))) == 2


@pytest.mark.parametrize(
    ("num_jobs", "ending"),
    [
        (1, "accepted: a directory"),
        (2, "accepted: a directory (the same model: line 2)"),
        (3, "accepted: a directory (the same model: lines 2, 3)"),
        (20, "(the same model: lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 9 more)"),
    ],
)
def test_a_missing_model_is_one_problem_however_many_jobs_want_it(num_jobs: int, ending: str) -> None:
    (text,) = problems_of(*(job(line, model="gone-a") for line in range(1, num_jobs + 1)))
    assert text.startswith("line 1: model = gone-a: unknown; ")
    assert text.endswith(ending)


def test_each_missing_model_is_a_problem_of_its_own() -> None:
    texts = problems_of(job(1, model="gone-a"), job(2), job(4, model="gone-b"), job(5, model="gone-a"))
    assert [text.partition(": unknown")[0] for text in texts] == [
        "line 1: model = gone-a",
        "line 4: model = gone-b",
    ]


def test_a_job_of_a_model_with_random_weights_is_not_the_same_as_that_of_the_real_one() -> None:
    """Else what it draws, noise, would count as done when the real weights are there."""
    hashes = set()
    for is_random in (False, True):
        name = "qwen-image"
        model = ResolvedModel(name, CONFIGS / name, shipped_geometry(name), has_random_weights=is_random)
        (admitted,), _ = admit([job(1)], default_model=name, find_model=lambda _, model=model: model)
        hashes.add(admitted.info.spec_hash)
    assert len(hashes) == 2


HEUN = {"scheduler": {"class": "FlowMatchHeunDiscreteScheduler"}}
GUIDED = {"true_cfg_scale": 4.0, "negative_prompt": "blurry"}


@pytest.mark.parametrize(
    ("model", "fields", "num_reads"),
    [
        ("qwen-image", {}, (1, 1)),
        ("qwen-image", HEUN, (2, 2)),
        ("FluxPipeline", {}, (1, 1)),
        ("FluxPipeline", GUIDED, (2, 1)),
        ("FluxPipeline", GUIDED | HEUN, (4, 2)),
        ("LTXPipeline", {"guidance_scale": 3.0}, (1, 1)),
        ("StableDiffusion3Pipeline", {"guidance_scale": 7.0}, (1, 1)),
        ("HunyuanVideoPipeline", GUIDED, (2, 1)),
        ("WanVACEPipeline", {"guidance_scale": 5.0}, (2, 1)),
        ("StableDiffusionXLPipeline", {"scheduler": {"class": "KDPM2DiscreteScheduler"}}, (2, 2)),
    ],
)
def test_a_step_reads_as_often_as_forwards_follow_each_other(
    model: str, fields: dict[str, object], num_reads: tuple[int, int]
) -> None:
    """Wan and Qwen-Image run both branches block by block, and some pipelines in one forward."""
    geometry = shipped_geometry(model) if "-" in model else geometry_of(model, transformer={})
    found = ResolvedModel(model, CONFIGS / model, geometry)
    (admitted,), problems = admit([job(1, **fields)], default_model=model, find_model=lambda _: found)
    assert not problems
    assert admitted.num_reads == num_reads


def test_steps_of_second_order_have_another_cost_in_pipelines_too() -> None:
    found = ResolvedModel("flux", CONFIGS, geometry_of("FluxPipeline", transformer={}))
    jobs, _ = admit([job(1), job(2, **HEUN)], default_model="flux", find_model=lambda _: found)
    assert [each.shape for each in jobs] == ["1024x1024", "1024x1024+heun"]


def admitted(**fields: object) -> AdmittedJob:
    (found,), problems = admit([job(1, **fields)], default_model="qwen-image", find_model=find_model)
    assert not problems
    return found


def test_an_admitted_job_is_known_by_its_id_its_hash_and_its_model() -> None:
    found = admitted()
    assert found.job_id == "job-1"
    assert found.info.spec_hash == spec_hash(found.info.asked, has_random_weights=False)
    assert found.model_in(["qwen-image"]) == "qwen-image"
    at_home = replace(found.with_priority(1), twin="another")
    assert (at_home.model_in(["another"]), at_home.model_in(["qwen-image"])) == ("another", "qwen-image")
    assert make_job("a").num_reads == (1, 1)
    assert make_job("a").state_bytes == 4 * 1 * 2 * 2 * 4


def test_a_job_may_arrive_later() -> None:
    found = admitted(arrival_s=2.0)
    assert arriving_after(found, 3.0).spec.arrival_s == 5.0


def test_frames_of_a_video_without_a_format_are_png() -> None:
    found = admitted(model="wan2.2-ti2v-5b", output="fox.png")
    assert (found.info.file, found.spec.format) == ("fox/{frame}.png", "png")
    found = admitted(model="wan2.2-ti2v-5b", output="fox.png", format="png16")
    assert (found.info.file, found.spec.format) == ("fox/{frame}.png", "png16")
    assert admitted(output="fox.png").spec.format is None
