from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gfgen.graph import DTYPE_BYTES, Artifact
from gfgen.layout import Layout
from gfgen.runtime.core.dispatch import longest_axis, plan_transfers


@st.composite
def layouts(draw):
    degree = draw(st.integers(1, 8))
    ranks = draw(st.permutations(range(8)))[:degree]
    cfg = draw(st.sampled_from([1, 2] if degree % 2 == 0 else [1]))
    return Layout(tuple(ranks), cfg=cfg, ulysses=degree // cfg)


@st.composite
def artifacts(draw):
    shapes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
    dtypes = st.sampled_from(["float32", "bfloat16", "int64"])
    return Artifact("latents", tuple((f"f{i}", tuple(s), draw(dtypes)) for i, s in enumerate(shapes)))


@given(artifacts(), layouts(), layouts())
def test_every_element_arrives_exactly_once_and_nothing_else_moves(artifact, source, target):
    arrived: dict = {}
    for t in plan_transfers(artifact, source=source, destination=target):
        assert t.source in source.ranks
        sent = range(t.start, t.stop)
        assert sent
        arrived.setdefault((t.destination, t.field), Counter()).update(sent)
    for name, shape, _ in artifact.fields:
        for rank in set(target.ranks) - set(source.ranks):
            assert arrived.pop((rank, name)) == Counter(range(shape[longest_axis(shape)]))
    assert not arrived


@given(artifacts(), layouts())
def test_a_layout_that_stays_moves_nothing(artifact, layout):
    assert not plan_transfers(artifact, source=layout, destination=layout)


@given(artifacts(), layouts(), layouts())
def test_owners_of_the_same_range_share_the_work_evenly(artifact, source, target):
    by_source: dict = {}
    for t in plan_transfers(artifact, source=source, destination=target):
        by_source.setdefault((t.field, t.destination), Counter())[t.source] += t.stop - t.start
    for lengths in by_source.values():
        assert max(lengths.values()) - min(lengths.values()) <= 1


@given(artifacts(), layouts(), layouts())
def test_bytes_are_those_of_the_ranges(artifact, source, target):
    fields = {name: (shape, dtype) for name, shape, dtype in artifact.fields}
    for t in plan_transfers(artifact, source=source, destination=target):
        shape, dtype = fields[t.field]
        whole = np.empty(shape, dtype=np.uint8)
        part = whole.take(range(t.start, t.stop), axis=t.axis)
        assert t.size_bytes == part.size * DTYPE_BYTES[dtype]


def test_one_rank_to_another_is_one_transfer_per_field():
    artifact = Artifact("latents", (("sample", (1, 48, 5, 8, 8), "float32"),))
    (transfer,) = plan_transfers(artifact, source=Layout.single(0), destination=Layout.single(3))
    assert (transfer.source, transfer.destination, transfer.size_bytes) == (0, 3, 48 * 5 * 64 * 4)
