"""Measuring a profile on real workers, and putting it together."""

import pytest
from builders import make_job, with_limits
from test_workers import PICTURE, admitted

from gfgen.bench import profiling
from gfgen.bench.profiling import Samples
from gfgen.bench.scripted import MeasuredRun
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.events import OutputWritten
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import check_profile, load_profile


def planned(*jobs, num_ranks):
    plan = profiling.plan_measurements(jobs, num_ranks=num_ranks)
    return [(entry.job.shape, entry.num_ranks, entry.kind) for entry in plan if entry.round == 1]


def test_every_shape_is_measured_once_on_groups_of_all_sizes_alone_and_under_load():
    jobs = [make_job("a", uses_cfg=True), make_job("b", uses_cfg=True)]
    assert planned(*jobs, num_ranks=3) == [
        ("small", 1, "alone"),
        ("small", 1, "loaded"),
        ("small", 2, "alone"),
        ("small", 2, "loaded"),
        ("small", 3, "alone"),
        ("small", 1, "moving"),
    ]


def test_every_group_measures_all_degrees_that_its_job_can_use():
    def degrees_of(job, num_ranks):
        plan = profiling.plan_measurements([job], num_ranks=num_ranks)
        return [
            set(entry.step_degrees(counts=True))
            for entry in plan
            if (entry.kind, entry.round) == ("alone", 1)
        ]

    assert degrees_of(make_job("a", uses_cfg=True), 3) == [{(1, 1, 1)}, {(2, 1, 1), (1, 2, 1)}, {(1, 3, 1)}]
    job = with_limits(make_job("a"), max_sequence_degree=2)
    assert [n for _, n, kind in planned(job, num_ranks=4) if kind == "loaded"] == [1, 2]
    assert degrees_of(job, 4) == [{(1, 1, 1)}, {(1, 2, 1)}]
    halves = with_limits(make_job("a", uses_cfg=True), max_sequence_degree=2)
    assert [n for _, n, kind in planned(halves, num_ranks=4) if kind == "alone"] == [1, 2, 4]
    assert planned(job, num_ranks=1) == [("small", 1, "alone")]


def test_all_but_moves_is_measured_again_after_everything_else():
    plan = profiling.plan_measurements([make_job("a"), make_job("b", shape="large")], num_ranks=2)
    rounds = [entry.round for entry in plan]
    assert rounds == sorted(rounds)
    assert max(rounds) == profiling.ROUNDS
    assert len({entry.key for entry in plan}) == len(plan)
    again = {entry.kind for entry in plan if entry.round > 1}
    assert again == {"alone", "loaded"}


def test_files_that_are_written_at_the_same_time_count_by_what_their_writers_tell():
    (entry,) = profiling.plan_measurements([make_job("a")], num_ranks=1)[:1]
    warm_up, counted = profiling._scripted_jobs(entry, [[0]])
    scripted = {"first": warm_up, "a": counted, "b": counted}
    run = MeasuredRun()
    for job_id, write_s in (("first", 9.0), ("a", 3.0), ("b", 4.0)):
        run.applied(OutputWritten(20.0, job_id, f"{job_id}.mp4", 1, write_s, 0))
    assert profiling._samples(entry, scripted, run).writes == [3.0, 4.0]


def test_a_disturbance_of_one_round_is_not_in_the_profile():
    plan = profiling.plan_measurements([make_job("a")], num_ranks=1)
    samples = {1: 2.0, 2: 9.0, 3: 2.2}
    measured = {entry.key: Samples({"encode 1x1x1": [samples[entry.round]]}) for entry in plan}
    made = profiling.assemble(measured, plan, device="d", source="s", num_ranks=1, versions={})
    assert {row.seconds for row in made.rows} == {2.2}
    assert {row.num_samples for row in made.rows} == {3}


def test_what_is_measured_makes_the_prediction_of_the_rest_better():
    plan = profiling.plan_measurements([make_job("a")], num_ranks=2)
    costs = CostModel()
    before_s = profiling.predicted_s(plan[1], costs, num_ranks=2)
    samples = Samples({f"{stage} 1x1x1": [2.0] for stage in Stage})
    profiling.learn(plan[0], samples, costs)
    num_tasks = (profiling.WARM_UP_STEPS + 3) + (1 + profiling.STEPS["loaded"] + 3)
    assert before_s != profiling.predicted_s(plan[1], costs, num_ranks=2) == pytest.approx(2.0 * num_tasks)


