"""The writer process's loop, over a real socket pair and real shared memory."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gfgen.runtime.files import writer
from gfgen.runtime.files.outputs import Frames, read_metadata
from gfgen.runtime.ipc.channel import MAX_MESSAGE_BYTES, Channel
from gfgen.runtime.ipc.content import Content, content_of
from gfgen.runtime.ipc.messages import WriteDone, WriteFailed, WriteRequest, WriterReady


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Our end; a thread serves at the other, and must end when ours is closed."""
    ours, theirs = Channel.pair()
    ours.settimeout(30)
    thread = threading.Thread(target=writer.serve, args=(Channel(theirs),))
    thread.start()
    channel = Channel(ours)
    assert answer_of(channel) == WriterReady()
    yield channel
    ours.close()
    thread.join(30)
    theirs.close()
    assert not thread.is_alive()


def memory_of(frames: Frames) -> int:
    fd = os.memfd_create("frames")
    os.write(fd, frames.tobytes())
    return fd


def request_for(path: Path, frames: Frames) -> WriteRequest:
    shape = (frames.shape[0], frames.shape[1], frames.shape[2], 3)
    return WriteRequest("fox-1", shape, str(path), fps=8, metadata={"seed": "42"})


def ask(channel: Channel, request: WriteRequest, frames: Frames) -> Any:
    fd = memory_of(frames)
    channel.send(request, (fd,))
    os.close(fd)
    return answer_of(channel)


def answer_of(channel: Channel) -> Any:
    received = channel.receive()
    assert received is not None
    return received[0]


@pytest.mark.parametrize(("name", "num_frames"), [("a.png", 1), ("a.mp4", 4)])
def test_frames_in_shared_memory_become_a_file(
    channel: Channel, tmp_path: Path, name: str, num_frames: int
) -> None:
    frames = np.full((num_frames, 16, 24, 3), 99, np.uint8)
    answer = ask(channel, request_for(tmp_path / name, frames), frames)
    assert isinstance(answer, WriteDone)
    assert (answer.job_id, answer.path) == ("fox-1", str(tmp_path / name))
    assert Content(answer.size_bytes, answer.sha256) == content_of(tmp_path / name)
    assert read_metadata(tmp_path / name) == {"seed": "42"}


def test_a_bad_job_fails_and_the_next_one_is_written(channel: Channel, tmp_path: Path) -> None:
    frames = np.zeros((1, 16, 16, 3), np.uint8)
    good = request_for(tmp_path / "a.png", frames)
    (tmp_path / "file").write_text("")
    for bad, reason in [
        (replace(good, path=str(tmp_path / "a.gif")), ".gif"),
        (replace(good, path=str(tmp_path / "file" / "a.png")), "cannot write"),
        (replace(good, shape=(9, 16, 16, 3)), "cannot hold"),
        (replace(good, shape=(0, 16, 16, 3)), "cannot hold"),
        (replace(good, metadata={"seed": b"42"}), "TypeError"),  # type: ignore[dict-item]
    ]:
        answer = ask(channel, bad, frames)
        assert isinstance(answer, WriteFailed)
        assert answer.job_id == "fox-1"
        assert reason in answer.reason
    assert isinstance(ask(channel, good, frames), WriteDone)


def test_a_file_is_replaced_only_if_the_request_says_so(channel: Channel, tmp_path: Path) -> None:
    frames = np.zeros((1, 16, 16, 3), np.uint8)
    (tmp_path / "a.png").write_bytes(b"mine")
    request = request_for(tmp_path / "a.png", frames)
    answer = ask(channel, request, frames)
    assert isinstance(answer, WriteFailed)
    assert "a.png: another file got this name during the run and was kept" in answer.reason
    assert (tmp_path / "a.png").read_bytes() == b"mine"
    answer = ask(channel, replace(request, replaces=content_of(tmp_path / "a.png")), frames)
    assert isinstance(answer, WriteDone)
    assert Content(answer.size_bytes, answer.sha256) == content_of(tmp_path / "a.png")


def test_request_without_frames_fails(channel: Channel, tmp_path: Path) -> None:
    channel.send(request_for(tmp_path / "a.png", np.zeros((1, 16, 16, 3), np.uint8)))
    assert answer_of(channel) == WriteFailed("fox-1", "the request came without its frames")


def test_descriptors_do_not_pile_up(channel: Channel, tmp_path: Path) -> None:
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    request = request_for(tmp_path / "a.png", frames)
    ask(channel, request, frames)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        ask(channel, request, frames)
        ask(channel, replace(request, path="/dev/null/a.png"), frames)
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_a_full_size_request_fits_a_message() -> None:
    longest = {"prompt": "\u96ea" * 4010, "negative_prompt": "\u96ea" * 4010}
    request = WriteRequest("x" * 200, (81, 704, 1280, 3), "y" * 4000, fps=24, metadata=longest)
    assert len(pickle.dumps(request)) < MAX_MESSAGE_BYTES // 2
