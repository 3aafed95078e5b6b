"""A stage of training that is bounded in time: schedule, moving average, log, and checkpoints to go on from.

How far a stage has come is the share of its seconds that it has used, over all the processes that
worked on it; the learning rate follows that share. A checkpoint is a few safetensors files of at most
15 MB: weights and their moving average in fp16, what the optimizers remember in bf16.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

MAX_FILE_BYTES = 15_000_000
MAX_AHEAD = 4
"""Steps that the host is at most ahead of the GPU; so time that is spent is time that was worked."""
SAVE_EVERY_S = 90.0
LOG_EVERY_S = 5.0
WARM_UP_STEPS = 200
FINAL_RATE = 0.02
"""Of the learning rate, at the end of a stage."""
AVERAGE_RAMP = 10
"""The moving average of step n weighs the past with at most (1 + n) / (this + n)."""


class Average:
    """The moving average of some modules' weights."""

    def __init__(self, modules: Mapping[str, nn.Module], *, decay: float) -> None:
        self.decay = decay
        self.weights = named_weights(modules)
        self.values = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (AVERAGE_RAMP + step))
        current = [weight.detach() for weight in self.weights.values()]
        torch._foreach_lerp_(list(self.values.values()), current, 1 - decay)

    @torch.no_grad()
    def swap_in(self) -> None:
        """The modules' weights become their average."""
        for name, weight in self.weights.items():
            weight.copy_(self.values[name])


