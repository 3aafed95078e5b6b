"""Recorded forwards: what a record is of, and that nothing of one rank's place is left in it.

What is recorded on a GPU is imitated (`ImitationRecorder`), and looked at as a trace of operators.
"""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import QwenImagePipeline, WanPipeline
from gfc_fake import FakeCluster
from gpu_worker_imitation import ImitationRecorder
from test_sequence_parallel import hooked, qwen_inputs, wan_inputs
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.shared_transformers import make
from gfgen.layout import Layout
from gfgen.models.fast import recording
from gfgen.models.fast.flux import fuse_flux, has_fused_blocks
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.kernels import using
from gfgen.models.fast.recording import Graphs
from gfgen.models.fast.texts import with_texts
from gfgen.models.parallel.parallel import Parallel, RehearsalGroup, parallel_from, rehearsal
from gfgen.models.parallel.sequence_parallel import active

torch.set_num_threads(1)

CPU = torch.device("cpu")
OF_PIPELINES = ("flux", "flux2", "ltx", "sd3")
"""`evaluation.RECORDABLE` in benchmarks/shared_transformers.py."""


@pytest.fixture(scope="module")
def wan(tiny_models: Mapping[str, Path]) -> Any:
    return hooked(WanPipeline, tiny_models["tiny-wan"]).transformer


@pytest.fixture(scope="module")
def qwen(tiny_models: Mapping[str, Path]) -> Any:
    return hooked(QwenImagePipeline, tiny_models["tiny-qwen-image"]).transformer


@pytest.fixture(scope="module")
def fused_wan(tiny_models: Mapping[str, Path]) -> Any:
    transformer = hooked(WanPipeline, tiny_models["tiny-wan"]).transformer
    fuse(transformer)
    return transformer


