import os

import pytest
from builders import make_job

from gfgen.runtime.slab import Slab, SlabPlan


@pytest.fixture
def slab():
    plan = SlabPlan.of(make_job("a").trajectory)
    fd = Slab.create(plan, name="a")
    yield Slab(fd, plan)
    os.close(fd)


def test_what_was_published_is_fetched(slab):
    slab.publish("latents", 2, ["meta", 1.5], [memoryview(b"abc"), memoryview(b"defg")], producer=7)
    meta, memory, offset = slab.fetch("latents", 2)
    assert meta == ["meta", 1.5]
    assert bytes(memory[offset : offset + 3]) == b"abc"
    assert bytes(memory[offset + 64 : offset + 68]) == b"defg"


def test_the_word_names_the_dispatch_that_made_it(slab):
    assert slab.producer("latents", 2) == 0
    slab.publish("latents", 2, None, [], producer=7)
    assert slab.producer("latents", 2) == 7


def test_a_version_stays_whole_while_the_next_one_is_written(slab):
    slab.publish("latents", 2, "old", [memoryview(b"old")], producer=7)
    slab.publish("latents", 3, "new", [memoryview(b"new")], producer=8)
    meta, memory, offset = slab.fetch("latents", 2)
    assert (meta, bytes(memory[offset : offset + 3])) == ("old", b"old")
    assert slab.producer("latents", 3) == 8


def test_an_artifact_larger_than_planned_is_refused(slab):
    with pytest.raises(ValueError, match="artifact latents takes"):
        slab.publish("latents", 2, None, [memoryview(bytes(10_000_000))], producer=7)


def test_two_mappings_see_the_same_memory():
    plan = SlabPlan.of(make_job("a").trajectory)
    fd = Slab.create(plan, name="a")
    writer, reader = Slab(fd, plan), Slab(fd, plan)
    os.close(fd)
    writer.publish("prompt", 1, "hello", [], producer=3)
    assert reader.fetch("prompt", 1)[0] == "hello"
