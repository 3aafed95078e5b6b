"""Nodes of a Ray cluster: one actor on each, found again every few seconds.

A thread looks for nodes; another one for each node brings it up, asks it for reports and fetches files. What
they find comes to the control loop through a queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gfgen.cluster.actor import Gone, NodeActor, versions_here
from gfgen.cluster.delivery import FileDelivery, make_shared, remove_shared
from gfgen.cluster.member import Ended, MemberOptions, Noted, Ready, Refused
from gfgen.cluster.node import JobEnded, NodeJoined, NodeLost, NodeNotes, Report
from gfgen.errors import GfgenError, InputError, ModelError, OutputError, WorkerError, in_one_line
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel
from gfgen.runtime.core.clock import Clock
from gfgen.runtime.core.events import Event, PolicyChanged
from gfgen.runtime.processes.workers import Requests
from gfgen.session.ranks import Ranks
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

LOCAL, AUTO = "local", "auto"
LOOK_S = 2.0
"""Between two looks at the list of nodes."""
POLL_S = 5.0
"""A node answers within this time, with or without reports."""
SILENCE_S = 30.0
"""A node that is silent for this time after it should have answered is given up."""
START_S = 120.0
"""An actor that has not started by then is waiting for resources that others hold."""
MAX_STARTS = 3
"""Of actors on one machine within WINDOW_S."""
WINDOW_S = 600.0
ALONE_S = 60.0
"""The run ends when it has had no node for this time."""
TICK_S = 0.1
CONNECT_S = 5.0
_THREADS = 8
"""Of an actor: calls that wait, and others meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    address: str
    """LOCAL, AUTO or HOST:PORT."""
    member: MemberOptions
    output_dir: Path
    is_shared: bool = False
    """Nodes write into the output folder."""
    num_nodes: int | None = None
    """At most so many; None: all."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """That a node must have."""


class RayNode:
    """A machine with its actor."""

    def __init__(self, cluster: RayCluster, ray_id: str, name: str, resources: Mapping[str, float]) -> None:
        self.name, self.ray_id = name, ray_id
        self.ranks: Ranks | None = None
        """None until its actor has started."""
        self.ready: Ready | None = None
        """None until it has loaded the models."""
        self.actor: Any = None
        self._cluster = cluster
        self._resources = resources
        self._jobs: dict[int, AdmittedJob] = {}
        self._shared: Path | None = None
        self._ahead_s = 0.0

    @property
    def num_ranks(self) -> int:
        assert self.ranks is not None, "it has not joined"
        return self.ranks.num_ranks

    def create(self) -> None:
        """Start the actor, and compare versions. Raises: InputError if it cannot be used."""
        ray = self._cluster.ray
        options = self._cluster.options
        if options.is_shared:
            self._shared = make_shared(options.output_dir.absolute(), self.name)
        # A machine without GPUs has CPU ranks, and one of its CPUs stands for all.
        num_gpus = self._resources.get("GPU", 0) if options.member.ranks.device != "cpu" else 0
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self.ray_id, soft=False)
        self.actor = (
            ray.remote(NodeActor)
            .options(
                num_cpus=0 if num_gpus else min(1, self._resources.get("CPU", 0)),
                num_gpus=num_gpus,
                max_concurrency=_THREADS,
                max_restarts=0,
                scheduling_strategy=here,
            )
            .remote(options.member, self._shared)
        )
        try:
            versions, ranks = ray.get(self.actor.facts.remote(), timeout=START_S)
        except ray.exceptions.GetTimeoutError:
            raise InputError(f"its GPUs or CPUs are in use by others for {START_S:g} s") from None
        own = versions_here()
        wrong = [f"{name} {versions.get(name, 'none')}" for name in own if own[name] != versions.get(name)]
        if wrong:
            named = ", ".join(f"{name} {own[name]}" for name in own if own[name] != versions.get(name))
            raise InputError(f"it has {', '.join(wrong)} and the driver {named}: install the same")
        self.ranks = ranks
        self._ahead_s = self._measured_ahead_s()

    def _measured_ahead_s(self) -> float:
        """How far its clock is ahead of the driver's."""
        asked_at = time.time()
        its: float = self._cluster.ray.get(self.actor.time.remote(), timeout=SILENCE_S)
        return its - (asked_at + time.time()) / 2

    def load(self, models: Sequence[str]) -> None:
        """Load the models. Raises: InputError if it cannot."""
        for name in models:
            self.find_model(name)
        answer = self._cluster.ray.get(self.actor.load.remote(models))
        if not isinstance(answer, Ready):
            raise InputError(answer.reason)
        self.ready = answer

    def find_model(self, name: str) -> ResolvedModel:
        """Raises: ModelError if it has no such model."""
        try:
            found: ResolvedModel = self._cluster.ray.get(self.actor.find_model.remote(name))
        except ModelError as error:
            raise original(error) from None
        return found

    def start(self, job: AdmittedJob, *, attempt: int) -> None:
        self._jobs[attempt] = job
        self.actor.start.remote(job.info, attempt)

    def cancel(self, attempt: int) -> None:
        self.actor.cancel.remote(attempt)

    def tell(self, event: Event) -> None:
        self.actor.tell.remote(event)

    def greet(self) -> None:
        """Let the actor know that its driver lives."""
        self._cluster.ray.get(self.actor.take_reports.remote(0.0), timeout=SILENCE_S)

    def follow(self) -> None:
        """Pass on what the node reports until it is gone."""
        ray = self._cluster.ray
        while True:
            found = ray.get(self.actor.take_reports.remote(POLL_S), timeout=POLL_S + SILENCE_S)
            for report in found:
                if isinstance(report, Gone | Refused):
                    raise WorkerError(report.reason)
                if isinstance(report, Ended):
                    self._cluster.report(self._delivered(report))
                if isinstance(report, Noted) and self.ready is not None:
                    began_at = self.ready.began_at - self._ahead_s
                    self._cluster.report(
                        NodeNotes(self.name, report.notes, self._cluster.second_of(began_at))
                    )

    def _delivered(self, ended: Ended) -> JobEnded:
        """The end of a job, with its files in the driver's reach."""
        ray, outcome, job = self._cluster.ray, ended.outcome, self._jobs.pop(ended.attempt)
        if outcome.status != "done":
            return JobEnded(self.name, ended.attempt, outcome)
        output_dir = self._cluster.options.output_dir
        delivery = FileDelivery(job, outcome, attempt=ended.attempt, output_dir=output_dir)
        if self._shared is not None:
            delivery.take(self._shared)
            return JobEnded(self.name, ended.attempt, outcome, delivery)
        try:
            delivery.fetch(lambda file, at, size: ray.get(self.actor.read.remote(file, at, size)))
        except OutputError as error:
            return JobEnded(self.name, ended.attempt, replace(outcome, status="failed", error=str(error)))
        finally:
            self.actor.forget.remote(ended.attempt)
        return JobEnded(self.name, ended.attempt, outcome, delivery)

    def end(self) -> None:
        """Let the node go; its actor ends at once if it does not answer."""
        ray = self._cluster.ray
        with contextlib.suppress(Exception):
            ray.get(self.actor.stop.remote(), timeout=SILENCE_S)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            self._cluster.ray.kill(self.actor)


