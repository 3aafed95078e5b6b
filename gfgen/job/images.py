"""Checks, before anything starts, that pictures and videos of jobs open and LoRAs are LoRAs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfgen.errors import OutputError, Warned

if TYPE_CHECKING:
    from PIL import Image

MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 50_000_000  # 150 MB decoded; no model here takes more than a few megapixels
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")  # other decoders are less safe
ANIMATED_FORMATS = ("GIF", "WEBP", "AVIF")
MAX_ANIMATION_PIXELS = 2**31
VIDEO_FORMATS = ("MP4", "M4V", "MOV", "MKV", "WEBM", "AVI")  # endings; any other file is a picture
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
        self.loras: LoraFiles | None = LoraFiles(self._folder)  # None for jobs that come from other machines
        self._sha256 = functools.cache(_checked)

    def check(self, name: str, *, may_be_video: bool = False) -> tuple[Path, str]:
        """Absolute path and SHA-256 of the image. Raises: ImageError if it is missing or no picture."""
        if "://" in name:
            raise ImageError("this is a URL; download the file first")
        path = self._folder / os.path.expanduser(name)
        return path, self._sha256(path, is_video=may_be_video and is_video(name))


class NoImages(ImageReader):
    def __init__(self, advice: str) -> None:
        super().__init__(Path())
        self._advice = advice
        self.loras = None

    def check(self, name: str, *, may_be_video: bool = False) -> tuple[Path, str]:
        raise ImageError(self._advice)


def is_video(name: str | Path) -> bool:
    return Path(name).suffix[1:].upper() in VIDEO_FORMATS


def first_frame(path: Path) -> bytes:
    """The first frame of a video as PNG; raises ImageError if ffmpeg cannot decode it."""
    return _read_by_ffmpeg(path, "-frames:v", "1", "-f", "image2pipe", "-c:v", "png").stdout


def all_frames(video: bytes) -> bytes:
    """The frames of a video as PPM, one after the other. Raises: ImageError."""
    return _read_by_ffmpeg(video, "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm").stdout


def _read_by_ffmpeg(video: Path | bytes, *output: str) -> subprocess.CompletedProcess[bytes]:
    """What ffmpeg makes of the first stream of pictures, and what it says."""
    path, content = (Path("a video"), video) if isinstance(video, bytes) else (video, None)
    source = f"file:{path.absolute()}" if content is None else "pipe:0"
    try:
        command = [ffmpeg_path(), "-hide_banner", "-nostdin", *DEMUXERS, "-i", source]
        command += ["-map", "0:v:0", *output, "pipe:1"]
        done = subprocess.run(command, input=content, capture_output=True, timeout=FFMPEG_TIMEOUT_S)
    except (OSError, OutputError) as error:
        raise ImageError(f"{path} cannot be read: {error}") from None
    except subprocess.TimeoutExpired:
        raise ImageError(f"{path}: reading it takes over {FFMPEG_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0 or not done.stdout:
        status = f"; it ends with {done.returncode}" if done.returncode else ""
        raise ImageError(f"{path} is not a video that {command[0]} can read{status}")
    return done


OTHER_FFMPEG = "unset IMAGEIO_FFMPEG_EXE, or install imageio-ffmpeg again"


def ffmpeg_path() -> str:
    """Raises: OutputError, which says what to do; OSError if no descriptor is left."""
    try:
        import imageio_ffmpeg

        path = str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        for fd in (*os.pipe(), *os.pipe()):  # imageio_ffmpeg hides why it found none
            os.close(fd)
        raise OutputError("there is no ffmpeg; pip install imageio-ffmpeg") from None
    if shutil.which(path) is None:
        raise OutputError(f"{path}: this ffmpeg is gone, or cannot be executed; {OTHER_FFMPEG}")
    return path


def thumbnail(path: Path, side: int) -> bytes:
    """A small WEBP of a picture, or of a video's first frame. Raises: ImageError; OSError."""
    content = io.BytesIO()
    small_picture(path, side).save(content, format="WEBP", quality=80)
    return content.getvalue()


def small_picture(path: Path, side: int) -> Image.Image:
    """A picture, or a video's first frame, that fits into a square. Raises: ImageError; OSError."""
    from PIL import Image

    with Image.open(io.BytesIO(first_frame(path)) if is_video(path) else path) as picture:
        small = picture.convert("RGBA" if picture.has_transparency_data else "RGB")
    small.thumbnail((side, side))
    return small


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
            if (pixels := num_frames(picture) * picture.width * picture.height) > MAX_ANIMATION_PIXELS:
                raise ImageError(f"its frames have {pixels:,} pixels, more than {MAX_ANIMATION_PIXELS:,}")
            for _ in frames_of(picture):
                pass
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"the picture has more than {MAX_IMAGE_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise ImageError("the file is not a picture") from None
    # Decoders meet broken bytes with nearly any exception (SyntaxError, struct.error, IndexError).
    except Exception as error:
        raise ImageError(f"the picture is broken ({error})") from None


