"""A watched folder: what is taken, when, and what is refused."""

import json
import os
import time
from dataclasses import replace

import pytest
from builders import make_job
from PIL import Image

from gfgen.errors import OutputError, Problem
from gfgen.job.spec import output_name, spec_hash
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.files import inbox as inbox_module
from gfgen.runtime.files.inbox import Inbox
from gfgen.runtime.files.manifest import ManifestWriter
from gfgen.runtime.ipc.content import content_of


def admit(specs):
    """Every job as a picture; one that asks for a tag "no" is refused."""
    jobs, problems = [], []
    for spec in specs:
        if spec.tag == "no":
            problems.append(Problem(spec.line, "tag", "no", "is not for this machine"))
            continue
        job = make_job(spec.id)
        info = replace(job.info, asked=spec, spec=spec, file=output_name(spec, "image"))
        jobs.append(replace(job, info=replace(info, spec_hash=spec_hash(spec))))
    return jobs, problems


class Desk:
    """A watched folder, an output folder, a clock, and the inbox between them."""

    def __init__(self, tmp_path):
        self.folder, self.output_dir = tmp_path / "in", tmp_path / "out"
        self.folder.mkdir()
        self.output_dir.mkdir()
        self.now = time.time() + 10
        self.boxes = []
        self.restart()

    def restart(self, **options):
        for box in self.boxes:
            box.close()
        self.inbox = Inbox(
            self.folder, output_dir=self.output_dir, admit=admit, now=lambda: self.now, **options
        )
        self.boxes = [self.inbox]

    def put(self, name, *jobs):
        path = self.folder / name
        path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
        os.utime(path, (self.now, self.now))
        return path

    def look(self):
        """Ids of the jobs that come in once everything has settled."""
        self.now += 2
        jobs = self.inbox.look()
        self.now += 2
        return [job.job_id for job in (*jobs, *self.inbox.look())]

    def later_look(self):
        self.now += 2
        return self.inbox.look()

    def end(self, job_id, prompt, *, status="done", writes_file=True, job_file=None, **fields):
        """A job of that prompt has ended, and the manifest says so."""
        specs = inbox_module.read_job_stream(
            stream({"id": job_id, "prompt": prompt, **fields}), source="x", folder=self.folder
        ).specs
        ((job,), _) = admit(specs)
        if writes_file and status == "done":
            (self.output_dir / job.info.file).write_bytes(b"12345")
        file = self.output_dir / job.info.file
        written = content_of(file) if file.exists() and status == "done" else None
        info = replace(job.info, job_file=job_file)
        outcome = JobOutcome(info, status, 0.0, 0.0, 1.0, None, 1.0, (), written=written)
        manifest = ManifestWriter(self.output_dir / "manifest.jsonl")
        manifest.ended(outcome)
        manifest.close()
        self.inbox.ended(outcome)
        return job.info.file


def stream(job):
    return inbox_module.io.BytesIO(json.dumps(job).encode())


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path)
    yield desk
    desk.inbox.close()


FOX = {"id": "fox", "prompt": "a fox"}
OWL = {"id": "owl", "prompt": "an owl"}


def test_a_file_is_taken_once(desk):
    desk.put("a.jsonl", FOX, OWL)
    assert desk.look() == ["fox", "owl"]
    os.utime(desk.folder / "a.jsonl")
    assert desk.look() == []


def test_only_job_files_are_looked_at(desk):
    for name in ("a.png", ".a.jsonl", "a.jsonl.tmp", "a.jsonl.errors.txt"):
        desk.put(name, FOX)
    (desk.folder / "folder.jsonl").mkdir()
    assert desk.look() == []


def test_a_file_that_is_being_written_is_left_until_it_rests_for_a_second(desk):
    path = desk.put("a.jsonl", FOX)
    assert desk.inbox.look() == []
    desk.now += 0.9
    assert desk.inbox.look() == []
    with path.open("a") as file:
        file.write(json.dumps(OWL))
    desk.now += 0.9
    assert desk.inbox.look() == []
    desk.now += 1.0
    assert [job.job_id for job in desk.inbox.look()] == ["fox", "owl"]


