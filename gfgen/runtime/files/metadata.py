"""The metadata of an output file: as text that other tools read, and as JSON, a line of a job file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from gfgen.job.reader import to_mapping
from gfgen.job.spec import SUFFIXES, JobSpec, format_of
from gfgen.system.machine import key_versions

Metadata = Mapping[str, Any]

_LEFT_OUT = ("arrival", "deadline", "timeout", "priority", "output")
_WEIGHTS = "weights"
_TITLES = {"steps": "Steps", "guidance_scale": "CFG scale", "seed": "Seed", "model": "Model"}
_IN_WORDS = ("prompt", "negative_prompt", "width", "height")


def describe(spec: JobSpec, *, weights: str | None = None) -> dict[str, Any]:
    """The metadata of a job as run: every field that determines the picture, and what names its weights."""
    fields = {name: value for name, value in to_mapping(spec).items() if name not in _LEFT_OUT}
    suffix = PurePath(spec.output or "").suffix.lower()
    if spec.format is None and suffix not in ("", *SUFFIXES.values()):
        fields["format"] = format_of(suffix, "image") or format_of(suffix, "video")
    for name in ("image", "files", "lora"):  # pictures are shared, folders are private
        if name in fields:
            fields[name] = texts_by(lambda path: PurePath(path).name, fields[name])
    return fields if weights is None else fields | {_WEIGHTS: weights}


def parameters_text(
    metadata: Metadata, *, size: tuple[int, int] | None = None, place: tuple[int, int] | None = None
) -> str:
    """Prompts and `Name: value` pairs as AUTOMATIC1111's web UI has them; `place`: number and count."""
    lines = [str(metadata.get("prompt", ""))]
    if metadata.get("negative_prompt"):
        lines.append(f"Negative prompt: {metadata['negative_prompt']}")
    known = {_TITLES.get(name, name): value for name, value in metadata.items() if name not in _IN_WORDS}
    pairs = {title: known.pop(title) for title in _TITLES.values() if title in known}
    if _WEIGHTS in known:
        pairs["Weights"] = known.pop(_WEIGHTS)
    if size is not None:
        pairs["Size"] = "{}x{}".format(*size)
    if place is not None:
        pairs["Picture"] = "{} of {}".format(*place)
    known["Version"] = "; ".join(f"{name} {number}" for name, number in key_versions().items())
    lines.append(", ".join(f"{title}: {_in_text(value)}" for title, value in (pairs | known).items()))
    return "\n".join(line for line in lines if line)


def title_of(metadata: Metadata) -> str:
    text = " ".join(str(metadata.get("prompt") or metadata.get("id") or "").split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def to_json(metadata: Metadata) -> str:
    fields = {name: value for name, value in metadata.items() if name != _WEIGHTS}
    return json.dumps(fields, ensure_ascii=False)


def from_json(text: str) -> dict[str, Any]:
    """The reverse of `to_json`; empty for other text."""
    try:
        loaded = json.loads(text)
    except ValueError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


def clean(metadata: Metadata) -> Metadata:
    """Remove what files cannot hold: NUL, and lone surrogates, which JSON may contain."""
    return {name: texts_by(_writable, value) for name, value in metadata.items()}


def to_ffmetadata(tags: Mapping[str, str]) -> str:
    """Tags in ffmpeg's text format (ffmpeg-formats.html#Metadata-1): an argument has at most 128 KB."""
    escaped = {name: re.sub(r"([=;#\\\n])", r"\\\1", value) for name, value in tags.items()}
    return ";FFMETADATA1\n" + "".join(f"{name}={value}\n" for name, value in escaped.items())


def from_ffmetadata(text: str) -> dict[str, str]:
    tags = re.findall(r"^([^=;\n]+)=((?:\\.|[^\\\n])*)$", text, re.DOTALL | re.MULTILINE)
    return {name: re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL) for name, value in tags}


def _writable(value: str) -> str:
    return value.encode("utf-8", "replace").decode("utf-8").replace("\0", "")


def _in_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (list, Mapping)) else str(value)
    return json.dumps(text, ensure_ascii=False) if re.search('[,:"\n]|^$', text) else text


def texts_by(change: Callable[[str], str], value: Any) -> Any:
    """A JSON value with all of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: texts_by(change, inner) for name, inner in value.items()}
    return [texts_by(change, inner) for inner in value] if isinstance(value, list) else value
