"""Branches of classifier-free guidance: in turn, in one forward, or on two halves of a layout.

A layout with `cfg` degree 2 has two halves. On other layouts all ranks evaluate both branches, in the faster
of the first two ways (`BATCH_RULES`), and the control plane compares this with two halves. If the
transformer's blocks are read for each forward, both branches share the read of a block (streaming/turns.py).

Legend: B batch (1 for each branch), L tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gfgen.job.spec import JobSpec
from gfgen.models.families.adapter import Fields
from gfgen.models.geometry.model import Geometry
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.sequence_parallel import active
from gfgen.models.streaming.turns import in_turns

Predict = Callable[[Sequence[Tensor]], Tensor]
"""From the embeddings of one branch or of both to their noise predictions, [branches, ..]."""


class BatchRule(NamedTuple):
    """Both branches in one forward are faster for jobs with `from_tokens` <= tokens < `to_tokens`."""

    family: str
    sequence_degree: int
    from_tokens: int
    to_tokens: int
    max_padding: int
    """The largest difference between the branches' texts, in tokens; the shorter text is padded."""


BATCH_RULES = (
    BatchRule("qwen-image", sequence_degree=1, from_tokens=1_000, to_tokens=6_000, max_padding=128),
    BatchRule("qwen-image", sequence_degree=2, from_tokens=1_000, to_tokens=10_000, max_padding=128),
)
"""For bf16 on a GPU. By benchmarks/forward.py --only "*/both-*" on H200, ms of both branches in turn and in
one forward, with texts of 64 and 8 tokens: 1,024 tokens 67.3 and 60.2 on one GPU, 46.5 and 38.7 on two;
4,096 tokens 252 and 244, 142 and 134; 9,216 tokens 669 and 663, 365 and 358. For Wan they differ by 1% in
either direction. A padded token costs as much as any other; twice as much padding keeps most of the gain."""


def predict_branches(
    predict: Predict,
    prompt: Fields,
    *,
    spec: JobSpec,
    geometry: Geometry,
    parallel: Parallel | None,
    takes_turns: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The noise predictions for the prompt and, with guidance, for the negative prompt.

    Every rank gets both, in this order, so all of them compute the same from it. takes_turns: branches take
    turns at the transformer's blocks.
    """
    names = ("prompt_embeds", "negative_prompt_embeds") if geometry.uses_cfg(spec) else ("prompt_embeds",)
    embeds = [prompt.tensors[name] for name in names]
    degree = 1 if parallel is None else parallel.sequence.size
    in_batch = is_batch_faster(geometry, spec, sequence_degree=degree, embeds=embeds)
    found = evaluate_branches(predict, embeds, parallel, in_batch=in_batch, takes_turns=takes_turns)
    return found[0], found[1] if len(found) == 2 else None


def is_batch_faster(
    geometry: Geometry, spec: JobSpec, *, sequence_degree: int, embeds: Sequence[Tensor]
) -> bool:
    """Whether one forward of all branches with these embeddings is known to be faster than one per branch."""
    if len(embeds) == 1 or not embeds[0].is_cuda or embeds[0].dtype != torch.bfloat16:
        return False
    num_tokens, lengths = geometry.num_tokens(spec), [branch.shape[1] for branch in embeds]
    return any(
        (rule.family, rule.sequence_degree) == (geometry.family, sequence_degree)
        and rule.from_tokens <= num_tokens < rule.to_tokens
        and max(lengths) - min(lengths) <= rule.max_padding
        for rule in BATCH_RULES
    )


def evaluate_branches(
    predict: Predict,
    embeds: Sequence[Tensor],
    parallel: Parallel | None,
    *,
    in_batch: bool,
    takes_turns: bool = False,
) -> list[Tensor]:
    """The prediction for each branch, on every rank.

    in_batch: both in one forward. Two halves ignore it: each evaluates its own branch.
    """

    def predicted(*branches: Tensor) -> Tensor:
        with active(parallel):
            return predict(branches)

    if parallel is not None and parallel.cfg.size > 1:
        own = predicted(embeds[parallel.cfg.slot])
        return list(parallel.cfg.all_gather(own, dim=0).chunk(parallel.cfg.size))
    if in_batch:
        return list(predicted(*embeds).chunk(len(embeds)))
    forwards = [functools.partial(predicted, branch) for branch in embeds]
    return in_turns(forwards) if takes_turns else [forward() for forward in forwards]
