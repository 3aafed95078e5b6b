"""Forwards of transformers recorded once, and replayed with other inputs, on any ranks.

If launching kernels one by one takes about as long as computing, all launches of a forward become one (on
GPUs a CUDA graph). A record is for one transformer, the shapes of its inputs, degrees and local shard
lengths. It reads the ranks that share a replay, and the slot of this rank, from memory (gfc/cuda/captured.py,
`Sharing.positions_L`).

One measurement decides for each shape and degree whether forwards are recorded: the first evaluation times a
few blocks, each by itself. Each rank measures for itself, so some ranks may replay a forward that others
launch. Their exchanges are the same, and start at the same bank (`LaunchRecorder.align`).

Recording runs no kernel and involves no other rank. Callers of `rehearsing` and `recording` make sure that no
kernel waits for another rank meanwhile, and that the ranks of the record have not been entered. All kernels
have been loaded before: by an evaluation, or a record in the same slot with another length of text.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gfgen.errors import in_one_line
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Degrees
from gfgen.models.fast.evaluation import evaluate
from gfgen.models.fast.kernels import present_choice
from gfgen.models.fast.linears import Modulation
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.plans import TEXT
from gfgen.models.parallel.sequence_parallel import Sharing, active, present_sharing
from gfgen.models.streaming.stream import stream_of

logger = logging.getLogger(__name__)

MAX_RECORDS = 64
"""The least recently used record goes first. If prompts are not padded, each length has its own record, so
jobs make new ones all the time."""
OF_ATTENTION = "attention_kwargs"
OF_TEXT = (TEXT, OF_ATTENTION)
"""Inputs that depend on the length of a text: embeddings, and lengths where texts are padded (texts.py)."""
WORTH_RECORDING = 0.65
"""Forwards are recorded if the launches of a block take at least this share of its time. Below it records
gain next to nothing: on an H200 a forward of 832x480x49, with a share of about 0.45, took 92.2 ms as a graph
and 93.5 launched; one of 1024x1024, with 0.5, 123.7 both (benchmarks/results/forward.md). The
bound lies below 1 because ranks that share a forward wait for each other's launches, too."""
TIMED_BLOCKS = 5
"""The lower quartile of these counts: other processes hold launches up, in a first run those that compile,
and rarely the device. The first block is not timed, because it loads what all of them launch."""


class NotWorthRecordingError(Exception):
    """A forward is launched kernel by kernel: it computes longer than it is launched, or memory is short."""


Replay = Callable[[Parallel | None], Tensor]
"""Launches what was recorded among these ranks; the next replay overwrites the result."""


class LaunchRecorder(Protocol):
    """Records what functions launch."""

    def record(self, function: Callable[[Parallel | None], Tensor], parallel: Parallel | None) -> Replay:
        """What the function launches on these ranks, which have not been entered. Runs nothing."""

    def align(self, parallel: Parallel) -> None:
        """Before a forward that these ranks share: select the bank with which recorded forwards begin."""

    def has_room(self) -> bool:
        """Whether enough memory is left for another record."""

    def synchronize(self) -> None:
        """Wait for all launched work."""


class _ForwardCall(NamedTuple):
    """A transformer and its inputs, except the values of tensors."""

    life: int
    """Number of the transformer (`Graphs._lives`)."""
    inputs: tuple[object, ...]
    text: tuple[object, ...]
    text_names: tuple[str, ...]
    """Names of the attention arguments that hold the text's length."""
    degrees: Degrees | None
    runs_beside: bool = False
    """Whether changes of weights run beside layers, which a record would keep from job to job."""


_Handler = Callable[[_ForwardCall, Any, Mapping[str, Any]], bool]
"""Gets a forward ready; False if it should be tried again."""


class _KnownForward(NamedTuple):
    """What an evaluation or recording has shown about all equal calls."""

    stream_lengths: Mapping[str, int]
    result: Tensor


@dataclass(slots=True)
class _ForwardRecord:
    """A recorded forward and the memory that it reads."""

    recorded: Replay
    inputs: Mapping[str, Any]
    slot_1: Tensor
    transformer: weakref.ref[Any]
    addresses: tuple[tuple[Tensor, int], ...]
    tables: object
    """Other tensors that it reads, kept alive."""
    slot: int | None = None

    def is_of(self, transformer: Any) -> bool:
        """Whether it reads this transformer's weights at their present addresses."""
        has_moved = any(weight.data_ptr() != address for weight, address in self.addresses)
        return self.transformer() is transformer and not has_moved

    def replay(self, inputs: Mapping[str, Any], sharing: Sharing | None) -> Tensor:
        for given, read in zip(tree_leaves(dict(inputs)), tree_leaves(self.inputs), strict=True):
            if isinstance(given, Tensor):
                read.copy_(given)
        if sharing is not None and sharing.ranks.slot != self.slot:
            self.slot = sharing.ranks.slot
            self.slot_1.fill_(self.slot)
        return self.recorded(None if sharing is None else sharing.parallel).clone()


