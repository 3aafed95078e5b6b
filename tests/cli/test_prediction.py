"""Which profile predictions rest on, and on how many ranks, where nobody says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gfgen.bench.workloads import admitted, calibration_jobs, weightless_model
from gfgen.cli.shown import prediction
from gfgen.errors import InputError
from gfgen.runtime.predict.profile_store import SHIPPED, find_profile, load_profile
from gfgen.system.machine import cpu_name

JOBS = admitted(calibration_jobs("wan2.2-ti2v-5b"), weightless_model("wan2.2-ti2v-5b"))


@pytest.fixture(autouse=True)
def no_profile_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "find_profile", lambda *_, **__: None)


def test_predictions_are_for_as_many_ranks_as_a_run_has_by_default_if_the_profile_has_them(
    tmp_path: Path,
) -> None:
    assert prediction.default_ranks(None, JOBS) == (4,)
    assert prediction.default_ranks(SHIPPED / "h200.json", JOBS) == (4,)
    of_two = replace(load_profile(SHIPPED / "h200.json"), num_ranks=2)
    (tmp_path / "two.json").write_text(of_two.as_json())
    assert prediction.default_ranks(tmp_path / "two.json", JOBS) == (2,)


def test_more_ranks_than_any_profile_knows_are_refused() -> None:
    with pytest.raises(InputError, match="knows 1 to 4 ranks"):
        prediction.choose_profile(None, JOBS, num_ranks=6)


def test_the_profile_of_this_machine_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_profile("NVIDIA H200")
    assert found is not None
    own = replace(found[1], device="this machine", num_ranks=8)
    monkeypatch.setattr(prediction, "find_profile", lambda *_, **__: (Path("own.json"), own))
    assert prediction.choose_profile(None, JOBS, num_ranks=1) is own
    assert prediction.default_ranks(None, JOBS) == (4,)


def test_a_plan_names_the_machine_and_what_stands_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "gpu_name", lambda: None)

    def words(num_ranks: int) -> str:
        profile = prediction.choose_profile(None, JOBS, num_ranks=num_ranks)
        return prediction.machine(profile, JOBS, num_ranks=num_ranks)

    assert words(2) == "2 x NVIDIA H200 (measured on another machine; this machine has no GPU)"
    monkeypatch.setattr(prediction, "gpu_name", lambda: "NVIDIA L4")
    assert words(4) == "4 x NVIDIA H200 (measured on another machine; this machine has NVIDIA L4)"


@pytest.mark.parametrize(
    ("bases", "note"),
    [
        (("measured",), "measured here"),
        (("measured", "runs"), "measured here"),
        (("runs",), "measured by runs here"),
        (("runs", "scaled"), "measured by runs here, the rest scaled"),
        (("scaled",), "scaled from another machine, not measured"),
    ],
)
def test_a_plan_for_this_machine_says_whether_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, bases: tuple[str, ...], note: str
) -> None:
    monkeypatch.setattr(prediction, "gpu_name", lambda: None)
    found = find_profile("NVIDIA H200")
    assert found is not None
    rows = [replace(row, basis=basis) for row in found[1].rows for basis in bases]
    own = replace(found[1], device=cpu_name(), rows=tuple(rows))
    assert prediction.machine(own, JOBS, num_ranks=4) == f"4 CPU ranks ({cpu_name()}; {note})"


def test_shapes_of_other_pipelines_that_nobody_measured_are_named() -> None:
    profile = prediction.choose_profile(None, JOBS, num_ranks=2)
    seen = [
        replace(job, has_nominal_flops=True) for job in JOBS if job.shape in {r.shape for r in profile.rows}
    ]
    assert prediction.unseen_shapes(profile, [replace(job, shape="64x64x9") for job in JOBS]) is None
    assert prediction.unseen_shapes(profile, seen) is None
    found = prediction.unseen_shapes(profile, [*seen, replace(seen[0], shape="64x64x9")])
    assert found is not None
    assert found.startswith("Not measured yet: 64x64x9. ")
