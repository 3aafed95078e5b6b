"""Job files in Parquet."""

from pathlib import Path
from typing import Any

import pytest
from builders import read_jobs

from gfgen.errors import InputError
from gfgen.job import inputs
from gfgen.job.reader import JobSource

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
    monkeypatch.setattr(inputs, "PARQUET_ROWS", 2)
    captions = [f"caption {number}" for number in range(5)]
    file = write(tmp_path / "a.parquet", {"caption": captions, "url": captions, "prompt": ["x"] * 5})
    parsed = read_jobs(file, columns={"prompt": "caption"})
    assert [spec.prompt for spec in parsed.specs] == captions
    assert [spec.line for spec in parsed.specs] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("table", "columns", "said"),
    [
        ({"caption": ["a"]}, {}, "column caption is not a field of a job; name the columns to read, such as"),
        (
            {"caption": ["a"]},
            {"promt": "caption"},
            "column promt is not a field of a job; did you mean prompt?",
        ),
        ({"caption": ["a"]}, {"prompt": "captoin"}, "there is no column captoin; there are caption"),
        ({"prompt": ["a", "b"], "steps": [4, 0]}, {}, "row 2: steps = 0: a whole number from 1"),
    ],
)
def test_problems_name_rows_and_columns(tmp_path: Path, table: Any, columns: Any, said: str) -> None:
    parsed = read_jobs(write(tmp_path / "a.parquet", table), columns=columns)
    assert str(parsed.problems[0]).startswith(said)


def test_a_row_that_cannot_be_read_is_named_and_the_others_are_jobs(tmp_path: Path) -> None:
    texts = pyarrow.Array.from_buffers(
        pyarrow.string(),
        3,
        [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"a\xffc")],
    )
    parsed = read_jobs(write(tmp_path / "a.parquet", {"prompt": texts}))
    assert [spec.prompt for spec in parsed.specs] == ["a", "c"]
    assert [str(problem)[:50] for problem in parsed.problems] == [
        "row 2: cannot be read (UnicodeDecodeError: 'utf-8'"
    ]


def test_rows_after_a_broken_page_are_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow import parquet

    monkeypatch.setattr(inputs, "PARQUET_ROWS", 2)
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"prompt": [f"{number}" * 100 for number in range(6)]})
    parquet.write_table(table, path, row_group_size=2, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    start = parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    content[start : start + 20] = b"\xff" * 20
    path.write_bytes(content)
    parsed = read_jobs(path)
    assert [spec.prompt[0] for spec in parsed.specs] == ["0", "1"]
    assert str(parsed.problems[0]).startswith("row 3: this row and those after it cannot be read as Parquet")


def test_a_file_that_is_not_parquet_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text('{"prompt": "a"}')
    assert "it cannot be read as Parquet" in str(read_jobs(tmp_path / "a.parquet").problems[0])
    with pytest.raises(InputError, match=r"--column goes with job files whose name ends in \.parquet"):
        read_jobs(tmp_path / "a.jsonl", columns={"prompt": "caption"})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://a/missing.jsonl?key=secret", "memory://a/missing.jsonl: no such file"),
        ("nothing://user:secret@a/b.parquet", "nothing://a/b.parquet': cannot be read (ValueError: Protocol"),
        ("gs://a/b.parquet", "cannot be read (ImportError: Please install gcsfs"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_line_without_keys(url: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        JobSource(files=(url,)).read()
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


def test_rows_of_a_url_stream(tmp_path: Path) -> None:
    import fsspec

    write(tmp_path / "a.parquet", {"prompt": ["a fox", "a whale"]})
    fsspec.filesystem("memory").put_file(str(tmp_path / "a.parquet"), "/jobs/a.parquet")
    parsed = JobSource(files=("memory://jobs/a.parquet",)).read()
    assert [spec.prompt for spec in parsed.specs] == ["a fox", "a whale"]
