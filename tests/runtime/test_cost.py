from dataclasses import replace

import pytest
from builders import make_job
from hypothesis import given
from hypothesis import strategies as st

from gfgen.graph import Stage, Trajectory
from gfgen.layout import Layout, Limits
from gfgen.runtime.predict.cost import OVERHEAD_S, CostModel
from gfgen.runtime.predict.cost_table import Provenance
from gfgen.runtime.predict.profile_file import Profile, ProfileRow

ONE = (1, 1, 1)


def cost_class(costs: CostModel, shape: str = "small", flops: float = 1e9):
    return costs.cost_class("model", shape, flops=dict.fromkeys(Stage, flops), state_bytes=1_000_000)


def test_what_was_measured_replaces_the_estimate():
    costs = CostModel()
    small = cost_class(costs)
    costs.observe(small, Stage.DENOISE, ONE, 0.25)
    assert costs.task_s(small, Stage.DENOISE, ONE) == pytest.approx(0.25)


def test_one_shape_teaches_about_another_of_the_same_model():
    costs = CostModel()
    small, large = cost_class(costs), cost_class(costs, "large", flops=4e9)
    costs.observe(small, Stage.DENOISE, ONE, 0.5)
    assert costs.task_s(large, Stage.DENOISE, ONE) == pytest.approx(2.0, rel=0.02)


def test_more_ranks_are_predicted_to_be_faster():
    costs = CostModel()
    small = cost_class(costs)
    assert costs.task_s(small, Stage.DENOISE, (1, 4, 1)) < costs.task_s(small, Stage.DENOISE, ONE)


def test_remaining_time_adds_up_over_the_tasks_that_are_left():
    costs = CostModel()
    small = cost_class(costs)
    for stage, seconds in zip(Stage, (1.0, 2.0, 4.0, 0.5, 6.0, 8.0), strict=True):
        costs.observe(small, stage, ONE, seconds)
    trajectory = Trajectory("job", num_steps=3)

    def remaining(index: int) -> float:
        return costs.remaining_s(small, trajectory.task(index), trajectory.num_tasks, ONE)

    assert [remaining(index) for index in range(6)] == pytest.approx([23, 22, 20, 16, 12, 8])


def test_a_notable_change_raises_the_version_and_a_small_one_does_not():
    costs = CostModel()
    small = cost_class(costs)
    costs.observe(small, Stage.DENOISE, ONE, 1.0)
    costs.task_s(small, Stage.DENOISE, ONE)
    costs.observe(small, Stage.DENOISE, ONE, 1.05)
    assert small.version == 0
    costs.observe(small, Stage.DENOISE, ONE, 3.0)
    assert small.version == 0, "one slow task may be the first of a prompt's length"
    costs.observe(small, Stage.DENOISE, ONE, 3.0)
    assert small.version == 1


def test_what_was_worked_out_of_estimates_goes_with_a_notable_change():
    costs = CostModel()
    small, trajectory = cost_class(costs), Trajectory("job", num_steps=3)

    def remaining_s() -> float:
        return costs.remaining_s(small, trajectory.task(4), trajectory.num_tasks, ONE)

    for stage in Stage:
        costs.observe(small, stage, ONE, 1.0)
    before_s = remaining_s()
    costs.kept["by a policy"] = before_s
    costs.observe(small, Stage.DENOISE, ONE, 1.05)
    assert (remaining_s(), costs.kept) == (before_s, {"by a policy": before_s})
    costs.observe(small, Stage.DENOISE, ONE, 3.0)
    costs.observe(small, Stage.DENOISE, ONE, 3.0)
    assert costs.kept == {}
    assert remaining_s() > before_s


def test_slow_first_steps_lift_neither_the_prediction_nor_the_least_time():
    costs = CostModel()
    small = cost_class(costs)
    for first_s in (0.226, 0.251, 0.206):
        for seconds in (first_s, 0.126, 0.127, 0.125):
            costs.observe(small, Stage.DENOISE, ONE, seconds)
    expected_s, least_s = costs.ends_after_s(small, Stage.DENOISE, ONE)
    assert expected_s == pytest.approx(0.126, abs=0.001)
    assert least_s == 0.125
    assert costs.task_s(small, Stage.DENOISE, ONE) == expected_s


