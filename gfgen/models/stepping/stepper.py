"""A diffusers pipeline that runs one step at a time, as functions of values.

    prompt = stepper.encode(args, seed=7)
    condition, state = stepper.prepare(prompt)
    while not is_finished(state):
        state = stepper.step(prompt, condition, state)
    output = stepper.decode(state)

The output has the same bits as `pipeline(**args, generator=torch.Generator().manual_seed(7))`. Each call may
run on another pipeline object with the same weights, in another process: values are plain data
(`values.py`), the pipeline and its scheduler keep nothing between calls, and given values are not changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from gfgen.models.families.adapter import Fields
from gfgen.models.stepping.program import (
    BEHIND_ENCODE,
    Checkpoint,
    Namespace,
    NotSteppableError,
    Place,
    program_of,
    sets_processors,
)
from gfgen.models.stepping.values import changes_by_use, changes_in_calls, pack, parts_of, unpack

PLACE, IS_FINISHED, NUM_ITERATIONS, NUM_DONE = "place", "is_finished", "num_iterations", "num_done"
"""Scalars of a state: where the call continues, whether all iterations are done, how many the denoising loop
has over the whole call, and how many led to this state."""
SEED = "seed"
_RANDOM = "random"
"""Key of the state of PyTorch's own generators, from which some pipelines draw."""
_ABSENT = object()
_SETTINGS = (bool, int, float, str)


def is_finished(state: Fields) -> bool:
    return bool(state.scalars[IS_FINISHED])


class Stepper:
    """One pipeline object; its components are on `device`."""

    def __init__(self, pipeline: Any, *, device: str = "cpu") -> None:
        """Raises: NotSteppableError for a pipeline whose call has no denoising loop that can be cut."""
        self.program = program_of(type(pipeline).__call__)
        self._device = torch.device(device)
        self._pipeline = pipeline
        pipeline.set_progress_bar_config(disable=True)
        self._parts = parts_of(pipeline)
        self._attributes: dict[str, _Attributes] = {
            name: _Attributes(part, object if changes_in_calls(part) else _SETTINGS)
            for name, part in self._parts.items()
            if not isinstance(part, torch.nn.Module)
        }
        if sets_processors(type(pipeline).__call__):
            for name, part in self._parts.items():
                if hasattr(part, "set_attn_processor"):
                    self._attributes[name] = _Processors(part)

    def encode(self, args: Mapping[str, Any], *, seed: int) -> Fields:
        """The artifact `prompt`: what the call knows once it has encoded its prompts.

        `args` are arguments of the pipeline's call, without `generator`.

        Raises: TypeError for arguments that the call does not take.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        if "generator" in self.program.signature.parameters:
            args = {"generator": generator, **args}
        bound = self.program.signature.bind(self._pipeline, **args)
        bound.apply_defaults()
        with self._running({}, seed=seed):
            names = self.program.namespace(bound.arguments)
            self._paused(names, None)
            return self._packed(self._locals(names, self.program.read_by_prepare), seed=seed)

    def prepare(self, prompt: Fields) -> tuple[Fields, Fields]:
        """The artifacts `condition` and `latents`: the values that steps read, and those that they change.

        `condition` lacks what `prompt` has.

        Raises: NotSteppableError where these arguments lead past the denoising loop.
        """
        given = self._unpacked(prompt)
        with self._running(given, seed=prompt.number(SEED)):
            names = self.program.namespace({"self": self._pipeline, **_locals(given)})
            checkpoint = self._paused(names, BEHIND_ENCODE)
            state, constants = self._divided(names)
            for name in [x for x, value in constants.items() if _is_same(given.get(x, _ABSENT), value)]:
                del constants[name]
            moving = self._state(state, checkpoint, seed=prompt.number(SEED), done=0)
            return pack(constants, self._parts), moving

    def step(self, prompt: Fields, condition: Fields, state: Fields) -> Fields:
        """The artifact `latents` after the next iteration of the denoising loop."""
        fixed = (_locals(self._unpacked(fields, is_copied=False)) for fields in (prompt, condition))
        constants = {name: value for each in fixed for name, value in each.items()}
        moved, seed = self._unpacked(state), state.number(SEED)
        with self._running(moved, seed=seed):
            names = self.program.namespace({"self": self._pipeline, **constants, **_locals(moved)})
            with contextlib.closing(self.program.run(names, _place_of(state))) as run:
                if next(run).is_end:  # of one section; the next one begins behind it
                    next(run)
                checkpoint, moving = next(run), self._divided(names)[0]
                return self._state(moving, checkpoint, seed=seed, done=state.number(NUM_DONE) + 1)

    def decode(self, state: Fields) -> Any:
        """What the pipeline's call returns."""
        given = self._unpacked(state)
        with self._running(given, seed=state.number(SEED)):
            names = self.program.namespace({"self": self._pipeline, **_locals(given)})
            run = self.program.run(names, _place_of(state))
            try:
                while True:
                    next(run)
            except StopIteration as end:
                return end.value

    def _paused(self, names: Namespace, place: Place | None) -> Any:
        """Run from a place to the next pause, and leave it there."""
        try:
            return next(self.program.run(names, place))
        except StopIteration:
            raise NotSteppableError("returns without its denoising loop with these arguments") from None

    def _divided(self, names: Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
        """The variables that pass from step to step, and those that all steps share.

        What the decode reads is in the first, because a decode gets the last state only.
        """
        there = self._locals(names, self.program.read_by_steps)
        moving = self.program.read_by_decode | self.program.changed
        state = {name: value for name, value in there.items() if name in moving or changes_by_use(value)}
        return state, {name: value for name, value in there.items() if name not in state}

    def _locals(self, names: Namespace, wanted: Collection[str]) -> dict[str, Any]:
        """The local variables among some names, in a fixed order."""
        known = self.program.globals
        return {
            name: names[name]
            for name in sorted(wanted)
            if name != "self" and names.get(name, _ABSENT) is not known.get(name, _ABSENT)
        }

    def _state(self, values: dict[str, Any], checkpoint: Checkpoint, *, seed: int, done: int) -> Fields:
        fields = self._packed(values, seed=seed)
        fields.scalars |= {
            PLACE: list(checkpoint.place),
            IS_FINISHED: checkpoint.is_end and checkpoint.is_last,
            NUM_ITERATIONS: checkpoint.num_iterations,
            NUM_DONE: done,
        }
        return fields

    def _packed(self, values: dict[str, Any], *, seed: int) -> Fields:
        """Local variables, attributes of the pipeline and its scheduler, and PyTorch's own generators."""
        found = {
            f"{part}:{name}": value
            for part, attributes in self._attributes.items()
            for name, value in attributes.changed().items()
        }
        for name, generator in _own_generators(self._device).items():
            unused = torch.Generator(generator.device).manual_seed(seed)
            if not torch.equal(generator.get_state(), unused.get_state()):
                found[f"{_RANDOM}:{name}"] = generator.clone_state()
        fields = pack(values | found, self._parts)
        fields.scalars[SEED] = seed
        return fields

    def _unpacked(self, fields: Fields, *, is_copied: bool = True) -> dict[str, Any]:
        return unpack(fields, self._parts, device=self._device, is_copied=is_copied)

    @contextlib.contextmanager
    def _running(self, given: Mapping[str, Any], *, seed: int) -> Iterator[None]:
        """The pipeline with the attributes that a call has left; afterwards it is as before all calls."""
        own = _own_generators(self._device)
        saved = {name: generator.get_state() for name, generator in own.items()}
        for name, generator in own.items():
            left = given.get(f"{_RANDOM}:{name}")
            generator.set_state(left.get_state()) if left is not None else generator.manual_seed(seed)
        try:
            for key, value in given.items():
                part, is_attribute, name = key.partition(":")
                if is_attribute and part != _RANDOM:
                    self._attributes[part].set(name, value)
            with torch.no_grad():
                yield
        finally:
            for attributes in self._attributes.values():
                attributes.reset()
            for name, generator in own.items():
                generator.set_state(saved[name])


class _Attributes:
    """The attributes that one part of the pipeline has before any call.

    Of a tokenizer these are numbers and texts: some calls set the side that it pads.
    """

    def __init__(self, part: Any, kinds: Any) -> None:
        self._part, self._kinds = part, kinds
        self._before = {name: _shallow(value) for name, value in self._now().items()}

    def _now(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._part).items() if isinstance(value, self._kinds)}

    def changed(self) -> dict[str, Any]:
        before = self._before
        return {
            name: value
            for name, value in self._now().items()
            if not _is_same(before.get(name, _ABSENT), value)
        }

    def set(self, name: str, value: Any) -> None:
        vars(self._part)[name] = value

    def reset(self) -> None:
        for name in self._now().keys() - self._before.keys():
            del vars(self._part)[name]
        for name, value in self._before.items():
            self.set(name, _shallow(value))


