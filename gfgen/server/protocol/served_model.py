"""The public description of a served model."""

from __future__ import annotations

from dataclasses import replace

from gfgen.errors import JobError
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.admission import ResolvedModel
from gfgen.server.protocol import server_schemas

_PLAIN = JobSpec(id="plain", prompt="plain", seed=0)


def served_model(model: ResolvedModel, *, created: int) -> server_schemas.ServedModel:
    """The model with its geometry's defaults for jobs that leave fields out."""
    run = _resolved(model, _PLAIN)
    with_image = _resolved(model, replace(_PLAIN, image="image"))
    known = run or with_image
    return server_schemas.ServedModel(
        id=model.name,
        created=created,
        root=None,
        kind="image" if model.geometry.kind == "image" else "video",
        takes_image="no" if with_image is None else "yes" if run is not None else "always",
        defaults=None if known is None else _defaults(known),
    )


def _resolved(model: ResolvedModel, spec: JobSpec) -> JobSpec | None:
    try:
        return model.geometry.resolve(spec)
    except JobError:
        return None


def _defaults(run: JobSpec) -> server_schemas.Defaults:
    is_video = (run.frames or 1) > 1
    return server_schemas.Defaults(
        size=f"{run.width}x{run.height}",
        frames=run.frames if is_video else None,
        fps=run.fps if is_video else None,
        steps=run.steps or 1,
        guidance_scale=run.guidance_scale,
        true_cfg_scale=run.true_cfg_scale,
    )
