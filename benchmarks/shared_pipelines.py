"""Shares steps of small random pipelines among ranks, and compares them with one rank.

    python -m benchmarks.shared_pipelines [--only Flux Wan] [--steps 2]

One row per pipeline of diffusers whose call can be stepped: its transformers, calls per step and samples per
call, and for each layout the largest difference of all floating-point tensors of the state from one rank, in
fp32 relative to the largest magnitude. `2` is two halves of one rank, `1x2` two ranks that share tokens,
`2x2` both.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from small_pipelines import CannotBuildError, pipeline_names, small_call, small_pipeline

from benchmarks.measured import head, row
from benchmarks.shared_transformers import Ranks, difference
from gfgen.errors import GfgenError, in_one_line
from gfgen.layout import Layout
from gfgen.models.families.adapter import Fields
from gfgen.models.parallel.branches import shared_step, watch
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.stepping.stepper import Stepper, is_finished

LAYOUTS = {
    "2": Layout((0, 1), cfg=2),
    "1x2": Layout((0, 1), ulysses=2),
    "2x2": Layout((0, 1, 2, 3), cfg=2, ulysses=2),
}


def transformers_of(pipeline: Any) -> list[torch.nn.Module]:
    parts = pipeline.components.items()
    return [part for name, part in parts if "transformer" in name and isinstance(part, torch.nn.Module)]


class SteppedRanks:
    """Ranks with a pipeline each, and a job that is ready for its first step."""

    def __init__(self, name: str, ranks: Ranks, *, num_ranks: int = 4) -> None:
        """Raises: CannotBuildError, NotSteppableError."""
        self._ranks = ranks
        pipelines = [small_pipeline(name) for _ in range(num_ranks)]
        self.steppers = [Stepper(pipeline) for pipeline in pipelines]
        self.transformers = transformers_of(pipelines[0])
        self.prompt = self.steppers[0].encode(small_call(name), seed=7)
        self.condition, self.state = self.steppers[0].prepare(self.prompt)
        self.samples: list[int] = []
        for transformer in self.transformers:
            transformer.register_forward_pre_hook(self._note, with_kwargs=True)
        self.installed: GfgenError | None = None
        for pipeline in pipelines:
            for transformer in transformers_of(pipeline):
                watch(transformer)
                try:
                    install(transformer)
                except GfgenError as error:
                    self.installed = error

    def alone(self, num_steps: int) -> Fields:
        """The state after some steps on one rank."""
        return self._steps(0, None, num_steps)

    def shared(self, layout: Layout, num_steps: int) -> list[Fields]:
        """The same on each rank of a layout."""

        def program(parallel: Parallel) -> Fields:
            rank = parallel.cfg.slot * parallel.sequence.size + parallel.sequence.slot
            return self._steps(rank, parallel, num_steps)

        return self._ranks.run(layout, program)

    def _steps(self, rank: int, parallel: Parallel | None, num_steps: int) -> Fields:
        torch.set_num_threads(1)
        state = self.state
        for _ in range(num_steps):
            if not is_finished(state):
                step = functools.partial(self.steppers[rank].step, self.prompt, self.condition, state)
                state = step() if parallel is None else shared_step(step, parallel)
        return state

    def _note(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        first = next(iter([*args, *kwargs.values()]))
        self.samples.append(len(first))


def distance(found: Fields, wanted: Fields) -> float:
    """The largest difference of all floating-point tensors, relative to each one's largest magnitude."""
    # Threads share PyTorch's own generators, so their states may be there or not.
    names = found.tensors.keys() & wanted.tensors.keys()
    pairs = [(found.tensors[name], wanted.tensors[name]) for name in names]
    return difference(*zip(*[x for x in pairs if x[0].is_floating_point() and x[0].numel()], strict=True))


def are_equal(states: Iterable[Fields]) -> bool:
    """Bitwise."""
    first, *others = states
    pairs = [
        (first.tensors[name], other.tensors[name])
        for other in others
        for name in first.tensors.keys() & other.tensors.keys()
    ]
    return all(torch.equal(*pair) for pair in pairs)


def cells_of(name: str, ranks: Ranks, num_steps: int) -> list[str]:
    try:
        stepped = SteppedRanks(name, ranks)
        wanted = stepped.alone(num_steps)
    except Exception as error:  # not what is measured here
        reason = "not built" if isinstance(error, CannotBuildError) else "not stepped"
        return [name, reason, in_one_line(error)[:90]]
    kinds = ", ".join(sorted({f"`{type(each).__name__}`" for each in stepped.transformers}))
    calls = "+".join(map(str, stepped.samples[: max(1, len(stepped.samples) // num_steps)]))
    cells = [name, kinds, calls]
    for layout in LAYOUTS.values():
        if layout.ulysses > 1 and stepped.installed is not None:
            cells.append("")
            continue
        try:
            states = stepped.shared(layout, num_steps)
            found = f"{distance(states[0], wanted):.0e}"
            cells.append(found if are_equal(states) else f"{found}, ranks differ")
        except Exception as error:  # the row shows it
            cells.append(in_one_line(error)[:90])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ranks = Ranks(4)
    print(head("pipeline", "transformers", "samples per call", *LAYOUTS))
    for name in pipeline_names():
        if any(part in name for part in options.only):
            print(row(*cells_of(name, ranks, options.steps)), flush=True)


if __name__ == "__main__":
    main()
