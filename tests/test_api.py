"""gfgen from Python, as docs/python.md shows it."""

import asyncio
import enum
import inspect
import io
import json
import logging
import os
import pickle
import pydoc
import queue
import re
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image
from process_tree import descendants_of

import gfgen
from gfgen import api, errors
from gfgen.cli.main import main
from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.policies.catalog import policy_of
from gfgen.session import feed, hosted
from gfgen.snapshot import Decision, Snapshot

ROOT = Path(__file__).parent.parent
HERE: dict[str, Any] = {"device": "cpu", "ranks": 1}
SMALL: dict[str, Any] = {"size": "64x64", "frames": 1, "steps": 2}


@pytest.fixture(scope="module")
def session() -> Iterator[gfgen.Session]:
    with gfgen.Session(**HERE) as found:
        yield found


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which sessions make theirs."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def python(*arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Results ----------------------------------------------------------------------------------------


def test_results_have_the_bytes_that_gfgen_run_writes_and_nothing_is_left(
    tmp_path: Path, temporary: Path
) -> None:
    lines = [{"prompt": "a red circle"}, {"prompt": "a square", "frames": 5}]
    file, out = tmp_path / "jobs.jsonl", tmp_path / "out"
    file.write_text("\n".join(json.dumps({**SMALL, **line}) for line in lines))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "-o", str(out), "--device", "cpu", "--ranks", "1", "-q"])
    assert not ended.value.code
    written = {path.read_bytes() for path in out.iterdir() if path.suffix in (".png", ".mp4")}
    assert len(written) == 2

    results = list(gfgen.generate([*lines, {"prompt": "late", "timeout": 0.001}], **HERE, **SMALL))
    found = {result.job.prompt: result for result in results}
    late = found.pop("late")
    assert {result.files[0] for result in found.values()} == written
    assert {name: result.frames.shape for name, result in found.items()} == {
        "a red circle": (1, 64, 64, 3),
        "a square": (5, 64, 64, 3),
    }
    for result in found.values():
        assert np.array_equal(np.asarray(result.image), result.frames[0])
        assert (result.path, result.error, result.seconds > 0) == (None, None, True)
    assert late.error is not None
    assert late.error in late._repr_html_()
    with pytest.raises(errors.RunError, match=re.escape(f"job {late.job.id}: {late.error}")):
        _ = late.image
    assert list(temporary.iterdir()) == []

    again = list(gfgen.generate(file, output_dir=out, **HERE))
    assert {result.path.read_bytes() for result in again if result.path} == written
    assert [result.seconds for result in again] == [0.0, 0.0], "the command has made them"


def test_a_loop_that_is_left_leaves_no_process_and_no_file(temporary: Path) -> None:
    before = descendants_of(os.getpid())
    for _ in gfgen.generate(["first", {"prompt": "long", "frames": 17, "steps": 50}], **HERE, **SMALL):
        assert len(descendants_of(os.getpid())) > len(before)
        break
    assert set(descendants_of(os.getpid())) <= set(before)
    assert list(temporary.iterdir()) == []


def test_bad_jobs_raise_all_problems_with_the_text_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "a fox", "stpes": 4}\n{"frames": 3}\n')
    with pytest.raises(errors.JobFileError) as raised:
        next(gfgen.generate(file, **HERE))
    assert [problem.line for problem in raised.value.problems] == [1, 2]
    assert (
        f"{file}: 2 problems; nothing was started\n  line 1: stpes: not a field; did you mean steps?"
        in str(raised.value)
    )


@pytest.mark.parametrize(
    ("jobs", "defaults", "said"),
    [
        ("a red fox", {}, "job file a red fox: no such file; a prompt goes into a list: ['a red fox']"),
        (["a"], {"stpes": 4}, "defaults.stpes: not a field; did you mean steps?"),
        (["a"], {"policy": lambda: None}, "cannot be called with a snapshot alone"),
        ([{"prompt": "a", "args": {"x": threading.Lock()}}], {}, "this cannot go to another process"),
        (["a"], {"model": "qwen-imge"}, "qwen-image"),
        (["a"], {"vae_dtype": "fp64"}, "vae_dtype = 'fp64': 'fp64' is not one of"),
        ([{1: "a", "prompt": "b"}], {}, "1 is a name of a field or argument; give a text"),
        ([{"prompt": "b", "args": {1: 2}}], {}, "args: 1 is a name of a field or argument; give a text"),
        (["a"], {"model": []}, "model = []: a name, a path or a list of these is accepted"),
        (["a"], {"ranks": 1.5}, "ranks = 1.5: a whole number is accepted"),
        (["a"], {"columns": {"prompt": "caption"}}, "columns: they are those of a job file in Parquet"),
        (5, {}, "jobs = 5: a list of prompts or dictionaries, or a path, is accepted"),
    ],
)
def test_what_is_wrong_is_an_error_that_says_what_to_do(jobs: Any, defaults: Any, said: str) -> None:
    with pytest.raises(errors.InputError) as raised:
        next(gfgen.generate(jobs, device="cpu", **defaults))
    assert said in str(raised.value)