def test_a_lasting_change_is_followed_and_old_times_are_forgotten():
    costs = CostModel()
    small = cost_class(costs)
    for seconds in [0.1] * 9 + [0.2] * 5:
        costs.observe(small, Stage.DENOISE, ONE, seconds)
    assert costs.ends_after_s(small, Stage.DENOISE, ONE) == (0.2, 0.1)
    for _ in range(4):
        costs.observe(small, Stage.DENOISE, ONE, 0.2)
    assert costs.ends_after_s(small, Stage.DENOISE, ONE) == (0.2, 0.2)


def test_the_least_time_on_several_ranks_is_that_of_the_first_one_to_end():
    costs = CostModel()
    small = cost_class(costs)
    costs.observe(small, Stage.DECODE, (1, 2, 1), 0.5, first_end_s=0.4)
    assert costs.ends_after_s(small, Stage.DECODE, (1, 2, 1)) == (0.5, 0.4)


def test_a_step_that_is_shared_has_its_part_of_a_switch_of_loras():
    costs = CostModel()
    flops = small_flops()
    alone, shared = (costs.cost_class("m", "x", flops=flops, state_bytes=1, num_sharers=n) for n in (1, 4))
    costs.observe(alone, Stage.DENOISE, ONE, 1.0)
    costs.observe_switch(alone, Stage.DENOISE, ONE, 3.0)
    costs.observe_switch(shared, Stage.DENOISE, ONE, 1.5)
    assert costs.switch_s(shared) == 2.0
    assert costs.task_s(shared, Stage.DENOISE, ONE) == 1.0


def test_the_time_to_write_a_file_is_learnt_and_counts_from_the_next_renewal():
    costs = CostModel()
    flops = small_flops()
    alone, shared = (costs.cost_class("m", "x", flops=flops, state_bytes=1, num_sharers=n) for n in (1, 4))
    costs.observe_write(alone, 2.0)
    assert (alone.write_s, shared.write_s) == (0.0, 0.0)
    costs.renew(costs.changed)
    assert (alone.write_s, shared.write_s) == (2.0, 2.0)
    costs.observe_write(shared, 2.1)
    assert not costs.changed, "too little to reorder jobs for"


def test_a_profile_without_times_of_files_does_not_count_as_a_measurement():
    costs = CostModel(Profile("a machine", "2026-11-27", "a test", num_ranks=1, rows=()))
    small = cost_class(costs)
    costs.observe_write(small, 4.0)
    costs.renew([small])
    assert small.write_s == 4.0


def test_a_job_that_stays_moves_nothing():
    costs = CostModel()
    here, there = Layout.single(0), Layout.single(1)
    assert costs.move_s(cost_class(costs), here, here) == 0.0
    assert costs.move_s(cost_class(costs), None, here) == 0.0
    assert costs.move_s(cost_class(costs), here, there) > 0.0
    assert costs.move_s(cost_class(costs), Layout((0, 1), cfg=2), Layout.bands((1, 0))) == 0.0


def classes_of_limits(costs: CostModel, **limits):
    return costs.cost_class(
        "model", "small", flops=dict.fromkeys(Stage, 1e9), state_bytes=1, limits=Limits(**limits)
    )


def test_guidance_branches_go_to_halves_unless_all_ranks_in_turn_are_known_to_be_quicker():
    costs = CostModel()
    small = classes_of_limits(costs, uses_cfg=True, max_sequence_degree=8)
    assert costs.arrangement(small).steps[:4] == ((1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1))
    costs.observe(small, Stage.DENOISE, (2, 2, 1), 0.50)
    assert costs.arrangement(small).steps[3] == (2, 2, 1), "nothing is known of the other degrees"
    costs.observe(small, Stage.DENOISE, (1, 4, 1), 0.45)
    costs.renew([small])
    assert costs.arrangement(small).steps[3] == (1, 4, 1)


