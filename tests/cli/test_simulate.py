"""`gfgen simulate` and `gfgen plan`: without torch, without weights, without waiting."""

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gfgen.cli.main import main
from gfgen.graph import Stage
from gfgen.runtime.core.metrics import ALL_TAGS
from gfgen.runtime.files.lock import hold_folder
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.runtime.predict.profile_store import default_path
from gfgen.system.machine import cpu_name

JOBS = [
    {"id": "fox", "prompt": "a red fox", "model": "tiny-qwen-image", "size": "64x64", "steps": 3, "tag": "S"},
    {
        "id": "sea",
        "prompt": "the sea",
        "model": "tiny-wan",
        "size": "70x64",
        "frames": 6,
        "deadline": "1s",
        "tag": "L",
    },
    {
        "id": "late",
        "prompt": "the dunes",
        "model": "tiny-qwen-image",
        "size": "64x64",
        "steps": 3,
        "arrival": "10s",
        "deadline": "20s",
        "priority": 2,
    },
    {"id": "gone", "prompt": "the tide", "model": "tiny-wan", "steps": 100, "timeout": "2s"},
]


@pytest.fixture
def gfgen(capsys):
    """(exit code, standard output, standard error) of a command."""

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "night.jsonl").write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    write_profile(tmp_path / "profile.json", models=("tiny-wan", "tiny-qwen-image"))
    return tmp_path


def write_profile(path, *, models, stages=tuple(Stage), num_ranks=4):
    rows = [
        ProfileRow(model, "1x1", stage, (1, n, 1), 0.1 / n, flops=1e9, state_bytes=1000)
        for model in models
        for stage in stages
        for n in ((1, 2, 4) if stage is Stage.DENOISE else (1,))
    ]
    profile = Profile("a test", "2026-11-20", "made up", num_ranks, tuple(rows), write_s=0.01)
    path.write_text(profile.as_json())
    return path


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_the_command_imports_no_heavy_package_and_makes_no_model(folder, command):
    script = (
        "import sys\nfrom gfgen.cli.main import main\n"
        f"try:\n    main(['{command}', 'night.jsonl', '--profile', 'profile.json'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert not (folder / "cache").exists()


def test_policies_stand_side_by_side(gfgen, folder):
    profile = folder / "profile.json"
    code, out, err = gfgen(
        "simulate",
        folder / "night.jsonl",
        "--policy",
        "srtf",
        "--policy",
        "edf",
        "--ranks",
        2,
        "--profile",
        profile,
    )
    assert (code, err) == (0, "")
    assert out.startswith("4 jobs on 2 ranks, simulated with the profile of a test (2026-11-20)\n")
    rows = {line[:14].strip(): line[14:].split() for line in out.splitlines()}
    assert ["srtf", "edf"] in [line.split() for line in out.splitlines()]
    assert rows["jobs failed"] == ["1", "1"]
    assert rows["deadlines met"][0] == "1/2"
    assert rows["L"][:2] == ["0/1", "0%"]
    assert "Uncertain: " in out


def test_a_simulation_leaves_what_a_run_would_and_it_can_be_drawn(gfgen, folder):
    arguments = ["simulate", folder / "night.jsonl", "--ranks", 2, "--profile", folder / "profile.json"]
    for _ in range(2):  # the second one takes the place of the first
        code, _, err = gfgen(
            *arguments, "--policy", "srtf", "--policy", "fcfs,degree=2", "-o", folder / "sim"
        )
        assert (code, err) == (0, "")
    entries = [json.loads(line) for line in (folder / "sim/srtf/manifest.jsonl").read_text().splitlines()]
    assert {entry["id"]: entry["status"] for entry in entries} == {
        "fox": "done",
        "sea": "done",
        "late": "done",
        "gone": "failed",
    }
    assert all(entry["simulated"] for entry in entries)
    assert {entry["id"]: entry["timings"]["arrival_s"] for entry in entries}["late"] == 10.0
    assert (folder / "sim/fcfs-degree=2/trace.json").exists()
    code, out, _ = gfgen("plot", folder / "sim", "-o", folder / "both.png")
    assert (code, out) == (0, f"{folder / 'both.png'}\n")
    code, _, _ = gfgen("plot", folder / "sim/srtf", "-o", folder / "one.svg")
    assert "simulated, srtf: 4 jobs on 2 ranks" in (folder / "one.svg").read_text()


def test_earlier_simulations_give_way_to_the_next_one(gfgen, folder):
    profile, output = folder / "profile.json", folder / "out"
    arguments = ["simulate", folder / "night.jsonl", "--profile", profile, "-o", output]
    gfgen(*arguments, "--policy", "srtf", "--policy", "fcfs", "--policy", "edf")
    (output / "edf" / "notes.txt").write_text("mine")
    gfgen(*arguments, "--policy", "fcfs", "--policy", "legacy")
    assert sorted(path.parent.name for path in output.glob("*/trace.json")) == ["fcfs", "legacy"]
    assert [path.name for path in (output / "edf").iterdir()] == ["notes.txt"]
    assert not (output / "srtf").exists()
    gfgen(*arguments, "--policy", "fcfs")
    assert sorted(path.name for path in output.rglob("trace.json")) == ["trace.json"]


@pytest.mark.parametrize(
    ("policies", "inside"), [(["srtf"], "."), (["srtf", "edf"], "."), (["srtf", "edf"], "edf")]
)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.jsonl", '{"version": 1, "id": "fox", "status": "done"}\n'),
        ("journal.jsonl", "{}\n"),
        (".resume/fox.state", "half of a fox"),
    ],
)
def test_the_folder_of_a_real_run_is_left_alone(gfgen, folder, policies, inside, name, content):
    real = folder / "real" / inside
    (real / name).parent.mkdir(parents=True)
    (real / name).write_text(content)
    (real / "trace.json").write_text("[]")
    (real / "manifest.jsonl").touch()
    options = [option for policy in policies for option in ("--policy", policy)]
    code, _, err = gfgen(
        "simulate",
        folder / "night.jsonl",
        "--profile",
        folder / "profile.json",
        "-o",
        folder / "real",
        *options,
    )
    assert code == 2
    assert f"--output {real}: contains files of a run" in err
    left = {str(path.relative_to(real)) for path in real.rglob("*") if path.is_file()}
    assert left == {name, "manifest.jsonl", "trace.json"}
    assert ((real / name).read_text(), (real / "trace.json").read_text()) == (content, "[]")


