"""Properties of the job file that hold for any input."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_job import parse_job

from gfgen.errors import Problem
from gfgen.job.fields import FIELDS
from gfgen.job.reader import ParsedJobs, read_job_stream, to_mapping
from gfgen.job.spec import JobSpec, spec_hash

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""On a busy machine an example may take long; that is no failure."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(sorted(FIELDS)) | st.text(max_size=12)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)
SCALES = st.none() | st.floats(0, 100)
SECONDS = st.floats(0.001, 86_400)
DATES = st.fixed_dictionaries({"deadline_at": st.integers(10**9, 10**10).map(float)})
PIECES = [
    b"{",
    b"}",
    b"[",
    b",",
    b":",
    b'"prompt"',
    b'"id"',
    b'"size"',
    b'"x"',
    b"1",
    b"NaN",
    b"#",
    b" ",
    b"\n",
    b"\xff",
]


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Jobs that a file could hold, without images."""
    size = draw(st.none() | st.tuples(st.integers(16, 1024), st.integers(16, 1024)))
    fields: dict[str, Any] = {
        "id": draw(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,30}", fullmatch=True)),
        "prompt": draw(TEXTS.filter(str.strip)),
        "negative_prompt": draw(st.none() | TEXTS),
        "frames": draw(st.none() | st.integers(1, 4093)),
        "steps": draw(st.none() | st.integers(1, 1000)),
        "guidance_scale": draw(SCALES),
        "true_cfg_scale": draw(SCALES),
        "seed": draw(st.none() | st.integers(0, 2**63 - 1)),
        "arrival_s": draw(st.just(0.0) | SECONDS),
        "timeout_s": draw(st.none() | SECONDS),
        "priority": draw(st.integers(-100, 100)),
        "tag": draw(st.none() | st.sampled_from("SML")),
        "output": draw(st.none() | st.just("fox.png")),
    }
    if size:
        fields |= {"width": size[0], "height": size[1]}
    fields |= draw(st.fixed_dictionaries({}, optional={"deadline_s": SECONDS}) | DATES)
    return JobSpec(**fields)


def read(content: bytes) -> ParsedJobs:
    return read_job_stream(io.BytesIO(content), source="test", folder=Path())


def check(parsed: ParsedJobs) -> None:
    """Jobs or problems, and nothing that could not be printed or be a file name."""
    assert parsed.specs or parsed.problems
    assert all(isinstance(problem, Problem) and len(str(problem)) < 1000 for problem in parsed.problems)
    assert all(str(problem).isprintable() for problem in parsed.problems)
    assert all(spec.id and "/" not in spec.id and not spec.id.startswith(".") for spec in parsed.specs)


@untimed
@given(st.binary(max_size=300))
def test_any_bytes_give_jobs_or_problems(content: bytes) -> None:
    check(read(content))


@untimed
@given(st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join))
def test_any_pieces_of_a_job_file_give_jobs_or_problems(content: bytes) -> None:
    check(read(content))


@untimed
@given(st.dictionaries(NAMES, JSON, max_size=6))
def test_any_object_gives_a_job_or_problems(mapping: dict[str, Any]) -> None:
    check(read(json.dumps(mapping).encode()))


@untimed
@given(st.sampled_from(sorted(FIELDS)), JSON)
def test_any_value_of_a_field_is_read_or_refused_under_its_name(name: str, value: Any) -> None:
    spec, problems = parse_job({"prompt": "a fox", name: value})
    assert spec is not None or all(problem.field in FIELDS for problem in problems)


@untimed
@given(specs())
def test_a_job_written_and_read_is_the_same_job(spec: JobSpec) -> None:
    again, problems = parse_job(json.loads(json.dumps(to_mapping(spec))))
    assert problems == ()
    assert again == spec


@untimed
@given(specs())
def test_the_hash_survives_writing_and_reading(spec: JobSpec) -> None:
    again, _ = parse_job(json.loads(json.dumps(to_mapping(spec))))
    assert again is not None
    assert spec_hash(again) == spec_hash(spec)


@untimed
@given(specs())
def test_scheduling_never_changes_the_hash(spec: JobSpec) -> None:
    moved = replace(
        spec, deadline_s=1.0, deadline_at=2.0, arrival_s=3.0, timeout_s=4.0, priority=5, tag="X", line=6
    )
    assert spec_hash(moved) == spec_hash(spec)


PROMPTS = st.lists(st.sampled_from(["fox", "owl", "elk", "hare", "\u72d0"]), min_size=1, max_size=8)


@untimed
@given(PROMPTS, st.data())
def test_inserted_lines_change_no_other_id(prompts: list[str], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(prompts)))
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    before = [spec.id for spec in read("\n".join(lines).encode()).specs]
    lines.insert(position, '{"prompt": "a newcomer"}')
    after = [spec.id for spec in read("\n".join(lines).encode()).specs]
    assert after[:position] + after[position + 1 :] == before


@untimed
@given(PROMPTS, st.randoms(use_true_random=False))
def test_the_order_of_lines_does_not_change_the_set_of_ids(prompts: list[str], random: Any) -> None:
    shuffled = random.sample(prompts, len(prompts))
    first, second = (
        "\n".join(json.dumps({"prompt": text}) for text in order).encode() for order in (prompts, shuffled)
    )
    assert {spec.id for spec in read(first).specs} == {spec.id for spec in read(second).specs}