def test_an_old_file_that_is_moved_in_is_taken_at_once(desk, caplog):
    caplog.set_level("INFO", "gfgen")
    desk.put("a.jsonl", FOX)
    desk.now += 5
    assert [job.job_id for job in desk.inbox.look()] == ["fox"]
    assert "took a.jsonl: 1 job, 1 to do" in caplog.messages


def test_files_are_taken_in_the_order_of_their_age(desk):
    desk.put("b.jsonl", FOX)
    desk.now += 1
    desk.put("a.jsonl", OWL)
    assert desk.look() == ["fox", "owl"]


def test_all_problems_of_a_file_are_reported_beside_it_and_nothing_of_it_runs(desk, caplog):
    desk.put("a.jsonl", {"id": "fox", "promt": "a fox"}, OWL, {"id": "cat", "prompt": "a cat", "tag": "no"})
    assert desk.look() == []
    report = (desk.folder / "a.jsonl.errors.txt").read_text().splitlines()
    assert report[0] == "a.jsonl: 2 problems; no job was started"
    assert "line 1: promt: not a field; did you mean prompt?" in report
    assert report[-1] == "line 3: tag = no: is not for this machine"
    assert all(line in caplog.text for line in report)


def test_lines_under_another_name_are_taken_and_other_kinds_of_files_are_refused_with_a_reason(desk):
    desk.put("a.ndjson", FOX)
    desk.put("b.yaml").write_text("- prompt: an owl\n")
    desk.put("c.csv.gz").write_bytes(b"\x1f\x8b rest\n")
    assert desk.look() == ["fox"]
    assert "not JSON" in (desk.folder / "b.yaml.errors.txt").read_text()
    assert "the file is compressed" in (desk.folder / "c.csv.gz.errors.txt").read_text()


def test_a_log_has_the_first_problems_of_a_file_and_its_report_has_all(desk, caplog):
    desk.put("a.jsonl", *({"prompt": "a fox", "qqq": 1} for _ in range(30)))
    assert desk.look() == []
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "a.jsonl: 30 problems; no job was started"
    assert told[-2] == "a.jsonl: and 10 more problems"
    assert told[-1].startswith("a.jsonl: the fields of a job are id, prompt, ")
    assert len(told) == 1 + 20 + 2
    assert len((desk.folder / "a.jsonl.errors.txt").read_text().splitlines()) == 1 + 30 + 1


def test_a_mended_file_is_taken_and_its_report_goes_away(desk):
    desk.put("a.jsonl", {"id": "fox"})
    assert desk.look() == []
    desk.put("a.jsonl", FOX)
    assert desk.look() == ["fox"]
    assert os.listdir(desk.folder) == ["a.jsonl"]


def test_a_refused_file_that_is_touched_is_judged_again(desk):
    desk.put("a.jsonl", FOX | {"image": "later.png"})
    assert desk.look() == []
    from PIL import Image

    Image.new("RGB", (8, 8)).save(desk.folder / "later.png")
    os.utime(desk.folder / "a.jsonl", (desk.now, desk.now))
    assert desk.look() == ["fox"]


def test_valid_jobs_of_a_faulty_file_run_when_asked_to(desk):
    desk.restart(skip_invalid=True)
    desk.put("a.jsonl", {"id": "fox"}, OWL)
    assert desk.look() == ["owl"]
    assert "the other jobs were started" in (desk.folder / "a.jsonl.errors.txt").read_text()


def test_the_same_job_in_another_file_is_not_run_again(desk):
    desk.put("a.jsonl", FOX)
    assert desk.look() == ["fox"]
    desk.put("b.jsonl", FOX, OWL)
    assert desk.look() == ["owl"]
    desk.end("fox", "a fox")
    desk.put("c.jsonl", FOX)
    assert desk.look() == []


