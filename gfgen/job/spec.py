"""One job as asked (fields.py reads it) or as run: its default id, seed, name and hash."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import secrets
import subprocess
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gfgen.errors import JobError, OutputError, Problem
from gfgen.job.images import OTHER_FFMPEG, ffmpeg_path

SHAPE_FIELDS = ("width", "height", "frames", "fps", "steps")
SCALE_FIELDS = ("guidance_scale", "guidance_scale_2", "boundary_ratio", "flow_shift", "true_cfg_scale")
"""The numbers that a job may leave to its model."""
UPSCALE_FIELDS = ("upscale", "upscale_strength", "upscale_steps")
PIPELINE_FIELDS = ("args", "files", "scheduler", "sigmas", *UPSCALE_FIELDS)
"""What a job says to the calls of its diffusers pipeline, beyond the fields of all models."""
SUFFIXES = {"image": ".png", "video": ".mp4"}  # file name endings by the kind of thing that a model makes
VIDEO_SUFFIXES = (".mp4", ".webm", ".mov")
MAX_NUMBERED = 1_000  # pictures of one job whose names are compared with those of other jobs

FORMATS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "image": {"png": (".png",), "png16": (".png",), "jpeg": (".jpg", ".jpeg")}
    | {"webp": (".webp",), "avif": (".avif",)},
    "video": {"mp4": (".mp4",), "h265": (".mp4",), "webm": (".webm",), "av1": (".mp4", ".webm")}
    | {"prores": (".mov",), "png": (".png",), "png16": (".png",), "webp": (".webp",), "gif": (".gif",)},
}
"""File name endings by format, the usual one first. An ending alone means the first format that has it. mp4
has H.264, webm VP9, and png or png16 of a video is a numbered picture for each frame (`of_frames`)."""
FRAME = "{frame}"  # stands for the number in the name of a video's frames; no job can write it itself
FORMAT_NAMES = list(dict.fromkeys([*FORMATS["image"], *FORMATS["video"]]))
ENDINGS = tuple(
    dict.fromkeys(end for formats in FORMATS.values() for ends in formats.values() for end in ends)
)
ENCODERS = {"mp4": "libx264", "h265": "libx265", "av1": "libsvtav1", "webm": "libvpx-vp9 libopus"}
ENCODERS |= {"prores": "prores_ks", "png16": "png"}
WITHOUT_QUALITY = ("png", "png16", "gif", "prores")

PLACEHOLDERS = ("id", "index", "seed", "tag", "prompt", "model", "date", "time")
"""Admission fills in the index and the default model; the folder knows the others (ownership.py)."""
PLACEHOLDER = re.compile(r"\{(?:(" + "|".join(PLACEHOLDERS) + r")|(index|seed):0?([1-9][0-9]?)d?)\}")
"""A name, or that of a number with its width."""
RANDOM_SEED = -1  # asks for a seed that is drawn once
NUM_SEEDS = 2**64

_NOT_HASHED = (  # files count by their hashes; when a job runs and who asked for it changes no file
    *("id", "image", "files", "lora_files", "enlarged", "place", "line", "tag", "owner", "priority"),
    *("deadline_s", "deadline_at", "deadline_clock", "arrival_s", "timeout_s"),
)
_NO_ARGUMENTS = (
    *("prompt", "negative_prompt", "seed", "output", "format", "quality"),
    *("image_sha256", "files_sha256", "lora", "reuse"),
)
_NUMBERED = re.compile(r"(negative_)?prompt_\d")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))

SLUG_CHARS = 40
SHORT_HASH_CHARS = 10
"""40 bits: among 100,000 jobs with one slug, a clash has a chance of 0.5% and costs a number."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A change of a model's weights: a LoRA. Patches of the same file are equal wherever it is."""

    sha256: str  # of the file when the job was admitted
    scale: float
    target: str | None  # the only model of the pipeline that it changes; None: all that it has layers of
    is_partial: bool  # layers that the models lack are left out
    path: str = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job, as asked; a model's geometry turns it into the same type as run.

    None means that the job does not say. As run (`Geometry.resolve`), `model`, `width`,
    `height`, `frames`, `fps`, `steps`, `seed` and the scales that the family uses are set, and sizes are
    rounded as the family's pipeline would round them.
    """

    id: str
    prompt: str
    negative_prompt: str | None = None
    prompt_syntax: str | None = None  # how both are read (job/weighted.py); None: as they are
    model: str | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: float | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    boundary_ratio: float | None = None
    flow_shift: float | None = None
    true_cfg_scale: float | None = None
    seed: int | None = None
    image: str | None = None  # absolute path of a picture that was readable when the job was admitted
    image_sha256: str | None = None  # of the file's bytes at that time; it stands for it in `spec_hash`
    background: str | None = None
    """Colour under transparent pixels: of inputs (None: white) if the model takes no alpha, or of its own."""
    args: Mapping[str, Any] | None = field(default=None, hash=False)  # of the pipeline's call, as plain JSON
    files: Mapping[str, str | list[str]] | None = field(default=None, hash=False)
    """Absolute paths of pictures and videos, by argument; a list where the argument gets a list."""
    files_sha256: Mapping[str, str | list[str]] | None = field(default=None, hash=False)
    """Hashes of these files when the job was admitted, in the shape of `files`."""
    scheduler: Mapping[str, Any] | None = field(default=None, hash=False)
    """Options of the scheduler, and its `class` if it is another one than the model's."""
    sigmas: list[float] | None = field(default=None, hash=False)  # noise levels of the steps, falling
    recipe: Mapping[str, Any] | None = field(default=None, hash=False)  # by families: fields without a value
    lora: list[Mapping[str, Any]] | None = field(default=None, hash=False)
    """In the order of merging: `sha256` (over HTTP a `name` until admission), `scale`, perhaps `target`."""
    lora_files: list[str] | None = field(default=None, hash=False)
    reuse: float | str | None = None  # the share of its steps that run no transformer, or "if-late"
    upscale: float | None = None
    """How much larger the picture of a second pass is, which begins with that of the first."""
    upscale_strength: float | None = None
    upscale_steps: int | None = None  # of the second pass, of which it runs the share `upscale_strength`
    enlarged: tuple[int, int] | None = None  # width and height of the second pass as run
    deadline_s: float | None = None  # seconds after the arrival
    deadline_at: float | None = None  # Unix time, where the job gave a date or a time of day
    deadline_clock: str | None = None  # that time of day: it is the next one after the job's first arrival
    arrival_s: float = 0.0  # seconds after the start of the run
    timeout_s: float | None = None  # seconds after the arrival; the job fails when it has not ended by then
    priority: int = 0
    tag: str | None = None
    owner: str | None = None  # name of the API key that the job came with; none in a job file
    output: str | None = None  # file name in the output folder, perhaps with placeholders
    format: str | None = None  # such as "webp"; None: that of the name, or PNG or MP4
    quality: int | None = None
    place: int | None = None  # position in its file, from 1, if `output` has {index}; no part of its identity
    line: int | None = None  # line of the job file it came from; no part of the job's identity

    @property
    def may_approximate(self) -> bool:
        """Whether some of its steps run no transformer, or may; the others keep their outputs for them."""
        return self.reuse is not None

    @property
    def sample_bytes(self) -> int:
        """Bytes of one colour of a pixel in its file."""
        return 2 if self.format == "png16" else 1

    @property
    def num_refined(self) -> int:
        """Steps of its second pass as run, and one that begins it: decodes, enlarges, and encodes again."""
        iterations = (self.upscale_steps or 0) * (self.upscale_strength or 0)
        return 1 + int(iterations + 1e-6) if self.enlarged else 0

    @property
    def made_size(self) -> tuple[int, int]:
        """Width and height of what it makes; 0 if only the model knows them."""
        return self.enlarged or (self.width or 0, self.height or 0)

    @property
    def size_text(self) -> str:
        """Such as "832x480"; auto if only the model knows it."""
        return "{}x{}".format(*self.made_size) if self.width is not None else "auto"

    @property
    def patches(self) -> tuple[Patch, ...]:
        """What the job merges into its model's weights, in this order."""
        if not self.lora:
            return ()
        return tuple(
            Patch(each["sha256"], each["scale"], each.get("target"), each.get("partial", False), path)
            for each, path in zip(self.lora, self.lora_files or (), strict=True)
        )

    def without_patches(self) -> JobSpec:
        return replace(self, lora=None, lora_files=None)


