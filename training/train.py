"""Train `shapes` from nothing: the VAE, then the text encoder, then the transformer with both.

    python -m training.train DIR

On one GPU, in about twenty minutes. Stop it whenever you like: the same command goes on from the
last checkpoint in DIR. At the end DIR/shapes is the pipeline, figures.json says how well it does on
prompts held out, sheet.png shows it, and log.jsonl has losses and measures over time.
`--from PIPELINE` starts the last stage from the weights of a trained one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from training.attention_kernels import use_fastest_attention
from training.evaluation import write_report
from training.flow_training import train_flow
from training.parts import (
    FULL,
    MINIATURE,
    Dimensions,
    Parts,
    load,
    new_parts,
    save,
    set_latent_scale,
)
from training.reservoir import BUCKETS, MINIATURE_BUCKETS, Bucket
from training.session import Session, named_weights, read_shards, write_shards
from training.supply import Supply, vocabulary
from training.text_training import BATCH, train_text
from training.vae_training import (
    CLIPS,
    MINIATURE_CLIPS,
    ClipShape,
    measure_latents,
    reconstruction_db,
    train_vae,
)

SEED = 20261121
QUICK_SHARE = 5
"""Where time is over before the end, one of so many questions is asked."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and on what."""

    dimensions: Dimensions
    clips: Sequence[ClipShape]
    buckets: Sequence[Bucket]
    num_measured: int
    """Videos whose latents are measured."""
    num_prompts: int
    """In a batch for the text encoder."""


FULL_PLAN = Plan(FULL, CLIPS, BUCKETS, num_measured=256, num_prompts=BATCH)
MINIATURE_PLAN = Plan(MINIATURE, MINIATURE_CLIPS, MINIATURE_BUCKETS, num_measured=1, num_prompts=2)


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    options.ends_s = time.monotonic() + options.limit
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    plan = MINIATURE_PLAN if options.miniature else FULL_PLAN
    with Supply(num_processes=options.processes) as supply:
        parts = new_parts(plan.dimensions)
        if options.start:
            _take_weights(parts, options.start)
        if options.device != "cpu":
            _set_up_gpu(options)
        stages = (_vae_stage, _text_stage, _flow_stage)
        is_done = all(stage(parts, plan, options, supply) for stage in stages)
    print("done" if is_done else "not done; the same command goes on from here")


def _take_weights(parts: Parts, pipeline: Path) -> None:
    """All weights become those of a pipeline, which has the same vocabulary and dimensions."""
    old = load(pipeline)
    assert old.tokenizer.get_vocab() == vocabulary(), f"{pipeline} has another vocabulary"
    for name in ("text_encoder", "vae", "transformer"):
        getattr(parts, name).load_state_dict(getattr(old, name).state_dict())
    set_latent_scale(parts.vae, old.vae.config.latents_mean, old.vae.config.latents_std)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_or_off = argparse.BooleanOptionalAction
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--from", dest="start", type=Path, metavar="PIPELINE", help="start the last stage from its weights"
    )
    parser.add_argument(
        "--rate", type=float, default=1, help="share of the usual learning rates (%(default)s)"
    )
    parser.add_argument("--vae-seconds", type=float, default=280, help="of training, in all (%(default)s)")
    parser.add_argument("--text-seconds", type=float, default=40, help="of training, in all (%(default)s)")
    parser.add_argument("--flow-seconds", type=float, default=700, help="of training, in all (%(default)s)")
    parser.add_argument("--limit", type=float, default=86400, help="seconds after which training stops here")
    parser.add_argument("--max-steps", type=int, help="of each stage in this process")
    parser.add_argument("--finish", action="store_true", help="plan the last stage to be done at the limit")
    parser.add_argument(
        "--evaluate", type=int, default=500, help="held-out prompts at the end (%(default)s); 0: none"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--processes", type=int, default=8, help="that make up scenes and prompts (%(default)s)"
    )
    parser.add_argument("--graphs", action=on_or_off, default=True, help="CUDA graphs for training steps")
    parser.add_argument("--compile", action=on_or_off, default=True, help="fused blocks of the transformer")
    parser.add_argument(
        "--try-attention", action=on_or_off, default=True, help="take the fastest of its kernels"
    )
    parser.add_argument(
        "--try-convolutions", action=on_or_off, default=False, help="the same for the VAE, but it takes long"
    )
    parser.add_argument(
        "--miniature", action="store_true", help="a model that learns nothing, for rehearsals"
    )
    return parser


