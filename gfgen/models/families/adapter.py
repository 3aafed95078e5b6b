"""What a worker needs from a model family: run one task, and nothing about placement.

An adapter holds the components of one checkpoint (text encoder, transformer, VAE,
scheduler config), loaded once and shared by all jobs. Its executors are functions of the
artifacts they are given, so that a job's tasks may run in different processes: nothing about a
job stays on the adapter between two calls but what only spares work (prompt_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.fast.evaluation import Evaluator
from gfgen.models.geometry.model import Geometry
from gfgen.models.parallel.parallel import Parallel

Scalar = int | float | bool | str | None | list[int] | list[float]

SAMPLE = "sample"
"""Name of the latents themselves among the tensors of the artifact `latents`."""
PIXEL_SUM = "pixel_sum"
"""Name of the sum of all pixels, before they became bytes, among the tensors of the artifact `frames`."""


@dataclass(slots=True)
class Fields:
    """The value of one artifact: named tensors, and host-only metadata."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)


class Adapter(Protocol):
    """Executors of one model family. All run under `torch.no_grad()`.

    `spec` is always the job as run (`Geometry.resolve`). Given artifacts are immutable:
    an executor returns new tensors and never writes to those it was given.
    """

    geometry: Geometry

    def encode(self, spec: JobSpec) -> Fields:
        """The artifact `prompt`: embeddings of the prompt and of the negative prompt."""
        ...

    def prepare(self, spec: JobSpec, prompt: Fields) -> tuple[Fields, Fields]:
        """The artifacts `condition` (empty but for image to video) and `latents`.

        `latents` holds the noise and everything that the solver carries between steps.
        """
        ...

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

        With `parallel`, all ranks of a layout make the same call together: each is given all of
        every artifact and returns all of the result, bitwise the same on each, and the same for
        the same degrees on any other ranks.

        Raises: LayoutError for degrees that this job does not allow.
        """
        ...

    def decode(self, spec: JobSpec, latents: Fields, *, parallel: Parallel | None = None) -> Fields:
        """The artifact `frames`: uint8 [F, H, W, 3], on the adapter's device, and the pixels' sum as floats.

        With `parallel`, all ranks of a layout make the same call together, and each returns its own
        rows of all frames: [F, h, W, 3] from row `first_row` on. Bitwise the same for the same
        degrees on any other ranks.

        Raises: LayoutError for degrees that this job does not allow.
        """
        ...

    def text_shape(self, spec: JobSpec, prompt: Fields, layout: Layout) -> tuple[object, ...]:
        """What the launches of steps on this layout know of the lengths of the prompts."""
        ...

    def evaluate_by(self, forward: Evaluator) -> None:
        """Evaluate transformers by this from now on."""
        ...
