"""LoRAs merged into the weights of a pipeline's models, and taken out again.

A file's tensors are matched with parameters of the models (reading.py), and each match becomes a change of
one parameter. The base weights of changed layers are kept on the device, or in host memory where the device
has no room for them (session/loras.py). A switch writes base weight plus change to the model's weight in
place, so recorded forwards stay valid. Nothing is subtracted, so a model without LoRAs has the bits that it
was loaded with. Layers in 8 bits get the sum quantised; their base weights are read from the checkpoint when
a LoRA first changes them, and at each change if they are streamed. Linear layers of GGUF models keep their
weights, and changes run beside them: `W x + scale * B (A x)`, as peft computes it without `fuse_lora`.

Results equal `load_lora_weights`, `set_adapters` and `fuse_lora`: bitwise in fp32 on a CPU. Where diffusers
leaves out what a file's format defines, they equal those of the file rewritten to names that it reads.
Source: diffusers 0.42 loaders/lora_base.py and peft.py, peft 0.21 tuners/lora/layer.py, tuners/lokr/layer.py.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gfgen.errors import ModelError
from gfgen.job.images import lora_sha256
from gfgen.job.spec import JobSpec, Patch
from gfgen.models.loading.random_weights import StoredWeights
from gfgen.models.lora.accounting import KEPT_FILES, Placed
from gfgen.models.lora.reading import (
    Content,
    FixedWeight,
    QuantisedRows,
    components_of,
    original_weights,
    read_lora,
)
from gfgen.models.streaming.stream import Chain, stream_of

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 30
"""Size of a block of pinned memory for several weights; torch rounds each allocation to a power of two."""
_ALIGNMENT = 64


class MergedLoras:
    """The LoRAs that a pipeline's models contain. For one thread.

    `changed` is called with each model whose weights have changed.
    """

    def __init__(self, pipeline: Any, *, changed: Callable[[nn.Module], None] = lambda model: None) -> None:
        self.pipeline = pipeline
        self._changed = changed
        self._components = components_of(pipeline)
        self.keeps_on_host = False
        """Whether host memory has the base weights of changed layers; set before the first job."""
        self.stored: StoredWeights | None = None
        """Where the base weights of layers in 8 bits are; set before the first job of such a model."""
        self._models: dict[str, _Model] = {}
        self._merged: dict[str, tuple[object, ...]] = {}
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        """By the file's hash; the last used come last."""
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="lora-hash")
        """Hashing a file takes longer than reading and merging it, so it runs at the same time."""

    def merge(self, spec: JobSpec) -> None:
        """Give the models the LoRAs of a job, and no others.

        Raises: ModelError for a file that does not fit the model.
        """
        for component in self._components:
            own = [patch for patch in spec.patches if patch.target in (None, component)]
            wanted = tuple((patch.sha256, patch.scale) for patch in own)
            if wanted != self._merged.get(component, ()):
                self._merged[component] = ("being changed",)  # if that fails, the next job starts anew
                self._set(component, own)
                self._confirm(own)
                self._merged[component] = wanted
                self._changed(getattr(self.pipeline, component))

    def take_out(self) -> None:
        """Give the models their original weights, and keep nothing for the next job."""
        for component in [each for each, merged in self._merged.items() if merged]:
            self._set(component, ())
            self._changed(getattr(self.pipeline, component))
        for known in (self._merged, self._models, self._loaded):
            known.clear()

    def _set(self, component: str, patches: Sequence[Patch]) -> None:
        wanted: dict[str, list[tuple[_Change, float]]] = {}
        for patch in patches:
            for change in self._changes(patch, component):
                wanted.setdefault(change.parameter, []).append((change, patch.scale))
        self._model(component).set(wanted)

    def _model(self, component: str) -> _Model:
        if component not in self._models:
            model = getattr(self.pipeline, component)
            read = None if self.stored is None else partial(self.stored.read, component)
            self._models[component] = _Model(model, keeps_on_host=self.keeps_on_host, read=read)
        return self._models[component]

    def _changes(self, patch: Patch, component: str) -> Sequence[_Change]:
        """What a LoRA changes in a model. It is read first if need be."""
        if (loaded := self._loaded.get(patch.sha256)) is None:
            checked = self._hashing.submit(_check_content, patch)
            weights = {name: self._model(name).weights for name in self._components}
            shapes = {
                f"{one}.{name}": list(x.shape) for one, own in weights.items() for name, x in own.items()
            }
            try:
                content = read_lora(Path(patch.path), self.pipeline, shapes)
                loaded = _Loaded(content.lacking, changes_of(content, weights), checked)
            except Exception:
                checked.result()  # a file that has changed is why it cannot be read
                raise
            self._loaded[patch.sha256] = loaded
        if loaded.lacking and not patch.is_partial:
            raise ModelError(loaded.lacking)
        self._loaded.move_to_end(patch.sha256)
        while len(self._loaded) > KEPT_FILES:
            self._loaded.popitem(last=False)
        return loaded.changes.get(component, ())

    def _confirm(self, patches: Sequence[Patch]) -> None:
        """Raises: ModelError if one of the files is not that of admission; it is read again next time."""
        for patch in patches:
            try:
                self._loaded[patch.sha256].checked.result()
            except ModelError:
                del self._loaded[patch.sha256]
                raise


