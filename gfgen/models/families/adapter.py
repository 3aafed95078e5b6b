"""The interface between a worker and a model family: run one task, independent of placement.

An adapter holds the components of one checkpoint (text encoder, transformer, VAE, scheduler config), loaded
once and shared by all jobs. Its executors are functions of artifacts, so a job's tasks may run in different
processes. Between calls an adapter keeps nothing of a job except caches (fast/texts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.fast.evaluation import Evaluator
from gfgen.models.geometry.model import Geometry
from gfgen.models.lora.merging import MergedLoras
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.streaming.placing import Kept

Patches = MergedLoras

Scalar = int | float | bool | str | None | list[int] | list[float]

SAMPLE = "sample"
"""Name of the latents themselves among the tensors of the artifact `latents`."""
UNCHECKED = "unchecked"
"""A scalar of artifacts whose numbers may be infinite, such as masks of attention."""
PIXEL_SUM = "pixel_sum"
"""Name of the sum of all pixels as floats among the tensors of the artifact `frames`."""

HOST = "host:"
"""Beginning of the names of tensors that stay in host memory, on every device: a state of a generator, or
numbers that a scheduler has on the CPU."""

SOUND, SOUND_RATE = "sound", "sound_rate"
"""Names of a tensor and a scalar of `frames` where a pipeline makes sound: float32 [C, S] in [-1, 1], and its
samples per second."""


@dataclass(slots=True)
class Fields:
    """The value of one artifact: named tensors and host-only metadata."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)

    def number(self, name: str) -> int:
        value = self.scalars[name]
        assert isinstance(value, int)
        return value


class StepInput(NamedTuple):
    """What a denoising step of one job reads."""

    spec: JobSpec
    prompt: Fields
    condition: Fields
    latents: Fields


class Adapter(Protocol):
    """Executors of one model family. All run under `torch.no_grad()`.

    `spec` is always the job as run (`Geometry.resolve`). Artifacts are immutable: an executor returns new
    tensors and never writes to its inputs.
    """

    geometry: Geometry
    patches: Patches
    is_rehearsed: bool = True
    """Whether anything can be got ready before a step: forwards to record, blocks to compile."""
    read_bytes_per_s: float = 0.0  # of streamed blocks; 0 if it has none, and on a CPU
    kept: Kept | None = None  # if it may leave its device and come back

    @property
    def takes_turns(self) -> bool:
        """Whether blocks are read for each forward, and steps of several jobs share that (streaming/)."""
        return False

    def encode(self, spec: JobSpec) -> Fields:
        """The artifact `prompt`: embeddings of the prompt and of the negative prompt."""

    def prepare(self, spec: JobSpec, prompt: Fields) -> tuple[Fields, Fields]:
        """The artifacts `condition` (empty but for image to video) and `latents`.

        `latents` holds the noise and the solver's state.
        """

    def denoise(
        self,
        spec: JobSpec,
        prompt: Fields,
        condition: Fields,
        latents: Fields,
        *,
        step: int,
        parallel: Parallel | None = None,
    ) -> Fields:
        """The artifact `latents` after denoising step `step` (from 0).

        With `parallel`, all ranks of a layout make the same call. Each gets whole artifacts and returns the
        whole result, with the same bits on every rank and for the same degrees on any other ranks.

        Raises: LayoutError for degrees that this job does not allow.
        """

    def approximate(
        self, spec: JobSpec, prompt: Fields, condition: Fields, latents: Fields, *, step: int
    ) -> Fields:
        """The artifact `latents` after a step that extrapolates the transformer's output from earlier steps.

        All ranks of a layout make the same call, and each computes the same. `denoise` keeps the outputs for
        it if `spec.may_approximate`.

        Raises: ModelError for a pipeline whose outputs cannot be caught.
        """

    def decode(self, spec: JobSpec, latents: Fields, *, parallel: Parallel | None = None) -> Fields:
        """The artifact `frames`: uint8 [F, H, W, 3 * spec.sample_bytes] on its device, and the sum of pixels.

        With `parallel`, all ranks of a layout make the same call, and each returns its own rows of all
        frames: [F, h, W, 3] from row `first_row`. The bits are the same for the same degrees on any ranks.

        Raises: LayoutError for degrees that this job does not allow.
        """

    def text_shape(self, spec: JobSpec, prompt: Fields, layout: Layout) -> tuple[object, ...]:
        """How the launches of steps on this layout depend on the lengths of the prompts."""

    def evaluate_by(self, forward: Evaluator) -> None: ...

    def texts_to_rehearse(self) -> Sequence[Callable[[], object]]:
        """Functions that evaluate the text encoder, one for each shape that it can get, if these are few."""
        return ()

    def shortest(self, latents: Fields) -> Fields:
        """These latents with as few frames as launch all kernels of a decode."""
        return latents
