"""`gfgen serve` with workers that compute nothing: everything else of it is real.

    python -m fake_serving PORT FOLDER [option=value ...]

serves `fake-video`, `fake-image` and `fake-edit` on two ranks. A step takes `flow_shift` seconds if a job
gives it, and raises if its guidance scale is 13. Options are those of `ServerLimits`, `key`, `ranks`, `nodes`
(of a cluster; a job takes `flow_shift` seconds there), `keys` (NAME:KEY,...), `strict`, `alias`,
`public_url`, `origin`, `access_log`, `webhook_host` and `webhook_secret`. With FAKE_HASTE in the environment
jobs have eight steps at most, which take no time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fake_ray import FakeRay
from fake_worker import STATE_BYTES, FakeWorker
from fault_plan import FaultFolder, Faults, ScriptedError

from gfgen import log
from gfgen.cli.serve import ServeOptions, serve_on
from gfgen.cluster import ray_cluster
from gfgen.cluster.member import MemberOptions, Ready, Start, versions_here
from gfgen.cluster.ray_cluster import RayCluster
from gfgen.cluster.ray_node import RayOptions
from gfgen.cluster.session import ClusterSession
from gfgen.errors import JobError, Problem
from gfgen.gfc.arena import ArenaPlan
from gfgen.graph import Artifact, Stage, Task, Trajectory
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel, admit
from gfgen.runtime.core.devices import Devices
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files import writer
from gfgen.runtime.ipc import messages
from gfgen.runtime.ipc.content import Content
from gfgen.runtime.ipc.messages import Channel
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.processes.pool import WorkerPool
from gfgen.runtime.processes.starting import wait_ready
from gfgen.runtime.simulate.choosers import ThreadedChooser
from gfgen.server.bridge import RunBridge, Supervisor, listen
from gfgen.server.protocol.limits import ApiOptions, NamedKey, ServerLimits
from gfgen.server.protocol.link import FrontSettings
from gfgen.server.protocol.server_schemas import served_model
from gfgen.session.feed import Ended
from gfgen.session.ranks import AskedRanks, Ranks
from gfgen.session.session import Session

HASTE = bool(os.environ.get("FAKE_HASTE"))
SIDE = 16
RANKS = Ranks(Devices("cpu", 2))
MOVIE = (Path(__file__).parent / "movie.mp4").read_bytes()
"""What every fake video has in its file: four frames of a test picture, which thumbnails can be made of."""


@dataclass(frozen=True)
class FakeGeometry:
    """Of a model that makes 16x16 pictures whatever is asked for."""

    kind: str
    family: str = "fake"
    num_heads: int = 8
    has_alpha: bool = False

    def resolve(self, spec: JobSpec) -> JobSpec:
        if spec.true_cfg_scale is not None:
            raise JobError(Problem.of("true_cfg_scale", spec.true_cfg_scale, "this model has no use for it"))
        if self.kind == "image" and spec.image is not None and self.family == "fake":
            raise JobError(Problem.of("image", spec.image, "this model makes pictures from text only"))
        if spec.files and (self.family == "fake" or not spec.files.keys() <= {"image", "mask_image"}):
            raise JobError(Problem.of("files", None, "this model takes none"))
        frames = spec.frames or 9
        return replace(
            spec,
            width=(spec.width or 64) // 16 * 16,
            height=(spec.height or 64) // 16 * 16,
            frames=1 if self.kind == "image" else max(1, frames // 4 * 4 + 1),
            fps=spec.fps or 8,
            steps=min(spec.steps or 4, 8 if HASTE else 1000),
        )

    def output_kind(self, spec: JobSpec) -> str:
        return "image" if self.resolve(replace(spec, true_cfg_scale=None)).frames == 1 else "video"

    def trajectory(self, spec: JobSpec) -> Trajectory:
        state = ((STATE_BYTES,), "uint8")
        artifacts = (
            Artifact("prompt", (("prompt", *state),)),
            Artifact("condition", ()),
            Artifact("latents", (("latents", *state),)),
            Artifact("frames", (("frames", (1, SIDE, SIDE, 3), "uint8"),)),
        )
        return Trajectory(spec.id, spec.steps or 0, artifacts)

    def num_tokens(self, spec: JobSpec) -> int:
        return 8

    attention_width = 0

    def num_latent_rows(self, spec: JobSpec) -> int:
        return 1

    def uses_cfg(self, spec: JobSpec) -> bool:
        return True

    def flops(self, spec: JobSpec, stage: Stage) -> float:
        return 1e7 + 2e10 * (spec.flow_shift or 0.0) * (stage is Stage.DENOISE)

    def shape_key(self, spec: JobSpec) -> str:
        return f"{spec.width}x{spec.height}@{spec.flow_shift}"


MODELS = {
    name: ResolvedModel(name, Path("fake"), FakeGeometry(kind, family))
    for name, kind, family in (
        ("fake-video", "video", "fake"),
        ("fake-image", "image", "fake"),
        ("fake-edit", "image", "QwenImageEditPlusPipeline"),
    )
}
"""The last takes several pictures, and a mask."""


def admit_fakes(specs: Sequence[JobSpec]) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
    return admit(specs, default_model="fake-video", find_model=MODELS.__getitem__)


class FakeNode:
    """The actor of a node that makes each job in `flow_shift` seconds."""

    def __init__(self, ray_id: str) -> None:
        self._name = ray_id
        self._reports: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def facts(self) -> tuple[Any, Ranks]:
        return versions_here(), RANKS

    def time(self) -> float:
        return time.time()

    def find_model(self, name: str) -> ResolvedModel:
        return MODELS[name]

    def load(self, models: Sequence[str]) -> Ready:
        return Ready(RANKS, {name: {} for name in models}, time.time())

    def send(self, message: Any) -> None:
        if not isinstance(message, Start):
            return
        info, attempt = message.info, message.attempt
        written = Content(len(MOVIE), hashlib.sha256(MOVIE).hexdigest())
        outcome = JobOutcome(info, "done", written=written, warnings=(self._name,))
        threading.Timer(info.spec.flow_shift or 0.0, self._reports.put, [Ended(attempt, outcome)]).start()

    def read(self, file: str, offset: int, size: int) -> bytes:
        return MOVIE[offset : offset + size]

    def take_reports(self, timeout_s: float) -> Sequence[Ended]:
        with contextlib.suppress(queue.Empty):
            return [self._reports.get(timeout=timeout_s)]
        return []

    def forget(self, attempt: int) -> None:
        """It keeps nothing."""

    def stop(self) -> None:
        """It ends with the test."""


# Processes ------------------------------------------------------------------------------------------


class PacedWorker(FakeWorker):
    """Its steps take as long as their jobs say."""

    def _compute(self, job: Any, task: Task, layout: Layout, fds: Sequence[int]) -> bytes:
        spec = job.start.spec
        if task.stage is Stage.DENOISE:
            if spec.guidance_scale == 13:
                raise ScriptedError(f"an unlucky number in {os.getcwd()}/step")
            time.sleep(0.0 if HASTE else spec.flow_shift or 0.0)
        return super()._compute(job, task, layout, fds)


def work(end: socket.socket, settings: WorkerSettings) -> None:
    """Entry of a worker's process."""
    channel = Channel(end)
    faults = Faults(FaultFolder(Path(settings.checkpoints[0])), rank=settings.rank)
    channel.send(messages.WorkerReady(settings.rank, 0.0))
    PacedWorker(channel, settings.rank, faults).serve()


