"""A job's shapes, tasks, bytes and FLOPs, from a model's config files and without torch.

Each family has its own file (wan.py, qwen.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Protocol

from gfgen.errors import ModelError
from gfgen.graph import Stage, Trajectory
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.checkpoint import Checkpoint, read_checkpoint
from gfgen.models.geometry.pipeline import pipeline_geometry
from gfgen.models.geometry.qwen import qwen_geometry
from gfgen.models.geometry.wan import wan_geometry

CONFIGS = Path(__file__).parents[1] / "configs"
"""Config files of the models with a short name, in diffusers format, without weights."""

SHIPPED = ("wan2.2-ti2v-5b", "wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "qwen-image")
"""Short names of the full-size models; their configs are in folders of the same names."""


class Geometry(Protocol):
    """Pure functions of a job. All except `resolve` and `output_kind` take the job as run."""

    @property
    def family(self) -> str:
        """wan-ti2v, wan-moe-t2v, wan-moe-i2v, wan-t2v, qwen-image, or a class of pipelines."""

    @property
    def kind(self) -> str:
        """video or image."""

    @property
    def has_alpha(self) -> bool:
        """Whether its pictures have four channels, those that it takes and those that it makes."""

    def resolve(self, spec: JobSpec) -> JobSpec:
        """The job as run: defaults filled in, sizes and frames rounded as the pipeline rounds them.

        Resolving twice changes nothing. `model`, `seed` and the scheduling fields stay as they are.

        Raises: JobError with every field that this family does not support.
        """

    def output_kind(self, spec: JobSpec) -> str:
        """video or image: the kind of the job's file. Also works for a job that `resolve` refuses."""

    def trajectory(self, spec: JobSpec) -> Trajectory:
        """The job's tasks and artifacts; shapes of text are upper bounds."""

    def num_tokens(self, spec: JobSpec) -> int:
        """Tokens of the picture or video in the transformer's sequence."""

    @property
    def num_heads(self) -> int:
        """Attention heads of the transformer: the highest ulysses degree."""

    @property
    def attention_width(self) -> int:
        """Channels of the attentions that ranks share, of all layers together; 0 if that is unknown."""

    def num_latent_rows(self, spec: JobSpec) -> int:
        """Rows of the latents that the VAE decodes: the most bands of a shared decode."""

    def uses_cfg(self, spec: JobSpec) -> bool:
        """Whether a step evaluates two branches of classifier-free guidance."""

    def flops(self, spec: JobSpec, stage: Stage) -> float:
        """Floating-point operations of one task; for DENOISE the whole step, both branches."""

    def shape_key(self, spec: JobSpec) -> str:
        """Equal for tasks of equal cost, for example "832x480x49+cfg"."""


def load_geometry(checkpoint: Path, *, trusts_code: bool = False) -> Geometry:
    """The geometry of a diffusers-format directory.

    Raises: ModelError if it is missing, incomplete or broken, if its pipeline class is unknown, or if it
            brings code of its own without `trusts_code`.
    """
    return _build(read_checkpoint(checkpoint, with_weights=True), trusts_code=trusts_code)


@cache
def shipped_geometry(name: str) -> Geometry:
    """The geometry of a full-size model from the config files that come with gfgen.

    Raises: ModelError for a name that is not one of `SHIPPED`.
    """
    if name not in SHIPPED:
        raise ModelError(
            f"model {name!r}: gfgen has no config files for it; it has them for {', '.join(SHIPPED)}"
        )
    return weightless_geometry(CONFIGS / name)


def twin_of(geometry: Geometry, spec: JobSpec) -> str | None:
    """The short name of the full-size model with the same tasks for a job as run; None if there is none."""
    for name in SHIPPED:
        twin = shipped_geometry(name)
        is_alike = (twin.family, twin.num_heads) == (geometry.family, geometry.num_heads)
        if is_alike and all(twin.flops(spec, stage) == geometry.flops(spec, stage) for stage in Stage):
            return name
    return None


def weightless_geometry(checkpoint: Path) -> Geometry:
    """The geometry from config files alone, for simulations and random weights.

    Raises: ModelError like `load_geometry`.
    """
    return _build(read_checkpoint(checkpoint, with_weights=False), trusts_code=False)


def _build(files: Checkpoint, *, trusts_code: bool) -> Geometry:
    code = files.own_code
    match "" if code else files.pipeline_class:  # families with an adapter of their own
        case "WanPipeline" | "WanImageToVideoPipeline":
            return wan_geometry(files)
        case "QwenImagePipeline":
            return qwen_geometry(files)
    if code and not trusts_code:
        shown = ", ".join(f"{name} ({own.source.relative_to(files.path)})" for name, own in code.items())
        raise ModelError(
            f"{files.path / 'model_index.json'}: brings code of its own: {shown}; "
            "if you trust it, run, serve and models check run it with --trust-remote-code"
        )
    return pipeline_geometry(files)
