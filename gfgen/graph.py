"""A job as a graph of tasks, and the artifacts that tasks hand on.

    encode -> prepare -> denoise 0 .. n-1 -> decode          (then the write, host work)

`encode` makes the artifact prompt, `prepare` condition and latents, a step other latents from all three, and
`decode` frames from the latents.

The trajectory is a chain: a task's inputs are outputs of earlier tasks of the same job, so
a job has one next task at any time, and a task boundary is the only place where a job
moves, widens, stops or fails. Tasks are values: equal when job, position and stage are equal.

A step is a task of the stage `denoise`, or of its cheaper variant: `APPROXIMATE` runs no transformer, and
approximates its output by those of earlier steps. The last steps of a job may be of a second pass on a larger
picture (`REFINE`), which cost more; the first of them makes what the others begin with.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from enum import StrEnum


class Stage(StrEnum):
    """What a task does."""

    ENCODE = "encode"
    PREPARE = "prepare"
    DENOISE = "denoise"
    APPROXIMATE = "reuse"  # the word of journals, traces and clients
    REFINE = "refine"
    DECODE = "decode"


STEPS = frozenset((Stage.DENOISE, Stage.APPROXIMATE, Stage.REFINE))
FIRST_STEP = 2
"""Index of the first step in a trajectory."""

DTYPE_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8}


@dataclass(frozen=True, slots=True)
class Artifact:
    """What tasks hand on: a meaning and an upper bound of its size, and no placement.

    `fields` maps each tensor's name to (global shape, dtype name); shapes of text are upper
    bounds, since only the tokenizer knows how long a prompt is.
    """

    name: str
    fields: tuple[tuple[str, tuple[int, ...], str], ...]
    room_bytes: int = 0
    """Addresses in the slab for tensors that admission does not know."""

    @property
    def size_bytes(self) -> int:
        return sum(math.prod(shape) * DTYPE_BYTES[dtype] for _, shape, dtype in self.fields)


@dataclass(frozen=True, slots=True)
class Task:
    """One node of a trajectory: the unit that is placed, preempted and retried."""

    job_id: str
    index: int
    stage: Stage
    step: int | None = None

    @property
    def as_approximate(self) -> Task:
        """The same step without the transformer."""
        assert self.step is not None
        return replace(self, stage=Stage.APPROXIMATE)

    def __str__(self) -> str:
        return f"{self.stage} {self.step}" if self.step is not None else str(self.stage)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The tasks of one job, in order, and the artifacts that pass between them."""

    job_id: str
    num_steps: int
    artifacts: tuple[Artifact, ...] = ()
    approximate: tuple[int, ...] = ()
    """Steps that are approximate in any case, in order."""
    approximable: tuple[int, ...] = ()
    """Steps that a policy may have approximated, in order; `task` computes them."""
    num_refined: int = 0
    """How many of `num_steps`, the last ones, are of a second pass."""

    @property
    def num_tasks(self) -> int:
        return self.num_steps + 3

    def task(self, index: int) -> Task:
        """The task at a position; IndexError past the end."""
        if index == 0:
            return Task(self.job_id, 0, Stage.ENCODE)
        if index == 1:
            return Task(self.job_id, 1, Stage.PREPARE)
        if FIRST_STEP <= index < self.num_steps + FIRST_STEP:
            step = index - FIRST_STEP
            stage = Stage.APPROXIMATE if step in self.approximate else Stage.DENOISE
            stage = stage if step < self.num_steps - self.num_refined else Stage.REFINE
            return Task(self.job_id, index, stage, step=step)
        if index == self.num_steps + FIRST_STEP:
            return Task(self.job_id, index, Stage.DECODE)
        raise IndexError(f"job {self.job_id} has tasks 0 to {self.num_tasks - 1}, not {index}")

    def num_approximate_from(self, index: int) -> int:
        """Approximate steps from the task at a position on."""
        return len(self.approximate) - bisect_left(self.approximate, index - FIRST_STEP)

    def num_approximable_from(self, index: int) -> int:
        """Steps from the task at a position on that a policy may have approximated."""
        return len(self.approximable) - bisect_left(self.approximable, index - FIRST_STEP)

    def variant(self, task: Task) -> Task | None:
        """The cheaper task that a policy may choose in place of this one; None if there is none."""
        return task.as_approximate if task.index - FIRST_STEP in self.approximable else None

    def name_of(self, task: Task) -> str:
        """A task as people count: 'denoise 3 of 20' for step 2, other stages by their name."""
        return str(task.stage) if task.step is None else f"{task.stage} {task.step + 1} of {self.num_steps}"

    @property
    def frames_shape(self) -> tuple[int, int, int, int] | None:
        """Of the job's frames, bytes [F, H, W, 3] (6 of 16 bits); None if only the decode knows it."""
        fields = self.artifact("frames").fields
        if not fields:
            return None
        ((_, (frames, height, width, channels), _),) = fields
        return frames, height, width, channels

    @property
    def frames_bytes(self) -> int:
        """Of the job's frames; an estimate if only the decode knows their shape."""
        frames = self.artifact("frames")
        return frames.size_bytes + frames.room_bytes

    def artifact(self, name: str) -> Artifact:
        """The artifact of that name; KeyError when this job has none."""
        for artifact in self.artifacts:
            if artifact.name == name:
                return artifact
        raise KeyError(name)
