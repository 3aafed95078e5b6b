"""Makes the steps of a GPU's rank fast: loads the kernels that they launch, and records forwards.

Other ranks must not wait for either, so the rank does it before it enters a task, by a *rehearsal*: a step
alone, with zeros for what others would send (models/parallel/parallel.py). `warm_up` does this for all tasks
of a kind of jobs, in parts that fit between tasks. Other kinds are recorded before a step, as soon as enough
steps of that kind can be expected, if records of such forwards are worth it (models/fast/recording.py). Each
rank counts and decides for itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gfgen.gfc.cuda.captured import Captured, CapturedAlone, SharedPool
from gfgen.gfc.cuda.device_group import CudaGroup
from gfgen.layout import MAX_RANKS, Degrees, Layout
from gfgen.models.families.adapter import Adapter, StepInput
from gfgen.models.fast.recording import Graphs, NotWorthRecordingError, Replay
from gfgen.models.geometry.rules import known
from gfgen.models.parallel.parallel import Parallel, rehearsal
from gfgen.runtime.ipc.messages import WarmUp
from gfgen.runtime.worker.jobs import RankTask, step_input

MIN_REPLAYS = 3
"""Recording takes about as long as launching a forward once or twice, so it pays for a job of four steps. On
an H200 a forward of Qwen-Image 1024 in fp8 takes 134 ms to record, 83 replayed, and 120 to 230 launched."""
FIRST_STEPS = 3
"""Those that launch other kernels than the one before: UniPC of order 2 corrects from the second step on, and
solves a system of equations from the third on."""
_ENOUGH_TO_APPROXIMATE = 2  # steps whose outputs an approximate one needs
MAX_KINDS = 1024  # the least recently used goes first: unpadded prompts bring ever new lengths
MAX_SHORTAGES = 4  # after memory was short, records are made again at most this often: they may be the reason

Unentered = Callable[[Layout], Parallel | None]  # the ranks of a step before they meet; None for one rank


class Kind(NamedTuple):
    """Steps that launch the same forwards: jobs of equal shapes, at the same place in a layout."""

    checkpoint: str
    shapes: object
    degrees: Degrees
    texts: tuple[object, ...]
    slot: int

    @property
    def shape(self) -> tuple[object, ...]:
        """The same for all prompts and slots: records are worth it for all of them or for none."""
        return self[:3]


@dataclass(slots=True)
class _Seen:
    num_steps: int = 0  # steps that ran
    num_gone: int | None = None  # the number of lost records when it was prepared; None if it was not


class Forwards:
    """The forwards of one rank's steps, for its main thread."""

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        graphs: Graphs,
        *,
        rank: int,
        unentered: Unentered,
        near: Collection[int] = (),
    ) -> None:
        """near: other ranks that reach this one's memory."""
        self._near = sorted(near)
        self._adapters, self._graphs = adapters, graphs
        self._rank, self._unentered = rank, unentered
        self._kinds: OrderedDict[Kind, _Seen] = OrderedDict()
        self._not_worth: set[object] = set()  # shapes whose steps are launched kernel by kernel
        self._num_shortages = 0
        self._warmed: set[object] = set()  # what needs no warm-up again when its model comes back

    def kind_of(self, work: RankTask) -> Kind:
        """The kind of a step."""
        start, layout = work.job.start, work.message.layout
        texts = self._adapters[start.checkpoint].text_shape(start.spec, work.job.artifacts["prompt"], layout)
        shapes = (start.shape, start.trajectory.artifacts)
        return Kind(start.checkpoint, shapes, layout.degrees, texts, layout.slot_of(self._rank))

    def attach(self, checkpoint: str) -> None:
        """Let the forwards of this model go through records."""
        self._adapters[checkpoint].evaluate_by(self._graphs)

    def begin(self, kind: Kind) -> None:
        """A step of this kind runs next."""
        self.attach(kind.checkpoint)
        self._seen(kind).num_steps += 1

    def is_to_record(self, kind: Kind, work: RankTask) -> bool:
        """Whether enough such steps are to come that recording their forwards before these pays."""
        if not self._graphs.may_record or self._num_shortages >= MAX_SHORTAGES:
            return False
        step, seen = work.task.step or 0, self._kinds.get(kind, _Seen())
        is_due = seen.num_gone is None or (step == 0 and seen.num_gone != self._graphs.num_gone)
        num_left = work.job.start.trajectory.num_steps - step
        return is_due and kind.shape not in self._not_worth and seen.num_steps + num_left >= MIN_REPLAYS

    def record(self, kind: Kind, work: RankTask) -> None:
        """Record the forwards of a step, while no task of this rank runs."""
        self._seen(kind).num_gone = self._graphs.num_gone
        adapter = self._adapters[kind.checkpoint]
        if not adapter.is_rehearsed:
            self._not_worth.add(kind.shape)
            return
        self.attach(kind.checkpoint)
        start, inputs = work.job.start, step_input(work.job)
        unentered, alone = self._alone(work.message.layout)
        try:
            for step in _steps_of_experts(
                start.trajectory.num_steps, start.spec.boundary_ratio, work.task.step or 0
            ):
                with self._graphs.recording(unentered):
                    adapter.denoise(*inputs, step=step, parallel=alone)
        except NotWorthRecordingError:
            self._not_worth.add(kind.shape)

    def warm_up(self, message: WarmUp) -> Iterator[None]:
        """Run tasks like the message's in every slot; yields after each part. Raises what the model does."""
        if (adapter := self._adapters.get(message.checkpoint)) is None:
            return  # models have changed
        spec, *about = (getattr(message, name) for name in message.__slots__[1:])  # all but its number
        known = (adapter.geometry.shape_key(spec), spec.steps, spec.may_approximate, *about)
        if known not in self._warmed:
            yield from self._prepare(message, adapter)
            self._warmed.add(known)

    def _prepare(self, message: WarmUp, adapter: Adapter) -> Iterator[None]:
        spec, graphs = message.spec, self._graphs
        self.attach(message.checkpoint)
        for text in adapter.texts_to_rehearse() if message.has_texts else ():
            with graphs.rehearsing(None):
                text()
            yield
        if not (message.degrees or message.decodes):
            return
        prompt = adapter.encode(spec)
        condition, latents = adapter.prepare(spec, prompt)
        shapes = (adapter.geometry.shape_key(spec), adapter.geometry.trajectory(spec).artifacts)
        yield
        for layout in self._layouts(message, message.degrees):
            unentered, alone = self._alone(layout)
            with graphs.rehearsing(unentered):
                self._rehearse_steps(adapter, StepInput(spec, prompt, condition, latents), alone)
            texts = adapter.text_shape(spec, prompt, layout)
            kind = Kind(message.checkpoint, shapes, layout.degrees, texts, layout.slot_of(self._rank))
            self._seen(kind).num_gone = graphs.num_gone
            yield
        for layout in self._layouts(message, [(1, number, 1) for number in message.decodes]):
            adapter.decode(spec, adapter.shortest(latents), parallel=self._alone(layout)[1])
            yield

    def _rehearse_steps(self, adapter: Adapter, given: StepInput, parallel: Parallel | None) -> None:
        """The steps whose solvers or experts differ, one each; without records no more than needed."""
        spec, latents = given.spec, given.latents
        num_steps = known(spec.steps)
        for step in range(min(num_steps, FIRST_STEPS if adapter.is_rehearsed else _ENOUGH_TO_APPROXIMATE)):
            if step == 0 or adapter.is_rehearsed or spec.may_approximate:
                latents = adapter.denoise(*given[:3], latents, step=step, parallel=parallel)
        for step in _steps_of_experts(num_steps, spec.boundary_ratio, 0)[1:]:
            adapter.denoise(*given, step=step, parallel=parallel)
        if spec.may_approximate and num_steps > _ENOUGH_TO_APPROXIMATE:
            adapter.approximate(*given[:3], latents, step=_ENOUGH_TO_APPROXIMATE)

    def clear(self) -> None:
        """Release the memory of records, because memory is short."""
        self._num_shortages += 1
        self._graphs.clear()
        self._kinds.clear()
        self._warmed.clear()

    def forget(self) -> None:
        """Forget all records and observations, because models are about to change."""
        self._graphs.forget()
        self._kinds.clear()
        self._not_worth.clear()
        self._warmed.clear()
        self._num_shortages = 0

    def _seen(self, kind: Kind) -> _Seen:
        seen = self._kinds.setdefault(kind, _Seen())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return seen

    def _alone(self, layout: Layout) -> tuple[Parallel | None, Parallel | None]:
        """The ranks of a step before they meet, and this rank alone in place of them."""
        unentered = self._unentered(layout)
        return unentered, None if unentered is None else rehearsal(unentered)

    def _layouts(self, message: WarmUp, all_degrees: Iterable[Degrees]) -> Iterator[Layout]:
        """With this rank in each slot in turn, its own one first, and those near it around it."""
        far = [rank for rank in range(MAX_RANKS) if rank not in (self._rank, *self._near)]
        for degrees in all_degrees:
            number, size = math.prod(degrees), len(self._near) + 1
            for turn in range(1 if message.in_own_slot else number):
                slot = (self._rank + turn) % number
                start = slot // size * size if number > size else 0
                row = [*self._near[: slot - start], self._rank, *self._near[slot - start :]]
                yield Layout((*far[:start], *row, *far[start:])[:number], *degrees)