HASHED_FIELDS = tuple(each.name for each in fields(JobSpec) if each.name not in _NOT_HASHED)
"""What decides the file's content and name, so all fields but those: the canonical spec."""


def spec_hash(spec: JobSpec, *, has_random_weights: bool = False) -> str:
    """SHA-256 in hex of the job's canonical spec: equal when the finished file would serve.

    Take it of the job as asked, with the run's default model filled in and before a model's
    geometry rounds it. With random weights the same job is another one: its file shows noise.
    The id counts through the default seed alone.
    """
    text = canonical_spec(spec, has_random_weights=has_random_weights)
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_spec(spec: JobSpec, *, has_random_weights: bool = False) -> str:
    """The text that is hashed: JSON in ASCII, sorted keys, only what the job says."""
    said = {name: getattr(spec, name) for name in HASHED_FIELDS}
    if spec.seed is None and spec.id:
        said["seed"] = default_seed(spec.id)
    if has_random_weights:
        said["weights"] = "random"
    return _canonical(said)


def prompts_of(spec: JobSpec) -> dict[str, str]:
    """The texts that encoders read, by field, or by argument as prompt_2."""
    own = {"prompt": spec.prompt, "negative_prompt": spec.negative_prompt or ""}
    others = ((name, text) for name, text in (spec.args or {}).items() if isinstance(text, str))
    return own | {name: text for name, text in others if _NUMBERED.fullmatch(name)}