def test_a_store_is_refused_as_output() -> None:
    with pytest.raises(errors.InputError, match="output_dir: a folder is accepted; 'gfgen run -o s3://"):
        next(gfgen.generate(["a"], output_dir="s3://bucket/run"))


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(errors.InputError, match="devise: not an option; did you mean device"):
        gfgen.Session(devise="cpu").__enter__()
    with pytest.raises(errors.InputError, match=r"ranks = '0': .*give 1 to"):
        gfgen.plan(["a"], ranks=0)
    with pytest.raises(errors.InputError, match="inside of 'with'"):
        gfgen.Session().submit(prompt="a")


def test_errors_name_arguments_in_place_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "--gpus 9: none; raise --ranks-per-gpu or --output, not --until, at 3--4"
    monkeypatch.setattr(api, "Process", DeadProcess(feed.Gone(errors.InputError(said))))
    with pytest.raises(errors.InputError) as raised:
        next(gfgen.generate(["a"]))
    assert str(raised.value) == "gpus 9: none; raise ranks_per_gpu or output_dir, not --until, at 3--4"
    for call in (gfgen.check, gfgen.plan):
        with pytest.raises(errors.PolicyError, match=r"^policy strf: unknown; did you mean srtf"):
            call(["a"], policy="strf")


def test_the_folder_of_a_killed_program_is_removed_by_the_next_one(temporary: Path) -> None:
    code = "import os; from gfgen import api; made = api._temporary_folder(); next(made.gen); "
    code += "os.kill(os.getpid(), 9)"
    env = {**os.environ, "TMPDIR": str(temporary)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == -9
    (left,) = temporary.iterdir()
    (left / "a.png").write_bytes(b"of the killed one")
    home = temporary / "gfgen-home-7"
    home.mkdir()
    with api._temporary_folder() as first, api._temporary_folder() as second:
        assert set(temporary.iterdir()) == {home, first, second}


def test_every_error_passes_between_processes() -> None:
    problem = errors.Problem(3, "steps", "0", "1 at least")
    for error in (
        errors.JobFileError("jobs.jsonl", (problem,)),
        errors.JobError(problem),
        errors.InterruptedRunError("stopped", signal_number=15),
        errors.ModelError("no such model"),
    ):
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def result_of(suffix: str, *contents: bytes, error: str | None = None) -> gfgen.Result:
    return api.Result(JobSpec(id="<fox>", prompt="a & b"), None, error, 1.0, contents, suffix)


def test_notebooks_show_pictures_and_videos() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, format="PNG")
    shown = result_of(".png", stream.getvalue(), stream.getvalue())._repr_html_()
    assert shown.count('<img src="data:image/png;base64,') == 2
    assert "<b>&lt;fox&gt;</b> a &amp; b" in shown
    video = result_of(".mp4", (ROOT / "tests/movie.mp4").read_bytes())
    assert '<video controls loop src="data:video/mp4;base64,' in video._repr_html_()
    assert video.image.size == video.frames.shape[2:0:-1]


# Sessions ---------------------------------------------------------------------------------------


def test_a_session_gives_futures_and_progress(session: gfgen.Session) -> None:
    seen: list[Any] = []
    first = session.submit(prompt="a fox", **{**SMALL, "steps": np.int64(2)}, callback=seen.append)
    again = session.submit(prompt="a fox", **SMALL)
    assert first.result().image.size == (64, 64)
    assert [(each.stage, each.step, each.steps) for each in seen] == [
        ("encode", 0, 2),
        ("prepare", 0, 2),
        ("denoise", 1, 2),
        ("denoise", 2, 2),
        ("decode", 2, 2),
    ]
    assert again.result().job.id == f"{first.result().job.id}-2"


