"""What runs keep of their measurements, and what this machine's profile is made of."""

import fcntl
import json
import logging
import threading
from dataclasses import replace

import pytest
from builders import make_job

from gfgen.errors import InputError
from gfgen.graph import Stage
from gfgen.runtime.predict import profile_store, scaling
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile, ProfileRow, load_profile
from gfgen.runtime.predict.profile_store import (
    default_path,
    export_times,
    find_profile,
    import_times,
    joined,
    keep_measured,
    runs_path,
    save_profile,
)
from gfgen.system.machine import cpu_name, versions

ONE = (1, 1, 1)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    return tmp_path


def observed(*durations_s, shape="small"):
    """What a run has learned of the steps of one kind of job."""
    costs = CostModel()
    cost_class = costs.class_of(make_job("a", shape=shape))
    for duration_s in durations_s:
        costs.observe(cost_class, Stage.DENOISE, ONE, duration_s)
    return costs.classes.values()


def keep(path, classes, **fields):
    keep_measured(path, classes, **{"device": cpu_name(), "num_ranks": 4, "share_cores": True} | fields)


def row(seconds=1.0, *, model="fake", shape="small", stage=Stage.DENOISE, degrees=ONE, **fields):
    return ProfileRow(model, shape, stage, degrees, seconds, flops=1e9, state_bytes=64, **fields)


def profile(*rows, num_ranks=2, **fields):
    source = fields.pop("source", "a test")
    return Profile(cpu_name(), "2026-11-23", source, num_ranks, rows, **fields)


def test_a_run_leaves_medians_that_the_next_one_starts_from():
    keep(runs_path(), observed(9.0, 1.0, 1.2, 1.1, 1.0))
    path, found = find_profile()
    assert path == runs_path()
    assert (found.num_ranks, found.versions) == (4, versions())
    (only,) = [each for each in found.rows if each.model == "fake"]
    assert (only.seconds, only.loaded_s, only.num_samples, only.basis) == (1.1, 1.1, 5, "runs")


def test_several_runs_are_averaged_by_samples_and_other_rows_stay():
    keep(runs_path(), observed(1.0, 1.0, 1.0))
    keep(runs_path(), observed(2.0, shape="large"))
    keep(runs_path(), observed(2.0), num_ranks=1)
    found = load_profile(runs_path())
    assert {each.shape: (each.seconds, each.num_samples) for each in found.rows} == {
        "small": (1.25, 4),
        "large": (2.0, 1),
    }
    assert found.num_ranks == 4


def test_a_row_that_is_far_from_what_a_run_measures_is_replaced_or_loses_half_of_its_weight():
    def kept_after(*durations_s):
        keep(runs_path(), observed(*durations_s))
        (found,) = load_profile(runs_path()).rows
        return found.seconds, found.num_samples

    assert kept_after(10.0) == (10.0, 1)
    assert kept_after(1.0) == (1.0, 1), "as much as was known"
    assert kept_after(*[1.0] * 7) == (1.0, 8)
    assert kept_after(10.0) == (1.0, 4)
    assert kept_after(10.0, 10.0) == (1.0, 2)
    assert kept_after(10.0, 10.0) == (10.0, 2)
    assert kept_after(1.0, 1.0, 1.0) == (1.0, 3)


def test_a_stored_duration_that_is_ten_times_too_long_is_healed_by_one_run():
    keep(runs_path(), observed(*[10.0] * 64))
    costs = CostModel(load_profile(runs_path()))
    cost_class = costs.class_of(make_job("a"))
    for _ in range(3):
        costs.observe(cost_class, Stage.DENOISE, ONE, 1.0)
    assert costs.task_s(cost_class, Stage.DENOISE, ONE) == 1.0
    keep(runs_path(), costs.classes.values())
    (found,) = load_profile(runs_path()).rows
    assert (found.seconds, found.num_samples) == (1.0, 3)


def test_a_run_leaves_no_first_uses():
    costs = CostModel()
    cost_class = costs.class_of(make_job("a"))
    for stage, duration_s in ((Stage.DENOISE, 1.0), (Stage.DECODE, 0.1)):
        costs.observe_first_use(cost_class, stage, ONE, 5.0, prepared_s=0.0)
        if stage is Stage.DENOISE:
            costs.observe(cost_class, stage, ONE, duration_s)
    keep(runs_path(), costs.classes.values())
    (found,) = load_profile(runs_path()).rows
    assert (found.stage, found.seconds) == (Stage.DENOISE, 1.0)