def call_key(spec: JobSpec) -> str:
    """Equal for jobs as run whose calls have equal arguments, except for texts, seeds and files' contents."""
    said = {name: getattr(spec, name) for name in HASHED_FIELDS if name not in _NO_ARGUMENTS}
    texts = prompts_of(spec)
    said["args"] = {name: bool(x) if name in texts else x for name, x in (spec.args or {}).items()}
    files = {name: len(paths) if isinstance(paths, list) else 1 for name, paths in (spec.files or {}).items()}
    has = {"negative": bool(spec.negative_prompt), "image": spec.image is not None, "files": files}
    return _canonical(said | has)


def default_id(said: Mapping[str, Any]) -> str:
    """slug-hash of the attributes of a job; the reader numbers equal ones."""
    text = _canonical({name: said[name] for name in HASHED_FIELDS if name in said})
    return f"{slug(said['prompt'])}-{hashlib.sha256(text.encode()).hexdigest()[:SHORT_HASH_CHARS]}"


def default_seed(job_id: str) -> int:
    """A seed of 32 bits that depends on the id alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:4], "big")


def drawn(seed: int | None) -> int | None:
    """A seed in place of RANDOM_SEED; others are as they are."""
    return 1 + secrets.randbelow(2**32 - 1) if seed == RANDOM_SEED else seed


def later_seed(seed: int, number: int) -> int:
    """That of a later picture; each picture has a random seed of its own."""
    return seed if seed == RANDOM_SEED else (seed + number) % NUM_SEEDS


def with_defaults(spec: JobSpec, *, model: str) -> JobSpec:
    """The job with the run's default model, and the seed of its id, where it says neither."""
    seed = default_seed(spec.id) if spec.seed is None else spec.seed
    return replace(spec, model=spec.model or model, seed=seed)


def input_files(spec: JobSpec) -> tuple[tuple[str, Path], ...]:
    """Every file that a job reads, with the name of its field or argument."""
    if spec.image is None and spec.files is None and spec.lora_files is None:
        return ()
    given = [*(spec.files or {}).items(), *([("image", spec.image)] if spec.image else ())]
    given += [("lora", spec.lora_files)] if spec.lora_files else []
    return tuple(
        (name, Path(path)) for name, paths in given for path in ([paths] if isinstance(paths, str) else paths)
    )


def default_output(spec: JobSpec, kind: str) -> str:
    """The file name of a job that names none. Raises: JobError when its output has no such format."""
    if spec.format is None:
        return f"{spec.id}{SUFFIXES[kind]}"
    if spec.format not in FORMATS[kind]:
        accepted = f"one of {', '.join(FORMATS[kind])}, because the model makes {kind}s"
        raise JobError(Problem.of("format", spec.format, accepted))
    return f"{spec.id}{suffix_of(spec.format, kind)}"


def output_name(spec: JobSpec, kind: str, *, has_alpha: bool = False) -> str:
    """The file name inside the output folder. Raises: JobError when its format cannot be written here."""
    name = default_output(spec, kind)
    if spec.output is not None:
        name = spec.output
        found = format_of(os.path.splitext(name)[1], kind)
        if found is None:
            accepted = f"a name that ends in {endings(kind)}, because the model makes {kind}s"
            raise JobError(Problem.of("output", name, accepted))
        if spec.format is not None and os.path.splitext(name)[1].lower() not in FORMATS[kind][spec.format]:
            suffixes = " or ".join(FORMATS[kind][spec.format])
            accepted = f"a name that ends in {suffixes}, as format = {spec.format!r} asks"
            raise JobError(Problem.of("output", name, accepted))
    written = spec.format or format_of(os.path.splitext(name)[1], kind) or ""
    if has_alpha and written == "jpeg" and spec.background is None:
        accepted = "has no alpha, unlike the model's pictures; use png, webp or avif, or give background"
        raise JobError(Problem.of("format" if spec.format else "output", spec.format or name, accepted))
    if has_alpha and written == "png16" and spec.background is not None:
        accepted = "png16 keeps alpha; leave it out, or use png"
        raise JobError(Problem.of("background", spec.background, accepted))
    if spec.quality is not None and written in WITHOUT_QUALITY:
        raise JobError(Problem.of("quality", str(spec.quality), f"{written} files have none; leave it out"))
    container = format_of(os.path.splitext(name)[1], kind) or ""
    if (lack := lack_of(written) or lack_of(container)) is not None:
        raise JobError(Problem.of("format", written, lack))
    return of_frames(name) if kind == "video" and written in ("png", "png16") else name