def _set_up_gpu(options: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = options.try_convolutions
    if options.try_attention:
        times_ms = use_fastest_attention(torch.device(options.device))
        _session(options, "setup", total_s=0).log(attention_ms=times_ms)


def _session(options: argparse.Namespace, stage: str, *, total_s: float, finishes: bool = False) -> Session:
    return Session(
        options.folder,
        stage=stage,
        device=options.device,
        seed=options.seed,
        total_s=total_s,
        ends_s=options.ends_s,
        max_steps=options.max_steps,
        uses_graphs=options.graphs,
        finishes=finishes,
        rate=options.rate,
    )


def _vae_stage(parts: Parts, plan: Plan, options: argparse.Namespace, supply: Supply) -> bool:
    """Whether the VAE is trained; it then is what its checkpoint says, or the pipeline to go on from."""
    if options.start:
        return True
    session = _session(options, "vae", total_s=options.vae_seconds)
    if not _is_done(options.folder, "vae"):
        train_vae(session, parts.vae, supply, plan.clips)
        if not session.is_done:
            return False
        decibels = reconstruction_db(parts.vae, session.device, num_videos=min(64, plan.num_measured))
        session.log(reconstruction_db=round(decibels, 2))
        mean, std = measure_latents(parts.vae, session.device, num_videos=plan.num_measured)
        scale = {"latents_mean": json.dumps(mean), "latents_std": json.dumps(std)}
        _keep_trained(session, {"vae": parts.vae}, **scale)
    notes = _load_trained(options.folder, "vae", {"vae": parts.vae})
    set_latent_scale(parts.vae, json.loads(notes["latents_mean"]), json.loads(notes["latents_std"]))
    return True


def _text_stage(parts: Parts, plan: Plan, options: argparse.Namespace, supply: Supply) -> bool:
    """Whether the text encoder understands prompts; the same of it."""
    if options.start:
        return True
    session = _session(options, "text", total_s=options.text_seconds)
    if not _is_done(options.folder, "text"):
        train_text(session, parts.text_encoder, supply, batch=plan.num_prompts)
        if not session.is_done:
            return False
        _keep_trained(session, {"text_encoder": parts.text_encoder})
    _load_trained(options.folder, "text", {"text_encoder": parts.text_encoder})
    return True


def _flow_stage(parts: Parts, plan: Plan, options: argparse.Namespace, supply: Supply) -> bool:
    """Whether the transformer is trained. In any case the pipeline is written and judged as it is now."""
    session = _session(options, "flow", total_s=options.flow_seconds, finishes=options.finish)
    train_flow(session, parts, supply, plan.buckets, compiles=options.compile and session.is_cuda)
    save(parts, options.folder / "shapes")
    _judge(session, options, supply)
    return session.is_done


def _judge(session: Session, options: argparse.Namespace, supply: Supply) -> None:
    """Figures of what was written, by fewer questions if the stage is not done."""
    count = options.evaluate if session.is_done else options.evaluate // QUICK_SHARE
    if not count:
        return
    torch.backends.cudnn.benchmark = False  # with sizes that come once, trying costs more than it gives
    shipped = load(options.folder / "shapes", device=options.device)
    report = write_report(shipped, options.folder, count=count, each=supply.each)
    session.log(step=session.step, **report)


def _is_done(folder: Path, stage: str) -> bool:
    found = read_shards(folder, stage)
    return found is not None and found[1]["is_done"] == "1"


def _keep_trained(session: Session, modules: dict[str, nn.Module], **notes: str) -> None:
    """The checkpoint of a stage that is done: what the next stages need of it, and no more."""
    halves = {f"average.{name}": weight.half() for name, weight in named_weights(modules).items()}
    write_shards(session.folder, session.stage, halves, {"is_done": 1, "step": session.step, **notes})


@torch.no_grad()
def _load_trained(folder: Path, stage: str, modules: dict[str, nn.Module]) -> dict[str, str]:
    """The moving average of a stage's checkpoint into modules; returns the checkpoint's notes."""
    found = read_shards(folder, stage)
    assert found is not None, f"{folder} has no checkpoint of {stage}"
    tensors, notes = found
    for name, weight in named_weights(modules).items():
        weight.copy_(tensors[f"average.{name}"])
    return notes


if __name__ == "__main__":
    main()
