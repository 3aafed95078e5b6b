"""What a task, or the steps of several jobs, make of the artifacts on a rank."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from gfgen.gfc.group import LayoutGroup
from gfgen.graph import Stage
from gfgen.models.families.adapter import Adapter, BatchAdapter, Fields
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.streaming.turns import in_turns
from gfgen.runtime.worker.jobs import RankTask, step_input


def are_separate(adapters: Mapping[str, Adapter], works: Sequence[RankTask]) -> bool:
    """Whether these are steps of several jobs each of which is computed as it is alone."""
    adapter = adapters[works[0].job.start.checkpoint]
    return len(works) > 1 and (adapter.takes_turns or not hasattr(adapter, "denoise_batch"))


def execute(adapters: Mapping[str, Adapter], works: Sequence[RankTask], group: LayoutGroup | None) -> None:
    """Run a task, or the steps of several jobs; each gets the artifacts that it makes.

    Separate steps share the reads of blocks where they can. One that raises gets its `error`, and fails no
    other.
    """
    adapter = adapters[works[-1].job.start.checkpoint]
    if len(works) == 1:
        works[0].made = _executed(adapter, works[0], None if group is None else parallel_from(group))
        return
    if are_separate(adapters, works):
        steps = [partial(_take_step, adapter, work) for work in works]
        in_turns(steps) if adapter.takes_turns else [step() for step in steps]
        return
    step = works[-1].task.step
    assert step is not None
    made = cast(BatchAdapter, adapter).denoise_batch([step_input(each.job) for each in works], step=step)
    for each, latents in zip(works, made, strict=True):
        each.made = {"latents": latents}


def _take_step(adapter: Adapter, work: RankTask) -> None:
    try:
        work.made = _executed(adapter, work, None)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors while the others go on
        work.error = error


def _executed(adapter: Adapter, work: RankTask, parallel: Parallel | None) -> dict[str, Fields]:
    task, spec, artifacts = work.task, work.job.start.spec, work.job.artifacts
    match task.stage:
        case Stage.ENCODE:
            return {"prompt": adapter.encode(spec)}
        case Stage.PREPARE:
            condition, latents = adapter.prepare(spec, artifacts["prompt"])
            return {"condition": condition, "latents": latents}
        case Stage.DENOISE:
            assert task.step is not None
            return {"latents": adapter.denoise(*step_input(work.job), step=task.step, parallel=parallel)}
        case Stage.APPROXIMATE:
            assert task.step is not None
            return {"latents": adapter.approximate(*step_input(work.job), step=task.step)}
        case Stage.DECODE:
            return {"frames": adapter.decode(spec, artifacts["latents"], parallel=parallel)}
