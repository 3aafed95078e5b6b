"""The command line without workers: messages, exit codes, and how fast it starts to answer."""

import contextlib
import errno
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import click
import pytest
from click.shell_completion import ShellComplete

from gfgen.cli import doctor
from gfgen.cli.main import cli, main
from gfgen.errors import InterruptedRunError, ModelError, RunError
from gfgen.graph import Stage
from gfgen.models.ahead.pool import Report
from gfgen.models.families.registry import check_here, check_name
from gfgen.runtime.core.devices import Devices, Gpu
from gfgen.runtime.predict import profile_file, profile_store
from gfgen.session import memory
from gfgen.session.ranks import Ranks
from gfgen.system.machine import COMPUTING, OWN_POLICIES, PATCHING, SERVING, VIDEOS, versions

LONG = "x" * 300


def gfgen(capsys, *arguments):
    """(exit code, standard output, standard error) of a command."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


@pytest.fixture
def job_file(tmp_path):
    def write(*lines):
        path = tmp_path / "jobs.jsonl"
        path.write_text("\n".join(lines))
        return str(path)

    return write


def test_all_problems_of_a_file_are_told_at_once_and_nothing_starts(capsys, job_file, tiny_models):
    path = job_file('{"prompt": ""}', '{"promt": "a fox"}', '{"prompt": "a fox", "model": "tiny-wann"}')
    code, out, err = gfgen(capsys, "run", path, "--output", "/nonexistent/folder")
    assert (code, out) == (2, "")
    assert "3 problems; nothing was started" in err
    assert "line 2: promt: not a field; did you mean prompt?" in err
    assert "did you mean 'tiny-wan'?" in err


def test_what_the_model_cannot_do_is_told_with_the_rest(capsys, job_file, tiny_models):
    path = job_file('{"prompt": "a fox", "model": "tiny-qwen-image", "frames": 5}', "{")
    code, _, err = gfgen(capsys, "run", path)
    assert code == 2
    assert "line 1: frames = 5" in err
    assert "line 2: " in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "missing.jsonl"], "no such file"),
        (["run", "jobs/batch.jsonl", "--policy", "strf"], "did you mean srtf?"),
        (["run", "jobs/batch.jsonl", "--ranks", "9"], "1<=x<=8"),
        (["run", "jobs/batch.jsonl", "--rank", "2"], "--ranks"),
        (["models", "make-tiny", "nowhere", "tiny-cat"], "no tiny model 'tiny-cat'"),
        (["plot", "missing.json"], "missing.json"),
        (["rnu"], "rnu"),
        (["run", "a red fox " * 40], "too long for a file's name; give a prompt with -p"),
        (["run", "jobs/batch.jsonl", "--output", LONG], "cannot write there (File name too long)"),
        (["status", LONG], f"gfgen: {LONG[:80]}: File name too long"),
        (["plot", LONG], f"gfgen: {LONG[:80]}: File name too long"),
        (["cancel", "a", "--target", LONG], f"gfgen: {LONG[:80]}: File name too long"),
        (["run", "--watch", "README.md"], "--watch README.md: is no folder; make one"),
        (["run", "jobs/batch.jsonl", "--dry-run", "--keep-if", "nomodule:good"], "cannot import nomodule"),
        (["check", "jobs/batch.jsonl", "--output", "README.md"], "--output README.md: cannot write there"),
        (["check", "jobs/batch.jsonl", "--output", "README.md/x"], "README.md/x: cannot write there"),
    ],
)
def test_a_wrong_command_line_is_one_clear_message_and_exit_code_two(capsys, arguments, message):
    code, _, err = gfgen(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 2), (errno.ESTALE, 1), (errno.ENOTCONN, 1)])
def test_a_path_that_cannot_be_looked_at_is_one_line(capsys, monkeypatch, number, code):
    """It is closed to this user, or on a network drive that is lost."""

    def refuse(path, **_):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    told = f"gfgen: /lost/run: {os.strerror(number)}\n"
    assert gfgen(capsys, "status", "/lost/run") == (code, "", told)


@pytest.mark.parametrize(
    "model", [LONG, f"{LONG}.safetensors", f"shapes:{LONG}.safetensors", "~nobody-here/x"]
)
def test_a_model_whose_path_cannot_be_is_a_problem_of_its_line(capsys, job_file, model):
    code, _, err = gfgen(capsys, "run", job_file(json.dumps({"prompt": "a fox", "model": model})))
    assert (code, err.count("\n")) == (2, 2)
    assert f"\n  line 1: model = {model[:60]}" in err
    for check in (check_name, check_here):
        with pytest.raises(ModelError):
            check(model)


def test_tiny_models_that_cannot_be_written_say_why(capsys, tmp_path):
    (tmp_path / "afile").touch()
    code, _, err = gfgen(capsys, "models", "make-tiny", str(tmp_path / "afile" / "x"), "tiny-wan")
    assert code == 2
    assert err.startswith("gfgen: model tiny-wan: cannot be made in ")
    assert "Not a directory" in err
    assert err.count("\n") == 1


def test_an_output_folder_that_cannot_be_written_is_named(capsys, job_file, tiny_models):
    code, _, err = gfgen(
        capsys, "run", job_file('{"prompt": "a fox", "model": "tiny-wan"}'), "--output", "/proc/here"
    )
    assert code == 2
    assert "--output /proc/here: cannot write there" in err


@pytest.mark.parametrize(
    ("words", "incomplete", "found"),
    [
        (["run"], "jo", ("jo", "file")),
        (["run", "--policy"], "tri", ("triage", "plain")),
        (["check", "--model"], "sha", ("shapes", "plain")),
        (["run", "--model"], "models/", ("models/", "file")),
        (["status"], "out", ("out", "file")),
    ],
)
def test_shells_complete_files_models_and_policies(words, incomplete, found):
    (item,) = ShellComplete(cli, {}, "gfgen", "_GFGEN_COMPLETE").get_completions(words, incomplete)
    assert (item.value, item.type) == found


def test_policies_says_what_each_is_for(capsys):
    code, out, _ = gfgen(capsys, "policies")
    assert code == 0
    for name in ("legacy", "fcfs", "srtf", "edf"):
        assert f"{name}" in out
    assert "degree=1" in out


def test_models_lists_names_that_run_accepts(capsys):
    code, out, _ = gfgen(capsys, "models")
    assert code == 0
    assert out.startswith("shapes ")
    assert "tiny-wan" in out
    assert "wan2.2-ti2v-5b" in out


def test_pipelines_are_those_of_the_documented_table(capsys):
    code, out, _ = gfgen(capsys, "models", "--pipelines")
    assert code == 0
    rows = {name: (result, kind) for name, result, kind in (re.split("  +", x) for x in out.splitlines())}
    assert rows["FluxPipeline"] == ("in steps", "image")
    assert rows["CogVideoXPipeline"] == ("in steps", "video")
    assert rows["StableAudioPipeline"] == ("refused", "sound")
    table = (Path(__file__).parents[2] / "docs/pipelines.md").read_text().partition("| pipeline | steps |")[2]
    assert {f"{name}Pipeline" for name in re.findall(r"^\| (\w+) \| [0-9]+ \|", table, re.M)} == {
        name
        for name, (result, kind) in rows.items()
        if result == "in steps" or (result, kind) == ("refused", "sound")
    }
    number = sum(result == "in steps" for result, _ in rows.values())
    assert f"{number} pipeline classes" in gfgen(capsys, "models")[1]


@pytest.mark.parametrize("arguments", [["--help"], ["policies"], ["models"], ["run", "--help"]])
def test_light_commands_import_no_heavy_package(arguments):
    script = (
        "import sys\nfrom gfgen.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_missing_package_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )
    code, _, err = gfgen(capsys, "serve", "--device", "cpu")
    assert code == 1
    assert err == (
        "gfgen: the package uvicorn is missing: 'pip install gfgen' installs it; 'gfgen doctor' lists all\n"
    )


def test_ranks_are_not_started_where_a_package_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    monkeypatch.setattr(
        "gfgen.runtime.processes.pool.WorkerPool", lambda *_, **options: pytest.fail("starts ranks")
    )
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a red circle"}\n')
    code, _, err = gfgen(capsys, "run", str(jobs), "--output", str(tmp_path / "out"), "--device", "cpu")
    assert code == 1
    assert err.splitlines()[-1].startswith("gfgen: the package torch is missing: 'pip install gfgen'")


def test_an_import_that_fails_without_a_name_is_not_called_a_missing_package(monkeypatch):
    def fail(_):
        raise ModuleNotFoundError("a converter of tokenizers is asked for")

    monkeypatch.setattr("gfgen.cli.main.importlib.import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="converter"):
        main(["doctor"])


def test_doctor_knows_every_package_that_is_installed_with_gfgen():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    brought = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}
    of_others = {"click", "nvidia-cudnn-frontend", "jinja2"}  # torch does not install without the last
    assert brought - of_others == {*COMPUTING, *VIDEOS, *PATCHING, *OWN_POLICIES, *SERVING}


@pytest.mark.parametrize(
    ("package", "code"), [("uvicorn", 0), ("imageio-ffmpeg", 0), ("diffusers", 1), ("numpy", 1)]
)
def test_doctor_names_missing_packages(capsys, monkeypatch, package, code):
    monkeypatch.setattr("gfgen.cli.doctor.version_of", lambda name: "" if name == package else "1.0")
    ended, out, _ = gfgen(capsys, "doctor")
    assert ended == code
    assert package in next(line for line in out.splitlines() if line.startswith("missing: "))
    assert "nothing is missing" not in out


def test_doctor_tells_of_packages_without_bytecode(capsys, monkeypatch, tmp_path):
    bare = SimpleNamespace(origin=str(tmp_path / "__init__.py"), cached=str(tmp_path / "missing.pyc"))
    monkeypatch.setattr("gfgen.cli.doctor.find_spec", lambda _: bare)
    _, out, _ = gfgen(capsys, "doctor")
    (line,) = [line for line in out.splitlines() if "bytecode" in line]
    assert line.endswith(f"('python -m compileall -q -j 0 {tmp_path} {tmp_path} {tmp_path}' makes it)")


def test_doctor_looks_where_models_are_kept(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert f"models: {tmp_path / 'home' / 'hub'} (does not exist yet)" in gfgen(capsys, "doctor")[1]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert f"models: {tmp_path}, " in gfgen(capsys, "doctor")[1]


def test_doctor_prints_a_matrix_of_links():
    assert list(doctor._link_table([])) == [
        "links: not measured ('gfgen bench gfc'); 20 GB/s is assumed through main memory"
    ]
    rows = [
        {"transport": "host", "from": one, "to": two, "gb_per_s": 31.25, "us": 15.4}
        for one, two in ((0, 1), (0, 2), (1, 2))
    ]
    lines = list(doctor._link_table(rows))
    assert lines[0] == "links over main memory, GB/s each way (us of 4 KB), to GPU 0, 1, 2"
    assert [line.split() for line in lines[1:]] == [
        ["0:", "-", "31.2", "(15.4)", "31.2", "(15.4)"],
        ["1:", "31.2", "(15.4)", "-", "31.2", "(15.4)"],
        ["2:", "31.2", "(15.4)", "31.2", "(15.4)", "-"],
    ]


@pytest.mark.parametrize(
    ("sets", "across"), [("01 23", "go through main memory, of which 1"), ("012 3", "are not possible")]
)
def test_doctor_says_how_steps_cross_to_gpus_out_of_reach(sets, across):
    cuda = SimpleNamespace(
        num_devices=4,
        can_access=lambda *pair: any(set(map(str, pair)) <= set(each) for each in sets.split()),
        has_nvlink=lambda *_: True,
        name=lambda _: "a GPU",
    )
    missing = []
    list(doctor._links(cuda, missing))
    assert missing
    assert all(f"steps across them {across}" in line for line in missing)


def test_doctor_says_which_models_fit_what_is_streamed_and_what_main_memory_has(monkeypatch):
    def told(size_gb, available_gb):
        monkeypatch.setattr(memory, "available_bytes", lambda: available_gb * 10**9)
        devices = Devices("cuda", 1, (Gpu("a GPU", size_gb * 10**9),))
        return list(doctor._models([], Ranks(devices, has_random_weights=True)))

    head, *lines = told(24, 64)
    assert re.fullmatch(r"main memory: .* available; a program may pin .* \(ulimit -l\)", head)
    (qwen,) = (line for line in lines if line.startswith("qwen-image, 1328x1328: "))
    assert re.search(
        r"; 40\.1 GB are streamed from main memory, which takes a forward at least 0\.\d+ s$", qwen
    )
    assert "wan2.2-ti2v-5b, 1280x704: each GPU holds all of its weights, 24.2 GB" in told(80, 64)
    assert "40.1 GB of main memory needed for weights that GPUs lack room for" in told(24, 20)[-1]
    assert "at least 18.1 GB needed on each GPU even if all" in told(16, 64)[-1]
    assert len(list(doctor._models([]))) == 1, "there are no GPUs"


@pytest.fixture
def filled_caches(monkeypatch, tmp_path):
    """gfgen's cache with a kernel, a profile and a file of another program; the hub's with a model."""
    kept = ("gfgen/kernels/kernels-1-sm_90.cubin", "gfgen/profiles/cpu.json", "gfgen/notes.txt")
    for name in (*kept, "hub/models--org--name/blobs/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 1000)
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "gfgen"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


def files_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_caches_are_listed_with_sizes(capsys, filled_caches):
    found = json.loads(gfgen(capsys, "cache", "--json")[1])
    sizes = {each["name"]: each["size_bytes"] for each in found["caches"]}
    empty = ("inductor", "tables", "tiny-models", "single-files", "calls", "previews")
    assert sizes == {"profiles": 1000, "kernels": 1000, **dict.fromkeys(empty, 0)}
    assert found["hub"]["size_bytes"] == {"org/name": 1000}
    assert "org/name" in gfgen(capsys, "cache")[1]


def test_clearing_asks_first_and_deletes_only_files_of_gfgen(capsys, filled_caches):
    code, _, err = gfgen(capsys, "cache", "clear")
    assert (code, "--yes" in err, len(files_in(filled_caches))) == (2, True, 4)
    assert "did you mean kernels?" in gfgen(capsys, "cache", "clear", "kernel")[2]
    assert gfgen(capsys, "cache", "clear", "kernels", "--yes")[0] == 0
    assert files_in(filled_caches) == ["a", "cpu.json", "notes.txt"]
    deleted = json.loads(gfgen(capsys, "cache", "clear", "--yes", "--json")[1])
    assert [each["name"] for each in deleted["deleted"]] == ["profiles"]
    assert files_in(filled_caches) == ["a", "notes.txt"]


def test_measured_times_are_exported_and_imported(capsys, monkeypatch, tmp_path):
    row = profile_file.ProfileRow("fake", "small", Stage.DENOISE, (1, 1, 1), 0.5)
    measured = profile_file.Profile("GPU", "2026-11-28", "runs", 1, (row,), versions=versions())
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "here"))
    profile_store.save_profile(measured, profile_store.runs_path("GPU"))
    words, file = "1 time on GPU, of runs, 2026-11-28", str(tmp_path / "times.json")
    assert gfgen(capsys, "cache", "export", file)[:2] == (0, f"wrote {words}\n")
    assert gfgen(capsys, "cache", "import", file)[1] == f"left {words}: the one here is of 2026-11-28\n"
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "there"))
    assert gfgen(capsys, "cache", "import", file)[1] == f"took {words}\n"
    (tmp_path / "times.json").write_text("{")
    code, _, err = gfgen(capsys, "cache", "import", file)
    assert (code, err.count("\n")) == (2, 1)


class Counted:
    """In place of processes that compile: what `gfgen cache fill` asks them for, and their answer."""

    asked: ClassVar[list] = []

    def __init__(self, calls, architectures):
        self.asked.append((len(calls), architectures))

    def wait(self):
        counts = Counter({("denoising", "present"): 1, ("denoising", "compiled"): 2})
        counts["LoRAs", "missing"] = len(self.asked) - 1
        return Report(counts, 2.5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def no_driver():
    raise RunError("no GPU")


def test_kernels_are_compiled_for_named_gpus(capsys, monkeypatch):
    monkeypatch.setattr("gfgen.cli.doctor.find_spec", lambda name: None)
    assert "Triton is missing" in gfgen(capsys, "cache", "fill")[2]
    monkeypatch.setattr("gfgen.cli.doctor.find_spec", lambda name: True)
    monkeypatch.setattr("gfgen.cli.doctor.Compiling", Counted)
    monkeypatch.setattr("gfgen.cli.doctor.driver", no_driver)
    assert "--arch sm_90" in gfgen(capsys, "cache", "fill")[2]
    assert "--arch 90: a name like sm_90" in gfgen(capsys, "cache", "fill", "--arch", "90")[2]
    code, out, _ = gfgen(capsys, "cache", "fill", "qwen-image", "--arch", "sm_90", "--arch", "sm_80")
    assert (code, out.splitlines()[0]) == (0, "denoising   2 compiled, 1 present, 0 missing")
    assert "for sm_90, sm_80, in 2.5 s" in out
    assert gfgen(capsys, "cache", "fill", "--arch", "sm_90")[0] == 1
    assert Counted.asked[0][0] < Counted.asked[1][0]


def in_shell(redirection, *arguments):
    """(exit code, standard output, standard error) of a command, as a shell starts it."""
    command = f'exec "$0" -m gfgen "$@" {redirection}'
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable, *arguments], capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("redirection", ["2>&-", "<&- 2>&-"])
def test_a_command_that_is_started_without_standard_error_runs(redirection):
    code, out, _ = in_shell(redirection, "plan", "jobs/wan2.2.jsonl")
    assert code == 0
    assert out.startswith("On 4 x NVIDIA H200 (measured on another machine; ")


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("-n 5", "too many open files: raise the limit (ulimit -n), then run again"),
    ],
)
def test_a_limit_under_which_nothing_can_run_is_one_line(tmp_path, limit, told):
    job = '{"prompt": "a fox"}'
    command = ["run", "-", "--ranks", "1", "--quiet", "--output", str(tmp_path)]
    ended = subprocess.run(
        ["sh", "-c", f'ulimit {limit}; exec "$0" -m gfgen "$@"', sys.executable, *command],
        input=job, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stderr.startswith(f"gfgen: {told}")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.returncode


@pytest.mark.parametrize(
    "arguments", [["policies"], ["--version"], ["simulate", "jobs/wan2.2.jsonl", "--ranks", "1..4", "--json"]]
)
def test_output_that_cannot_be_written_is_one_line(arguments):
    """Short ones are held in the stream's buffer, long ones are not."""
    assert in_shell(">/dev/full", *arguments) == (1, "", "gfgen: cannot write: No space left on device\n")


