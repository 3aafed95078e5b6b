"""Checks, before anything starts, that the pictures and videos of a job can be opened."""

from __future__ import annotations

import functools
import hashlib
import io
import subprocess
import warnings
from pathlib import Path

from gfgen.job.loras import LoraFiles, NamedLoras

MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 50_000_000
"""150 MB decoded; no model here takes more than a few megapixels."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Only these decoders open the file, so other formats cannot reach less safe decoders."""
VIDEO_FORMATS = ("MP4", "M4V", "MOV", "MKV", "WEBM", "AVI", "GIF")
"""Endings of the names of videos; any other file is a picture."""
DEMUXERS = ("-format_whitelist", "mov,matroska,avi,gif")
"""Options of ffmpeg. It goes by content, and a playlist (HLS, concat) would make it read other files."""
MAX_VIDEO_BYTES = 2**30
FFMPEG_TIMEOUT_S = 60.0


class ImageError(Exception):
    """The file cannot be used as a picture or video; the message says why in a few words."""


class ImageReader:
    """Checks and hashes the files that jobs name; each path once, even if many jobs name it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.loras = LoraFiles(self._folder)
        self._sha256 = functools.cache(_checked)

    def check(self, name: str, *, may_be_video: bool = False) -> tuple[Path, str]:
        """Absolute path of the image, and the SHA-256 of its bytes.

        Raises: ImageError when it is missing, too large, broken, or no picture.
        """
        if "://" in name:
            raise ImageError("this is a URL; download the file first")
        path = self._folder / name
        return path, self._sha256(path, is_video=may_be_video and is_video(name))


class NoImages(ImageReader):
    def __init__(self, advice: str) -> None:
        super().__init__(Path())
        self._advice = advice
        self.loras = NamedLoras()

    def check(self, name: str, *, may_be_video: bool = False) -> tuple[Path, str]:
        raise ImageError(self._advice)


def is_video(name: str | Path) -> bool:
    """Whether a file is read as a video, by its name."""
    return Path(name).suffix[1:].upper() in VIDEO_FORMATS


def first_frame(path: Path) -> bytes:
    """The first frame of a video as PNG; raises ImageError if ffmpeg cannot decode it."""
    try:
        import imageio_ffmpeg

        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-nostdin", *DEMUXERS]
        command += ["-i", f"file:{path.absolute()}", "-map", "0:v:0", "-frames:v", "1"]
        command += ["-f", "image2pipe", "-c:v", "png", "pipe:1"]
        done = subprocess.run(command, capture_output=True, check=False, timeout=FFMPEG_TIMEOUT_S)
    except (ImportError, RuntimeError):
        raise ImageError("reading videos needs ffmpeg; pip install imageio-ffmpeg") from None
    except subprocess.TimeoutExpired:
        raise ImageError(f"{path}: its first frame takes over {FFMPEG_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0 or not done.stdout:
        raise ImageError(f"{path} is not a video that ffmpeg can read")
    return done.stdout


def thumbnail(path: Path, side: int) -> bytes:
    """A small WEBP of a picture, or of a video's first frame. Raises: ImageError; OSError."""
    from PIL import Image

    with Image.open(io.BytesIO(first_frame(path)) if path.suffix == ".mp4" else path) as picture:
        small = picture.convert("RGB")
    small.thumbnail((side, side))
    content = io.BytesIO()
    small.save(content, format="WEBP", quality=80)
    return content.getvalue()


def check_content(content: bytes) -> str:
    if len(content) > MAX_IMAGE_BYTES:
        raise ImageError(f"the picture has more than {MAX_IMAGE_BYTES // 2**20} MiB")
    _decode(content)
    return hashlib.sha256(content).hexdigest()


def _checked(path: Path, *, is_video: bool) -> str:
    """SHA-256 of a file that decodes to a picture, or has a frame that does; raises ImageError otherwise."""
    if not is_video:
        return check_content(_read(path, max_bytes=MAX_IMAGE_BYTES))
    sha256 = hashlib.sha256(_read(path, max_bytes=MAX_VIDEO_BYTES)).hexdigest()
    first_frame(path)
    return sha256


def _read(path: Path, *, max_bytes: int) -> bytes:
    try:
        if not path.exists():
            raise ImageError(f"{path} does not exist")
        # A pipe or a device could block or never end.
        if not path.is_file():
            raise ImageError(f"{path} is not a file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"{path} cannot be read ({reason})") from None
    if len(content) > max_bytes:
        raise ImageError(f"{path} has more than {max_bytes // 2**20} MiB")
    return content


def _decode(content: bytes) -> None:
    """Decode everything: `verify` alone accepts truncated JPEG files."""
    from PIL import Image, UnidentifiedImageError  # 30 ms that only jobs with an image pay

    try:
        with warnings.catch_warnings():
            # Pillow warns of odd metadata, and of a large picture where we refuse it.
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
            if picture.width * picture.height > MAX_IMAGE_PIXELS:
                raise ImageError(f"{picture.width}x{picture.height} is more than {MAX_IMAGE_PIXELS:,} pixels")
            picture.load()
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"the picture has more than {MAX_IMAGE_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise ImageError("the file is not a picture") from None
    # Decoders meet broken bytes with nearly any exception (SyntaxError, struct.error, IndexError).
    except Exception as error:
        raise ImageError(f"the picture is broken ({error})") from None
