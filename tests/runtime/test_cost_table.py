import pytest

from gfgen.graph import Stage
from gfgen.runtime.predict.cost import CostModel, uncertain
from gfgen.runtime.predict.cost_table import CostTable, Provenance, TaskWork, _distance
from gfgen.runtime.predict.profile_file import Profile, ProfileRow

ONE = (1, 1, 1)


def row(shape, seconds, *, flops=0.0, degrees=ONE, model="wan", stage=Stage.DENOISE, **fields):
    return ProfileRow(model, shape, stage, degrees, seconds, flops=flops, **fields)


def profile(*rows, **fields):
    return Profile("a machine", "2026-11-20", "a test", num_ranks=4, rows=rows, **fields)


def ask(table, shape, flops, *, degrees=ONE, stage=Stage.DENOISE, state_bytes=0, model="wan"):
    return table.task(model, shape, stage, degrees, TaskWork(flops, state_bytes))


SHAPES = (row("S", 1.0, flops=10.0), row("M", 3.0, flops=20.0), row("L", 10.0, flops=40.0))


def test_a_profiled_task_takes_what_the_profile_says():
    estimate = ask(CostTable(profile(*SHAPES)), "M", 12345.0)
    assert (estimate.seconds, estimate.provenance) == (3.0, Provenance.PROFILED)


def test_shapes_between_two_profiled_ones_are_interpolated_over_their_operations():
    estimate = ask(CostTable(profile(*SHAPES)), "new", 30.0)
    assert estimate.seconds == pytest.approx(6.5)
    assert estimate.provenance is Provenance.INTERPOLATED


def test_as_many_operations_as_a_profiled_shape_take_as_long():
    estimate = ask(CostTable(profile(*SHAPES)), "M turned around", 20.0)
    assert (estimate.seconds, estimate.provenance) == (3.0, Provenance.INTERPOLATED)


def test_larger_shapes_go_on_along_the_last_line():
    estimate = ask(CostTable(profile(*SHAPES)), "XL", 60.0)
    assert estimate.seconds == pytest.approx(17.0)
    assert estimate.provenance is Provenance.EXTRAPOLATED


def test_smaller_shapes_never_take_less_than_their_share():
    estimate = ask(CostTable(profile(*SHAPES)), "XS", 5.0)
    assert estimate.seconds == pytest.approx(0.5)
    assert estimate.provenance is Provenance.EXTRAPOLATED


def test_smaller_shapes_gain_as_much_from_more_ranks_as_the_smallest_that_was_measured():
    """Going on along each degree's own line, two ranks would be 0.1 s, and a rank alone 0.5 s."""
    shared = [row("S", 0.6, flops=10.0, degrees=(1, 2, 1)), row("M", 2.0, flops=20.0, degrees=(1, 2, 1))]
    table = CostTable(profile(*SHAPES, *shared))
    alone, both = ask(table, "XS", 5.0), ask(table, "XS", 5.0, degrees=(1, 2, 1))
    assert both.seconds == pytest.approx(0.6 * alone.seconds)
    assert both.provenance is Provenance.EXTRAPOLATED
    four = ask(table, "XS", 5.0, degrees=(1, 4, 1))
    assert alone.seconds / 4 <= four.seconds < both.seconds
    assert ask(table, "S", 10.0, degrees=(1, 2, 1)).seconds == 0.6
    assert ask(table, "as S", 10.0, degrees=(1, 2, 1)).seconds == pytest.approx(0.6)


def test_no_smaller_shape_is_predicted_to_gain_more_than_its_ranks():
    shared = row("S", 0.3, flops=10.0, degrees=(1, 2, 1))
    table = CostTable(profile(*SHAPES, shared))
    assert ask(table, "XS", 5.0, degrees=(1, 2, 1)).seconds == pytest.approx(0.25)
    without_work = row("S", 0.3, degrees=(1, 4, 1))
    assert ask(CostTable(profile(*SHAPES, without_work)), "XS", 5.0, degrees=(1, 4, 1)).seconds == 0.3
    only_shared = CostTable(profile(shared, row("M", 2.0, flops=20.0, degrees=(1, 2, 1))))
    assert ask(only_shared, "XS", 5.0, degrees=(1, 2, 1)).seconds == pytest.approx(0.15)


