"""The fields of a job, for the job file and for HTTP: names, what each accepts, and how it is read.

mapping -> parse_fields -> attributes of JobSpec, and every Problem of this job

The parsers are plain functions because pydantic takes 0.08 s to import and to build a model of these fields,
which every command would pay, and then saves 6 us per job. Requests over HTTP are checked and documented by
this table (server/protocol/schemas.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any

from gfgen.errors import Problem, nearest, whole
from gfgen.job.images import IMAGE_FORMATS, VIDEO_FORMATS, ImageError, ImageReader, LoraError
from gfgen.job.recipes import recipes
from gfgen.job.spec import (
    ENDINGS,
    FORMAT_NAMES,
    NUM_SEEDS,
    PLACEHOLDER,
    RANDOM_SEED,
    SCALE_FIELDS,
    wrong_braces,
)
from gfgen.job.weighted import PLAIN, SYNTAXES

MIN_SIDE, MAX_SIDE = 16, 8192  # pixels of a side; the largest is six times what the models were trained on
MAX_FRAMES = 4093  # Wan's rotary table: the first frame, and 4 for each of 1,023 more latent frames
MAX_STEPS = 1000  # more than the training timesteps would repeat some of them
MIN_FPS, MAX_FPS = 0.1, 240
MAX_SCALE = 100  # guidance scales; 1 turns guidance off, and pictures burn out above 20
MAX_SHIFT = 100
MAX_UPSCALE = 8
MAX_SIGMA = 1_000  # schedulers of the EDM kind begin at 80; others at 1
MAX_OBJECT_CHARS = 20_000
"""Of each of `args`, `files` and `scheduler` as JSON, which are part of messages between processes."""
MAX_PATH_CHARS = 4096
MAX_VOLUME_PIXELS = 2**32  # width x height x frames; 13 GB of RGB, about 4,000 frames of 1280x720
MAX_PROMPT_CHARS = 20_000
MAX_ID_CHARS = 120
MAX_OUTPUT_BYTES = 200  # a file name has at most 255 on Linux; the writer's temporary names need the rest
MAX_FOLDERS = 8  # parts of a name with folders, and the file name
MIN_YEAR, MAX_YEAR = 1971, 9000  # in these years, times are valid in all zones, with a positive Unix time
MAX_DURATION_S = 365 * 86_400
MAX_WHOLE_FLOAT = 2**53  # above it, a float cannot represent every whole number
MAX_SHOWN_CHARS = 80

IF_LATE = "if-late"
MAX_REUSE = 0.8  # of a job's steps; a model may accept less
NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
MAX_LORAS = 16
MAX_LORA_SCALE = 100
LORA_NAMES = ("path", "file", "name", "scale", "target", "partial")
NUMBER_ALONE = re.compile(rf" *-?{NUMBER} *")
UNITS_S = {"d(?:ays?)?": 86_400, "h(?:(?:ou)?rs?)?": 3_600, "m(?:in(?:ute)?s?)?": 60, "s(?:ec(?:ond)?s?)?": 1}
DURATION = re.compile(",? *".join(f"(?:{NUMBER} *{unit})?" for unit in UNITS_S))
CLOCK_FORMATS = ("%H:%M", "%H:%M:%S", "%I:%M %p", "%I:%M%p", "%I %p", "%I%p")
OF_DAY = re.compile(r"\s*[0-9]{1,2}(?![0-9])")
ZONED = re.compile(r"(.*[0-9]) *([+-][0-9]{2}:?[0-9]{2}|[A-Za-z][A-Za-z0-9_/+-]*)")
MAX_TIME_CHARS = 80
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which cannot be written as UTF-8
FRACTION = re.compile(r" *([0-9]{1,9}) */ *([1-9][0-9]{0,8}) *")
WITH_COMMA = re.compile(r" *[+-]?[0-9]+(,[0-9]+)+ *")
SIZE = re.compile(r"([0-9]{1,9}) *[xX] *([0-9]{1,9})")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
ID = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{MAX_ID_CHARS - 1}}}")

STRING = {"type": "string"}
TIME = {"anyOf": [{"type": "number"}, STRING]}

OTHER_NAMES = {
    other: name
    for name, others in {
        "args": "strength clip_skip",
        "format": "output_format",
        "frames": "num_frames length",
        "guidance_scale": "cfg cfg_scale guidance",
        "image": "image_path init_image input_image",
        "model": "checkpoint ckpt",
        "negative_prompt": "negative neg",
        "num_images": "n batch_size batch_count n_iter num_images_per_prompt",
        "output": "filename file_name output_path",
        "prompt": "text caption",
        "scheduler": "sampler sampler_name",
        "size": "max_area resolution w h",
        "steps": "num_inference_steps",
        "fps": "frame_rate",
        "id": "name",
    }.items()
    for other in others.split()
}
"""Names of fields in other tools, where the spelling alone does not lead to ours."""


REPEATED = "given more than once"


class Repeated:
    """What a decoded JSON object has for a key that is there more than once."""

    def __repr__(self) -> str:
        return REPEATED


class Exponential(float):
    """A number that was written with an exponent, as Excel writes long ones: digits may be missing."""

    def __init__(self, text: str) -> None:
        self.text = text


class Refused(Exception):
    """A value that a field does not accept; the message is a hint, and may be empty."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a job.

    `accepted` says in words what `parse` accepts, `schema` says it as JSON schema. `parse` gets any JSON
    value except null, and raises Refused if it does not accept the value.
    """

    name: str
    accepted: str
    parse: Callable[[Any], object]
    schema: Mapping[str, Any]

    def refusal(self, value: object, hint: str) -> Problem:
        accepted = f"{self.accepted}; {hint}" if hint else self.accepted
        return Problem(None, self.name, shown(value), accepted)


def _text(name: str, max_chars: int, *, may_be_blank: bool = False) -> Field:
    """A text, with line breaks and any script, that can be written as UTF-8."""

    def parse(value: object) -> str:
        text = _string(value)
        if len(text) > max_chars:
            raise Refused(f"this one has {len(text):,}")
        if not may_be_blank and not text.strip():
            raise Refused("this one is empty")
        if "\0" in text or SURROGATE.search(text):
            raise Refused("this one contains a NUL or an unpaired surrogate")
        return text

    low = int(not may_be_blank)
    accepted = f"a text of {low} to {max_chars:,} characters"
    return Field(name, accepted, parse, {"type": "string", "minLength": low, "maxLength": max_chars})


def _label(name: str, max_chars: int, what: str) -> Field:
    def parse(value: object) -> str:
        text = _string(value)
        if not 1 <= len(text) <= max_chars:
            raise Refused(f"this one has {len(text):,}")
        if not text.isprintable() or text != text.strip():
            raise Refused("without control characters, and without spaces at its ends")
        return text

    accepted = f"{what} of 1 to {max_chars:,} characters in quotes"
    return Field(name, accepted, parse, {"type": "string", "minLength": 1, "maxLength": max_chars})


def in_range(name: str, low: float, high: float, *, is_whole: bool = False) -> Field:
    """A number, or a whole one; 5.0 is one, since many tools write whole numbers so."""

    def parse(value: object) -> int | float:
        if is_whole and isinstance(value, Exponential):
            raise Refused(
                "write all digits; an exponent leaves some out (in Excel, format the column as text)"
            )
        number = _number(value, low, high)
        if not is_whole:
            return float(number)
        if isinstance(number, float) and not (number.is_integer() and abs(number) <= MAX_WHOLE_FLOAT):
            raise Refused("")
        return int(number)

    what = f"a whole number from {low:,} to {high:,}" if is_whole else f"a number from {low:g} to {high:g}"
    schema = {"type": "integer" if is_whole else "number", "minimum": low, "maximum": high}
    return Field(name, what, parse, schema)


def _duration(name: str, *, may_be_zero: bool) -> Field:
    def parse(value: object) -> float:
        seconds = _seconds(value)
        if seconds == 0 and not may_be_zero:
            raise Refused("")
        return seconds

    low = "0 or more" if may_be_zero else "more than 0"
    accepted = f'seconds ({low}, at most 365 days), or a text like "90s", "1h30m" or "2d"'
    return Field(name, accepted, parse, TIME)


def _parse_deadline(value: object) -> float | datetime:
    """Seconds after the arrival, or a moment."""
    if isinstance(value, str) and (moment := parse_moment(value, now=time.time())) is not None:
        return moment
    return FIELDS["timeout"].parse(value)  # type: ignore[return-value]


def parse_moment(text: str, *, now: float) -> datetime | None:
    """The moment of a time, date or both, by default local; None for other texts. Raises: Refused."""
    text = text.strip()
    if len(text) > MAX_TIME_CHARS or DURATION.fullmatch(text.lower()):  # no time, and soon told
        return None
    try:
        moment = _moment(text, now, None)
        if moment is None and (split := ZONED.fullmatch(text)) and _moment(split[1], now, None):
            moment = _moment(split[1], now, _zone(split[2]))
    except OverflowError:
        moment = datetime.max
    if moment is not None and not MIN_YEAR <= moment.year <= MAX_YEAR:
        raise Refused(f"a year from {MIN_YEAR} to {MAX_YEAR}")
    return moment


def _moment(text: str, now: float, zone: tzinfo | None) -> datetime | None:
    if "-" not in text:
        today = datetime.fromtimestamp(now, zone).date()
        for form in CLOCK_FORMATS:
            with contextlib.suppress(ValueError):
                at = datetime.strptime(text, form).time()
                moments = (datetime.combine(today + timedelta(days=days), at, zone) for days in range(3))
                return next(moment for moment in moments if moment.timestamp() > now)
    if "-" not in text or "W" in text:  # a week, of which nobody means the Monday
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if len(text) <= len("2026-12-01"):
        moment += timedelta(days=1)
    return moment if zone is None else moment.replace(tzinfo=zone)


def _zone(name: str) -> tzinfo:
    if name[0] in "+-" or name in "Zz":
        with contextlib.suppress(ValueError):
            return datetime.strptime(name.upper(), "%z").tzinfo  # type: ignore[return-value]
    from zoneinfo import ZoneInfo  # 5 ms that only such times pay

    for spelled in (name, name.upper(), name.title()):
        with contextlib.suppress(KeyError, ValueError, OSError):
            return ZoneInfo(spelled)
    raise Refused(f"instead of {name}, a zone such as Europe/Berlin, CET, UTC or +01:00")


def _parse_fps(value: object) -> float:
    if isinstance(value, str) and (match := FRACTION.fullmatch(value)):
        value = int(match[1]) / int(match[2])
    number = _number(value, MIN_FPS, MAX_FPS)
    return int(number) if float(number).is_integer() else float(number)


def _parse_size(value: object) -> tuple[int, int]:
    match = SIZE.fullmatch(_string(value))
    if not match:
        raise Refused("")
    width, height = (int(_number(int(side), MIN_SIDE, MAX_SIDE)) for side in match.groups())
    return width, height


def _parse_id(value: object) -> str:
    text = _string(value)
    if not ID.fullmatch(text):
        raise Refused("")
    return text


def _parse_output(value: object) -> str:
    name = _string(value)
    if (wrong := wrong_braces(name)) is not None:
        raise Refused(wrong)
    if "\\" in name or ("/" in name and not PLACEHOLDER.search(name)):
        raise Refused("without a folder, or with a placeholder such as {id} in the name")
    parts = name.split("/")
    if not all(part.isprintable() and part == part.strip() and not part.startswith(".") for part in parts):
        raise Refused("without control characters, a leading dot, or spaces at its ends")
    stem, dot, suffix = parts[-1].rpartition(".")
    if not all(parts) or not stem or f"{dot}{suffix.lower()}" not in ENDINGS:
        raise Refused("")
    if len(parts) > MAX_FOLDERS:
        raise Refused(f"at most {MAX_FOLDERS - 1} folders")
    if (longest := max(len(part.encode()) for part in parts)) > MAX_OUTPUT_BYTES:
        raise Refused(f"this one has {longest} bytes")
    return name


def _parse_format(value: object) -> str:
    name = _string(value).lower()
    name = {"jpg": "jpeg", "h264": "mp4", "vp9": "webm", "mov": "prores"}.get(name, name)
    if name not in FORMAT_NAMES:
        raise Refused("")
    return name


def _parse_colour(value: object) -> str:
    from PIL import ImageColor

    try:
        red, green, blue = ImageColor.getrgb(_string(value))  # type: ignore[misc]
    except ValueError:
        raise Refused("") from None
    return f"#{red:02x}{green:02x}{blue:02x}"


def _object(name: str, accepted: str, parse_value: Callable[[str, Any], object]) -> Field:
    def parse(value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise Refused("")
        if not value:
            raise Refused("this one is empty")
        if repeated := [key for key in value if isinstance(value[key], Repeated)]:
            raise Refused(f"{plain_name(repeated[0])} is {REPEATED}")
        if (bad := next((key for key in value if not NAME.fullmatch(str(key))), None)) is not None:
            raise Refused(f"{plain_name(str(bad))} is not a name")
        parsed = {key: parse_value(key, inner) for key, inner in value.items()}
        if (num_chars := len(json.dumps(parsed))) > MAX_OBJECT_CHARS:
            raise Refused(f"at most {MAX_OBJECT_CHARS:,} characters of JSON; this one has {num_chars:,}")
        return parsed

    return Field(name, accepted, parse, {"type": "object", "minProperties": 1})


def _parse_plain(name: str, value: Any) -> Any:
    """A JSON value without objects, of numbers that are finite."""
    if isinstance(value, list):
        return [_parse_plain(name, inner) for inner in value]
    if isinstance(value, Mapping) or (isinstance(value, float) and not math.isfinite(value)):
        raise Refused(f"{name} is {shown(value)}")
    if isinstance(value, str) and SURROGATE.search(value):
        raise Refused(f"{name} contains an unpaired surrogate")
    return value


def _parse_paths(name: str, value: Any) -> str | list[str]:
    if isinstance(value, list):
        if not value:
            raise Refused(f"{name} has no files")
        return [_parse_path(name, item) for item in value]
    return _parse_path(name, value)


def _parse_path(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise Refused(f"{name} is {shown(value)}")
    if len(value) > MAX_PATH_CHARS:
        raise Refused(f"{name} has {len(value):,} characters; at most {MAX_PATH_CHARS:,} are accepted")
    return value


def _parse_scheduler(value: object) -> object:
    if isinstance(value, str) and not (value.strip() and value.isprintable()):
        raise Refused("")
    return _SCHEDULER_OPTIONS.parse({"class": value.strip()} if isinstance(value, str) else value)


def _parse_recipe(value: object) -> dict[str, Any]:
    """Fields by families of models, of a name or as they are."""
    named = recipes()
    families = named.get(value) if isinstance(value, str) else value
    if not isinstance(families, Mapping) or not all(isinstance(each, Mapping) for each in families.values()):
        near = nearest(value, named) if isinstance(value, str) else None
        raise Refused(f"did you mean {near}?" if near else "")
    return {family: dict(_recipe_fields(fields)) for family, fields in families.items()}


def _recipe_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if name not in RECIPE_FIELDS:
            raise Refused(f"{plain_name(name)} is not one of {', '.join(RECIPE_FIELDS)}")
        try:
            yield name, value if name == "lora" else FIELDS[name].parse(value)
        except Refused as refused:
            raise Refused(str(FIELDS[name].refusal(value, str(refused)))) from None


def _parse_sigmas(value: object) -> list[float]:
    if not isinstance(value, list):
        raise Refused("")
    if not 1 <= len(value) <= MAX_STEPS:
        raise Refused(f"this list has {len(value):,}")
    numbers = [float(_number(item, 0, MAX_SIGMA)) for item in value]
    if any(later >= number for number, later in itertools.pairwise(numbers)):
        raise Refused("each is smaller than the one before it")
    return numbers


def _parse_reuse(value: object) -> float | str | None:
    """A share of the steps, or IF_LATE; None for none."""
    if value == IF_LATE:
        return IF_LATE
    if value == "never":
        return None
    return float(_number(value, 0, MAX_REUSE)) or None


def _parse_syntax(value: object) -> str | None:
    if value not in SYNTAXES:
        raise Refused("")
    return None if value == PLAIN else str(value)


def _parse_lora(value: object) -> list[dict[str, Any]]:
    """Entries with path, file, scale and target; a path alone is an entry, and an entry alone a list."""
    entries = value if isinstance(value, list) else [value]
    if not 1 <= len(entries) <= MAX_LORAS:
        raise Refused(f"this list has {len(entries):,}")
    return [_parse_one_lora(each if isinstance(each, Mapping) else {"path": each}) for each in entries]


def _parse_one_lora(entry: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := [name for name in entry if name not in LORA_NAMES]:
        raise Refused(f"{plain_name(unknown[0])} is not one of {', '.join(LORA_NAMES)}")
    given = [name for name in ("path", "name") if entry.get(name) is not None]
    if len(given) != 1:
        raise Refused("give one of path and name" if given else "path is missing")
    parsed: dict[str, Any] = {given[0]: _parse_path(given[0], entry[given[0]]), "scale": 1.0}
    if (scale := entry.get("scale")) is not None:
        try:
            parsed["scale"] = float(_number(scale, -MAX_LORA_SCALE, MAX_LORA_SCALE))
        except Refused as refused:
            why = str(refused) or f"from {-MAX_LORA_SCALE} to {MAX_LORA_SCALE} is accepted"
            raise Refused(f"scale is {shown(scale)}; {why}") from None
    for name in ("file", "target"):
        if (text := entry.get(name)) is not None:
            parsed[name] = _parse_path(name, text)
    if not isinstance(partial := entry.get("partial"), bool | None):
        raise Refused(f"partial is {shown(partial)}; true and false are accepted")
    return parsed | ({"partial": True} if partial else {})


DEADLINE_ACCEPTED = (
    'seconds after the arrival (more than 0, at most 365 days), a text like "90s", "1h30m" or "2d", '
    'or a time like "06:00", "2026-11-20T18:00", "2026-11-20T18:00+01:00" or "18:00 Europe/Berlin", '
    "or a date, which means its end"
)
ID_ACCEPTED = f'1 to {MAX_ID_CHARS} characters in quotes, from A-Z a-z 0-9 . _ -, and no leading "."'
SIZE_ACCEPTED = f'a text like "832x480", each side from {MIN_SIDE} to {MAX_SIDE:,}'
FPS_ACCEPTED = f'a number from {MIN_FPS:g} to {MAX_FPS}, or a fraction like "24000/1001"'
OUTPUT_ACCEPTED = (
    f"a file name of at most {MAX_OUTPUT_BYTES} bytes that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
)
ARGS_ACCEPTED = (
    "an object of arguments of the pipeline's call: texts, numbers, true, false, null and lists of these"
)
FILES_ACCEPTED = (
    "an object of arguments of the pipeline's call, each with a path or a list of paths of pictures "
    f"({', '.join(IMAGE_FORMATS)}) or videos ({', '.join(VIDEO_FORMATS)})"
)
SCHEDULER_ACCEPTED = (
    'the name of a scheduler or sampler, such as "euler", or an object with its options, such as '
    '{"class": "UniPCMultistepScheduler", "flow_shift": 3}'
)
_SCHEDULER_OPTIONS = _object("scheduler", SCHEDULER_ACCEPTED, _parse_plain)
SCHEDULER = {"anyOf": [STRING, _SCHEDULER_OPTIONS.schema]}
RECIPE_ACCEPTED = "the name of a recipe ('gfgen models' lists them), or fields by families of models"
RECIPE_FIELDS = ("steps", *SCALE_FIELDS, "sigmas", "scheduler", "lora")
LORA_ACCEPTED = (
    f'a list of 1 to {MAX_LORAS} objects such as {{"path": "style.safetensors", "scale": 0.8}}; the path is '
    'a file, a folder or a hub id; "file", "target" and "partial" are optional; "name" is for HTTP'
)
SHARE = {"type": "number", "minimum": 0, "maximum": MAX_REUSE}
REUSE_ACCEPTED = f'"never", "{IF_LATE}", or the share of the steps to reuse, a number from 0 to {MAX_REUSE:g}'
SIGMAS_ACCEPTED = f"a list of 1 to {MAX_STEPS:,} falling numbers from 0 to {MAX_SIGMA:,}"

FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("id", ID_ACCEPTED, _parse_id, STRING),
        _text("prompt", MAX_PROMPT_CHARS),
        _text("negative_prompt", MAX_PROMPT_CHARS, may_be_blank=True),
        Field("prompt_syntax", f"one of {', '.join(SYNTAXES)}", _parse_syntax, {"enum": list(SYNTAXES)}),
        _label("model", 1024, "a name, a folder or a hub id"),
        Field("size", SIZE_ACCEPTED, _parse_size, {**STRING, "pattern": f"^{SIZE.pattern}$"}),
        in_range("width", MIN_SIDE, MAX_SIDE, is_whole=True),
        in_range("height", MIN_SIDE, MAX_SIDE, is_whole=True),
        in_range("frames", 1, MAX_FRAMES, is_whole=True),
        Field("fps", FPS_ACCEPTED, _parse_fps, {"type": "number", "minimum": MIN_FPS, "maximum": MAX_FPS}),
        in_range("steps", 1, MAX_STEPS, is_whole=True),
        in_range("guidance_scale", 0, MAX_SCALE),
        in_range("guidance_scale_2", 0, MAX_SCALE),
        in_range("boundary_ratio", 0, 1),
        in_range("flow_shift", 0.01, MAX_SHIFT),
        in_range("true_cfg_scale", 0, MAX_SCALE),
        in_range("seed", RANDOM_SEED, NUM_SEEDS - 1, is_whole=True),
        _label("image", MAX_PATH_CHARS, f"the path of a picture ({', '.join(IMAGE_FORMATS)})"),
        Field("background", 'a colour, such as "white" or "#ff8800"', _parse_colour, STRING),
        _object("args", ARGS_ACCEPTED, _parse_plain),
        _object("files", FILES_ACCEPTED, _parse_paths),
        Field("scheduler", SCHEDULER_ACCEPTED, _parse_scheduler, SCHEDULER),
        Field("lora", LORA_ACCEPTED, _parse_lora, {"type": "array", "items": {"type": "object"}}),
        Field("sigmas", SIGMAS_ACCEPTED, _parse_sigmas, {"type": "array", "items": {"type": "number"}}),
        Field("recipe", RECIPE_ACCEPTED, _parse_recipe, {"anyOf": [STRING, {"type": "object"}]}),
        Field("reuse", REUSE_ACCEPTED, _parse_reuse, {"anyOf": [SHARE, {"enum": ["never", IF_LATE]}]}),
        in_range("upscale", 1, MAX_UPSCALE),
        in_range("upscale_strength", 0.01, 1),
        in_range("upscale_steps", 1, MAX_STEPS, is_whole=True),
        Field("deadline", DEADLINE_ACCEPTED, _parse_deadline, TIME),
        _duration("arrival", may_be_zero=True),
        _duration("timeout", may_be_zero=False),
        in_range("priority", -1_000_000, 1_000_000, is_whole=True),
        _label("tag", 64, "a class for reports"),
        Field("output", OUTPUT_ACCEPTED, _parse_output, STRING),
        Field("format", f"one of {', '.join(FORMAT_NAMES)}", _parse_format, {**STRING, "enum": FORMAT_NAMES}),
        in_range("quality", 1, 100, is_whole=True),
    )
}
"""Every field that a job may have; the order is that of docs/job-file.md."""
ALL_FIELDS = f"the fields of a job are {', '.join(FIELDS)}"


def parse_fields(mapping: Mapping[str, Any], *, images: ImageReader) -> tuple[dict[str, Any], list[Problem]]:
    """Attributes for a JobSpec, of the valid fields, and every problem of the job, without its line."""
    values: dict[str, Any] = {}
    refusals: dict[str, Problem] = {}
    unknown: list[str] = []
    for name, value in mapping.items():
        field = FIELDS.get(name)
        if field is None:
            unknown.append(name)
        elif isinstance(value, Repeated):
            refusals[name] = Problem(None, name, None, REPEATED)
        elif value is not None:  # null says as much as leaving the field out
            try:
                values[name] = field.parse(value)
            except Refused as refused:
                refusals[name] = field.refusal(value, str(refused))
    problems = list(_unknown_fields(unknown))
    problems += [refusals[name] for name in FIELDS if name in refusals] if refusals else ()
    is_misspelt = any(meant_by(name, FIELDS) == "prompt" for name in unknown)
    if "prompt" not in values and "prompt" not in refusals and not is_misspelt:
        problems.append(Problem(None, "prompt", None, f"missing; {FIELDS['prompt'].accepted}"))
    problems += _join_shape(values, mapping)
    problems += _join_image(values, images)
    problems += _join_files(values, images)
    problems += _join_lora(values, images)
    problems += _join_sigmas(values)
    _rename_times(values, mapping)
    return values, problems


def parse_duration(text: str) -> float | None:
    try:
        return _seconds(text)
    except Refused:
        return None


def shown(value: object) -> str:
    try:
        text = json.dumps(whole(value), ensure_ascii=False, default=repr)
        text = value.text if isinstance(value, Exponential) else text
    except (ValueError, RecursionError):
        text = f"({type(value).__name__})"
    return printable(text)


def printable(text: str) -> str:
    """A text cut to one short line, with control characters spelled out."""
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[: MAX_SHOWN_CHARS - 3]}..."
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def plain_name(name: str) -> str:
    """The name of a field as written if that is safe to print, quoted otherwise."""
    return name if name and name.isprintable() and len(name) <= MAX_SHOWN_CHARS else shown(name)


def suggestion(name: str) -> str | None:
    """A question that names the field that an unknown name resembles."""
    meant = meant_by(name, [*FIELDS, "num_images"])
    return f"did you mean {meant}?" if meant else None


def meant_by(name: str, known: Collection[str]) -> str | None:
    """The known name that means the same in other tools, or is spelled alike."""
    spelled = re.sub("[ -]", "_", name[:40].strip().lower())
    other = OTHER_NAMES.get(spelled, spelled)
    return other if other in known else nearest(other, known)


def _unknown_fields(unknown: Sequence[str]) -> Iterator[Problem]:
    for name in unknown:
        hint = suggestion(name)
        if name == "defaults":
            hint = 'the first line of a file may be {"defaults": {...}}, with nothing else on it'
        accepted = f"not a field; {hint}" if hint else "not a field"
        yield Problem(None, plain_name(name), None, accepted, note=None if hint else ALL_FIELDS)


def _join_shape(values: dict[str, Any], mapping: Mapping[str, object]) -> Iterator[Problem]:
    """`size` becomes width and height, which must agree with those that are given."""
    size = values.pop("size", None)
    for position, name, other in ((0, "width", "height"), (1, "height", "width")):
        if size is not None and values.setdefault(name, size[position]) != size[position]:
            text = f"{size[0]}x{size[1]}"
            accepted = f'differs from size = "{text}"; give only one of them'
            yield Problem(None, name, shown(values[name]), accepted)
        elif name in values and mapping.get("size") is None and mapping.get(other) is None:
            yield Problem(None, other, None, f"missing; give both {name} and {other}, or neither")
    sides = values.get("width", 1) * values.get("height", 1)
    if sides * values.get("frames", 1) > MAX_VOLUME_PIXELS:
        # Two sides at their largest stay below it, so the job does give `frames`.
        accepted = f"width x height x frames of at most {MAX_VOLUME_PIXELS:,}"
        yield Problem(None, "frames", shown(values["frames"]), accepted)


def _join_image(values: dict[str, Any], images: ImageReader) -> Iterator[Problem]:
    """`image` becomes an absolute path and the hash of a file that was decoded."""
    name = values.pop("image", None)
    if name is None:
        return
    try:
        path, sha256 = images.check(name)
    except ImageError as error:
        yield FIELDS["image"].refusal(name, str(error))
    else:
        values |= {"image": str(path), "image_sha256": sha256}


def _join_files(values: dict[str, Any], images: ImageReader) -> Iterator[Problem]:
    """`files` become absolute paths and hashes of files that could be read."""
    named = values.pop("files", None)
    if named is None:
        return
    paths: dict[str, str | list[str]] = {}
    hashes: dict[str, str | list[str]] = {}
    for argument, given in named.items():
        found: list[tuple[str, str]] = []
        for name in [given] if isinstance(given, str) else given:
            try:
                path, sha256 = images.check(name, may_be_video=True)
                found.append((str(path), sha256))
            except ImageError as error:
                yield Problem(None, f"files.{argument}", shown(name), str(error))
        if found and isinstance(given, str):
            ((paths[argument], hashes[argument]),) = found
        else:
            paths[argument], hashes[argument] = [path for path, _ in found], [digest for _, digest in found]
    if "image" in named and "image" in values:
        yield Problem(None, "files.image", None, "image gives it, too; give only one of them")
    if (num_chars := len(json.dumps(paths))) > 2 * MAX_OBJECT_CHARS:
        accepted = f"at most {2 * MAX_OBJECT_CHARS:,} characters of absolute paths; these have {num_chars:,}"
        yield Problem(None, "files", None, accepted)
    values |= {"files": paths, "files_sha256": hashes}


def _join_lora(values: dict[str, Any], images: ImageReader) -> Iterator[Problem]:
    """`lora` becomes absolute paths, and what counts of each: the hash of its file, and the rest."""
    entries = values.pop("lora", None)
    if entries is None:
        return
    paths, used, files = [], [], images.loras
    for entry in entries:
        try:
            if files is None and "path" in entry:
                accepted = 'name a LoRA of the server, such as {"name": "ink"}'
                raise LoraError(f"paths are not accepted over HTTP; {accepted}")
            if files is None:
                used.append(entry)
            elif "name" in entry:
                raise LoraError(f"name {entry['name']!r} is for requests over HTTP; give a path")
            else:
                path, sha256 = files.check(entry.pop("path"), entry.pop("file", None))
                paths.append(str(path))
                used.append({"sha256": sha256, **entry})
        except LoraError as error:
            yield Problem(None, "lora", None, str(error))
    values |= {"lora_files": paths, "lora": used} if paths else {"lora": used}


def _join_sigmas(values: dict[str, Any]) -> Iterator[Problem]:
    if (sigmas := values.get("sigmas")) and values.setdefault("steps", len(sigmas)) != len(sigmas):
        accepted = f"differs from the {len(sigmas)} numbers of sigmas; leave it out"
        yield Problem(None, "steps", shown(values["steps"]), accepted)


def _rename_times(values: dict[str, Any], mapping: Mapping[str, Any]) -> None:
    """Rename times from the names in the job file to those in the spec, which carry the unit."""
    for name in ("arrival", "timeout"):
        if name in values:
            values[f"{name}_s"] = values.pop(name)
    deadline = values.pop("deadline", None)
    if isinstance(deadline, datetime):
        values["deadline_at"] = deadline.timestamp()
        values |= {"deadline_clock": mapping["deadline"]} if OF_DAY.match(mapping["deadline"]) else {}
    elif deadline is not None:
        values["deadline_s"] = deadline


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise Refused("write it in quotes" if isinstance(value, int | float) else "")
    return value


def _number(value: object, low: float, high: float) -> int | float:
    """A JSON number in a range, so neither NaN nor infinity; no bool, and no number in quotes."""
    if isinstance(value, str) and NUMBER_ALONE.fullmatch(value):
        raise Refused("write it without quotes")
    if isinstance(value, str) and WITH_COMMA.fullmatch(value):
        raise Refused("write a decimal point, and no separators of thousands")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise Refused("")
    return value


def _seconds(value: object) -> float:
    """Seconds of a number or of a text like "1h30m", from 0 to MAX_DURATION_S."""
    if isinstance(value, str) and not NUMBER_ALONE.fullmatch(value):
        match = DURATION.fullmatch(value.strip().lower()[:MAX_TIME_CHARS])
        if not match or not any(match.groups()):
            raise Refused("")
        parts = zip(match.groups(), UNITS_S.values(), strict=True)
        value = sum(float(part or 0) * unit for part, unit in parts)
    elif isinstance(value, str):
        raise Refused('write it without quotes, or with a unit ("s", "m", "h", "d")')
    return float(_number(value, 0, MAX_DURATION_S))
