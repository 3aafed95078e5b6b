"""Kinds of job files: what they are taken for, and that their jobs are those of the same JSON lines."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import read_jobs

from gfgen.errors import InputError
from gfgen.job import inputs
from gfgen.job.inputs import FileLine
from gfgen.job.reader import JobSource, ParsedJobs


def read(folder: Path, name: str, text: str | bytes) -> ParsedJobs:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_jobs(path)


def prompts(parsed: ParsedJobs) -> list[str]:
    assert parsed.problems == ()
    return [spec.prompt for spec in parsed.specs]


def kind(parsed: ParsedJobs) -> str:
    return parsed.kinds[0][1] if parsed.kinds else inputs.JSON_LINES


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"prompt": "a fox"}', inputs.JSON_LINES),
        ("a.jsonl", "a fox", inputs.JSON_LINES),
        ("a", "# a comment\n\n{ }", inputs.JSON_LINES),
        ("a", '"a fox"', inputs.JSON_LINES),
        ("a.txt", '{"prompt": "a fox"}', inputs.JSON_LINES),
        ("a.txt", "{red|blue} fox", inputs.PROMPTS),
        ("a.txt", "[red] fox", inputs.PROMPTS),
        ("a", "a fox, an owl", inputs.PROMPTS),
        ("a.py", "import os", inputs.JSON_LINES),
        ("a.jsonl", '[{"prompt": "a fox"}]', inputs.ARRAY),
        ("a.txt", '["a fox"]', inputs.ARRAY),
        ("a.json", "[\n", inputs.ARRAY),
        ("a.txt", "prompt,steps\na fox,4", inputs.TABLE),
        ("a", "id;prompt\nfox;a fox", inputs.TABLE),
        ("a.csv", "a fox", inputs.TABLE),
    ],
)
def test_the_content_decides_what_a_file_is_and_its_name_where_it_does_not(tmp_path, name, text, expected):
    assert kind(read(tmp_path, name, text)) == expected


def test_every_kind_gives_the_same_jobs(tmp_path):
    lines = read(tmp_path, "a.jsonl", '{"prompt": "a fox", "steps": 4}\n{"prompt": "an \\"owl\\", twice"}\n')
    array = read(tmp_path, "a.json", '[{"prompt": "a fox", "steps": 4},\n "an \\"owl\\", twice"]')
    table = read(tmp_path, "a.csv", 'steps,prompt,id\n4,a fox,\n,"an ""owl"", twice",\n')
    ids = [spec.id for spec in lines.specs]
    assert [spec.id for spec in array.specs] == [spec.id for spec in table.specs] == ids
    assert [spec.line for spec in array.specs] == [1, 2]
    assert [spec.line for spec in table.specs] == [2, 3]
    assert table.specs[0].steps == 4


def test_each_line_of_a_text_is_a_prompt_but_for_blank_lines_and_comments(tmp_path):
    parsed = read(tmp_path, "a.txt", "\ufeffa red circle\r\n\n# later\n  {a|b}  \n")
    assert prompts(parsed) == ["a red circle", "{a|b}"]
    assert [spec.line for spec in parsed.specs] == [1, 4]


def test_an_array_may_have_defaults_and_names_the_entry_of_each_problem(tmp_path):
    text = '# mine\n[\n {"defaults": {"steps": 4}},\n {"prompt": "a fox"},\n {\n  "prompt": ""\n },\n 5\n]\n'
    parsed = read(tmp_path, "a.json", text)
    assert [(spec.steps, spec.line) for spec in parsed.specs] == [(4, 2)]
    assert [str(problem)[:8] for problem in parsed.problems] == ["entry 3:", "entry 4:"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[{"prompt": "a"}\n{"prompt": "b"}]',
            "line 2: the array is not JSON (Expecting ',' delimiter at column 1)",
        ),
        ('[{"prompt": "a"},\n{"prompt": }]', "line 2: the array is not JSON (Expecting value at column 12)"),
        ('[{"prompt": "a"}', "line 1: the array is not JSON (Expecting ',' delimiter at column 17)"),
        ('[{"prompt": "a"}]\n{}', "line 2: the array is not JSON (Extra data at column 1)"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"prompt": ' + "[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_array_is_one_problem(tmp_path, text, message):
    parsed = read(tmp_path, "a.json", text)
    (problem,) = parsed.problems
    assert message in str(problem)


def test_cells_are_numbers_texts_and_variations_and_empty_ones_say_nothing(tmp_path):
    header = "prompt;size;guidance_scale;deadline;vary;seeds;tag\n"
    rows = "a {red|blue} fox;64x64;2.5;90s;true;1..2;007\nan owl;;;;;;\n"
    parsed = read(tmp_path, "a.csv", header + rows)
    assert parsed.problems == ()
    assert len(parsed.specs) == 5
    assert parsed.specs[0].tag == "007"
    assert (parsed.specs[0].width, parsed.specs[0].guidance_scale, parsed.specs[0].deadline_s) == (
        64,
        2.5,
        90,
    )
    assert parsed.specs[-1].width is None


@pytest.mark.parametrize("field", ["seed", "num_images"])
@pytest.mark.parametrize("text", ["1.23457E+11", "1e3", "1E+16", "-2.0e1"])
def test_a_whole_number_with_an_exponent_has_lost_digits(tmp_path, field, text):
    for name, content in (
        ("a.csv", f"prompt,{field}\na,{text}\n"),
        ("a.jsonl", f'{{"prompt": "a", "{field}": {text}}}'),
    ):
        (problem,) = read(tmp_path, name, content).problems
        assert "write all digits; an exponent leaves some out (in Excel, format the column as text)" in str(
            problem
        )
    assert read(tmp_path, "b.csv", "prompt,guidance_scale\na,1.5e1\n").specs[0].guidance_scale == 15


def test_problems_of_a_table_show_what_was_read_of_the_cell(tmp_path):
    text = "prompt,seed\na fox,1.23457E+11\na fox,-0007\na fox,x\n"
    assert [each.value for each in read(tmp_path, "a.csv", text).problems] == ["1.23457E+11", "-7", '"x"']


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ";"), ("a.txt", "\t")])
def test_tables_of_excel_are_read_as_it_writes_them(tmp_path, encoding, name, delimiter):
    rows = [("Prompt", "SEED", "Negative Prompt"), ("ein schöner Fuchs", "7", "grün")]
    text = "".join(delimiter.join(row) + "\r\n" for row in rows)
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    parsed = read(tmp_path, name, mark + text.encode(encoding))
    assert parsed.problems == ()
    assert [(each.prompt, each.seed, each.negative_prompt) for each in parsed.specs] == [
        (*rows[1][:1], 7, "grün")
    ]


@pytest.mark.parametrize(("name", "pack"), [("a.jsonl.gz", gzip.compress), ("a.csv", lzma.compress)])
def test_compressed_files_are_refused_as_such(tmp_path, name, pack):
    (problem,) = read(tmp_path, name, pack(b'{"prompt": "a fox"}\n')).problems
    assert "the file is compressed" in str(problem)


def test_utf16_that_is_cut_off_is_a_problem(tmp_path):
    (problem,) = read(tmp_path, "a.csv", "prompt\na fox\n".encode("utf-16")[:-1]).problems
    assert "the file is not whole UTF-16; save it again, as UTF-8" in str(problem)


@pytest.mark.parametrize("number", ["3,5", "1,000", "1,000,000", "-3,5"])
def test_a_decimal_comma_is_refused_with_the_cure(tmp_path, number):
    (problem,) = read(tmp_path, "a.csv", f"prompt;guidance_scale\na;{number}\n").problems
    assert "a number from 0 to 100; write a decimal point, and no separators of thousands" in str(problem)


def test_a_row_may_extend_over_lines_and_knows_its_first(tmp_path):
    parsed = read(tmp_path, "a.csv", 'prompt,steps\n"a\nfox",4\n\nan owl,x\n')
    assert [(spec.prompt, spec.line) for spec in parsed.specs] == [("a\nfox", 2)]
    assert [problem.line for problem in parsed.problems] == [5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "promt,steps\na fox,4",
            "line 1: the header names promt, which is not a field; did you mean prompt?",
        ),
        (
            ",prompt\n0,a",
            'line 1: the header names "", which is not a field; if it is the index of pandas, write the file '
            "with to_csv(..., index=False)",
        ),
        (
            "sep=;\nprompt;seed\na;1",
            "line 1: the header names sep=, which is not a field; remove this line, which only Excel reads",
        ),
        ("prompt,prompt\na,b", "line 1: the header names a field twice"),
        (
            "prompt,steps\na, b,4",
            "line 2: 3 cells, but the header has 2; write texts with a delimiter in quotes",
        ),
        ("prompt,frames,size\na,1,64x64\na gree", "line 3: 1 cell, but the header has 3; complete the row"),
        ("prompt,frames,size\n\na fox,1\n", "line 3: 2 cells, but the header has 3"),
        ('prompt,steps\n"a,4', "line 2: not CSV"),
    ],
)
def test_a_broken_table_says_where(tmp_path, text, message):
    (problem,) = read(tmp_path, "a.csv", text).problems
    assert str(problem).startswith(message)


def test_json_over_several_lines_gets_a_hint(tmp_path):
    text = json.dumps({"prompt": "a fox", "steps": 4}, indent=2)
    problems = read(tmp_path, "a.jsonl", text).problems
    assert "line 1: an object over several lines; write each job on one line ('jq -c . FILE'" in str(
        problems[-1]
    )


def test_an_endless_array_and_an_endless_beginning_are_given_up(monkeypatch):
    class Endless(io.RawIOBase):
        def __init__(self, begin: bytes, piece: bytes) -> None:
            self.begin, self.piece = begin, piece

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            piece, self.begin = self.begin or self.piece, b""
            buffer[: len(piece)] = piece
            return len(piece)

    monkeypatch.setattr(inputs, "MAX_FILE_BYTES", 2**20)
    for begin, piece in ((b"[ ", b'"a",'), (b"#", b"\n"), (b"", b"x")):
        stream = io.BufferedReader(Endless(begin, piece))
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        parsed = read_jobs("-")
        assert "the file has more" in str(parsed.problems[0])


def test_a_table_that_is_not_utf8_names_the_line(tmp_path):
    (problem,) = read(tmp_path, "a.csv", b"prompt\na fox\n\xff\n").problems
    assert "line 3: character 1 of the line (0xff) is not UTF-8" in str(problem)


# Several sources --------------------------------------------------------------------------------


def test_files_and_prompts_are_one_list_whose_lines_name_their_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"defaults": {"steps": 4}}\n{"id": "fox", "prompt": "a"}\n')
    (tmp_path / "b.txt").write_text("an owl\n")
    (tmp_path / "c.jsonl").write_text('{"id": "fox", "prompt": "b"}\n{"stpes": 1}\n')
    files = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl")]
    parsed = read_jobs(*files, prompts=["a cat"])
    assert [(spec.prompt, spec.steps) for spec in parsed.specs] == [
        ("a", 4),
        ("an owl", None),
        ("a cat", None),
    ]
    assert parsed.source == "3 job files"
    assert parsed.kinds == ((str(files[1]), inputs.PROMPTS),)
    assert parsed.defaults == ((str(files[0]), {"steps": 4}),)
    clash, *others = parsed.problems
    assert str(clash).startswith(f'line 1 of {files[2]}: id = "fox": line 2 of {files[0]} already uses it')
    assert all(str(problem).startswith(f"line 2 of {files[2]}: ") for problem in others)
    assert sorted(spec.line for spec in reversed(parsed.specs)) == [spec.line for spec in parsed.specs]


def test_a_file_that_cannot_be_read_hides_no_problem_of_the_next_one(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": "a"},')
    (tmp_path / "b.csv").write_text("text\na fox\n")
    (tmp_path / "c.jsonl").write_text('{"promt": "a"}\n')
    problems = list(
        map(str, read_jobs(*(tmp_path / name for name in ("a.json", "b.csv", "c.jsonl"))).problems)
    )
    assert [where in each for where, each in zip(("a.json", "b.csv", "c.jsonl"), problems, strict=True)] == [
        True
    ] * 3


def test_one_slip_in_the_name_of_the_prompt_is_one_problem(tmp_path):
    (problem,) = read(tmp_path, "a.jsonl", '{"promt": "a"}').problems
    assert str(problem) == "line 1: promt: not a field; did you mean prompt?"
    assert len(read(tmp_path, "a.jsonl", '{"stpes": 4}').problems) == 2


def test_a_prompt_alone_is_a_job_like_that_of_a_line(tmp_path):
    (spec,) = read_jobs(prompts=["a fox"], overrides={"steps": 4}).specs
    (line,) = read(tmp_path, "a.jsonl", '{"prompt": "a fox", "steps": 4}').specs
    assert (spec.id, spec.steps) == (line.id, 4)


def test_a_line_of_a_file_survives_pickling():
    line = pickle.loads(pickle.dumps(FileLine(3, "a.jsonl", 1)))
    assert (str(line), f"{line}", line.line, line.file) == ("3 of a.jsonl", "3 of a.jsonl", 3, "a.jsonl")
    assert FileLine(9, "a", 0) < FileLine(1, "b", 1)


# Selection --------------------------------------------------------------------------------------


def selected(tmp_path: Path, **options: object) -> list[str]:
    path = tmp_path / "a.jsonl"
    lines = ({"id": f"{name}-{tag}", "prompt": "x", "tag": tag} for name in ("fox", "owl") for tag in "SML")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [spec.id for spec in JobSource(files=(str(path),), **options).read().specs]  # type: ignore[arg-type]


def test_jobs_are_selected_by_patterns_tags_and_number(tmp_path):
    assert selected(tmp_path, only=("fox-*", "owl-S")) == ["fox-S", "fox-M", "fox-L", "owl-S"]
    assert selected(tmp_path, tags=("S", "L"), only=("fox-*",)) == ["fox-S", "fox-L"]
    assert selected(tmp_path, limit=2) == ["fox-S", "fox-M"]
    assert selected(tmp_path, tags=("M",), limit=5) == ["fox-M", "owl-M"]


def test_a_selection_of_nothing_names_what_there_is(tmp_path):
    with pytest.raises(
        InputError, match=r"no job matches --only Fox --tag S; ids are fox-S, .*; tags are L, M, S"
    ):
        selected(tmp_path, only=("Fox",), tags=("S",))


def test_an_empty_name_is_refused():
    with pytest.raises(InputError, match="JOBS is empty"):
        JobSource(files=("",))


@pytest.mark.parametrize("text", [b"a fox\ran owl", b"x" * 200_000, b"\x00\r\xff,;\r"])
def test_a_first_line_that_is_not_csv_is_no_crash(tmp_path, text):
    for name in ("a.txt", "a.jsonl", "a"):
        read(tmp_path, name, text)
    (problem,) = read(tmp_path, "a.csv", text.replace(b"\xff", b"y")).problems
    assert problem.accepted.startswith("line 1: the header")


def test_entries_of_an_array_do_not_share_an_id_or_a_file(tmp_path):
    path = tmp_path / "jobs.json"
    same = {"id": "fox", "prompt": "a fox"}, {"id": "owl", "prompt": "an owl", "output": "fox.png"}
    path.write_text(json.dumps([same[0], same[0], same[1]]))
    parsed = read_jobs(path)
    assert [str(problem) for problem in parsed.problems] == [
        'entry 2: id = "fox": entry 1 already uses it (case is ignored); each job needs its own',
        'entry 3: output = "fox.png": entry 1 already writes fox.png; rename one of them',
    ]
    assert [spec.id for spec in parsed.specs] == ["fox"]


def test_lines_with_variations_are_counted_and_elements_of_an_array_are_none(tmp_path):
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(["a fox", {"prompt": "an owl", "num_images": 3}]))
    parsed = read_jobs(path)
    assert (len(parsed.specs), parsed.num_varied) == (4, 1)


def test_standard_input_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'{"prompt": "a fox"}')))
    assert JobSource(files=("-",)).read().source == "standard input"


def test_choices_vary_if_the_command_line_says_so_and_a_matrix_stays(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a {b|c}"}\n{"prompt": "d", "vary": {"steps": [1, 2]}}\n')
    specs = read_jobs(path, overrides={"vary": True}).specs
    assert [(spec.prompt, spec.steps) for spec in specs] == [("a b", None), ("a c", None), ("d", 1), ("d", 2)]


@pytest.mark.parametrize(("number", "more"), [(10, ""), (12, " and 2 more")])
def test_a_selection_of_nothing_names_ten_ids(tmp_path, number, more):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"id": "fox-{n}", "prompt": "a"}}\n' for n in range(number)))
    ids = ", ".join(f"fox-{n}" for n in range(10))
    with pytest.raises(InputError, match=f"; ids are {ids}{more}; tags are not given"):
        JobSource(files=(str(path),), only=("owl",)).read()


def test_what_is_not_utf8_is_named_with_its_line_and_place(tmp_path):
    assert str(read(tmp_path, "a.txt", b"\n\xfffox").problems[0]).startswith(
        "line 2: character 1 of the line"
    )
    line, problem = inputs._not_utf8("\n\udcff") or (0, "")
    assert (line, problem.startswith("character 1 of the line")) == (2, True)
    found = read(tmp_path, "a.csv", b"prompt\na fox \xff").problems[0]
    assert str(found).startswith("line 2: character 7 of the line (0xff) is not UTF-8")


def test_an_option_of_a_prompt_that_is_there_twice_is_shown(tmp_path):
    (found,) = read(tmp_path, "a.txt", "a fox --s 4 --s 5\n").problems
    assert "--s = 5: is there twice" in str(found)