def test_a_manifest_of_someone_else_is_not_removed(gfgen, folder):
    (folder / "manifest.jsonl").write_text('{"audio": "a.wav"}\n')
    profile = folder / "profile.json"
    code, _, err = gfgen("simulate", folder / "night.jsonl", "--profile", profile, "-o", folder)
    assert code == 2
    assert f"{folder}/manifest.jsonl: was not written by gfgen; name another --output" in err
    assert (folder / "manifest.jsonl").read_text() == '{"audio": "a.wav"}\n'


@pytest.mark.parametrize("held", ["out", "out/srtf", "out/earlier"])
def test_a_folder_in_which_a_run_is_at_work_is_left_alone(gfgen, folder, held):
    """Before the run has a journal; one of a policy, and one whose simulation would give way, too."""
    (folder / held).mkdir(parents=True)
    line = '{"version": 1, "id": "fox", "status": "done", "simulated": true}\n'
    (folder / held / "manifest.jsonl").write_text(line)
    with hold_folder(folder / held):
        code, _, err = gfgen(
            "simulate", folder / "night.jsonl", "--profile", folder / "profile.json", "-o", folder / "out",
            "--policy", "srtf", "--policy", "edf",
        )  # fmt: skip
    assert code == 75
    assert f"{folder / held} is in use by another run" in err
    assert (folder / held / "manifest.jsonl").read_text() == line