def test_an_arrangement_stays_until_predictions_change_notably():
    costs = CostModel()
    small = classes_of_limits(costs, uses_cfg=True, max_sequence_degree=8)
    before = costs.arrangement(small)
    costs.observe(small, Stage.DENOISE, (2, 2, 1), 0.50)
    costs.observe(small, Stage.DENOISE, (1, 4, 1), 0.45)
    assert costs.arrangement(small) is before


def test_a_decode_takes_all_ranks_that_it_can_use_unless_fewer_are_known_to_be_as_quick():
    costs = CostModel()
    small = classes_of_limits(costs, max_decode_degree=5)
    assert costs.arrangement(small).decodes == (1, 2, 3, 4, 5, 5, 5, 5)
    for degree, seconds in ((1, 1.0), (2, 0.7), (4, 0.9)):
        costs.observe(small, Stage.DECODE, (1, degree, 1), seconds)
    costs.renew([small])
    assert costs.arrangement(small).decodes == (1, 2, 3, 2, 5, 5, 5, 5)


def test_the_decode_of_a_job_on_several_ranks_is_predicted_on_them():
    costs = CostModel()
    small = classes_of_limits(costs, max_sequence_degree=8, max_decode_degree=8)
    for degrees, seconds in (((1, 1, 1), 3.0), ((1, 4, 1), 1.0)):
        costs.observe(small, Stage.DECODE, degrees, seconds)
    trajectory = Trajectory("job", num_steps=3)
    last = trajectory.task(5)
    assert costs.remaining_s(small, last, trajectory.num_tasks, ONE) == 3.0
    assert costs.remaining_s(small, last, trajectory.num_tasks, (2, 2, 1)) == 1.0


def test_a_first_measurement_corrects_a_wrong_guess_of_its_model_alone():
    costs = CostModel()
    small, other = cost_class(costs), costs.cost_class("other", "x", flops=small_flops(), state_bytes=1)
    task = Trajectory("job", num_steps=3).task(2)
    for each in (small, other):
        costs.remaining_s(each, task, 6)
    costs.observe(small, Stage.DENOISE, ONE, 9.0)
    assert costs.corrected == {small}
    costs.renew(costs.corrected)
    assert not costs.changed
    assert costs.remaining_s(small, task, 6) > 27
    assert (small.version, other.version) == (2, 0)


def test_a_first_use_teaches_nothing_where_anything_else_is_known():
    costs = CostModel()
    small, large = cost_class(costs), cost_class(costs, "large", flops=4e9)
    costs.observe(small, Stage.DENOISE, ONE, 0.5)
    before = [costs.estimate(each, Stage.DENOISE, ONE) for each in (small, large)]
    for each in (small, large):
        costs.observe_first_use(each, Stage.DENOISE, ONE, 40.0, prepared_s=0.0)
    assert [costs.estimate(each, Stage.DENOISE, ONE) for each in (small, large)] == before
    assert not costs.has_seen(large, Stage.DENOISE, ONE)
    costs.observe_first_use(large, Stage.DENOISE, ONE, 1.0, prepared_s=0.0)
    assert costs.task_s(large, Stage.DENOISE, ONE) == 1.0, "it takes no longer than its shortest first use"


def test_a_first_use_predicts_where_nothing_else_can_until_the_first_measurement():
    costs = CostModel()
    small, large = cost_class(costs, flops=1e15), cost_class(costs, "large", flops=2e15)
    task = Trajectory("job", num_steps=3).task(2)
    for each in (small, large):
        costs.remaining_s(each, task, 6)
    costs.observe_first_use(small, Stage.DENOISE, ONE, 4.0, prepared_s=0.0)
    assert costs.task_s(small, Stage.DENOISE, ONE) == 4.0
    assert costs.task_s(large, Stage.DENOISE, ONE) == pytest.approx(8.0, rel=0.01)
    assert costs.estimate(small, Stage.DENOISE, ONE).provenance is Provenance.GUESSED
    assert costs.corrected == {small, large}
    costs.observe(small, Stage.DENOISE, ONE, 0.1)
    assert costs.task_s(small, Stage.DENOISE, ONE) == 0.1
    assert costs.task_s(large, Stage.DENOISE, ONE) == pytest.approx(0.2, rel=0.02)


