"""Finished files that cannot be had, for a moment or for good, and small pictures that cannot be kept."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gfgen.errors import OutputError
from gfgen.runtime.files.outputs import write_output
from gfgen.server.jobs import files
from gfgen.server.protocol.problems import ApiError


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.new("RGB", (16, 16)).save(path)
    return path


@pytest.fixture(params=[".mp4", ".webm", ".mov"])
def video(request, tmp_path):
    frames = np.full((2, 16, 32, 3), (0, 0, 200), np.uint8)
    write_output(frames, tmp_path / f"a{request.param}", fps=8, metadata={})
    return tmp_path / f"a{request.param}"


def test_a_video_has_a_small_picture(video, tmp_path):
    with Image.open(small(video, tmp_path / "small.webp")) as shown:
        assert shown.size == (32, 16)
        assert shown.getpixel((5, 5))[2] > 150


def small(path, kept):
    files.make_thumbnail(path, kept)
    return kept


WAYS = {
    "whole": lambda path: files.StoredFile(path),
    "small": lambda path: small(path, path.with_suffix(".webp")),
    "png": lambda path: asyncio.run(files.picture_as(path, "png")),
    "jpeg": lambda path: asyncio.run(files.picture_as(path, "jpeg")),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_gone_is_not_found(tmp_path, way):
    with pytest.raises(ApiError) as told:
        WAYS[way](tmp_path / "nothing.png")
    assert (told.value.status, told.value.code) == (404, "file_gone")


@pytest.mark.parametrize("way", ["small", "png", "jpeg"])
def test_a_file_that_cannot_be_read_now_may_be_later(tmp_path, way):
    (tmp_path / "loop.png").symlink_to("loop.png")  # stands for whatever else the system may say
    with pytest.raises(ApiError) as told:
        WAYS[way](tmp_path / "loop.png")
    assert (told.value.status, told.value.code) == (503, "file_unreadable")
    assert told.value.headers["Retry-After"] == "5"


def test_a_file_for_which_no_descriptor_is_left_is_not_gone(monkeypatch, picture):
    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as short:
        short.setattr(Path, "open", none_left)
        with pytest.raises(ApiError) as told:
            WAYS["whole"](picture)
    assert (told.value.status, told.value.code) == (503, "file_unreadable")
    assert "Too many open files" in told.value.message


@pytest.mark.parametrize("way", ["small", "jpeg"])
def test_what_is_no_picture_is_told(tmp_path, way):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ApiError) as told:
        WAYS[way](tmp_path / "broken.png")
    assert (told.value.status, told.value.code) == (404, "no_thumbnail")


def test_a_thumbnail_that_cannot_be_written_says_so_and_leaves_nothing(picture, tmp_path):
    (tmp_path / "kept.partial").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="cannot write a thumbnail"):
        small(picture, tmp_path / "kept.webp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["picture.png"]
    assert small(picture, tmp_path / "kept.webp").exists()


def test_alpha_is_kept_where_the_format_has_it(tmp_path):
    path = tmp_path / "cut.png"
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(path)
    shown = {kind: asyncio.run(files.picture_as(path, kind)) for kind in ("webp", "jpeg")}
    small(path, tmp_path / "small.webp")
    for content in (shown["webp"], (tmp_path / "small.webp").read_bytes()):
        assert Image.open(io.BytesIO(content)).getpixel((0, 0))[3] == 0
    assert min(Image.open(io.BytesIO(shown["jpeg"])).getpixel((0, 0))) > 250
