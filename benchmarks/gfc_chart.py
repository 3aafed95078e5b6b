"""The chart of collectives in README, from a report of `gfgen bench gfc --output`.

python -m benchmarks.gfc_chart REPORT.json CHART.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfgen.bench.gfc import size_name
from gfgen.cli.shown.picture import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_collectives(content: dict[str, Any]) -> Figure:
    """Draw both patterns on all GPUs, with NCCL, from a report's JSON."""
    from matplotlib.figure import Figure

    degree = max(row["degree"] for row in content["cells"])
    figure = Figure(figsize=(11, 4.2), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    series = {
        "nccl_eager": ("NCCL, eager", "#b0b0b0", "--"),
        "nccl_graph": ("NCCL, graph", "#606060", "-"),
        "ours_graph": ("gfgen, graph, fresh result", "#7fb3e6", "-"),
        "ours_arena_graph": ("gfgen, graph, in the arena", "#1f6fbf", "-"),
    }
    for axis, pattern in zip(axes, ("all_to_all", "all_gather"), strict=True):
        rows = [row for row in content["cells"] if (row["pattern"], row["degree"]) == (pattern, degree)]
        for key, (label, colour, style) in series.items():
            axis.plot(
                [row["bytes"] for row in rows], [row[key] for row in rows], style, color=colour, label=label
            )
        axis.set(xscale="log", yscale="log", xlabel="bytes of each rank's input")
        axis.set_xticks(
            [row["bytes"] for row in rows], [size_name(row["bytes"]) for row in rows], rotation=45
        )
        axis.minorticks_off()
        axis.set_title(f"{pattern.replace('_', '-')}, {content['facts']['device']}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds per call")
    axes[0].legend()
    return figure


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    save_figure(lambda: draw_collectives(report), Path(sys.argv[2]))
