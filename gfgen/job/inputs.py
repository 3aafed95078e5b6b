"""Kinds of job files, and their entries: JSON Lines, a JSON array, CSV, Parquet, or prompts."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from gfgen.errors import InputError, JobError, Problem, in_one_line, nearest
from gfgen.job.fields import FIELDS, Repeated, plain_name, printable, shown, suggestion
from gfgen.job.shared import VARIATION_FIELDS, number_of, value_of
from gfgen.job.weighted import AUTO, PLAIN

MAX_FILE_BYTES = 2**28  # of a file that is read into memory, and of a line of JSON Lines
HEAD_BYTES = 2**16  # of a file, from which its kind is known
UTF8_MARK = b"\xef\xbb\xbf"
ARCHIVE_MARKS = (b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ")
"""Of gzip; of zip and with it .xlsx and .ods; of zstd and xz."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
EXAMPLE = '{"prompt": "a red circle falls"}'

JSON_LINES, ARRAY, TABLE, PROMPTS = "JSON Lines", "a JSON array", "CSV", "one prompt per line"
PARQUET, PARQUET_SUFFIX = "Parquet", ".parquet"
PARQUET_ROWS = 1_000  # they are read that many at a time
STDIN_NAME, PROMPTS_NAME, PROGRAM_NAME = "standard input", "-p", "the jobs"  # sources that are no files
TABLE_SUFFIXES = (".csv", ".tsv")
TEXT_SUFFIXES = ("", ".txt")  # a file of prompts has such a name, or none: it is the standard input
DELIMITERS = ",;\t"
TOO_DEEP = "nested too deeply; the fields of a job are strings and numbers"
OVER_LINES = (
    "an object over several lines; write each job on one line ('jq -c . FILE' does that), "
    "or all jobs as one JSON array"
)
_COMMENTS = re.compile(r"(?:[^\S\n]*(?:#[^\n]*)?\n)*")
"""Comments and blank lines before the first entry."""

Entry = tuple[int, Mapping[str, object] | Problem | str]  # the line, and its job; a text is JSON not decoded


def is_url(file: str) -> bool:
    """Whether it names a job file that fsspec reads, or a store."""
    return "://" in file


class ReadingEnded(Exception):
    """The rest of a file is not read, because of what is wrong at this line, or with the whole file."""

    def __init__(self, line: int | None, accepted: str) -> None:
        super().__init__(accepted)
        self.line, self.accepted = line, accepted


class ArrayEntry(int):
    """The number of an entry of a JSON array, where other files have a line."""

    place = "entry"


class Row(int):
    """The same of a row of a Parquet file."""

    place = "row"


class FileLine(int):
    """A line in one of several job files. As a number it orders the lines of all files."""

    line: int
    file: str
    file_idx: int

    def __new__(cls, line: int, file: str, file_idx: int) -> FileLine:
        self = super().__new__(cls, file_idx * MAX_FILE_BYTES + line)
        self.line, self.file, self.file_idx = line, file, file_idx
        return self

    def __getnewargs__(self) -> tuple[int, str, int]:  # type: ignore[override]
        return self.line, self.file, self.file_idx

    @property
    def place(self) -> str:
        return getattr(self.line, "place", "line")

    def __str__(self) -> str:
        return f"{int(self.line)} of {self.file}"

    def __format__(self, spec: str) -> str:
        return str(self)


def entries_of(
    stream: BinaryIO, *, suffix: str, prompts: PromptLines | None = None
) -> tuple[str, Iterator[Entry]]:
    """The kind of a file, by its beginning or else `suffix`, and its entries, which raise ReadingEnded."""
    content = stream.read(HEAD_BYTES) + stream.readline(MAX_FILE_BYTES)
    first = _first_line(_decoded(content))
    if (
        first.startswith("{")
        and _kind_of(first, suffix) == JSON_LINES
        and not content.startswith(UTF16_MARKS)
    ):
        return JSON_LINES, _json_lines(itertools.chain(io.BytesIO(content.removeprefix(UTF8_MARK)), stream))
    content += stream.read(max(0, MAX_FILE_BYTES + 1 - len(content)))
    text = _decoded(content)
    kind = _kind_of(_first_line(text), suffix.lower())
    read = partial(_prompts, read=prompts or PromptLines()) if kind == PROMPTS else _READERS[kind]
    return kind, _entries(content, text, read)


