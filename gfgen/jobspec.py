"""One job, as asked or as run: the value that everything above the job file works on."""

from __future__ import annotations

from dataclasses import dataclass

SHAPE_FIELDS = ("width", "height", "frames", "fps", "steps")
SCALE_FIELDS = ("guidance_scale", "guidance_scale_2", "boundary_ratio", "flow_shift", "true_cfg_scale")
"""The numbers that a job may leave to its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job, as asked; a model's geometry turns it into the same type as run.

    None means that the job does not say. As run (`Geometry.resolve`), `model`, `width`,
    `height`, `frames`, `fps`, `steps`, `seed` and the scales that the family uses are set, and sizes are
    rounded as the family's pipeline would round them.
    """

    id: str
    prompt: str
    negative_prompt: str | None = None
    model: str | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    boundary_ratio: float | None = None
    flow_shift: float | None = None
    true_cfg_scale: float | None = None
    seed: int | None = None
    image: str | None = None
    """Absolute path of a picture that was readable when the job was admitted."""
    image_sha256: str | None = None
    """Hash of the image file's bytes at that time; it stands for the image in `spec_hash`."""
    deadline_s: float | None = None
    """Seconds after the arrival."""
    deadline_at: float | None = None
    """Unix time, where the job gave a date."""
    arrival_s: float = 0.0
    """Seconds after the start of the run."""
    timeout_s: float | None = None
    """Seconds after the arrival; the job fails when it has not ended by then."""
    priority: int = 0
    tag: str | None = None
    output: str | None = None
    line: int | None = None
    """Line of the job file it came from; no part of the job's identity."""
