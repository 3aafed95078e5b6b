"""The index beside a manifest: what it spares, and that it never says more than manifest and files do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gfgen.cli import run_files
from gfgen.cli.run_files import RunOptions, admit_jobs
from gfgen.errors import JobFileError
from gfgen.job.reader import JobSource
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.devices import choose_devices
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files.index import INDEX_NAME, ManifestIndex
from gfgen.runtime.files.manifest import MANIFEST_NAME, ManifestWriter
from gfgen.runtime.files.ownership import Claims
from gfgen.runtime.ipc.content import Content
from gfgen.session.ranks import Ranks

LINES = [
    {"id": "fox", "prompt": "a fox", "steps": 4},
    {"id": "owl", "prompt": "an owl", "output": "{id}-{seed}.webp"},
    {"prompt": "a whale"},
    {"prompt": "a whale"},
    {"prompt": "a cat", "seed": -1},
    {"id": "last", "prompt": "the last one"},
]


class Folder:
    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs, self.output, self.steps = path / "jobs.jsonl", path / "out", 3
        self.output.mkdir()
        monkeypatch.setattr(run_files, "LONG_BYTES", 0)

    def admit(self, lines: list[dict[str, Any]]) -> tuple[list[str], Claims]:
        """The ids of the jobs that are to run, and the claims."""
        self.jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = RunOptions(
            output_dir=self.output,
            ranks=Ranks(choose_devices("cpu", 1), has_random_weights=True),
            policy=load_policy("fcfs"),
            model="tiny-qwen-image",
            job_file="jobs.jsonl",
            trace=None,
            logs=SimpleNamespace(log_json=True, quiet=True),  # type: ignore[arg-type]
        )
        source = JobSource(files=(str(self.jobs),), overrides={"steps": self.steps})
        self.found, claims, _ = admit_jobs(source, options.ranks.admission("tiny-qwen-image"), options)
        return [job.job_id for job in self.found if job.job_id not in claims.done_ids], claims

    def finish(self, *ids: str) -> None:
        """What a run leaves of these jobs of the last call."""
        writer = ManifestWriter(self.output / MANIFEST_NAME)
        for job in self.found:
            if job.job_id in ids or not ids:
                (self.output / job.info.file).write_bytes(b"12345")
                writer.ended(JobOutcome(job.info, "done", written=Content(5, None)))
        writer.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


def test_lines_of_finished_jobs_are_not_read_again(folder):
    todo, claims = folder.admit(LINES)
    assert (len(todo), claims.num_known) == (6, 0)
    folder.finish()
    todo, claims = folder.admit(LINES)
    # A random seed depends on the folder, so that every line is looked at; without, all but the second whale.
    assert (todo, claims.num_known) == ([], 0)
    plain = [line for line in LINES if line.get("seed") != -1]
    todo, claims = folder.admit(plain)
    assert (todo, claims.num_known, len(folder.found)) == ([], 4, 1)


def test_what_changes_a_job_or_its_file_makes_it_again(folder):
    plain = LINES[:3]
    folder.admit(plain)
    folder.finish()
    assert folder.admit([{**plain[0], "prompt": "another"}, *plain[1:]])[0] == ["fox"]
    next(folder.output.glob("owl-*")).unlink()
    assert folder.admit(plain)[0] == ["owl"]
    folder.steps = 5
    todo, claims = folder.admit(plain)
    assert (len(todo), claims.num_known) == (3, 0)


def test_a_line_that_was_changed_and_not_made_is_not_done(folder):
    folder.admit(LINES[:1])
    folder.finish()
    changed = [{**LINES[0], "prompt": "another"}]
    assert folder.admit(changed)[0] == ["fox"]
    assert folder.admit(changed)[0] == ["fox"]
    folder.finish()
    assert folder.admit(changed)[1].num_known == 1
    assert folder.admit(LINES[:1])[0] == ["fox"]


def test_names_of_finished_jobs_are_taken(folder):
    plain = LINES[:2]
    folder.admit(plain)
    folder.finish()
    for other in ({"id": "FOX", "prompt": "b"}, {"id": "b", "prompt": "b", "output": "fox.png"}):
        with pytest.raises(JobFileError, match="line 1 already"):
            folder.admit([*plain, other])
    with pytest.raises(JobFileError, match="line 1 already uses it"):
        folder.admit([plain[0], plain[0]])
    (owl,) = (each.name for each in folder.output.glob("owl-*"))
    with pytest.raises(JobFileError, match="line 2 already writes"):
        folder.admit([*plain, {"id": "b", "prompt": "b", "output": owl}])


def test_the_same_prompt_once_more_is_another_job(folder):
    folder.admit([{"prompt": "a whale"}])
    folder.finish()
    todo, claims = folder.admit([{"prompt": "a whale"}, {"prompt": "a whale"}])
    assert (len(todo), claims.num_known) == (1, 1)
    assert todo[0].endswith("-2")


@pytest.mark.parametrize("harm", ["gone", "damaged", "cut", "damaged inside", "of another version"])
def test_an_index_is_made_again(folder, harm):
    folder.admit(LINES[:2])
    folder.finish()
    path = folder.output / INDEX_NAME
    ManifestIndex(folder.output).close()
    content = path.read_bytes()
    match harm:
        case "gone":
            path.unlink()
        case "damaged":
            path.write_bytes(b"nonsense" * 1000)
        case "damaged inside":
            path.write_bytes(content[:4096] + b"\xaa" * (len(content) - 4096))
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case _:
            path.write_bytes(content[:60] + b"\0\0\0\x63" + content[64:])
    todo, claims = folder.admit(LINES[:2])
    assert (todo, claims.num_known) == ([], 0)
    assert folder.admit(LINES[:2])[1].num_known == 2


def test_an_index_follows_its_manifest(folder):
    folder.admit(LINES[:2])
    folder.finish()
    index, path = ManifestIndex(folder.output, is_kept=True), folder.output / MANIFEST_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    assert index.counts() == {"done": 2}
    path.write_bytes(b"".join(lines[1:]) + lines[0][:20])  # a torn line at the end
    index = ManifestIndex(folder.output)
    assert (index.counts(), index.get("fox")) == ({"done": 1}, None)
    path.write_bytes(b"".join(lines[1:]) + lines[0].replace(b'"done"', b'"failed"'))
    index = ManifestIndex(folder.output)
    assert (index.counts(), index.get("fox")["status"]) == ({"done": 1, "failed": 1}, "failed")
    path.unlink()
    assert ManifestIndex(folder.output).counts() == {}


def test_a_refused_file_leaves_no_index(folder):
    with pytest.raises(JobFileError):
        folder.admit([{"prompt": "a", "stpes": 3}])
    assert not list(folder.output.iterdir())


def test_other_kinds_of_files_have_no_known_lines(folder):
    folder.jobs = folder.jobs.with_suffix(".json")
    for _ in range(2):
        todo, claims = folder.admit([list(LINES[:3])])  # type: ignore[list-item]
        assert claims.num_known == 0
        folder.finish()
    assert todo == []
