"""Runs and servers where nobody looks on: output that nobody reads, no home, group folders, limits."""

import errno
import json
import os
import pty
import pwd
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from commands import gfgen
from serving import free_port

from gfgen.cli.main import main
from gfgen.runtime.control import closing
from gfgen.session import session
from gfgen.system.home import home

ROOT = Path(__file__).parents[2]
FOX = {"id": "fox", "prompt": "a red fox", "model": "tiny-wan", "size": "64x64", "frames": 5, "steps": 3}
LONG = FOX | {"id": "long", "steps": 1000}
PATIENCE_S = 240
GFGEN = "from gfgen.cli.main import main; main()"
FAKE_RUN = f"""
import runpy, sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
runpy.run_module("fake_run", run_name="__main__")
"""
"""With ranks that compute nothing."""
FAKE = {"id": "fox", "prompt": "a red fox", "model": "fake-image", "steps": 3}
NO_USER = "import pwd\ndef none(_): raise KeyError\npwd.getpwuid = none\n"
"""As for a user id that the list of users does not have."""
EVERY_COMMAND = """
import os, sys
from gfgen.cli.main import main
for command in ("config", "models", "policies", "cache", "status"):
    if not (child := os.fork()):
        sys.argv[1:] = [command]
        main()
    os.waitpid(child, 0)
"""


@pytest.fixture
def night(tmp_path, tiny_models):
    put(tmp_path, FOX, FOX | {"id": "owl"})
    return tmp_path


def put(folder, *jobs):
    (folder / "night.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))


@contextmanager
def started(folder, *arguments, code=GFGEN, env=None, **options):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT)} if env is None else env
    with subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run(folder, *arguments, **options):
    """(exit code, all output) of a run on one rank."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started(folder, "run", "--ranks", "1", *arguments, **streams, text=True, **options) as process:
        text, _ = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in text
    return process.returncode, text


def refusal(capsys, *arguments):
    """(exit code, standard error) of a command that starts nothing."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    return end.value.code, capsys.readouterr().err


# Output that nobody reads ---------------------------------------------------------------------


@pytest.fixture
def unread(request):
    """A descriptor that takes no byte more: a pipe, a socket or a terminal."""
    if request.param == "terminal":
        reader, writer = pty.openpty()
    elif request.param == "socket":
        reader, writer = (end.detach() for end in socket.socketpair())
    else:
        reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * size)
    os.set_blocking(writer, True)
    yield {"stdout": writer, "stderr": writer}
    os.close(reader)
    os.close(writer)


def wait_for(path, process, *, until=lambda text: True):
    deadline_s = time.monotonic() + PATIENCE_S
    while not (path.exists() and until(path.read_text())):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("unread", ["socket"], indirect=True)
def test_a_run_ends_although_nobody_reads_what_it_says(night, unread):
    put(night, FAKE, FAKE | {"id": "owl"})
    arguments = ("run", "night.jsonl", "--ranks", "1", "--verbose")
    with started(night, *arguments, code=FAKE_RUN, **unread) as process:
        assert process.wait(PATIENCE_S) == 0
    assert {"fox.png", "owl.png"} <= set(os.listdir(night / "outputs/night"))


@pytest.mark.parametrize("unread", ["terminal"], indirect=True)
def test_signals_and_closing_times_stop_a_run_whose_output_nobody_reads(night, unread):
    put(night, LONG)
    journal = night / "outputs/night/journal.jsonl"
    with started(night, "run", "night.jsonl", "--ranks", "1", "--log-file", "run.log", **unread) as process:
        wait_for(journal, process, until=lambda text: text.count("TaskDone") > 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
    assert os.listdir(night / "outputs/night/.resume") == ["long.state"]
    assert "stopped; 0 jobs done, 1 left" in (night / "run.log").read_text()
    put(night, FAKE | {"id": "slow", "steps": 1000, "flow_shift": 0.05})
    arguments = ("run", "night.jsonl", "--ranks", "1", "--until", "1s")
    with started(night, *arguments, code=FAKE_RUN, **unread) as process:
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("unread", ["pipe"], indirect=True)
def test_a_server_answers_although_nobody_reads_what_it_says(tmp_path, tiny_models, unread):
    port = free_port()
    options = ("--port", port, "--ranks", "1", "--model", "tiny-wan", "--output", "out", "--access-log")
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
    with started(tmp_path, "serve", *options, **unread) as process, client:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            with suppress(httpx.TransportError):
                if client.get("/ready").status_code == 200:
                    break
            time.sleep(0.05)
        for _ in range(300):
            assert client.get("/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


# Where a run starts ---------------------------------------------------------------------------


def test_a_user_without_home_has_caches_among_temporary_files(night):
    temporary = night / "temporary"
    temporary.mkdir()
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    put(night, FOX | {"model": "shapes"})  # others are written to the caches first, which takes long
    code, text = run(night, "night.jsonl", code=NO_USER + GFGEN, env=env)
    home = temporary / f"gfgen-home-{os.getuid()}"
    assert code == 0, text
    assert text.count(f"this user has no home: there is no user configuration, and caches are in {home}") == 1
    assert (home / ".cache/gfgen").is_dir()
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_home_that_is_not_there_and_cannot_be_made_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "/nonexistent/home")
    assert home() == tmp_path / f"gfgen-home-{os.getuid()}" == Path(os.environ["HOME"])


def test_a_home_that_is_no_folder_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "/dev/null")
    assert home() == tmp_path / f"gfgen-home-{os.getuid()}"