def test_a_profile_has_medians_spread_moves_and_files():
    plan = profiling.plan_measurements([make_job("a")], num_ranks=2)
    one_by_one = {f"{stage} 1x1x1": [1.0, 2.0, 4.0] for stage in Stage}
    measured = {
        "fake small on 1 alone round 1": Samples(one_by_one, writes=[9.0], gaps=[0.5]),
        "fake small on 1 loaded round 1": Samples({"denoise 1x1x1": [3.0]}, writes=[7.0], gaps=[0.7]),
        "fake small on 2 alone round 1": Samples({"denoise 1x2x1": [0.6, 0.8]}),
        "fake small on 1 moving round 1": Samples(moves=[(1000, 2.6), (3000, 4.6), (1000, 2.6)]),
    }
    assert {entry.key for entry in plan if entry.round == 1} == set(measured)
    made = profiling.assemble(measured, plan, device="d", source="s", num_ranks=2, versions={})
    denoise, shared = (row for row in made.rows if row.stage is Stage.DENOISE)
    assert (denoise.seconds, denoise.spread_s, denoise.num_samples, denoise.loaded_s) == (2.0, 1.5, 3, 3.0)
    assert (denoise.flops, denoise.state_bytes, denoise.write_s) == (1e9, 64, None)
    assert (shared.degrees, shared.seconds, shared.loaded_s) == ((1, 2, 1), pytest.approx(0.7), None)
    decode = next(row for row in made.rows if row.stage is Stage.DECODE)
    assert (decode.seconds, decode.loaded_s, decode.write_s) == (2.0, None, 7.0)
    assert made.dispatch_s == pytest.approx(0.6)
    assert (made.move_s, made.move_bytes_per_s) == (pytest.approx(1.0), 1000)


def test_each_job_of_each_round_has_a_prompt_that_no_rank_has_encoded_yet():
    """An encode that a rank remembers takes no time."""
    prompts = [
        scripted.job.spec.prompt
        for entry in profiling.plan_measurements([make_job("a", uses_cfg=True)], num_ranks=3)
        for scripted in profiling._scripted_jobs(entry, [range(3)])
    ]
    assert len(set(prompts)) == len(prompts)
    assert len(set(map(len, prompts))) == 1


def test_real_workers_are_measured_in_every_way(pool, tmp_path):
    """On four ranks; a few of the measurements, since all of them take a minute."""
    (job,) = admitted(JobSpec(id="a", prompt="a fox", **PICTURE | {"negative_prompt": "blurry"}))
    plan = profiling.plan_measurements([job], num_ranks=pool.num_ranks)
    assert {entry.num_ranks for entry in plan} == {1, 2, 3, 4}
    chosen = [
        entry
        for entry in plan
        if (entry.round == 1 and entry.kind == "alone" and entry.num_ranks in (2, 4))
        or (entry.round == 1 and (entry.num_ranks, entry.kind) in {(1, "moving"), (3, "loaded")})
        or (entry.num_ranks, entry.kind) == (1, "alone")
    ]
    measured = {entry.key: profiling.measure(entry, pool, folder=tmp_path) for entry in chosen}
    alone, moving, pair, wide = (
        measured[f"tiny-qwen-image {job.shape} on {key} round 1"]
        for key in ("1 alone", "1 moving", "2 alone", "4 alone")
    )
    steps = profiling.STEPS["alone"]
    assert counted(alone) == {
        "encode 1x1x1": 1,
        "prepare 1x1x1": 1,
        "denoise 1x1x1": steps,
        "decode 1x1x1": 1,
    }
    assert len(alone.gaps) == steps
    # The first file may still be under way, by a writer that is just starting, when the second one comes.
    assert any(samples.writes for key, samples in measured.items() if "1 alone" in key)
    assert counted(pair) == {
        "encode 1x1x1": 1,
        "prepare 1x1x1": 1,
        "denoise 2x1x1": steps,
        "denoise 1x2x1": steps,
        "decode 1x2x1": 1,
    }
    assert {"denoise 2x2x1", "denoise 1x4x1"} < counted(wide).keys()
    assert len(moving.moves) == profiling.STEPS["moving"] - 1
    assert {size for size, _ in moving.moves} == {job.state_bytes}
    plan = [entry for entry in chosen if entry.kind != "loaded"]
    made = profiling.assemble(measured, plan, device="d", source="s", num_ranks=4, versions={})
    (tmp_path / "p.json").write_text(made.as_json())
    assert load_profile(tmp_path / "p.json") == made
    check_profile(made, [job], num_ranks=4)


def counted(samples):
    return {name: len(durations) for name, durations in samples.tasks.items()}