def _steps_of_experts(num_steps: int, boundary_ratio: float | None, step: int) -> list[int]:
    """This step and, if later ones have another transformer, the last one."""
    return sorted({step, num_steps - 1 if boundary_ratio is not None else step})


MIN_FREE_SHARE = 0.1  # of torch's memory. With less free nothing is recorded: tasks need it


class CudaRecorder:
    """Captures on one device, in memory that all its graphs share, as much as the largest forward's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: SharedPool | None = None

    def record(self, function: Callable[[Parallel | None], Tensor], parallel: Parallel | None) -> Replay:
        if self._pool is None:
            self._pool = SharedPool(self._device)
        if parallel is None:
            alone = CapturedAlone(lambda: function(None), capturing=self._pool.capturing)
            return lambda _: alone.replay()
        captured = Captured(_group_of(parallel), lambda _: function(parallel), capturing=self._pool.capturing)

        def replay(parallel: Parallel | None) -> Tensor:
            assert parallel is not None
            group = _group_of(parallel)
            assert not captured.unmatched(group), "a barrier that ranks without this record would not have"
            return captured.replay(group)

        return replay

    def align(self, parallel: Parallel) -> None:
        _group_of(parallel).align_banks()

    def has_room(self) -> bool:
        if not (is_enough := self._is_enough_free()):
            torch.cuda.empty_cache()  # a graph's memory is not taken from what is kept for tasks
            is_enough = self._is_enough_free()
        return is_enough

    def _is_enough_free(self) -> bool:
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = total * torch.cuda.get_per_process_memory_fraction(self._device)  # less under --memory
        return min(free, allowed - torch.cuda.memory_reserved(self._device)) >= MIN_FREE_SHARE * allowed

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


def _group_of(parallel: Parallel) -> CudaGroup:
    """The ranks that share the tokens; captures count the exchanges of all groups in its dispatch."""
    assert isinstance(parallel.sequence, CudaGroup)
    return parallel.sequence
