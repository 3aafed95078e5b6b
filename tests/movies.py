"""Videos: reading those that were written, and writing some as phones do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from gfgen.runtime.files.outputs import Frames


def decoded(path: Path, *, height: int, width: int) -> Frames:
    """All frames of a video, as ffmpeg reads them; fails unless they have this size."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path)]
    raw = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], check=True, capture_output=True
    )
    assert f"{width}x{height}" in stream_line(path)
    return np.frombuffer(raw.stdout, np.uint8).reshape(-1, height, width, 3)


def ffmpeg_says(path: Path) -> str:
    """What ffmpeg prints about a file: its streams and tags."""
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", str(path)]
    return subprocess.run(command, check=False, capture_output=True).stderr.decode()


def stream_line(path: Path) -> str:
    return next(line for line in ffmpeg_says(path).splitlines() if "Video:" in line)


def write_videos(folder: Path) -> Path:
    """Two seconds at an even rate; `phone.mp4`, with frames missing, and turned; and one with alpha."""
    import imageio_ffmpeg

    def make(*options: str) -> None:
        subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *options], check=True, cwd=folder)

    source = ("-f", "lavfi", "-i", "testsrc=size=64x32:rate=30:duration=2", "-pix_fmt", "yuv420p")
    make(*source, "even.mp4")
    make(*source, "even.mkv")
    make(*source, "-vf", "select='lt(n,20)+not(mod(n,3))'", "-fps_mode", "vfr", "uneven.mp4")
    make("-display_rotation", "90", "-i", "uneven.mp4", "-c", "copy", "phone.mp4")
    make(
        "-f",
        "lavfi",
        "-i",
        "color=red@0.5:size=64x32:rate=30:duration=1,format=rgba",
        "-c:v",
        "png",
        "alpha.mov",
    )
    return folder
