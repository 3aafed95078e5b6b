"""Measuring a profile on GPUs, which CPU ranks imitate, and putting it together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_job, with_limits
from test_workers import find_model

from gfgen.bench import profiling
from gfgen.bench.profiling import Samples, fit_moves
from gfgen.bench.scripted import MeasuredRun, copy_of, placed_by, run_jobs
from gfgen.bench.workloads import admitted, calibration_jobs
from gfgen.errors import WorkerError
from gfgen.graph import Stage
from gfgen.layout import Layout
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import check_profile, load_profile

STAGES = ("encode 1x1x1", "prepare 1x1x1", "denoise 1x1x1", "decode 1x1x1")


def test_every_shape_is_measured_on_groups_of_one_two_and_four():
    plan = profiling.plan_measurements(
        [make_job("a", uses_cfg=True), make_job("b")], num_ranks=5, are_on_gpus=True
    )
    assert [entry.key for entry in plan] == [
        "fake small on 1 together round 1",
        "fake small on 2 together round 1",
        "fake small on 4 together round 1",
        "fake small on 1 moving round 1",
    ]
    both_ways = replace(plan[2], job=make_job("a", uses_cfg=True)).step_degrees(counts=False)
    assert both_ways == ((2, 2, 1),) * 2 + ((1, 4, 1),) * 2


def test_no_more_ranks_are_measured_than_a_job_can_use():
    job = with_limits(make_job("a"), max_sequence_degree=2)
    plan = profiling.plan_measurements([job], num_ranks=4, are_on_gpus=True)
    assert [entry.num_ranks for entry in plan if entry.kind == "together"] == [1, 2]
    alone = profiling.plan_measurements([job], num_ranks=1, are_on_gpus=True)
    assert [entry.key for entry in alone] == ["fake small on 1 together round 1"]


def test_the_prediction_counts_every_task_of_one_group():
    (entry, *_) = profiling.plan_measurements([make_job("a")], num_ranks=4, are_on_gpus=True)
    costs = CostModel()
    profiling.learn(entry, Samples({name: [2.0] for name in STAGES}), costs)
    num_jobs = profiling.JOBS["together"]
    num_steps = profiling.WARM_UP_STEPS + num_jobs * (1 + profiling.STEPS["together"])
    num_others = 3 * (1 + num_jobs)
    assert profiling.predicted_s(entry, costs, num_ranks=4) == pytest.approx(2.0 * (num_steps + num_others))


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([(10, 2.0), (10, 4.0), (30, 5.0)], (2.0, 10)),  # 3 s of 10 bytes, 5 s of 30
        ([(30, 1.0), (60, 3.0)], (0.0, 20)),  # a move of nothing would have taken less than nothing
        ([(1000, 0.003), (50_000_000, 0.002)], (0.002, 500_000_000_000)),  # 50 MB no longer than 1 kB
        ([(1000, 0.0), (50_000_000, 0.0)], (0.0, 500_000_000_000)),
        ([(1000, 0.004), (9000, 0.002), (50_000_000, 0.003)], (0.002, 50_000_000_000)),
        ([(1000, 0.0004), (2000, 0.0003)], (0.0003, 2_000_000_000)),  # no size says how fast it goes
        ([(4_000_000_000, 3.0)], (1.0, 2_000_000_000)),
        ([], (0.0, 2_000_000_000)),
    ],
)
def test_moves_are_a_time_of_any_and_a_rate(
    moves: list[tuple[int, float]], expected: tuple[float, float]
) -> None:
    assert fit_moves(moves) == pytest.approx(expected)


def test_a_profile_has_rows_by_degrees_and_what_a_move_adds_to_a_gap():
    plan = profiling.plan_measurements([make_job("a", uses_cfg=True)], num_ranks=2, are_on_gpus=True)
    measured = {
        "fake small on 1 together round 1": Samples({name: [1.0, 2.0, 4.0] for name in STAGES}, gaps=[0.5]),
        "fake small on 2 together round 1": Samples(
            {"denoise 2x1x1": [0.6, 0.8], "encode 1x1x1": [3.0]}, writes=[7.0]
        ),
        "fake small on 1 moving round 1": Samples(moves=[(1000, 2.5), (3000, 4.5)]),
    }
    made = profiling.assemble(measured, plan, device="d", source="s", num_ranks=2, versions={})
    rows = {(row.stage, row.degrees): row for row in made.rows}
    assert rows[Stage.DENOISE, (2, 1, 1)].seconds == pytest.approx(0.7)
    assert rows[Stage.ENCODE, (1, 1, 1)].num_samples == 4
    assert rows[Stage.DECODE, (1, 1, 1)].write_s == 7.0
    assert (rows[Stage.DENOISE, (1, 1, 1)].spread_s, made.dispatch_s) == (1.5, 0.5)
    assert (made.move_s, made.move_bytes_per_s) == (1.0, 1000)


def test_each_job_has_a_prompt_that_no_rank_has_encoded_yet():
    """An encode that a rank remembers takes no time."""
    prompts = [
        scripted.job.spec.prompt
        for entry in profiling.plan_measurements(
            [make_job("a", uses_cfg=True)], num_ranks=4, are_on_gpus=True
        )
        for scripted in profiling._scripted_jobs(entry, [range(4)])
    ]
    assert len(set(prompts)) == len(prompts)
    assert len(set(map(len, prompts))) == 1


def test_groups_on_real_workers_are_measured_in_every_way(bare_pool, tmp_path):
    (job, *_) = admitted(calibration_jobs("tiny-wan"), find_model("tiny-wan"))
    plan = profiling.plan_measurements([job], num_ranks=bare_pool.num_ranks, are_on_gpus=True)
    measured = {entry.key: profiling.measure(entry, bare_pool, folder=tmp_path) for entry in plan}
    alone, pair, moving = measured.values()
    counted = {name: len(durations) for name, durations in alone.tasks.items()}
    assert counted == {
        "encode 1x1x1": 6,
        "prepare 1x1x1": 6,
        "denoise 1x1x1": 6 * profiling.STEPS["together"],
        "decode 1x1x1": 6,
    }
    counted = {name: len(durations) for name, durations in pair.tasks.items()}
    assert counted == {
        "encode 1x1x1": 2,
        "prepare 1x1x1": 2,
        "denoise 2x1x1": 2 * profiling.STEPS["together"],
        "denoise 1x2x1": 2 * profiling.STEPS["together"],
        "decode 1x2x1": 2,
    }
    assert len(moving.moves) == profiling.STEPS["moving"] - 1
    assert {size for size, _ in moving.moves} == {job.state_bytes}
    made = profiling.assemble(measured, plan, device="d", source="s", num_ranks=3, versions={})
    (tmp_path / "p.json").write_text(made.as_json())
    assert load_profile(tmp_path / "p.json") == made
    check_profile(made, [job], num_ranks=3)


def test_groups_and_moves_stay_inside_islands(bare_pool, tmp_path, monkeypatch):
    used: dict[str, set[tuple[int, ...]]] = {}

    def run_and_note(jobs, pool, record, **options):
        run_jobs(jobs, pool, record, **options)
        used[entry.key] = {dispatch.layout.ranks for dispatch in record.dispatches.values()}

    monkeypatch.setattr(bare_pool, "islands", ((0,), (1, 2)))
    monkeypatch.setattr(profiling, "run_jobs", run_and_note)
    (job, *_) = admitted(calibration_jobs("tiny-wan"), find_model("tiny-wan"))
    for entry in profiling.plan_measurements([job], num_ranks=2, are_on_gpus=True):
        profiling.measure(entry, bare_pool, folder=tmp_path)
    assert list(used.values()) == [{(0,), (1,), (2,)}, {(1,), (1, 2)}, {(1,), (2,)}]


def test_a_run_knows_which_ranks_of_its_pool_reach_each_other(bare_pool, tmp_path, monkeypatch):
    monkeypatch.setattr(bare_pool, "islands", ((0,), (1, 2)))
    (job, *_) = admitted(calibration_jobs("tiny-wan"), find_model("tiny-wan"))

    def place(view):
        is_step = view.next_task.stage is Stage.DENOISE
        return Layout((0, 1), ulysses=2) if is_step else Layout.single(0)

    with pytest.raises(WorkerError, match="do not reach each other"):
        run_jobs(
            [copy_of(job, "across", 1)], bare_pool, MeasuredRun(), policy=placed_by(place), folder=tmp_path
        )