def test_programs_get_numbers_for_every_policy_and_number_of_ranks(gfgen, folder):
    profile = folder / "profile.json"
    code, out, _ = gfgen(
        "simulate", folder / "night.jsonl", "--ranks", "1..2", "--profile", profile, "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert [(run["policy"], run["num_ranks"]) for run in found["runs"]] == [("auto", 1), ("auto", 2)]
    assert all(run["makespan_s"] > 10.0 for run in found["runs"])
    assert found["profile"]["device"] == "a test"
    code, out, _ = gfgen("plan", folder / "night.jsonl", "--by", "1h", "--profile", profile, "--json")
    assert code == 0
    assert json.loads(out)["answer"].startswith("On 4 x a test (measured on another machine; ")


def test_the_same_simulation_twice_is_the_same(gfgen, folder):
    arguments = ("simulate", folder / "night.jsonl", "--profile", folder / "profile.json", "--json")
    assert gfgen(*arguments) == gfgen(*arguments)


def test_a_policy_that_starves_a_job_is_named_beside_the_others(gfgen, folder):
    (folder / "unfair.py").write_text(
        "from dataclasses import replace\nfrom gfgen.policies.fcfs import fcfs\n"
        "def policy(snapshot):\n"
        "    return fcfs(replace(snapshot, open={i: j for i, j in snapshot.open.items() if i != 'fox'}))\n"
    )
    profile, unfair = folder / "profile.json", folder / "unfair.py"
    code, out, err = gfgen(
        "simulate", folder / "night.jsonl", "--policy", "fcfs", "--policy", unfair, "--profile", profile
    )
    assert code == 1
    assert "makespan" in out
    assert "unfair.py starts nothing although all ranks are free; 1 job waits: fox" in err


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "'0': give 1 to 8 ranks, such as 4, 1,2,4 or 1..8"),
        (["--ranks", "4..2"], "give 1 to 8 ranks"),
        (["--ranks", "9"], "give 1 to 8 ranks"),
        (["--ranks", "5"], "knows 1 to 4 ranks"),
        (["--profile", "other.json"], "has no tiny-qwen-image, tiny-wan"),
        (["--profile", "partial.json"], "for denoise"),
        (["--profile", "missing.json"], "No such file"),
        (["--policy", "strf"], "did you mean srtf?"),
    ],
)
def test_bad_input_is_one_clear_line(gfgen, folder, monkeypatch, command, arguments, message):
    monkeypatch.chdir(folder)
    write_profile(folder / "other.json", models=("qwen-image",))
    lacking = tuple(stage for stage in Stage if stage is not Stage.DENOISE)
    write_profile(folder / "partial.json", models=("tiny-wan", "tiny-qwen-image"), stages=lacking)
    profile = [] if "--profile" in arguments else ["--profile", "profile.json"]
    code, out, err = gfgen(command, "night.jsonl", *profile, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_mistakes_in_the_file_are_those_that_run_tells(gfgen, folder):
    (folder / "wrong.jsonl").write_text('{"promt": "a fox"}\n{"prompt": "b", "model": "tiny-wann"}\n')
    code, _, err = gfgen("simulate", folder / "wrong.jsonl", "--profile", folder / "profile.json")
    assert code == 2
    assert "2 problems; nothing was started" in err
    assert "line 1: promt: not a field; did you mean prompt?" in err
    assert "did you mean 'tiny-wan'?" in err


def test_nothing_is_downloaded_for_a_simulation(gfgen, folder):
    (folder / "hub.jsonl").write_text('{"prompt": "a fox", "model": "someone/some-wan"}\n')
    code, _, err = gfgen("simulate", folder / "hub.jsonl", "--profile", folder / "profile.json")
    assert code == 2
    assert "someone/some-wan" in err
    assert "nothing is downloaded" in err


def test_a_deadline_before_the_arrival_is_pointed_out(gfgen, folder):
    (folder / "early.jsonl").write_text(
        '{"id": "a", "prompt": "a fox", "model": "tiny-wan", "arrival": "2h", '
        '"deadline": "2020-01-01T00:00:00Z"}\n'
    )
    code, _, err = gfgen("simulate", folder / "early.jsonl", "--profile", folder / "profile.json")
    assert code == 0
    assert "line 1: deadline = 2020-01-01" in err
    assert "a runs anyway and counts as late" in err


def test_a_deadline_by_the_clock_is_as_far_away_for_every_policy(gfgen, folder, monkeypatch):
    """However long the simulations before take."""
    times = itertools.count(1_800_000_000.0, 60.0)
    monkeypatch.setattr("gfgen.cli.simulate.time", SimpleNamespace(time=lambda: next(times)))
    job = {"prompt": "a fox", "model": "tiny-wan", "steps": 2, "deadline": "2027-01-15T08:00:30Z"}
    (folder / "due.jsonl").write_text(json.dumps(job) + "\n")
    policies = ("--policy", "srtf", "--policy", "edf", "--policy", "fcfs")
    code, out, err = gfgen(
        "simulate", folder / "due.jsonl", *policies, "--profile", folder / "profile.json", "--json"
    )
    assert (code, err) == (0, "")
    assert [run["deadlines"][ALL_TAGS]["met"] for run in json.loads(out)["runs"]] == [1, 1, 1]


def test_without_any_profile_it_is_said_what_makes_one(gfgen, folder):
    code, _, err = gfgen("simulate", folder / "night.jsonl")
    assert code == 2
    assert "gfgen profile" in err
    assert err.count("\n") == 1


def test_a_shipped_profile_serves_the_models_it_has(gfgen, folder):
    (folder / "big.jsonl").write_text('{"prompt": "a fox", "model": "qwen-image", "size": "1024x1024"}\n')
    code, out, _ = gfgen("simulate", folder / "big.jsonl")
    assert code == 0
    assert "H200" in out


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_more_ranks_than_a_shipped_profile_knows_are_refused_with_what_it_knows(gfgen, folder, command):
    (folder / "big.jsonl").write_text('{"prompt": "a fox", "model": "qwen-image", "size": "1024x1024"}\n')
    code, _, err = gfgen(command, folder / "big.jsonl", "--ranks", "8")
    assert code == 2
    assert "--ranks 8: the profile of 'NVIDIA H200' knows 1 to 4 ranks" in err


@pytest.fixture
def two_models(folder):
    """A file of jobs of two models, whose weights are 24 and 58 GB on a GPU."""
    lines = [
        {"prompt": "a fox", "model": model, "steps": 2, "size": size, "frames": frames}
        for model, size, frames in (("qwen-image", "512x512", 1), ("wan2.2-ti2v-5b", "832x480", 49))
    ]
    path = folder / "two.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_models_that_do_not_fit_into_memory_take_turns_in_simulations_too(gfgen, two_models):
    makespans = []
    for memory, times in (("140GB", 0), ("75GB", 1)):
        code, out, _ = gfgen("simulate", two_models, "--policy", "srtf", "--memory", memory, "--json")
        assert code == 0
        found = json.loads(out)
        assert found["runs"][0]["model_changes"]["times"] == times
        assert ("Models take turns in 75.0 GB" in (found["memory"] or "")) is bool(times)
        makespans.append(found["runs"][0]["makespan_s"])
    assert makespans[1] > makespans[0] + 20.0  # 24 GB or more at 1 GB a second


def test_a_plan_counts_with_models_that_take_turns(gfgen, two_models):
    ends = []
    for options in ([], ["--memory", "75GB"]):
        code, out, _ = gfgen("plan", two_models, "--ranks", "1", "--policy", "srtf", "--json", *options)
        assert code == 0
        ends.append(json.loads(out)["best"]["end_s"])
    assert ends[1] > ends[0] + 20.0


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_it_is_said_that_all_models_are_taken_to_be_in_memory(gfgen, two_models, command):
    code, out, _ = gfgen(command, two_models, "--policy", "srtf")
    assert code == 0
    assert "all 2 models fit into memory at once (weights of 81.9 GB). With --memory SIZE" in out
    _, out, _ = gfgen(command, two_models, "--policy", "srtf", "--memory", "75GB")
    assert "Models take turns in 75.0 GB of each GPU. This assumes that they load at 1 GB a second" in out
    _, out, _ = gfgen(command, two_models, "--policy", "srtf", "--memory", "40GB")
    assert "qwen-image would be streamed in 40.0 GB of each GPU, from " in out
    assert "Models take turns in 40.0 GB of each GPU." in out
    assert (
        "a step of qwen-image takes 2.6 times as long as with resident weights, 1.0 if 8 jobs share it" in out
    )


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("memory", "message"),
    [("16GB", "qwen-image (57.7 GB): at least"), ("much", "--memory 'much': a size like 40GB")],
)
def test_memory_into_which_nothing_fits_is_refused_by_simulations_too(
    gfgen, two_models, command, memory, message
):
    code, out, err = gfgen(command, two_models, "--memory", memory)
    assert (code, out) == (2, "")
    assert message in err