def of_frames(name: str) -> str:
    """The name of a video's frames: pictures in a folder, in place of a file with this name."""
    stem, suffix = os.path.splitext(name)
    return f"{stem}/{FRAME}{suffix}"


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
            command = [ffmpeg_path(), "-hide_banner", "-encoders"]
            found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        except (OSError, OutputError, subprocess.TimeoutExpired) as error:
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise  # told as a limit
            return f"ffmpeg cannot be used: {error}"
        if found.returncode:
            return f"ffmpeg cannot be used: {command[0]} ends with {found.returncode}; {OTHER_FFMPEG}"
        missing = [each for each in ENCODERS[name].split() if f" {each} ".encode() not in found.stdout]
        return f"this ffmpeg has no encoder {missing[0]}" if missing else None
    return None


def wrong_braces(template: str) -> str | None:
    """What is wrong with braces that are no placeholder, and what is accepted; None if nothing is."""
    found = re.search(r"\{[^{}]*\}|[{}]", PLACEHOLDER.sub("", template))
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    return f"{found[0]} is none of {known}, nor {{index:04}} or the like" if found else None


def filled(template: str, *, job_id: str | None = None, **values: str | int | None) -> str:
    """The name of an output with these values of placeholders in it; the other placeholders stay."""
    values["id"] = job_id

    def text_of(found: re.Match[str]) -> str:
        value = values.get(name := found[1] or found[2])
        if value is None or value == RANDOM_SEED:
            return found[0]
        return _AS_PART.get(name, str)(value).zfill(int(found[3] or 0))

    return PLACEHOLDER.sub(text_of, template)


def _plain_part(text: str, otherwise: str) -> str:
    """A text as a part of a file's name, never a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or otherwise


_AS_PART: Mapping[str, Callable[[Any], str]] = {
    "tag": lambda text: _plain_part(text, "untagged"),
    "model": lambda text: _plain_part(text.rstrip("/").rpartition("/")[2], "model"),
    "prompt": lambda text: slug(text),
}


def num_pictures(args: Mapping[str, Any] | None) -> int:
    """Pictures that a job with these `args` asks for; a pipeline may make more or fewer."""
    number = (args or {}).get("num_images_per_prompt")
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return max(1, number) if isinstance(number, int) else 1


def numbered_name(name: str, number: int) -> str:
    if FRAME in name:
        return name.replace(FRAME, f"{number:04}")
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{number}{dot}{suffix}"


def with_own_name(values: dict[str, Any]) -> None:
    """Replace the placeholders of `output` that do not depend on the folder, once the job has its id."""
    if (output := values.get("output")) is not None:
        seed = values.get("seed")
        values["output"] = filled(
            output,
            **{name: values.get(name) for name in ("model", "prompt")},
            job_id=values["id"],
            seed=default_seed(values["id"]) if seed is None else seed,
            tag=values.get("tag") or "",
        )


def file_names(spec_id: str, output: str | None, format_: str | None = None) -> tuple[str, ...]:
    """Every name that a job may write before its model, and so its kind, is known."""
    if output is not None:
        return (output,)
    if format_ is None:
        return tuple(spec_id + suffix for suffix in SUFFIXES.values())
    return tuple(spec_id + suffix_of(format_, kind) for kind in FORMATS if format_ in FORMATS[kind])


def numbered_names(names: Iterable[str], args: Mapping[str, Any] | None) -> Iterator[str]:
    """The names of the files of a job with these `args`: pictures have numbers if there are several."""
    number = num_pictures(args)
    number = number if number <= MAX_NUMBERED else 1
    for name in names:
        if number > 1 and not name.lower().endswith(VIDEO_SUFFIXES):
            yield from (numbered_name(name, each) for each in range(1, number + 1))
        else:
            yield name


def name_key(name: str) -> str:
    """Equal for names that are one file on some file system (case, composed characters)."""
    return unicodedata.normalize("NFC", name).casefold()


def slug(text: str) -> str:
    """The first words in lower-case ASCII joined by dashes; "job" when none is left."""
    ascii_text = unicodedata.normalize("NFKD", text[: 8 * SLUG_CHARS]).encode("ascii", "ignore").decode()
    words = "-".join(re.findall("[a-z0-9]+", ascii_text.lower()))
    if len(words) > SLUG_CHARS:
        cut = words[: SLUG_CHARS + 1]
        words = cut.rpartition("-")[0] or cut[:SLUG_CHARS]
    return words or "job"


def _canonical(said: Mapping[str, Any]) -> str:
    """5 and 5.0 are one value, however the spec was made."""
    present = {
        name: value if isinstance(value, str) else _plain(value)
        for name, value in said.items()
        if value is not None
    }
    return _ENCODER.encode(present)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(map(_plain, value)) if isinstance(value, list) else value
