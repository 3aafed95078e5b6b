"""Appending to the files of a run when the disk is full, or when somebody takes them away."""

import errno
import os
import shutil

import pytest

from gfgen.errors import OutputError
from gfgen.system.linefile import LineFile, write_whole


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "out").mkdir()
    file = LineFile(tmp_path / "out" / "manifest.jsonl")
    yield file
    file.close()


def disk_with_room_for(monkeypatch, num_bytes, code=errno.ENOSPC):
    """Writes succeed in part, then fail, as they do on a disk that fills up."""
    room, write = [num_bytes], os.write

    def limited(fd, content):
        if not room[0]:
            raise OSError(code, os.strerror(code))
        written = write(fd, content[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)


def test_a_line_that_does_not_fit_the_disk_leaves_nothing_behind(lines, monkeypatch):
    lines.append(b"first\n")
    disk_with_room_for(monkeypatch, 10)
    with pytest.raises(OutputError, match="No space left on device; make room, then run the same command"):
        lines.append(b"second, and much longer\n")
    assert lines.path.read_bytes() == b"first\n"


def test_a_line_that_is_written_in_pieces_is_whole(lines, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, content: write(fd, content[:3]))
    lines.append(b"a longer line\n")
    assert lines.path.read_bytes() == b"a longer line\n"


@pytest.mark.parametrize(
    ("code", "advice"), [(errno.EROFS, "make it writable"), (errno.EIO, "choose another --output")]
)
def test_other_failures_say_what_to_do(lines, monkeypatch, code, advice):
    disk_with_room_for(monkeypatch, 0, code)
    with pytest.raises(OutputError, match=advice):
        lines.append(b"line\n")


def test_a_folder_that_was_removed_is_noticed(lines):
    lines.append(b"line\n")
    shutil.rmtree(lines.path.parent)
    with pytest.raises(OutputError, match="was removed or replaced during the run"):
        lines.append(b"line\n")


def test_a_file_that_was_replaced_is_noticed(lines):
    lines.path.rename(lines.path.with_suffix(".old"))
    lines.path.write_text("")
    with pytest.raises(OutputError, match="was removed or replaced"):
        lines.append(b"line\n")


def test_a_torn_line_is_ended_before_the_next_begins(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"whole\ntor")
    file = LineFile(path)
    file.append(b"next\n")
    file.close()
    assert path.read_bytes() == b"whole\ntor\nnext\n"


def test_a_device_is_written_and_not_replaced_by_a_file(tmp_path):
    """Root could: `gfgen profile -o /dev/null`."""
    path = tmp_path / "link"
    path.symlink_to("/dev/null")
    write_whole(path, "times")
    assert path.is_symlink()
