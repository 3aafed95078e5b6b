import pytest

from gfgen.graph import Stage, Trajectory
from gfgen.layout import Layout, Limits
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile

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
    for stage, seconds in zip(Stage, (1.0, 2.0, 4.0, 0.5, 8.0), strict=True):
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
    expected_s, least_s = costs.expected_s(small, Stage.DENOISE, ONE)
    assert expected_s == pytest.approx(0.126, abs=0.001)
    assert least_s == 0.125
    assert costs.task_s(small, Stage.DENOISE, ONE) == expected_s


def test_a_lasting_change_is_followed_and_old_times_are_forgotten():
    costs = CostModel()
    small = cost_class(costs)
    for seconds in [0.1] * 9 + [0.2] * 5:
        costs.observe(small, Stage.DENOISE, ONE, seconds)
    assert costs.expected_s(small, Stage.DENOISE, ONE) == (0.2, 0.1)
    for _ in range(4):
        costs.observe(small, Stage.DENOISE, ONE, 0.2)
    assert costs.expected_s(small, Stage.DENOISE, ONE) == (0.2, 0.2)


def test_the_least_time_on_several_ranks_is_that_of_the_first_one_to_end():
    costs = CostModel()
    small = cost_class(costs)
    costs.observe(small, Stage.DECODE, (1, 2, 1), 0.5, first_end_s=0.4)
    assert costs.expected_s(small, Stage.DECODE, (1, 2, 1)) == (0.5, 0.4)


def test_a_step_of_a_batch_has_its_part_of_a_switch_of_loras():
    costs = CostModel()
    alone, batch = (costs.cost_class("m", "x", flops=small_flops(), state_bytes=1, batch=n) for n in (1, 4))
    costs.observe(alone, Stage.DENOISE, ONE, 1.0)
    costs.observe_switch(alone, Stage.DENOISE, ONE, 3.0)
    costs.observe_switch(batch, Stage.DENOISE, ONE, 1.5)
    assert costs.switch_s(batch) == 2.0
    assert costs.task_s(batch, Stage.DENOISE, ONE) == 1.0


def test_the_time_to_write_a_file_is_learnt_and_counts_from_the_next_renewal():
    costs = CostModel()
    alone, batch = (costs.cost_class("m", "x", flops=small_flops(), state_bytes=1, batch=n) for n in (1, 4))
    costs.observe_write(alone, 2.0)
    assert (alone.write_s, batch.write_s) == (0.0, 0.0)
    costs.renew(costs.changed)
    assert (alone.write_s, batch.write_s) == (2.0, 2.0)
    costs.observe_write(batch, 2.1)
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
        costs.rest_alone_s(each, task, 6)
    costs.observe(small, Stage.DENOISE, ONE, 9.0)
    assert costs.corrected == {small}
    costs.renew(costs.corrected)
    assert not costs.changed
    assert costs.rest_alone_s(small, task, 6) > 27
    assert (small.version, other.version) == (2, 0)


def small_flops():
    return dict.fromkeys(Stage, 1e9)