def test_a_failed_job_is_tried_again_when_it_comes_again(desk):
    desk.put("a.jsonl", FOX)
    desk.look()
    desk.end("fox", "a fox", status="failed")
    desk.put("b.jsonl", FOX)
    assert desk.look() == ["fox"]


def test_another_job_under_the_id_of_another_file_is_refused(desk):
    desk.put("a.jsonl", FOX)
    desk.look()
    desk.end("fox", "a fox")
    desk.put("b.jsonl", {"id": "FOX", "prompt": "a red fox"}, OWL)
    assert desk.look() == []
    assert "a.jsonl has another job with this id" in (desk.folder / "b.jsonl.errors.txt").read_text()


def test_two_files_cannot_write_the_same_output(desk):
    desk.put("a.jsonl", FOX | {"output": "cover.png"})
    desk.look()
    desk.put("b.jsonl", OWL | {"output": "Cover.png"})
    assert desk.look() == []
    assert "a.jsonl already writes this file" in (desk.folder / "b.jsonl.errors.txt").read_text()


def test_an_edited_file_runs_what_changed_once_the_old_job_has_ended(desk):
    desk.put("a.jsonl", FOX, OWL)
    desk.look()
    desk.put("a.jsonl", FOX | {"prompt": "a red fox"}, OWL)
    assert desk.look() == []
    assert "is still running in its previous form" in (desk.folder / "a.jsonl.errors.txt").read_text()
    desk.end("fox", "a fox")
    os.utime(desk.folder / "a.jsonl", (desk.now, desk.now))
    assert desk.look() == ["fox"]


def test_after_a_restart_only_unfinished_jobs_go_on(desk):
    desk.put("a.jsonl", FOX, OWL, {"id": "cat", "prompt": "a cat"})
    desk.look()
    desk.end("fox", "a fox")
    desk.end("cat", "a cat", status="failed")
    desk.restart()
    assert desk.look() == ["owl"]
    assert len((desk.output_dir / "watched.jsonl").read_text().splitlines()) == 1


def test_after_a_restart_outputs_that_were_moved_away_are_not_made_again(desk):
    desk.put("a.jsonl", FOX)
    desk.look()
    (desk.output_dir / desk.end("fox", "a fox")).unlink()
    desk.restart()
    assert desk.look() == []


def test_a_new_file_makes_a_lost_output_again(desk):
    desk.put("a.jsonl", FOX)
    desk.look()
    (desk.output_dir / desk.end("fox", "a fox")).unlink()
    (desk.folder / "a.jsonl").unlink()
    desk.restart()
    desk.put("again.jsonl", FOX)
    assert desk.look() == ["fox"]


def test_after_a_restart_the_first_file_still_owns_its_ids(desk):
    desk.put("b.jsonl", FOX)
    desk.look()
    desk.put("a.jsonl", FOX | {"prompt": "a red fox"})
    os.utime(desk.folder / "a.jsonl", (1, 1))
    desk.restart()
    assert desk.look() == ["fox"]
    assert "b.jsonl has another job with this id" in (desk.folder / "a.jsonl.errors.txt").read_text()


def test_a_torn_record_counts_its_file_as_new(desk, caplog):
    desk.put("a.jsonl", FOX)
    desk.look()
    record = desk.output_dir / "watched.jsonl"
    desk.inbox.close()
    record.write_bytes(record.read_bytes()[:-20])
    desk.boxes = []
    desk.restart()
    assert "line 1 is damaged, so its file counts as new" in caplog.text
    assert desk.look() == ["fox"]


def test_a_folder_that_goes_away_is_told_once_and_looked_for(desk, caplog):
    desk.folder.rename(desk.folder.with_name("away"))
    assert desk.look() == []
    assert caplog.text.count("waiting until the folder is back") == 1
    desk.folder.with_name("away").rename(desk.folder)
    desk.put("a.jsonl", FOX)
    assert desk.look() == ["fox"]


