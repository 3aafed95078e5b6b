"""Draw a plan: the end of each policy and of each number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gfgen.runtime.report.picture import name_rows, save_figure
from gfgen.runtime.simulate.plan_report import answer, clock_time, missed
from gfgen.runtime.simulate.planner import Plan, PlanOption
from gfgen.system.wording import in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW_INCHES, MARGIN = 11.0, 0.36, 0.55
LEFT, AXES_WIDTH = 0.2, 0.5
"""Fractions of the width."""
PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
"""Background of a text on lines."""
IN_TIME, LATE, BEST = "#88CCEE", "#CC6677", "#44AA99"


def plot_plan(plan: Plan, path: Path) -> None:
    """Raises as `save_figure`."""
    save_figure(lambda: draw_plan(plan), path)


def draw_plan(plan: Plan) -> Figure:
    from matplotlib.figure import Figure

    groups = [(plan.by_policy, [option.policy for option in plan.by_policy])]
    if len(plan.by_ranks) > 1:
        names = [f"{plan.counted(option.num_ranks)}, {option.policy}" for option in plan.by_ranks]
        groups.append((plan.by_ranks, names))
    height = MARGIN * (len(groups) + 1) + ROW_INCHES * sum(len(names) for _, names in groups)
    figure = Figure(figsize=(WIDTH, height))
    figure.text(
        0.02, 1 - 0.25 / height, answer(plan), fontsize=10, weight="bold", va="center", parse_math=False
    )
    longest_s = max([option.end_s for options, _ in groups for option in options])
    top = height - MARGIN
    for options, names in groups:
        rows = ROW_INCHES * len(names)
        box = (LEFT, (top - rows) / height, AXES_WIDTH, rows / height)
        _draw_bars(figure.add_axes(box), plan, options, names, longest_s=longest_s)
        top -= rows + MARGIN
    return figure


def _draw_bars(
    axes: Axes, plan: Plan, options: Sequence[PlanOption], names: Sequence[str], *, longest_s: float
) -> None:
    for row, option in enumerate(options):
        colour = LATE if option.num_missed else BEST if option == plan.best else IN_TIME
        axes.barh(row, option.end_s, 0.66, color=colour)
        note = f", {missed(option)}" if option.num_missed else ""
        text = f"{clock_time(plan, option.end_s)} ({in_words(option.end_s)}){note}"
        axes.text(option.end_s + 0.02 * longest_s, row, text, va="center", fontsize=9, bbox=PLAIN, zorder=3)
    if plan.window.by_s is not None and plan.window.by_s < 1.2 * longest_s:
        axes.axvline(plan.window.by_s, color="black", linewidth=1.2, linestyle="--")
        axes.annotate(
            clock_time(plan, plan.window.by_s),
            (plan.window.by_s, 1),
            (0, 3),
            ("data", "axes fraction"),
            "offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_xlim(0, longest_s * 1.02)
    name_rows(axes, names, fontsize=9)