class RayCluster:
    """All nodes. Inside `with` it is connected, and nodes come and go."""

    def __init__(self, options: RayOptions) -> None:
        self.options = options
        self.ray: Any = None
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._nodes: dict[str, RayNode] = {}
        """By Ray's id: those that live or start."""
        self._starts: dict[str, list[float]] = defaultdict(list)
        self._why: dict[str, str] = {}
        """By Ray's id, why its last node was lost."""
        self._refused: dict[str, str] = {}
        """By Ray's id, why a node cannot be used."""
        self._models: tuple[str, ...] | None = None
        """None until the jobs are known: nodes wait for them."""
        self._change = threading.Condition(self._lock)
        self._is_over = threading.Event()
        self._alone_since: float | None = None
        self._number = 0
        self._clock = Clock()
        """The driver's."""
        self._inputs: Sequence[Requests] = ()
        """Of the present run; each ends a wait."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there are reports."""

    def __enter__(self) -> RayCluster:
        """Raises: InputError when there is no Ray or no cluster."""
        self.ray = connected(self.options.address)
        threading.Thread(target=self._look, name="nodes", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        with self._lock:
            nodes = [node for node in self._nodes.values() if node.actor is not None]
        threads = [threading.Thread(target=node.end, daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SILENCE_S)
        if self.options.is_shared:
            remove_shared(self.options.output_dir)
        self.ray.shutdown()

    # What a session asks ----------------------------------------------------------------------

    @property
    def joined(self) -> Sequence[RayNode]:
        """Nodes that take jobs."""
        with self._lock:
            return [node for node in self._nodes.values() if node.ready is not None]

    @property
    def num_ranks(self) -> int:
        return sum(node.num_ranks for node in self.joined)

    def find_model(self, name: str) -> ResolvedModel:
        """The model, from a node that has it. Raises: ModelError if none has."""
        error: ModelError | None = None
        for node in self._wait_for(lambda node: node.ranks is not None, "start"):
            try:
                return node.find_model(name)
            except ModelError as found:
                error = found
        raise ModelError(f"no node has it: {error}")

    @property
    def ranks(self) -> Ranks:
        """Those of the first node. Raises: InputError if no node can be used."""
        first = self._wait_for(lambda node: node.ranks is not None, "be used")[0]
        assert first.ranks is not None
        return first.ranks

    def load(self, models: Sequence[str]) -> None:
        """Let all nodes load these models, and wait for the first. Raises: InputError if none can."""
        with self._change:
            self._models = tuple(models)
            self._change.notify_all()
        self._wait_for(lambda node: node.ready is not None, "load the models")

    def _wait_for(self, is_fit: Callable[[RayNode], bool], what: str) -> Sequence[RayNode]:
        """The nodes for which this is true, as soon as there is one."""
        with self._change:
            while not (found := [node for node in self._nodes.values() if is_fit(node)]):
                if self._refused and not self._nodes:
                    reasons = "\n".join(f"  {why}" for why in dict.fromkeys(self._refused.values()))
                    raise InputError(f"--ray {self.options.address}: no node can {what}\n{reasons}")
                self._change.wait(TICK_S)
        return found

    def begin_run(self, clock: Clock, inputs: Sequence[Requests]) -> None:
        """Tell a new driver of the nodes that there are."""
        self._clock, self._inputs = clock, inputs
        while not self._reports.empty():
            self._reports.get()
        for node in self.joined:
            self.report(NodeJoined(node))

    def tell(self, event: Event) -> None:
        """Let all nodes follow another policy or priority, and later ones the policy."""
        if isinstance(event, PolicyChanged):
            member = replace(self.options.member, policy=event.policy)
            self.options = replace(self.options, member=member)
        for node in self.joined:
            node.tell(event)

    def second_of(self, moment: float) -> float:
        """A Unix time as seconds of the present run."""
        return moment - self._clock.started_at

    # What the control loop asks ------------------------------------------------------------------

    def wait(self, until_s: float | None) -> Sequence[Report]:
        """Reports; none after a tick without any, or if an input is readable."""
        timeout_s = TICK_S if until_s is None else max(0.0, min(TICK_S, until_s - self._clock.now_s))
        ready = [self._wake_fd, *(each.fileno() for each in self._inputs)]
        select.select(ready, [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        found: list[Report] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._reports.get_nowait())
        self._check_alone()
        return found

    def _check_alone(self) -> None:
        now_s = time.monotonic()
        if self.joined:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now_s
        elif now_s > self._alone_since + ALONE_S:
            raise WorkerError(f"no node is left since {ALONE_S:g} s; see the log, then run again")

    def report(self, report: Report) -> None:
        self._reports.put(report)
        os.eventfd_write(self._wake_fd, 1)

    # Threads ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Bring up new nodes, as long as the run lasts."""
        while not self._is_over.is_set():
            try:
                for node in self.ray.nodes():
                    if node["Alive"]:
                        self._consider(node)
            except Exception as error:
                logger.warning("cannot list the nodes: %s", in_one_line(error))
            self._is_over.wait(LOOK_S)

    def _consider(self, found: Mapping[str, Any]) -> None:
        ray_id, resources = found["NodeID"], found["Resources"]
        now_s = time.monotonic()
        with self._lock:
            is_full = self.options.num_nodes is not None and len(self._nodes) >= self.options.num_nodes
            if ray_id in self._nodes or ray_id in self._refused or is_full:
                return
            missing = [
                name for name, least in self.options.resources.items() if resources.get(name, 0) < least
            ]
            if missing:
                self._refused[ray_id] = f"it lacks {', '.join(missing)}"
                return
            starts = [at for at in self._starts[ray_id] if at > now_s - WINDOW_S]
            if len(starts) >= MAX_STARTS:
                times = f"{counted(len(starts), 'time')} in {WINDOW_S:g} s"
                self._refuse(ray_id, f"it was lost {times}, at last because {self._why[ray_id]}")
                return
            self._starts[ray_id] = [*starts, now_s]
            self._number += 1
            name = f"{found['NodeManagerHostname']}-{self._number}"
            node = self._nodes[ray_id] = RayNode(self, ray_id, name, resources)
        threading.Thread(target=self._serve, args=(node,), name=name, daemon=True).start()

    def _serve(self, node: RayNode) -> None:
        """Bring up one node, and follow it to its end."""
        try:
            node.create()
            with self._change:
                self._change.notify_all()
            while self._models is None:
                with self._change:
                    self._change.wait(POLL_S)
                node.greet()
            node.load(self._models)
            with self._change:
                self._change.notify_all()
                self.report(NodeJoined(node))
            node.follow()
        except Exception as error:  # of Ray, or what it raises of the actor's
            if not self._is_over.is_set():
                self._lost(node, error)

    def _lost(self, node: RayNode, error: Exception) -> None:
        node.kill()
        error = original(error)
        reason = str(error) if isinstance(error, GfgenError) else said(error)
        with self._change:
            del self._nodes[node.ray_id]
            self._why[node.ray_id] = reason
            if node.ready is None and isinstance(error, InputError):
                self._refuse(node.ray_id, reason)
            elif node.ready is None:
                logger.warning("node %s did not start: %s", node.name, reason)
            self._change.notify_all()
        if node.ready is not None:
            self.report(NodeLost(node.name, reason))

    def _refuse(self, ray_id: str, reason: str) -> None:
        self._refused[ray_id] = reason
        logger.warning("a node is not used: %s", reason)


def original(error: Exception) -> Exception:
    """What an actor raised; Ray raises an exception that is of its own class, too."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def said(error: Exception) -> str:
    """What Ray says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    known = {
        "ActorDiedError": "its actor died, or the machine",
        "ActorUnavailableError": "it cannot be reached",
        "GetTimeoutError": f"it has not answered for {POLL_S + SILENCE_S:g} s",
    }
    if "creation task" in str(error):  # the actor's own error is in the last line
        return lines[-1][:300]
    return known.get(kind) or (lines[-1][:300] if lines else kind)


def connected(address: str) -> Any:
    """Ray, connected to a cluster. Raises: InputError if there is none, or no Ray."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise InputError("--ray: Ray is not installed; pip install 'gfgen[ray]'") from None
    if address not in (LOCAL, AUTO):
        _check_reachable(address)
    options: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    if address == LOCAL:  # else ranks get what other processes of the machine leave
        options["_system_config"] = {"worker_niceness": 0}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace="gfgen", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        hint = "start one with 'ray start --head', or use --ray local"
        raise InputError(f"--ray {address}: no Ray cluster ({said(error)}); {hint}") from None
    return ray


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise InputError(f"--ray {address}: local, auto or HOST:PORT is accepted")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--ray {address}: no Ray cluster there ({reason}); 'ray start --head' starts one"
        ) from None
