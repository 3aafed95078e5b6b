"""What makes the steps of one GPU's rank fast, and when: loading what they launch, recording forwards.

Either takes a while, in which other ranks must not wait for this one inside a task. So it comes before the
rank enters a task: by a *rehearsal*, in which the rank runs a step alone, with zeros for what others would
send (models/parallel/rehearsal.py). `warm_up` does so for what is at hand before a run begins. Later on, a
forward whose launches turn out to take as long as its computing is recorded before the next step of its kind
(models/fast/recording.py). Where that was so with one prompt, steps with prompts of another length, which are
another kind where texts are not padded, are recorded before their first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from gfgen.graph import Task
from gfgen.layout import MAX_RANKS, Layout
from gfgen.models.families.adapter import Adapter
from gfgen.models.fast.recording import Graphs
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.rehearsal import rehearsal
from gfgen.runtime.ipc.messages import WarmUp
from gfgen.runtime.worker.jobs import RankJob

LAUNCH_BOUND = 0.8
"""Launches that take so much of the time until all is done, or more, in two steps of a kind in a row: the
device waits for the host. One such step may be the host's having had something else to do."""
MIN_REPLAYS = 5
"""Recording takes about as long as launching a forward once or twice, so it pays if a few steps follow."""
MAX_ATTEMPTS = 4
"""At recording one kind of steps in vain: one that cannot be recorded is given up."""

Unentered = Callable[[Layout], Parallel | None]
"""The ranks of a step on this layout, of whom none has come; None for a rank alone."""
Mode = Callable[[Parallel | None], AbstractContextManager[None]]


class Kind(NamedTuple):
    """Steps that launch the same forwards: of jobs of equal shapes, in the same place of a layout."""

    checkpoint: str
    artifacts: object
    texts: tuple[object, ...]
    """By the lengths of the prompts."""
    degrees: tuple[int, int, int]
    slot: int

    @property
    def whatever_the_texts(self) -> Kind:
        """The same with any prompt: lengths of prompts change little of what a step takes."""
        return self._replace(texts=())


class Forwards:
    """The forwards of one rank's steps. For its main thread, but for `observe`."""

    def __init__(
        self, adapters: Mapping[str, Adapter], graphs: Graphs, *, rank: int, unentered: Unentered
    ) -> None:
        self._adapters, self._graphs = adapters, graphs
        self._rank, self._unentered = rank, unentered
        self._was_slow: set[Kind] = set()
        """The last such step was launch-bound, whatever its texts."""
        self._is_slow: set[Kind] = set()
        """Steps that are to be recorded."""
        self._often_slow: set[Kind] = set()
        """The same, whatever the texts: some of them were."""
        self._seen: set[Kind] = set()
        """Steps that have run or were recorded here."""
        self._num_attempts: Counter[Kind] = Counter()
        """In vain; where memory has been short, all of them."""
        self._was_short = False
        """Records had to be given back: made again for ever, they might let tasks fail for ever."""

    def kind_of(self, job: RankJob, layout: Layout) -> Kind:
        """Of a job's next step on this layout."""
        start, prompt = job.start, job.artifacts["prompt"]
        texts = self._adapters[start.checkpoint].text_shape(start.spec, prompt, layout)
        artifacts = start.trajectory.artifacts
        return Kind(start.checkpoint, artifacts, texts, layout.degrees, layout.slot_of(self._rank))

    def attach(self, checkpoint: str) -> None:
        """Before a step of this model: its forwards go through records."""
        self._adapters[checkpoint].evaluate_by(self._graphs)

    def is_to_record(self, job: RankJob, task: Task, kind: Kind) -> bool:
        """Whether the forwards of such steps had better be recorded before this one."""
        is_slow = kind in self._is_slow or (
            kind not in self._seen and kind.whatever_the_texts in self._often_slow
        )
        return is_slow and job.start.trajectory.num_steps - (task.step or 0) >= MIN_REPLAYS

    def record(self, job: RankJob, task: Task, kind: Kind, layout: Layout) -> None:
        """Record the forwards of a job's next step, while nothing that this rank has launched runs."""
        self._is_slow.discard(kind)
        self._seen.add(kind)
        self._num_attempts[kind] += 1
        num_made = self._graphs.num_made
        self.attach(job.start.checkpoint)
        unentered = self._unentered(layout)
        with self._graphs.recording(unentered):
            self._adapters[job.start.checkpoint].denoise(
                job.start.spec,
                *(job.artifacts[name] for name in ("prompt", "condition", "latents")),
                step=task.step or 0,
                parallel=None if unentered is None else rehearsal(unentered),
            )
        if self._graphs.num_made > num_made and not self._was_short:
            del self._num_attempts[kind]

    def observe(self, kind: Kind, *, launch_s: float, device_s: float) -> None:
        """A step took so long to launch, and so long from its first launch until it had run."""
        alike = kind.whatever_the_texts
        self._seen.add(kind)
        if launch_s < LAUNCH_BOUND * device_s:
            self._was_slow.discard(alike)
        elif alike not in self._was_slow:
            self._was_slow.add(alike)
        elif self._graphs.may_record and self._num_attempts[kind] < MAX_ATTEMPTS:
            self._is_slow.add(kind)
            self._often_slow.add(alike)

    def warm_up(self, message: WarmUp) -> None:
        """Run steps like the message's, in every slot of its layouts.

        Raises: what the model raises.
        """
        adapter, spec = self._adapters[message.checkpoint], message.spec
        self.attach(message.checkpoint)
        prompt = adapter.encode(spec)
        condition, latents = adapter.prepare(spec, prompt)
        last = (spec.steps or 1) - 1 if spec.boundary_ratio is not None else 0
        for layout in (each for degrees in message.degrees for each in self._layouts(degrees)):
            unentered = self._unentered(layout)
            alone = None if unentered is None else rehearsal(unentered)
            for step in sorted({0, last}):  # both experts
                with self._graphs.rehearsing(unentered):
                    adapter.denoise(spec, prompt, condition, latents, step=step, parallel=alone)

    def clear(self) -> None:
        """Give the memory of records back, which is short."""
        self._was_short = True
        self._graphs.clear()

    def forget(self) -> None:
        """Models are about to go: no record is kept, nothing that was seen counts, all may be tried again."""
        self._graphs.forget()
        for kinds in (self._was_slow, self._is_slow, self._often_slow, self._seen):
            kinds.clear()
        self._num_attempts.clear()
        self._was_short = False

    def _layouts(self, degrees: tuple[int, int, int]) -> Iterator[Layout]:
        """With this rank in each slot in turn; who the others are does not matter."""
        cfg, ulysses, ring = degrees
        others = [rank for rank in range(MAX_RANKS) if rank != self._rank]
        for slot in range(number := cfg * ulysses * ring):
            ranks = (*others[:slot], self._rank, *others[slot : number - 1])
            yield Layout(ranks, cfg=cfg, ulysses=ulysses, ring=ring)