@pytest.mark.parametrize("loaded_s", [None, 0.9])
def test_smaller_shapes_under_load_take_the_share_of_the_smallest_under_load(loaded_s):
    alone = row("S", 1.0, flops=10.0, loaded_s=1.5)
    shared = row("S", 0.6, flops=10.0, degrees=(1, 2, 1), loaded_s=loaded_s)
    estimate = ask(CostTable(profile(alone, shared)), "XS", 5.0, degrees=(1, 2, 1))
    assert estimate.loaded_s == pytest.approx((loaded_s or 0.6) / 2)


def test_one_profiled_shape_is_scaled_in_proportion():
    assert ask(CostTable(profile(SHAPES[0])), "L", 40.0).seconds == pytest.approx(4.0)


def test_stages_without_arithmetic_are_told_by_the_bytes_of_the_state():
    rows = [
        row(shape, seconds, stage=Stage.PREPARE, state_bytes=size)
        for shape, seconds, size in [("S", 1.0, 100), ("L", 3.0, 300)]
    ]
    estimate = ask(CostTable(profile(*rows)), "M", 0.0, stage=Stage.PREPARE, state_bytes=200)
    assert (estimate.seconds, estimate.provenance) == (pytest.approx(2.0), Provenance.INTERPOLATED)


def test_other_degrees_follow_from_the_efficiency_that_the_profile_shows():
    rows = [row("S", 1.0, flops=10.0), row("S", 0.6, flops=10.0, degrees=(1, 2, 1))]
    estimate = ask(CostTable(profile(*rows)), "S", 10.0, degrees=(1, 4, 1))
    assert estimate.seconds == pytest.approx(0.2 + 0.8 / 4)
    assert estimate.provenance is Provenance.EXTRAPOLATED


def test_other_degrees_of_as_many_ranks_take_as_long():
    rows = [row("S", 1.0, flops=10.0), row("S", 0.6, flops=10.0, degrees=(2, 1, 1))]
    assert ask(CostTable(profile(*rows)), "S", 10.0, degrees=(1, 2, 1)).seconds == pytest.approx(0.6)


def test_a_model_without_shared_steps_is_taken_to_be_as_efficient_as_the_others():
    rows = [
        row("S", 1.0, flops=10.0),
        row("S", 0.75, flops=10.0, degrees=(1, 2, 1)),
        row("S", 4.0, flops=10.0, model="qwen"),
    ]
    estimate = ask(CostTable(profile(*rows)), "S", 10.0, degrees=(1, 2, 1), model="qwen")
    assert estimate.seconds == pytest.approx(3.0)


def test_load_counts_where_it_was_measured():
    rows = [row("S", 1.0, flops=10.0, loaded_s=1.5), row("L", 3.0, flops=30.0, loaded_s=4.5)]
    assert ask(CostTable(profile(*rows)), "M", 20.0).loaded_s == pytest.approx(3.0)
    assert ask(CostTable(profile(SHAPES[0])), "S", 10.0).loaded_s == 1.0


def test_a_model_that_was_not_measured_has_no_estimate():
    assert ask(CostTable(profile(*SHAPES)), "S", 10.0, model="qwen") is None
    assert ask(CostTable(profile(*SHAPES)), "S", 10.0, stage=Stage.DECODE) is None


# The cost model that starts from a profile ----------------------------------------------------


def cost_class(costs, shape, flops, model="wan"):
    return costs.cost_class(model, shape, flops=dict.fromkeys(Stage, flops), state_bytes=1000)


def test_predictions_start_from_the_profile_under_load_and_let_a_task_be_foreseen():
    costs = CostModel(profile(row("S", 1.0, flops=10.0, loaded_s=1.2)))
    small = cost_class(costs, "S", 10.0)
    assert costs.task_s(small, Stage.DENOISE, ONE) == 1.2
    assert costs.has_seen(small, Stage.DENOISE, ONE)
    assert not costs.has_seen(small, Stage.DENOISE, (1, 2, 1))
    assert costs.is_measured(small)