def num_frames(picture: Image.Image) -> int:
    return getattr(picture, "n_frames", 1) if picture.format in ANIMATED_FORMATS else 1


def frames_of(picture: Image.Image) -> Iterator[Image.Image]:
    for idx in range(num_frames(picture)):
        picture.seek(idx)
        picture.load()
        yield picture


def as_rgb(picture: Image.Image, *, background: str | None = None, has_alpha: bool = False) -> Image.Image:
    """As RGB, with a colour (None: white, "": the one that they hide) for transparent pixels, or as RGBA."""
    import numpy as np
    from PIL import Image

    if picture.mode.startswith(("I", "F")):
        levels = np.nan_to_num(np.asarray(picture, np.float64) * (255 / _white_of(picture)))
        picture = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    if has_alpha:
        return picture.convert("RGBA")
    if background == "" or not _is_transparent(picture):
        return picture.convert("RGB")
    below = Image.new("RGBA", picture.size, background or "white")
    return Image.alpha_composite(below, picture.convert("RGBA")).convert("RGB")


def _is_transparent(picture: Image.Image) -> bool:
    return picture.has_transparency_data and any(picture.convert("RGBA").getchannel("A").histogram()[:255])


def _white_of(picture: Image.Image) -> float:
    """The number for white. Where the format has none, the first of 1 (for floats), 255 and 65,535 that no
    pixel exceeds, or the largest pixel."""
    import numpy as np

    if picture.mode.startswith("I;16"):
        return 65_535.0
    pixels = np.asarray(picture, np.float64)
    most = float(pixels[np.isfinite(pixels)].max(initial=0))
    return next((x for x in (1.0, 255.0, 65_535.0)[picture.mode == "I" :] if most <= x), most)


RATE = "frames of a video count once each, so at another `fps` it plays faster or slower"
TRANSPARENT = "transparent pixels become white; `background` gives them another colour"
TRANSPARENT_MASK = "transparent pixels of a mask have the colour that they hide, which is mostly black"


def takes_frames(argument: str) -> bool:
    """Whether an argument of a pipeline's call gets all frames of an animation, and not the first one."""
    return "image" not in argument


@functools.lru_cache(4096)
def remarks_on(path: str, sha256: str, *, argument: str) -> tuple[Warned, ...]:
    """What in a file with this hash does not act as it looks; nothing if it cannot be read any more."""
    with contextlib.suppress(OSError, ImageError):
        if is_video(path):
            return tuple(_remarks_on_video(Path(path)))
        return tuple(_remarks_on_picture(Path(path), argument))
    return ()


@functools.lru_cache(4096)
def upright_size(path: str, sha256: str) -> tuple[int, int] | None:
    """Width and height of a picture with this hash; None if it cannot be read any more."""
    from PIL import Image

    with contextlib.suppress(OSError), warnings.catch_warnings(action="ignore"):  # noqa: SIM117 (of odd metadata)
        with Image.open(path, formats=IMAGE_FORMATS) as picture:
            is_turned = picture.format != "TIFF" and picture.getexif().get(274) in (5, 6, 7, 8)
            return picture.size[::-1] if is_turned else picture.size
    return None


def _remarks_on_picture(path: Path, argument: str) -> Iterator[Warned]:
    from PIL import Image

    with Image.open(path, formats=IMAGE_FORMATS) as picture:
        number, moves = getattr(picture, "n_frames", 1), takes_frames(argument) and num_frames(picture) > 1
        if number > 1 and not moves and picture.format != "MPO":
            yield Warned("the first of several frames or pages counts", f"{path.name} has {number}")
        if picture.mode in ("I", "F"):
            white = f"{path.name}: {_white_of(picture):g} is taken for white"
            yield Warned("numbers in a picture whose format does not say what is white", white)
        is_mask = "mask" in argument
        if is_mask and not (moves or any(as_rgb(picture, background="").convert("L").histogram()[128:])):
            yield Warned("a mask without light pixels selects nothing", path.name)
        if not moves and not picture.has_transparency_data:
            return  # it need not be decoded
        frames = itertools.islice(frames_of(picture), None if moves else 1)
        found = [(_is_transparent(frame), frame.info.get("duration", 0)) for frame in frames]
        if any(is_transparent for is_transparent, _ in found):
            yield Warned(TRANSPARENT_MASK if is_mask else TRANSPARENT, path.name)
        if len(times := {time for _, time in found}) > 1:
            detail = f"{path.name}: {min(times)} to {max(times)} ms"
            yield Warned("frames of uneven times count once each", detail)


