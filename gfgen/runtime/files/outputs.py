"""Write frames to files: PNG, JPEG, WebP or AVIF for one, MP4, WebM, MOV, WebP or GIF for several."""

from __future__ import annotations

import errno
import io
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gfgen.errors import OutputError
from gfgen.job.images import as_rgb, ffmpeg_path
from gfgen.job.spec import FORMATS, VIDEO_SUFFIXES, format_of
from gfgen.runtime.files import metadata as labels
from gfgen.runtime.ipc.content import IMAGE_SUFFIXES, SHRINKS, Content, name_file, temporary_name
from gfgen.system.lifeline import die_with_parent
from gfgen.system.linefile import FULL
from gfgen.system.machine import free_bytes, num_cores
from gfgen.system.wording import size_in_words

Frames = NDArray[np.uint8 | np.uint16]  # 16 bits only for PNG


@dataclass(frozen=True, slots=True)
class Sound:
    samples_CS: NDArray[np.float32]  # channels and samples, in [-1, 1]
    rate: int


CORES_PER_THREAD, MIN_THREADS, MAX_THREADS = 4, 2, 8
"""Threads of one ffmpeg. With few cores it competes with the models; with GPUs cores are free, and a job ends
only with its file. The number is the same for all files of a machine, because their bytes depend on it."""
SOUND_BITS_PER_S = "192k"
PICTURE_QUALITY = 95
RATE_FACTORS = {"mp4": 18, "h265": 20, "av1": 25, "webm": 20}  # hardly visible compression; lower is better
WORST_RATE_FACTORS = {"mp4": 51, "h265": 51, "av1": 63, "webm": 63}  # for quality 0; 100 is nearly lossless
_CODECS = {
    "mp4": ("libx264", "-preset", "medium"),
    "h265": ("libx265", "-preset", "medium", "-tag:v", "hvc1", "-x265-params", "log-level=error"),
    "av1": ("libsvtav1", "-preset", "8"),
    "webm": ("libvpx-vp9", "-b:v", "0", "-deadline", "good", "-cpu-used", "4", "-row-mt", "1"),
    "prores": ("prores_ks", "-profile:v", "hq", "-vendor", "apl0"),
}
_CONTAINERS = {
    ".mp4": ("-c:a", "aac", "-b:a", SOUND_BITS_PER_S, "-movflags", "+faststart"),
    ".webm": ("-c:a", "libopus", "-b:a", SOUND_BITS_PER_S, "-fflags", "+bitexact"),
    ".mov": ("-c:a", "pcm_s16le", "-movflags", "+faststart+use_metadata_tags"),
}
"""Without "bitexact" a WebM has a random id; without "use_metadata_tags" a MOV's texts have 64 KB at most."""
_PNG_HEAD_BYTES = 33
_EXIF_MAKER_NOTE, _EXIF_IFD, _EXIF_USER_COMMENT = 0x927C, 0x8769, 0x9286
_JPEG_EXIF_BYTES = 65_533


