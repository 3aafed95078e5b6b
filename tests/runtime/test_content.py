"""How files get their names, and are known again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builders import make_job

from gfgen.errors import OutputError
from gfgen.runtime.ipc.content import (
    Content,
    content_of,
    is_unchanged,
    name_file,
    read_mark,
    remove_leftovers,
    remove_mark,
    remove_unfinished,
    set_mark,
    temporary_name,
)


@pytest.fixture
def fox(tmp_path: Path) -> Path:
    path = tmp_path / "fox.png"
    path.write_bytes(b"fox")
    return path


def test_a_file_is_unchanged_if_it_is_one_of_the_same_size_and_hash(fox: Path) -> None:
    content = content_of(fox)
    assert is_unchanged(fox, content)
    assert not is_unchanged(fox, Content(3, "another hash"))
    assert not is_unchanged(fox, Content(4, content.sha256))
    assert is_unchanged(fox, Content(3)), "without a hash the size decides"
    assert not is_unchanged(fox, Content(4))
    link = fox.with_name("link.png")
    link.symlink_to(fox)
    assert not is_unchanged(link, Content(link.lstat().st_size))
    assert not is_unchanged(fox.with_name("gone.png"), content)


def test_a_mark_counts_for_the_file_that_it_was_made_for(fox: Path) -> None:
    assert read_mark(fox) is None
    set_mark(fox, content_of(fox), name="fox.png", made_for={"id": "fox"})
    assert (read_mark(fox) or {}).get("id") == "fox"
    moved = fox.rename(fox.with_name("moved.png"))
    assert read_mark(moved) is None
    back = moved.rename(fox)
    back.write_bytes(b"cat")
    assert read_mark(back) is None
    remove_mark(back)
    assert "user.gfgen" not in os.listxattr(back)


def test_a_file_takes_its_name_from_its_predecessor_alone(fox: Path) -> None:
    new = temporary_name(fox)
    for replaces in (None, Content(3, "another hash")):
        new.write_bytes(b"new")
        with pytest.raises(OutputError, match="another file got this name"):
            name_file(new, fox, replaces=replaces, made_for={"id": "fox"})
    assert name_file(new, fox, replaces=content_of(fox), made_for={"id": "fox"}) == content_of(fox)
    assert fox.read_bytes() == b"new"
    new.write_bytes(b"try")
    name_file(new, fox, replaces=None, made_for={"id": "fox"})  # an earlier try of the same job
    assert fox.read_bytes() == b"try"


def test_partial_files_are_removed_and_others_stay(fox: Path) -> None:
    others = [fox, *(fox.with_name(name) for name in (".fox.tmp-1.txt", ".fox.tmp-x.png", "fox.tmp-1.png"))]
    for path in (*others, fox.with_name(".fox.tmp-1.png"), fox.with_name(".film.tmp-22.MP4")):
        path.write_bytes(b"fox")
    assert remove_leftovers(fox.parent) == 2
    assert sorted(fox.parent.iterdir()) == sorted(others)
    temporary_name(fox, pid=7).write_bytes(b"fox")
    remove_unfinished(fox, pid=7)
    assert sorted(fox.parent.iterdir()) == sorted(others)


def test_a_png_may_take_as_much_room_as_its_pixels() -> None:
    assert make_job("fox").file_bytes == 4096 + 16 * 16 * 3
