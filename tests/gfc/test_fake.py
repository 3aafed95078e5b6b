"""The fake agrees with the oracle, as the real groups do."""

from __future__ import annotations

import gfc_oracle as oracle
import pytest
import torch
from gfc_fake import FakeCluster, FakeGroup

from gfgen.errors import PeerTimeoutError
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import shard_sizes
from gfgen.layout import Layout


def test_fake_attention_exchange_comes_back() -> None:
    layout = Layout((4, 1, 0, 2, 3, 5), cfg=2, ulysses=3)
    tokens, heads = shard_sizes(7, 3), shard_sizes(4, 3)
    shards = [torch.randn(1, length, 4, 2) for length in tokens]

    def program(whole: FakeGroup) -> torch.Tensor:
        group: Collectives = whole.subgroup("ulysses")
        own = shards[group.slot]
        (found,) = group.heads_from_tokens(own, token_sizes=tokens, head_sizes=heads)
        assert torch.equal(found, oracle.heads_from_tokens(shards, head_sizes=heads)[group.slot])
        return group.tokens_from_heads(found, token_sizes=tokens, head_sizes=heads)

    for slot, result in enumerate(FakeCluster().run(layout, program)):
        assert torch.equal(result, shards[slot % 3])


def test_fake_subgroups_count_apart() -> None:
    def program(whole: FakeGroup) -> list[float]:
        whole.enter()
        pair, half = whole.subgroup("cfg_pair"), whole.subgroup("cfg")
        x = torch.tensor([float(whole.slot)])
        return (half.all_gather(pair.all_gather(x)) + whole.all_gather(x)).tolist()

    results = FakeCluster().run(Layout((0, 1, 2, 3), cfg=2, ulysses=2), program)
    assert results == [[0.0, 3.0, 3.0, 6.0]] * 4


def test_fake_group_with_a_missing_rank_raises() -> None:
    def program(whole: FakeGroup) -> None:
        if whole.slot == 0:
            whole.barrier()

    with pytest.raises(PeerTimeoutError, match="slots \\[0\\] of 2"):
        FakeCluster(timeout_s=0.05).run(Layout((0, 1), ulysses=2), program)
