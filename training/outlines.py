"""Train the LoRA that comes with the examples: `shapes` draws outlines in place of filled shapes.

python -m training.outlines FILE [--start FILE]

Only the factors of matrices in the transformer's blocks are trained, on the same prompts as the model, with
the shapes drawn as outlines. FILE has the keys of diffusers' own LoRAs, in fp16. jobs/outlines.safetensors
is from --seconds 840 with one thread, on a CPU that had other work too.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gfgen.models.families.registry import WEIGHTS
from training.codec import lay_out
from training.flow_model import FlowModel
from training.flow_training import flow_loss
from training.graphs import Recorder
from training.parts import load
from training.reservoir import Bucket, Reservoir
from training.supply import Supply

RANK = 8
LINE = 0.26
"""Width of the lines, in radii: 5 pixels of a medium shape. The VAE blurs thinner ones."""
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 20
FINAL_RATE = 0.05
LOG_EVERY = 20
BUCKETS = (
    Bucket(128, 128, 1, batch=16, share=0.5, room=1_024),
    Bucket(128, 128, 17, batch=3, share=0.5, room=256),
)
"""Batches of about 1,000 tokens, for CPU cores."""


class WithLora(nn.Module):
    """A model whose blocks have factors added to their matrices. Only these are parameters."""

    def __init__(self, model: FlowModel, *, rank: int = RANK) -> None:
        super().__init__()
        self._base = {"model": model}  # hidden from `parameters`
        self._matrices = {
            name: weight
            for name, weight in model.named_parameters()
            if name.startswith("transformer.blocks.") and weight.ndim == 2
        }
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        for name, weight in self._matrices.items():
            rows, columns = weight.shape
            key = name.replace(".", "/")
            self.down[key] = nn.Parameter(torch.randn(rank, columns) / math.sqrt(columns))
            self.up[key] = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, *inputs: Tensor) -> Tensor:
        merged = {
            name: weight + self.up[name.replace(".", "/")] @ self.down[name.replace(".", "/")]
            for name, weight in self._matrices.items()
        }
        found: Tensor = torch.func.functional_call(self._base["model"], merged, inputs)
        return found

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from these factors, named as in `tensors`."""
        for factor, parameters in (("lora_A", self.down), ("lora_B", self.up)):
            for key, value in parameters.items():
                value.copy_(tensors[f"{key.replace('/', '.').removesuffix('.weight')}.{factor}.weight"])

    def tensors(self) -> Mapping[str, Tensor]:
        """The factors as diffusers names them."""
        found: dict[str, Tensor] = {}
        for factor, parameters in (("lora_A", self.down), ("lora_B", self.up)):
            for key, value in parameters.items():
                layer = key.replace("/", ".").removesuffix(".weight")
                found[f"{layer}.{factor}.weight"] = value.detach().half().contiguous()
        return found


def train(model: WithLora, reservoirs: Sequence[Reservoir], *, seconds: float) -> None:
    """Train the factors for this time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    shares, rng = [reservoir.bucket.share for reservoir in reservoirs], random.Random(0)
    began_s, step, mean = time.monotonic(), 0, 0.0
    while (spent := (time.monotonic() - began_s) / seconds) < 1:
        (reservoir,) = rng.choices(reservoirs, shares)
        for group in optimizer.param_groups:
            decayed = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * spent))
            group["lr"] = LEARNING_RATE * decayed * min(1.0, (step + 1) / WARM_UP_STEPS)
        loss = flow_loss(model, *reservoir.take())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, mean = step + 1, mean + loss.item() / LOG_EVERY
        if step % LOG_EVERY == 0:
            print(f"step {step}, {spent:.0%} of the time, loss {mean:.4f}", flush=True)
            mean = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="the safetensors file to write")
    parser.add_argument("--seconds", type=float, default=780.0, help="time to train (default: 780)")
    parser.add_argument("--start", type=Path, help="go on from the factors in this file")
    options = parser.parse_args()
    torch.manual_seed(0 if options.start is None else 1)
    device = torch.device("cpu")
    parts = load(WEIGHTS / "shapes")
    lay_out(parts.vae)
    model = WithLora(FlowModel(parts))
    if options.start is not None:
        model.take(load_file(str(options.start)))
    recorder = Recorder(device, uses_graphs=False)
    with Supply(num_processes=0) as supply:
        reservoirs = [
            Reservoir(
                bucket,
                parts,
                supply,
                recorder=recorder,
                device=device,
                seed=f"{bucket.name}-{options.start is None}",
                line=LINE,
            )
            for bucket in BUCKETS
        ]
        train(model, reservoirs, seconds=options.seconds)
    save_file(dict(model.tensors()), str(options.file), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