def test_a_folder_that_cannot_be_written_ends_the_simulation_with_one_line(gfgen, folder):
    (folder / "file").write_text("")
    profile = folder / "profile.json"
    code, out, err = gfgen(
        "simulate", folder / "night.jsonl", "--profile", profile, "-o", folder / "file" / "sub"
    )
    assert code != 0
    assert out == ""
    assert err.count("\n") == 1
    assert str(folder / "file" / "sub") in err


@pytest.mark.parametrize("option", [("--load", "nan"), ("--minutes", "inf"), ("--timeout", "1e400")])
def test_a_workload_has_finite_numbers(gfgen, option):
    code, _, err = gfgen("bench", "workload", "short", *option)
    assert code == 2
    assert "is not a finite number" in err


def test_a_comparison_says_beforehand_that_its_folder_cannot_be_made(gfgen, folder):
    (folder / "file").write_text("")
    code, out, err = gfgen("bench", "compare", "--simulate", "-o", folder / "file" / "sub")
    assert (code, out) == (2, "")
    assert "cannot be made" in err


def test_a_plan_for_several_machines_says_how_many_are_enough(gfgen, folder):
    command = ["plan", folder / "night.jsonl", "--by", "1h", "--profile", folder / "profile.json"]
    code, out, _ = gfgen(*command, "--policy", "srtf", "--nodes", "2x2")
    assert code == 0
    assert out.startswith("On 2 nodes of 2 x a test (measured on another machine; ")
    assert "No number of nodes up to 2 meets everything: on 2 nodes, " in out
    for options, words in [
        (["--nodes", "2x2", "--ranks", "2"], "--ranks goes with one machine; leave out --nodes"),
        (["--nodes", "2x99"], "up to 64 nodes with up to 8 ranks, such as 4x8 or 4xh200x8"),
    ]:
        code, _, err = gfgen(*command, *options)
        assert (code, words in err) == (2, True), err


