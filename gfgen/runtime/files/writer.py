"""The writer process, without torch: takes finished frames from memfds and encodes them to files."""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from gfgen.errors import OutputError
from gfgen.job.spec import FRAME, numbered_name
from gfgen.runtime.files.outputs import Frames, Sound, write_output
from gfgen.runtime.ipc.content import ANIMATED_SUFFIXES, IMAGE_SUFFIXES, Content, remove_replaced
from gfgen.runtime.ipc.messages import Channel, WriteDone, WriteFailed, WriteRequest, WriterReady
from gfgen.runtime.ipc.slab import shape_in
from gfgen.system.signals import leave_to_the_run

logger = logging.getLogger(__name__)


def main(end: socket.socket) -> None:
    """Serve until the other end is closed, whatever signals come to all processes of the run."""
    leave_to_the_run()
    serve(Channel(end))


def serve(channel: Channel) -> None:
    """Write files until the other end is closed. A failure becomes a `WriteFailed` of its job."""
    with suppress(ConnectionError):  # the control plane is gone
        channel.send(WriterReady())
        while (received := channel.receive()) is not None:
            request, fds = received
            assert isinstance(request, WriteRequest), request
            channel.send(handle(request, fds[0] if fds else None))


def handle(request: WriteRequest, frames_fd: int | None) -> WriteDone | WriteFailed:
    began = time.monotonic()
    try:
        if frames_fd is None:
            raise OutputError("the request came without its frames")
        files = _write(request, frames_fd)
        made, is_video = None, FRAME in request.path
        if request.shape is None:
            num_frames, height, width, _ = shape_in(frames_fd).pictures
            made = num_frames if is_video else num_frames // len(files), height, width
    except OutputError as error:
        is_full = getattr(error.__cause__, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        return WriteFailed(request.job_id, reason=str(error), is_full=is_full)
    except Exception as error:  # a bug or a lack of memory fails the job, not the writer
        logger.exception("job %s: writing %s failed", request.job_id, request.path)
        return WriteFailed(request.job_id, reason=f"{request.path}: {type(error).__name__}: {error}")
    finally:
        if frames_fd is not None:
            os.close(frames_fd)
    path, content = files[0]
    return WriteDone(
        request.job_id,
        str(path),
        size_bytes=content.size_bytes,
        write_s=time.monotonic() - began,
        sha256=content.sha256,
        files=tuple((path.name, content.size_bytes, content.sha256) for path, content in files)
        if len(files) > 1 or is_video
        else (),
        made=made,
    )


def _write(request: WriteRequest, frames_fd: int) -> list[tuple[Path, Content]]:
    path, sound = Path(request.path), None
    if request.shape is None:
        frames, sound = map_output(frames_fd)
    else:
        frames = map_frames(frames_fd, request.shape)
    frames = frames.view("<u2") if frames.shape[3] > 4 else frames
    write = partial(write_output, fps=request.fps, metadata=request.metadata, made_for=request.made_for)
    parts = frames_by_file(frames, path, fps=request.fps)
    if len(parts) == 1 and path in parts:
        return [(path, write(frames, path, replaces=request.replaces, sound=sound))]
    files = []
    for number, (each, one) in enumerate(parts.items(), start=1):
        replaces = request.replaces_numbered.get(each.name)
        files.append((each, write(one, each, replaces=replaces, place=(number, len(parts)))))
    remove_replaced(path, {file.name for file, _ in files}, request.replaces_numbered)
    return files


def frames_by_file(frames: Frames, path: Path, *, fps: float | None) -> dict[Path, Frames]:
    """The frames of each file of a job: pictures have one file for each, and so has a video of pictures."""
    suffix = path.suffix.lower()
    is_whole = (suffix in ANIMATED_SUFFIXES and fps is not None) or suffix not in IMAGE_SUFFIXES
    if FRAME not in path.name and (is_whole or len(frames) == 1):
        return {path: frames}
    names = (numbered_name(path.name, idx + 1) for idx in range(len(frames)))
    return {path.with_name(name): frames[idx : idx + 1] for idx, name in enumerate(names)}


def map_output(fd: int) -> tuple[Frames, Sound | None]:
    """Pictures and sound in a memfd that says their size, without a copy. Raises: OutputError."""
    try:
        shape = shape_in(fd)
    except ValueError as error:
        raise OutputError(str(error)) from error
    mapped = mmap.mmap(fd, shape.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    count = math.prod(shape.pictures)
    frames = np.frombuffer(mapped, np.uint8, count=count, offset=shape.pictures_offset)
    if shape.sound is None:
        return frames.reshape(shape.pictures), None
    samples = np.frombuffer(mapped, np.float32, count=math.prod(shape.sound), offset=shape.sound_offset)
    return frames.reshape(shape.pictures), Sound(samples.reshape(shape.sound), shape.sound_rate)


def map_frames(frames_fd: int, shape: tuple[int, int, int, int]) -> Frames:
    """The frames [F, H, W, 3] uint8 in a memfd, without a copy. Raises: OutputError if it is too small."""
    num_bytes = math.prod(shape)
    if min(shape) < 1 or os.fstat(frames_fd).st_size < num_bytes:
        raise OutputError(f"shared memory of {os.fstat(frames_fd).st_size} bytes cannot hold frames {shape}")
    mapped = mmap.mmap(frames_fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    return np.frombuffer(mapped, np.uint8).reshape(shape)  # the array keeps the mapping alive
