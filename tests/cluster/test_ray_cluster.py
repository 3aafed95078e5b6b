"""Which machines of a Ray cluster become nodes, and what is said of the others."""

import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from fake_ray import ActorDiedError, FakeRay, GetTimeoutError

from gfgen.cli.main import main
from gfgen.cluster import ray_cluster, ray_node
from gfgen.cluster.member import MemberOptions, Noted, Ready, versions_here
from gfgen.cluster.node import NodeJoined, NodeLost, NodeNotes
from gfgen.cluster.ray_cluster import MAX_STARTS, RayCluster
from gfgen.cluster.ray_node import RayOptions
from gfgen.errors import InputError, ModelError
from gfgen.runtime.core.devices import CPU, Devices
from gfgen.runtime.core.events import Clock, RankReady
from gfgen.session.admission import find_weightless
from gfgen.session.ranks import AskedRanks, Ranks

TWO = Ranks(Devices(CPU, 2))
AHEAD_S = 5000.0
"""Of the nodes' clocks."""


class Actor:
    """A healthy one, until `dies` is set."""

    def __init__(self, **facts):
        self.dies = threading.Event()
        self.notes = []
        self._facts = facts

    def facts(self):
        return {**versions_here(), **self._facts}, TWO

    def find_model(self, name):
        if name == "unknown":
            raise ModelError("model 'unknown': no such directory, and no model of that name")
        return find_weightless(name) if name == "shapes" else None

    def time(self):
        return time.time() + AHEAD_S

    def load(self, models):
        return Ready(TWO, {name: {} for name in models}, began_at=time.time() + AHEAD_S)

    def take_reports(self, timeout_s):
        if self.notes:
            return [Noted(self.notes.pop())]
        if self.dies.wait(min(timeout_s, 0.01)):
            raise ActorDiedError("long\nreport")
        return []

    def stop(self):
        self.dies.set()


@pytest.fixture
def connected(monkeypatch, tmp_path):
    """A cluster of these machines, inside `with`."""
    monkeypatch.setattr(ray_cluster, "LOOK_S", 0.01)
    opened = []

    def connect(machines, make=lambda ray_id: Actor(), **options):
        ray = FakeRay(machines, make)
        monkeypatch.setattr(ray_cluster, "connected", lambda address: ray)
        member = MemberOptions(policy="fcfs", model="m", ranks=AskedRanks(), lookahead_s=0.0, work_dir="/")
        found = RayCluster(RayOptions(address="auto", member=member, output_dir=tmp_path, **options))
        opened.append(found)
        return found.__enter__(), ray

    yield connect
    for each in opened:
        each.__exit__(None, None, None)


def reports_of(cluster, number):
    found = []
    while len(found) < number:
        found += cluster.wait(None)
    return found


def test_each_machine_becomes_a_node_with_all_its_gpus(connected):
    cluster, ray = connected({"a": {"GPU": 8.0, "CPU": 64.0}, "b": {"CPU": 4.0}})
    cluster.load(["m"])
    joined = reports_of(cluster, 2)
    assert all(isinstance(report, NodeJoined) and report.node.num_ranks == 2 for report in joined)
    by_machine = {options["scheduling_strategy"]: options for options in ray.options_of}
    assert (by_machine["a"]["num_gpus"], by_machine["a"]["num_cpus"]) == (8.0, 0)
    assert (by_machine["b"]["num_gpus"], by_machine["b"]["num_cpus"]) == (0, 1)


def test_resources_and_their_number_select_nodes(connected):
    cluster, _ = connected(
        {"a": {}, "b": {"h200": 1.0}, "c": {"h200": 1.0}}, resources={"h200": 1}, num_nodes=1
    )
    cluster.load(["m"])
    assert [node.ray_id for node in cluster.joined] == ["b"]


def test_a_machine_without_cpus_and_gpus_is_no_node(connected):
    cluster, _ = connected({"head": {"CPU": 0.0}})
    with pytest.raises(InputError, match="it lacks CPUs and GPUs"):
        _ = cluster.ranks


@pytest.fixture
def asked(monkeypatch):
    """What Ray's autoscaler is asked for."""
    found = []
    sdk = SimpleNamespace(request_resources=lambda bundles: found.append(bundles))
    for name in ("ray", "ray.autoscaler", "ray.autoscaler.sdk"):
        monkeypatch.setitem(sys.modules, name, sdk)
    return found


def test_nodes_are_asked_for_by_the_open_jobs_and_let_go_without_jobs(connected, asked, monkeypatch):
    cluster, ray = connected({"head": {"CPU": 0.0}, "a": {"GPU": 8.0}}, scales=True, num_nodes=3)
    cluster.load(["m"])
    (first,) = reports_of(cluster, 1)
    cluster.scale(7, {first.node.name})
    assert asked == [[{"CPU": 1}], [{"GPU": 8.0}] * 3], "as many as the option allows"
    ray.machines["b"] = {"GPU": 8.0}
    (second,) = reports_of(cluster, 1)
    cluster.scale(1, {second.node.name})
    assert len(cluster.joined) == 2, "more jobs may come soon"
    monkeypatch.setattr(ray_cluster, "RELEASE_S", 0.0)
    cluster.scale(1, {second.node.name})
    assert asked[2:] == [[{"GPU": 8.0}]]
    assert reports_of(cluster, 1) == [NodeLost(first.node.name, "the open jobs need fewer nodes")]
    assert [node.ray_id for node in cluster.joined] == ["b"]


