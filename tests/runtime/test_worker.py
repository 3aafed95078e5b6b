"""What one rank does with its messages: a worker on a thread, with an adapter that only counts."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import make_job

from gfgen.errors import REFUSALS, AbortedError, JobError, ModelError, Problem
from gfgen.gfc.descriptor import Descriptor
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families.adapter import Fields
from gfgen.runtime.control import job_record
from gfgen.runtime.ipc.messages import (
    Abandon,
    Abandoned,
    Arenas,
    Channel,
    ForgetJob,
    FramesStored,
    ModelsSet,
    Ping,
    Pong,
    Reset,
    RunTask,
    SendState,
    SetModels,
    StartJob,
    TaskFault,
    TaskReport,
    Transfer,
    WarmUp,
    WarmUpLater,
    WorkerFailed,
)
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.ipc.slab import Slab, SlabPlan
from gfgen.runtime.worker import device as worker_device
from gfgen.runtime.worker import entry, preparing
from gfgen.runtime.worker import jobs as worker_jobs
from gfgen.runtime.worker.device import Device
from gfgen.runtime.worker.dispatches import Dispatches
from gfgen.runtime.worker.loop import Worker

JOB = make_job("a", steps=4)
PLAN = SlabPlan.of(JOB.trajectory)
HERE = Layout.single(0)
WAIT_S = 45.0
"""What a dispatch says of waits inside of it; here nobody waits so long."""
ANSWER_S = 10.0
"""How long an answer may take before the test fails; it takes milliseconds."""


class CountingAdapter:
    """Latents hold how often they were denoised; a step may be told to fail."""

    read_bytes_per_s = 0.0

    def __init__(self) -> None:
        self.fails_at: int | None = None
        self.pixel_sum = 0.0
        self.prompt = 1.0
        self.prompts: list[torch.Tensor | None] = []
        """The embeddings that latents were prepared with."""

    def encode(self, spec: JobSpec) -> Fields:
        return Fields({"embeds": torch.full((1, 4, 8), self.prompt)})

    def prepare(self, spec: JobSpec, prompt: Fields) -> tuple[Fields, Fields]:
        self.prompts.append(prompt.tensors.get("embeds"))
        return Fields(), Fields({"latents": torch.zeros(1, 4, 1, 2, 2)})

    def denoise(
        self, spec: JobSpec, prompt: Fields, condition: Fields, latents: Fields, *, step: int, parallel: Any
    ) -> Fields:
        if step == self.fails_at:
            raise RuntimeError("out of luck")
        assert float(latents.tensors["latents"].sum()) == step * 16
        return Fields({"latents": latents.tensors["latents"] + 1})

    def decode(self, spec: JobSpec, latents: Fields, *, parallel: Any) -> Fields:
        frames = torch.full((1, 16, 16, 3), 9, dtype=torch.uint8)
        return Fields({"frames": frames, "pixel_sum": torch.tensor(self.pixel_sum)}, {"first_row": 0})


@dataclass
class Rank:
    """The control plane's end of a worker."""

    worker: Worker
    device: Any
    dispatches: Dispatches
    adapter: CountingAdapter
    channel: Channel
    slab_fd: int
    slab: Slab
    errors: list[BaseException] = field(default_factory=list)

    def serve(self) -> None:
        try:
            self.worker.serve()
        except BaseException as error:
            self.errors.append(error)
            self.worker._channel._socket.shutdown(socket.SHUT_RDWR)  # as the end of its process would

    def run(self, number: int, index: int, *, layout: Layout = HERE, producer: int | None = None) -> None:
        if producer is None and index > 0:
            producer = number - 1
        incarnations = (1,) * layout.degree
        self.channel.send(RunTask(number, "a", index, producer, layout, incarnations, wait_s=WAIT_S))

    def answer(self) -> Any:
        received = self.channel.receive()
        return received and received[0]

    def run_to_end(self, number: int, index: int, **options: Any) -> TaskReport:
        self.run(number, index, **options)
        report = self.answer()
        assert isinstance(report, TaskReport), report
        assert report.number == number
        return report

    def give_up(self, *numbers: int) -> None:
        self.channel.send(Abandon(frozenset(numbers)))
        assert self.answer() == Abandoned(frozenset(numbers))

    def publish(self, name: str, version: int, fields: Fields, *, producer: int) -> None:
        """As another rank would have done."""
        worker_jobs.publish(self.slab, name, version, fields, producer=producer)


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A worker that knows one job, and has been given nothing to do."""
    ours, theirs = Channel.pair()
    ours.settimeout(ANSWER_S)
    adapter = CountingAdapter()
    channel = Channel(theirs)
    dispatches = Dispatches(lambda numbers: channel.send(Abandoned(numbers)))
    device = Device(0, {"fake": adapter}, dispatches, load_model=None)  # type: ignore
    worker = Worker(channel, 0, device, dispatches)
    fd = Slab.create(PLAN, name="a")
    rank = Rank(worker, device, dispatches, adapter, Channel(ours), fd, Slab(fd, PLAN))
    thread = threading.Thread(target=rank.serve, daemon=True)
    thread.start()
    rank.channel.send(StartJob(JOB.spec, JOB.trajectory, "fake"), (fd,))
    yield rank
    ours.close()
    thread.join(ANSWER_S)
    assert not thread.is_alive()
    os.close(fd)


def test_a_job_runs_from_its_prompt_to_its_frames(rank: Rank) -> None:
    for index in range(JOB.trajectory.num_tasks - 1):
        rank.run_to_end(index + 1, index)
    frames = os.memfd_create("frames")
    os.truncate(frames, 16 * 16 * 3)
    rank.channel.send(RunTask(7, "a", 6, 6, HERE, (1,)), (frames,))
    assert rank.answer().do_frames_follow
    assert rank.answer() == FramesStored(7)
    assert os.pread(frames, 1000, 0) == bytes([9]) * 768
    os.close(frames)


def test_the_first_task_of_a_kind_is_marked_unless_a_warm_up_had_its_kind(rank: Rank) -> None:
    reports = [rank.run_to_end(index + 1, index) for index in range(4)]
    assert [report.times.is_first_use for report in reports] == [True, True, True, False], "the second step"
    assert not rank.run_to_end(5, 0).times.is_first_use, "another attempt"
    rank.device.drop([])
    assert rank.run_to_end(6, 0).times.is_first_use, "its model was loaded again"
    rank.device.drop([])
    rank.device.note_used({("fake", Stage.ENCODE, "", (1, 1, 1), 0)})
    assert not rank.run_to_end(7, 0).times.is_first_use


@pytest.mark.parametrize("number", [2, 1])
def test_a_dispatch_number_that_does_not_rise_ends_the_worker(rank: Rank, number: int) -> None:
    rank.run_to_end(1, 0)
    rank.run_to_end(2, 1)
    rank.run(number, 2, producer=2)
    assert rank.answer() is None
    (error,) = rank.errors
    assert isinstance(error, AssertionError)
    assert "the global order is broken" in str(error)


def test_a_rank_that_cannot_follow_a_message_says_why_and_ends(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that went on would answer no pings: the log would say only that it gives no sign of life."""
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", codes.put)
    too_short = os.memfd_create("arena")
    rank.channel.send(Arenas(1 << 20, 1 << 12, (1,), (0,), False), (too_short,))
    failure = rank.answer()
    assert isinstance(failure, WorkerFailed)
    assert failure.reason.startswith("ProtocolError: an arena of 0 bytes")
    assert codes.get(timeout=ANSWER_S) == 1
    os.close(too_short)