def test_a_link_that_leads_nowhere_is_told_once_and_keeps_no_other_file_from_being_taken(desk, caplog):
    desk.put("a.jsonl", FOX)
    (desk.folder / "loop.jsonl").symlink_to("loop.jsonl")
    (desk.folder / "gone.jsonl").symlink_to("there.jsonl")
    assert desk.look() == ["fox"]
    assert desk.look() == []
    assert caplog.text.count("loop.jsonl cannot be read (Too many levels of symbolic links)") == 1
    assert caplog.text.count("gone.jsonl cannot be read (No such file or directory)") == 1
    desk.put("there.jsonl", OWL).rename(desk.folder.with_name("there.jsonl"))
    (desk.folder / "gone.jsonl").unlink()
    (desk.folder / "gone.jsonl").symlink_to("../there.jsonl")
    assert desk.look() == ["owl"]


def test_a_file_that_is_taken_away_while_it_is_looked_at_is_none(desk, caplog, monkeypatch):
    desk.put("a.jsonl", {"id": "bad"})
    desk.look()
    caplog.clear()
    desk.put("b.jsonl", OWL)
    look_at = Inbox._stat_of

    def too_late(inbox, entry):
        (desk.folder / "b.jsonl").unlink(missing_ok=True)
        return look_at(inbox, entry)

    monkeypatch.setattr(Inbox, "_stat_of", too_late)
    assert desk.look() == []
    assert caplog.text == ""


def test_what_goes_wrong_with_one_file_is_a_problem_of_that_file(desk, caplog):
    """A fault of ours in a file ended the run, and the jobs at work with it."""

    def admit_all_but_foxes(specs):
        if specs[0].id == "fox":
            raise RuntimeError("Could not determine home directory.")
        return admit(specs)

    desk.inbox.admit = admit_all_but_foxes
    desk.put("a.jsonl", FOX)
    desk.put("b.jsonl", OWL)
    assert desk.look() == ["owl"]
    assert "a.jsonl: RuntimeError: Could not determine home directory." in caplog.text
    assert "RuntimeError" in (desk.folder / "a.jsonl.errors.txt").read_text()


def test_a_file_that_cannot_be_read_now_is_tried_again_and_told_once(desk, caplog, monkeypatch):
    path, read = desk.put("a.jsonl", FOX), inbox_module._read

    def deny(asked):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(inbox_module, "_read", deny)
    assert desk.look() == desk.look() == []
    assert caplog.text.count("cannot be read (Permission denied)") == 1
    monkeypatch.setattr(inbox_module, "_read", read)
    assert desk.look() == ["fox"]
    assert desk.look() == []
    assert path.exists()


def test_a_restart_reads_the_manifest_once_however_many_files_there_are(desk, monkeypatch):
    for idx in range(20):
        desk.put(f"{idx}.jsonl", {"id": f"job-{idx}", "prompt": "x"})
    assert len(desk.look()) == 20
    for idx in range(20):
        desk.end(f"job-{idx}", "x")
    desk.restart()
    lines, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda line: lines.append(line) or loads(line))
    assert desk.look() == []
    assert len(list(filter(None, lines))) == 20


def test_what_the_thread_finds_reaches_the_control_loop(desk, monkeypatch):
    monkeypatch.setattr(inbox_module, "LOOK_S", 0.001)
    desk.put("a.jsonl", FOX)
    desk.now += 2
    desk.inbox.start(admit=admit)
    assert wait_for(desk.inbox.take)[0].job_id == "fox"


def test_a_full_disk_under_the_record_ends_the_run(desk, monkeypatch):
    monkeypatch.setattr(inbox_module, "LOOK_S", 0.001)
    (desk.output_dir / "watched.jsonl").unlink()
    desk.put("a.jsonl", FOX)
    desk.now += 2
    desk.inbox.start(admit=admit)
    with pytest.raises(OutputError, match=r"watched\.jsonl was removed"):
        wait_for(desk.inbox.take)


