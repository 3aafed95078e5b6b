import logging
from dataclasses import replace
from typing import ClassVar

import pytest
from builders import make_job
from click.testing import CliRunner

from gfgen.bench import profiling
from gfgen.bench.profiling import Samples
from gfgen.cli import profile as command
from gfgen.cli.main import cli
from gfgen.errors import InputError, InterruptedRunError, JobFileError
from gfgen.graph import Stage
from gfgen.runtime.core.devices import CPU, CUDA, Devices, Gpu
from gfgen.runtime.predict import profile_store
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.session.ranks import Ranks
from gfgen.session.session import known_profile

STAGES = {f"{stage} 1x1x1": [0.5] for stage in Stage}


def samples_of(entry):
    """As if every task had taken half a second."""
    steps = {
        f"denoise {cfg}x{ulysses}x{ring}": [0.5] for cfg, ulysses, ring in entry.step_degrees(counts=True)
    }
    return Samples(STAGES | steps, writes=[0.1], gaps=[0.001], moves=[(64, 0.01)])


class NoPool:
    """Stands in for worker processes, which nothing here needs."""

    warmed: ClassVar = []
    """By pool: the steps that ranks were to get ready."""
    living = ()

    def __init__(self, *_, **options):
        self.warmed.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def note_warm_up(pool, items, signals):
    pool.warmed.append(items)
    return []


@pytest.fixture
def no_pool(monkeypatch):
    monkeypatch.setattr("gfgen.runtime.processes.pool.WorkerPool", NoPool)
    monkeypatch.setattr("gfgen.runtime.processes.starting.wait_ready", lambda pool, signals: None)
    monkeypatch.setattr(command, "warm_up", note_warm_up)


@pytest.fixture
def measured(no_pool, monkeypatch, tiny_models, tmp_path):
    """The measurements that were made, in order; none takes any time."""
    keys = []

    def measure(entry, pool, *, folder, signals):
        if len(keys) == measured_until:
            raise InterruptedRunError("stopped", signal_number=15)
        keys.append(entry.key)
        return samples_of(entry)

    measured_until = 7
    monkeypatch.setattr(command.profiling, "measure", measure)
    return keys


def profile(*arguments):
    return CliRunner().invoke(cli, ["profile", *map(str, arguments)], obj={})


def test_the_plan_and_its_duration_are_told_before_anything_starts(measured, tmp_path):
    result = profile("--model", "tiny-wan", "--size", "64x64x5", "--dry-run", "-o", tmp_path / "p.json")
    assert "measurements on 1 to 4 ranks: about " in result.output, "as many as a run has"
    result = profile(
        *("--model", "tiny-wan", "--size", "64x64x5", "--ranks", 2, "--dry-run", "-o", tmp_path / "p.json")
    )
    lines = result.output.splitlines()
    assert lines[0] == "shapes: tiny-wan 64x64x5+cfg"
    assert lines[1].startswith("10 measurements on 1 to 2 ranks: about ")
    assert not measured
    assert not list(tmp_path.iterdir())


def test_a_stopped_profile_goes_on_where_it_was(measured, tmp_path):
    arguments = ("--model", "tiny-wan", "--size", "64x64x5", "--ranks", 2, "-o", tmp_path / "p.json")
    result = profile(*arguments)
    assert isinstance(result.exception, InterruptedRunError)
    assert str(result.exception) == "stopped; 7 of 10 are measured: run the same command again to go on"
    assert result.exception.exit_code == 143
    first, measured[:] = list(measured), []
    result = profile(*arguments)
    assert result.exit_code == 0, result.output
    assert "10 measurements on 1 to 2 ranks, 7 of them already done" in result.output
    assert len(measured) == 3
    assert not set(first) & set(measured)
    made = load_profile(tmp_path / "p.json")
    stages = ["encode", "prepare", "denoise", "reuse", "refine", "decode"]
    assert len(made.rows) == len([*stages, "2x1x1", "1x2x1"])
    assert made.source == "gfgen profile --model tiny-wan --size 64x64x5 --ranks 2"
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_other_shapes_are_added_to_a_profile_that_is_there(measured, tmp_path):
    for size in ("64x64", "128x128"):
        arguments = ("--model", "tiny-qwen-image", "--size", size, "--ranks", 1, "-o", tmp_path / "p.json")
        assert profile(*arguments).exit_code == 0
    assert {row.shape for row in load_profile(tmp_path / "p.json").rows} == {"64x64+cfg", "128x128+cfg"}