@pytest.fixture(scope="module")
def fused_qwen(tiny_models: Mapping[str, Path]) -> Any:
    transformer = hooked(QwenImagePipeline, tiny_models["tiny-qwen-image"]).transformer
    fuse(transformer)
    return transformer


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def place(ulysses: int, slot: int, *, ring: int = 1) -> Parallel:
    """One rank's view of a step of which nobody else has come."""
    size = ulysses * ring
    return Parallel(
        cfg=RehearsalGroup(1, 0, None),
        sequence=RehearsalGroup(size, slot, None),
        ulysses=RehearsalGroup(ulysses, slot % ulysses, None),
        ring=RehearsalGroup(ring, slot // ulysses, None),
    )


def recorded(
    of: Graphs, transformer: Any, inputs: Mapping[str, Any], parallel: Parallel, *, is_known: bool = True
) -> None:
    """Record alone; evaluate before, as a warm-up does, or not, as before steps with a new prompt."""
    if is_known:
        with active(rehearsal(parallel)):
            of(transformer, inputs)
    with active(rehearsal(parallel)), of.recording(parallel):
        of(transformer, inputs)


def record_alone(of: Graphs, transformer: Any, inputs: Mapping[str, Any]) -> None:
    of(transformer, inputs)
    with of.recording(None):
        of(transformer, inputs)


class ShortRecorder(ImitationRecorder):
    """It runs out of memory so many times."""

    num_short = 0

    def record(self, function: Any, parallel: Any) -> Any:
        if self.num_short:
            self.num_short -= 1
            raise torch.OutOfMemoryError("no memory for a graph")
        return super().record(function, parallel)


def other(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Of the same shapes."""
    return {name: x.flip(-1) if torch.is_tensor(x) and x.dim() > 1 else x for name, x in inputs.items()}


def on_ranks(size: int, program: Callable[[Parallel], torch.Tensor], *, ring: int = 1) -> list[torch.Tensor]:
    layout = Layout(tuple(range(size)), ulysses=size // ring, ring=ring)

    @torch.no_grad()
    def on_one(group: Any) -> torch.Tensor:
        torch.set_num_threads(1)
        return program(parallel_from(group))

    return FakeCluster().run(layout, on_one)


def evaluated(transformer: Any, inputs: Mapping[str, Any]) -> Callable[[Parallel], torch.Tensor]:
    def program(parallel: Parallel) -> torch.Tensor:
        with active(parallel):
            return recording.evaluate(transformer, inputs)

    return program


@pytest.mark.parametrize(("size", "ring"), [(2, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize(("model", "is_known"), [("wan", True), ("qwen", True), ("qwen", False)])
def test_record_made_in_one_slot_is_replayed_in_another(
    model: str, is_known: bool, size: int, ring: int, request: pytest.FixtureRequest
) -> None:
    transformer = request.getfixturevalue(model)
    inputs = wan_inputs() if model == "wan" else qwen_inputs(6)
    recorders = [ImitationRecorder() for _ in range(size)]

    def program(parallel: Parallel) -> torch.Tensor:
        slot = parallel.sequence.slot
        of = Graphs(recorders[slot], CPU)
        elsewhere = place(size // ring, (slot + 1) % size, ring=ring)
        recorded(of, transformer, inputs, elsewhere, is_known=is_known)
        with active(parallel):
            of(transformer, other(inputs))
            return of(transformer, inputs)

    wanted = on_ranks(size, evaluated(transformer, inputs), ring=ring)
    found = on_ranks(size, program, ring=ring)
    assert all(map(torch.equal, found, wanted))
    assert [(each.num_records, each.num_replays) for each in recorders] == [(1, 2)] * size


def test_a_record_over_peer_memory_is_not_replayed_over_main_memory(wan: Any) -> None:
    recorders = [ImitationRecorder() for _ in range(2)]

    def program(parallel: Parallel) -> torch.Tensor:
        of = Graphs(recorders[parallel.sequence.slot], CPU)
        recorded(of, wan, wan_inputs(), place(2, parallel.sequence.slot), is_known=True)
        parallel.sequence.is_far = True  # type: ignore[misc]
        with active(parallel):
            return of(wan, wan_inputs())

    found = on_ranks(2, program)
    assert all(map(torch.equal, found, on_ranks(2, evaluated(wan, wan_inputs()))))
    assert [(each.num_records, each.num_replays) for each in recorders] == [(1, 0)] * 2


def test_rank_alone_has_records_too(wan: Any) -> None:
    of = Graphs(recorder := ImitationRecorder(), CPU)
    record_alone(of, wan, wan_inputs())
    assert torch.equal(of(wan, other(wan_inputs())), recording.evaluate(wan, other(wan_inputs())))
    assert (recorder.num_records, recorder.num_replays) == (1, 1)


def traced(
    transformer: Any, inputs: Mapping[str, Any], parallel: Parallel, *, is_placed: bool
) -> tuple[str, tuple[int, ...]]:
    """The operators of a forward with all their numbers, and where the weights lie that they read."""
    slot_1 = torch.full((1,), parallel.sequence.slot) if is_placed else None

    def function(slot_1: torch.Tensor | None) -> torch.Tensor:
        with active(parallel, slot_1=slot_1):
            return recording.evaluate(transformer, inputs)

    graph = make_fx(function)(slot_1)
    reads = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
    return str(graph.code), tuple(x.data_ptr() for x in reads if isinstance(x, torch.nn.Parameter))


@pytest.mark.parametrize(
    ("model", "degrees", "slots"),
    [
        *[(model, (4, 1), (2, 3)) for model in ("wan", "qwen", "fused_wan", "fused_wan, image to video")],
        *[(model, (1, 2), (0, 1)) for model in ("wan", "qwen", "fused_wan")],
    ],
)
def test_launches_are_the_same_in_every_slot_with_equally_many_tokens(
    model: str, degrees: tuple[int, int], slots: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    fixture, _, has_image = model.partition(", ")
    transformer = request.getfixturevalue(fixture)
    # 18 and 12 tokens, on four ranks 4 for the last two slots and 3 for all.
    timestep = torch.tensor([[0.0] * 6 + [500.0] * 12]) if has_image else torch.tensor([500.0])
    inputs = qwen_inputs(8) if model == "qwen" else wan_inputs() | {"timestep": timestep}
    recording.evaluate(transformer, inputs)  # tables of positions are kept from the first forward on
    places = [place(degrees[0], slot, ring=degrees[1]) for slot in slots]
    with_slot = {traced(transformer, inputs, each, is_placed=True) for each in places}
    assert len(with_slot) == 1
    if model == "fused_wan" and degrees[1] == 1:  # else this would prove nothing; each takes a second
        without = {traced(transformer, inputs, each, is_placed=False) for each in places}
        assert len(without) == 2


@pytest.mark.parametrize("model", OF_PIPELINES)
def test_launches_of_what_pipelines_call_are_the_same_in_every_slot(model: str) -> None:
    """Of four ranks, two have equally many tokens. Nothing is read on the host."""
    transformer, inputs = make(model)
    if has_fused_blocks(transformer):
        fuse_flux(transformer)
    places = [place(4, slot) for slot in (1, 2)]
    with using("fused"):
        with_slot = {traced(transformer, inputs, each, is_placed=True) for each in places}
        make_fx(lambda given: recording.evaluate(transformer, given))(inputs)
    assert len(with_slot) == 1


def test_modulation_of_other_blocks_is_another_record(fused_qwen: Any) -> None:
    """Each rank computes that of its own blocks, from weights that no other rank reads."""
    inputs, places = qwen_inputs(8), [place(2, slot) for slot in (0, 1)]
    launches = {traced(fused_qwen, inputs, each, is_placed=True) for each in places}
    assert len(launches) == 2
    of = Graphs(ImitationRecorder(), CPU)
    for each in places:
        recorded(of, fused_qwen, inputs, each)
    assert len(of._records) == 2


def test_forwards_of_both_branches_are_recorded_by_the_lengths_of_their_texts(fused_qwen: Any) -> None:
    """Padded they have the same shape; attention leaves the padding out."""

    def both(text_tokens: int) -> Mapping[str, Any]:
        one, other = (qwen_inputs(number) for number in (6, text_tokens))
        texts = [each["encoder_hidden_states"] for each in (one, other)]
        return with_texts(one | {"attention_kwargs": {}}, texts)

    of = Graphs(recorder := ImitationRecorder(), CPU)
    record_alone(of, fused_qwen, both(4))
    assert torch.equal(of(fused_qwen, other(both(4))), recording.evaluate(fused_qwen, other(both(4))))
    assert (len(of._records), recorder.num_replays) == (1, 1)
    assert torch.equal(of(fused_qwen, both(5)), recording.evaluate(fused_qwen, both(5)))
    assert recorder.num_replays == 1


@pytest.mark.parametrize("size", [1, 2])
def test_new_text_is_recorded_without_an_evaluation(
    size: int, fused_qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once one with another text was: what a record launches is loaded."""
    evaluate, evaluations = recording.evaluate, list[Any]()
    monkeypatch.setattr(recording, "evaluate", lambda *call: evaluations.append(call) or evaluate(*call))
    of = Graphs(recorder := ImitationRecorder(), CPU)
    parallel = place(size, 0) if size > 1 else None
    for text_tokens, num_evaluations in ((6, 2), (7, 1), (9, 1), (7, 0)):
        evaluations.clear()
        with nullcontext() if parallel is None else active(rehearsal(parallel)), of.recording(parallel):
            of(fused_qwen, qwen_inputs(text_tokens))
        assert len(evaluations) == num_evaluations  # of which one is the recorder's
    assert len(of._records) == recorder.num_records == 3
    if parallel is None:
        assert torch.equal(of(fused_qwen, qwen_inputs(7)), evaluate(fused_qwen, qwen_inputs(7)))
        assert recorder.num_replays == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_new_text_that_cannot_be_recorded_at_once_is_evaluated_before(
    is_late: bool, fused_qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_late: what is not loaded shows when the forward has been captured, and not before."""
    loaded, evaluate = set[int](), recording.evaluate

    class Lazy(ImitationRecorder):
        is_recording = False
        num_failures = 0

        def record(self, function: Any, parallel: Any) -> Any:
            self.is_recording = True
            try:
                if is_late:
                    super().record(function, parallel)
                if not loaded:
                    self.num_failures += 1
                    raise RuntimeError("a kernel cannot be loaded now")
                return super().record(function, parallel)
            finally:
                self.is_recording = False

    def noted(transformer: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        if not recorder.is_recording:
            loaded.add(inputs["encoder_hidden_states"].shape[1])
        return evaluate(transformer, inputs)

    monkeypatch.setattr(recording, "evaluate", noted)
    of = Graphs(recorder := Lazy(), CPU)
    for text_tokens, num_failures in (
        (6, 0),
        (7, 1),
        (8, 1),
    ):  # not tried again: it would take time for every text
        loaded.clear()
        with of.recording(None):
            of(fused_qwen, qwen_inputs(text_tokens))
        assert loaded == {text_tokens}
        assert recorder.num_failures == num_failures
    assert len(of._records) == 3
    assert torch.equal(of(fused_qwen, qwen_inputs(7)), evaluate(fused_qwen, qwen_inputs(7)))
    assert recorder.num_replays == 1


def test_new_text_is_recorded_at_once_again_after_memory_was_short(fused_qwen: Any) -> None:
    of = Graphs(recorder := ShortRecorder(), CPU)
    record_alone(of, fused_qwen, qwen_inputs(6))
    recorder.num_short = 1
    record_alone(of, fused_qwen, qwen_inputs(7))
    with (
        patch.object(recording, "evaluate", side_effect=recording.evaluate) as evaluations,
        of.recording(None),
    ):
        of(fused_qwen, qwen_inputs(8))
    assert evaluations.call_count == 1  # the recorder's
    assert len(of._records) == 3


def test_other_lengths_of_shards_are_evaluated_before_they_are_recorded(wan: Any) -> None:
    """18 tokens on 4 ranks: 5, 5, 4, 4."""
    of = Graphs(ImitationRecorder(), CPU)
    for slot, num_evaluations in ((0, 2), (0, 0), (3, 2)):
        with patch.object(recording, "evaluate", side_effect=recording.evaluate) as evaluations:
            recorded(of, wan, wan_inputs(), place(4, slot), is_known=False)
        assert evaluations.call_count == num_evaluations


def test_record_keeps_the_positions_that_it_reads(fused_qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has them at hand for 128 sizes. What a capture computes is there after a replay only."""
    computed = type(fused_qwen.pos_embed)._compute_video_freqs
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        type(fused_qwen.pos_embed),
        "_compute_video_freqs",
        lambda *call: asked.append(call) or computed(*call),
    )

    class Recorder(ImitationRecorder):
        def record(self, function: Any, parallel: Any) -> Any:
            expected = weakref.ref(computed(*asked[-1]))
            asked.clear()
            recorded = super().record(function, parallel)
            assert [computed(*call) for call in asked] == [expected()]
            return recorded

    of = Graphs(Recorder(), CPU)
    record_alone(of, fused_qwen, qwen_inputs(6))
    read = weakref.ref(computed(*asked[-1]))
    for columns in range(200):
        computed(fused_qwen.pos_embed, 1, 1, columns + 1, 0, CPU)
    gc.collect()
    assert read() is not None
    of.clear()
    gc.collect()
    assert read() is None


def test_slots_of_other_lengths_are_other_records(wan: Any) -> None:
    """18 tokens on 4 ranks: 5, 5, 4, 4."""
    of = Graphs(recorder := ImitationRecorder(), CPU)
    for slot, num_records in ((0, 1), (1, 1), (2, 2), (3, 2)):
        recorded(of, wan, wan_inputs(), place(4, slot))
        assert (len(of._records), recorder.num_records) == (num_records, num_records)
    recorded(of, wan, wan_inputs(), place(2, 0))
    assert len(of._records) == 3


def test_launch_bound_forward_is_recorded_when_it_is_rehearsed(
    wan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU every forward is over when it is launched."""
    for bound, num_records in ((0.5, 1), (1.1, 0)):
        monkeypatch.setattr(recording, "WORTH_RECORDING", bound)
        of = Graphs(ImitationRecorder(), CPU)
        for _ in range(2):
            with of.rehearsing(None):
                result = of(wan, wan_inputs())
            assert result.shape == wan_inputs()["hidden_states"].shape
        assert len(of._records) == num_records


def test_rehearsal_pushes_no_record_out(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has the most work is warmed up first."""
    monkeypatch.setattr(recording, "MAX_RECORDS", 1)
    of = Graphs(recorder := ImitationRecorder(), CPU)
    for text_tokens in (5, 6):
        with of.rehearsing(None):
            of(qwen, qwen_inputs(text_tokens))
    of(qwen, qwen_inputs(6))
    assert recorder.num_replays == 0
    of(qwen, qwen_inputs(5))
    assert (len(of._records), recorder.num_replays) == (1, 1)


class SlowDevice(ImitationRecorder):
    """A block is launched for a second, the first one for nine, and computes for some time after that."""

    def __init__(self, transformer: Any, monkeypatch: pytest.MonkeyPatch, *computes_s: float) -> None:
        super().__init__()
        self.now_s, self._is_under_way = 0.0, False
        self._computes_s = iter(computes_s)
        self.num_blocks = 0
        monkeypatch.setattr(recording, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        for block in transformer.blocks:
            monkeypatch.setattr(block, "forward", self._launched(block.forward))

    def _launched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any, **options: Any) -> Any:
            self.now_s += 1.0 if self.num_blocks else 9.0
            self.num_blocks += 1
            self._is_under_way = True
            return forward(*inputs, **options)

        return call

    def synchronize(self) -> None:
        if self._is_under_way:
            self.now_s += next(self._computes_s, 0.0)
        self._is_under_way = False


@pytest.fixture
def deep_wan(wan: Any) -> Any:
    """Of eight blocks."""
    deep = copy.deepcopy(wan)
    deep.blocks.extend(copy.deepcopy(wan.blocks[-1]) for _ in range(8 - len(wan.blocks)))
    return deep


@pytest.mark.parametrize(
    ("computes_s", "num_records"),
    [
        ((99.0, 0.4, 0.4, 0.4, 0.4, 0.4), 1),  # what the first block loads does not count
        ((0.0, 0.6, 0.6, 0.6, 0.6, 0.6), 0),
        ((0.0, 0.0, 0.0, 0.0, 0.6, 0.6), 0),  # nor launches that were held up
        ((0.0, 99.0, 0.4, 0.4, 0.4, 0.4), 1),  # nor one device that was
    ],
)
def test_lower_quartile_of_a_few_blocks_decides_whether_forwards_are_recorded(
    deep_wan: Any, monkeypatch: pytest.MonkeyPatch, computes_s: tuple[float, ...], num_records: int
) -> None:
    of = Graphs(SlowDevice(deep_wan, monkeypatch, *computes_s), CPU)
    for _ in range(2):
        with of.rehearsing(None):
            of(deep_wan, wan_inputs())
    assert len(of._records) == num_records
    assert not any(block._forward_hooks for block in deep_wan.blocks[1:7])


def test_forward_that_is_not_worth_a_record_ends_after_a_few_blocks_where_a_step_waits(
    deep_wan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured once; another text of the same shape changes nothing."""
    device = SlowDevice(deep_wan, monkeypatch, *[3.0] * 99)
    of = Graphs(device, CPU)
    for num_blocks in (1 + recording.TIMED_BLOCKS, 1 + recording.TIMED_BLOCKS):
        with pytest.raises(recording.NotWorthRecordingError), of.recording(None):
            of(deep_wan, wan_inputs())
        assert device.num_blocks == num_blocks
    assert len(of._records) == 0
    of.forget()
    with pytest.raises(recording.NotWorthRecordingError), of.recording(None):
        of(deep_wan, wan_inputs())
    assert device.num_blocks == 2 * (1 + recording.TIMED_BLOCKS)


def test_decision_for_one_text_and_slot_is_one_for_all(
    fused_qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Graphs(ImitationRecorder(), CPU)
    recorded(of, fused_qwen, qwen_inputs(6), place(2, 0))
    monkeypatch.setattr(recording, "WORTH_RECORDING", 1.1)
    recorded(of, fused_qwen, qwen_inputs(9), place(2, 1))
    assert len(of._records) == 2
    with pytest.raises(recording.NotWorthRecordingError):
        recorded(of, fused_qwen, qwen_inputs(6), place(4, 0))


def test_ranks_with_a_record_and_without_begin_a_shared_forward_at_the_same_place(wan: Any) -> None:
    """Else a replay would bring its banks to where they were in the recording, and launches would not."""
    parallel = place(2, 0)
    recorder = ImitationRecorder()
    of = Graphs(recorder, CPU)
    with active(parallel):
        of(wan, wan_inputs())
    assert (recorder.num_aligned, recorder.num_replays) == (1, 0)
    recorded(of, wan, wan_inputs(), parallel, is_known=False)
    assert recorder.num_aligned == 1  # nobody else has come
    with active(parallel):
        of(wan, wan_inputs())
    assert (recorder.num_aligned, recorder.num_replays) == (2, 1)
    of(wan, wan_inputs())
    assert recorder.num_aligned == 2


def test_record_is_of_no_use_when_weights_have_moved(wan: Any) -> None:
    of = Graphs(recorder := ImitationRecorder(), CPU)
    record_alone(of, wan, wan_inputs())
    weight = next(wan.parameters())
    weight.data = weight.data.clone()
    assert torch.equal(of(wan, wan_inputs()), recording.evaluate(wan, wan_inputs()))
    assert (recorder.num_replays, len(of._records)) == (0, 0)


class Doubling(torch.nn.Module):
    """A transformer of next to nothing."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        return ((self.factor * x).repeat(int(self.factor)),)


def test_nothing_is_known_of_a_transformer_that_lies_where_another_one_lay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models that take turns get each other's memory, and with it the ids of their transformers."""
    monkeypatch.setattr(recording, "id", lambda _: 7, raising=False)
    of = Graphs(recorder := ImitationRecorder(), CPU)
    inputs = {"x": torch.ones(3)}
    record_alone(of, Doubling(2.0), inputs)
    second = Doubling(3.0)
    with of.rehearsing(None):
        assert of(second, inputs).shape == (9,)
    assert torch.equal(of(second, inputs), torch.full((9,), 3.0))
    assert recorder.num_records == 2


def test_what_was_seen_of_forwards_is_forgotten_with_their_models(wan: Any) -> None:
    """What could not be recorded beside other models is tried again."""
    of = Graphs(recorder := ShortRecorder(), CPU)
    recorder.num_short = 1
    record_alone(of, wan, wan_inputs())
    record_alone(of, wan, wan_inputs())
    assert len(of._records) == 0
    of.forget()
    record_alone(of, wan, wan_inputs())
    assert len(of._records) == 1


def test_what_cannot_be_recorded_is_evaluated(wan: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ImitationRecorder):
        def record(self, function: Any, parallel: Any) -> Any:
            self.num_records += 1
            raise torch.OutOfMemoryError("no memory for a graph")

    of = Graphs(broken := Broken(), CPU)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorded(of, wan, wan_inputs(), place(2, 0))
        assert (len(of._records), broken.num_records) == (0, 1)
        recorded(of, wan, wan_inputs(), place(4, 0))
    assert (len(of._records), broken.num_records) == (0, 2)
    assert caplog.text.count("no memory for a graph") == 1
    assert torch.equal(of(wan, wan_inputs()), recording.evaluate(wan, wan_inputs()))


def test_nothing_is_recorded_where_memory_is_short(wan: Any) -> None:
    class Short(ImitationRecorder):
        def has_room(self) -> bool:
            return False

    of = Graphs(Short(), CPU)
    with pytest.raises(recording.NotWorthRecordingError):
        recorded(of, wan, wan_inputs(), place(2, 0))
    with of.rehearsing(None):
        of(wan, wan_inputs())
    assert len(of._records) == 0


def test_least_recently_used_record_goes_first(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_RECORDS", 2)
    of = Graphs(recorder := ImitationRecorder(), CPU)

    def record(text_tokens: int) -> None:
        record_alone(of, qwen, qwen_inputs(text_tokens))

    record(5)
    record(6)
    of(qwen, qwen_inputs(5))
    record(7)
    before = recorder.num_replays
    for text_tokens in (5, 6, 7):
        of(qwen, qwen_inputs(text_tokens))
    assert (len(of._records), recorder.num_replays - before) == (2, 2)
    of.clear()
    assert len(of._records) == 0
