"""Reused steps of the built-in model against fewer steps and diffusers' caches, at equal computed blocks.

    python -m benchmarks.reuse --output OUTPUT --chart docs/reuse.png

PSNR is that of the decoded result to the one with all steps and blocks. Curves are means over held-out
prompts of 128x128 videos. The measures are those of the model's card (training/measures.py), of 128x128
pictures, which take a fifth of the time. One thread. Writes OUTPUT.json and OUTPUT-tables.md after every
row; `--chart` draws the curves. benchmarks/reuse_caches.py has diffusers' caches.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.reuse_caches import cached_latents, cases, mag_ratios
from benchmarks.reuse_sampling import guided_flow, sampled
from gfgen.models.families.adapter import Fields
from gfgen.models.families.solver import extrapolated, keep_outputs
from gfgen.models.fast.texts import keep_text_results
from gfgen.models.geometry.reuse import NUM_FIRST, NUM_LAST, chosen_steps
from training.codec import LatentScale, decode_clip
from training.evaluation import Question, _judged, questions
from training.parts import Parts, load
from training.sampling import Recipe

SHAPES = Path("gfgen/models/weights/shapes")
SHARE = 0.4
MEASURED_STEPS = (30, 12, 8)
NUM_QUESTIONS, NUM_PICTURES = 500, 70
"""Held-out prompts of the model's card, and the 128x128 pictures among them."""
PICTURES_AT_ONCE = 25
CURVES = {
    30: (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    20: (0.1, 0.15, 0.3, 0.5, 0.6),
    12: (0.17, 0.25, 0.5, 0.6),
}
"""Shares by number of steps."""
CHART_STEPS = 30
GUIDANCE_SHARES = (0.2, 0.4)
VIDEO, PICTURE = Recipe(), Recipe(frames=1)
Row = dict[str, Any]


def reused_latents(
    parts: Parts,
    asked: Sequence[Question],
    num_steps: int,
    reused: Collection[int],
    recipe: Recipe,
    *,
    guidance_only: bool = False,
) -> Tensor:
    """Latents of prompts, sampled together; some steps extrapolate, as jobs with `reuse` do.

    guidance_only: these steps extrapolate the branch without the prompt alone.
    """
    kept = Fields()

    def flow(step: int, evaluate: Callable[[int], Tensor]) -> Tensor:
        nonlocal kept
        if step in reused:
            (output,) = extrapolated(kept, step=step)
        else:
            output = evaluate(1) if guidance_only else guided_flow(evaluate, recipe)
            before, kept = kept, Fields()
            keep_outputs(kept, before, [output], step=step)
        return output + recipe.guidance_scale * (evaluate(0) - output) if guidance_only else output

    return sampled(parts, asked, num_steps, recipe, flow)


@torch.no_grad()
def clips_of(parts: Parts, latents: Tensor) -> Tensor:
    """[B, T, H, W, 3] in [0, 1]."""
    clip = decode_clip(parts.vae, LatentScale(parts.vae, torch.device("cpu")).denormalize(latents))
    return ((clip.clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 4, 1)


def psnr_db(clips: Tensor, full: Tensor) -> list[float]:
    errors = (clips - full).square().flatten(1).mean(1).clamp_min(1e-12)
    return [round(float(each), 2) for each in -10 * torch.log10(errors)]


def verdicts(asked: Sequence[Question], clips: Tensor) -> Row:
    """By kind: how many prompts it applies to, and the numbers of those that are wrong."""
    pixels = (clips * 255).round().to(torch.uint8).numpy()
    scores = [_judged((question, clip, False)) for question, clip in zip(asked, pixels, strict=True)]
    kinds = sorted({kind for one in scores for kind in one})
    return {
        "of": {kind: sum(kind in one for one in scores) for kind in kinds},
        "wrong": {kind: [at for at, one in enumerate(scores) if not one.get(kind, True)] for kind in kinds},
    }


def curve_rows(parts: Parts, asked: Sequence[Question], ratios: Sequence[float]) -> Iterator[Row]:
    """PSNR of every way to save blocks, by number of steps."""

    def row(name: str, saved: float, latents: Tensor, detail: str = "") -> Row:
        found = {"kind": "curve", "steps": num_steps, "way": name, "saved": round(saved, 4)}
        return found | {"detail": detail, "psnr_db": psnr_db(clips_of(parts, latents), full)}

    for num_steps, shares in CURVES.items():
        full = clips_of(parts, reused_latents(parts, asked, num_steps, (), VIDEO))
        for share in shares:
            reused = chosen_steps(num_steps, share)
            saved = len(reused) / num_steps
            yield row("reused", saved, reused_latents(parts, asked, num_steps, reused, VIDEO))
            yield row("fewer", saved, reused_latents(parts, asked, num_steps - len(reused), (), VIDEO))
        if num_steps != CHART_STEPS:
            continue
        for share in GUIDANCE_SHARES:
            middle = range(NUM_FIRST, num_steps - NUM_LAST)
            number = min(len(middle), round(2 * share * num_steps))
            reused = tuple(middle[int((place + 0.5) * len(middle) / number)] for place in range(number))
            latents = reused_latents(parts, asked, num_steps, reused, VIDEO, guidance_only=True)
            yield row("guidance", number / num_steps / 2, latents)
        for name, detail, config in cases(num_steps, ratios):
            latents, saved = cached_latents(parts, asked, num_steps, VIDEO, config)
            yield row(name, saved, latents, detail)


def measured_rows(parts: Parts, asked: Sequence[Question], numbers: Sequence[int]) -> Iterator[Row]:
    """What is wrong in pictures with all steps, SHARE of them reused, and fewer steps."""

    @cache
    def clips(steps: int, reused: tuple[int, ...]) -> Tensor:
        groups = [asked[at : at + PICTURES_AT_ONCE] for at in range(0, len(asked), PICTURES_AT_ONCE)]
        made = (reused_latents(parts, group, steps, reused, PICTURE) for group in groups)
        return torch.cat([clips_of(parts, latents) for latents in made])

    for num_steps in numbers:
        reused = chosen_steps(num_steps, SHARE)
        number = num_steps - len(reused)
        ways = (("full", num_steps, ()), ("reused", num_steps, reused), ("fewer", number, ()))
        for way, steps, those in ways:
            made = clips(steps, those)
            decibels = [] if way == "full" else psnr_db(made, clips(num_steps, ()))
            found = {"kind": "measures", "steps": num_steps, "way": way, "computed": steps - len(those)}
            yield found | {"psnr_db": decibels} | verdicts(asked, made)


def tables(rows: Sequence[Row]) -> str:
    curve = [row for row in rows if row["kind"] == "curve"]
    measured = [row for row in rows if row["kind"] == "measures"]
    parts = [_curve_table(curve)] if curve else []
    parts += [_shares_table(measured), _pairs_table(measured)] if measured else []
    return "\n".join("\n".join(lines) + "\n" for lines in parts)


def _curve_table(rows: Sequence[Row]) -> list[str]:
    lines = ["| steps | way | blocks saved | PSNR, dB (least to most) |", "|---|---|---|---|"]
    for row in rows:
        way = f"{row['way']} {row['detail']}".strip()
        saved = f"{100 * row['saved']:.0f}%"
        lines.append(f"| {row['steps']} | {way} | {saved} | {_decibels(row['psnr_db'])} |")
    return lines


def _shares_table(rows: Sequence[Row]) -> list[str]:
    """Percent that are right, with standard errors."""
    of = rows[0]["of"]
    kinds = " | ".join(f"{kind} ({number})" for kind, number in of.items())
    lines = [f"| steps | way | computed | PSNR, dB | {kinds} |", "|---|---|---|---|" + "---|" * len(of)]
    for row in rows:
        cells = [str(row["steps"]), row["way"], str(row["computed"]), _decibels(row["psnr_db"])]
        for kind, number in of.items():
            share = 1 - len(row["wrong"][kind]) / number
            cells.append(f"{100 * share:.1f} +- {100 * math.sqrt(share * (1 - share) / number):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _pairs_table(rows: Sequence[Row]) -> list[str]:
    """Differences of percent with standard errors; prompts that became wrong and right."""
    of = rows[0]["of"]
    lines = [f"| steps | compared | {' | '.join(of)} |", "|---|---|" + "---|" * len(of)]
    for steps in dict.fromkeys(row["steps"] for row in rows):
        ways = {row["way"]: row["wrong"] for row in rows if row["steps"] == steps}
        for way, other in (("reused", "full"), ("fewer", "full"), ("reused", "fewer")):
            if way in ways and other in ways:
                cells = [_pair(ways[way][kind], ways[other][kind], number) for kind, number in of.items()]
                lines.append(f"| {steps} | {way} with {other} | {' | '.join(cells)} |")
    return lines


def _pair(wrong: Sequence[int], before: Sequence[int], number: int) -> str:
    lost, gained = len(set(wrong) - set(before)), len(set(before) - set(wrong))
    difference = (gained - lost) / number
    error = math.sqrt((lost + gained) / number - difference**2) / math.sqrt(number)
    return f"{100 * difference:+.1f} +- {100 * error:.1f} (-{lost} +{gained})"


def _decibels(values: Sequence[float]) -> str:
    return f"{_mean(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


LABELS = {
    "reused": "gfgen: reused steps",
    "fewer": "fewer steps at equal cost",
    "guidance": "only the branch without prompt",
    "first block": "diffusers FirstBlockCache",
    "taylorseer": "diffusers TaylorSeer",
    "magcache": "diffusers MagCache",
}


def draw(path: Path, rows: Sequence[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 3.8))
    curve = [row for row in rows if row["kind"] == "curve" and row["steps"] == CHART_STEPS]
    for way, label in LABELS.items():
        own = sorted((100 * row["saved"], _mean(row["psnr_db"])) for row in curve if row["way"] == way)
        style = {"marker": "o"} if way in ("reused", "fewer") else {"marker": "x", "linestyle": "--"}
        axes.plot([x for x, _ in own], [y for _, y in own], label=label, **style)
    axes.set_xlabel(f"transformer blocks of {CHART_STEPS} steps that are not computed, %")
    axes.set_ylabel("PSNR to the full result, dB")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def asked_of(frames: int, count: int) -> list[Question]:
    """Held-out prompts of one size; for more pictures than the model's card has, other prompts."""
    asked = questions(NUM_QUESTIONS * math.ceil(max(1, count) / NUM_PICTURES))
    return [q for q in asked if (q.width, q.height, q.frames) == (128, 128, frames)][:count]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reuse", description=__doc__)
    parser.add_argument("--videos", type=int, default=4, help="0 measures no PSNR of videos")
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--steps", type=int, nargs="+", default=MEASURED_STEPS, help="of pictures")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = load(SHAPES)
    keep_text_results(parts.transformer)
    ways: list[Iterator[Row]] = []
    if options.videos:
        videos = asked_of(VIDEO.frames, options.videos + 1)
        ways.append(curve_rows(parts, videos, mag_ratios(parts, videos.pop(), CHART_STEPS, VIDEO)))
    ways.append(measured_rows(parts, asked_of(1, options.pictures), options.steps))
    rows: list[Row] = []
    tables_path = options.output.with_name(options.output.name + "-tables.md")
    for made in ways:
        for row in made:
            rows.append(row)
            options.output.with_suffix(".json").write_text(json.dumps(rows) + "\n")
            tables_path.write_text(tables(rows), encoding="utf-8")
            print(
                row["kind"], row["steps"], row["way"], row.get("saved"), _decibels(row["psnr_db"]), flush=True
            )
    if options.chart is not None:
        draw(options.chart, rows)


if __name__ == "__main__":
    main()
