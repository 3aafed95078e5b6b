import os
import struct

import pytest
from builders import make_job
from slabs import publish

from gfgen.graph import Trajectory
from gfgen.runtime.ipc import slab as slab_module
from gfgen.runtime.ipc.slab import OutputShape, Slab, SlabPlan, map_for, shape_in


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
    publish(slab, "latents", 2, None, [memoryview(bytes(73536))], producer=7)
    with pytest.raises(ValueError, match="artifact latents takes 73732 bytes, 73728 were planned"):
        publish(slab, "latents", 2, None, [memoryview(bytes(73537))], producer=8)


def test_each_region_has_room_for_a_meta_and_for_padding():
    region_bytes = 64 * 1024 + 4096
    plan = SlabPlan.of(Trajectory("a", 4))
    assert plan == SlabPlan(tuple(4096 + n * region_bytes for n in range(5)), 4096 + 5 * region_bytes)


def test_two_mappings_see_the_same_memory():
    plan = SlabPlan.of(make_job("a").trajectory)
    fd = Slab.create(plan, name="a")
    writer, reader = Slab(fd, plan), Slab(fd, plan)
    os.close(fd)
    publish(writer, "prompt", 1, "hello", [], producer=3)
    assert reader.fetch("prompt", 1)[0] == "hello"


@pytest.mark.parametrize(("sound", "size_bytes"), [((2, 7), 4096 + 128 + 2 * 7 * 4), (None, 4096 + 128)])
def test_the_head_of_an_output_says_what_follows(sound, size_bytes):
    """Two pictures of 3 x 5 pixels take 90 bytes; what follows begins at a multiple of 64."""
    fd = os.memfd_create("output")
    shape = OutputShape((2, 3, 5, 3), sound, 44100)
    assert len(map_for(fd, shape)) == size_bytes
    assert shape_in(fd) == shape
    os.truncate(fd, size_bytes - 1)
    with pytest.raises(ValueError, match=f"{size_bytes - 1} bytes cannot hold {size_bytes}"):
        shape_in(fd)
    os.close(fd)


@pytest.mark.parametrize("length", [0, 4089])
def test_memory_without_a_head_holds_no_output(length):
    fd = os.memfd_create("output")
    os.write(fd, length.to_bytes(8, "little") + b"[[0, 0, 0, 3], null, 0]".ljust(4096))
    with pytest.raises(ValueError, match="holds no output"):
        shape_in(fd)
    os.close(fd)
