"""Observers of a run on several machines: they see the ranks of all nodes as the ranks of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gfgen.cluster.node import NodeNotes
from gfgen.graph import Stage, Task
from gfgen.layout import Layout
from gfgen.runtime.core import events
from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.core.events import Event
from gfgen.runtime.core.observer import JobInfo, JobOutcome, Observer
from gfgen.snapshot import JobView, RankView, RunningTask, Snapshot

OF_LANES = (events.RankReady, events.RankLost, events.TaskDone, events.TaskFailed)
"""The driver's own events of this kind are of lanes and whole jobs."""


@dataclass(slots=True)
class _NodeRanks:
    """A node's ranks among those of all nodes."""

    ranks: range
    up: set[int]
    running: dict[int, Dispatch]
    """What observers know to run there, by the node's number of the dispatch."""

    def layout(self, layout: Layout) -> Layout:
        return replace(layout, ranks=tuple(self.ranks[rank] for rank in layout.ranks))


class Watchers(Observer):
    """Passes a run on to its observers, with the tasks of nodes, newly numbered, in place of whole jobs."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self.refresh_s = min((o.refresh_s for o in observers if o.refresh_s is not None), default=None)
        self._nodes: dict[str, _NodeRanks] = {}
        self._num_ranks = 0
        self._number = 0
        self._open: dict[str, JobInfo] = {}
        self._there: dict[str, tuple[str, JobView]] = {}
        """Of each job that a node has: the node, and how far the job is."""
        self._waiting: dict[str, tuple[JobView, JobView]] = {}
        """Of each job that waits: its view as the driver and as observers see it, the same if unchanged."""

    def join(self, node: str, num_ranks: int, *, now_s: float) -> None:
        ranks = range(self._num_ranks, self._num_ranks + num_ranks)
        self._num_ranks += num_ranks
        self._nodes[node] = _NodeRanks(ranks, set(ranks), {})
        for observer in self._observers:
            observer.node_joined(node, ranks)
        for rank in ranks:
            self._tell(events.RankReady(now_s, rank, 1, 0.0))

    def lose(self, node: str, reason: str, *, now_s: float) -> None:
        for dispatch in self._nodes.pop(node).running.values():
            self._tell(events.TaskFailed(now_s, dispatch.number, reason, lost=True))
        self._there = {job_id: (at, view) for job_id, (at, view) in self._there.items() if at != node}
        for observer in self._observers:
            observer.node_left(node)

    def take(self, report: NodeNotes) -> None:
        """Pass on what a node has done; what belongs to an earlier run is dropped."""
        node = self._nodes.get(report.name)
        if node is None:
            return
        for note in report.notes:
            match note:
                case Dispatch() if note.task.job_id in self._open:
                    self._dispatch(node, note, report.begins_s)
                case events.TaskDone() | events.TaskFailed() if note.dispatch in node.running:
                    self._tell(_landed(node, note, report.begins_s))
                case events.RankReady() | events.RankLost():
                    rank = node.ranks[note.rank]
                    (node.up.add if isinstance(note, events.RankReady) else node.up.discard)(rank)
                    self._tell(replace(note, time_s=note.time_s + report.begins_s, rank=rank))
                case JobView() if note.job_id in self._open:
                    self._there[note.job_id] = (report.name, _seen(node, note, report.begins_s))

    def _dispatch(self, node: _NodeRanks, found: Dispatch, begins_s: float) -> None:
        self._number += 1
        dispatch = node.running[found.number] = replace(
            found,
            number=self._number,
            layout=node.layout(found.layout),
            source=None if found.source is None else node.layout(found.source),
            submitted_s=found.submitted_s + begins_s,
            predicted_start_s=found.predicted_start_s + begins_s,
            predicted_end_s=found.predicted_end_s + begins_s,
        )
        for observer in self._observers:
            observer.dispatched(dispatch)

    def _tell(self, event: Event) -> None:
        for observer in self._observers:
            observer.applied(event)

    def began(self, jobs: tuple[JobInfo, ...], *, num_ranks: int, policy: str) -> None:
        self._open = {info.job_id: info for info in jobs}
        for observer in self._observers:
            observer.began(jobs, num_ranks=num_ranks, policy=policy)

    def added(self, jobs: tuple[JobInfo, ...]) -> None:
        self._open |= {info.job_id: info for info in jobs}
        for observer in self._observers:
            observer.added(jobs)

    def applied(self, event: Event) -> None:
        if not isinstance(event, OF_LANES):
            self._tell(event)

    def ended(self, outcome: JobOutcome) -> None:
        for known in (self._open, self._there, self._waiting):
            known.pop(outcome.info.job_id, None)
        for observer in self._observers:
            observer.ended(outcome)

    def refreshed(self, snapshot: Snapshot) -> None:
        """Show jobs that nodes have at their next task there, and the others at their first."""
        running = tuple(
            RunningTask(each.task, each.layout, each.predicted_end_s)
            for node in self._nodes.values()
            for each in node.running.values()
        )
        views = {job_id: view for job_id, (_, view) in self._there.items()}
        views |= {job_id: self._waits(view) for job_id, view in snapshot.open.items()}
        busy = {each.task.job_id for each in running}
        shown = replace(
            snapshot,
            open={job_id: view for job_id, view in views.items() if job_id not in busy},
            busy={job_id: view for job_id, view in views.items() if job_id in busy},
            running=running,
            ranks=tuple(
                RankView(rank, snapshot.now_s, True, frozenset())
                for node in self._nodes.values()
                for rank in sorted(node.up)
            ),
            orders=None,
        )
        for observer in self._observers:
            if observer.refresh_s is not None:
                observer.refreshed(shown)

    def _waits(self, view: JobView) -> JobView:
        known = self._waiting.get(view.job_id)
        if known is not None and known[0] is view:
            return known[1]
        first, info = Task(view.job_id, 0, Stage.ENCODE), self._open[view.job_id]
        shown = replace(view, next_task=first, num_tasks=info.num_tasks, last_layout=None)
        self._waiting[view.job_id] = (view, shown)
        return shown


def _seen(node: _NodeRanks, view: JobView, begins_s: float) -> JobView:
    return replace(
        view,
        arrival_s=view.arrival_s + begins_s,
        deadline_s=view.deadline_s + begins_s,
        last_layout=None if view.last_layout is None else node.layout(view.last_layout),
    )


def _landed(
    node: _NodeRanks, event: events.TaskDone | events.TaskFailed, begins_s: float
) -> events.TaskDone | events.TaskFailed:
    number, time_s = node.running.pop(event.dispatch).number, event.time_s + begins_s
    if isinstance(event, events.TaskFailed):
        return replace(event, time_s=time_s, dispatch=number)
    times = tuple(
        each._replace(
            rank=node.ranks[each.rank], started_s=each.started_s + begins_s, ended_s=each.ended_s + begins_s
        )
        for each in event.times
    )
    return replace(event, time_s=time_s, dispatch=number, times=times)