def test_the_plan_begins_with_the_answer(gfgen, folder):
    profile = folder / "profile.json"
    code, out, _ = gfgen("plan", folder / "night.jsonl", "--by", "1h", "--profile", profile)
    assert code == 0
    assert out.startswith("On 4 x a test (measured on another machine; ")
    assert "Policies on 4 ranks" in out
    code, _, err = gfgen("plan", folder / "night.jsonl", "--by", "yesterday", "--profile", profile)
    assert code == 2
    assert "--by 'yesterday'" in err


def test_several_machines_are_simulated_with_their_driver(gfgen, folder):
    command = ["simulate", folder / "night.jsonl", "--profile", folder / "profile.json", "--ranks", 2]
    code, out, _ = gfgen(*command, "--nodes", "1,2", "--policy", "srtf", "--json")
    assert code == 0
    runs = json.loads(out)["runs"]
    assert [(run["name"], run["num_ranks"]) for run in runs] == [("srtf on 1 x 2", 2), ("srtf on 2 x 2", 4)]
    code, _, err = gfgen(*command, "--nodes", 2, "--output", folder / "out")
    assert code == 2
    assert "--output goes with one machine; leave out --nodes" in err


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_in_fp8_the_profile_is_the_one_that_was_measured_so(gfgen, folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    code, _, err = gfgen(command, "night.jsonl", "--precision", "fp8")
    assert code == 2
    assert f"no profile of {cpu_name()} fp8; 'gfgen profile' measures it, --profile names another" in err
    path = default_path(f"{cpu_name()} fp8")
    path.parent.mkdir(parents=True)
    write_profile(path, models=("tiny-wan", "tiny-qwen-image"))
    code, out, _ = gfgen(command, "night.jsonl", "--precision", "fp8", "--json")
    assert code == 0
    assert json.loads(out)