def write_output(
    frames: Frames,
    path: Path,
    *,
    fps: float | None,
    metadata: labels.Metadata,
    replaces: Content | None = None,
    made_for: Mapping[str, Any] | None = None,
    sound: Sound | None = None,
    place: tuple[int, int] | None = None,
) -> Content:
    """Write frames [F, H, W, C], RGB or with alpha, and return the content of the file.

    place: the picture's number among several of its call, and how many these are.

    Videos have even sizes only, because of their chroma, so an odd edge is repeated once. Sound is AAC in
    MP4, Opus in WebM, and as it is (16 bits) in MOV. Equal frames make equal bytes with one ffmpeg on one
    machine. An existing file is replaced only if it holds `replaces`, or an earlier try with the same
    `made_for` wrote it.

    Raises: OutputError, which says what to do; `path` is then unchanged.
    """
    is_video, metadata = path.suffix.lower() in VIDEO_SUFFIXES, labels.clean(metadata)
    assert is_video or path.suffix.lower() in IMAGE_SUFFIXES, path
    assert frames.ndim == 4, frames.shape
    assert frames.shape[3] in ((3,) if is_video else (3, 4)), frames.shape
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_video:
            _write_video(frames, temporary, fps=fps or 1, metadata=metadata, sound=sound)
        else:
            _write_image(frames, temporary, fps=fps or 1, metadata=metadata, place=place)
        return name_file(temporary, path, replaces=replaces, made_for=made_for)
    except OSError as error:
        raise OutputError(_explain(error, path, frames)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def encoder_threads(num_cores: int) -> int:
    return min(MAX_THREADS, max(MIN_THREADS, num_cores // CORES_PER_THREAD))


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata from `write_output`, or nothing. Raises OutputError when the file cannot be read."""
    try:
        text = _read_video_tag(path) if path.suffix.lower() in VIDEO_SUFFIXES else _read_image_tag(path)
    except (OSError, SyntaxError) as error:
        raise OutputError(f"cannot read {path}: {error}") from error
    return labels.from_json(text)


def _write_image(
    frames: Frames, path: Path, *, fps: float, metadata: labels.Metadata, place: tuple[int, int] | None
) -> None:
    from PIL import Image, PngImagePlugin

    is_deep = frames.dtype == np.uint16
    image, *later = map(Image.fromarray, (frames >> 8).astype(np.uint8) if is_deep else frames)
    if (background := metadata.get("background")) is not None:
        image, *later = (as_rgb(each, background=background) for each in (image, *later))
    text = labels.parameters_text(metadata, size=image.size, place=place)
    as_json = labels.to_json(metadata)
    suffix = path.suffix.lower()
    options: dict[str, Any] = {}
    if later:
        options = {"save_all": True, "append_images": later, "duration": round(1000 / fps), "loop": 0}
    try:
        with path.open("wb") as stream:
            if suffix == ".png":
                chunks = PngImagePlugin.PngInfo()
                chunks.add_text("parameters", text)
                chunks.add_itxt("gfgen", as_json)
                if is_deep:
                    stream.write(_deep_png(frames[0], chunks.chunks))
                else:
                    image.save(stream, format="PNG", pnginfo=chunks)
            elif suffix == ".gif":
                image.save(stream, format="GIF", comment=as_json.encode(), **options)
            else:
                kind = {".webp": "WEBP", ".avif": "AVIF"}.get(suffix, "JPEG")
                exif, quality = _exif(text, as_json), metadata.get("quality", PICTURE_QUALITY)
                if kind == "JPEG" and len(exif) > _JPEG_EXIF_BYTES:
                    exif = _exif("", as_json)
                    exif = exif if len(exif) <= _JPEG_EXIF_BYTES else b""
                image.save(stream, format=kind, quality=quality, exif=exif, **options)
    except ValueError as error:
        raise OutputError(f"cannot write {path.name}: {error}") from error


def _deep_png(frame: Frames, texts: Sequence[tuple[Any, ...]]) -> bytes:
    """A PNG of 16 bits by ffmpeg, since Pillow writes none with colours, with text chunks after its head."""
    from PIL.PngImagePlugin import putchunk

    height, width, channels = frame.shape
    command = [
        *(ffmpeg_path(), "-hide_banner", "-loglevel", "error", "-f", "rawvideo", "-s", f"{width}x{height}"),
        *("-pix_fmt", "rgb48le" if channels == 3 else "rgba64le", "-i", "pipe:0", "-vf", "setsar=1"),
        *("-f", "image2pipe", "-c:v", "png", "-pred", "mixed", "pipe:1"),
    ]
    end, pixels = partial(die_with_parent, os.getpid()), frame.tobytes()
    done = subprocess.run(command, input=pixels, capture_output=True, start_new_session=True, preexec_fn=end)
    if done.returncode != 0:
        raise _encoder_error(done.returncode, io.BytesIO(done.stderr))
    chunks = io.BytesIO()
    for kind, text, *_ in texts:
        putchunk(chunks, kind, text)
    return done.stdout[:_PNG_HEAD_BYTES] + chunks.getvalue() + done.stdout[_PNG_HEAD_BYTES:]


def _exif(text: str, as_json: str) -> bytes:
    """The text where AUTOMATIC1111's web UI has it, whose reader takes no other type, and the JSON."""
    from PIL import Image

    exif = Image.Exif()
    exif[_EXIF_MAKER_NOTE] = as_json.encode()
    exif.get_ifd(_EXIF_IFD)[_EXIF_USER_COMMENT] = b"UNICODE\0" + text.encode("utf-16-be")
    return exif.tobytes().replace(b"\x92\x86\0\1", b"\x92\x86\0\7", 1)  # Pillow calls it BYTE


def _write_video(
    frames: Frames, path: Path, *, fps: float, metadata: labels.Metadata, sound: Sound | None
) -> None:
    size = (frames.shape[2], frames.shape[1])
    tags = {
        "title": labels.title_of(metadata),
        "description": labels.parameters_text(metadata, size=size),
        "comment": labels.to_json(metadata),
    }
    samples = b"" if sound is None else np.ascontiguousarray(sound.samples_CS.T).tobytes()
    with (
        _memory_file(labels.to_ffmetadata(tags).encode()) as tag_file,
        _memory_file(samples) as sound_file,
        _memory_file() as complaints,
    ):
        fds, sounds = (tag_file.fileno(), sound_file.fileno()), list[str]()
        if sound is not None:
            sounds = ["-f", "f32le", "-ar", str(sound.rate), "-ac", str(len(sound.samples_CS))]
            sounds += ["-i", f"pipe:{fds[1]}"]
        coding = _coding_options(metadata, path.suffix.lower())
        command = _encode_command(frames, path, coding, fps=fps, tag_fd=fds[0], sound=sounds)
        with _ffmpeg(command, complaints=complaints, keep_fds=fds) as process:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # ffmpeg has ended early; its exit status says why
                for frame in frames:
                    process.stdin.write(_even(frame).data)
                process.stdin.close()
            status = process.wait()
        if status != 0:
            raise _encoder_error(status, complaints)


def _coding_options(metadata: labels.Metadata, suffix: str) -> list[str]:
    name = metadata.get("format")
    if suffix not in FORMATS["video"].get(str(name), ()):
        name = format_of(suffix, "video")
    codec = ["-c:v", *_CODECS[str(name)]]
    if name not in RATE_FACTORS:
        return codec
    quality, factor = metadata.get("quality"), RATE_FACTORS[name]
    if quality is not None:
        factor = max(1, round(WORST_RATE_FACTORS[name] * (100 - quality) / 100))
    return [*codec, "-crf", str(factor)]


def _encode_command(
    frames: Frames, path: Path, coding: Sequence[str], *, fps: float, tag_fd: int, sound: Sequence[str]
) -> list[str]:
    _, height, width, _ = frames.shape
    size = f"{width + width % 2}x{height + height % 2}"
    threads = encoder_threads(num_cores())
    # RGB becomes BT.709 and says so; ffmpeg's default (BT.601, untagged) shifts the colours.
    pixels = "yuv422p10le" if "prores_ks" in coding else "yuv420p"
    convert = (
        f"scale=flags=accurate_rnd+full_chroma_int:out_color_matrix=bt709:out_range=tv,format={pixels},"
        "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709"
    )
    return [
        *(ffmpeg_path(), "-hide_banner", "-loglevel", "error", "-nostdin", "-y"),
        *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", str(fps), "-i", "pipe:0"),
        *("-f", "ffmetadata", "-i", f"pipe:{tag_fd}", *sound, "-map", "0:v", "-map_metadata", "1"),
        *(("-map", "2:a") if sound else ()),
        *("-filter_threads", str(threads), "-vf", convert),
        *coding,
        *("-threads", str(threads), *_CONTAINERS[path.suffix.lower()], f"file:{path.absolute()}"),
    ]


@contextmanager
def _ffmpeg(
    command: list[str], *, complaints: IO[bytes], keep_fds: tuple[int, ...]
) -> Iterator[subprocess.Popen[bytes]]:
    """A running ffmpeg, which dies with this process, in a session that Ctrl-C does not reach."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=complaints,
        pass_fds=keep_fds,
        restore_signals=False,  # a file beyond ulimit -f is an error that ffmpeg tells, not its death
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),  # otherwise it encodes what it has received
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()


def _encoder_error(status: int, complaints: IO[bytes]) -> Exception:
    complaints.seek(0)
    text = complaints.read().decode("utf-8", "replace").strip()
    for number in (errno.ENOSPC, errno.EFBIG):
        if os.strerror(number) in text:
            return OSError(number, os.strerror(number))
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    reason = text.splitlines()[0] if text else "no message"
    return OutputError(f"ffmpeg ended with {ending}: {reason}")


def _even(frame: Frames) -> Frames:
    height, width, _ = frame.shape
    if height % 2 or width % 2:
        frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(frame)


@contextmanager
def _memory_file(content: bytes = b"") -> Iterator[IO[bytes]]:
    with os.fdopen(os.memfd_create("gfgen-ffmpeg"), "w+b") as stream:
        stream.write(content)
        stream.seek(0)
        yield stream


def _explain(error: OSError, path: Path, frames: Frames) -> str:
    if error.errno in FULL:
        shrinks = SHRINKS.get(path.suffix.lower(), 1)
        free = ""
        with suppress(OSError):
            free = f", {size_in_words(free_bytes(path.parent))} are free"
        need = f"up to {size_in_words(max(frames.nbytes / shrinks, 1e5))} are needed{free}"
        help_ = "raise ulimit -f" if error.errno == errno.EFBIG else "make room, or choose another --output"
        return f"cannot write {path}: {error.strerror}; {need}; {help_}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"cannot write {path}: {error.strerror}; choose a writable folder with --output"
    return f"cannot write {path}: {error.strerror or error}"


def _read_image_tag(path: Path) -> str:
    from PIL import Image

    with Image.open(path) as image:
        if "gfgen" in image.info:
            return str(image.info["gfgen"])
        if image.format == "GIF":
            return bytes(image.info.get("comment", b"")).decode("utf-8", "replace")
        tag = image.getexif().get(_EXIF_MAKER_NOTE, b"")
        return tag.decode("utf-8", "replace") if isinstance(tag, bytes) else str(tag)


def _read_video_tag(path: Path) -> str:
    command = [ffmpeg_path(), "-loglevel", "error", "-nostdin", "-i", f"file:{path.absolute()}"]
    done = subprocess.run([*command, "-f", "ffmetadata", "pipe:1"], capture_output=True, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.decode("utf-8", "replace").strip())
    tags = labels.from_ffmetadata(done.stdout.decode("utf-8", "replace"))
    return {name.lower(): text for name, text in tags.items()}.get("comment", "")  # WebM has "COMMENT"