def test_futures_raise_for_bad_and_failed_jobs(session: gfgen.Session) -> None:
    with pytest.raises(errors.JobFileError, match="stpes: not a field; did you mean steps"):
        session.submit(prompt="a", stpes=4).result()
    with pytest.raises(errors.JobFileError, match=r"gfgen.Session\(model="):
        session.submit(prompt="a", model="tiny-wan").result()
    with pytest.raises(errors.InputError, match="stand for several jobs"):
        session.submit(prompt="a", num_images=2).result()
    with pytest.raises(errors.InputError, match="steps = "):
        session.submit(prompt="a", steps=np.zeros(2)).result()
    with pytest.raises(errors.RunError, match="job late: "):
        session.submit(id="late", prompt="a", timeout=0.001, **SMALL).result()
    with pytest.raises(errors.InputError, match="this cannot go to another process"):
        session.submit(prompt="a", args={"x": threading.Lock()})


def test_a_job_that_runs_can_be_cancelled_and_frees_its_id(session: gfgen.Session) -> None:
    began: queue.SimpleQueue[Any] = queue.SimpleQueue()
    long = session.submit(id="long", prompt="a", size="64x64", frames=17, steps=100, callback=began.put)
    began.get()
    with pytest.raises(errors.InputError, match="id = long: an open job has it"):
        session.submit(id="long", prompt="a").result()
    assert long.cancel()
    with pytest.raises(CancelledError):
        long.result()
    assert session.submit(prompt="next", **SMALL).result().error is None


def test_asyncio_waits_for_jobs_and_cancels_them(session: gfgen.Session) -> None:
    async def wait() -> tuple[int, int]:
        done = asyncio.wrap_future(session.submit(prompt="awaited", **SMALL))
        other = session.submit(prompt="unwanted", size="64x64", frames=17, steps=100)
        unwanted = asyncio.wrap_future(other)
        size: tuple[int, int] = (await done).image.size
        unwanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unwanted
        await asyncio.sleep(0)
        assert other.cancelled()
        return size

    assert asyncio.run(wait()) == (64, 64)


def test_a_callback_may_block_and_wait_for_other_jobs(session: gfgen.Session) -> None:
    goes_on, inner = threading.Event(), list[gfgen.Result]()

    def wait(_: object) -> None:
        if not inner:
            assert goes_on.wait(60)
            inner.append(session.submit(prompt="inner", **SMALL, callback=lambda _: None).result(60))

    outer = session.submit(prompt="outer", **SMALL, callback=wait)
    for prompt in ("while it waits", "another one"):
        assert session.submit(prompt=prompt, **SMALL).result(60).error is None
    assert not outer.done()
    goes_on.set()
    assert outer.result(60).error is None
    assert inner[0].job.prompt == "inner"


class Size(int):
    """No other process has such a class."""


class Kind(enum.StrEnum):
    WAVES = "waves"


