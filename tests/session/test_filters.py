"""Filters of --keep-if: what becomes of a result, and of a filter that fails."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Recorder, make_job

from gfgen.errors import InputError
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.admission import AdmittedJob, with_attempt
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.manifest import ManifestWriter, read_manifest
from gfgen.runtime.files.ownership import Claims
from gfgen.runtime.ipc.content import content_of
from gfgen.session.filters import Filter, judged, load
from gfgen.session.result import Result

FILTER = """
import os, time
class ById:
    def __call__(self, result):
        assert result.path.read_bytes() == result.files[0]
        match result.job.id:
            case "kept": return True, 0.5
            case "dropped" | "changed": return False
            case "again" | "late": return "again", result.job.seed
            case "raises": raise ValueError("no score")
            case "slow": time.sleep(600)
            case "dies": os.kill(os.getpid(), 9)
by_id = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(FILTER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(logging.getLogger("gfgen"), "propagate", True)
    return tmp_path


def made(folder: Path, job: AdmittedJob) -> JobOutcome:
    """The outcome of a job whose file is there."""
    (folder / job.info.file).write_bytes(job.job_id.encode())
    return JobOutcome(job.info, "done", written=content_of(folder / job.info.file))


def lines(folder: Path) -> dict[str, Any]:
    return read_manifest(folder / "manifest.jsonl")


def claims(folder: Path) -> Claims:
    return Claims(output_dir=folder, job_file="-")


def owned_as_done(folder: Path, job: AdmittedJob) -> bool:
    return job.job_id in claims(folder).done([job])


class Judged:
    """A filter and the manifest of its run."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.kept = folder, Recorder()
        self.manifest = ManifestWriter(folder / "manifest.jsonl")
        about: dict[str, Any] = {"most_again": 3, "limit_s": 60.0, "then": self.kept} | options
        self.filter = Filter("mine:ById", folder, **about)

    def __call__(self, *jobs: AdmittedJob) -> list[AdmittedJob]:
        for outcome in (made(self.folder, job) for job in jobs):
            for observer in (self.manifest, self.filter):
                observer.ended(outcome)
        return self.filter.again()


@pytest.fixture
def judge(folder: Path) -> Iterator[Judged]:
    found = Judged(folder)
    yield found
    found.filter.finish()


def jobs_of(*names: str, **fields: Any) -> list[AdmittedJob]:
    return [make_job(name, seed=7, **fields) for name in names]


def test_results_are_kept_dropped_or_made_again_with_the_next_seed(folder: Path, judge: Judged) -> None:
    jobs = jobs_of("kept", "dropped", "again", "late", "changed")
    jobs[3] = replace(jobs[3], info=replace(jobs[3].info, attempt=4))
    judge.filter.begin(jobs, claims(folder))
    changed = made(folder, jobs[4])
    judge.manifest.ended(changed)
    (folder / "changed.png").write_bytes(b"by hand")
    judge.filter.ended(changed)
    (again,) = judge(*jobs[:4])
    assert sorted(path.name for path in folder.glob("*.png")) == ["changed.png", "kept.png"]
    found = {name: (line["status"], line["file"], line["filter"]) for name, line in lines(folder).items()}
    by = {"by": "mine:ById", "attempt": 1}
    assert found == {
        "kept": ("done", "kept.png", {**by, "decision": "keep", "score": 0.5}),
        "dropped": ("dropped", None, {**by, "decision": "drop"}),
        "changed": ("dropped", None, {**by, "decision": "drop"}),
        "again": ("again", "again.png", {**by, "decision": "again", "score": 7.0}),
        "late": ("dropped", None, {**by, "attempt": 4, "decision": "drop", "score": 7.0}),
    }
    assert judge.kept.end_order == ["kept"]
    assert (again.job_id, again.spec.seed, again.info.attempt) == ("again", 8, 2)
    summary = judge.filter.counted(Summary(num_done=5))
    assert (summary.num_done, summary.num_dropped) == (1, 3)
    (later,) = judge(again)
    assert (later.spec.seed, lines(folder)["again"]["seed"]) == (9, 8)


def test_all_files_of_a_job_with_several_go(folder: Path, judge: Judged) -> None:
    (job,) = jobs_of("dropped")
    judge.filter.begin([job], claims(folder))
    files = [folder / f"dropped-{number}.png" for number in (1, 2)]
    for file in files:
        file.write_bytes(b"dropped")
    content = content_of(files[0])
    named = tuple((file.name, content.size_bytes, content.sha256) for file in files)
    outcome = JobOutcome(job.info, "done", written=content, files=named)
    judge.manifest.ended(outcome)
    judge.filter.ended(outcome)
    assert judge.filter.again() == []
    assert not any(file.exists() for file in files)
    assert "outputs" not in lines(folder)["dropped"]
    assert owned_as_done(folder, job)


def test_what_a_filter_fails_on_stays_and_is_judged_by_the_next_run(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs, judge = jobs_of("raises", "slow", "dies", "kept"), Judged(folder, limit_s=2.0)
    judge.filter.begin(jobs, claims(folder))
    assert judge(*jobs) == []
    assert judge.filter.num_failed == 3
    assert len(list(folder.glob("*.png"))) == 4
    judge.filter.finish()
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [
        "--keep-if failed for job raises, whose result stays: ValueError: no score",
        "--keep-if has not judged 3 results: run the same command again to go on",
    ]
    assert lines(folder)["kept"]["filter"]["decision"] == "keep"

    later = FILTER.replace('raise ValueError("no score")', "return True").replace(
        "time.sleep(600)", "return False"
    )
    (folder / "mine.py").write_text(later)
    owned, judge = claims(folder), Judged(folder)
    owned.done([jobs[0], jobs[1], jobs[3]])
    judge.filter.begin(jobs, owned)
    assert judge.filter.again() == []
    assert [lines(folder)[name]["filter"]["decision"] for name in ("raises", "slow")] == ["keep", "drop"]
    assert judge.filter.counted(Summary(num_skipped=3)) == Summary(num_skipped=2, num_dropped=1)
    assert [(each.job_id, each.status) for each in judge.kept.outcomes] == [("raises", "done")]
    judge.filter.finish()


def test_a_filter_that_hangs_delays_no_end(folder: Path, judge: Judged) -> None:
    jobs = jobs_of("slow")
    judge.filter.begin(jobs, claims(folder))
    outcome = made(folder, jobs[0])
    judge.manifest.ended(outcome)
    judge.filter.ended(outcome)
    judge.filter.finish()
    assert "filter" not in lines(folder)["slow"]


def test_a_later_run_goes_on_with_the_seed_and_skips_what_was_dropped(folder: Path, judge: Judged) -> None:
    jobs = jobs_of("dropped", "again", "kept")
    judge.filter.begin(jobs, claims(folder))
    (again,) = judge(*jobs)
    later, problems = claims(folder).claim(jobs)
    assert not problems
    by_id = {job.job_id: job for job in later}
    assert by_id["again"].info == replace(again.info, job_file="-")
    owned = claims(folder)
    assert owned.done(jobs) == {"dropped", "kept"}
    assert owned.outcome(jobs[0]).error == "a filter has dropped it"
    assert owned.status(by_id["again"]) == ("again", "a filter wants another seed")
    # An attempt that failed keeps its number and its seed.
    judge.manifest.ended(JobOutcome(again.info, "failed", error="why"))
    failed = with_attempt(jobs[1], lines(folder)["again"])
    assert (failed.spec.seed, failed.info.attempt) == (8, 2)
    changed = replace(jobs[1], info=replace(jobs[1].info, spec_hash="another"))
    assert with_attempt(changed, lines(folder)["again"]) is changed


def test_a_forced_run_that_is_stopped_goes_on_with_what_a_filter_wants_again(
    folder: Path, judge: Judged
) -> None:
    jobs = jobs_of("kept", "again")
    (folder / "journal.jsonl").write_text('{"gfgen_journal": 1, "forced_from": 0}\n')
    judge.filter.begin(jobs, claims(folder))
    judge(*jobs)
    owned = replace(claims(folder), force=True)
    assert owned.done(jobs) == {"kept"}
    assert owned.forced_from == 0
    owned.entries["kept"]["status"] = "dropped"
    owned.done_ids.clear()
    assert owned.status(jobs[0]) == ("again", "--force")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("mine", "--keep-if mine: MODULE:FUNCTION or FILE.py:FUNCTION is accepted"),
        ("no_such:good", "--keep-if: cannot import no_such: ModuleNotFoundError"),
        ("no_such.py:good", "--keep-if: cannot import no_such.py: no such file"),
        ("mine:no_such", "--keep-if mine:no_such: mine has no function no_such"),
        ("mine:by_id", "--keep-if mine:by_id: mine has no function by_id"),
        ("broken:Model", "--keep-if broken:Model: OSError: no weights"),
    ],
)
def test_a_filter_that_cannot_be_loaded_is_one_line(folder: Path, named: str, said: str) -> None:
    (folder / "broken.py").write_text("class Model:\n    def __init__(self): raise OSError('no weights')\n")
    with pytest.raises(InputError) as raised:  # noqa: PT012
        Filter(named, folder, most_again=0, limit_s=1.0, then=None)
        load(named)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


def test_a_process_says_why_it_has_no_filter(folder: Path) -> None:
    broken = Filter("no_such:good", folder, most_again=3, limit_s=60.0, then=None)
    with pytest.raises(InputError, match="--keep-if: cannot import no_such"):
        broken.begin([], claims(folder))


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (np.True_, {"decision": "keep"}),
        ((False, np.float32(0.5)), {"decision": "drop", "score": 0.5}),
        (("again", 1), {"decision": "again", "score": 1.0}),
        (
            None,
            {"error": "it returned None; True, False or 'again', alone or with a score in a pair, is"},
        ),
        ((True, float("nan")), {"error": "it returned (True, nan); "}),
        (np.array([True, False]), {"error": "ValueError: "}),
        ((True, "high"), {"error": "TypeError: "}),
        ("keep", {"error": "it returned 'keep'; "}),
    ],
)
def test_decisions(said: object, verdict: dict[str, Any]) -> None:
    result = Result(JobSpec(id="a", prompt="a"), None, None, 0.0, (), ".png")
    found = judged(lambda _: said, result)
    assert found.keys() == verdict.keys()
    assert str(found.get("error", "")).startswith(verdict.pop("error", ""))
    assert json.loads(json.dumps({key: value for key, value in found.items() if key != "error"})) == verdict