def test_a_home_of_somebody_else_is_none_unless_it_has_caches(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert home() == tmp_path / f"gfgen-home-{os.getuid()}"
    (tmp_path / "home" / ".cache").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert home() == tmp_path / "home"


def test_a_home_that_another_user_has_prepared_is_not_used(tmp_path, monkeypatch):
    def none(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", none)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("HOME")
    (tmp_path / f"gfgen-home-{os.getuid()}").mkdir()
    (tmp_path / f"gfgen-home-{os.getuid()}").chmod(0o777)
    found = home()
    assert found.name != f"gfgen-home-{os.getuid()}"
    assert found.stat().st_mode & 0o777 == 0o700
    assert home() == found == Path(os.environ["HOME"])
    monkeypatch.setenv("HOME", str(found))


def test_commands_work_without_a_home(tmp_path):
    """All in one process, as if each were the first."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with started(tmp_path, code=NO_USER + EVERY_COMMAND, env=env, text=True, **streams) as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in err
    assert err.count("this user has no home") == 5


def test_without_a_place_for_temporary_files_the_output_folder_has_them(night, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    code, _, text = gfgen(night, "run", "night.jsonl", "--ranks", "1", "--on-done", "echo done > hook")
    assert code == 0, text
    assert "no folder for temporary files can be written, so outputs/night has them" in text
    files = {".gfgen.live.json", "fox.mp4", "owl.mp4", "journal.jsonl", "manifest.jsonl"}
    assert set(os.listdir(night / "outputs/night")) == files
    assert (night / "hook").exists()


def test_a_limit_for_files_that_is_too_low_is_one_line(night):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))

    code, text = run(night, "night.jsonl", "--quiet", preexec_fn=limit)
    assert (code, len(text.splitlines())) == (2, 1)
    assert text.startswith("gfgen: shared memory is refused here (files of 134.2 MB are too large)")
    assert not (night / "outputs").exists()


def test_texts_that_libraries_need_are_missed_in_one_line(night):
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONOPTIMIZE": "2"}
    code, text = run(night, "night.jsonl", "--quiet", env=env)
    assert (code, text) == (
        2,
        "gfgen: PYTHONOPTIMIZE=2 (python -OO) removes texts that diffusers needs: unset it\n",
    )


def test_a_name_that_the_locale_cannot_write_is_a_problem_of_its_job(night):
    put(night, FOX | {"output": "\u043b\u0438\u0441\u0430.mp4"}, FOX | {"id": "owl"})
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    code, text = run(night, "night.jsonl", env=os.environ | {"PYTHONPATH": str(ROOT)} | locale)
    assert code == 2
    assert ".mp4: this locale cannot write such a name; set LC_ALL=C.UTF-8, or give the job another" in text
    assert not (night / "outputs").exists()


@pytest.mark.parametrize("name", ["journal.jsonl", ".resume"])
def test_records_that_another_user_wrote_are_refused_before_ranks_start(capsys, monkeypatch, night, name):
    """As the second one of a group folder does."""
    monkeypatch.chdir(night)
    (night / "out").mkdir()
    (night / "out" / name).mkdir() if name == ".resume" else (night / "out" / name).write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(name))
    for command in ("run", "check"):
        code, err = refusal(capsys, command, "night.jsonl", "--output", "out")
        assert code == 2
        assert f"out/{name}: you may not write it (its owner can, chmod g+w); name another --output" in err
        assert os.listdir(night / "out") == [name]


def test_a_disk_that_is_full_from_the_start_is_found_before_ranks_start(capsys, monkeypatch, night):
    monkeypatch.chdir(night)
    monkeypatch.setattr(closing, "free_bytes", lambda folder: 7_000)
    arguments = ("run", "night.jsonl", "--on-done", "echo $GFGEN_STATUS $GFGEN_UNFINISHED > hook")
    code, err = refusal(capsys, *arguments)
    assert code == 1
    assert err.startswith(
        "gfgen: the disk of the output folder has 7.0 kB left for the files of 2 jobs, which"
    )
    assert err.endswith(" kB is missing; make room, then run the same command again\n")
    assert (night / "hook").read_text() == "failed 2\n"
    assert not (night / "outputs").exists()


def test_a_disk_without_room_for_names_is_full_not_wrong(capsys, monkeypatch, night):
    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(night)
    monkeypatch.setattr(session, "try_to_write", full)
    expected = (
        "gfgen: --output outputs/night: cannot write there (No space left on device); name another folder"
    )
    assert refusal(capsys, "run", "night.jsonl") == (1, f"{expected}\n")


# Limits of a container --------------------------------------------------------------------------

MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def cgroup():
    """A memory cgroup (version 1 or 2) of 350 MB: a function that moves a process there."""
    is_old = (MEMORY / "memory.limit_in_bytes").exists()
    folder = (MEMORY if is_old else MEMORY.parent) / f"gfgen-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(350 * 10**6))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"this user may not make memory cgroups ({error.strerror})")
    yield lambda: (folder / "cgroup.procs").write_text(str(os.getpid()))
    deadline_s = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline_s:
        with suppress(OSError):
            folder.rmdir()
        time.sleep(0.05)


def test_under_a_limit_fewer_ranks_are_suggested_before_any_starts(night, cgroup):
    code, text = run(night, "night.jsonl", "--quiet", "--ranks", "4", preexec_fn=cgroup)
    assert code == 2
    assert "gfgen: 4 ranks: about " in text
    assert "of memory needed without models" in text


def test_processes_that_the_kernel_kills_are_said_to_lack_memory(night, cgroup):
    unchecked = "from gfgen.system import machine\nmachine.available_bytes = lambda: None\n"
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with started(
        night, "run", "night.jsonl", code=unchecked + GFGEN, preexec_fn=cgroup, **streams
    ) as process:
        said = next(line for line in process.stderr if "killed" in line)
    assert "killed for lack of memory (the limit is 350.0 MB); fewer --ranks, smaller jobs or more" in said
