"""Which blocks are on the device, by their sizes and the room there is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gfgen.models.geometry.weights import (
    NUM_BUFFERS,
    STREAMABLE,
    TEXT_ENCODER,
    Part,
    Placement,
    block_key,
    placed,
    spread,
)

sizes = st.integers(1, 1000)
components = st.sampled_from(
    ["text_encoder", "text_encoder_2", "transformer", "transformer_2", "vae", "unet"]
)
blocks = st.lists(sizes, max_size=20).map(lambda own: {f"blocks.{idx}": each for idx, each in enumerate(own)})
models = st.dictionaries(components, st.builds(Part, sizes, blocks), min_size=1)


def held(parts: Mapping[str, Part], placement: Placement) -> int:
    """What the device holds: all that is not streamed, and the buffers."""
    total, largest = 0, 0
    for name, part in parts.items():
        streamed = placement.streamed.get(name, frozenset())
        assert streamed <= part.blocks.keys()
        total += part.fixed + sum(size for key, size in part.blocks.items() if key not in streamed)
        largest = max([largest, *(part.blocks[key] for key in streamed)])
    return total + placement.num_buffers * largest


@given(models, st.integers(0, 40_000))
def test_a_placement_never_takes_more_than_the_room_and_is_whole_if_that_fits(
    parts: dict[str, Part], room: int
) -> None:
    found, total = placed(parts, room), sum(part.total for part in parts.values())
    if total <= room:
        assert found == Placement()
    if held(parts, found) > room:
        streamable = [name for name in parts if STREAMABLE.fullmatch(name)]
        whole = {name: frozenset(parts[name].blocks) for name in streamable if parts[name].blocks}
        least = min(total, *(held(parts, Placement(whole, number)) for number in NUM_BUFFERS))
        assert held(parts, found) <= least, "as few as possible"
    assert total - found.saved_bytes == held(parts, found)
    assert all(STREAMABLE.fullmatch(name) for name in found.streamed)
    assert found.streamed_bytes == sum(
        parts[name].blocks[key] for name in found.streamed for key in found.streamed[name]
    )


@given(models, st.integers(0, 40_000))
def test_transformers_are_streamed_only_if_all_blocks_of_text_encoders_are(
    parts: dict[str, Part], room: int
) -> None:
    found = placed(parts, room)
    if held(parts, found) <= room and any(not TEXT_ENCODER.fullmatch(name) for name in found.streamed):
        for name, part in parts.items():
            if TEXT_ENCODER.fullmatch(name):
                assert found.streamed.get(name, frozenset()) == part.blocks.keys()


@given(models, st.integers(0, 40_000), st.integers(2, 8))
def test_ranks_keep_streamed_blocks_for_each_other_before_main_memory_alone_holds_any(
    parts: dict[str, Part], room: int, num_ranks: int
) -> None:
    found, total = placed(parts, room, num_sharing=num_ranks), sum(part.total for part in parts.values())
    shared, kept = [(name, key) for name in sorted(found.shared) for key in found.shared[name]], 0
    assert all(keys <= found.streamed[name] for name, keys in found.shared.items())
    assert (not shared) or found.saved_bytes > 0
    for position in range(num_ranks):
        in_order = [parts[n].blocks[k] for n in sorted(parts) for k in parts[n].blocks if (n, k) in shared]
        kept = max(kept, sum(in_order[position::num_ranks]))
    assert total - found.saved_bytes == held(parts, found) + kept
    if found.shared != found.streamed and held(parts, found) + kept <= room:
        every = {name: frozenset(parts[name].blocks) for name in parts if STREAMABLE.fullmatch(name)}
        assert {name: keys for name, keys in every.items() if keys} == found.streamed


@given(st.integers(1, 60), st.integers(1, 60))
def test_streamed_blocks_are_spread_evenly(first: int, second: int) -> None:
    number, of = min(first, second), max(first, second)
    found = spread(number, of=of)
    assert len(set(found)) == number
    assert set(found) <= set(range(of))
    gaps = {after - before for before, after in itertools.pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_forwards_of_two_experts_stream_alike() -> None:
    part = Part(5, {f"blocks.{idx}": 10 for idx in range(40)})
    found = placed({"transformer": part, "transformer_2": part}, 610)
    one, other = (found.streamed[name] for name in ("transformer", "transformer_2"))
    assert abs(len(one) - len(other)) <= 1


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("blocks.7.attn1.to_q.weight", "blocks.7"),
        ("encoder.block.7.layer.0.SelfAttention.q.weight", "block.7"),
        ("model.layers.7.mlp.up_proj.weight", "layers.7"),
        ("model.diffusion_model.double_blocks.3.img_attn.qkv.weight", "transformer_blocks.3"),
        ("single_transformer_blocks.12.proj_out.bias", "single_transformer_blocks.12"),
        ("proj_out.weight", None),
        ("norm.layers.weight", None),
    ],
)
def test_a_block_has_the_same_key_in_files_and_modules(name: str, key: str | None) -> None:
    assert block_key(name) == key
