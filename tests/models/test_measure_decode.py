"""What `python -m benchmarks.decode` measures, rehearsed on CPU ranks with a small VAE."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked_ranks import ForkedRanks
from small_vaes import small_vae

from benchmarks.decode import Decode, decode_alone, decode_shared, psnr, random_latents
from gfgen.layout import Layout
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.shared_decode import install


@torch.no_grad()
def kept_decode() -> Decode:
    vae = small_vae("wan 2.2")
    install(vae)
    kept = Decode(vae, random_latents((1, 4, 2, 5, 3), torch.device("cpu")))
    found = decode_alone(kept)
    assert found["psnr_db"] is None
    assert found["spread"] > 1
    return kept


def make_program() -> Callable[[Parallel], Any]:
    kept = kept_decode()
    return torch.no_grad()(lambda parallel: decode_shared(kept, lambda: parallel))


@torch.no_grad()
def test_what_ranks_decode_together_is_compared_with_what_one_decodes_alone() -> None:
    ranks = ForkedRanks(2, make_program)
    for result in ranks.run(Layout.bands((0, 1))):
        assert result["distance"] < 3e-6
        assert result["max_levels"] <= 1
        assert len(result["times_s"]) == 3
    ranks.close()
    kept = kept_decode()
    kept.vae.to(torch.bfloat16)
    assert 20 < decode_alone(kept)["psnr_db"] < 80


def test_psnr_of_one_level_everywhere_is_48_decibels() -> None:
    one = torch.full((2, 4, 4, 3), 7, dtype=torch.uint8)
    assert psnr(one, one + 1) == pytest.approx(20 * math.log10(255))
    assert psnr(one, one) == math.inf