class Graphs:
    """Evaluates transformers (an `evaluation.Evaluator`), with a record if there is one.

    For one thread. Records are dropped with their transformer; call `clear` before you move its weights.
    """

    def __init__(self, recorder: LaunchRecorder, device: torch.device, *, may_record: bool = True) -> None:
        self._recorder, self._device = recorder, device
        self.may_record = may_record
        self.num_gone = 0
        """Records that were dropped while their models stayed."""
        self._records: OrderedDict[object, _ForwardRecord] = OrderedDict()
        self._known: dict[_ForwardCall, _KnownForward] = {}
        self._is_worth: dict[object, bool] = {}
        self._are_loaded: dict[object, bool] = {}
        """By call with any text, and slot: whether it may be recorded at once, since one like it was."""
        self._ready: set[object] = set()
        """Forwards that need nothing more: they are recorded, or never will be."""
        self.num_replays = 0
        self._has_warned = False
        self._lives: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """A unique number for each transformer; an `id` may occur again later."""
        self._next_life = itertools.count()
        self._mode: _Handler | None = None
        self._unentered: Parallel | None = None

    def __call__(self, transformer: Any, inputs: Mapping[str, Any]) -> Tensor:
        sharing = present_sharing()
        call = self._call(transformer, inputs, sharing)
        if self._mode is not None:
            is_ready = call in self._known and self._key(call, transformer, sharing) in self._ready
            if not is_ready and self._mode(call, transformer, inputs):
                self._ready.add(self._key(call, transformer, sharing))
            return torch.zeros_like(self._known[call].result, device=self._device)
        if sharing is not None:
            self._recorder.align(sharing.parallel)
        record = self._record_of(call, transformer, sharing)
        if record is None:
            return self._evaluate(call, transformer, inputs)
        self.num_replays += 1
        return record.replay(inputs, sharing)

    def rehearsing(self, unentered: Parallel | None) -> AbstractContextManager[None]:
        """Inside, this rank alone evaluates each forward, and records it if it is launch-bound.

        It drops no existing record. Results are meaningless. `unentered` are the ranks of a record; call the
        forwards themselves on `rehearsal(unentered)`.
        """
        return self._in_mode(self._rehearse, unentered)

    def recording(self, unentered: Parallel | None) -> AbstractContextManager[None]:
        """As `rehearsing`, while a step waits: it evaluates as little as possible.

        Raises: NotWorthRecordingError at the first forward that is not recorded.
        """
        return self._in_mode(self._record_now, unentered)

    def clear(self) -> None:
        for key in list(self._records):
            self._drop(key)

    def forget(self) -> None:
        """Drop all records and all knowledge of forwards, before models are unloaded."""
        for known in (self._records, self._known, self._is_worth, self._are_loaded, self._ready):
            known.clear()

    @contextmanager
    def _in_mode(self, mode: _Handler, unentered: Parallel | None) -> Iterator[None]:
        self._mode, self._unentered = mode, unentered
        try:
            yield
        finally:
            self._mode = self._unentered = None

    def _drop(self, key: object) -> None:
        del self._records[key]
        self._ready.discard(key)
        self.num_gone += 1

    def _rehearse(self, call: _ForwardCall, transformer: Any, inputs: Mapping[str, Any]) -> bool:
        if not self._is_worth_recording(call, transformer, inputs):
            return True
        if len(self._records) >= MAX_RECORDS or not self._recorder.has_room():
            return False
        self._record(call, transformer, inputs, is_loaded=present_sharing() is None)
        return True

    def _record_now(self, call: _ForwardCall, transformer: Any, inputs: Mapping[str, Any]) -> bool:
        sharing = present_sharing()
        may_be_worth = self._may_be(transformer) and self._is_worth.get(_with_any_text(call), True)
        if not may_be_worth or not self._recorder.has_room():
            raise NotWorthRecordingError
        if not self._record_at_once(call, transformer, inputs):
            # As a record does, so that its kernels are loaded.
            with active(None if sharing is None else sharing.parallel, slot_1=self._new_slot()):
                self._is_worth_recording(call, transformer, inputs, is_hasty=True)
            self._record(call, transformer, inputs, is_loaded=True)
        return True

    def _may_be(self, transformer: Any) -> bool:
        """Whether forwards may be recorded: not with streamed blocks, whose reads hide the launches."""
        return self.may_record and stream_of(transformer) is None

    def _is_worth_recording(
        self, call: _ForwardCall, transformer: Any, inputs: Mapping[str, Any], *, is_hasty: bool = False
    ) -> bool:
        """Evaluate; whether such forwards are recorded, which is measured now if it was not before.

        is_hasty: end the evaluation, with NotWorthRecordingError, when it is clear that they are not.
        """
        alike = _with_any_text(call)
        may_be = self._may_be(transformer)
        if not may_be or alike in self._is_worth:
            self._evaluate(call, transformer, inputs)
            return may_be and self._is_worth[alike]

        def decide(launch_share: float) -> None:
            self._is_worth[alike] = launch_share >= WORTH_RECORDING
            if is_hasty and not self._is_worth[alike]:
                raise NotWorthRecordingError

        with _timed_blocks(transformer, self._recorder.synchronize, decide):
            self._evaluate(call, transformer, inputs)
        return self._is_worth.setdefault(alike, False)

    def _evaluate(self, call: _ForwardCall, transformer: Any, inputs: Mapping[str, Any]) -> Tensor:
        result = evaluate(transformer, inputs)
        sharing = present_sharing()
        lengths = {} if sharing is None else dict(sharing.stream_lengths)
        self._known[call] = _KnownForward(lengths, torch.empty_like(result, device="meta"))
        return result

    def _new_slot(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64, device=self._device)

    def _record_at_once(self, call: _ForwardCall, transformer: Any, inputs: Mapping[str, Any]) -> bool:
        """Record without an evaluation before, if kernels are loaded; whether it worked."""
        alike = _whatever_the_text(call, present_sharing())
        if not self._are_loaded.get(alike) or present_choice() == "compiled":  # for each length
            return False
        try:
            self._make(call, transformer, inputs)
        except Exception as error:
            self._are_loaded[alike] = isinstance(error, torch.OutOfMemoryError)  # which has other reasons
            logger.debug("a forward with a new text cannot be recorded at once: %s", in_one_line(error))
            return False
        return True

    def _record(
        self, call: _ForwardCall, transformer: Any, inputs: Mapping[str, Any], *, is_loaded: bool
    ) -> None:
        """is_loaded: every kernel of the record was launched before."""
        sharing = present_sharing()
        try:
            if sharing is not None and not is_loaded:
                with active(sharing.parallel, slot_1=self._new_slot()):
                    evaluate(transformer, inputs)
            self._make(call, transformer, inputs)
        except Exception as error:
            level = logging.DEBUG if self._has_warned else logging.WARNING  # if one cannot be, many cannot
            self._has_warned = True
            text = "a forward cannot be recorded, and is launched kernel by kernel: %s"
            logger.log(level, text, in_one_line(error))
            return
        self._are_loaded.setdefault(_whatever_the_text(call, sharing), True)

    def _make(self, call: _ForwardCall, transformer: Any, inputs: Mapping[str, Any]) -> None:
        """Make a record and keep it as long as the transformer, while it is among the last ones used."""
        kept = tree_map_only(Tensor, torch.clone, dict(inputs))
        slot_1 = self._new_slot()
        tables = _tables_of_positions(transformer, inputs)

        def function(parallel: Parallel | None) -> Tensor:
            with active(parallel, slot_1=slot_1):
                return self._evaluate(call, transformer, kept)

        sharing = present_sharing()
        recorded = self._recorder.record(function, None if sharing is None else self._unentered)
        key = self._key(call, transformer, sharing)
        weights = tuple(transformer.parameters())
        addresses = tuple((weight, weight.data_ptr()) for weight in (weights[0], weights[-1]))
        of = weakref.ref(transformer, lambda _: self._records.pop(key, None))
        self._records[key] = _ForwardRecord(recorded, kept, slot_1, of, addresses, tables)
        while len(self._records) > MAX_RECORDS:
            self._drop(next(iter(self._records)))

    def _record_of(
        self, call: _ForwardCall, transformer: Any, sharing: Sharing | None
    ) -> _ForwardRecord | None:
        if call not in self._known:
            return None
        key = self._key(call, transformer, sharing)
        record = self._records.get(key)
        if record is None:
            return None
        if not record.is_of(transformer):
            self._drop(key)
            return None
        self._records.move_to_end(key)
        return record

    def _call(self, transformer: Any, inputs: Mapping[str, Any], sharing: Sharing | None) -> _ForwardCall:
        if transformer not in self._lives:
            self._lives[transformer] = next(self._next_life)
        kinds = {name: _kind_of(x) for name, x in inputs.items()}
        text = tuple(kinds.pop(name, None) for name in OF_TEXT)
        names = tuple(inputs.get(OF_ATTENTION) or ())
        degrees = None if sharing is None else sharing.parallel.degrees
        is_changed = getattr(transformer, "runs_beside", False)
        call = _ForwardCall(self._lives[transformer], tuple(kinds.items()), text, names, degrees, is_changed)
        if is_changed:
            self._is_worth[_with_any_text(call)] = False
        return call

    def _key(self, call: _ForwardCall, transformer: Any, sharing: Sharing | None) -> object:
        """What determines the launches of a forward, whichever ranks share it."""
        if sharing is None:
            return call
        parallel, sequence = sharing.parallel, sharing.ranks
        shards = [shard_sizes(length, sequence.size) for length in self._known[call].stream_lengths.values()]
        first = sequence.slot - parallel.ulysses.slot
        together = [sum(lengths) for lengths in zip(*shards, strict=True)]
        group = tuple(together[first : first + parallel.ulysses.size])
        heads = shard_sizes(transformer.config.num_attention_heads, parallel.ulysses.size)
        own = tuple(sizes[sequence.slot] for sizes in shards)
        # A rank's part of the modulation is that of its slot: it goes through other weights. In a torus,
        # places of the own heads and tokens in tensors follow from the slot.
        is_modulated = isinstance(getattr(transformer, "modulation", None), Modulation)
        slot = sequence.slot if is_modulated or parallel.torus.size > 1 else None
        links = tuple(each.is_far for each in (sequence, parallel.ulysses, parallel.ring, parallel.torus))
        return call, own, group, heads[parallel.ulysses.slot], slot, links