def _decoded(content: bytes) -> str:
    """Empty for broken UTF-16."""
    with contextlib.suppress(UnicodeDecodeError):
        is_utf16 = content.startswith(UTF16_MARKS)
        return content.decode("utf-16" if is_utf16 else "utf-8-sig", "surrogateescape")
    return ""


def _first_line(text: str) -> str:
    return text[_COMMENTS.match(text).end() :].partition("\n")[0].strip()  # type: ignore[union-attr]


def _entries(content: bytes, text: str, read: Callable[[str], Iterator[Entry]]) -> Iterator[Entry]:
    if content.startswith(UTF16_MARKS) and not text:
        raise ReadingEnded(1, "the file is not whole UTF-16; save it again, as UTF-8")
    if content.startswith(ARCHIVE_MARKS):
        raise ReadingEnded(1, "the file is compressed, or a workbook; unpack it, or save it as CSV")
    if len(content) > MAX_FILE_BYTES:
        raise ReadingEnded(1, f"the file has more than {MAX_FILE_BYTES:,} bytes; split it")
    yield from read(text)


def _not_utf8(text: str) -> tuple[int, str] | None:
    """The first byte that is not UTF-8: its line, and what to do."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line, column = text.count("\n", 0, error.start), error.start - text.rfind("\n", 0, error.start)
        byte = ord(text[error.start]) - 0xDC00
        return line + 1, f"character {column} of the line (0x{byte:02x}) is not UTF-8; save the file as UTF-8"
    return None


def _kind_of(text: str, suffix: str) -> str:
    after = text[1:].lstrip()[:1]
    if text[:1] == "[" and after in ("", "{", '"', "]"):
        return ARRAY
    if text[:1] == "{" and after in ("", '"', "}"):
        return JSON_LINES
    if suffix in TABLE_SUFFIXES or _delimiter(text) is not None:
        return TABLE
    if suffix == ".txt" or (suffix in TEXT_SUFFIXES and text[:1] not in ("", "{", "[", '"')):
        return PROMPTS
    return JSON_LINES


def _delimiter(header: str) -> str | None:
    """The character between the names of fields on the first line of a table; None if this is none."""
    for delimiter in DELIMITERS:
        names = _names(header, delimiter)
        if "prompt" in names and all(name in FIELDS or name in VARIATION_FIELDS for name in names):
            return delimiter
    return None


def _names(header: str, delimiter: str) -> list[str]:
    """The fields that a header means, whatever their case; other texts stay as they are."""
    try:
        cells = [cell.strip() for cell in next(csv.reader([header], delimiter=delimiter), [])]
    except csv.Error:  # a carriage return inside of the line, or a cell of more than 131,072 characters
        return []
    plain = [re.sub("[ -]", "_", cell.lower()) for cell in cells]
    known = {*FIELDS, *VARIATION_FIELDS}
    return [name if name in known else cell for name, cell in zip(plain, cells, strict=True)]


def _json_lines(lines: Iterable[bytes]) -> Iterator[Entry]:
    is_first, begun_at = True, None
    for number, line in _lines(each.decode(errors="surrogateescape") for each in lines):
        if begun_at is not None and not line.startswith("{"):
            raise ReadingEnded(begun_at, OVER_LINES)
        yield number, line
        is_open = line.startswith("{") and line.endswith(("{", ",", "["))
        begun_at = number if is_first and is_open else None
        is_first = False


def _prompts(text: str, *, read: PromptLines) -> Iterator[Entry]:
    for number, line in _lines(io.StringIO(text)):
        if bad := _not_utf8(line):
            yield number, Problem(number, None, None, bad[1])
            continue
        try:
            yield number, read.job(line)
        except JobError as error:
            yield from ((number, problem) for problem in error.at_line(number))


def _lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        if (line := line.strip()) and not line.startswith("#"):
            yield number, line


def decoded_object(line: int, text: str) -> Mapping[str, object] | Problem:
    if bad := _not_utf8(text):
        return Problem(line, None, None, bad[1])
    try:
        return _as_object(line, _DECODER.decode(text))
    except ValueError as error:
        hint = f"write each job as one object on one line, such as {EXAMPLE}"
        return Problem(line, None, printable(text), f"not JSON ({_reason(error)}); {hint}")
    except RecursionError:
        return Problem(line, None, printable(text), TOO_DEEP)


def _reason(error: ValueError) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return "a number of thousands of digits"  # which Python refuses to convert
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def _as_object(line: int, value: object) -> Mapping[str, object] | Problem:
    if isinstance(value, dict):
        return value
    accepted = f"not an object; write each job as one object, such as {EXAMPLE}"
    return Problem(line, None, shown(value), accepted)


def _array(text: str) -> Iterator[Entry]:
    """The objects of an array, by their numbers; a text in it is a prompt."""
    if bad := _not_utf8(text):
        raise ReadingEnded(*bad)
    first = _COMMENTS.match(text).end()  # type: ignore[union-attr]
    try:
        values = _DECODER.decode("\n" * text.count("\n", 0, first) + text[first:])
    except ValueError as error:
        raise ReadingEnded(getattr(error, "lineno", 1), f"the array is not JSON ({_reason(error)})") from None
    except RecursionError:
        raise ReadingEnded(1, TOO_DEEP) from None
    yield from array_entries(values)


def array_entries(values: Iterable[object]) -> Iterator[Entry]:
    """The jobs of an array by their numbers, prompts or objects; a program's have NumPy's numbers, too."""
    for number, value in enumerate(values, start=1):
        place = ArrayEntry(number)
        if isinstance(value, Mapping):
            value = {name: plain(each) for name, each in value.items()}
        yield place, {"prompt": value} if isinstance(value, str) else _as_object(place, value)


def plain(value: Any) -> Any:
    """A path as text, and a number of NumPy as one of Python."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if getattr(value, "shape", None) == () else value


