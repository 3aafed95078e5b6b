"""Models by other names: a directory or a hub id is predicted by the profile of the model that it holds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.model import CONFIGS, weightless_geometry
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel, admit
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import check_profile, load_profile
from gfgen.runtime.predict.profile_store import SHIPPED, first_fitting

PROFILE = load_profile(SHIPPED / "h200.json")


def job_of(name: str, checkpoint: Path) -> AdmittedJob:
    spec = JobSpec(id="a", prompt="a fox", model=name, width=512, height=512, frames=1)
    (job,), problems = admit(
        [spec],
        default_model=name,
        find_model=lambda name: ResolvedModel(name, checkpoint, weightless_geometry(checkpoint)),
    )
    assert not problems
    return job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CONFIGS / "qwen-image", tmp_path / "tuned"))


def test_a_directory_is_predicted_as_the_model_that_it_holds(folder: Path) -> None:
    known, tuned = job_of("qwen-image", CONFIGS / "qwen-image"), job_of(str(folder), folder)
    assert (known.twin, tuned.twin, tuned.spec.model) == ("qwen-image", "qwen-image", str(folder))
    check_profile(PROFILE, [tuned], num_ranks=4)
    assert first_fitting([PROFILE], [tuned], num_ranks=4) is PROFILE
    costs = CostModel(PROFILE)
    assert costs.class_of(tuned) is costs.class_of(known)
    assert costs.classes[str(folder), tuned.shape] is costs.class_of(tuned)


def test_a_profile_that_knows_the_directory_itself_comes_first(folder: Path) -> None:
    job = job_of("qwen-image", folder)
    named = job_of(str(folder), folder)
    own = [replace(row, model=str(folder), seconds=9.0) for row in PROFILE.rows if row.model == "qwen-image"]
    costs = CostModel(replace(PROFILE, rows=(*PROFILE.rows, *own)))
    alone = [costs.task_s(costs.class_of(each), Stage.DENOISE, (1, 1, 1)) for each in (named, job)]
    assert alone[0] == 9.0 > alone[1]


def test_a_model_of_another_size_has_no_twin(folder: Path) -> None:
    path = folder / "transformer/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 12}))
    job = job_of(str(folder), folder)
    assert job.twin is None
    assert job_of("tiny-qwen-image", CONFIGS / "tiny-qwen-image").twin is None
    with pytest.raises(InputError, match=f"has no {folder}, which 1 of 1 jobs use"):
        check_profile(PROFILE, [job], num_ranks=4)
