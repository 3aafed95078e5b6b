"""Prometheus metrics: counters updated as events happen, gauges read on each scrape."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gfgen.runtime.core.dispatch import Dispatch
from gfgen.runtime.ipc.messages import RankTimes
from gfgen.server.shown.served_job import ServedJob

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CLASSES = 32
"""Tags with their own label. The rest share OTHER, since clients choose tags and each label costs memory."""
OTHER = "other"
_STEP_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 2.5, 10, 60, 600)
_JOB_BOUNDS_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class ServerMetrics(Collector):
    """The metrics of one server; `class` is a job's tag, `node` is empty on one machine."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the size of the output
        self.registry = CollectorRegistry()
        self.mirror: Any = None  # the RunMirror, which imports this module
        self._classes: set[str] = set()
        own = self.registry
        by_class, by_rank = ["model", "class"], ["rank", "node"]
        self._ended = Counter(
            "gfgen_jobs_ended", "Jobs that have ended.", [*by_class, "status"], registry=own
        )
        text = "Deadlines of jobs that have ended, without cancelled ones."
        self._deadlines = Counter("gfgen_deadlines", text, [*by_class, "met"], registry=own)
        text = "From a completed job's acceptance to its file."
        self._job_s = Histogram("gfgen_job_seconds", text, by_class, buckets=_JOB_BOUNDS_S, registry=own)
        text = "From a completed job's acceptance to its start."
        self._wait_s = Histogram("gfgen_queue_seconds", text, by_class, buckets=_JOB_BOUNDS_S, registry=own)
        text = "Execution of tasks: stage=denoise are the steps; ranks is how many shared it."
        labels = ["model", "stage", "ranks"]
        self._task_s = Histogram("gfgen_task_seconds", text, labels, buckets=_STEP_BOUNDS_S, registry=own)
        text = "Tasks whose job had to move to other ranks first."
        self._migrations = Counter("gfgen_migrations", text, ["model"], registry=own)
        self._busy_s = Counter("gfgen_rank_busy_seconds", "Time of tasks on a rank.", by_rank, registry=own)
        text = "Time of ranks for the jobs of an API key; owner is its name, empty for the admin key."
        self._owner_s = Counter("gfgen_owner_rank_seconds", text, ["owner"], registry=own)
        text = "Memory that torch had allocated on a rank's GPU during its last task, at its peak."
        self._peak_bytes = Gauge("gfgen_gpu_memory_peak_bytes", text, by_rank, registry=own)
        text, labels = "From a request's headers to the end of its response.", ["method", "route", "status"]
        self._request_s = Histogram(
            "gfgen_http_request_seconds", text, labels, buckets=_REQUEST_BOUNDS_S, registry=own
        )
        text = "Worker processes that died or were killed."
        self._lost = Counter("gfgen_worker_restarts", text, by_rank, registry=own)
        text = "1; commit is empty if the installation does not know it."
        self._built = Gauge("gfgen_build_info", text, ["version", "commit"], registry=own)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def built(self, version: str, commit: str) -> None:
        self._built.labels(version, commit).set(1)

    def dispatched(self, dispatch: Dispatch, model: str) -> None:
        if dispatch.task.index > 1 and dispatch.source not in (None, dispatch.layout):
            self._migrations.labels(model).inc()

    def task_done(self, dispatch: Dispatch, model: str, busy_s: float) -> None:
        stage, ranks = dispatch.task.stage.value, str(dispatch.layout.degree)
        self._task_s.labels(model, stage, ranks).observe(busy_s)

    def used(self, times: RankTimes, node: str | None) -> None:
        self._busy_s.labels(str(times.rank), node or "").inc(max(0.0, times.busy_s))
        if times.peak_bytes is not None:
            self._peak_bytes.labels(str(times.rank), node or "").set(times.peak_bytes)

    def served(self, owner: str | None, rank_s: float) -> None:
        self._owner_s.labels(owner or "").inc(max(0.0, rank_s))

    def rank_lost(self, rank: int, node: str | None) -> None:
        self._lost.labels(str(rank), node or "").inc()

    def ended(self, record: ServedJob) -> None:
        facts, ending = record.facts, record.ending
        assert ending is not None
        name = self._class(facts.tag)
        self._ended.labels(facts.model, name, ending.status).inc()
        if ending.met_deadline is not None:
            self._deadlines.labels(facts.model, name, str(ending.met_deadline).lower()).inc()
        if ending.status == "completed":
            latency_s = max(0.0, ending.completed_at - facts.arrives_at)
            self._job_s.labels(facts.model, name).observe(latency_s)
            if ending.started_at is not None:
                wait_s = max(0.0, ending.started_at - facts.arrives_at)
                self._wait_s.labels(facts.model, name).observe(wait_s)

    def answered(self, method: str, route: str, status: int, took_s: float) -> None:
        self._request_s.labels(method, route, str(status)).observe(took_s)

    def collect(self) -> Iterator[Metric]:
        mirror = self.mirror
        if mirror is None:
            return
        ready = GaugeMetricFamily("gfgen_ready", "1 while jobs are taken.")
        ready.add_metric([], float(mirror.status == "ready"))
        yield ready
        waiting = Counts(
            (r.facts.model, self._class(r.facts.tag), r.status) for r in list(mirror.records.values())
        )
        yield _gauge("gfgen_jobs_open", "Jobs that have not ended.", ["model", "class", "status"], waiting)
        ranks = mirror.ranks(mirror.now())
        labels = ["rank", "node"]
        use = {(str(rank.rank), rank.node or ""): rank.utilisation for rank in ranks}
        yield _gauge("gfgen_rank_utilisation", "Share of the last minute in which it computed.", labels, use)
        are_up = ("loading", "idle", "busy")
        up = {(str(rank.rank), rank.node or ""): float(rank.status in are_up) for rank in ranks}
        yield _gauge("gfgen_rank_up", "1 while a rank takes tasks.", labels, up)
        turn = {(): mirror.longest_turn_s}
        yield _gauge("gfgen_control_longest_turn_seconds", "The loop's longest turn so far.", [], turn)
        yield _gauge("gfgen_control_turns", "Turns of the control loop so far.", [], {(): mirror.num_turns})
        yield _gauge("gfgen_streams", "Event streams that are read.", [], {(): mirror.num_streams})

    def describe(self) -> list[Metric]:
        """Empty, so that registration does not call `collect`."""
        return []

    def _class(self, tag: str | None) -> str:
        name = tag or ""
        if name not in self._classes and len(self._classes) >= MAX_CLASSES:
            return OTHER
        self._classes.add(name)
        return name


def _gauge(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for place, value in values.items():
        family.add_metric(list(place), value)
    return family