def _table(text: str) -> Iterator[Entry]:
    if bad := _not_utf8(text):
        raise ReadingEnded(*bad)
    first = _COMMENTS.match(text).end()  # type: ignore[union-attr]
    header, num_before = text[first:].partition("\n")[0].strip(), text.count("\n", 0, first)
    delimiter = _delimiter(header) or max(DELIMITERS, key=header.count)
    names = _names(header, delimiter)
    if not names:
        raise ReadingEnded(
            num_before + 1,
            "the header is not CSV; write names of fields, with line ends as on Linux or Windows",
        )
    _check_header(names, num_before + 1)
    lines = io.StringIO(text[first:], newline="")
    rows = csv.DictReader(lines, names, restkey="", delimiter=delimiter, strict=True)
    try:
        next(rows)  # the header
        for row in rows:
            more = row.pop("", [])
            cells = [cell for cell in (*row.values(), *more) if cell is not None]
            number = num_before + rows.line_num - sum(cell.count("\n") for cell in cells)
            given = {name: value_of(name, x) for name, cell in row.items() if (x := (cell or "").strip())}
            if any(cell.strip() for cell in more) or (given and len(cells) < len(names)):
                cure = "write texts with a delimiter in quotes" if more else "complete the row"
                count = f"{len(cells)} cell{'s'[: len(cells) - 1]}, but the header has {len(names)}"
                yield number, Problem(number, None, None, f"{count}; {cure}")
            elif given:
                yield number, given
    except csv.Error as error:
        raise ReadingEnded(num_before + rows.reader.line_num, f"not CSV ({error})") from None