def test_an_error_of_another_file_is_not_told_as_one_of_the_output(monkeypatch, caplog):
    monkeypatch.setattr(
        "gfgen.cli.main.importlib.import_module", lambda _: Path("/nowhere/at/all").read_text()
    )
    monkeypatch.setattr(logging.getLogger("gfgen"), "handlers", [caplog.handler])  # as of --log-file
    with pytest.raises(FileNotFoundError):
        main(["doctor"])
    assert "/nowhere/at/all" in caplog.text


def test_one_more_ctrl_c_while_a_stopped_run_ends_leaves_its_last_line(capsys, monkeypatch):
    """The session has closed by then, and no longer catches signals."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    def stop(_: str) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(press)
            raise InterruptedRunError("stopped; 1 job done", signal_number=signal.SIGINT)

    monkeypatch.setattr("gfgen.system.signals.leave_to_the_run", lambda: None)
    monkeypatch.setattr("gfgen.cli.main.importlib.import_module", stop)
    code, _, err = gfgen(capsys, "doctor")
    assert (code, err.split()) == (130, ["gfgen:", "stopped;", "1", "job", "done"])


def test_help_that_names_a_page_says_where_pages_are() -> None:
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        text = command.get_help(click.Context(command))
        assert ("docs/" in text) == ("Pages in docs/ come with" in text), name
