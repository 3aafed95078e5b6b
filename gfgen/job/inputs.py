"""Kinds of job files: JSON Lines, a JSON array, CSV with a header, or a prompt on each line.

    bytes -> kind -> entries: (line, the object of a job, or its Problem)

Line length and file size are bounded: an endless file, or one that is not a job file, gives a report and
does not fill memory.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from gfgen.errors import Problem
from gfgen.job.fields import FIELDS, RepeatedKeys, plain_name, printable, shown, suggestion
from gfgen.job.shared import VARIATION_FIELDS, value_of

MAX_LINE_BYTES = 2**20
MAX_FILE_BYTES = 2**30
MAX_WHOLE_BYTES = 2**28
"""Of an array or a table, which is read into memory."""
MAX_INT_DIGITS = 1_000
"""Python does not read integers of more than 4,300 digits; no field needs that many."""
BYTE_ORDER_MARK = "\ufeff"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
EXAMPLE = '{"prompt": "a red circle falls"}'

JSON_LINES, ARRAY, TABLE, PROMPTS = "JSON Lines", "a JSON array", "CSV", "one prompt per line"
STDIN_NAME, PROMPTS_NAME = "standard input", "-p"
"""Of sources that are not files, in messages."""
TABLE_SUFFIXES = (".csv", ".tsv")
TEXT_SUFFIXES = ("", ".txt")
"""A file of prompts has such a name, or none: it is the standard input."""
DELIMITERS = ",;\t"
TOO_DEEP = "nested too deeply; the fields of a job are strings and numbers"
OVER_LINES = (
    "an object over several lines; write each job on one line ('jq -c . FILE' does that), "
    "or all jobs as one JSON array"
)
_SPACE = re.compile(r"\s*")

Entry = tuple[int, Mapping[str, object] | Problem]


class ReadingEnded(Exception):
    """The rest of a file is not read, because of what is wrong at this line."""

    def __init__(self, line: int, accepted: str) -> None:
        super().__init__(accepted)
        self.line, self.accepted = line, accepted


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

    def __str__(self) -> str:
        return f"{self.line} of {self.file}"

    def __format__(self, spec: str) -> str:
        return str(self)


def entries_of(stream: BinaryIO, *, suffix: str) -> tuple[str, Iterator[Entry]]:
    """The kind of a file by its beginning, and its entries; `suffix` decides where the content does not.

    The entries raise ReadingEnded.
    """
    rewound = _Rewound(stream)
    number, beginning = rewound.first_line()
    kind = _kind_of(_text(beginning), suffix.lower())
    if kind in (JSON_LINES, PROMPTS):
        lines = raw_lines(rewound)
        return kind, json_lines(lines) if kind == JSON_LINES else _prompts(lines)
    return kind, _whole(rewound, kind, number)


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
    try:
        return [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
    except (
        csv.Error
    ):  # such as a carriage return inside of the line, or a cell of more than 131,072 characters
        return []


class _Rewound:
    """A stream whose first lines can be read twice."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._pieces: deque[bytes] = deque()

    def first_line(self) -> tuple[int, bytes]:
        """The first line that is neither blank nor a comment, and its number."""
        num_read = 0
        for number in itertools.count(1):
            piece = self._stream.readline(MAX_LINE_BYTES + 1)
            self._pieces.append(piece)
            num_read += len(piece)
            content = _text(piece)
            if not piece or num_read > MAX_LINE_BYTES or (content and not content.startswith("#")):
                return number, piece
        raise AssertionError

    def readline(self, size: int) -> bytes:
        return self._pieces.popleft() if self._pieces else self._stream.readline(size)

    def read(self, size: int) -> bytes:
        beginning = b"".join(self._pieces)
        self._pieces.clear()
        return beginning + self._stream.read(max(0, size - len(beginning)))


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace").removeprefix(BYTE_ORDER_MARK).strip()


def json_lines(lines: Iterator[tuple[int, bytes]]) -> Iterator[Entry]:
    is_first, begun_at = True, None
    for number, content in lines:
        text = _decoded(number, content)
        if isinstance(text, Problem):
            yield number, text
        elif text and not text.startswith("#"):
            if begun_at is not None and not text.startswith("{"):
                raise ReadingEnded(begun_at, OVER_LINES)
            yield number, _decode_object(number, text)
            is_open = text.startswith("{") and text.endswith(("{", ",", "["))
            begun_at = number if is_first and is_open else None
            is_first = False


def _prompts(lines: Iterator[tuple[int, bytes]]) -> Iterator[Entry]:
    for number, content in lines:
        text = _decoded(number, content)
        if isinstance(text, Problem):
            yield number, text
        elif text and not text.startswith("#"):
            yield number, {"prompt": text}


