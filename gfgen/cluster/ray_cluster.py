"""Nodes of a Ray cluster; a thread looks for them, another one for each brings it up and follows it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import select
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gfgen.cluster.node import NodeJoined, NodeLost, Report
from gfgen.cluster.ray_node import POLL_S, SHARED_NAME, SILENCE_S, RayNode, RayOptions, original, said
from gfgen.errors import InputError, ModelError, WorkerError, in_one_line
from gfgen.runtime.core.admission import ResolvedModel
from gfgen.runtime.core.devices import CUDA
from gfgen.runtime.core.events import Clock, Event, PolicyChanged
from gfgen.runtime.processes.workers import Requests
from gfgen.session.ranks import Ranks
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

LOCAL, AUTO = "local", "auto"
LOOK_S = 2.0
"""Between two looks at the list of nodes."""
MAX_STARTS = 3
"""Of actors on one machine within WINDOW_S."""
WINDOW_S = 600.0
ALONE_S = 60.0
"""The run ends when it has had no node for this time."""
BOOT_S = 900.0
"""In place of ALONE_S where machines are asked for."""
RELEASE_S = 60.0
"""A node is let go when the open jobs have filled fewer nodes for this time."""
MAX_NODES = 1000
TICK_S = 0.1
CONNECT_S = 5.0


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
        self._change = threading.Condition(self._lock)
        self._has_looked = threading.Event()
        self._is_over = threading.Event()
        self._alone_since: float | None = None
        self._number = 0
        self._wanted = 1
        """Nodes that the autoscaler is asked for."""
        self._enough_at = 0.0
        """When the open jobs last filled all of them."""
        self.clock = Clock()
        self._inputs: Sequence[Requests | SignalPipe] = ()
        """Of the present run; each ends a wait."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __enter__(self) -> RayCluster:
        """Raises: InputError when there is no Ray or no cluster."""
        self.ray = connected(self.options.address)
        self._began_s = time.monotonic()
        if self.options.scales:
            self._want(1)
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
            shutil.rmtree(self.options.output_dir / SHARED_NAME, ignore_errors=True)
        if self.options.scales:
            self._want(0)
        self.ray.shutdown()

    # What a session asks ----------------------------------------------------------------------

    @property
    def joined(self) -> Sequence[RayNode]:
        with self._lock:
            return [node for node in self._nodes.values() if node.ready is not None]

    def find_model(self, name: str) -> ResolvedModel:
        """The model, from a node that has it. Raises: ModelError if none has."""
        reason = ""
        for node in self._wait_for(lambda node: node.ranks is not None, "start"):
            try:
                return node.find_model(name)
            except Exception as error:  # of Ray, or what the node raises
                reason = said(error)
        raise ModelError(f"no node has it: {reason}")

    @property
    def ranks(self) -> Ranks:
        """Those of the first node. Raises: InputError if no node can be used."""
        first = self._wait_for(lambda node: node.ranks is not None, "be used")[0]
        assert first.ranks is not None
        return first.ranks

    def started(self) -> Mapping[str, Ranks]:
        """The ranks of nodes by name, when none is starting any more; they may still lack the models."""
        self._has_looked.wait(ALONE_S)
        with self._change:
            while any(node.ranks is None for node in self._nodes.values()):
                self._change.wait(TICK_S)
            return {node.name: node.ranks for node in self._nodes.values() if node.ranks is not None}

    def load(self, models: Sequence[str]) -> None:
        """Let all nodes load these models, and wait for the first. Raises: InputError if none can."""
        with self._change:
            self._models = tuple(models)
            self._change.notify_all()
        self._wait_for(lambda node: node.ready is not None, "load the models")

    def _wait_for(self, is_fit: Callable[[RayNode], bool], what: str) -> Sequence[RayNode]:
        """The nodes for which this is true, once there is one. Raises: InputError if none can be."""
        last_s = time.monotonic()  # with a node
        with self._change:
            while not (found := [node for node in self._nodes.values() if is_fit(node)]):
                may_boot = self.options.scales and time.monotonic() < self._began_s + BOOT_S
                if self._nodes or may_boot:
                    last_s = time.monotonic()
                elif self._refused or time.monotonic() > last_s + ALONE_S:
                    reasons = dict.fromkeys(self._refused.values()) or [f"there is none since {ALONE_S:g} s"]
                    text = "\n".join(f"  {why}" for why in reasons)
                    raise InputError(f"--ray {self.options.address}: no node can {what}\n{text}")
                self._change.wait(TICK_S)
        return found

    def begin_run(self, clock: Clock, inputs: Sequence[Requests | SignalPipe]) -> None:
        """Tell a new driver of the nodes that there are."""
        self.clock, self._inputs = clock, inputs
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

    def scale(self, num_jobs: int, busy: Collection[str]) -> None:
        """Ask for as many nodes as the open jobs fill; those without jobs (not `busy`) go if fewer do."""
        joined, now_s = self.joined, time.monotonic()
        if not joined:
            return
        filled = max(1, math.ceil(num_jobs / joined[0].num_ranks))
        number = min(filled, self.options.num_nodes or MAX_NODES)
        if number >= self._wanted:
            self._enough_at = now_s
        if number > self._wanted or now_s > self._enough_at + RELEASE_S:
            self._want(number)
        rested = [node for node in reversed(joined) if now_s > node.joined_s + RELEASE_S]
        idle = [node for node in rested if node.name not in busy]
        for node in idle[: max(0, len(joined) - self._wanted)]:
            self._release(node)

    def _want(self, number: int) -> None:
        from ray.autoscaler.sdk import request_resources

        size = self.joined[0].size if self.joined else {}
        if not size and not self.options.resources:
            size = {"GPU" if self.options.member.ranks.device == CUDA else "CPU": 1}
        self._wanted, self._enough_at = number, time.monotonic()
        logger.info("asking Ray for %s", counted(number, "node"))
        try:
            request_resources(bundles=[{**size, **self.options.resources}] * number)
        except Exception as error:  # of Ray
            logger.warning("cannot ask Ray for nodes: %s", in_one_line(error))

    def _release(self, node: RayNode) -> None:
        """Let a node go that has no jobs; Ray ends its machine when that has been idle for a while."""
        with self._lock:
            if self._nodes.pop(node.ray_id, None) is None:
                return
            self._starts.pop(node.ray_id)
        self.report(NodeLost(node.name, "the open jobs need fewer nodes"))
        threading.Thread(target=node.end, daemon=True).start()

    # What the control loop asks ------------------------------------------------------------------

    def wait(self, until_s: float | None) -> Sequence[Report]:
        """Reports; none after a tick without any, or if an input is readable."""
        timeout_s = TICK_S if until_s is None else max(0.0, min(TICK_S, until_s - self.clock.now_s))
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
        elif now_s > self._alone_since + (limit_s := BOOT_S if self.options.scales else ALONE_S):
            raise WorkerError(f"no node is left since {limit_s:g} s; see the log, then run again")

    def report(self, report: Report) -> None:
        self._reports.put(report)
        os.eventfd_write(self._wake_fd, 1)

    # Threads ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._is_over.is_set():
            try:
                for node in self.ray.nodes():
                    if node["Alive"]:
                        self._consider(node)
                self._has_looked.set()
            except Exception as error:
                logger.warning("cannot list the nodes: %s", in_one_line(error))
            self._is_over.wait(LOOK_S)

    def _consider(self, found: Mapping[str, Any]) -> None:
        ray_id, resources = found["NodeID"], found["Resources"]
        now_s = time.monotonic()
        with self._lock:
            most = self._wanted if self.options.scales else self.options.num_nodes
            is_full = most is not None and len(self._nodes) >= most
            if ray_id in self._nodes or ray_id in self._refused or is_full:
                return
            missing = [
                name for name, least in self.options.resources.items() if resources.get(name, 0) < least
            ]
            if missing or not (resources.get("CPU") or resources.get("GPU")):  # such as a head of KubeRay
                self._refused[ray_id] = f"it lacks {', '.join(missing) or 'CPUs and GPUs'}"
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
                node.joined_s = time.monotonic()
                self.report(NodeJoined(node))
            node.follow()
        except Exception as error:  # of Ray, or what it raises of the actor's
            if not self._is_over.is_set():
                self._lost(node, error)

    def _lost(self, node: RayNode, error: Exception) -> None:
        node.kill()
        error = original(error)
        reason = said(error)
        with self._change:
            if self._nodes.get(node.ray_id) is not node:  # it was let go; another may have its place
                return
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
        hint = "start one with 'ray start --head', or use --ray local; RAY_AUTH_MODE=token sends a token"
        raise InputError(f"--ray {address}: no Ray cluster ({said(error)}); {hint}") from None
    return ray


def _check_reachable(address: str) -> None:
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