def test_a_report_comes_after_the_result_is_in_the_slab(rank: Rank) -> None:
    for index, (name, version) in enumerate([("prompt", 1), ("latents", 2), ("latents", 3)]):
        report = rank.run_to_end(index + 1, index)
        assert rank.slab.producer(name, version) == report.number
    assert float(worker_jobs.fetch(rank.slab, "latents", 3).tensors["latents"].sum()) == 16


def test_a_rank_that_is_not_the_first_of_its_layout_publishes_nothing(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet(rank, monkeypatch)
    rank.run_to_end(1, 0)
    rank.run_to_end(2, 1)
    rank.run_to_end(3, 2, layout=Layout((1, 0), ulysses=2))
    assert rank.slab.producer("latents", 3) == 0


def test_waiting_for_input_is_no_part_of_a_tasks_duration(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.publish("prompt", 1, rank.adapter.encode(JOB.spec), producer=1)
    condition, latents = rank.adapter.prepare(JOB.spec, Fields())
    rank.publish("condition", 2, condition, producer=2)
    looks_s: list[float] = []
    look = Slab.producer

    def noted(slab: Slab, name: str, version: int) -> int:
        looks_s.append(time.monotonic())
        return look(slab, name, version)

    monkeypatch.setattr(Slab, "producer", noted)
    rank.run(3, 2, producer=2)
    while len(looks_s) < 5:
        time.sleep(1e-4)
    published_s = time.monotonic()
    rank.publish("latents", 2, latents, producer=2)
    report = rank.answer()
    assert report.times.started_s >= published_s
    assert report.times.waited_s >= published_s - looks_s[0]


def test_bringing_input_is_no_part_of_a_tasks_duration(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched_s: list[float] = []

    def slowly(*arguments: Any) -> Fields:
        began_s = time.monotonic()
        time.sleep(0.02)
        fields = worker_jobs_fetch(*arguments)
        fetched_s.extend((began_s, time.monotonic()))
        return fields

    rank.publish("prompt", 1, rank.adapter.encode(JOB.spec), producer=1)
    condition, latents = rank.adapter.prepare(JOB.spec, Fields())
    rank.publish("condition", 2, condition, producer=2)
    rank.publish("latents", 2, latents, producer=2)
    worker_jobs_fetch = worker_jobs.fetch
    monkeypatch.setattr(worker_jobs, "fetch", slowly)
    report = rank.run_to_end(3, 2)
    assert len(fetched_s) == 6  # latents, prompt, condition
    assert report.times.started_s >= fetched_s[-1]
    assert report.times.moved_s >= fetched_s[-1] - fetched_s[0]
    assert report.times.waited_s <= report.times.started_s - report.times.moved_s


def meet(rank: Rank, monkeypatch: pytest.MonkeyPatch, *, late_s: float = 0.0) -> list[float]:
    """Let groups be entered alone, after a while; returns when that happened."""
    entered_s: list[float] = []

    def enter() -> None:
        began_s = time.monotonic()
        time.sleep(late_s)
        entered_s.extend((began_s, time.monotonic()))

    def group(_: Descriptor, *, timeout_s: float | None) -> SimpleNamespace:
        assert timeout_s == WAIT_S
        return SimpleNamespace(enter=enter)

    rank.device.endpoint = SimpleNamespace(group=group, abort_through=lambda _: None)
    monkeypatch.setattr(worker_device, "parallel_from", lambda group: None)
    return entered_s


def test_waiting_for_the_other_ranks_is_no_part_of_a_tasks_duration(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered_s = meet(rank, monkeypatch, late_s=0.02)
    rank.run_to_end(1, 0)
    rank.run_to_end(2, 1)
    report = rank.run_to_end(3, 2, layout=Layout((0, 1), ulysses=2))
    assert report.times.started_s >= entered_s[1]
    assert report.times.waited_s >= entered_s[1] - entered_s[0]


def test_what_the_user_can_mend_is_told_without_our_places() -> None:
    with pytest.raises(JobError) as caught:
        raise JobError(Problem.of("image", "fox.png", "cannot be read as a picture"))
    assert preparing.reason_of(caught.value) == "image = fox.png: cannot be read as a picture"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'torchsde'"), "ImportError: No module named 'torchsde'"),
        (UnicodeEncodeError("ascii", "\u00e4", 0, 1, "no"), "ValueError: 'ascii' codec can't encode"),
        (json.JSONDecodeError("Expecting value", "a fox", 0), "ValueError: Expecting value: line 1 column 1"),
        (type("OfOther", (TypeError,), {})("no"), "TypeError: no"),
        (KeyError("size"), "KeyError: 'size'"),
        (IndexError("out of range"), "IndexError: out of range"),
    ],
)
def test_a_reason_begins_with_the_kind_of_refusal(error: Exception, reason: str) -> None:
    found = preparing.reason_of(error)
    assert found.startswith(reason)
    assert found.startswith(job_record._REFUSED) is isinstance(error, REFUSALS)


def test_a_task_that_raises_is_a_fault_with_its_reason_and_the_worker_goes_on(rank: Rank) -> None:
    rank.run_to_end(1, 0)
    rank.run_to_end(2, 1)
    rank.adapter.fails_at = 0
    rank.run(3, 2)
    fault = rank.answer()
    assert isinstance(fault, TaskFault)
    assert (fault.number, fault.void) == (3, False)
    assert fault.reason.startswith("RuntimeError: out of luck (test_worker.py:")
    rank.adapter.fails_at = None
    rank.give_up(3)
    rank.run_to_end(4, 2, producer=2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_frames_made_of_nan_or_infinity_are_a_fault(rank: Rank, value: float) -> None:
    for index in range(JOB.trajectory.num_tasks - 1):
        rank.run_to_end(index + 1, index)
    rank.adapter.pixel_sum = value
    frames = os.memfd_create("frames")
    os.truncate(frames, 16 * 16 * 3)
    rank.channel.send(RunTask(7, "a", 6, 6, HERE, (1,)), (frames,))
    fault = rank.answer()
    assert isinstance(fault, TaskFault)
    assert fault.reason == "NaN or infinity in the frames; --vae-dtype float32 may help"
    rank.give_up(7)
    rank.run_to_end(8, 0)
    assert os.pread(frames, 1000, 0) == bytes(768)
    os.close(frames)


def test_what_a_task_made_sums_to_a_finite_number_only_if_all_of_it_is_finite() -> None:
    largest = torch.tensor([60_000.0, 60_000.0], dtype=torch.float16)
    made = {"prompt": Fields({"tokens": torch.tensor([2**40]), "embeds": largest}), "condition": Fields()}
    worker_jobs.require_finite(made, worker_jobs.sum_of(made))
    made["condition"] = Fields({"condition": torch.tensor([torch.inf, -torch.inf]).bfloat16()})
    with pytest.raises(ModelError, match="NaN or infinity in the prompt and condition"):
        worker_jobs.require_finite(made, worker_jobs.sum_of(made))
    assert worker_jobs.sum_of({"condition": Fields()}) is None


def test_of_latents_the_sample_alone_is_looked_at() -> None:
    made = {"latents": Fields({"sample": torch.ones(2), "last_sample": torch.tensor([torch.nan])})}
    assert worker_jobs.sum_of(made) == 2


def test_after_a_failure_nothing_starts_before_it_is_given_up(rank: Rank) -> None:
    """What comes next could take for its own what other ranks have sent for the failed task."""
    rank.run_to_end(1, 0)
    rank.run_to_end(2, 1)
    rank.adapter.fails_at = 0
    rank.run(3, 2)
    assert isinstance(rank.answer(), TaskFault)
    rank.adapter.fails_at = None
    rank.run(4, 2, producer=2)
    rank.channel.send(Ping())
    assert rank.answer() == Pong()
    rank.give_up(3)
    report = rank.answer()
    assert isinstance(report, TaskReport)
    assert report.number == 4


def test_who_waits_to_send_what_a_failed_task_was_to_make_goes_on(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    both = threading.Event()
    rank.device.endpoint = SimpleNamespace(abort_through=lambda _: None)

    def send(endpoint: Any, fields: Fields, transfers: Any, *, dispatch: int) -> None:
        sent.append(dispatch)
        both.set()

    monkeypatch.setattr(worker_jobs, "send_state", send)
    rank.run_to_end(1, 0)
    rank.run_to_end(2, 1)
    rank.adapter.fails_at = 0
    rank.channel.send(SendState(5, "a", 3, ()))
    rank.run(3, 2)
    assert isinstance(rank.answer(), TaskFault)
    rank.channel.send(SendState(6, "a", 2, ()))
    rank.channel.send(Ping())
    assert rank.answer() == Pong()
    assert not sent, "a later transfer takes the place of one that has not been given up yet"
    rank.channel.send(Abandon(frozenset({3, 5})))
    assert both.wait(ANSWER_S)
    assert sent == [6]


@pytest.mark.parametrize("message", [ForgetJob("a"), Reset()])
def test_who_waits_to_send_what_will_not_be_made_goes_on_when_the_job_is_forgotten(
    rank: Rank, message: Any
) -> None:
    """Later tasks of a GPU's rank wait until all that is due before them has been sent."""
    rank.channel.send(SendState(5, "a", 3, ()))
    rank.channel.send(Ping())
    assert rank.answer() == Pong()
    assert rank.dispatches._unsent.keys() == {5}
    rank.channel.send(message)
    with rank.dispatches._changed:
        assert rank.dispatches._changed.wait_for(lambda: not rank.dispatches.has_unsent, ANSWER_S)


def test_a_transfer_that_is_aborted_without_having_been_given_up_is_told(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort of a later dispatch ends it too; whoever waits for it would wait for ever."""
    rank.device.endpoint = SimpleNamespace(abort_through=lambda _: None)

    def send(endpoint: Any, fields: Fields, transfers: Any, *, dispatch: int) -> None:
        raise AbortedError("by the host")

    monkeypatch.setattr(worker_jobs, "send_state", send)
    rank.run_to_end(1, 0)
    rank.run_to_end(2, 1)
    rank.channel.send(SendState(3, "a", 2, ()))
    fault = rank.answer()
    assert isinstance(fault, TaskFault)
    assert (fault.number, fault.void) == (3, True)


def test_constants_that_the_task_before_makes_are_waited_for(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents from another rank may be there before its condition is."""
    arrived = threading.Event()

    def receive(*_: Any, **__: Any) -> Fields:
        arrived.set()
        return Fields({"latents": torch.zeros(1, 4, 1, 2, 2)})

    rank.device.endpoint = SimpleNamespace(recv=None, abort_through=lambda _: None)
    monkeypatch.setattr(worker_jobs, "receive_state", receive)
    latents = Fields({"latents": torch.zeros(1, 4, 1, 2, 2)})
    rank.publish("prompt", 1, Fields(), producer=1)
    rank.publish("condition", 2, Fields(), producer=1)  # of an attempt that failed
    worker_jobs.outline(rank.slab, "latents", 2, latents, producer=2)
    transfers = (Transfer(1, 0, "latents", 1, 0, 4, 64),)
    rank.channel.send(RunTask(3, "a", 2, 2, HERE, (1,), transfers, wait_s=WAIT_S))
    rank.channel.send(Ping())
    assert rank.answer() == Pong()
    assert not arrived.is_set()
    rank.publish("condition", 2, Fields(), producer=2)
    assert isinstance(rank.answer(), TaskReport)
    assert arrived.is_set()


def test_a_rank_that_waits_for_an_outline_leaves_when_it_is_given_up(rank: Rank) -> None:
    rank.publish("prompt", 1, Fields(), producer=1)
    rank.publish("condition", 2, Fields(), producer=2)
    transfers = (Transfer(1, 0, "latents", 1, 0, 4, 64),)
    rank.channel.send(RunTask(4, "a", 3, 3, HERE, (1,), transfers, wait_s=WAIT_S))
    rank.channel.send(Abandon(frozenset({3, 4})))
    assert rank.answer() == Abandoned(frozenset({3, 4}))


def test_latents_that_were_arriving_for_an_attempt_that_failed_are_not_used_by_the_next(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are only enqueued: with the attempt their arrival is aborted, and they never come."""
    garbage = Fields({"latents": torch.full((1, 4, 1, 2, 2), 5.0)})
    monkeypatch.setattr(worker_jobs, "receive_state", lambda *_, **__: garbage)
    rank.device.endpoint = SimpleNamespace(recv=None, abort_through=lambda _: None)
    rank.publish("prompt", 1, Fields(), producer=1)
    rank.publish("condition", 2, Fields(), producer=2)
    rank.publish("latents", 2, Fields({"latents": torch.zeros(1, 4, 1, 2, 2)}), producer=2)
    rank.adapter.fails_at = 0
    transfers = (Transfer(1, 0, "latents", 1, 0, 4, 64),)
    rank.channel.send(RunTask(3, "a", 2, 2, HERE, (1,), transfers, wait_s=WAIT_S))
    assert isinstance(rank.answer(), TaskFault)
    rank.adapter.fails_at = None
    rank.give_up(3)
    rank.run_to_end(4, 2, producer=2)
    assert float(worker_jobs.fetch(rank.slab, "latents", 3).tensors["latents"].sum()) == 16


def test_latents_of_a_dispatch_that_was_given_up_are_not_used(rank: Rank) -> None:
    """Its other rank failed: the next attempt starts from what the slab has."""
    rank.run_to_end(1, 0)
    rank.run_to_end(2, 1)
    rank.run_to_end(3, 2)
    rank.channel.send(Abandon(frozenset({3})))
    assert rank.answer() == Abandoned(frozenset({3}))
    assert rank.worker._jobs["a"].producer is None
    rank.run_to_end(4, 2, producer=2)
    assert float(worker_jobs.fetch(rank.slab, "latents", 3).tensors["latents"].sum()) == 16


def assert_another_prompt_is_used(rank: Rank) -> None:
    """After the first dispatch was given up and another rank has encoded."""
    rank.give_up(1)
    rank.publish("prompt", 1, Fields({"embeds": torch.full((1, 4, 8), 7.0)}), producer=2)
    rank.run_to_end(3, 1, producer=2)
    (prompt,) = rank.adapter.prompts
    assert prompt is not None
    assert bool((prompt == 7.0).all())


def test_a_prompt_of_a_dispatch_that_was_given_up_is_not_used(rank: Rank) -> None:
    rank.run_to_end(1, 0)
    assert_another_prompt_is_used(rank)


def test_a_prompt_of_a_dispatch_that_failed_after_its_launch_is_not_used(rank: Rank) -> None:
    rank.adapter.prompt = torch.nan
    rank.run(1, 0)
    fault = rank.answer()
    assert isinstance(fault, TaskFault)
    assert "NaN or infinity in the prompt" in fault.reason
    assert_another_prompt_is_used(rank)


def test_a_dispatch_that_waits_for_lost_input_is_left_without_a_report(rank: Rank) -> None:
    rank.run(3, 2, producer=2)
    while 3 not in rank.dispatches._inside:
        time.sleep(1e-4)
    rank.channel.send(Abandon(frozenset({3})))
    assert rank.answer() == Abandoned(frozenset({3}))
    rank.run_to_end(4, 0)


def test_a_worker_whose_control_plane_is_gone_leaves_what_would_never_end(rank: Rank) -> None:
    """Nobody would abort it any more, and it would keep its GPU and its memory for ever."""
    aborted: list[int] = []
    rank.device.endpoint = SimpleNamespace(abort_through=aborted.append)
    rank.run(3, 2, producer=2)  # its input never comes
    rank.run(4, 2, producer=2)
    while 3 not in rank.dispatches._inside:
        time.sleep(1e-4)
    rank.channel.close()
    while not (rank.dispatches._is_over and not rank.dispatches._inside):
        time.sleep(1e-4)
    assert aborted == [3]


def test_tasks_come_before_what_is_prepared_between_them(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part at a time; what fails is left out, and other models end it."""
    done: list[object] = []
    may_go_on = threading.Event()

    def parts(message: WarmUp) -> Iterator[None]:
        for part in range(2):
            assert may_go_on.wait(ANSWER_S)
            done.append((message.number, part))
            yield
        if message.number == 1:
            raise RuntimeError("out of luck")

    rank.device.warm_up = parts
    monkeypatch.setattr(
        rank.device, "run", lambda works, run=rank.device.run: (done.append("task"), run(works))
    )
    items = [WarmUp(number, JOB.spec, "fake") for number in (1, 2)]
    rank.channel.send(WarmUpLater(tuple(items)))
    while not rank.worker._preparation.later:
        time.sleep(0.001)
    rank.run(1, 0)
    may_go_on.set()
    assert isinstance(rank.answer(), TaskReport)
    while len(done) < 5:
        time.sleep(0.001)
    first = done.index("task")
    assert first <= 1, "a part that has begun ends, and the task comes next"
    assert done[:first] + done[first + 1 :] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    may_go_on.clear()
    rank.channel.send(WarmUpLater(tuple(items)))
    while not rank.worker._preparation.later:
        time.sleep(0.001)
    may_go_on.set()
    rank.channel.send(SetModels(("fake",)))
    assert isinstance(rank.answer(), ModelsSet)
    assert not rank.worker._preparation.later


@pytest.mark.parametrize(("rank", "warns"), [(0, True), (1, False)])
def test_one_rank_warns_of_the_files_that_all_read(monkeypatch, rank, warns):
    level = logging.getLogger("gfgen.models.loading").level
    found = []

    def make(*_):
        found.append(logging.getLogger("gfgen.models.loading").isEnabledFor(logging.WARNING))
        raise ValueError("enough")

    for name in ("leave_to_the_run", "keep_freed_memory"):
        monkeypatch.setattr(entry, name, lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        entry.run_worker(theirs, WorkerSettings(rank, (), RankSettings(num_ranks=2)), make)
    for name in ("loading", "stepping"):
        logging.getLogger(f"gfgen.models.{name}").setLevel(level)
    assert found == [warns]
