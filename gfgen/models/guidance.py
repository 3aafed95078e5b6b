"""Branches of classifier-free guidance, on one rank or on two halves of a layout."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gfgen.jobspec import JobSpec
from gfgen.models.adapter import Fields
from gfgen.models.geometry import Geometry, check_degrees
from gfgen.models.parallel import Parallel
from gfgen.models.sequence_parallel import active


def predict_branches(
    predict: Callable[[Tensor], Tensor],
    prompt: Fields,
    *,
    spec: JobSpec,
    geometry: Geometry,
    parallel: Parallel | None,
) -> tuple[Tensor, Tensor | None]:
    """The noise predictions for the prompt and, with guidance, for the negative prompt.

    `predict` evaluates the transformer for given embeddings. With two halves, the first
    evaluates the prompt and the second the negative prompt, and then every rank has both. The
    order of the pair is the same on all of them, so whatever they compute from it is, too.

    Raises: LayoutError for degrees that this job does not allow.
    """
    names = ("prompt_embeds", "negative_prompt_embeds") if geometry.uses_cfg(spec) else ("prompt_embeds",)
    embeds = [prompt.tensors[name] for name in names]
    if parallel is None:
        return _pair([predict(branch) for branch in embeds])
    check_degrees(geometry, spec, parallel.degrees)
    with active(parallel):
        if parallel.cfg.size == 1:
            return _pair([predict(branch) for branch in embeds])
        own = predict(embeds[parallel.cfg.slot])
    return _pair(list(parallel.cfg.all_gather(own, dim=0).chunk(2, dim=0)))


def _pair(predictions: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    return predictions[0], predictions[1] if len(predictions) == 2 else None