def test_a_run_leaves_times_of_shared_steps_apart_from_others_and_of_all_decodes_together():
    costs, job = CostModel(), make_job("a")
    for number, step_s in ((1, 1.6), (2, 1.0)):
        for _ in range(3):
            costs.observe(costs.class_of(job, num_sharers=number), Stage.DENOISE, ONE, step_s)
            costs.observe(costs.class_of(job, num_sharers=number), Stage.DECODE, ONE, 0.5)
    keep(runs_path(), costs.classes.values())
    found = load_profile(runs_path())
    assert sorted((each.shape, each.stage, each.num_samples) for each in found.rows) == [
        ("small", "decode", 6),
        ("small", "denoise", 3),
        ("small in batches of 2", "denoise", 3),
    ]
    known = CostModel(found)
    classes = (known.class_of(job, num_sharers=number) for number in (1, 2, 3))
    times = [known.task_s(each, Stage.DENOISE, ONE) for each in classes]
    assert times == [1.6, 1.0, 1.6]  # no step of 3 was measured, so its jobs count as single ones
    other = known.cost_class(job.spec.model, "other", flops=job.flops, state_bytes=job.state_bytes)
    known.observe(known.class_of(job, num_sharers=4), Stage.DENOISE, ONE, 0.8)
    assert known.task_s(other, Stage.DENOISE, ONE) == 1.6, "shared steps say nothing about single jobs"


def test_a_run_leaves_the_time_to_write_a_file_with_its_decode():
    costs, job = CostModel(), make_job("a")
    cost_class = costs.class_of(job)
    for stage, degrees in ((Stage.DENOISE, ONE), (Stage.DECODE, (1, 2, 1))):
        costs.observe(cost_class, stage, degrees, 1.0)
    costs.observe_write(cost_class, 2.0)
    keep(runs_path(), costs.classes.values())
    found = load_profile(runs_path())
    assert {each.stage: each.write_s for each in found.rows} == {Stage.DENOISE: None, Stage.DECODE: 2.0}
    assert CostModel(found).class_of(job).write_s == 2.0
    costs = CostModel()
    costs.observe(costs.class_of(job), Stage.DECODE, (1, 2, 1), 1.0)
    keep(runs_path(), costs.classes.values())
    assert CostModel(load_profile(runs_path())).class_of(job).write_s == 2.0, "a run that wrote no file"


def test_a_profile_of_batches_alone_predicts_single_jobs():
    costs, job = CostModel(), make_job("a")
    costs.observe(costs.class_of(job, num_sharers=2), Stage.DENOISE, ONE, 1.0)
    keep(runs_path(), costs.classes.values())
    known = CostModel(load_profile(runs_path()))
    assert known.task_s(known.class_of(job), Stage.DENOISE, ONE) == 1.0


def test_rows_are_bounded_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(profile_store, "MAX_ROWS", 2)
    for shape in ("a", "b", "c", "b"):
        keep(runs_path(), observed(1.0, shape=shape))
    assert [each.shape for each in load_profile(runs_path()).rows] == ["c", "b"]


@pytest.mark.parametrize("content", ["{", "my notes", '{"format": 1}'])
def test_a_file_that_is_no_profile_stays_as_it_is(content, caplog):
    runs_path().parent.mkdir()
    runs_path().write_text(content)
    keep(runs_path(), observed(1.0))
    assert runs_path().read_text() == content
    (line,) = caplog.messages
    assert line.startswith("this run's measurements are not kept for plans: ")


def test_what_cannot_be_written_is_one_line(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "runs.json", observed(1.0))
    assert len(caplog.messages) == 1


