"""Shared attention on CUDA ranks, for tests: eager or captured, over poisoned arenas."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from test_shared_attention import Inputs, alone, on_one_rank

from gfgen.gfc.cuda.captured import Captured
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.device_group import CudaGroup, bank_of
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import parallel_from
from gfgen.models.parallel.shared_attention import shared_attention

HEADS, DIM = 12, 64


def inputs_of(device: torch.device, tokens: int, *, is_masked: bool) -> Inputs:
    noise = torch.Generator(device).manual_seed(tokens)
    q, k, v = (
        torch.randn((1, tokens, HEADS, DIM), generator=noise, device=device).bfloat16() for _ in range(3)
    )
    if not is_masked:
        return Inputs(q, k, v)
    mask = torch.ones((1, 1, 1, tokens), dtype=torch.bool, device=device)
    mask[..., 2 : tokens // 3] = False
    return Inputs(q, k, v, mask)


def share_of(inputs: Inputs, sizes: tuple[int, ...], slot: int) -> list[torch.Tensor | None]:
    """This slot's tokens, contiguous."""
    start, length = sum(sizes[:slot]), sizes[slot]
    found: list[torch.Tensor | None] = [x[:, start : start + length].contiguous() for x in inputs[:3]]
    mask = inputs.mask
    return [*found, None if mask is None else mask[..., start : start + length].contiguous()]


def poison(endpoint: CudaEndpoint) -> None:
    """NaN where peers will write after this rank's entry: a missing byte shows."""
    plan = endpoint.plan
    offset = bank_of(plan.data_bytes, plan.post_bytes, (1, 2, 1), 0).offsets[0]
    endpoint.arena_bytes_1d[offset : offset + plan.data_bytes].fill_(0xFF)


@torch.no_grad()
def attend(
    endpoint: CudaEndpoint,
    degrees: tuple[int, int],
    dispatches: list[tuple[tuple[int, ...], int]],
    num_prepared: int,
    tokens: int,
    num_chunks: int | None,
    is_masked: bool,
) -> tuple[float, int]:
    """(largest error in units of one GPU's own, results compared).

    The first `num_prepared` groups run and capture with other inputs; all others replay. With none
    prepared, everything runs eagerly.
    """
    inputs = inputs_of(endpoint.torch_device, tokens, is_masked=is_masked)
    wanted = alone(inputs)
    usual = float((on_one_rank(*inputs).double() - wanted).abs().max())
    sizes = shard_sizes(tokens, degrees[0] * degrees[1])
    static: list[torch.Tensor | None] = []
    captured: Any = None
    worst, count = 0.0, 0

    def step(group: CudaGroup, share: list[torch.Tensor | None]) -> torch.Tensor:
        query, key, value, mask = share
        assert query is not None
        assert key is not None
        assert value is not None
        parallel = parallel_from(group, num_chunks=num_chunks)
        return shared_attention(
            query, key, value, mask, parallel=parallel, token_sizes=sizes, attend=on_one_rank
        )

    for number, (ranks, dispatch) in enumerate(dispatches):
        if endpoint.rank not in ranks:
            continue
        layout = Layout(ranks, ulysses=degrees[0], ring=degrees[1])
        group = endpoint.group(Descriptor(dispatch, layout, (1,) * layout.degree))
        share = share_of(inputs, sizes, group.slot)
        poison(endpoint)
        group.enter()
        if number < num_prepared:
            static = static or [None if x is None else x.flip(1) for x in share]
            for _ in range(2):
                step(group, static)
            group.finish()
            captured = captured or Captured(group, partial(step, share=static))
            continue
        if captured is None:
            results = [step(group, share) for _ in range(3)]
        else:
            for place, x in zip(static, share, strict=True):
                if place is not None and x is not None:
                    place.copy_(x)
            results = [captured.replay(group).clone() for _ in range(2)]
        group.finish()
        own = wanted[:, sum(sizes[: group.slot]) :][:, : sizes[group.slot]]
        for result in results:
            assert result.isfinite().all()
            worst = max(worst, float((result.double() - own).abs().max()) / usual)
            count += 1
    return worst, count