def _with_any_text(call: _ForwardCall) -> object:
    """What determines the times of a forward: the length of its text hardly counts."""
    return call._replace(text=())


def _whatever_the_text(call: _ForwardCall, sharing: Sharing | None) -> object:
    """What determines the kernels of a forward, without the length of its text."""
    return _with_any_text(call), None if sharing is None else sharing.ranks.slot


@contextmanager
def _timed_blocks(
    transformer: Any, synchronize: Callable[[], None], decide: Callable[[float], None]
) -> Iterator[None]:
    """Inside, a forward ends in `decide`, with the share of a block's time that its launches take.

    `decide` is called when the last timed block is done. Of blocks that differ, as a UNet's do, all count.
    """
    lists = [child for child in transformer.children() if isinstance(child, torch.nn.ModuleList)]
    blocks = list(max(lists, key=len, default=[transformer]))
    timed = blocks[1 : 1 + TIMED_BLOCKS] or blocks
    times_s: list[tuple[float, float]] = []
    began_s = 0.0

    def before(*_: object) -> None:
        nonlocal began_s
        synchronize()
        began_s = time.monotonic()

    def after(*_: object) -> None:
        launched_s = time.monotonic()
        synchronize()
        done_s = time.monotonic()
        times_s.append((launched_s - began_s, max(done_s - began_s, 1e-9)))
        if len(times_s) < len(timed):
            return
        shares = sorted(launching / whole for launching, whole in times_s)
        if len(set(map(type, blocks))) > 1:
            shares = [sum(launching for launching, _ in times_s) / sum(whole for _, whole in times_s)]
        decide(shares[len(shares) // 4])

    hooks = [block.register_forward_pre_hook(before) for block in timed]
    hooks += [block.register_forward_hook(after) for block in timed]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kind_of(x: object) -> object:
    """What a forward's launches depend on in an input."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    if isinstance(x, Mapping):
        return tuple((name, _kind_of(value)) for name, value in x.items())
    return tuple(map(_kind_of, x)) if isinstance(x, (list, tuple)) else repr(x)


def _tables_of_positions(transformer: Any, inputs: Mapping[str, Any]) -> object:
    """Qwen-Image's tables of positions, which forwards read in addition to weights and inputs.

    They are computed before recording, since one that is computed inside a recording is filled only by its
    first replay, and other forwards read it, too. A record keeps them, since the model keeps those of the
    last sizes only.
    """
    embedding = getattr(transformer, "pos_embed", None)
    if not isinstance(embedding, QwenEmbedRope):
        return None
    (grids,), device = inputs["img_shapes"], inputs["hidden_states"].device
    return [embedding._compute_video_freqs(*grid, idx, device) for idx, grid in enumerate(grids)]
