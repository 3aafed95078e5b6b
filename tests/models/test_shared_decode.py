"""Decodes on one to four ranks: within rounding of one rank's, and the same bits on any ranks.

A VAE keeps a decode's feature cache on itself, so ranks are processes here and never threads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import ForkedRanks
from small_vaes import VAES, small_latents, small_vae
from torch.nn import functional

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout, shard_bounds
from gfgen.models.families.adapter import Fields
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast import causal_vae
from gfgen.models.geometry.model import load_geometry
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.shared_decode import decode_rows, install

torch.set_num_threads(1)

TOLERANCE = 5e-6
"""Of the largest magnitude, in fp32: the same sums, in the order that each shape's kernel has; up to 3.1e-6
was seen, by the CPU."""

FAST = ("wan 2.2, fast", "wan 2.1, fast")
"""As on a GPU (causal_vae.py)."""
ROWS = (4, 5, 7)
"""Of latents: 2, 3 and 4 ranks get equal bands, uneven ones, and bands of a single row."""
FRAMES = 3
"""Of latents: the feature cache is empty, filled, and in use."""


@functools.cache
def vae_of(name: str) -> Any:
    vae = small_vae(name.removesuffix(", fast"))
    install(vae)
    if name in FAST:
        causal_vae.install(vae)
    return vae


def latents_of(num_rows: int) -> torch.Tensor:
    return small_latents(frames=FRAMES, rows=num_rows)


@torch.no_grad()
def decode(parallel: Parallel | None, name: str, num_rows: int) -> Fields:
    pixels, first_row = decode_rows(vae_of(name), latents_of(num_rows), parallel)
    return Fields({"pixels": pixels}, {"first_row": first_row})


@functools.cache
def whole_of(name: str, num_rows: int) -> torch.Tensor:
    return decode(None, name, num_rows).tensors["pixels"]


def make_decode() -> Callable[..., Fields]:
    """In the process that the ranks are forked from: with all VAEs."""
    for name in (*VAES, *FAST):
        vae_of(name)
    return decode


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    forked = ForkedRanks(4, make_decode)
    yield forked
    forked.close()


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("name", [*VAES, *FAST])
def test_bands_are_the_rows_of_one_ranks_decode(
    name: str, num_rows: int, degree: int, ranks: ForkedRanks
) -> None:
    whole = whole_of(name, num_rows)
    pixels_per_row = whole.shape[3] // num_rows
    bands = ranks.run(Layout.bands(tuple(range(degree))), name, num_rows)
    firsts = [shard_bounds(num_rows, degree, slot)[0] * pixels_per_row for slot in range(degree)]
    assert [band.scalars["first_row"] for band in bands] == firsts
    found = torch.cat([band.tensors["pixels"] for band in bands], dim=3)
    assert found.shape == whole.shape
    assert whole.std() > 0.01, "a decode of nothing tells nothing"
    assert (found - whole).abs().max() <= TOLERANCE * whole.abs().max()


@pytest.mark.parametrize("name", [*VAES, *FAST])
def test_equal_degrees_give_equal_bits_on_any_ranks(name: str, ranks: ForkedRanks) -> None:
    first, *others = (
        [band.tensors["pixels"] for band in ranks.run(Layout.bands(chosen), name, 5)]
        for chosen in ((0, 1, 2), (3, 1, 0), (2, 0, 1))
    )
    for bands in others:
        assert all(torch.equal(one, other) for one, other in zip(first, bands, strict=True))


def test_a_rank_alone_decodes_as_without_hooks() -> None:
    plain = small_vae("wan 2.2")
    with torch.no_grad():
        wanted = plain.decode(latents_of(5), return_dict=False)[0]
    assert torch.equal(decode(None, "wan 2.2", 5).tensors["pixels"], wanted)


def test_more_ranks_than_rows_are_refused_and_two_branches_too(ranks: ForkedRanks) -> None:
    assert "2 rows of latents cannot be shared among 3 ranks" in ranks.run_refused(
        Layout.bands((0, 1, 2)), "wan 2.1", 2
    )
    assert "no guidance branches" in ranks.run_refused(Layout((0, 1), cfg=2), "wan 2.1", 4)


def test_a_decoder_with_layers_of_another_kind_is_refused() -> None:
    vae = VAES["wan 2.1"]()
    vae.decoder.conv_out = torch.nn.Conv3d(8, 3, 5, padding=2)
    with pytest.raises(ModelError, match="decoder's conv_out cannot be shared"):
        install(vae)


def test_what_looks_beyond_a_band_is_all_that_is_replaced() -> None:
    vae = vae_of("wan 2.1")
    shared: Any = sys.modules[type(vae).__module__].F  # type: ignore[attr-defined]
    assert shared.silu is functional.silu
    x = torch.randn(1, 2, 3, 4, 5)
    assert torch.equal(shared.pad(x, (1, 1, 1, 1, 2, 0)), functional.pad(x, (1, 1, 1, 1, 2, 0)))


# --- the adapters


JOBS = {
    "tiny-wan": {"width": 64, "height": 160, "frames": 9},
    "tiny-wan-moe": {"width": 32, "height": 48, "frames": 5},
    "tiny-qwen-image": {"width": 80, "height": 48},
}


def make_frames(checkpoint: Path, asked: JobSpec) -> Callable[..., Fields]:
    """The decode of a job, alone or of a rank."""
    adapter: Any = load_adapter(checkpoint)
    spec = adapter.geometry.resolve(asked)
    _, latents = adapter.prepare(spec, adapter.encode(spec))

    def frames(parallel: Parallel | None = None) -> Fields:
        result: Fields = adapter.decode(spec, latents, parallel=parallel)
        return result

    return frames


@pytest.mark.parametrize("model", JOBS)
def test_frames_put_together_from_bands_differ_by_one_grey_level_at_most(
    model: str, tiny_models: Mapping[str, Path]
) -> None:
    asked = JobSpec(id=model, prompt="a fox", seed=3, steps=2, **JOBS[model])
    whole = make_frames(tiny_models[model], asked)().tensors["frames"]
    forked = ForkedRanks(3, make_frames, tiny_models[model], asked)
    bands = forked.run(Layout.bands((2, 0, 1)))
    forked.close()
    geometry = load_geometry(tiny_models[model])
    assert geometry.num_latent_rows(geometry.resolve(asked)) >= 3
    assert bands[0].scalars["first_row"] == 0
    found = torch.cat([band.tensors["frames"] for band in bands], dim=1)
    assert found.shape == whole.shape
    assert (found.int() - whole.int()).abs().max() <= 1


def test_bands_of_16_bits_are_put_together_as_those_of_8(tiny_models: Mapping[str, Path]) -> None:
    asked = JobSpec(id="a", prompt="a fox", seed=3, steps=2, format="png16", **JOBS["tiny-wan"])
    whole = make_frames(tiny_models["tiny-wan"], asked)().tensors["frames"]
    forked = ForkedRanks(2, make_frames, tiny_models["tiny-wan"], asked)
    bands = forked.run(Layout.bands((1, 0)))
    forked.close()
    found = torch.cat([band.tensors["frames"] for band in bands], dim=1)
    geometry = load_geometry(tiny_models["tiny-wan"])
    assert found.shape == whole.shape == geometry.trajectory(geometry.resolve(asked)).frames_shape
    deep, wanted = (each.numpy().view("<u2").astype(int) for each in (found, whole))
    assert np.abs(deep - wanted).max() <= 4, "of 65,535: float32 rounding"
