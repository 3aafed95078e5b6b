"""The writer process's loop, over a real socket pair and real shared memory."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from gfgen.runtime.files import writer
from gfgen.runtime.files.outputs import Frames, read_metadata
from gfgen.runtime.ipc.content import Content, content_of, remove_unfinished, temporary_name
from gfgen.runtime.ipc.messages import (
    MAX_MESSAGE_BYTES,
    Channel,
    WriteDone,
    WriteFailed,
    WriteRequest,
    WriterReady,
)
from gfgen.runtime.ipc.slab import OutputShape, map_for


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


def deep_pixels(path: Path, channels: int) -> np.ndarray:
    """The pixels of a PNG of 16 bits, which Pillow reads as 8."""
    content = path.read_bytes()
    width, height, bits = *struct.unpack(">II", content[16:24]), content[24]
    assert bits == 16
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path), "-f", "rawvideo"]
    raw = subprocess.run(
        [*command, "-pix_fmt", {3: "rgb48le", 4: "rgba64le"}[channels], "-"], capture_output=True, check=True
    ).stdout
    return np.frombuffer(raw, "<u2").reshape(height, width, channels)


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


@pytest.mark.parametrize("channels", [3, 4])
def test_pixels_of_two_bytes_per_colour_become_a_png_of_16_bits_with_its_texts(
    channel: Channel, tmp_path: Path, channels: int
) -> None:
    deep = np.random.default_rng(3).integers(0, 2**16, (2, 15, 7, channels)).astype("<u2")
    frames = deep.view(np.uint8)
    request = request_for(tmp_path / "fox" / "{frame}.png", frames)
    answer = ask(channel, replace(request, shape=frames.shape), frames)
    assert isinstance(answer, WriteDone), answer
    assert [name for name, *_ in answer.files] == ["0001.png", "0002.png"]
    for each, name in zip(deep, answer.files, strict=True):
        path = tmp_path / "fox" / name[0]
        assert np.array_equal(deep_pixels(path, channels), each)
        assert read_metadata(path) == {"seed": "42"}
        with Image.open(path) as image:
            image.load()
            assert image.info["parameters"]
            assert image.info.get("aspect", (1, 1)) == (1, 1)


def test_a_bad_job_fails_and_the_next_one_is_written(channel: Channel, tmp_path: Path) -> None:
    frames = np.zeros((1, 16, 16, 3), np.uint8)
    good = request_for(tmp_path / "a.png", frames)
    (tmp_path / "file").write_text("")
    for bad, reason in [
        (replace(good, path=str(tmp_path / "a.tiff")), ".tiff"),
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


def ask_for_output(channel: Channel, request: WriteRequest, frames: Frames, *, sound: Any = None) -> Any:
    """Write pictures and sound whose size only the memory says."""
    fd = os.memfd_create("output")
    num_frames, height, width, channels = frames.shape
    shape = OutputShape((num_frames, height, width, channels))
    if sound is not None:
        shape = replace(shape, sound=sound.shape, sound_rate=8000)
    memory = map_for(fd, shape)
    memory[shape.pictures_offset : shape.pictures_offset + frames.nbytes] = frames.tobytes()
    if sound is not None:
        memory[shape.sound_offset :] = sound.tobytes()
    channel.send(replace(request, shape=None), (fd,))
    os.close(fd)
    return answer_of(channel)


def test_a_single_picture_of_unknown_size_is_the_file_as_usual(channel: Channel, tmp_path: Path) -> None:
    frames = np.full((1, 5, 7, 3), 99, np.uint8)
    request = request_for(tmp_path / "a.png", frames)
    answer = ask_for_output(channel, request, frames)
    assert isinstance(answer, WriteDone), answer
    assert (answer.path, answer.files) == (str(tmp_path / "a.png"), ())
    assert answer.made == (1, 5, 7)
    known = ask(channel, replace(request, path=str(tmp_path / "b.png")), frames)
    assert answer.sha256 == known.sha256


def test_each_of_several_pictures_has_a_numbered_file(channel: Channel, tmp_path: Path) -> None:
    frames = np.stack([np.full((8, 8, 3), value, np.uint8) for value in (10, 200)])
    request = request_for(tmp_path / "a.png", frames)
    answer = ask_for_output(channel, request, frames)
    assert isinstance(answer, WriteDone), answer
    assert [name for name, _, _ in answer.files] == ["a-1.png", "a-2.png"]
    assert answer.made == (1, 8, 8)
    assert (answer.path, answer.size_bytes, answer.sha256) == (
        str(tmp_path / "a-1.png"),
        *answer.files[0][1:],
    )
    for name, size_bytes, sha256 in answer.files:
        assert Content(size_bytes, sha256) == content_of(tmp_path / name)
        assert read_metadata(tmp_path / name) == {"seed": "42"}
    assert [Image.open(tmp_path / name).getpixel((0, 0))[0] for name in ("a-1.png", "a-2.png")] == [10, 200]  # type: ignore[index]
    assert not (tmp_path / "a.png").exists()


def test_alpha_reaches_the_file(channel: Channel, tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 4), np.uint8)
    answer = ask_for_output(channel, request_for(tmp_path / "a.png", frames), frames)
    assert isinstance(answer, WriteDone), answer
    for number, frame in enumerate(frames, start=1):
        with Image.open(tmp_path / f"a-{number}.png") as picture:
            assert np.array_equal(np.asarray(picture), frame)
            assert f"Picture: {number} of 2" in picture.info["parameters"]


def test_a_numbered_file_of_another_is_kept(channel: Channel, tmp_path: Path) -> None:
    (tmp_path / "a-2.png").write_bytes(b"mine")
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    request = request_for(tmp_path / "a.png", frames)
    answer = ask_for_output(channel, request, frames)
    assert isinstance(answer, WriteFailed)
    assert "a-2.png: another file got this name" in answer.reason
    earlier = {name: content_of(tmp_path / name) for name in ("a-1.png", "a-2.png")}
    answer = ask_for_output(channel, replace(request, replaces_numbered=earlier), frames)
    assert isinstance(answer, WriteDone), answer


def test_sound_is_in_the_video(channel: Channel, tmp_path: Path) -> None:
    frames = np.zeros((8, 16, 16, 3), np.uint8)
    beep = np.sin(np.arange(8000, dtype=np.float32) / 3) * 0.5
    sound = np.stack([beep, -beep]).astype(np.float32)
    answer = ask_for_output(channel, request_for(tmp_path / "a.mp4", frames), frames, sound=sound)
    assert isinstance(answer, WriteDone), answer
    assert read_metadata(tmp_path / "a.mp4") == {"seed": "42"}
    decode = ("-i", str(tmp_path / "a.mp4"), "-map", "0:a", "-f", "f32le", "pipe:1")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *decode]
    heard = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.float32)
    left, right = heard.reshape(-1, 2)[: len(beep)].T
    assert np.corrcoef(left, beep[: len(left)])[0, 1] > 0.99
    assert np.allclose(left, -right, atol=0.05)


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, (99999).to_bytes(8, "little") * 100])
def test_memory_without_an_output_fails(channel: Channel, tmp_path: Path, content: bytes) -> None:
    fd = os.memfd_create("output")
    os.write(fd, content)
    request = replace(request_for(tmp_path / "a.png", np.zeros((1, 8, 8, 3), np.uint8)), shape=None)
    channel.send(request, (fd,))
    os.close(fd)
    answer = answer_of(channel)
    assert isinstance(answer, WriteFailed)
    assert "holds no output" in answer.reason


def test_a_full_size_request_fits_a_message() -> None:
    longest = {"prompt": "\u96ea" * 20_000, "negative_prompt": "\u96ea" * 20_000}
    request = WriteRequest("x" * 200, (81, 704, 1280, 3), "y" * 4000, fps=24, metadata=longest)
    assert len(pickle.dumps(request)) < MAX_MESSAGE_BYTES * 2 / 3


def test_frames_of_a_video_are_one_animation_and_pictures_are_not(channel: Channel, tmp_path: Path) -> None:
    frames = np.stack([np.full((8, 8, 3), value, np.uint8) for value in (10, 200)])
    request = request_for(tmp_path / "a.webp", frames)
    answer = ask(channel, request, frames)
    assert isinstance(answer, WriteDone), answer
    assert (Path(answer.path).name, answer.files) == ("a.webp", ())
    answer = ask_for_output(channel, replace(request, fps=None), frames)
    assert isinstance(answer, WriteDone), answer
    assert [name for name, _, _ in answer.files] == ["a-1.webp", "a-2.webp"]


def test_frames_of_a_video_are_numbered_pictures_in_a_folder(channel: Channel, tmp_path: Path) -> None:
    frames = np.stack([np.full((8, 8, 3), value, np.uint8) for value in (10, 90, 200)])
    request = request_for(tmp_path / "fox" / "{frame}.png", frames)
    names = ["0001.png", "0002.png", "0003.png"]
    for answer in (ask(channel, request, frames), ask(channel, earlier_of(request, names), frames)):
        assert isinstance(answer, WriteDone), answer
        assert (Path(answer.path).name, [name for name, _, _ in answer.files]) == ("0001.png", names)
        assert sorted(os.listdir(tmp_path / "fox")) == names
    for name, frame in zip(names, frames, strict=True):
        with Image.open(tmp_path / "fox" / name) as picture:
            assert np.array_equal(np.asarray(picture), frame)
    answer = ask_for_output(channel, replace(earlier_of(request, names), fps=None), frames)
    assert isinstance(answer, WriteDone), answer
    assert (len(answer.files), answer.made) == (3, (3, 8, 8))


def earlier_of(request: WriteRequest, names: list[str]) -> WriteRequest:
    folder = Path(request.path).parent
    return replace(request, replaces_numbered={name: content_of(folder / name) for name in names})


def test_a_shorter_video_leaves_no_frames_of_a_longer_one_unless_they_changed(
    channel: Channel, tmp_path: Path
) -> None:
    frames, names = np.zeros((4, 8, 8, 3), np.uint8), ["0001.png", "0002.png", "0003.png", "0004.png"]
    request = request_for(tmp_path / "{frame}.png", frames)
    assert isinstance(ask(channel, request, frames), WriteDone)
    shorter = earlier_of(request_for(tmp_path / "{frame}.png", frames[:1]), names)
    (tmp_path / "0004.png").write_bytes(b"painted over")
    answer = ask(channel, shorter, frames[:1])
    assert isinstance(answer, WriteDone), answer
    assert [name for name, _, _ in answer.files] == ["0001.png"]
    assert sorted(os.listdir(tmp_path)) == ["0001.png", "0004.png"]


def test_unfinished_frames_of_a_dead_writer_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "{frame}.png"
    for name, pid in (("0003.png", 7), ("0001.png", 77)):
        temporary_name(tmp_path / name, pid=pid).write_bytes(b"part")
    (tmp_path / "0002.png").write_bytes(b"whole")
    remove_unfinished(path, pid=7)
    assert sorted(os.listdir(tmp_path)) == [".0001.tmp-77.png", "0002.png"]
