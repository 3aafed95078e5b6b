"""Fields that several jobs share: defaults of a file and overrides of a command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import read_jobs

from gfgen.errors import InputError, JobError
from gfgen.job.reader import ParsedJobs
from gfgen.job.shared import MAX_VARIATIONS, closing_at, parse_overrides, variations


def read(tmp_path: Path, *lines: object, overrides: dict[str, object] | None = None) -> ParsedJobs:
    path = tmp_path / "jobs.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return read_jobs(path, overrides=overrides or {})


def test_overrides_count_before_fields_and_these_before_defaults(tmp_path):
    lines = [
        {"defaults": {"steps": 9, "fps": 8, "frames": 5}},
        {"prompt": "a"},
        {"prompt": "b", "steps": 7, "fps": None},
    ]
    a, b = read(tmp_path, *lines, overrides={"frames": 1}).specs
    assert (a.steps, a.fps, a.frames, a.line) == (9, 8, 1, 2)
    assert (b.steps, b.fps, b.frames, b.line) == (7, None, 1, 3)


def test_a_size_replaces_sides_and_sides_replace_a_size(tmp_path):
    lines = [{"defaults": {"size": "64x64"}}, {"prompt": "a", "width": 32, "height": 16}, {"prompt": "b"}]
    specs = read(tmp_path, *lines).specs
    assert [(spec.width, spec.height) for spec in specs] == [(32, 16), (64, 64)]
    specs = read(tmp_path, *lines, overrides=parse_overrides([("--size", "size=128x96")])).specs
    assert [(spec.width, spec.height) for spec in specs] == [(128, 96)] * 2


def test_a_job_has_the_same_id_however_it_got_its_fields(tmp_path):
    plain = read(tmp_path, {"prompt": "a fox", "steps": 4}).specs[0].id
    assert read(tmp_path, {"defaults": {"steps": 4}}, {"prompt": "a fox"}).specs[0].id == plain
    assert read(tmp_path, {"prompt": "a fox"}, overrides={"steps": 4}).specs[0].id == plain


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"steps": 0}, "line 1: defaults.steps = 0: a whole number from 1"),
        ({"stpes": 4}, "line 1: defaults.stpes: not a field; did you mean steps?"),
        ({"id": "fox"}, 'line 1: id = "fox": each job needs its own'),
        (7, "line 1: defaults = 7: an object of fields"),
    ],
)
def test_a_problem_of_the_defaults_is_reported_once(tmp_path, defaults, words):
    (problem,) = read(tmp_path, {"defaults": defaults}, {"prompt": "a"}, {"prompt": "b"}).problems
    assert str(problem).startswith(words)


def test_defaults_belong_on_the_first_line(tmp_path):
    problems = read(tmp_path, {"prompt": "a"}, {"defaults": {"steps": 4}}).problems
    assert "the first line" in str(problems[0])


def test_overrides_of_a_command_line_are_read_as_their_fields(tmp_path):
    options = [("--set", "steps=4"), ("--set", "prompt=7"), ("--set", "deadline=90"), ("--steps", "steps=8")]
    assert parse_overrides(options) == {"steps": 8, "prompt": "7", "deadline": 90}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps", "NAME=VALUE"),
        ("steps=many", '--set: steps = "many": a whole number'),
        ("stpes=4", "did you mean steps?"),
        ("id=fox", "each job needs its own"),
    ],
)
def test_a_bad_override_is_named(text, words):
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        parse_overrides([("--set", text)])


def test_a_seed_and_seeds_exclude_each_other():
    with pytest.raises(InputError, match="--seed: seed and seeds exclude each other"):
        parse_overrides([("--set", "seeds=1..3"), ("--seed", "seed=4")])


def lines_of(folder: Path | None = None, **line: object) -> list[dict[str, object]]:
    return [dict(job) for job in variations(line, fixed={}, folder=folder)]


def test_variations_have_numbers_if_there_are_several():
    assert lines_of(prompt="a", id="fox", num_images=1) == [{"prompt": "a", "id": "fox"}]
    assert lines_of(prompt="a", id="fox", num_images=2, seed=4) == [
        {"prompt": "a", "id": "fox-1", "seed": 4},
        {"prompt": "a", "id": "fox-2", "seed": 5},
    ]
    assert lines_of(prompt="a", seeds="3..4") == [{"prompt": "a", "seed": 3}, {"prompt": "a", "seed": 4}]
    assert lines_of(prompt="a", seeds=[7]) == [{"prompt": "a", "seed": 7}]


@pytest.mark.parametrize("seeds", [[], "", "4..3", "1..100001", 3])
def test_seeds_that_are_no_range_or_list_are_refused(seeds):
    with pytest.raises(JobError, match=r'a range like "1\.\.8"'):
        lines_of(prompt="a", seeds=seeds)


def test_a_line_may_make_100_000_jobs():
    assert len(lines_of(prompt="a", seeds="1..100000")) == MAX_VARIATIONS
    with pytest.raises(JobError, match="this line makes 100,002 jobs; at most 100,000"):
        lines_of(prompt="{a|b}", vary=True, seeds="1..50001")


def test_lists_are_files_of_a_folder_and_none_over_http(tmp_path):
    (tmp_path / "animals.txt").write_text("fox\n# no\n\nowl\n")
    assert lines_of(tmp_path, prompt="a {@animals.txt}", vary=True) == [
        {"prompt": "a fox"},
        {"prompt": "a owl"},
    ]
    with pytest.raises(JobError, match="not accepted over HTTP"):
        lines_of(prompt="a {@animals.txt}", vary=True)


def test_a_run_may_close_after_a_duration():
    assert closing_at("8h", now=1000.0) == 1000.0 + 8 * 3600
    with pytest.raises(InputError, match="--until '0s'"):
        closing_at("0s", now=1000.0)