def test_measured_times_travel_in_one_file_and_never_replace_newer_ones(tmp_path, monkeypatch):
    file = tmp_path / "times.json"
    with pytest.raises(InputError, match="no times of tasks were measured here"):
        export_times(file)
    mine = replace(profile(row()), device="GPU", date="2026-11-27", versions=versions())
    by_runs = replace(mine, source="runs", rows=(row(basis="runs"),))
    save_profile(mine, default_path("GPU"))
    save_profile(by_runs, runs_path("GPU"))
    assert export_times(file) == export_times(file) == [by_runs, mine]

    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "other machine"))
    assert list(import_times(file)) == [(by_runs, None), (mine, None)]
    assert find_profile("GPU")[1].rows == (row(),)
    assert [why for _, why in import_times(file)] == ["the one here is of 2026-11-27"] * 2
    save_profile(
        replace(mine, date="2026-11-26", rows=(row(2.0), row(3.0, shape="large"))), default_path("GPU")
    )
    save_profile(replace(mine, date="2026-11-28"), runs_path("GPU"))
    assert [why for _, why in import_times(file)] == ["the one here is of 2026-11-28", None]
    assert load_profile(default_path("GPU")).rows == (row(3.0, shape="large"), row())

    file.write_text(file.read_text().replace(f'"gfgen": "{versions()["gfgen"]}"', '"gfgen": "0.1"'))
    assert {why for _, why in import_times(file)} == {"measured by gfgen 0.1"}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"gfgen_times": 2}', '{"gfgen_times": 1, "profiles": [{}]}', "\0"]
)
def test_a_file_that_was_not_exported_or_is_damaged_is_one_line_and_is_not_overwritten(content, tmp_path):
    (file := tmp_path / "times.json").write_text(content)
    keep(runs_path(), observed(1.0))
    for use in (export_times, lambda path: list(import_times(path))):
        with pytest.raises(InputError, match="no file of 'gfgen cache export', or damaged") as error:
            use(file)
        assert "\n" not in str(error.value)
    assert file.read_text() == content