def test_the_default_profile_is_where_everyone_looks(measured, monkeypatch, tmp_path):
    made = profile("--model", "tiny-qwen-image", "--size", "64x64", "--ranks", 1, "-o", tmp_path / "p.json")
    assert made.exit_code == 0
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    assert profile_store.find_profile() is None
    with pytest.raises(InputError, match=r"no profile of this machine .*with 'gfgen profile JOBS'"):
        profile_store.open_profile(None)
    default = profile_store.default_path()
    default.parent.mkdir()
    (tmp_path / "p.json").rename(default)
    path, found = profile_store.find_profile()
    assert path == default
    assert profile_store.open_profile(None) == found
    default.write_text("{")
    assert profile_store.find_profile() is None


@pytest.mark.parametrize(
    ("arguments", "kind", "what"),
    [
        (("--size", "big"), InputError, "--size big: give a size such as 832x480"),
        (("--model", "tiny-qwen-image", "--size", "8x8"), JobFileError, "size = 8x8"),
        (("--model", "tiny-wan-moe-i2v"), JobFileError, "image"),
    ],
)
def test_what_cannot_be_measured_is_told(measured, arguments, kind, what):
    result = profile(*arguments)
    assert isinstance(result.exception, kind)
    assert what in str(result.exception)
    assert not measured


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(measured, tmp_path):
    (tmp_path / "file").write_text("")
    result = profile("--model", "tiny-wan", "--size", "64x64x5", "-o", tmp_path / "file" / "p.json")
    assert isinstance(result.exception, InputError)
    assert "cannot be made" in str(result.exception)
    assert not measured


@pytest.mark.parametrize("content", ['{"prompt": "a fox", "model": "tiny-wan"}\n', "my notes", "[]"])
def test_a_file_that_is_no_profile_is_not_replaced(measured, tmp_path, content):
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(content)
    result = profile(jobs, "-o", jobs)
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == f"--output {jobs}: exists and is not a profile; name another file"
    assert jobs.read_text() == content
    assert not measured