def wait_for(take):
    deadline = time.monotonic() + 30
    while not (jobs := take()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return jobs


def test_a_file_that_gfgen_did_not_make_is_a_problem_of_its_job(desk):
    (desk.output_dir / "fox.png").write_bytes(b"mine")
    path = desk.put("a.jsonl", FOX, OWL)
    assert desk.look() == []
    report = path.with_name("a.jsonl.errors.txt").read_text()
    assert "line 1: " in report
    assert "manifest.jsonl there does not say that gfgen made it" in report
    desk.restart(overwrite=True)
    assert desk.look() == ["fox", "owl"]


def test_a_new_edition_replaces_its_own_files_and_another_file_does_not(desk):
    desk.put("a.jsonl", FOX)
    (job,) = desk.later_look()
    assert (job.info.job_file, job.replaces) == ("../in/a.jsonl", None)
    desk.end(FOX["id"], FOX["prompt"], job_file=job.info.job_file)
    desk.put("a.jsonl", FOX | {"prompt": "an old fox"})
    desk.inbox.look()
    (job,) = desk.later_look()
    assert job.replaces == content_of(desk.output_dir / "fox.png")
    desk.restart()
    (desk.folder / "a.jsonl").unlink()
    path = desk.put("b.jsonl", FOX | {"prompt": "a third fox"})
    assert desk.look() == []
    assert "in/a.jsonl made it" in path.with_name("b.jsonl.errors.txt").read_text()


def test_no_output_replaces_the_image_of_a_job_of_another_file(desk):
    desk.put("a.jsonl", FOX)
    assert desk.look() == ["fox"]
    picture = desk.output_dir / "fox.png"
    Image.new("RGB", (8, 8)).save(picture)
    desk.end(FOX["id"], FOX["prompt"], writes_file=False)
    desk.put("b.jsonl", OWL | {"image": str(picture)})
    assert desk.look() == ["owl"]
    path = desk.put("a.jsonl", FOX | {"prompt": "an old fox"})
    assert desk.look() == []
    assert "is the image of a job at work, too" in path.with_name("a.jsonl.errors.txt").read_text()


# A last line without an end ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cut", "rest"),
    [
        ("a.jsonl", json.dumps(FOX) + "\n" + '{"id": "owl", "pro', 'mpt": "an owl"}'),
        ("a.csv", "id,prompt,steps\nfox,a fox,4\nowl,an o", "wl,4\n"),
        ("a.csv", "id,prompt,steps\nfox,a fox,4\nowl,an owl,2", "0\n"),
        ("a.json", '[{"id": "fox", "prompt": "a fox"}, {"id": "owl"', ', "prompt": "an owl"}]'),
    ],
)
def test_a_file_whose_last_line_is_unfinished_waits(desk, name, cut, rest):
    path = desk.put(name)
    path.write_text(cut)
    assert desk.look() == []
    assert os.listdir(desk.folder) == [name], "it is no problem yet"
    path.write_text(cut + rest)
    assert desk.look() == ["fox", "owl"]


@pytest.mark.parametrize("text", [json.dumps(FOX), json.dumps([FOX])])
def test_whole_json_needs_no_line_end(desk, text):
    desk.put("a.json").write_text(text)
    assert desk.look() == ["fox"]


def test_a_line_that_never_ends_counts_after_a_while(desk, caplog):
    caplog.set_level("INFO")
    desk.put("a.csv").write_text("id,prompt\nfox,a fox")
    assert desk.look() == []
    assert desk.look() == []
    assert "a.csv: its last line has no end yet; waiting for it, at most 30 s" in caplog.text
    desk.now += inbox_module.UNFINISHED_S
    assert desk.look() == ["fox"]
    assert caplog.text.count("waiting for it") == 1


def test_entries_that_are_no_files_are_named_once(desk, caplog):
    os.mkfifo(desk.folder / "pipe.jsonl")
    (desk.folder / "folder.jsonl").mkdir()
    desk.put("a.jsonl", {"id": "fox", "prompt": "a fox"})
    assert desk.look() == ["fox"]
    told = [each.getMessage() for each in caplog.records if "no regular file" in each.getMessage()]
    assert len(told) == 2
    assert all(f"{name}.jsonl cannot be read" in " ".join(told) for name in ("pipe", "folder"))
