"""Job files in Parquet: a row is a job, and a column a field. Rows are read a thousand at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from gfgen.errors import InputError, Problem, in_one_line
from gfgen.job.fields import FIELDS, plain_name
from gfgen.job.inputs import Entry, ReadingEnded
from gfgen.job.shared import VARIATION_FIELDS

PARQUET = "Parquet"
SUFFIX = ".parquet"
ROWS = 1_000


class Row(int):
    place = "row"


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
            _check(field, column, there)
        for batch in file.iter_batches(ROWS, columns=list(columns.values())):
            for row in _rows_in(batch):
                number += 1
                if isinstance(row, Exception):
                    yield (
                        Row(number),
                        Problem(Row(number), None, None, f"cannot be read ({in_one_line(row)})"),
                    )
                    continue
                given = {field: row[column] for field, column in columns.items()}
                yield Row(number), {field: value for field, value in given.items() if value is not None}
    except (ArrowException, OSError) as error:
        line, what = (Row(number + 1), "this row and those after it") if number else (None, "it")
        raise ReadingEnded(line, f"{what} cannot be read as Parquet ({in_one_line(error)})") from None


def _rows_in(batch: Any) -> Iterator[Mapping[str, Any] | Exception]:
    """The rows, or what is wrong with one, such as a text that is not UTF-8 or a time without a place."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for idx in range(batch.num_rows):
            try:
                yield batch.slice(idx, 1).to_pylist()[0]
            except (ValueError, OverflowError) as error:
                yield error


def _check(field: str, column: str, there: list[str]) -> None:
    if column not in there:
        raise ReadingEnded(None, f"there is no column {plain_name(column)}; there are {', '.join(there)}")
    if field not in FIELDS and field not in VARIATION_FIELDS:
        name = plain_name(field)
        hint = f"name the columns to read, such as --column prompt={name}"
        raise ReadingEnded(None, f"column {name} is not a field of a job; {hint}")
