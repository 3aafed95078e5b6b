"""The job file: what is accepted, and that everything wrong is said at once, with its line."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from builders import read_jobs
from one_job import parse_job
from PIL import Image

from gfgen.errors import InputError, JobFileError, ModelError, Problem, listed, nearest
from gfgen.job import images, reader
from gfgen.job.fields import FIELDS
from gfgen.job.reader import ParsedJobs, due_at, passed_deadlines, read_job_stream
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import check_name

JOBS = Path(__file__).parent.parent / "jobs"
DOCS = Path(__file__).parent.parent / "docs" / "job-file.md"


BAD_DEADLINES = (
    *("", "soon", "90", "-5s", "5 parsecs", "30m1h", "1h1h", "0s", "366d", 0, -1, 1e12),
    *(
        "06:00 MEZ",
        "06:00 +25:00",
        "2026-W49",
        "25:00",
        "10 months",
        "2026-11-20 noon",
        "06:00 " + "x" * 100,
        "9999-12-31",
    ),
    *(
        "20261120",
        "2026-13-01T00:00",
        "2026-02-30T10:00",
        "2026-11-20T25:00",
        "0001-01-01T00:00",
    ),
)
BAD_IDS = (
    *("", ".", "..", ".hidden", "../fox", "a/b", "/fox", "a\\b", "C:fox"),
    *("a b", "fox\n", "a\0b", "f\u00fcchse", "x" * 121, 7, True, ["fox"]),
)
BAD_OUTPUTS = (
    *("../fox.png", "/fox.png", "a/fox.png", "a\\fox.png", ".png", ".fox.png", "fox", "fox.", "fox.tiff", ""),
    *("fox.png\n", "a\0.png", "\x1bfox.png", " fox.png", "\ud83e.png", "\u72d0" * 70 + ".png", 7),
)


def read(content: str | bytes, folder: Path = Path()) -> ParsedJobs:
    raw = content.encode() if isinstance(content, str) else content
    return read_job_stream(io.BytesIO(raw), source="test.jsonl", folder=folder)


def job(**fields: Any) -> JobSpec:
    """The job with these fields; fails when there is a problem with it."""
    spec, problems = parse_job({"prompt": "a fox", **fields}, line=1)
    assert problems == ()
    assert spec is not None
    return spec


def problem(**fields: Any) -> Problem:
    """The only problem of a job with these fields."""
    spec, problems = parse_job({"prompt": "a fox", **fields}, line=3)
    assert spec is None
    assert len(problems) == 1, problems
    return problems[0]


def picture(path: Path, *, size: tuple[int, int] = (64, 48)) -> Path:
    Image.linear_gradient("L").resize(size).save(path)
    return path


class TestReadingTheFile:
    def test_each_good_line_becomes_a_job(self) -> None:
        parsed = read('{"prompt": "a fox"}\n{"prompt": "an owl"}')
        assert [spec.prompt for spec in parsed.specs] == ["a fox", "an owl"]

    def test_a_job_knows_its_line(self) -> None:
        assert read('# first\n\n{"prompt": "a fox"}\n').specs[0].line == 3

    def test_comments_and_blank_lines_are_skipped(self) -> None:
        assert read('# one\n  # two\n\n \t\n{"prompt": "a fox"}').problems == ()

    def test_windows_line_ends_are_accepted(self) -> None:
        assert len(read(b'{"prompt": "a fox"}\r\n\r\n{"prompt": "an owl"}\r\n').specs) == 2

    def test_a_byte_order_mark_in_front_is_accepted(self) -> None:
        assert len(read(b'\xef\xbb\xbf{"prompt": "a fox"}').specs) == 1

    def test_a_byte_order_mark_elsewhere_is_a_problem(self) -> None:
        assert read(b'#\n\xef\xbb\xbf{"prompt": "a fox"}').problems[0].line == 2

    def test_good_lines_survive_beside_faulty_ones(self) -> None:
        assert [spec.line for spec in read('{\n{"prompt": "a fox"}\n[]').specs] == [2]

    def test_every_faulty_line_is_reported(self) -> None:
        content = '{"prompt": ""}\n{"prompt": "a fox"}\nno\n{"prompt": "a", "steps": 0}\n'
        assert [problem.line for problem in read(content).problems] == [1, 3, 4]

    def test_every_faulty_field_of_a_line_is_reported(self) -> None:
        found = read('{"prompt": 1, "steps": 0, "frames": true, "sed": 4}').problems
        assert {problem.field for problem in found} == {"prompt", "steps", "frames", "sed"}

    def test_standard_input_is_read_for_a_dash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a fox"}')))
        assert len(read_jobs("-").specs) == 1

    def test_a_named_pipe_is_read_like_a_file(self, tmp_path: Path) -> None:
        read_end, write_end = os.pipe()
        os.write(write_end, b'{"prompt": "a fox"}\n')
        os.close(write_end)
        with open(read_end, "rb") as stream:
            assert len(read_job_stream(stream, source="pipe", folder=tmp_path).specs) == 1

    @pytest.mark.parametrize("content", ["", "\n\n", "# nothing yet\n", "\ufeff"])
    def test_a_file_without_jobs_is_a_problem(self, content: str) -> None:
        assert "no jobs in test.jsonl" in read(content).problems[0].accepted

    def test_a_missing_file_is_one_line_that_names_it(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"^job file .*nope\.jsonl: no such file[^\n]*$"):
            read_jobs(tmp_path / "nope.jsonl")

    def test_a_folder_is_not_a_job_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="this is a folder"):
            read_jobs(tmp_path)

    def test_a_file_that_cannot_be_opened_says_why(self, tmp_path: Path) -> None:
        (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
        with pytest.raises(InputError, match="Too many levels of symbolic links"):
            read_jobs(tmp_path / "loop.jsonl")


class TestBar:
    LINES = b'{"prompt": "a fox"}\n' * 40

    def read(self, tmp_path: Path, *, has_bar: bool) -> ParsedJobs:
        path = tmp_path / "jobs.jsonl"
        path.write_bytes(self.LINES)
        return read_jobs(path, has_bar=has_bar)

    def test_a_bar_counts_the_lines_of_a_long_file(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(reader, "BAR_FROM", 30)
        with_bar = self.read(tmp_path, has_bar=True)
        assert "reading: 3" in capsys.readouterr().err
        assert with_bar == self.read(tmp_path, has_bar=False)
        assert capsys.readouterr().err == ""

    def test_a_short_file_has_no_bar(self, tmp_path, capsys):
        self.read(tmp_path, has_bar=True)
        assert capsys.readouterr().err == ""

    def test_the_bar_starts_no_thread(self, monkeypatch, tmp_path):
        monkeypatch.setattr(reader, "BAR_FROM", 1)
        before = threading.enumerate()
        self.read(tmp_path, has_bar=True)
        assert threading.enumerate() == before


class TestWhatIsNoJob:
    @pytest.mark.parametrize(
        "line", ["{", "nonsense", "{'prompt': 'x'}", '{"prompt": "x"},', '{"prompt": "x"} {}']
    )
    def test_text_that_is_not_json_names_the_column(self, line: str) -> None:
        found = read(line).problems
        assert len(found) == 1
        assert re.search(r"not JSON \(.* at column \d+\)", found[0].accepted)

    @pytest.mark.parametrize("line", ['"a fox"', "5", "true", "null", "NaN"])
    def test_json_that_is_no_object_is_shown(self, line: str) -> None:
        assert read(line).problems[0] == Problem(
            1,
            None,
            line,
            f"not an object; write each job as one object, such as {reader.EXAMPLE}",
        )

    def test_bytes_that_are_not_utf8_are_named_with_their_place(self) -> None:
        found = read(b'{"prompt": "ok"}\n{"prompt": "caf\xe9"}').problems
        assert (found[0].line, found[0].accepted[:40]) == (2, "character 16 of the line (0xe9) is not U")

    def test_a_utf16_file_is_read(self) -> None:
        found = read('{"prompt": "a fox"}\n{"prompt": "an owl"}\n'.encode("utf-16")).problems
        assert found == ()

    def test_deep_nesting_is_a_problem_and_no_crash(self) -> None:
        assert "nested too deeply" in read("[" * 200_000).problems[0].accepted

    def test_a_key_given_twice_is_a_problem(self) -> None:
        found = read('{"prompt": "a fox", "seed": 1, "seed": 2}').problems
        assert (found[0].field, found[0].accepted) == ("seed", "given more than once")

    def test_control_characters_never_reach_the_report(self) -> None:
        report = "".join(
            map(str, read('{"prompt": "a", "\\u001b[31m": 1, "tag": "\\u001b[2J"}\n\x1b[2J').problems)
        )
        assert report.isprintable()


class TestBounds:
    def test_a_line_of_10_mb_is_one_problem(self) -> None:
        found = read('{"prompt": "' + "x" * 10_000_000 + '"}\n{"prompt": "a fox"}').problems
        assert [(problem.line, problem.field) for problem in found] == [(1, "prompt")]

    def test_after_many_faulty_lines_the_report_begins_with_that_others_were_not_read(
        self,
    ) -> None:
        found = read("x\n" * 2000).problems
        assert len(found) == reader.MAX_PROBLEMS + 1
        first = min(found, key=lambda problem: problem.line or 0)
        assert str(first).startswith("line 1001: this line and those below it were not read")

    def test_a_file_of_too_many_jobs_is_refused(self) -> None:
        stream = io.BytesIO(b'{"prompt": "a fox"}\n' * 60)
        parsed = read_job_stream(stream, source="yes", folder=Path(), max_jobs=50)
        assert len(parsed.specs) == 50
        assert str(parsed.problems[0]).startswith("line 51: ")


class TestPrompt:
    @pytest.mark.parametrize("value", ["", "   ", "\n\t"])
    def test_an_empty_prompt_is_a_problem(self, value: str) -> None:
        assert problem(prompt=value).accepted == "a text of 1 to 20,000 characters; this one is empty"

    @pytest.mark.parametrize("value", [5, 1.5, True, ["a fox"], {"text": "a fox"}])
    def test_a_prompt_that_is_no_text_is_a_problem(self, value: object) -> None:
        assert problem(prompt=value).field == "prompt"

    @pytest.mark.parametrize("line", ["{}", '{"prompt": null}', '{"steps": 4}'])
    def test_a_missing_prompt_is_a_problem(self, line: str) -> None:
        assert str(read(line).problems[0]) == "line 1: prompt: missing; a text of 1 to 20,000 characters"

    def test_a_prompt_of_a_novel_is_a_problem(self) -> None:
        assert problem(prompt="x" * 20_001).accepted.endswith("this one has 20,001")

    def test_a_prompt_in_any_script_is_kept_as_it_is(self) -> None:
        assert job(prompt=" \u96ea\u306e\u72d0\n\U0001f98a ").prompt == " \u96ea\u306e\u72d0\n\U0001f98a "

    @pytest.mark.parametrize("value", ["a\0b", "\ud83e"])
    def test_a_prompt_that_no_file_could_carry_is_a_problem(self, value: str) -> None:
        assert problem(prompt=value).field == "prompt"

    def test_an_empty_negative_prompt_is_kept(self) -> None:
        assert job(negative_prompt="").negative_prompt == ""


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "fps"),
        [(24, 24), (24.0, 24), (23.976, 23.976), (0.5, 0.5), ("30000/1001", 30000 / 1001), ("24/1", 24)],
    )
    def test_frames_per_second_may_be_a_fraction(self, value: object, fps: float) -> None:
        assert repr(job(fps=value).fps) == repr(fps)

    @pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1])
    def test_a_seed_has_64_bits_or_is_random(self, seed: int) -> None:
        assert job(seed=seed).seed == seed

    def test_pictures_of_one_line_go_on_from_its_seed_and_random_ones_stay_random(self) -> None:
        line = {"prompt": "a", "num_images": 2}
        found = read("".join(json.dumps({**line, "seed": seed}) + "\n" for seed in (2**64 - 1, -1)))
        assert [spec.seed for spec in found.specs] == [2**64 - 1, 0, -1, -1]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *[(name, value) for name in ("width", "height") for value in (0, -480, 8193, 10**9)],
            *[("frames", value) for value in (0, -1, 4098, 10**30)],
            *[("fps", value) for value in (0, 241, 0.05, "24/0", "1000/1")],
            *[("steps", value) for value in (0, -4, 1001, 4.5)],
            *[("seed", value) for value in (-2, 2**64, 1e18, 0.5, 10**999)],
            *[("priority", value) for value in (10**7, 0.5)],
            *[("guidance_scale", value) for value in (-1, 101, 10**400)],
            *[("guidance_scale_2", value) for value in (-0.1, 1e9)],
            *[("true_cfg_scale", value) for value in (-1, 1e9)],
            *[("boundary_ratio", value) for value in (-0.1, 1.1)],
            *[("flow_shift", value) for value in (0, -3, 1000)],
        ],
    )
    def test_a_number_out_of_range_is_a_problem(self, name: str, value: object) -> None:
        pair = {"width": 64, "height": 64} if name in ("width", "height") else {}
        assert problem(**{**pair, name: value}).field == name

    @pytest.mark.parametrize(
        "name", ["frames", "steps", "seed", "priority", "guidance_scale", "arrival", "deadline"]
    )
    @pytest.mark.parametrize("value", [True, False, [4], {"a": 1}])
    def test_what_is_no_number_is_a_problem(self, name: str, value: object) -> None:
        assert problem(**{name: value}).field == name

    @pytest.mark.parametrize("name", ["frames", "steps", "seed", "priority", "guidance_scale", "timeout"])
    def test_a_number_in_quotes_gets_a_hint(self, name: str) -> None:
        assert "write it without quotes" in problem(**{name: "8"}).accepted

    @pytest.mark.parametrize(
        "name", ["frames", "seed", "guidance_scale", "boundary_ratio", "deadline", "arrival"]
    )
    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
    def test_what_json_has_no_number_for_is_named(self, name: str, value: str) -> None:
        found = read(f'{{"prompt": "a fox", "{name}": {value}}}').problems
        assert [problem.field for problem in found] == [name]

    def test_an_integer_beyond_all_reading_is_a_problem(self) -> None:
        for digits, found in (
            (1_000, "a whole number from -1 to"),
            (10_000, "a number of thousands of digits"),
        ):
            (problem,) = read('{"prompt": "a", "seed": ' + "9" * digits + "}").problems
            assert found in problem.accepted
        (problem,) = read('{"prompt": "a", "sigmas": [1' + "0" * 1_000 + "]}").problems
        assert problem.field == "sigmas"

    def test_a_whole_float_is_a_whole_number(self) -> None:
        assert repr(job(steps=20.0).steps) == "20"

    def test_an_integer_is_a_scale(self) -> None:
        assert repr(job(guidance_scale=5).guidance_scale) == "5.0"

    def test_null_says_nothing(self) -> None:
        assert job(steps=None, deadline=None) == job()

    def test_the_problem_says_what_is_accepted(self) -> None:
        assert str(problem(steps=0)) == "line 3: steps = 0: a whole number from 1 to 1,000"


class TestSize:
    @pytest.mark.parametrize("text", ["832x480", "832X480", "832 x 480"])
    def test_size_is_width_by_height(self, text: str) -> None:
        assert (job(size=text).width, job(size=text).height) == (832, 480)

    def test_width_and_height_say_the_same(self) -> None:
        assert job(width=832, height=480) == job(size="832x480")

    def test_size_may_agree_with_width(self) -> None:
        assert job(size="832x480", width=832).height == 480

    def test_size_may_not_contradict_height(self) -> None:
        found = problem(size="832x480", height=720)
        assert (found.field, found.accepted) == (
            "height",
            'differs from size = "832x480"; give only one of them',
        )

    @pytest.mark.parametrize(("given", "missing"), [("width", "height"), ("height", "width")])
    def test_one_side_alone_is_a_problem(self, given: str, missing: str) -> None:
        found = problem(**{given: 480})
        assert (found.field, found.accepted) == (
            missing,
            f"missing; give both {given} and {missing}, or neither",
        )

    @pytest.mark.parametrize(
        "value",
        [
            "",
            "832",
            "832x",
            "x480",
            "832*480",
            "0x480",
            "-832x480",
            "99999x480",
            "832x480x49",
            [832, 480],
            832,
        ],
    )
    def test_any_other_size_is_a_problem(self, value: object) -> None:
        assert problem(size=value).field == "size"

    def test_a_size_that_is_fine_and_frames_that_are_fine_may_be_too_much_together(self) -> None:
        assert (
            problem(size="4096x4096", frames=1000).accepted
            == "width x height x frames of at most 4,294,967,296"
        )


class TestTimes:
    @pytest.mark.parametrize(
        ("value", "seconds"),
        [
            (90, 90.0),
            (0.5, 0.5),
            ("90s", 90.0),
            ("1.5m", 90.0),
            ("1h30m", 5400.0),
            ("1h 30m", 5400.0),
            ("2d", 172_800.0),
            ("1d2h3m4s", 93_784.0),
            ("20S", 20.0),
        ],
    )
    def test_a_deadline_counts_from_the_arrival(self, value: object, seconds: float) -> None:
        assert job(deadline=value).deadline_s == seconds

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("10min", 600), ("10 minutes", 600), ("1 minute", 60), ("2 hours", 7200), ("1 hr 30 mins", 5400),
            ("1 hour, 30 minutes", 5400), ("3 days", 259_200), ("90 sec", 90), ("1.5 h", 5400),
        ],
    )  # fmt: skip
    def test_a_duration_is_written_as_people_do(self, text: str, seconds: float) -> None:
        assert job(deadline=text).deadline_s == job(timeout=text).timeout_s == seconds

    def test_a_date_means_its_end(self) -> None:
        assert job(deadline="2026-12-01").deadline_at == datetime(2026, 12, 2).timestamp()
        in_tokyo = datetime(2026, 12, 2, tzinfo=ZoneInfo("Asia/Tokyo")).timestamp()
        assert job(deadline="2026-12-01 Asia/Tokyo").deadline_at == in_tokyo

    @pytest.mark.parametrize("text", ["06:00", "6:00", "06:00:00", "6:00 am", "6am"])
    def test_a_time_of_day_is_the_next_one_here(self, text: str) -> None:
        now = datetime.now()
        today = now.replace(hour=6, minute=0, second=0, microsecond=0)
        expected = today if today > now else today + timedelta(days=1)
        assert job(deadline=text).deadline_at == expected.timestamp()

    @pytest.mark.parametrize(
        "zone", ["Europe/Berlin", "europe/berlin", "CET", "cet", "UTC", "Z", "+01:00", "-0500"]
    )
    def test_a_time_of_day_in_a_zone_is_the_next_one_there(self, zone: str) -> None:
        offset = timezone(timedelta(hours={"+01:00": 1, "-0500": -5}.get(zone, 0)))
        there = ZoneInfo("Europe/Berlin" if zone[0] in "Ee" else "CET") if zone[0] in "EeCc" else offset
        found = datetime.fromtimestamp(job(deadline=f"06:30 {zone}").deadline_at or 0, there)
        assert (found.hour, found.minute) == (6, 30)
        assert 0 < found.timestamp() - time.time() <= 25 * 3600

    def test_an_unknown_zone_is_named_with_known_ones(self) -> None:
        found = problem(deadline="2026-11-20 18:00 MEZ").accepted
        assert found.endswith("instead of MEZ, a zone such as Europe/Berlin, CET, UTC or +01:00")

    @pytest.mark.parametrize(
        "text",
        ["2026-11-20T18:00:00+01:00", "2026-11-20 17:00Z", "2026-11-20T12:00-05:00", "2026-11-20 18:00 CET",
         "2026-11-20T18:00 Europe/Berlin", "2026-11-20 17:00 UTC", "2026-11-20 18:00 +01:00"],
    )  # fmt: skip
    def test_a_deadline_may_be_a_time_in_a_zone(self, text: str) -> None:
        assert job(deadline=text).deadline_at == datetime(2026, 11, 20, 17, tzinfo=UTC).timestamp()

    def test_a_time_without_a_zone_is_local(self) -> None:
        assert job(deadline="2026-11-20T18:00").deadline_at == datetime(2026, 11, 20, 18).timestamp()

    @pytest.mark.parametrize("value", BAD_DEADLINES)
    def test_any_other_deadline_is_a_problem(self, value: object) -> None:
        assert problem(deadline=value).field == "deadline"

    def test_an_arrival_may_be_zero(self) -> None:
        assert job(arrival=0).arrival_s == 0.0

    @pytest.mark.parametrize("value", [-1, "later", "2026-11-20T18:00"])
    def test_an_arrival_is_a_duration(self, value: object) -> None:
        assert problem(arrival=value).field == "arrival"

    def test_a_timeout_is_a_duration(self) -> None:
        assert job(timeout="1h").timeout_s == 3600.0

    def test_a_timeout_of_zero_is_a_problem(self) -> None:
        assert problem(timeout=0).field == "timeout"

    def test_a_deadline_is_due_after_the_arrival(self) -> None:
        assert due_at(job(deadline=20), arrived_at=1000.0) == 1020.0

    def test_a_date_is_due_whenever_the_job_arrives(self) -> None:
        assert due_at(job(deadline="2026-11-20T18:00Z"), arrived_at=5.0) == 1_795_197_600.0

    @pytest.mark.parametrize("clock", ["06:00", "6am", "6:00 AM", "06:00 UTC", "06:00 -05:00"])
    def test_a_time_of_day_is_the_next_one_after_the_first_arrival(self, clock: str) -> None:
        read = job(deadline=clock)
        assert read.deadline_at is not None
        night_before = read.deadline_at - 86_400 - 8 * 3_600
        assert due_at(read, arrived_at=night_before) == read.deadline_at - 86_400
        assert due_at(read, arrived_at=night_before - 10 * 86_400) == read.deadline_at - 11 * 86_400
        # It was read before, and ranks loaded over that time.
        assert due_at(read, arrived_at=read.deadline_at + 60) == read.deadline_at
        assert due_at(read, arrived_at=0.0) == read.deadline_at, "the journal does not tell"

    def test_a_night_with_another_hour_ends_at_the_same_time_of_day(self) -> None:
        began_at, due, next_due = (
            datetime(2026, 10, day, hour, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
            for day, hour in ((24, 22), (25, 6), (26, 6))
        )
        spec = replace(job(), deadline_at=next_due, deadline_clock="06:00 Europe/Berlin")
        assert due_at(spec, arrived_at=began_at) == due == began_at + 9 * 3_600

    def test_a_date_has_no_time_of_day(self) -> None:
        assert job(deadline="2026-11-20 06:00").deadline_clock is None

    def test_a_date_that_has_passed_is_a_warning(self) -> None:
        late = passed_deadlines([job(id="fox", deadline="2026-11-20T18:00Z")], now=1_795_197_601.0)
        assert (late[0].line, late[0].accepted) == (1, "has passed; fox runs anyway and counts as late")

    def test_a_date_before_the_arrival_is_a_warning(self) -> None:
        spec = job(deadline="2026-11-20T18:00Z", arrival="1h")
        assert len(passed_deadlines([spec], now=1_795_197_000.0)) == 1

    def test_a_relative_deadline_of_a_new_job_has_not_passed(self) -> None:
        assert passed_deadlines([job(deadline=1, arrival=10)], now=5e9) == ()

    def test_a_relative_deadline_counts_from_the_journaled_arrival(self) -> None:
        assert (
            len(passed_deadlines([job(id="fox", deadline=20)], now=1030.0, arrived_at={"fox": 1000.0})) == 1
        )


class TestUnknownFields:
    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("stpes", "steps"),
            ("Prompt", "prompt"),
            ("negative-prompt", "negative_prompt"),
            ("num_inference_steps", "steps"),
            ("num_frames", "frames"),
            ("cfg_scale", "guidance_scale"),
            ("cfg", "guidance_scale"),
            ("CFG", "guidance_scale"),
            ("sampler", "scheduler"),
            ("sampler_name", "scheduler"),
            ("batch_size", "num_images"),
            ("negative", "negative_prompt"),
            ("frame_rate", "fps"),
            ("CFG Scale", "guidance_scale"),
            ("output_format", "format"),
            ("filename", "output"),
            ("strength", "args"),
        ],
    )
    def test_the_nearest_name_is_suggested(self, name: str, meant: str) -> None:
        found = problem(**{name: 1})
        assert (found.field, found.accepted) == (name, f"not a field; did you mean {meant}?")

    def test_a_name_that_another_ends_in_comes_before_one_that_is_alike(self) -> None:
        assert nearest("steps", ["style", "num_inference_steps"]) == "num_inference_steps"
        assert nearest("prompt", ["negative_prompt", "prompt"]) == "prompt"
        assert nearest("scale", ["guidance_scale", "true_cfg_scale", "scales"]) == "scales"

    def test_what_a_field_accepts_is_said_once(self) -> None:
        lines = [{"steps": 0}, {"steps": 2000}, {"steps": "7"}, {"frames": 0}, {"steps": 0}]
        found = read("\n".join(json.dumps({"prompt": "a", **line}) for line in lines)).problems
        assert listed(found) == [
            "line 1: steps = 0: a whole number from 1 to 1,000",
            "line 2: steps = 2000: as in line 1",
            'line 3: steps = "7": write it without quotes',
            "line 4: frames = 0: a whole number from 1 to 4,093",
            "line 5: steps = 0: as in line 1",
        ]

    def test_a_reason_names_the_line_that_has_it_and_none_with_another_reason_between(self) -> None:
        reasons = [
            "too large",
            "too small",
            "too large",
            "from 1 to 9; no quotes",
            "from 1 to 9",
            "from 1 to 9",
        ]
        found = [Problem(line, "steps", "5", reason) for line, reason in enumerate(reasons, start=1)]
        assert listed([*found, replace(found[1], line=2), Problem(None, "steps", "5", "too small")]) == [
            "line 1: steps = 5: too large",
            "line 2: steps = 5: too small",
            "line 3: steps = 5: as in line 1",
            "line 4: steps = 5: from 1 to 9; no quotes",
            "line 5: steps = 5: from 1 to 9",
            "line 6: steps = 5: as in line 5",
            "line 2: steps = 5: too small",
            "steps = 5: as in line 2",
        ]

    @pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (2e5, "200000"), (4.5, "4.5"), (-3.0, "-3")])
    def test_whole_numbers_are_shown_whole(self, value: float, text: str) -> None:
        assert problem(steps=value).value == text
        assert Problem.of("steps", value, "").value == text

    def test_all_names_are_noted_when_none_is_near(self) -> None:
        found = problem(qqq=1)
        assert (found.accepted, found.note) == ("not a field", f"the fields of a job are {', '.join(FIELDS)}")

    def test_a_report_lists_twenty_problems_their_number_and_all_fields_once(self) -> None:
        found = read("\n".join('{"prompt": "a fox", "qqq": 1}' for _ in range(1500)))
        lines = str(JobFileError("mine.jsonl", found.problems)).splitlines()
        assert lines[0] == "mine.jsonl: 1,001 problems; nothing was started"
        assert lines[1:21] == [f"  line {number}: qqq: not a field" for number in range(1, 21)]
        assert lines[21:] == ["  and 981 more problems", f"  the fields of a job are {', '.join(FIELDS)}"]

    def test_a_number_of_pictures_is_no_field(self) -> None:
        assert problem(n=4).accepted == "not a field; did you mean num_images?"

    def test_a_huge_name_is_shortened(self) -> None:
        assert len(problem(**{"x" * 100_000: 1}).field or "") <= 80


class TestIdAndOutput:
    @pytest.mark.parametrize("value", ["fox", "Fox_2.final-3", "7", "-", "x" * 120])
    def test_plain_ids_are_kept(self, value: str) -> None:
        assert job(id=value).id == value

    @pytest.mark.parametrize("value", BAD_IDS)
    def test_any_other_id_is_a_problem(self, value: object) -> None:
        assert problem(id=value).field == "id"

    @pytest.mark.parametrize("value", ["fox.png", "the fox.mp4", "fox.v2.PNG", "\u72d0.png"])
    def test_plain_file_names_are_kept(self, value: str) -> None:
        assert job(output=value).output == value

    @pytest.mark.parametrize("value", BAD_OUTPUTS)
    def test_any_other_output_is_a_problem(self, value: object) -> None:
        assert problem(output=value).field == "output"

    @pytest.mark.parametrize("second", ["fox", "Fox"])
    def test_a_second_job_of_one_id_names_both_lines(self, second: str) -> None:
        found = read(f'{{"prompt": "a", "id": "fox"}}\n#\n{{"prompt": "b", "id": "{second}"}}').problems
        assert [(problem.line, problem.field) for problem in found] == [(3, "id")]
        assert "line 1 " in found[0].accepted

    def test_the_first_of_two_equal_ids_is_kept(self) -> None:
        parsed = read('{"prompt": "a", "id": "fox"}\n{"prompt": "b", "id": "fox"}')
        assert [spec.prompt for spec in parsed.specs] == ["a"]

    def test_a_faulty_line_still_takes_its_id(self) -> None:
        found = read('{"prompt": "", "id": "fox"}\n{"prompt": "b", "id": "fox"}').problems
        assert [(problem.line, problem.field) for problem in found] == [(1, "prompt"), (2, "id")]

    def test_an_id_that_another_job_has_by_default_is_a_problem(self) -> None:
        by_default = job(prompt="a fox").id
        found = read(f'{{"prompt": "a fox"}}\n{{"prompt": "b", "id": "{by_default}"}}').problems
        assert [(problem.line, problem.field) for problem in found] == [(2, "id")]

    @pytest.mark.parametrize("second", ["fox.png", "FOX.png"])
    def test_a_second_job_of_one_output_names_both_lines(self, second: str) -> None:
        found = read(
            f'{{"prompt": "a", "output": "fox.png"}}\n{{"prompt": "b", "output": "{second}"}}'
        ).problems
        assert [(problem.line, problem.field) for problem in found] == [(2, "output")]
        assert found[0].accepted == f"line 1 already writes {second}; rename one of them"

    def test_an_output_may_not_be_the_default_of_an_earlier_job(self) -> None:
        found = read('{"prompt": "a", "id": "fox"}\n{"prompt": "b", "output": "fox.mp4"}').problems
        assert [(problem.line, problem.field) for problem in found] == [(2, "output")]

    def test_an_output_may_not_be_the_default_of_a_later_job(self) -> None:
        found = read('{"prompt": "b", "output": "fox.mp4"}\n{"prompt": "a", "id": "fox"}').problems
        assert [(problem.line, problem.field) for problem in found] == [(2, "id")]

    def test_pictures_of_one_job_have_names_of_their_own(self) -> None:
        several = '{"prompt": "a", "id": "fox", "args": {"num_images_per_prompt": 2}}'
        for other in ('"id": "fox-2"', '"output": "FOX-1.png"'):
            for lines in ([several, f'{{"prompt": "b", {other}}}'], [f'{{"prompt": "b", {other}}}', several]):
                found = read("\n".join(lines)).problems
                assert [problem.line for problem in found] == [2]
                assert "line 1 already writes" in found[0].accepted
        assert read(several + '\n{"prompt": "b", "id": "fox-3"}').problems == ()

    def test_equal_jobs_with_several_pictures_do_not_clash(self) -> None:
        line = '{"prompt": "a", "args": {"num_images_per_prompt": 3}}'
        assert read(f"{line}\n{line}").problems == ()

    def test_an_output_may_be_the_own_default(self) -> None:
        assert read('{"prompt": "a", "id": "fox", "output": "fox.png"}').problems == ()

    def test_a_default_that_is_not_used_is_free(self) -> None:
        content = '{"prompt": "a", "id": "fox", "output": "x.png"}\n{"prompt": "b", "output": "fox.png"}'
        assert read(content).problems == ()


class TestLabels:
    @pytest.mark.parametrize("name", ["model", "tag"])
    @pytest.mark.parametrize("value", ["", " ", "a\nb", "a\0b", " a", "x" * 2000, 5, ["S"]])
    def test_what_is_no_short_text_is_a_problem(self, name: str, value: object) -> None:
        assert problem(**{name: value}).field == name

    def test_a_model_is_kept_as_given(self) -> None:
        assert job(model="Wan-AI/Wan2.2-TI2V-5B-Diffusers").model == "Wan-AI/Wan2.2-TI2V-5B-Diffusers"


class TestImage:
    def test_a_path_is_relative_to_the_job_file(self, tmp_path: Path) -> None:
        picture(tmp_path / "cape.png")
        (tmp_path / "jobs.jsonl").write_text('{"prompt": "waves", "image": "cape.png"}')
        assert read_jobs(tmp_path / "jobs.jsonl").specs[0].image == str(tmp_path / "cape.png")

    def test_an_absolute_path_is_kept(self, tmp_path: Path) -> None:
        path = picture(tmp_path / "cape.jpg")
        assert job(image=str(path)).image == str(path)

    def test_a_missing_image_is_named_with_its_path(self, tmp_path: Path) -> None:
        found = read('{"prompt": "waves", "image": "nope.png"}', tmp_path).problems
        assert found[0].field == "image"
        assert found[0].accepted.endswith(f"{tmp_path / 'nope.png'} does not exist")

    def test_a_folder_is_no_image(self, tmp_path: Path) -> None:
        assert problem(image=str(tmp_path)).accepted.endswith("is not a file")

    def test_a_folder_and_a_pickle_are_named_as_such(self, tmp_path: Path) -> None:
        (tmp_path / "a.ckpt").write_bytes(b"PK")
        assert problem(image=str(tmp_path)).accepted.endswith("is a folder and is not a file")
        words = "is a pickle, which can run code when it is read; convert it to .safetensors"
        assert words in problem(lora=str(tmp_path / "a.ckpt")).accepted
        for name in (str(tmp_path / "a.ckpt"), "a.ckpt", "tiny-wan:a.pt"):
            with pytest.raises(ModelError, match=words):
                check_name(name)

    def test_a_pipe_is_not_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.png")
        assert problem(image=str(tmp_path / "pipe.png")).accepted.endswith("is not a file")

    def test_a_text_is_no_picture(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_text("hello")
        assert problem(image=str(tmp_path / "a.png")).accepted.endswith("the file is not a picture")

    @pytest.mark.parametrize("name", ["cape.png", "cape.jpg", "cape.webp"])
    def test_a_truncated_picture_is_broken(self, tmp_path: Path, name: str) -> None:
        path = picture(tmp_path / name, size=(256, 256))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert re.search("picture is broken|not a picture", problem(image=str(path)).accepted)

    def test_a_picture_that_unpacks_to_too_much_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 1000)
        assert "64x48 is more than 1,000 pixels" in problem(image=str(picture(tmp_path / "a.png"))).accepted

    def test_what_pillow_calls_a_bomb_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        assert "the picture has more than" in problem(image=str(picture(tmp_path / "a.png"))).accepted

    def test_a_file_too_large_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 100)
        assert problem(image=str(picture(tmp_path / "a.png"))).field == "image"

    def test_other_formats_are_refused(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.tga").rename(tmp_path / "a.png")
        assert problem(image=str(tmp_path / "a.png")).accepted.endswith("the file is not a picture")

    def test_a_url_gets_a_hint(self) -> None:
        assert problem(image="https://example.org/fox.png").accepted.endswith(
            "this is a URL; download the file first"
        )

    def test_one_image_of_many_jobs_is_opened_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        picture(tmp_path / "a.png")
        opened: list[bytes] = []
        monkeypatch.setattr(images, "_decode", opened.append)
        read('{"prompt": "a", "image": "a.png"}\n' * 5, tmp_path)
        assert len(opened) == 1


class TestExamples:
    @pytest.mark.parametrize("path", sorted(JOBS.glob("*.jsonl")), ids=lambda path: path.name)
    def test_every_example_is_right(self, path: Path) -> None:
        assert read_jobs(path).problems == ()

    @pytest.mark.parametrize("path", sorted(JOBS.glob("*.jsonl")), ids=lambda path: path.name)
    def test_every_example_says_how_to_run_it(self, path: Path) -> None:
        assert f"gfgen run jobs/{path.name}" in path.read_text()

    def test_the_demo_is_a_dozen_jobs_that_name_no_model_and_one_with_a_lora(self) -> None:
        specs = read_jobs(JOBS / "batch.jsonl").specs
        assert sorted((spec.model, spec.lora is None) for spec in specs if spec.model or spec.lora) == [
            ("shapes", False)
        ]
        assert len(specs) == 13


class TestDocumentation:
    def test_every_field_has_a_row_in_order(self) -> None:
        table = DOCS.read_text().partition("<!-- generated: fields -->")[2].partition("<!-- end -->")[0]
        rows = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
        assert rows == list(FIELDS)


class TestEdges:
    def test_an_output_may_have_seven_folders_and_names_of_200_bytes(self) -> None:
        folders = "a/" * 7
        assert job(id="fox", output=f"{folders}{{id}}.png").output == f"{folders}fox.png"
        assert problem(output=f"a/{folders}{{id}}.png").accepted.endswith("at most 7 folders")
        longest = "x" * 196 + ".png"
        assert job(output=longest).output == longest
        assert "this one has 201 bytes" in problem(output=f"x{longest}").accepted

    def test_sigmas_fall(self) -> None:
        assert job(sigmas=[1, 0.5]).sigmas == [1.0, 0.5]
        assert "smaller than the one before" in problem(sigmas=[1.0, 0.5, 0.5]).accepted

    def test_a_lora_may_be_partial(self) -> None:
        assert FIELDS["lora"].parse([{"name": "style", "partial": True}]) == [
            {"name": "style", "scale": 1.0, "partial": True}
        ]

    def test_an_enlarged_picture_may_be_changed_as_little_as_a_hundredth(self) -> None:
        assert job(upscale=2, upscale_strength=0.01).upscale_strength == 0.01
        assert problem(upscale=2, upscale_strength=0.009).field == "upscale_strength"

    def test_as_many_pixels_as_are_accepted_are(self) -> None:
        assert job(size="2048x2048", frames=1024).frames == 1024
