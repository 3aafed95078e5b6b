"""Reading the videos that were written."""

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
    assert f"{width}x{height}" in stream_line(command[0], path)
    return np.frombuffer(raw.stdout, np.uint8).reshape(-1, height, width, 3)


def stream_line(ffmpeg: str, path: Path) -> str:
    shown = subprocess.run([ffmpeg, "-hide_banner", "-i", str(path)], check=False, capture_output=True)
    return next(line for line in shown.stderr.decode().splitlines() if "Video:" in line)
