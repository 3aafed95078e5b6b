"""Job files in Parquet."""

from pathlib import Path
from typing import Any

import pytest
from builders import read_jobs

from gfgen.errors import InputError
from gfgen.job import parquet as rows

pyarrow = pytest.importorskip("pyarrow", reason="reads Parquet: pip install 'gfgen[data]'")


def write(path: Path, table: dict[str, list[Any]]) -> Path:
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(table), path)
    return path


def test_a_row_is_a_job_and_null_leaves_a_field_out(tmp_path: Path) -> None:
    table = {"prompt": ["a fox", "a whale"], "seed": [7, None], "args": [None, {"eta": 0.5}]}
    parsed = read_jobs(write(tmp_path / "jobs.PARQUET", table))
    assert not parsed.problems
    assert [(spec.prompt, spec.seed, spec.args) for spec in parsed.specs] == [
        ("a fox", 7, None),
        ("a whale", None, {"eta": 0.5}),
    ]
    assert parsed.kinds == ((str(tmp_path / "jobs.PARQUET"), "Parquet"),)


def test_named_columns_are_the_only_ones_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROWS", 2)
    captions = [f"caption {number}" for number in range(5)]
    file = write(tmp_path / "a.parquet", {"caption": captions, "url": captions, "prompt": ["x"] * 5})
    parsed = read_jobs(file, columns={"prompt": "caption"})
    assert [spec.prompt for spec in parsed.specs] == captions
    assert [spec.line for spec in parsed.specs] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("table", "columns", "said"),
    [
        ({"caption": ["a"]}, {}, "row 1: caption is not a field of a job; name the columns to read, such as"),
        ({"caption": ["a"]}, {"prompt": "captoin"}, "row 1: there is no column captoin; there are caption"),
        ({"prompt": ["a", "b"], "steps": [4, 0]}, {}, "row 2: steps = 0: a whole number from 1"),
    ],
)
def test_problems_name_rows_and_columns(tmp_path: Path, table: Any, columns: Any, said: str) -> None:
    parsed = read_jobs(write(tmp_path / "a.parquet", table), columns=columns)
    assert said in str(parsed.problems[0])


def test_a_file_that_is_not_parquet_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text('{"prompt": "a"}')
    assert "not Parquet" in str(read_jobs(tmp_path / "a.parquet").problems[0])
    with pytest.raises(InputError, match=r"--column goes with job files whose name ends in \.parquet"):
        read_jobs(tmp_path / "a.jsonl", columns={"prompt": "caption"})
