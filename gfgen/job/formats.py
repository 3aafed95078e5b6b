"""Formats of outputs, and templates of their names."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping

PICTURES: Mapping[str, tuple[str, ...]] = {
    "png": (".png",),
    "jpeg": (".jpg", ".jpeg"),
    "webp": (".webp",),
    "avif": (".avif",),
}
VIDEOS: Mapping[str, tuple[str, ...]] = {
    "mp4": (".mp4",),
    "h265": (".mp4",),
    "av1": (".mp4",),
    "webp": (".webp",),
    "gif": (".gif",),
}
"""File name endings by format, the usual one first; mp4 has H.264."""
FORMATS: Mapping[str, Mapping[str, tuple[str, ...]]] = {"image": PICTURES, "video": VIDEOS}
NAMES = tuple(dict.fromkeys([*PICTURES, *VIDEOS]))
SUFFIXES = tuple(
    dict.fromkeys(
        suffix for formats in FORMATS.values() for suffixes in formats.values() for suffix in suffixes
    )
)
ENCODERS = {"h265": "libx265", "av1": "libsvtav1"}
WITHOUT_QUALITY = ("png", "gif")

PLACEHOLDER = re.compile(r"\{(id|seed|tag|date)\}")
DATE = "{date}"
"""Replaced at admission to a folder, by the date of the job's first arrival."""


def suffix_of(name: str, kind: str) -> str:
    return FORMATS[kind][name][0]


def format_of(suffix: str, kind: str) -> str | None:
    """The format of a name with this ending; None if this kind of output has none."""
    return next((name for name, suffixes in FORMATS[kind].items() if suffix.lower() in suffixes), None)


def endings(kind: str) -> str:
    """In words: '.mp4, .webp or .gif'."""
    *others, last = dict.fromkeys(suffix for suffixes in FORMATS[kind].values() for suffix in suffixes)
    return f"{', '.join(others)} or {last}"


@functools.cache
def lack_of(name: str) -> str | None:
    if name == "avif":
        from PIL import features

        return None if features.check("avif") else "this Pillow cannot write AVIF"
    if name in ENCODERS:
        try:
            import imageio_ffmpeg

            command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-encoders"]
            found = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20
            )
        except (ImportError, RuntimeError, OSError, subprocess.TimeoutExpired):
            return "there is no ffmpeg; pip install imageio-ffmpeg"
        encoder = ENCODERS[name]
        return None if f" {encoder} ".encode() in found.stdout else f"this ffmpeg has no encoder {encoder}"
    return None


def filled(template: str, *, job_id: str, seed: int, tag: str | None) -> str:
    """The name of an output without its placeholders, except for the date."""
    plain_tag = re.sub(r"[^A-Za-z0-9._-]+", "-", tag or "").strip("-.") or "untagged"
    values = {"id": job_id, "seed": str(seed), "tag": plain_tag, "date": DATE}
    return PLACEHOLDER.sub(lambda found: values[found[1]], template)