def test_values_of_classes_of_the_program_arrive_as_plain_ones(
    session: gfgen.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {**SMALL, "steps": Size(1), "prompt": Kind.WAVES}
    job = session.submit(**fields).result(60).job
    assert (job.steps, job.prompt) == (1, "waves")
    dead = DeadProcess(feed.Gone(None))
    monkeypatch.setattr(api, "Process", dead)
    fields |= {"args": {"x": (Size(3), np.float32(0.5), None, True)}, "image": Path("a.png")}
    assert list(gfgen.generate(["a", fields], model=Kind.WAVES, priority=Size(2))) == []
    jobs, models = dead.setup.jobs, dead.setup.models
    sent = pickle.dumps((jobs, models))
    assert not any(name in sent for name in (b"Size", b"Kind", b"numpy"))
    assert (jobs.given[1], jobs.fallbacks) == ({**fields, "image": "a.png"}, {"priority": 2})
    assert models == ("waves",)
    unknown: list[Any] = [[{"prompt": "a", "args": {"x": Idle()}}], ["a", Idle()]]
    for given in unknown:
        with pytest.raises(errors.InputError, match="this cannot go to another process; give a text"):
            next(gfgen.generate(given))


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_callback_that_raises_is_logged_and_its_job_goes_on(
    session: gfgen.Session, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    def fail(_: object) -> None:
        raise error

    with caplog.at_level(logging.ERROR, "gfgen"):
        assert session.submit(prompt="a fox", **SMALL, callback=fail).result().error is None
    assert "the callback of job a-fox-" in caplog.text


def test_a_second_job_with_an_id_is_not_told_of_options_and_an_error_in_a_session_stops_its_jobs(
    temporary: Path,
) -> None:
    futures = []

    def fail() -> None:
        with gfgen.Session(**HERE, output_dir=temporary / "out") as session:
            made = session.submit(id="y", prompt="a", **SMALL).result(60)
            again = session.submit(id="y", prompt="a", **SMALL).result(60)
            assert (again.files, again.seconds, made.seconds > 0) == (made.files, 0.0, True), "it is done"
            with pytest.raises(errors.JobFileError) as raised:
                session.submit(id="y", prompt="b", **SMALL).result(60)
            said = "y.png: is there already: job y of a program made it; move it away, or name another output"
            assert str(raised.value).endswith(said)
            futures.append(session.submit(prompt="a", size="64x64", frames=17, steps=100))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert futures[0].cancelled()
    assert not list(temporary.glob("**/*.mp4"))


class DeadProcess:
    """A process that ends as it is told; `says` are its messages until then."""

    def __init__(self, *says: Any) -> None:
        self.says = says
        self.sent: list[Any] = []

    def __call__(self, module: str, setup: Any, heard: Any) -> "DeadProcess":
        self.heard, self.setup = heard, setup
        for message in self.says:
            heard(message)
        return self

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


def test_a_session_whose_process_dies_fails_its_jobs_and_takes_no_more(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    dead, gone = DeadProcess(hosted.Ready()), feed.Gone(errors.WorkerError("its process was killed"))
    monkeypatch.setattr(api, "Process", dead)
    with gfgen.Session() as session:
        first, second = session.submit(prompt="a"), session.submit(prompt="b")
        second.cancel()
        assert dead.sent[-1] == feed.Cancel(2)
        dead.heard(gone)
        for future in (first, session.submit(prompt="c")):
            with pytest.raises(errors.WorkerError, match="its process was killed"):
                future.result()
    monkeypatch.setattr(api, "Process", DeadProcess(gone))
    with pytest.raises(errors.WorkerError, match="its process was killed"):
        gfgen.Session().__enter__()
    assert list(temporary.iterdir()) == []


def test_the_end_of_a_process_is_heard() -> None:
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    process = feed.Process("gfgen.no_such_module", "setup", heard.put)
    assert str(heard.get(timeout=60).error) == "its process ended with exit code 1"
    process.send("no effect")
    process.close()


class Unreadable:
    """Its pickle raises where it is read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Wired(feed.Feed):
    def got(self, message: Any, now_s: float) -> Any:
        raise AssertionError(message)


def test_a_message_that_cannot_be_read_ends_the_run_of_the_process() -> None:
    end, theirs = Pipe()
    wired = Wired(theirs)
    end.send(Unreadable())
    assert select.select([wired], [], [], 60)[0]
    with pytest.raises(errors.RunError, match="a message cannot be read: ValueError: invalid literal"):
        wired.take_events(0.0)
    end.close()


@pytest.mark.parametrize("message", [Unreadable(), "a job"])
def test_a_message_that_cannot_be_heard_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, message: object
) -> None:
    connect = "import sys; from multiprocessing.connection import Connection as C; c = C(int(sys.argv[1])); "
    code = f"{connect} c.recv(); c.send_bytes({pickle.dumps(message)!r}); c.recv()"
    monkeypatch.setattr(feed, "module_command", lambda _, fd: (sys.executable, "-c", code, fd))
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def hear(message: Any) -> None:
        if not isinstance(message, feed.Gone):
            raise ValueError("invalid literal")
        heard.put(message)

    process = feed.Process("module", "setup", hear)
    assert "failed: ValueError: invalid literal" in str(heard.get(timeout=60).error)
    process.close()
    assert heard.empty()


# Programs ---------------------------------------------------------------------------------------

PROGRAM = """
import sys
import gfgen
from gfgen.layout import Layout
from gfgen.snapshot import Decision

class Last:
    "The last job first."
    def __call__(self, snapshot):
        jobs = reversed(list(snapshot.open.values()))
        return [Decision(job.next_task, Layout.single(rank)) for job, rank in zip(jobs, snapshot.free_ranks)]

here = dict(device="cpu", ranks=1)
results = gfgen.generate(["first", "last"], policy=Last, **here, size="64x64", frames=1, steps=1)
print(*[result.job.prompt for result in results], "torch" in sys.modules)
"""


def test_a_program_needs_no_guard_and_brings_its_own_policy(tmp_path: Path) -> None:
    """A notebook, whose __main__ has no file, is tried below."""
    (tmp_path / "program.py").write_text(PROGRAM)
    assert python("program.py", cwd=tmp_path) == "last first False\n"


def test_import_is_light_and_help_fits_on_two_screens() -> None:
    found = python("-c", "import sys, gfgen; print(len(sys.modules), 'numpy' in sys.modules, dir(gfgen))")
    assert "False" in found
    assert all(name in found for name in gfgen.__all__)
    text = pydoc.plain(pydoc.render_doc(gfgen))
    screen = 55 if sys.version_info < (3, 13) else 70  # which writes an argument a line
    assert len(text.splitlines()) <= 2 * screen, text


class Idle:
    def __call__(self, snapshot: Snapshot) -> list[Decision]:
        return [Decision(job.next_task, Layout.single(0)) for job in snapshot.open.values()]


@pytest.mark.parametrize("given", [Idle, Idle(), Idle().__call__])
def test_a_policy_is_a_class_an_instance_or_a_function(given: Any) -> None:
    assert policy_of(given).decide is not given or not inspect.isclass(given)
    assert policy_of("fcfs").is_built_in
    with pytest.raises(errors.PolicyError, match="a function, or a class with __call__"):
        policy_of(3)


# Reports and documents --------------------------------------------------------------------------


def test_check_and_plan_give_what_the_commands_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text('{"prompt": "a fox", "frames": 1}\n{"prompt": "a fox", "stpes": 1}\n')
    report = gfgen.check(file, **HERE, output_dir=tmp_path / "out")
    with pytest.raises(SystemExit):
        main(["check", str(file), "--device", "cpu", "--ranks", "1", "-o", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert str(report).splitlines()[:3] == printed.splitlines()[:3]
    assert [problem.field for problem in report.found.problems] == ["stpes"]
    assert report.as_json()["jobs"] == 1
    found = gfgen.plan([{"prompt": "a fox", "model": "shapes"}], ranks=[1, 2], by="8h")
    assert "1 rank is enough" in str(found)
    output = gfgen.check(["a fox"], **HERE).as_json()["output"]
    assert output != gfgen.check(["a fox"], **HERE).as_json()["output"], "nobody else can have it"
    assert json.dumps(found.as_json())


def test_a_check_tells_what_the_program_would_be_told(tmp_path: Path) -> None:
    (tmp_path / "fox.png").write_bytes(b"mine")
    (problem,) = gfgen.check(
        [{"prompt": "a fox", "output": "fox.png", "frames": 1}], **HERE, output_dir=tmp_path
    ).found.problems
    assert str(problem).startswith("entry 1: fox.png: is there already")
    assert str(problem).endswith("; move it away, or name another output")


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)


def test_a_notebook_runs_the_snippets_of_the_documentation_and_shows_pictures_and_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model and devices that are here, and in small."""
    ours = 'model="shapes", device="cpu", ranks=1'
    cells = [re.sub(r'model="[\w.-]+"(, gpus=\[[\d, ]+\])?', ours, each) for each in snippets()]
    cells = [
        each.replace(f"{ours}, ranks=[", 'model="shapes", ranks=[') for each in cells
    ]  # a plan is for any
    made = f'gfgen.generate(jobs, {ours}, output_dir="outputs/animals")'
    cells.insert(2, f"for result in {made}: display(result)")
    small = f'{ours}, size="64x64"'
    cells = [each.replace(f", {ours}", f", {small}") if "generate(" in each else each for each in cells]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"]["text/html"] for output in notebook.cells[2].outputs]
    kinds = {re.sub(r"<p><(img|video).* src=\"data:([a-z0-9/]+);base64,.*", r"\1 \2", each) for each in shown}
    assert kinds == {"img image/png", "video video/mp4"}
    assert (tmp_path / "outputs/animals/manifest.jsonl").exists()