class _Processors(_Attributes):
    """The processors of a transformer's attentions, which calls with perturbed-attention guidance replace."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._before = dict(part.attn_processors)

    def changed(self) -> dict[str, Any]:
        now = self._part.attn_processors
        return {name: value for name, value in now.items() if value is not self._before[name]}

    def set(self, name: str, value: Any) -> None:
        self._part.get_submodule(name.removesuffix(".processor")).processor = value

    def reset(self) -> None:
        for name in self.changed():
            self.set(name, self._before[name])


def _shallow(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict) else value


def _is_same(before: Any, value: Any) -> bool:
    """Whether nothing has changed a value, as far as that can be seen without looking into tensors."""
    if before is value:
        return not changes_in_calls(value)
    if type(before) is not type(value):
        return False
    if isinstance(value, list):
        return len(before) == len(value) and all(map(_is_same, before, value))
    if isinstance(value, dict):
        return before.keys() == value.keys() and all(_is_same(before[key], value[key]) for key in value)
    return isinstance(value, (bool, int, float, str)) and before == value


def _locals(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if ":" not in name}


def _own_generators(device: torch.device) -> dict[str, torch.Generator]:
    """PyTorch's own generators, for the CPU and for the device."""
    own = {"cpu": torch.default_generator}
    if device.type == "cuda":
        own["device"] = torch.cuda.default_generators[device.index or 0]
    return own


def _place_of(state: Fields) -> Place:
    place = state.scalars[PLACE]
    assert isinstance(place, list)
    return tuple(int(idx) for idx in place)
