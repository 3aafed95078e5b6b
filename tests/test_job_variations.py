"""Lines of a job file that stand for several jobs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from builders import read_jobs

from gfgen.job.images import NoImages
from gfgen.job.reader import ParsedJobs, read_job_stream
from gfgen.job.shared import parse_overrides


def read(tmp_path: Path, *lines: object, **overrides: Any) -> ParsedJobs:
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return read_jobs(path, overrides=overrides)


def prompts(tmp_path: Path, line: dict[str, object], **overrides: Any) -> list[str]:
    parsed = read(tmp_path, line, **overrides)
    assert parsed.problems == ()
    return [spec.prompt for spec in parsed.specs]


def test_braces_are_text_unless_the_line_varies(tmp_path):
    text = "a {red|blue} {fox|owl} {x}"
    four = ["a red fox {x}", "a red owl {x}", "a blue fox {x}", "a blue owl {x}"]
    assert prompts(tmp_path, {"prompt": text}) == [text]
    assert prompts(tmp_path, {"prompt": text, "vary": False}) == [text]
    assert prompts(tmp_path, {"prompt": text, "vary": True}) == four
    assert prompts(tmp_path, {"prompt": text}, vary=True) == four


def test_a_list_comes_from_a_file_in_the_folder_of_the_job_file(tmp_path):
    (tmp_path / "animals.txt").write_text("fox\n\n# birds\n snowy owl \n")
    assert prompts(tmp_path, {"prompt": "a {@animals.txt}", "vary": True}) == ["a fox", "a snowy owl"]


def test_seeds_are_a_range_or_a_list(tmp_path):
    specs = read(tmp_path, {"prompt": "a", "seeds": "1..3"}, {"prompt": "a", "seeds": [3, 5]}).specs
    assert [(spec.line, spec.seed) for spec in specs] == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 5)]
    assert len({spec.id for spec in specs}) == 5


def test_images_without_a_seed_are_equal_lines(tmp_path):
    varied = read(tmp_path, {"prompt": "a fox", "num_images": 3}).specs
    lines = read(tmp_path, *[{"prompt": "a fox"}] * 3).specs
    assert [spec.id for spec in varied] == [spec.id for spec in lines]


def test_images_with_names_and_a_seed_are_numbered(tmp_path):
    line = {"prompt": "a", "num_images": 2, "seed": 7, "id": "fox", "output": "my.fox.png"}
    found = [(spec.id, spec.output, spec.seed) for spec in read(tmp_path, line).specs]
    assert found == [("fox-1", "my.fox-1.png", 7), ("fox-2", "my.fox-2.png", 8)]


def test_whole_floats_count_images_and_seeds(tmp_path):
    line = {"prompt": "a", "num_images": 3.0, "seed": 5.0}
    assert [spec.seed for spec in read(tmp_path, line).specs] == [5, 6, 7]
    overrides = parse_overrides([("--set", "seed=8.0")])
    assert [spec.seed for spec in read(tmp_path, line, **overrides).specs] == [8, 9, 10]


@pytest.mark.parametrize("vary", [{"width": [32, 64], "height": [32]}, {"size": ["64x64", "32x32"]}])
@pytest.mark.parametrize("overrides", [{"size": "48x16"}, {"width": 48, "height": 16}])
def test_a_size_of_the_command_line_replaces_every_side_of_a_matrix(tmp_path, vary, overrides):
    (spec,) = read(tmp_path, {"prompt": "a", "vary": vary}, **overrides).specs
    assert (spec.width, spec.height) == (48, 16)


def test_one_side_varies_with_the_other_on_the_line(tmp_path):
    specs = read(tmp_path, {"prompt": "a", "height": 16, "vary": {"width": [32, 64]}}).specs
    assert [(spec.width, spec.height) for spec in specs] == [(32, 16), (64, 16)]


def test_a_problem_of_one_variation_withdraws_its_line(tmp_path):
    matrix = {"steps": [2, 0, 3, 0, -1], "seed": [1, 2]}
    parsed = read(tmp_path, {"prompt": "a", "vary": matrix}, {"prompt": "b"})
    assert [spec.line for spec in parsed.specs] == [2]
    assert [(found.line, found.field, found.value) for found in parsed.problems] == [
        (1, "steps", "0"),
        (1, "steps", "-1"),
    ]


def test_reading_stops_within_a_line_with_many_problems(tmp_path):
    parsed = read(tmp_path, {"prompt": "a", "vary": {"steps": list(range(2_000, 5_000))}}, {"prompt": "b"})
    assert not parsed.specs
    assert len(parsed.problems) == 1_001
    assert "line 2: this line and those below it were not read" in str(parsed.problems[-1])


def test_a_matrix_varies_any_field_but_those_of_the_command_line(tmp_path):
    line = {"prompt": "a {b|c}", "vary": {"steps": [4, 8], "size": ["64x64", "32x32"]}}
    specs = read(tmp_path, line).specs
    assert [(spec.steps, spec.width, spec.prompt) for spec in specs][:3] == [
        (4, 64, "a b"),
        (4, 64, "a c"),
        (4, 32, "a b"),
    ]
    assert len(specs) == 8
    assert len(read(tmp_path, line, vary=True).specs) == 8
    assert [spec.steps for spec in read(tmp_path, line, steps=9).specs] == [9] * 4


def test_defaults_may_vary(tmp_path):
    specs = read(tmp_path, {"defaults": {"seeds": "1..2"}}, {"prompt": "a"}, {"prompt": "b", "seed": 9}).specs
    assert [spec.seed for spec in specs] == [1, 2, 9]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seeds": "8..1"}, 'line 1: seeds = "8..1": a range like'),
        ({"seeds": "0..100000"}, "at most 100,000 seeds"),
        ({"seeds": [-2]}, "line 1: seed = -2: a whole number"),
        ({"seeds": [1], "seed": 2}, "give only one of"),
        ({"num_images": 0}, "line 1: num_images = 0: a whole number"),
        ({"num_images": True}, "line 1: num_images = true: a whole number"),
        ({"num_images": "3"}, "a whole number from 1 to 100,000; write it without quotes"),
        ({"vary": {"stpes": [1]}}, "vary.stpes: not a field that can vary; did you mean steps?"),
        ({"vary": {"id": ["a"]}}, "vary.id: not a field that can vary; each job needs its own"),
        ({"vary": {"steps": 4}}, "vary.steps = 4: a list"),
        ({"vary": 3}, "vary = 3: true, or lists"),
        ({"vary": {"steps": [4, 0]}}, "line 1: steps = 0: a whole number"),
        ({"vary": True, "prompt": "a {b|{c|d}}"}, "not nested"),
        ({"vary": True, "prompt": "a {@nope.txt}"}, 'line 1: prompt = "{@nope.txt}": there is no file'),
        ({"vary": {"steps": [1, 2]}, "num_images": 60_000}, "this line makes 120,000 jobs; at most 100,000"),
        ({"vary": True, "prompt": "{a|b|c|d|e|f|g|h|i|j}" * 6}, "at most 100,000 texts"),
    ],
)
def test_a_problem_names_line_and_field(tmp_path, fields, words):
    (problem,) = read(tmp_path, {"prompt": "a", **fields}).problems
    assert words in str(problem)
    assert problem.line == 1


def test_a_batch_over_http_reads_no_lists(tmp_path):
    (tmp_path / "animals.txt").write_text("fox\n")
    content = b'{"prompt": "{@animals.txt}", "vary": true}\n{"prompt": "a {b|c}", "vary": true}'
    parsed = read_job_stream(io.BytesIO(content), source="x", folder=tmp_path, images=NoImages("no"))
    assert [spec.prompt for spec in parsed.specs] == ["a b", "a c"]
    assert [str(problem) for problem in parsed.problems] == [
        'line 1: prompt = "{@animals.txt}": lists in files are not accepted over HTTP; write {a|b}'
    ]


def test_a_stream_of_jobs_is_of_any_kind(tmp_path):
    for content, suffix in (
        (b'[{"prompt": "a"}, "b"]', ".jsonl"),
        (b"prompt,steps\na,4\nb,\n", ".csv"),
        (b"a\nb\n", ".txt"),
        (b'{"defaults": {"steps": 4}}\n{"prompt": "a"}\n{"prompt": "b"}\n', ".jsonl"),
    ):
        parsed = read_job_stream(io.BytesIO(content), source="x", folder=tmp_path, suffix=suffix)
        assert [spec.prompt for spec in parsed.specs] == ["a", "b"]


def test_the_command_line_gives_all_lines_a_number_of_images_or_seeds(tmp_path: Path) -> None:
    lines = ({"id": "fox", "prompt": "a {red|blue} fox", "vary": True}, {"id": "owl", "prompt": "an owl"})
    for option in ("num_images=2", "seeds=3..4", "seeds=[3, 4]"):
        parsed = read(tmp_path, *lines, **parse_overrides([("--set", option)]))
        assert parsed.problems == ()
        assert [spec.id for spec in parsed.specs] == ["fox-1", "fox-2", "fox-3", "fox-4", "owl-1", "owl-2"]
    problems = read(tmp_path, *lines, **parse_overrides([("--set", "num_images=x")])).problems
    assert 'num_images = "x": a whole number from 1 to 100,000' in str(problems[0])