def write(end: socket.socket) -> None:
    """Entry of a writer's process: videos are not encoded."""
    channel = Channel(end)
    with contextlib.suppress(ConnectionError):  # the control plane is gone
        _write_all(channel)


def _write_all(channel: Channel) -> None:
    channel.send(messages.WriterReady())
    while (received := channel.receive()) is not None:
        request, fds = received
        if request.path.endswith(".mp4"):
            partial = Path(request.path + ".tmp-fake")
            partial.write_bytes(MOVIE)
            partial.replace(request.path)
            channel.send(messages.WriteDone(request.job_id, request.path, len(MOVIE), 0.0))
            os.close(fds[0])
        else:
            channel.send(writer.handle(request, fds[0]))


def named_key(name: str, key: str, *allows: str) -> tuple[str, NamedKey]:
    """Of NAME:KEY[:open=N][:gpu_s=N][:metrics]"""
    given = dict(each.partition("=")[::2] for each in allows)
    most = [int(given[each]) if each in given else None for each in ("open", "gpu_s")]
    return name, NamedKey(key, *most, only_metrics="metrics" in given)


def serve_fakes(port: int, folder: Path, **options: str) -> None:
    """Until a signal comes."""
    ranks, key = int(options.pop("ranks", "2")), options.pop("key", None)
    nodes = int(options.pop("nodes", "0"))
    keys = dict(named_key(*each.split(":")) for each in options.pop("keys", "").split(",") if each)
    api = ApiOptions(
        strict=bool(options.pop("strict", "")),
        served_names=tuple(filter(None, [options.pop("alias", "")])),
        public_url=options.pop("public_url", None),
        access_log=bool(options.pop("access_log", "")),
        a1111=bool(options.pop("a1111", "")),
        allowed_origins=tuple(filter(None, [options.pop("origin", "")])),
        webhook_hosts=tuple(filter(None, [options.pop("webhook_host", "")])),
        webhook_secret=options.pop("webhook_secret", None),
    )
    limits = ServerLimits(
        **{name: float(value) if name.endswith("_s") else int(value) for name, value in options.items()}
    )
    chosen = ServeOptions(
        output_dir=folder / "out",
        ranks=Ranks(Devices("cpu", ranks)),
        policy=load_policy("srtf"),
        lookahead_s=0.002,
        host="127.0.0.1",
        port=port,
        front=FrontSettings(
            (folder / "out").absolute(), key, limits=limits, version="1", api=api, keys=keys, commit="c0ffee"
        ),
    )
    chosen.output_dir.mkdir(parents=True, exist_ok=True)
    (folder / "faults").mkdir(exist_ok=True)
    FaultFolder(folder / "faults").begin(())
    with contextlib.ExitStack() as stack:
        listener = listen(chosen.host, chosen.port)
        stack.callback(listener.close)
        if nodes:
            session = stack.enter_context(ClusterSession(chosen, stack.enter_context(_nodes(nodes, chosen))))
        else:
            session = stack.enter_context(Session(chosen, pool=_pool(ranks, folder)))
        _ = session.signals
        chooser = stack.enter_context(contextlib.closing(ThreadedChooser(None)))
        bridge = RunBridge(on_policy=lambda policy: chooser.follow(load_policy(policy).choose))
        supervisor = Supervisor(listener, chosen.front, bridge)
        supervisor.start()
        stack.callback(supervisor.stop)
        if nodes:
            session.load([], models=list(MODELS))
        else:
            wait_ready(stack.enter_context(session.pool), session.signals)
        models = [served_model(model, created=1) for model in MODELS.values()]
        serve_on(session, bridge, chooser, models, admit=admit_fakes, admit_again=admit_fakes)


def _pool(ranks: int, folder: Path) -> WorkerPool:
    return WorkerPool(
        RankSettings(num_ranks=ranks, plan=ArenaPlan(data_bytes=1 << 16, post_bytes=1 << 10)),
        [folder / "faults"],
        worker_main="fake_serving:work",
        writer_main="fake_serving:write",
        preload=["fake_serving"],
    )


def _nodes(number: int, options: ServeOptions) -> RayCluster:
    """Nodes that are called node-0 and so on."""
    ray = FakeRay({f"node-{n}": {} for n in range(number)}, FakeNode)
    ray_cluster.connected = lambda address: ray
    member = MemberOptions(
        policy="srtf", model="fake-video", ranks=AskedRanks(), lookahead_s=options.lookahead_s, work_dir="/"
    )
    return RayCluster(RayOptions(address="auto", member=member, output_dir=options.output_dir))


if __name__ == "__main__":
    log.configure(level="info")
    # Under its own name: what is pickled here is looked for there.
    import fake_serving

    pairs = dict(argument.split("=", 1) for argument in sys.argv[3:])
    fake_serving.serve_fakes(int(sys.argv[1]), Path(sys.argv[2]), **pairs)