def test_a_profile_of_steps_alone_predicts_the_other_stages_by_their_operations():
    row = ProfileRow("model", "small", Stage.DENOISE, ONE, 0.5, flops=1e15)
    costs = CostModel(Profile("a machine", "2026-11-28", "a test", num_ranks=1, rows=(row,)))
    decode = costs.estimate(cost_class(costs, flops=2e15), Stage.DECODE, ONE)
    assert decode.seconds == pytest.approx(1.0, rel=0.01)
    assert decode.provenance is Provenance.EXTRAPOLATED


def test_the_rest_of_a_job_has_the_price_of_first_uses_until_there_was_one():
    costs = CostModel()
    costs.price_first_uses(0.5, ())
    small, trajectory = classes_of_limits(costs, max_decode_degree=2), Trajectory("job", num_steps=3)
    for stage in (Stage.ENCODE, Stage.PREPARE, Stage.DECODE):
        costs.observe(small, stage, ONE, 1.0)
    costs.observe_first_use(small, Stage.DENOISE, ONE, 0.9, prepared_s=0.2)
    both, decode_both = (1, 2, 1), costs.task_s(small, Stage.DECODE, (1, 2, 1))

    def rest_s(degrees, index=2):
        return costs.remaining_s(small, trajectory.task(index), trajectory.num_tasks, degrees)

    step_s = costs.task_s(small, Stage.DENOISE, both)
    assert rest_s(both) == pytest.approx(3 * step_s + decode_both + 1.0), "of a step and a decode"
    assert rest_s(both, 5) == pytest.approx(decode_both + 0.5)
    costs.kept["by a policy"] = None
    costs.observe(small, Stage.DENOISE, ONE, 0.1)
    assert rest_s(ONE) == pytest.approx(1.3)
    assert costs.first_use_s(small, Stage.DENOISE, both) == pytest.approx(1.0), "0.9 and 0.2 in place of 0.1"
    assert costs.kept == {}
    assert small in costs.corrected
    costs.observe_first_use(small, Stage.DENOISE, both, 0.9, prepared_s=0.0)
    assert costs.first_use_s(small, Stage.DENOISE, both) == 0.0


def test_a_step_that_is_shared_has_its_part_of_the_price_of_a_first_use():
    costs = CostModel()
    costs.price_first_uses(0.5, ())
    flops = small_flops()
    alone, shared = (costs.cost_class("m", "x", flops=flops, state_bytes=1, num_sharers=n) for n in (1, 4))
    prices_s = [costs.first_use_s(each, Stage.DENOISE, ONE) for each in (alone, shared)]
    assert prices_s == [0.5, 0.125]
    costs.observe_first_use(shared, Stage.DENOISE, ONE, 0.3, prepared_s=0.1)
    costs.observe(shared, Stage.DENOISE, ONE, 0.1)
    assert costs.first_use_s(alone, Stage.DENOISE, ONE) == pytest.approx(4 * 0.3)


def test_equal_first_uses_on_one_rank_and_on_several_cancel_out():
    costs, task = CostModel(), Trajectory("job", num_steps=3).task(2)
    costs.price_first_uses(0.5, ())
    small = cost_class(costs)
    assert costs.remaining_s(small, task, 6) == costs.remaining_s(small, task, 6, ONE)
    costs.price_first_uses(0.0, ())
    costs.renew([small])
    assert costs.remaining_s(small, task, 6) == costs.remaining_s(small, task, 6, ONE)