def test_a_node_that_has_just_joined_is_not_let_go(connected, asked):
    cluster, _ = connected({"a": {}, "b": {}}, scales=True)
    cluster.load(["m"])
    (first,) = reports_of(cluster, 1)
    cluster.scale(4, {first.node.name})
    (second,) = reports_of(cluster, 1)
    cluster._wanted = 1
    cluster.scale(1, {first.node.name})
    assert cluster.joined == [first.node, second.node]
    second.node.joined_s -= 2 * ray_cluster.RELEASE_S
    cluster.scale(1, {first.node.name})
    assert cluster.joined == [first.node]


def test_the_end_of_a_node_that_was_let_go_is_not_the_end_of_its_machine_s_next(connected):
    cluster, _ = connected({"a": {}})
    cluster.load(["m"])
    (first,) = reports_of(cluster, 1)
    cluster._release(first.node)
    lost, second = reports_of(cluster, 2)
    assert lost.name == first.node.name
    cluster._lost(first.node, ActorDiedError("late"))
    assert cluster.joined == [second.node]
    assert cluster.wait(None) == []


def test_waits_for_nodes_and_models_end(connected, monkeypatch):
    monkeypatch.setattr(ray_cluster, "ALONE_S", 0.01)
    cluster, _ = connected({})
    with pytest.raises(InputError, match=r"no node can load the models\n  there is none since 0\.01 s"):
        cluster.load(["m"])
    cluster, ray = connected({"a": {}})
    _ = cluster.ranks
    get = ray.get

    def slow(call, timeout=None):
        """As if finding a model took for ever; the actor answers other questions."""
        if get(call) is None:
            raise GetTimeoutError
        return get(call)

    monkeypatch.setattr(ray, "get", slow)
    monkeypatch.setattr(ray_node, "MODELS_S", -1.0)
    with pytest.raises(ModelError, match="no node has it: it has not found big for -1 s"):
        cluster.find_model("big")


def test_a_machine_that_joins_later_becomes_a_node(connected):
    cluster, ray = connected({"a": {}})
    cluster.load(["m"])
    reports_of(cluster, 1)
    ray.machines = {"a": {}, "late": {}}
    assert reports_of(cluster, 1)[0].node.ray_id == "late"


def test_other_versions_are_one_line(connected):
    cluster, _ = connected({"a": {}}, lambda ray_id: Actor(gfgen="0.0.1"))
    with pytest.raises(InputError) as refused:
        _ = cluster.ranks
    own = versions_here()["gfgen"]
    assert f"it has gfgen 0.0.1 and the driver gfgen {own}: install the same" in str(refused.value)


def test_a_model_that_no_node_has_is_named(connected):
    cluster, _ = connected({"a": {}})
    with pytest.raises(ModelError, match="no node has it: model 'unknown': no such directory"):
        cluster.find_model("unknown")


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_a_dry_run_names_the_nodes_and_starts_no_job(tmp_path, monkeypatch, capsys, pause_s):
    """The first node may be up before the second has been looked at."""
    consider = ray_cluster.RayCluster._consider

    def slow(cluster, found):
        consider(cluster, found)
        time.sleep(pause_s)

    monkeypatch.setattr(ray_cluster.RayCluster, "_consider", slow)
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a fox", "frames": 1}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_cluster, "connected", lambda _: FakeRay({"a": {}, "b": {}}, lambda _: Actor()))
    monkeypatch.setattr(ray_cluster, "LOOK_S", 0.01)
    with pytest.raises(SystemExit) as end:
        main(["run", "jobs.jsonl", "--ray", "auto", "--dry-run"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    assert "jobs.jsonl: 1 job, no problem\njobs      1 new" in said
    assert "node      a-1: 2 CPU ranks on" in said
    assert "node      b-2: 2 CPU ranks on" in said
    assert "'gfgen plan JOBS --nodes NxRANKS' predicts several machines" in said
    assert not (tmp_path / "outputs").exists()


def test_a_machine_whose_node_dies_again_and_again_is_given_up(connected):
    actors = []

    def make(ray_id):
        actors.append(Actor())
        return actors[-1]

    cluster, _ = connected({"a": {}}, make)
    cluster.load(["m"])
    reports = []
    for number in range(MAX_STARTS):
        while len(reports) < 2 * number + 1:
            reports += cluster.wait(None)
        actors[number].dies.set()
    reports += reports_of(cluster, 2 * MAX_STARTS - len(reports))
    for joined, lost in zip(reports[::2], reports[1::2], strict=True):
        assert lost == NodeLost(joined.node.name, "its actor died, or the machine")
    deadline_s = time.monotonic() + 10
    while "a" not in cluster._refused:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert len(actors) == MAX_STARTS
    assert "it was lost 3 times in 600 s, at last because its actor died" in cluster._refused["a"]


def test_what_a_node_does_comes_by_the_driver_s_clock(connected):
    actor = Actor()
    cluster, _ = connected({"a": {}}, lambda ray_id: actor)
    cluster.load(["m"])
    clock = Clock()
    cluster.begin_run(clock, ())
    actor.notes.append([RankReady(0.0, 0, 1, 0.0)])
    *_, noted = reports_of(cluster, 2)
    assert isinstance(noted, NodeNotes)
    assert noted.begins_s == pytest.approx(0.0, abs=60.0), "the node's clock is hours ahead"


def test_an_input_ends_a_wait(connected, monkeypatch):
    monkeypatch.setattr(ray_cluster, "TICK_S", 60.0)
    cluster, _ = connected({})
    reader, writer = socket.socketpair()
    with reader, writer:
        cluster.begin_run(Clock(), [reader])
        writer.send(b"x")
        assert cluster.wait(None) == []


def test_a_run_whose_nodes_are_all_gone_ends(connected, monkeypatch):
    monkeypatch.setattr(ray_cluster, "ALONE_S", -1.0)
    cluster, _ = connected({})
    cluster.wait(None)
    with pytest.raises(ray_cluster.WorkerError, match="no node is left"):
        cluster.wait(None)