def raw_lines(stream: BinaryIO | _Rewound) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; if a line is too long, its first MAX_LINE_BYTES + 1 bytes.

    Holds at most two pieces of that size, and stops after MAX_FILE_BYTES.
    """
    num_read = 0
    for number in itertools.count(1):
        content = piece = stream.readline(MAX_LINE_BYTES + 1)
        if not content:
            return
        num_read += len(content)
        while (
            len(content) > MAX_LINE_BYTES
            and piece
            and not piece.endswith(b"\n")
            and num_read <= MAX_FILE_BYTES
        ):
            piece = stream.readline(MAX_LINE_BYTES)
            num_read += len(piece)
        yield number, content
        if num_read > MAX_FILE_BYTES:
            raise ReadingEnded(
                number, f"the file has more than {MAX_FILE_BYTES:,} bytes; lines below this one were not read"
            )


def _decoded(line: int, content: bytes) -> str | Problem:
    """The line as text without spaces at its ends, or its problem."""
    if line == 1 and content.startswith(UTF16_MARKS):
        raise ReadingEnded(line, "the file is UTF-16; save it as UTF-8")
    if len(content) > MAX_LINE_BYTES:
        return Problem(
            line,
            None,
            None,
            f"the line has more than {MAX_LINE_BYTES:,} bytes; write each job on one shorter line",
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} of the line (0x{content[error.start]:02x})"
        return Problem(line, None, None, f"{place} is not UTF-8; save the file as UTF-8")
    return (text.removeprefix(BYTE_ORDER_MARK) if line == 1 else text).strip()


def _decode_object(line: int, text: str) -> Mapping[str, object] | Problem:
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        reason = f"not JSON ({error.msg} at column {error.colno})"
        return Problem(
            line,
            None,
            printable(text),
            f"{reason}; write each job as one object on one line, such as {EXAMPLE}",
        )
    except RecursionError:
        return Problem(line, None, shown(text), TOO_DEEP)
    return _as_object(line, value)


def _as_object(line: int, value: object) -> Mapping[str, object] | Problem:
    if not isinstance(value, dict):
        return Problem(
            line, None, shown(value), f"not an object; write each job as one object, such as {EXAMPLE}"
        )
    return value


def _parse_int(digits: str) -> int | float:
    """The number; one with too many digits becomes infinity, which no field accepts."""
    return int(digits) if len(digits) <= MAX_INT_DIGITS else float(digits)


def _parse_object(pairs: list[tuple[str, Any]]) -> RepeatedKeys:
    decoded = RepeatedKeys(pairs)
    if len(decoded) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        decoded.repeated = tuple(name for name, count in counts.items() if count > 1)
    return decoded


_DECODER = json.JSONDecoder(parse_int=_parse_int, object_pairs_hook=_parse_object)


def _whole(stream: _Rewound, kind: str, first: int) -> Iterator[Entry]:
    """The entries of an array or a table, which begins at line `first`."""
    content = stream.read(MAX_WHOLE_BYTES + 1)
    if len(content) > MAX_WHOLE_BYTES:
        raise ReadingEnded(first, f"{kind} of more than {MAX_WHOLE_BYTES:,} bytes; write JSON Lines")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ReadingEnded(line, "not UTF-8; save the file as UTF-8") from None
    rest = "\n".join(text.split("\n")[first - 1 :])
    yield from (_array if kind == ARRAY else _table)(rest, first)


def _array(text: str, first: int) -> Iterator[Entry]:
    """The objects of an array; a text in it is a prompt."""
    line, counted, is_between = first, 0, False
    place = text.index("[") + 1
    while True:
        place = _SPACE.match(text, place).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, place), place
        char = text[place : place + 1]
        if char == "]":
            break
        if is_between and char != ",":
            raise ReadingEnded(line, 'the array has no "," or "]" here')
        if is_between:
            place, is_between = place + 1, False
            continue
        try:
            value, place = _DECODER.raw_decode(text, place)
        except json.JSONDecodeError as error:
            at = first + error.lineno - 1
            raise ReadingEnded(at, f"the array is not JSON ({error.msg} at column {error.colno})") from None
        except RecursionError:
            raise ReadingEnded(line, TOO_DEEP) from None
        yield line, {"prompt": value} if isinstance(value, str) else _as_object(line, value)
        is_between = True
    if text[place + 1 :].strip():
        raise ReadingEnded(line, "more text after the end of the array; remove it")


def _table(text: str, first: int) -> Iterator[Entry]:
    header = text.partition("\n")[0].strip()
    delimiter = _delimiter(header) or max(DELIMITERS, key=header.count)
    names = _names(header, delimiter)
    if not names:
        raise ReadingEnded(
            first, "the header is not CSV; write names of fields, with line ends as on Linux or Windows"
        )
    _check_header(names, first)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    begins = first
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as error:
            raise ReadingEnded(begins, f"not CSV ({error})") from None
        if cells is None:
            return
        if begins > first and any(cell.strip() for cell in cells):
            yield begins, _row(begins, names, cells)
        begins = first + rows.line_num


def _check_header(names: Sequence[str], line: int) -> None:
    for name in names:
        if name not in FIELDS and name not in VARIATION_FIELDS:
            hint = suggestion(name, FIELDS) or f"the fields of a job are {', '.join(FIELDS)}"
            raise ReadingEnded(line, f"the header names {plain_name(name)}, which is not a field; {hint}")
    if len(set(names)) < len(names):
        raise ReadingEnded(line, "the header names a field twice")


def _row(line: int, names: Sequence[str], cells: Sequence[str]) -> Mapping[str, object] | Problem:
    if any(cell.strip() for cell in cells[len(names) :]):
        text = f"{len(cells)} cells, but the header has {len(names)}; write texts with a delimiter in quotes"
        return Problem(line, None, None, text)
    return {
        name: value_of(name, cell.strip()) for name, cell in zip(names, cells, strict=False) if cell.strip()
    }