class Session:
    """One process's work on one stage; see the module.

    `ends_s`: when this process stops, on the monotonic clock; `total_s`: of the stage, over all
    processes. A session that `finishes` ends the stage when the process stops. `rate`: the share of
    the usual learning rates.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stage: str,
        device: str,
        seed: int,
        total_s: float,
        ends_s: float,
        max_steps: int | None = None,
        uses_graphs: bool = True,
        finishes: bool = False,
        rate: float = 1.0,
    ) -> None:
        self.folder = folder
        self.stage = stage
        self.device = torch.device(device)
        self.seed = seed
        self.total_s = total_s
        self.ends_s = ends_s
        self.max_steps = max_steps
        self.uses_graphs = uses_graphs
        self.finishes = finishes
        self.rate = rate
        self.step = 0
        self.spent_s = 0.0
        self.is_done = False
        self._sums: dict[str, Tensor] = {}
        self._num_summed = 0
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._average: Average | None = None
        self._under_way: deque[torch.cuda.Event] = deque()

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.is_cuda)

    def begin(self, *, average: Average, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Go on where an earlier process stopped, if one did."""
        self._average, self._optimizers = average, dict(optimizers)
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"] * self.rate
        self._load()

    def steps(self) -> Iterator[int]:
        """Numbers of steps, until the stage's or the process's time is over; saves now and then."""
        began_s = time.monotonic() - self.spent_s
        self._saved_s = self._logged_s = time.monotonic()
        if self.finishes:
            self.total_s = self.spent_s + self.ends_s - time.monotonic()
        last = math.inf if self.max_steps is None else self.step + self.max_steps
        while self.spent_s < self.total_s and time.monotonic() < self.ends_s and self.step < last:
            yield self.step
            self.step += 1
            self._wait_for_older_steps()
            now_s = time.monotonic()
            self.spent_s = now_s - began_s
            if now_s - self._logged_s > LOG_EVERY_S:
                self._log()
            if now_s - self._saved_s > SAVE_EVERY_S:
                self.save()
        self._log()
        self.is_done = self.finishes or self.spent_s >= self.total_s
        self.save()

    def update(self, **values: Tensor) -> None:
        """One step of all optimizers, after gradients are there; the values go into the log."""
        assert self._average is not None
        factor = self._rate_factor()
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimizer.step()
        self._average.update(self.step)
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()
        self._num_summed += 1

    def _wait_for_older_steps(self) -> None:
        if not self.is_cuda:
            return
        self._under_way.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._under_way[-1].record()
        if len(self._under_way) > MAX_AHEAD:
            self._under_way.popleft().synchronize()

    def log(self, **values: Any) -> None:
        """A line for the log file and the terminal."""
        line = json.dumps({"stage": self.stage, **values})
        print(line, flush=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """Write a checkpoint; an older one of this stage is replaced."""
        assert self._average is not None
        tensors = {f"weights.{name}": weight.half() for name, weight in self._average.weights.items()}
        tensors |= {f"average.{name}": value.half() for name, value in self._average.values.items()}
        for kind, optimizer in self._optimizers.items():
            for idx, state in enumerate(map(optimizer.state.get, _parameters(optimizer))):
                for key, value in (state or {}).items():
                    tensors[f"{kind}.{idx}.{key}"] = value.bfloat16() if value.ndim else value.float()
        notes = {"step": self.step, "spent_s": round(self.spent_s, 3), "is_done": int(self.is_done)}
        write_shards(self.folder, self.stage, tensors, notes)
        self._saved_s = time.monotonic()

    def _load(self) -> None:
        assert self._average is not None
        found = read_shards(self.folder, self.stage)
        if found is None:
            return
        tensors, notes = found
        self.step, self.spent_s = int(notes["step"]), float(notes["spent_s"])
        with torch.no_grad():
            for name, weight in self._average.weights.items():
                weight.copy_(tensors[f"weights.{name}"])
                self._average.values[name].copy_(tensors[f"average.{name}"])
        for kind, optimizer in self._optimizers.items():
            for idx, parameter in enumerate(_parameters(optimizer)):
                prefix = f"{kind}.{idx}."
                state = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
                if state:
                    optimizer.state[parameter] = {
                        # Laid out in memory as the parameter is: fused optimizers do not look.
                        key: torch.empty_like(parameter, dtype=torch.float32).copy_(value)
                        if value.shape == parameter.shape
                        else value.to(self.device, torch.float32)
                        for key, value in state.items()
                    }
        self.log(resumed_at=self.step, spent_s=self.spent_s)

    def _rate_factor(self) -> float:
        progress = min(1.0, self.spent_s / self.total_s)
        decayed = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
        return decayed * min(1.0, (self.step + 1) / WARM_UP_STEPS)

    def _log(self) -> None:
        now_s = time.monotonic()
        if not self._num_summed:
            return
        means = {name: round(float(value) / self._num_summed, 5) for name, value in self._sums.items()}
        per_step_ms = 1000 * (now_s - self._logged_s) / self._num_summed
        self.log(step=self.step, spent_s=round(self.spent_s, 1), per_step_ms=round(per_step_ms, 1), **means)
        self._sums.clear()
        self._num_summed = 0
        self._logged_s = now_s


def named_weights(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters of several modules, by "module.parameter"."""
    return {
        f"{prefix}.{name}": weight
        for prefix, module in modules.items()
        for name, weight in module.named_parameters()
    }


def write_shards(folder: Path, stage: str, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Tensors in files stage-0.safetensors, stage-1..., each below the largest size; notes in each."""
    shards: list[dict[str, Tensor]] = [{}]
    room = MAX_FILE_BYTES
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = MAX_FILE_BYTES
        shards[-1][name] = tensor.detach().cpu().contiguous()
        room -= size
    metadata = {key: str(value) for key, value in notes.items()} | {"num_shards": str(len(shards))}
    for idx, shard in enumerate(shards):
        partial = folder / f".{stage}-{idx}"
        save_file(shard, str(partial), metadata=metadata)
        partial.rename(folder / f"{stage}-{idx}.safetensors")
    idx = len(shards)
    while (older := folder / f"{stage}-{idx}.safetensors").exists():
        older.unlink()
        idx += 1


def read_shards(folder: Path, stage: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """What `write_shards` has written, or None."""
    tensors: dict[str, Tensor] = {}
    first = folder / f"{stage}-0.safetensors"
    if not first.exists():
        return None
    with safe_open(str(first), framework="pt") as file:
        notes = dict(file.metadata())
    for idx in range(int(notes["num_shards"])):
        with safe_open(str(folder / f"{stage}-{idx}.safetensors"), framework="pt") as file:
            assert dict(file.metadata()) == notes, f"shards of {stage} are of different checkpoints"
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors, notes


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
