"""Branches of classifier-free guidance: in turn, in one forward, or on two halves of a layout.

Halves are a layout's own (`cfg` degree 2). Where all ranks evaluate both branches, they do it in the way that
is known to be faster (`BATCH_RULES`). What the control plane measures and compares, all ranks with two
halves, follows from that.

Legend: B batch (1 for each branch), L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfgen.jobspec import JobSpec
from gfgen.models.adapter import Fields
from gfgen.models.geometry import Geometry, check_degrees
from gfgen.models.parallel import Parallel
from gfgen.models.rows import padded_to
from gfgen.models.sequence_parallel import active

Predict = Callable[[Sequence[Tensor]], Tensor]
"""From the embeddings of one branch or of several to their noise predictions, [branches, ..]."""


class BatchRule(NamedTuple):
    """Where both branches in one forward win: jobs of `from_tokens` up to less than `to_tokens`."""

    family: str
    sequence_degree: int
    from_tokens: int
    to_tokens: int


BATCH_RULES: tuple[BatchRule, ...] = ()
"""In bf16 on a GPU. None as long as `gfgen bench forward --only "*/both-*"` has not shown where."""


def predict_branches(
    predict: Predict, prompt: Fields, *, spec: JobSpec, geometry: Geometry, parallel: Parallel | None
) -> tuple[Tensor, Tensor | None]:
    """The noise predictions for the prompt and, with guidance, for the negative prompt.

    Every rank has both, in this order, so whatever they compute from it is the same on all of them.

    Raises: LayoutError for degrees that this job does not allow.
    """
    names = ("prompt_embeds", "negative_prompt_embeds") if geometry.uses_cfg(spec) else ("prompt_embeds",)
    embeds = [prompt.tensors[name] for name in names]
    if parallel is not None:
        check_degrees(geometry, spec, parallel.degrees)
    degree = 1 if parallel is None else parallel.sequence.size
    in_batch = is_batch_faster(geometry, spec, sequence_degree=degree, like=embeds[0])
    predictions = evaluate_branches(predict, embeds, parallel, in_batch=in_batch)
    return predictions[0], predictions[1] if len(predictions) == 2 else None


def is_batch_faster(geometry: Geometry, spec: JobSpec, *, sequence_degree: int, like: Tensor) -> bool:
    """Whether one forward of both branches is known to be faster than two; for embeddings like these."""
    if not like.is_cuda or like.dtype != torch.bfloat16:
        return False
    num_tokens = geometry.num_tokens(spec)
    return any(
        (rule.family, rule.sequence_degree) == (geometry.family, sequence_degree)
        and rule.from_tokens <= num_tokens < rule.to_tokens
        for rule in BATCH_RULES
    )


def evaluate_branches(
    predict: Predict, embeds: Sequence[Tensor], parallel: Parallel | None, *, in_batch: bool
) -> list[Tensor]:
    """The prediction for each branch, on every rank.

    in_batch: both in one forward. With two halves each of them evaluates its own branch, whatever that says.
    """
    with nullcontext() if parallel is None else active(parallel):
        if parallel is not None and parallel.cfg.size > 1:
            own = predict([embeds[parallel.cfg.slot]])
        elif in_batch:
            return list(predict(embeds).chunk(len(embeds)))
        else:
            return [predict([branch]) for branch in embeds]
    return list(parallel.cfg.all_gather(own, dim=0).chunk(parallel.cfg.size))


def with_texts(inputs: Mapping[str, Any], embeds: Sequence[Tensor]) -> dict[str, Any]:
    """A transformer's inputs for these branches, from those that the branches share, `hidden_states` and all.

    Timesteps stay as they are, for one sample: those of the others are equal. Texts of different lengths are
    padded with zeros; fused blocks leave them out (fused.py), diffusers' own know nothing of it.
    """
    if len(embeds) == 1:
        return {**inputs, "encoder_hidden_states": embeds[0]}
    lengths = tuple(branch.shape[1] for branch in embeds)
    texts = [padded_to(max(lengths), branch) for branch in embeds]
    picture = inputs["hidden_states"]
    batch = {
        **inputs,
        "hidden_states": picture.repeat(len(embeds), *[1] * (picture.dim() - 1)),
        "encoder_hidden_states": torch.cat(texts),
    }
    if "attention_kwargs" in inputs:
        batch["attention_kwargs"] = {**inputs["attention_kwargs"], "text_lengths": lengths}
    else:
        assert min(lengths) == max(lengths), "texts of different lengths"
    return batch
