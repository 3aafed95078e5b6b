import os
import struct

import pytest
from builders import make_job
from slabs import publish

from gfgen.runtime.ipc import slab as slab_module
from gfgen.runtime.ipc.slab import Slab, SlabPlan


@pytest.fixture
def slab():
    plan = SlabPlan.of(make_job("a").trajectory)
    fd = Slab.create(plan, name="a")
    yield Slab(fd, plan)
    os.close(fd)


def test_what_was_published_is_fetched(slab):
    publish(slab, "latents", 2, ["meta", 1.5], [memoryview(b"abc"), memoryview(b"defg")], producer=7)
    meta, memory, offset = slab.fetch("latents", 2)
    assert meta == ["meta", 1.5]
    assert bytes(memory[offset : offset + 3]) == b"abc"
    assert bytes(memory[offset + 64 : offset + 68]) == b"defg"


def test_the_word_names_the_dispatch_that_made_it(slab):
    assert slab.producer("latents", 2) == 0
    publish(slab, "latents", 2, None, [], producer=7)
    assert slab.producer("latents", 2) == 7


def test_the_word_is_stored_after_all_of_the_payload(slab):
    seen = []

    class Watched(list):
        """Looks at the word whenever a buffer is about to be stored, and after the last."""

        def __iter__(self):
            for buffer in super().__iter__():
                seen.append(slab.producer("latents", 2))
                yield buffer
            seen.append(slab.producer("latents", 2))

    publish(slab, "latents", 2, None, [memoryview(b"old")], producer=7)
    publish(slab, "latents", 2, None, Watched([memoryview(b"abc"), memoryview(b"def")]), producer=8)
    assert len(seen) >= 3
    assert set(seen) == {7}
    assert slab.producer("latents", 2) == 8


def test_the_word_is_eight_aligned_bytes_in_a_line_of_its_own(slab):
    lines = [slab_module._region(name, 2) * slab_module._LINE_BYTES for name in ("prompt", "latents")]
    assert all(line % 64 == 0 for line in lines)
    assert slab_module._WORD.size == 8
    assert slab_module._WORD.format == "Q"  # native: with "<" it may be stored byte by byte


def test_an_outline_is_seen_before_what_it_outlines(slab):
    publish(slab, "latents", 2, "old", [memoryview(b"old")], producer=7)
    assert slab.outliner("latents", 5) == 7
    slab.places("latents", 5, "what it will be like", [3])
    slab.show_outline("latents", 5, producer=8)
    assert (slab.outliner("latents", 5), slab.producer("latents", 5)) == (8, 7)
    assert slab.outline("latents", 5) == "what it will be like"


def test_what_was_outlined_is_not_stored_again_under_those_who_read_it(slab, monkeypatch):
    """Packing clears memory first: for a moment others would see no lengths, and no word."""
    meta = ("what it will be like", 1.5)
    slab.places("latents", 5, meta, [3])
    slab.show_outline("latents", 5, producer=8)
    packed = []

    class Noted(struct.Struct):
        def pack_into(self, memory, offset, *values):
            packed.append(offset)
            super().pack_into(memory, offset, *values)

    monkeypatch.setattr(slab_module, "_LENGTHS", Noted(slab_module._LENGTHS.format))
    monkeypatch.setattr(slab_module, "_WORD", Noted(slab_module._WORD.format))
    publish(slab, "latents", 5, meta, [memoryview(b"abc")], producer=8)
    assert packed == [slab_module._region("latents", 5) * slab_module._LINE_BYTES]
    assert (slab.producer("latents", 5), slab.outline("latents", 5)) == (8, meta)


def test_what_is_published_is_outlined_too(slab):
    publish(slab, "latents", 2, "meta", [memoryview(b"abc")], producer=7)
    assert (slab.outliner("latents", 2), slab.outline("latents", 2)) == (7, "meta")


def test_a_version_stays_whole_while_the_next_one_is_written(slab):
    publish(slab, "latents", 2, "old", [memoryview(b"old")], producer=7)
    publish(slab, "latents", 3, "new", [memoryview(b"new")], producer=8)
    meta, memory, offset = slab.fetch("latents", 2)
    assert (meta, bytes(memory[offset : offset + 3])) == ("old", b"old")
    assert slab.producer("latents", 3) == 8


def test_an_artifact_larger_than_planned_is_refused(slab):
    with pytest.raises(ValueError, match="artifact latents takes"):
        publish(slab, "latents", 2, None, [memoryview(bytes(10_000_000))], producer=7)


def test_two_mappings_see_the_same_memory():
    plan = SlabPlan.of(make_job("a").trajectory)
    fd = Slab.create(plan, name="a")
    writer, reader = Slab(fd, plan), Slab(fd, plan)
    os.close(fd)
    publish(writer, "prompt", 1, "hello", [], producer=3)
    assert reader.fetch("prompt", 1)[0] == "hello"