@pytest.mark.parametrize("content", ["", '{"format": 0, "rows": []}'])
def test_an_empty_file_and_a_profile_of_an_earlier_format_are_replaced(measured, tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    result = profile("--model", "tiny-wan", "--size", "64x64x5", "--dry-run", "-o", tmp_path / "p.json")
    assert result.exit_code == 0, result.output


def test_jobs_and_sizes_or_several_models_exclude_each_other(measured, tmp_path):
    for others in (("--size", "64x64"), ("--model", "tiny-wan", "--model", "tiny-qwen-image")):
        result = profile(tmp_path / "jobs.jsonl", *others)
        assert result.exit_code == 2
        assert "give either JOBS, with at most one --model, or --model and --size" in result.output


def test_jobs_that_name_no_model_are_those_of_the_one_that_is_given(measured, tmp_path):
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a fox", "size": "64x64"}\n')
    result = profile(jobs, "--model", "tiny-qwen-image", "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("shapes: tiny-qwen-image 64x64")


def test_a_run_starts_its_predictions_from_the_default_profile_and_says_so(
    measured, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "cache"))
    assert known_profile(Ranks(Devices(CPU, 2))) is None
    assert profile("--model", "tiny-qwen-image", "--size", "64x64", "--ranks", 1).exit_code == 0
    monkeypatch.setattr(logging.getLogger("gfgen"), "propagate", True)  # the command has set up its own
    with caplog.at_level("INFO"):
        found = known_profile(Ranks(Devices(CPU, 2)))
    assert found.models == {"tiny-qwen-image"}
    assert (
        f"predictions start from the profile of {found.date}: {profile_store.default_path()}" in caplog.text
    )


def test_no_more_gpus_are_measured_together_than_reach_each_other(no_pool, monkeypatch, tmp_path):
    pairs = [Gpu("NVIDIA H200", 140 * 10**9, frozenset(peers)) for peers in ((1,), (0,), (3,), (2,))]
    monkeypatch.setattr("gfgen.session.ranks.choose_devices", lambda *_, **__: devices[-1])
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    devices = [Devices(CUDA, 4, tuple(pairs))]
    dry = profile("--random-weights", "--dry-run")
    assert dry.output.splitlines()[1].startswith("24 measurements on 1 to 4 GPUs: about ")
    devices.append(replace(devices[0], transport="peer"))
    dry = profile("--random-weights", "--dry-run")
    assert dry.output.splitlines()[1].startswith("18 measurements on 1 to 2 GPUs: about ")
    samples = Samples(STAGES, gaps=[0.001], moves=[(64, 0.01)])
    monkeypatch.setattr(command.profiling, "measure", lambda *_, **__: samples)
    made = profile("--random-weights", "--model", "qwen-image", "--size", "512x512")
    assert made.exit_code == 0, made.output
    _, found = profile_store.find_profile("NVIDIA H200")
    assert found.num_ranks == 2
    assert found.source.startswith(
        "gfgen profile --model qwen-image --size 512x512 --ranks 4 --random-weights"
    )


def test_gpus_are_measured_with_the_classes_of_the_workloads_unless_told_otherwise(
    no_pool, monkeypatch, tmp_path
):
    gpus = Devices(CUDA, 4, (Gpu("NVIDIA H200", 140 * 10**9),) * 4)
    keys = []

    def measure(entry, pool, *, folder, signals):
        keys.append(entry.key)
        return Samples(STAGES, gaps=[0.001], moves=[(64, 0.01)])

    monkeypatch.setattr("gfgen.session.ranks.choose_devices", lambda *_, **__: gpus)
    monkeypatch.setattr(command.profiling, "measure", measure)
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    dry = profile("--random-weights", "--dry-run")
    assert dry.output.splitlines()[1].startswith("24 measurements on 1 to 4 GPUs: about ")
    assert "a guess" in dry.output  # decodes of Wan: one shape was measured
    assert "a guess" not in profile("--random-weights", "--model", "qwen-image", "--dry-run").output
    made = profile("--random-weights", "--model", "qwen-image")
    assert made.exit_code == 0, made.output
    sizes = ("512x512", "1024x1024", "1536x1536")
    groups = ("1 together", "2 together", "4 together", "1 moving")
    assert keys == [f"qwen-image {size}+cfg on {group} round 1" for size in sizes for group in groups]
    path, found = profile_store.find_profile("NVIDIA H200")
    assert path.name.startswith("nvidia-h200-gfgen-")
    assert (found.device, found.num_ranks) == ("NVIDIA H200", 4)
    assert found.source == "gfgen profile --model qwen-image --ranks 4 --random-weights"
    assert [{item.spec.width for item in items} for items in NoPool.warmed] == [{512, 1024, 1536}]
    assert all(item.spec.prompt[-5:].isdigit() for item in NoPool.warmed[0])  # as long as those measured
    launched = profile("--random-weights", "--model", "qwen-image", "--no-graphs")
    assert launched.exit_code == 0, launched.output
    _, found = profile_store.find_profile("NVIDIA H200")
    assert found.source.endswith(" --random-weights --no-graphs")
    assert not NoPool.warmed


def test_the_built_in_model_is_measured_within_its_budget(monkeypatch, tmp_path):
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    calibration = {"alone_s": 0.05, "together_s": 0.055, "versions": profile_store.versions()}
    monkeypatch.setattr("gfgen.runtime.predict.scaling._measured", lambda: calibration)
    dry = profile("--ranks", 2, "--dry-run")
    assert dry.exit_code == 0, dry.output
    first, second = dry.output.splitlines()[:2]
    assert first == "shapes: shapes 128x128x1+cfg, shapes 128x128x17+cfg, shapes 128x128x33+cfg"
    seconds = float(second.partition("about ")[2].split()[0])
    unit = second.partition("about ")[2].split()[1]
    assert unit == "s" or seconds == 1.0, second


def test_rounds_that_do_not_fit_into_the_budget_are_left_out():
    jobs = [make_job("small", shape="small"), make_job("large", shape="large")]
    plan = profiling.plan_measurements(jobs, num_ranks=2)

    def kept(budget_s):
        found = profiling.within(
            plan, lambda entry: 10.0 if entry.job.shape == "large" else 1.0, budget_s=budget_s
        )
        return {(entry.job.shape, entry.round) for entry in found}, found

    assert kept(0.0)[0] == {("small", 1), ("large", 1)}
    shapes, found = kept(45.0)
    assert shapes == {("small", 1), ("large", 1), ("small", 2), ("small", 3)}
    assert [entry.job.shape for entry in found if entry.kind == "moving"] == ["small"]
    assert kept(1e6)[1] == [entry for entry in plan if (entry.kind, entry.job.shape) != ("moving", "large")]