def test_measurements_take_over_from_a_profile_row_within_a_few_tasks():
    costs = CostModel(profile(*SHAPES))
    small = cost_class(costs, "S", 10.0)
    costs.observe(small, Stage.DENOISE, ONE, 2.0)
    assert costs.task_s(small, Stage.DENOISE, ONE) == 1.0, "either may be an outlier; the longer one often is"
    costs.observe(small, Stage.DENOISE, ONE, 2.0)
    assert costs.task_s(small, Stage.DENOISE, ONE) == 2.0
    assert costs.estimate(small, Stage.DENOISE, ONE).provenance is Provenance.MEASURED


def test_a_machine_slower_than_the_profile_is_slower_with_every_shape_and_degree():
    rows = [*SHAPES, row("S", 0.6, flops=10.0, degrees=(1, 2, 1))]
    costs = CostModel(profile(*rows))
    small, large = cost_class(costs, "S", 10.0), cost_class(costs, "L", 40.0)
    for _ in range(2):
        costs.observe(small, Stage.DENOISE, ONE, 1.5)
    assert costs.task_s(large, Stage.DENOISE, ONE) == pytest.approx(15.0)
    assert costs.task_s(small, Stage.DENOISE, (1, 2, 1)) == pytest.approx(0.9)


def test_only_what_was_handed_out_and_is_not_measured_is_doubtful():
    costs = CostModel(profile(*SHAPES))
    costs.task_s(cost_class(costs, "S", 10.0), Stage.DENOISE, ONE)
    costs.task_s(cost_class(costs, "between", 15.0), Stage.DENOISE, ONE)
    assert not costs.doubts
    assert uncertain(costs.doubts, has_writes=True) is None
    costs.task_s(cost_class(costs, "S", 10.0), Stage.DENOISE, (2, 2, 1))
    costs.task_s(cost_class(costs, "XL", 80.0), Stage.DENOISE, ONE)
    costs.task_s(cost_class(costs, "S", 10.0, model="qwen"), Stage.DENOISE, ONE)
    assert uncertain(costs.doubts, has_writes=True) == (
        "extrapolated, not measured: wan S (denoise on cfg 2 x ulysses 2), wan XL (denoise on 1 rank); "
        "guessed, not measured: qwen S (denoise on 1 rank)"
    )


def test_moves_take_what_the_profile_says():
    costs = CostModel(profile(*SHAPES, move_s=0.5, move_bytes_per_s=1000.0))
    from gfgen.layout import Layout

    small = cost_class(costs, "S", 10.0)
    assert costs.move_s(small, Layout.single(0), Layout.single(1)) == pytest.approx(1.5)


def test_what_degrees_do_that_the_profile_lacks_is_not_taken_for_drift():
    costs = CostModel(profile(*SHAPES))
    small = cost_class(costs, "S", 10.0)
    before = costs.task_s(small, Stage.DENOISE, ONE)
    costs.observe(small, Stage.DENOISE, (1, 4, 1), 9.0)
    assert costs.task_s(small, Stage.DENOISE, ONE) == before


def test_degrees_of_as_many_ranks_are_nearest_and_then_those_of_as_many_branches():
    halves, together, single = (2, 1, 1), (1, 2, 1), ONE
    assert min(single, halves, together, key=lambda other: _distance(other, (2, 2, 1))) == halves
    assert min(single, halves, together, key=lambda other: _distance(other, (1, 4, 1))) == together


def test_files_of_a_model_without_times_take_what_the_profile_says_of_any():
    table = CostTable(
        profile(*SHAPES, row("S", 1.0, model="other", stage=Stage.DECODE, write_s=0.7), write_s=0.3)
    )
    assert table.write_s("wan", "S", TaskWork(1.0, 1)) == 0.3
    assert table.write_s("other", "S", TaskWork(1.0, 1)) == 0.7