_OF_HEADERS = {
    "": "if it is the index of pandas, write the file with to_csv(..., index=False)",
    "sep=": "remove this line, which only Excel reads",
}


def _check_header(names: Sequence[str], line: int) -> None:
    for name in names:
        if name not in FIELDS and name not in VARIATION_FIELDS:
            hint = _OF_HEADERS.get(name) or suggestion(name)
            hint = hint or f"the fields of a job are {', '.join(FIELDS)}"
            raise ReadingEnded(line, f"the header names {plain_name(name)}, which is not a field; {hint}")
    if len(set(names)) < len(names):
        raise ReadingEnded(line, "the header names a field twice")


def rows_of(stream: BinaryIO, columns: Mapping[str, str]) -> Iterator[Entry]:
    """The jobs of a file; `columns` has the column of each field, or nothing if their names are the same.

    Raises: InputError without pyarrow; ReadingEnded.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InputError("reading Parquet needs pyarrow; pip install 'gfgen[data]'") from None
    number = 0
    try:
        file = parquet.ParquetFile(stream)
        there = file.schema_arrow.names
        columns = columns or {name: name for name in there}
        for field, column in columns.items():
            _check_column(field, column, there)
        for batch in file.iter_batches(PARQUET_ROWS, columns=list(columns.values())):
            found = {field: batch.column(column) for field, column in columns.items()}
            for idx in range(batch.num_rows):
                number += 1
                try:
                    given = {field: values[idx].as_py() for field, values in found.items()}
                except (ValueError, OverflowError) as error:  # no UTF-8, or a time without a place
                    unread = f"cannot be read ({in_one_line(error)})"
                    yield Row(number), Problem(Row(number), None, None, unread)
                    continue
                yield Row(number), {field: value for field, value in given.items() if value is not None}
    except (ArrowException, OSError) as error:
        line, what = (Row(number + 1), "this row and those after it") if number else (None, "it")
        raise ReadingEnded(line, f"{what} cannot be read as Parquet ({in_one_line(error)})") from None


def _check_column(field: str, column: str, there: list[str]) -> None:
    if column not in there:
        raise ReadingEnded(None, f"there is no column {plain_name(column)}; there are {', '.join(there)}")
    if field not in FIELDS and field not in VARIATION_FIELDS:
        name, hint = plain_name(field), suggestion(field)
        if field == column or not hint:
            hint = f"name the columns to read, such as --column prompt={plain_name(column)}"
        raise ReadingEnded(None, f"column {name} is not a field of a job; {hint}")


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    decoded = dict(pairs)
    if len(decoded) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        decoded |= {name: Repeated() for name, count in counts.items() if count > 1}
    return decoded


_DECODER = json.JSONDecoder(object_pairs_hook=_parse_object, parse_float=number_of)
_READERS: Mapping[str, Callable[[str], Iterator[Entry]]] = {
    JSON_LINES: lambda text: _json_lines(text.encode(errors="surrogateescape").split(b"\n")),
    ARRAY: _array,
    TABLE: _table,
}


A1111, KOHYA = "options of A1111", "options of kohya"
OF_WEIGHTS = "; weights such as (red:1.3) act on models with CLIP encoders (--prompt-syntax plain: on none)"
OF_A1111 = {
    **{name: name for name in ("prompt", "negative_prompt", "seed", "steps", "width", "height")},
    "cfg_scale": "guidance_scale",
    "sampler_name": "scheduler",
    "sd_model": "model",
    "batch_size": "num_images",
    "n_iter": "num_images",
}
OF_KOHYA = dict(n="negative_prompt", w="width", h="height", d="seed", s="steps", l="guidance_scale")
SUFFIX = ".safetensors"
_TEXTS = ("prompt", "negative_prompt", "scheduler", "model")
_OPTION = re.compile(r"(?:^|\s)--([A-Za-z]\w*)(?=\s|$)")
_PATCH = re.compile(r"<lora:([^<>:]+)(?::([^<>:]*))?>")


def with_loras(job: Mapping[str, Any], folder: Path, *, usual: object) -> Mapping[str, Any]:
    """The job with the files of a folder that its prompt names, in place of `usual` ones."""
    prompt, named = patches_in(job.get("prompt"))
    own = None if (given := job.get("lora")) is usual else given
    every = own if isinstance(own, list) else [] if own is None else [own]
    files = [(f"{folder / name.removesuffix(SUFFIX)}{SUFFIX}", scale) for name, scale in named]
    every = [*every, *({"path": path, "scale": scale} for path, scale in files)]
    return {**job, "prompt": prompt, "lora": every} if named else job


def patches_in(prompt: Any) -> tuple[Any, Sequence[tuple[str, int | float | str]]]:
    """A prompt without <lora:ink:0.8>, and the names and scales of these."""
    found = _PATCH.findall(prompt) if isinstance(prompt, str) else ()
    named = [(name, number_of(scale or "1")) for name, scale in found]
    return " ".join(_PATCH.sub("", prompt).split()) if named else prompt, named


@dataclass(slots=True)
class PromptLines:
    """Reads lines of prompts as A1111 and kohya write them, and counts what it recognised in them.

    --prompt "a fox" --steps 4 --sampler_name "Euler a"       A1111, "prompts from file or textbox"
    a fox --n blurry --w 640 --h 480 --d 7 --s 4 --l 3        kohya, sample prompts
    """

    is_plain: bool = False  # take lines as they are
    syntax: str = AUTO  # of prompts on lines of A1111
    recognised: Counter[str] = field(default_factory=Counter)

    def told(self, kind: str) -> str:
        """The kind of a file with what was recognised in it."""
        weights = OF_WEIGHTS if A1111 in self.recognised and self.syntax != PLAIN else ""
        return f"{kind} with {', '.join(self.recognised)}{weights}" if self.recognised else kind

    def job(self, line: str) -> Mapping[str, Any]:
        """The fields of a line. Raises: JobError for an option that is not known, or has no value."""
        if self.is_plain:
            return {"prompt": line}
        names = _OPTION.findall(line)
        found: dict[str, Any] = {"prompt": line}
        if line.startswith("--") and "prompt" in names:
            found = {**dict(self._options(A1111, OF_A1111, _words(line))), "prompt_syntax": self.syntax}
        elif OF_KOHYA.keys() & names and not line.startswith("--"):
            prompt, *rest = _OPTION.split(line)
            options = zip(rest[::2], map(str.strip, rest[1::2]), strict=True)
            found = {"prompt": prompt.strip(), **dict(self._options(KOHYA, OF_KOHYA, options))}
        return found

    def _options(
        self, kind: str, known: Mapping[str, str], options: Iterator[tuple[str, str]]
    ) -> Iterator[tuple[str, Any]]:
        self.recognised[kind] += 1
        num_images, given = 1, set[str]()
        for name, text in options:
            if name not in known:
                near = nearest(name, known)
                accepted = f"did you mean --{near}?" if near else f"--{', --'.join(known)} are accepted"
                accepted = f"is none of the {kind}; {accepted}; with --plain, lines are taken as they are"
                raise JobError(Problem.of(f"--{name}", text or None, accepted))
            if name in given:
                raise JobError(Problem.of(f"--{name}", text or None, "is there twice"))
            given.add(name)
            field_name, value = known[name], text if known[name] in _TEXTS else number_of(text)
            if field_name == "num_images" and isinstance(value, int):
                value = num_images = num_images * value
            yield field_name, value


def _words(line: str) -> Iterator[tuple[str, str]]:
    """The options of a line and their values: all words up to the next option, in quotes or not."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise JobError(Problem.of(None, line, f"its quotes are not closed ({error})")) from None
    while words:
        name = words.pop(0)
        value = []
        while words and not words[0].startswith("--"):
            value.append(words.pop(0))
        yield name.removeprefix("--"), " ".join(value)