def test_what_was_warmed_up_has_no_price():
    costs, job = CostModel(), make_job("a")
    costs.price_first_uses(
        0.5, [("fake", "small", ONE), ("fake", "small", (2, 1, 1)), ("fake", "other", ONE)]
    )
    small = costs.class_of(job)
    priced = {way: costs.first_use_s(small, Stage.DENOISE, way) for way in (ONE, (2, 1, 1), (1, 2, 1))}
    assert priced == {ONE: 0.0, (2, 1, 1): 0.0, (1, 2, 1): 0.5}
    assert [costs.first_use_s(small, Stage.DECODE, (1, n, 1)) for n in (1, 2, 4)] == [0.0, 0.0, 0.5]


durations_s = st.floats(1e-3, 1e3)


@given(others=st.lists(durations_s, min_size=2, max_size=20), outlier_s=durations_s, data=st.data())
def test_one_outlier_moves_an_estimate_by_at_most_the_spread_of_the_others(others, outlier_s, data):
    place = data.draw(st.integers(0, len(others)))
    estimates_s = []
    for durations in (others, [*others[:place], outlier_s, *others[place:]]):
        costs = CostModel()
        small = cost_class(costs)
        for duration_s in durations:
            costs.observe(small, Stage.DENOISE, ONE, duration_s)
        estimates_s.append(costs.estimate(small, Stage.DENOISE, ONE).seconds)
    assert abs(estimates_s[0] - estimates_s[1]) <= (max(others) - min(others)) * (1 + 1e-9)


@given(true_s=durations_s, factor=st.floats(2.0, 100.0), stored=st.integers(1, 64))
def test_a_stored_duration_that_is_too_long_stops_counting_at_the_first_measurement(true_s, factor, stored):
    rows = [
        ProfileRow("model", shape, Stage.DENOISE, ONE, seconds, num_samples=stored, flops=1e9)
        for shape, seconds in (("small", factor * true_s), ("b", true_s), ("c", true_s))
    ]
    costs = CostModel(Profile("a machine", "2026-11-28", "a test", num_ranks=1, rows=tuple(rows)))
    small, b, c = (cost_class(costs, shape) for shape in ("small", "b", "c"))
    costs.observe(small, Stage.DENOISE, ONE, true_s)
    assert costs.task_s(small, Stage.DENOISE, ONE) == true_s
    for each in (b, c):
        costs.observe(each, Stage.DENOISE, ONE, true_s)
    new = cost_class(costs, "new")
    assert costs.task_s(new, Stage.DENOISE, ONE) == pytest.approx(true_s), "it says nothing about the machine"


def small_flops():
    return dict.fromkeys(Stage, 1e9)


def streamed(*, read_s: float, compute_s: float | None = None) -> CostModel:
    """Of a model whose forwards read for this long, and whose profiled steps compute for that long."""
    rows = [ProfileRow("fake", "small", Stage.DENOISE, ONE, compute_s, flops=1e9)] if compute_s else []
    costs = CostModel(Profile("a machine", "2026-11-28", "a test", num_ranks=1, rows=tuple(rows)))
    costs.reads_s = {"fake": read_s}
    return costs


@pytest.mark.parametrize(
    ("compute_s", "shared_s"), [(0.2, {1: 1.0, 2: 0.5, 4: 0.25, 8: 0.2}), (3.0, {1: 3.0, 2: 3.0, 8: 3.0})]
)
def test_a_step_takes_the_longer_of_computing_and_reading_and_jobs_that_share_it_a_part_each(
    compute_s: float, shared_s: dict[int, float]
) -> None:
    costs, job = streamed(read_s=1.0, compute_s=compute_s), make_job("a", shape="small")
    for number, expected_s in shared_s.items():
        found = costs.class_of(job, num_sharers=number)
        assert costs.task_s(found, Stage.DENOISE, ONE) == pytest.approx(expected_s)
        assert costs.task_s(found, Stage.DECODE, ONE) == pytest.approx(compute_s, abs=0.01), (
            "it reads nothing"
        )


def test_only_jobs_on_one_rank_share_reads_and_a_rank_for_each_branch_reads_less_where_branches_are_apart():
    costs = streamed(read_s=1.0)
    job = replace(make_job("a", uses_cfg=True), num_reads=(4, 2))
    for number, expected in (
        (1, {ONE: 4.0, (1, 2, 1): 4.0, (2, 1, 1): 2.0}),
        (2, {ONE: 2.0, (1, 2, 1): 4.0}),
    ):
        found = costs.class_of(job, num_sharers=number)
        assert {way: costs.task_s(found, Stage.DENOISE, way) for way in expected} == expected