def _remarks_on_video(path: Path) -> Iterator[Warned]:
    done = _read_by_ffmpeg(path, "-c", "copy", "-f", "framecrc")
    if re.search(rb"Video: .*(yuva|rgba|bgra|argb|abgr|gbrap)|(?i:alpha_mode)", done.stderr):
        yield Warned("transparent pixels of a video show what lies under them", path.name)
    if re.search(rb"Video: .*(smpte2084|arib-std-b67)", done.stderr):
        yield Warned("colours of an HDR video become pale, because they are not mapped to sRGB", path.name)
    text, rate = done.stdout.decode(), re.search(rb"([\d.]+)(k?) tbr", done.stderr)
    ticks = [int(tick) for tick in re.findall(r"^0, *-?\d+, *(-?\d+)", text, re.MULTILINE)]
    if rate and ticks and (unit := re.search(r"#tb 0: (\d+)/(\d+)", text)):
        per_second = float(rate[1]) * (1000 if rate[2] else 1)
        read = 1 + round((max(ticks) - min(ticks)) * int(unit[1]) / int(unit[2]) * per_second)
        if read != len(ticks):
            detail = f"{path.name}: {len(ticks)} become {read}, {per_second:g} per second"
            yield Warned("frames of uneven times are repeated or left out", detail)
        yield Warned(RATE, f"{path.name} has {per_second:.3g}")


MAX_LORA_BYTES = 8 * 2**30
USUAL_NAME = "pytorch_lora_weights.safetensors"
MARKS = ("lora", "lokr")  # in names of a LoRA's tensors, in every format that diffusers converts
PEFT_FILE, PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_UP = re.compile(r"lora_B|up\.|lokr_w2(?!_a)|\.diff(_b)?$")
"""In names of tensors of which one that is not 0 changes a weight."""
_SCALED = re.compile(r"lora_B|up\.|lokr_w2_b")  # those that an alpha scales
EXPONENTS = {"F64": ("<u8", 0x7FF << 52), "F32": ("<u4", 0xFF << 23), "BF16": ("<u2", 0xFF << 7)}
EXPONENTS |= {"F16": ("<u2", 0x1F << 10), "F8_E5M2": ("u1", 0x1F << 2), "F8_E4M3": ("u1", 0x7F)}
"""By type of number: how its bits are read, and those that are all set in NaN and infinity."""
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
        """The absolute path and SHA-256 of a file, or of `file` in a repository. Raises: LoraError."""
        try:
            return self._found(name, file)
        except (OSError, RuntimeError) as error:  # a loop of links, an unknown ~user, a name too long
            reason = getattr(error, "strerror", None) or error
            raise LoraError(f"{name[:80]} cannot be read ({reason})") from None

    def _find_checked(self, name: str, file: str | None) -> tuple[Path, str]:
        path = self._find(name, file)
        return path, _check_file(path)

    def _find(self, name: str, file: str | None) -> Path:
        path = (self._folder / Path(os.path.expanduser(name))).resolve()
        if path.is_dir():
            return path / file if file is not None else _only_file(path)
        if path.exists():
            if file is not None:
                raise LoraError(f"{path} is a file; leave `file` out")
            return path
        if name.count("/") != 1 or name.endswith(".safetensors"):
            raise LoraError(f"{path} does not exist")
        return _from_hub(name, file or USUAL_NAME)


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
    """Raises: LoraError for tensors of whole numbers, for NaN and infinity, and for what has no effect."""
    import numpy as np

    with path.open("rb") as file:
        start = 8 + (length := int.from_bytes(file.read(8), "little"))
        entries = {name: x for name, x in json.loads(file.read(length)).items() if name != "__metadata__"}
    content = np.memmap(path, mode="r")

    def is_zero(name: str) -> bool:
        begin, end = (start + offset for offset in entries[name]["data_offsets"])
        kind = EXPONENTS.get(entries[name]["dtype"])
        bits: Any = content[begin:end] if kind is None else content[begin:end].view(kind[0]) << 1  # no signs
        return not np.any(bits)

    off = tuple(name[:-5] for name in entries if name.endswith("alpha") and is_zero(name))
    has_effect = []
    for name, entry in entries.items():
        if (kind := EXPONENTS.get(entry["dtype"])) is not None:
            begin, end = (start + offset for offset in entry["data_offsets"])
            if np.any((content[begin:end].view(kind[0]) & kind[1]) == kind[1]):
                raise LoraError(f"{path}: {name} has NaN or infinity")
            if _UP.search(name):
                has_effect.append(not (is_zero(name) or (name.startswith(off) and _SCALED.search(name))))
        elif not name.endswith("alpha"):
            accepted = "floating-point numbers are accepted"
            raise LoraError(f"{path}: {name} has the type {entry['dtype']}; {accepted}")
    if has_effect and not any(has_effect):
        raise LoraError(f"{path}: has no effect, because its second factors or alphas are all 0")