@dataclass(frozen=True, slots=True)
class _Loaded:
    lacking: str | None
    changes: Mapping[str, Sequence[_Change]]
    checked: Future[None]
    """Fails if the file that was read is not that of admission."""


class _Model:
    """A model's weights, and the original values of those that were ever changed.

    Streamed weights have their original values after each read, and are changed then. Those in 8 bits are
    changed once, in copies of their blocks, and nothing is kept of the original values.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        keeps_on_host: bool = False,
        read: Callable[..., Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self._model = model
        self._read = read
        self._host = _HostMemory() if keeps_on_host else None
        self._stream = stream_of(model)
        self._weights: dict[str, _Weight] = {}
        """Under the names of diffusers' model."""
        self._base: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        """Weights that may not have their original values."""
        self._rewritten: Mapping[str, Sequence[tuple[_Change, float]]] = {}
        """What the copies of streamed blocks have."""

    @property
    def weights(self) -> Mapping[str, _Weight]:
        if not self._weights:
            self._weights = original_weights(self._model)
        return self._weights

    @torch.no_grad()
    def set(self, wanted: Mapping[str, Sequence[tuple[_Change, float]]]) -> None:
        """Make these changes to the original weights, each times a scale, and no others."""
        self._run_beside(wanted)
        weights = self._changeable()
        wanted = {name: changes for name, changes in wanted.items() if name in weights}
        if self._stream is not None:
            streamed = [name for name in wanted if self._stream.streams(name, weights[name])]
            if self._stream.move(streamed):
                self._weights = {}  # views
                weights = self._changeable()
            rows = {name: x for name in streamed if isinstance(x := weights[name], QuantisedRows)}
            plain = (name for name in streamed if name not in rows)
            patches = {name: _adding(wanted[name], to=weights[name]) for name in plain}
            self._stream.patch(patches, rewritten=rows)
            self._rewrite(self._stream, rows, {name: wanted[name] for name in rows})
            wanted = {name: each for name, each in wanted.items() if name not in streamed}
        for name in sorted(self._changed - wanted.keys()):
            weight, base = weights[name], self._base[name]
            if isinstance(weight, QuantisedRows):
                weight.copy_(base.to(weight.device, non_blocking=True), is_original=True)
            else:
                weight.copy_(base, non_blocking=True)
        self._changed &= wanted.keys()
        new = {name: weights[name] for name in sorted(wanted.keys() - self._base.keys())}
        for name, base in self._originals(new):
            self._base[name] = base
        self._changed |= wanted.keys()
        for name, changes in wanted.items():
            weight, base = weights[name], self._base[name]
            if isinstance(weight, Tensor):
                out = weight
            else:
                out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            source = base if base.device == out.device else out.copy_(base, non_blocking=True)
            for change, scale in changes:
                change.add(source, scale, out=out)
                source = out
            if out is not weight:
                weight.copy_(out)
        self._changed = set(wanted)

    def _rewrite(
        self,
        stream: Chain,
        weights: Mapping[str, QuantisedRows],
        wanted: Mapping[str, Sequence[tuple[_Change, float]]],
    ) -> None:
        """Write the sums to where streamed weights in 8 bits are read from, unless they are there."""
        if not weights or wanted == self._rewritten:
            return
        self._rewritten, device = {}, next(iter(weights.values())).device
        stream.renew()
        copies = {name: weight.at(partial(stream.in_copy, name)) for name, weight in weights.items()}
        for name, weight in self._stored(copies, device=device):
            for change, scale in wanted[name]:
                change.add(weight, scale, out=weight)
                change.move(torch.device("cpu"))
            copies[name].copy_(weight)
        self._rewritten = wanted

    def _changeable(self) -> dict[str, Tensor | QuantisedRows]:
        return {name: x for name, x in self.weights.items() if not isinstance(x, FixedWeight)}

    def _run_beside(self, wanted: Mapping[str, Sequence[tuple[_Change, float]]]) -> None:
        """Let these changes, and no others, run beside layers that keep their weights."""
        fixed = {name: x for name, x in self.weights.items() if isinstance(x, FixedWeight)}
        for name, weight in fixed.items():
            changes = wanted.get(name, ())
            for change, _ in changes:
                change.move(weight.device)
            weight.run_beside(partial(_sum_beside, changes) if changes else None)
        self._model.__dict__["runs_beside"] = not wanted.keys().isdisjoint(fixed)

    def _originals(self, weights: Mapping[str, Tensor | QuantisedRows]) -> Iterator[tuple[str, Tensor]]:
        """Copies of weights that were never changed."""
        quantised: dict[str, QuantisedRows] = {}
        for name, weight in weights.items():
            if isinstance(weight, QuantisedRows):
                quantised[name] = weight
            else:
                yield name, self._kept(weight) if self._host else weight.clone()
        if quantised:
            device = next(iter(quantised.values())).device
            for name, weight in self._stored(quantised, device=device):
                yield name, self._kept(weight)

    def _kept(self, weight: Tensor) -> Tensor:
        return weight if self._host is None else self._host.copy_of(weight, is_pinned=weight.is_cuda)

    def _stored(
        self, rows: Mapping[str, QuantisedRows], *, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """New copies of the original values, from the checkpoint, on the device."""
        assert self._read is not None
        for name, weight in self._read(rows, device=device):
            found = weight.to(device, copy=True)
            if not rows[name].hold(found):
                raise ModelError(f"{name}: the files of the model have changed since it was loaded")
            yield name, found


def _adding(changes: Sequence[tuple[_Change, float]], *, to: Any) -> Sequence[Callable[[], None]]:
    return [partial(change.add, to, scale, out=to) for change, scale in changes]


class _HostMemory:
    """Host memory for copies of weights; a GPU reads pinned memory by itself, while the host goes on."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, weight: Tensor, *, is_pinned: bool) -> Tensor:
        num_bytes = -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > len(self._left):
            num_block = max(num_bytes, _BLOCK_BYTES) if is_pinned else num_bytes
            self._left = _block(num_block, is_pinned=is_pinned)
        place, self._left = self._left[: weight.nbytes], self._left[num_bytes:]
        return place.view(weight.dtype).view(weight.shape).copy_(weight)


def _block(num_bytes: int, *, is_pinned: bool) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError:  # the system limits pinned memory, such as WSL
        if not is_pinned:
            raise
        logger.warning("no more memory can be pinned: switches of LoRAs take longer")
        return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class _Change:
    """What is computed from a few tensors, times alpha / divisor, for one parameter.

    `add` does to `source` what peft's `merge` does to the layer's own parameter.
    """

    parameter: str
    tensors: Sequence[Tensor]
    compute: Callable[..., Tensor]
    alpha: float = 1.0
    divisor: float = 1.0

    def move(self, device: torch.device) -> None:
        self.tensors = [each.to(device) for each in self.tensors]

    def beside(self, x: Tensor, scale: float) -> Tensor:
        """What peft's `forward` adds to the layer's result, in the same order.

        Other changes than products are computed each time, because only their tensors have room.
        """
        x = x.to(self.tensors[0].dtype)
        if self.compute is torch.matmul:
            up, down = self.tensors
            inner = nn.functional.linear(x, down)
            return nn.functional.linear(inner, up) * (scale * self.alpha / self.divisor)
        return nn.functional.linear(x, self._change(scale, x.dtype, (-1, x.shape[-1])))

    def add(self, source: Tensor, scale: float, *, out: Tensor) -> None:
        self.move(out.device)
        if out.is_cuda and self.compute is torch.matmul:
            from gfgen.models.lora import low_rank

            up, down = self.tensors
            low_rank.add_product(source, up, down, scale * self.alpha / self.divisor, out=out)
        else:
            torch.add(source, self._change(scale, out.dtype, source.shape), out=out)

    def _change(self, scale: float, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        change = self.compute(*(each.to(wide) for each in self.tensors)).reshape(shape)
        return (change * (scale * self.alpha / self.divisor)).to(dtype)  # in half precision, as peft does


_Weight = Tensor | QuantisedRows | FixedWeight


def _sum_beside(changes: Sequence[tuple[_Change, float]], x: Tensor, result: Tensor) -> Tensor:
    total = result
    for change, scale in changes:
        total = total + change.beside(x, scale)
    return total.to(result.dtype)


def changes_of(
    content: Content, weights: Mapping[str, Mapping[str, _Weight]]
) -> Mapping[str, Sequence[_Change]]:
    """What a file changes in each model, of which these are the weights."""
    changes: dict[str, list[_Change]] = {}
    for one in content.match.placed:
        tensors = {kind: content.tensors[name] for kind, name in one.tensors.items()}
        changes.setdefault(one.component, []).extend(_layer_changes(one, tensors, weights[one.component]))
    return changes


def _layer_changes(
    layer: Placed, tensors: dict[str, Tensor], weights: Mapping[str, _Weight]
) -> Iterator[_Change]:
    """Each part of a fused layer gets its share of the rows."""
    scaling = _scaling(layer, tensors)
    for idx, part in enumerate(layer.parts):

        def share(whole: Tensor, idx: int = idx) -> Tensor:
            return whole.chunk(len(layer.parts))[idx]

        name = f"{part}.weight" if f"{part}.weight" in weights else part
        own = {key: x.to(weights[name].dtype) for key, x in tensors.items()}
        if "down" in own:
            up, down, shape = share(own["up"]), own["down"], weights[name].shape
            if len(shape) == 2:
                up, down = up.reshape(len(up), -1), down.reshape(len(down), -1)
                yield _Change(name, (up.contiguous(), down.contiguous()), torch.matmul, *scaling)
            else:
                yield _Change(name, (up, down), partial(_convolved, shape), *scaling)
        if factors := [own[key] for key in sorted(own) if key.startswith("lokr_")]:
            num_left = sum(key.startswith("lokr_w1") for key in own)
            yield _Change(name, factors, partial(_kronecker, num_left, share), *scaling)
        if "diff" in own:
            yield _Change(name, (share(own["diff"]),), torch.clone)
        for key, by in (("up_bias", scaling), ("diff_b", (1.0, 1.0))):
            if key in tensors:
                bias = share(tensors[key]).to(weights[f"{part}.bias"].dtype)
                yield _Change(f"{part}.bias", (bias,), torch.clone, *by)


def _scaling(layer: Placed, tensors: Mapping[str, Tensor]) -> tuple[float, float]:
    """Alpha, and what it is divided by. Two whole Kronecker factors have no alpha."""
    inner = next((tensors[key] for key in ("down", "lokr_w2_b", "lokr_w1_b") if key in tensors), None)
    if "alpha" in tensors and inner is not None:
        return float(tensors["alpha"]), len(inner)
    if layer.scaling is not None:
        return layer.scaling
    return (len(inner), len(inner)) if "down" in tensors and inner is not None else (1.0, 1.0)


def _convolved(shape: Sequence[int], up: Tensor, down: Tensor) -> Tensor:
    """The product of two convolutions, one after the other."""
    if len(shape) != 4 or tuple(shape[2:]) == (1, 1):
        return up.flatten(1) @ down.flatten(1)
    return nn.functional.conv2d(down.view(len(down), *shape[1:]).transpose(0, 1), up).transpose(0, 1)


def _kronecker(num_left: int, share: Callable[[Tensor], Tensor], *factors: Tensor) -> Tensor:
    """Each factor is given whole, or as a product of two."""
    sides = factors[:num_left], factors[num_left:]
    left, right = (each[0] if len(each) == 1 else each[0] @ each[1] for each in sides)
    return share(torch.kron(left[(..., *[None] * (right.ndim - left.ndim))], right.contiguous()))


def _check_content(patch: Patch) -> None:
    """Raises ModelError if the file is gone or is another one than at admission."""
    try:
        sha256 = lora_sha256(Path(patch.path))
    except OSError as error:
        raise ModelError(f"lora {patch.path}: cannot be read ({error.strerror})") from None
    if sha256 != patch.sha256:
        raise ModelError(f"lora {patch.path}: has changed since the job was read; start the run again")
