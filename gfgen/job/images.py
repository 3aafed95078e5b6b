"""Checks, before anything starts, that pictures and videos of jobs open and LoRAs are LoRAs."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import subprocess
import warnings
from pathlib import Path

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
            raise ImageError(f"{path} {'is a folder and ' if path.is_dir() else ''}is not a file")
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


MAX_LORA_BYTES = 8 * 2**30
USUAL_NAME = "pytorch_lora_weights.safetensors"
"""What diffusers calls the only file of a folder."""
MARKS = ("lora", "lokr")
"""In names of a LoRA's tensors, in every format that diffusers converts."""
PEFT_FILE, PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_EXPONENTS = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0xFF << 23), "BF16": ("<u2", 0xFF << 7)}
_EXPONENTS |= {"F16": ("<u2", 0x1F << 10), "F8_E5M2": ("u1", 0x1F << 2), "F8_E4M3": ("u1", 0x7F)}
"""By type of number: how its bits are read, and those that are all set in NaN and infinity."""
_BYTES_AT_ONCE = 1 << 26


PICKLES = (".ckpt", ".pt", ".pth", ".bin")
NO_PICKLE = "is a pickle, which can run code when it is read; convert it to .safetensors"


class LoraError(ValueError):
    """A file that is no LoRA, or cannot be read."""


class LoraFiles:
    """Finds and checks the LoRA files of jobs, each once. Relative paths count from a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = functools.cache(self._find_checked)

    def check(self, name: str, file: str | None) -> tuple[Path, str]:
        """The absolute path of a file, or of `file` in a folder or hub repository, and its SHA-256.

        Raises: LoraError when it is missing, unreadable or no LoRA.
        """
        try:
            return self._found(name, file)
        except (OSError, RuntimeError) as error:  # a loop of links, an unknown ~user, a name too long
            reason = getattr(error, "strerror", None) or error
            raise LoraError(f"{name[:80]} cannot be read ({reason})") from None

    def check_name(self, name: str) -> None:
        raise LoraError(f"name {name!r} is for requests over HTTP; give a path")

    def _find_checked(self, name: str, file: str | None) -> tuple[Path, str]:
        path = self._find(name, file)
        return path, _check_file(path)

    def _find(self, name: str, file: str | None) -> Path:
        path = (self._folder / Path(name).expanduser()).resolve()
        if path.is_dir():
            return path / file if file is not None else _only_file(path)
        if path.exists():
            if file is not None:
                raise LoraError(f"{path} is a file; leave `file` out")
            return path
        if name.count("/") != 1 or name.endswith(".safetensors"):
            raise LoraError(f"{path} does not exist")
        return _from_hub(name, file or USUAL_NAME)


class NamedLoras(LoraFiles):
    """Refuses all paths, for jobs that come from other machines. The run knows the names."""

    def __init__(self) -> None:
        super().__init__(Path())

    def check(self, name: str, file: str | None) -> tuple[Path, str]:
        example = '{"name": "ink"}'
        raise LoraError(f"paths are not accepted over HTTP; name a LoRA of the server, such as {example}")

    def check_name(self, name: str) -> None:
        """Accepts all names."""


def _only_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    usual = folder / USUAL_NAME
    if usual in found or len(found) == 1:
        return usual if usual in found else found[0]
    raise LoraError(f"{folder} has {len(found)} files *.safetensors; name one of them with `file`")


def _from_hub(repository: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        beside = str(Path(file).with_name(PEFT_SETTINGS))
        for each in (beside, file) if Path(file).name == PEFT_FILE else (file,):
            found = try_to_load_from_cache(repository, each)
            found = found if isinstance(found, str) else hf_hub_download(repository, each)
        return Path(found)
    except Exception as error:  # the hub raises a dozen unrelated classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LoraError(f"neither a file nor {file} of hub repository {repository} ({reason})") from None


def _check_file(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # a pipe or a device could block or never end
        raise LoraError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    if path.stat().st_size > MAX_LORA_BYTES:
        raise LoraError(f"{path} has more than {MAX_LORA_BYTES // 2**30} GiB")
    if path.suffix.lower() in PICKLES:
        raise LoraError(f"{path} {NO_PICKLE}")
    try:
        with safe_open(path, framework="np") as tensors:
            names = list(tensors.keys())
    except SafetensorError as error:
        raise LoraError(f"{path} is no whole safetensors file ({error})") from None
    if not any(mark in name for name in names for mark in MARKS):
        example = f", but such as {names[0]}" if names else ""
        raise LoraError(f"{path} is no LoRA: none of its tensors is named like one{example}")
    _check_numbers(path)
    return lora_sha256(path)


def settings_file(path: Path) -> Path | None:
    """What peft wrote about a file of LoRAs, beside it."""
    found = path.with_name(PEFT_SETTINGS)
    return found if found.is_file() else None


def lora_sha256(path: Path) -> str:
    """The hash of a file and of the settings beside it, which count as well. Raises: OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    if (settings := settings_file(path)) is not None:
        digest.update(settings.read_bytes())
    return digest.hexdigest()


def _check_numbers(path: Path) -> None:
    """Raises: LoraError for tensors of whole numbers, and for NaN and infinity."""
    import numpy as np

    with path.open("rb") as file:
        start = 8 + (length := int.from_bytes(file.read(8), "little"))
        entries = json.loads(file.read(length))
    content = np.memmap(path, mode="r")
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        if (kind := _EXPONENTS.get(entry["dtype"])) is None:
            if not name.endswith("alpha"):
                accepted = "floating-point numbers are accepted"
                raise LoraError(f"{path}: {name} has the type {entry['dtype']}; {accepted}")
            continue
        for at in range(begin, end, _BYTES_AT_ONCE):
            bits = content[at : min(at + _BYTES_AT_ONCE, end)].view(kind[0])
            if np.any((bits & kind[1]) == kind[1]):
                raise LoraError(f"{path}: {name} has NaN or infinity")