def test_steps_that_reading_bounds_teach_nothing_about_computing():
    costs = streamed(read_s=1.0, compute_s=0.2)
    small, large = (costs.class_of(make_job("a", shape=shape)) for shape in ("small", "large"))
    costs.observe(small, Stage.DENOISE, ONE, 1.05)
    assert costs.task_s(small, Stage.DENOISE, ONE) == 1.0, "the profile counts as a measurement"
    shared = costs.class_of(make_job("a", shape="small"), num_sharers=8)
    assert costs.task_s(shared, Stage.DENOISE, ONE) == pytest.approx(0.2)
    costs.observe(shared, Stage.DENOISE, ONE, 0.4)
    costs.observe(large, Stage.DENOISE, ONE, 5.0)
    assert costs.task_s(costs.class_of(make_job("b", shape="large"), num_sharers=8), Stage.DENOISE, ONE) > 4.0


def test_moves_and_approximate_steps_take_as_long_as_the_profile_says_of_the_state():
    costs = CostModel(Profile("a machine", "2026-11-28", "a test", 1, (), move_s=0.5, move_bytes_per_s=1e6))
    small = cost_class(costs)
    assert costs.move_s(small, Layout.single(0), Layout.single(1)) == pytest.approx(1.5)
    assert costs.estimate(small, Stage.APPROXIMATE, ONE).seconds == pytest.approx(OVERHEAD_S + 1.0)


def test_looks_ahead_get_the_same_estimates_and_record_nothing():
    costs = CostModel()
    small = cost_class(costs)
    ahead_s = costs.task_s(small, Stage.DENOISE, ONE, is_handed_out=False)
    assert not costs.doubts
    assert costs.task_s(small, Stage.DENOISE, ONE) == ahead_s > 0
    assert costs.doubts


def test_the_steps_of_a_model_teach_about_its_decodes_and_no_stage_about_its_steps():
    costs = CostModel()
    small, large = cost_class(costs), cost_class(costs, "large", flops=4e9)
    costs.observe(small, Stage.DENOISE, ONE, 0.5)
    assert costs.task_s(large, Stage.DECODE, ONE) == pytest.approx(2.0, rel=0.02)
    costs.observe(small, Stage.DECODE, ONE, 1.0)
    assert costs.estimate(large, Stage.DECODE, ONE).seconds == pytest.approx(4.0, rel=0.02)
    assert costs.estimate(large, Stage.DENOISE, ONE).seconds == pytest.approx(2.0, rel=0.02)


def test_a_shape_that_the_profile_lacks_takes_the_drift_of_those_that_it_has():
    """Its own durations differ from an estimate over shapes, which is no drift of the machine."""
    rows = tuple(
        ProfileRow("model", "small", Stage.DENOISE, degrees, 1.0, flops=1e9) for degrees in (ONE, (1, 2, 1))
    )
    costs = CostModel(Profile("a machine", "2026-11-28", "a test", num_ranks=2, rows=rows))
    small, large = cost_class(costs), {"flops": dict.fromkeys(Stage, 4e9), "state_bytes": 1_000_000}
    shared = costs.cost_class("model", "large", **large, num_sharers=2)
    costs.observe(shared, Stage.DENOISE, ONE, 40.0)
    costs.observe(small, Stage.DENOISE, (1, 4, 1), 40.0)
    assert costs.estimate(small, Stage.DENOISE, ONE).seconds == 1.0
    costs.observe(small, Stage.DENOISE, (1, 2, 1), 3.0)
    costs.observe(small, Stage.DENOISE, (1, 2, 1), 3.0)
    costs.observe(small, Stage.DENOISE, (1, 2, 1), 3.0)
    assert costs.estimate(small, Stage.DENOISE, ONE).seconds == pytest.approx(3.0)