def test_runs_that_end_together_write_one_after_the_other():
    runs_path().parent.mkdir()
    other = threading.Thread(target=keep, args=(runs_path(), observed(1.0)))
    with runs_path().with_name(f".{runs_path().name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other.start()
        other.join(0.1)
        assert not runs_path().exists()
    other.join(10)
    assert runs_path().exists()


def test_a_run_that_measured_nothing_writes_nothing(cache):
    keep(runs_path(), CostModel().classes)
    assert not list(cache.iterdir())


def test_what_was_measured_on_purpose_goes_before_what_runs_measured():
    measured = profile(row(1.0, write_s=0.1))
    by_runs = profile(
        row(2.0, basis="runs", num_samples=9),
        row(3.0, shape="large", basis="runs", num_samples=9),
        num_ranks=4,
    )
    found = joined([measured, by_runs])
    assert {each.shape: (each.seconds, each.basis) for each in found.rows} == {
        "small": (1.0, "measured"),
        "large": (3.0, "runs"),
    }
    assert found.num_ranks == 4


def test_what_runs_do_not_measure_is_known_from_elsewhere():
    by_runs = profile(row(2.0, basis="runs", num_samples=9), source="runs")
    found = joined([by_runs, profile(row(1.0, basis="scaled"), write_s=0.05, dispatch_s=0.002)])
    assert (found.write_s, found.dispatch_s, found.source) == (0.05, 0.002, "runs")


def test_a_few_samples_of_a_run_do_not_replace_what_is_known_of_the_model():
    scaled = profile(row(1.0, basis="scaled"))
    few = profile(row(9.0, basis="runs", num_samples=2), row(5.0, model="other", basis="runs"))
    assert {each.model: each.seconds for each in joined([few, scaled]).rows} == {"fake": 1.0, "other": 5.0}


# Scaled profiles ------------------------------------------------------------------------------


def test_a_calibration_says_how_fast_this_machine_is_and_is_made_once(monkeypatch):
    made = []

    def measured():
        made.append(1)
        return {"alone_s": 0.04, "together_s": 0.06, "versions": versions()}

    monkeypatch.setattr(scaling, "_measured", measured)
    monkeypatch.setattr(scaling, "_num_cores", lambda: 2)
    assert find_profile() is None
    _, found = find_profile(calibrate=True)
    _, again = find_profile()
    assert found == again
    assert len(made) == 1
    base = load_profile(profile_store.SCALED / "shapes.json")
    step = next(each for each in base.rows if each.stage is Stage.DENOISE)
    rows = {each.degrees: each for each in found.rows if (each.shape, each.stage) == (step.shape, step.stage)}
    assert {each.basis for each in found.rows} == {"scaled"}
    assert rows[ONE].seconds == pytest.approx(step.seconds * 0.04 / base.calibration_s)
    assert rows[ONE].loaded_s == pytest.approx(step.seconds * 0.06 / base.calibration_s * 2)
    assert rows[2, 2, 1].seconds == pytest.approx(2 * rows[ONE].seconds / (4 * 0.9)), (
        "four ranks on two cores"
    )


def test_steps_that_runs_measured_scale_the_rest():
    base = load_profile(profile_store.SCALED / "shapes.json")
    step = next(each for each in base.rows if each.stage is Stage.DENOISE)
    alone = replace(step, seconds=step.seconds, basis="runs", loaded_s=None)  # of a run with one rank
    together = replace(step, seconds=3 * step.seconds, basis="runs", loaded_s=3 * step.seconds)
    speed = scaling.speed_by_runs(base, [alone, together])
    assert speed is not None
    assert speed.loaded == pytest.approx(3.0)
    assert scaling.speed_by_runs(base, [row(1.0, basis="runs")]) is None


def test_a_model_that_was_measured_here_is_not_scaled(monkeypatch):
    monkeypatch.setattr(scaling, "_measured", lambda: pytest.fail("nothing has to be calibrated"))
    path = profile_store.default_path()
    path.parent.mkdir()
    path.write_text(profile(row(1.0, model="shapes")).as_json())
    _, found = find_profile(calibrate=True)
    assert [each.basis for each in found.rows] == ["measured"]


@pytest.mark.parametrize("content", ["{", "[]", '{"alone_s": -1.0, "together_s": 1.0}'])
def test_a_broken_calibration_is_made_anew(monkeypatch, content, cache):
    found = {"alone_s": 0.04, "together_s": 0.06, "versions": versions()}
    monkeypatch.setattr(scaling, "_measured", lambda: found)
    folder = cache / "profiles"
    folder.mkdir()
    (folder / f"{scaling.file_stem(cpu_name())}-calibration.json").write_text(content)
    assert find_profile(calibrate=True) is not None
    (kept,) = folder.iterdir()
    assert json.loads(kept.read_text()) == found


def test_a_machine_that_cannot_be_calibrated_has_no_scaled_profile(monkeypatch, caplog):
    scaling._measured.cache_clear()
    monkeypatch.setattr("gfgen.system.lifeline.module_command", lambda *_: ["false"])
    with caplog.at_level(logging.WARNING):
        assert find_profile(calibrate=True) is None
    assert "this machine could not be calibrated" in caplog.text
    scaling._measured.cache_clear()


def test_the_basis_of_a_row_is_kept_in_its_file(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(profile(row(1.0), row(2.0, shape="b", basis="scaled"), calibration_s=0.08).as_json())
    found = load_profile(path)
    assert [each.basis for each in found.rows] == ["measured", "scaled"]
    assert found.calibration_s == 0.08
    path.write_text(path.read_text().replace('"scaled"', '"hopes"'))
    with pytest.raises(profile_store.InputError, match="basis = 'hopes'"):
        load_profile(path)


def test_peaks_and_the_rate_of_reads_are_kept_without_times_and_the_largest_peak_counts():
    keep(runs_path(), [], peaks={"fake small decode": 7, "fake small denoise": 3}, read_bytes_per_s=25e9)
    assert load_profile(runs_path()).rows == ()
    keep(
        runs_path(),
        observed(1.0),
        peaks={"fake small decode": 5, "fake large decode": 9},
        read_bytes_per_s=None,
    )
    found = load_profile(runs_path())
    assert found.peaks == {"fake small decode": 7, "fake small denoise": 3, "fake large decode": 9}
    assert (found.read_bytes_per_s, len(found.rows)) == (25e9, 1)
    both = joined([profile(row()), found, profile(row(), peaks={"fake small decode": 8, "other": 1})])
    assert (both.peaks, both.read_bytes_per_s) == (found.peaks | {"other": 1}, 25e9)
    assert not scaling.of_another_gpu(found, "NVIDIA X").peaks


def test_another_gpu_takes_as_much_longer_as_it_computes_less():
    known = replace(profile(row(1.0), row(1.0, stage=Stage.DECODE, loaded_s=2.0)), device="NVIDIA H200")
    scaled = scaling.of_another_gpu(known, "NVIDIA A100-SXM4-80GB")
    assert [each.seconds for each in scaled.rows] == [pytest.approx(989 / 312)] * 2
    assert [each.loaded_s for each in scaled.rows] == [None, pytest.approx(2 * 989 / 312)]
    assert scaling.of_another_gpu(known, "an unknown GPU").rows[0].seconds == pytest.approx(989 / 80)
    l4 = scaling.of_another_gpu(known, "NVIDIA L4")
    assert l4.rows[0].seconds == pytest.approx(989 / 121)


def test_only_profiles_are_replaced(tmp_path):
    profile_store.check_replaceable(tmp_path / "new.json")
    save_profile(profile(row(1.0)), tmp_path / "p.json")
    profile_store.check_replaceable(tmp_path / "p.json")
    (tmp_path / "mine.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match=r"mine\.json"):
        profile_store.check_replaceable(tmp_path / "mine.json")
