"""Reused steps of the built-in model against fewer steps: nearness to the full result, and what is right.

    python -m benchmarks.reuse --output benchmarks/results/2026-11-24-reuse --chart docs/reuse.png

Held-out prompts of 128x128 videos. PSNR is that of the decoded video to the one with all steps, a mean over
prompts in dB; the measures are those of the model's card (training/measures.py). Writes OUTPUT.json and
OUTPUT.md; `--chart` draws both curves.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gfgen.models.families.adapter import Fields
from gfgen.models.families.outputs import extrapolated, keep_outputs
from gfgen.models.fast.prompt_memory import remember_prompts
from gfgen.models.geometry.reuse import chosen_steps
from training.codec import LatentScale, decode_clip
from training.evaluation import Figures, Question, _judged, questions
from training.parts import Parts, load, unipc
from training.sampling import Recipe, _flow, _noise, prompt_embeds, token_timesteps

SHAPES = Path("gfgen/models/weights/shapes")
STEPS = (8, 12, 30)
SHARE = 0.4
CURVE_STEPS = 30
CURVE = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
RECIPE = Recipe()


@torch.no_grad()
def latents_of(
    parts: Parts, asked: Sequence[Question], num_steps: int, reused: Collection[int] = ()
) -> Tensor:
    """Latents of prompts, sampled together; some steps extrapolate, as jobs with `reuse` do."""
    embeds = [prompt_embeds(parts, [q.prompt for q in asked]), prompt_embeds(parts, [""] * len(asked))]
    latents = _noise(parts, [q.seed for q in asked], RECIPE)
    scheduler, kept = unipc(flow_shift=RECIPE.flow_shift), Fields()
    scheduler.set_timesteps(num_steps)
    for step, timestep in enumerate(scheduler.timesteps):
        if step in reused:
            (flow,) = extrapolated(kept, step=step)
        else:
            times_BT = timestep.float().expand(latents.shape[0], latents.shape[2])
            times = token_timesteps(times_BT, latents)
            guided, unguided = (_flow(parts, latents, times, branch) for branch in embeds)
            flow = unguided + RECIPE.guidance_scale * (guided - unguided)
            after = Fields()
            keep_outputs(after, kept, [flow], step=step)
            kept = after
        latents = scheduler.step(flow, timestep, latents, return_dict=False)[0]
    return latents


@torch.no_grad()
def videos_of(parts: Parts, latents: Tensor) -> Tensor:
    """[B, T, H, W, 3] in [0, 1]."""
    clip = decode_clip(parts.vae, LatentScale(parts.vae, torch.device("cpu")).denormalize(latents))
    return ((clip.clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 4, 1)


def psnr_db(videos: Tensor, full: Tensor) -> list[float]:
    errors = (videos - full).square().flatten(1).mean(1).clamp_min(1e-12)
    return [round(float(each), 2) for each in -10 * torch.log10(errors)]


def right(asked: Sequence[Question], videos: Tensor) -> dict[str, float]:
    """Shares of right answers by kind."""
    pixels = (videos * 255).round().to(torch.uint8).numpy()
    scores = [_judged((question, video, False)) for question, video in zip(asked, pixels, strict=True)]
    return dict(Figures.of(scores).right)


def compared(parts: Parts, asked: Sequence[Question], num_steps: int, share: float, full: Tensor) -> Any:
    """A row: reused steps and as many steps as were computed, against the full result."""
    reused = chosen_steps(num_steps, share)
    row: dict[str, Any] = {"steps": num_steps, "share": share, "computed": num_steps - len(reused)}
    for name, latents in (
        ("reused", latents_of(parts, asked, num_steps, frozenset(reused))),
        ("fewer", latents_of(parts, asked, num_steps - len(reused))),
    ):
        videos = videos_of(parts, latents)
        row[name] = {"psnr_db": psnr_db(videos, full), "right": right(asked, videos)}
    return row


def table(rows: Sequence[dict[str, Any]], fulls: dict[int, dict[str, float]]) -> str:
    lines = [
        "| steps | share | computed | PSNR reused, dB | PSNR fewer, dB | correct: full | reused | fewer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [_decibels(row[name]["psnr_db"]) for name in ("reused", "fewer")]
        shares = [fulls[row["steps"]], row["reused"]["right"], row["fewer"]["right"]]
        correct = " | ".join(f"{100 * each['correct']:.0f}%" for each in shares)
        head = f"| {row['steps']} | {row['share']:g} | {row['computed']} "
        lines.append(f"{head}| {cells[0]} | {cells[1]} | {correct} |")
    return "\n".join(lines) + "\n"


def _decibels(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4))
    curve = [row for row in rows if row["steps"] == CURVE_STEPS]
    for name, label in (("reused", "reused steps"), ("fewer", "fewer steps at equal cost")):
        means = [sum(row[name]["psnr_db"]) / len(row[name]["psnr_db"]) for row in curve]
        axes.plot([100 * row["share"] for row in curve], means, marker="o", label=label)
    axes.set_xlabel(f"share of {CURVE_STEPS} steps that run no transformer, %")
    axes.set_ylabel("PSNR to the full result, dB")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reuse", description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    parts = load(SHAPES)
    remember_prompts(parts.transformer)
    of_size = [q for q in questions(500) if (q.width, q.height, q.frames) == (128, 128, 17)]
    asked, rows, fulls = of_size[: options.prompts], [], {}
    for num_steps in STEPS:
        full = videos_of(parts, latents_of(parts, asked, num_steps))
        fulls[num_steps] = right(asked, full)
        for share in CURVE if num_steps == CURVE_STEPS else (SHARE,):
            rows.append(compared(parts, asked, num_steps, share, full))
            options.output.with_suffix(".json").write_text(json.dumps({"full": fulls, "rows": rows}) + "\n")
            print(table(rows[-1:], fulls).splitlines()[-1], flush=True)
    options.output.with_suffix(".md").write_text(table(rows, fulls))
    if options.chart is not None:
        draw(options.chart, rows)


if __name__ == "__main__":
    main()
