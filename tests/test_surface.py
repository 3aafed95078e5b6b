"""What users and scripts rely on. A change here is a change for them: say so in CHANGELOG.md."""

import dataclasses
import inspect

import click

import gfgen
from gfgen import api, errors
from gfgen.cli.main import cli
from gfgen.graph import Stage
from gfgen.job.fields import FIELDS
from gfgen.runtime.core import events
from gfgen.runtime.files import journal
from gfgen.runtime.predict import profile_file
from gfgen.snapshot import JobView, Snapshot


def options_of(command: click.Command) -> list[str]:
    options = [p for p in command.params if isinstance(p, click.Option)]
    return sorted(name for option in options for name in (*option.opts, *option.secondary_opts))


def subcommand(*names: str) -> click.Command:
    command: click.Command = cli
    for name in names:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


def test_names_of_the_package_and_options_of_a_session():
    assert gfgen.__all__ == ["Session", "check", "errors", "generate", "plan"]
    assert api._OPTIONS == (
        "model",
        "gpus",
        "policy",
        "output_dir",
        "ranks",
        "device",
        "ranks_per_gpu",
        "transport",
        "link",
        "memory",
        "random_weights",
        "vae_dtype",
        "graphs",
        "trust_remote_code",
        "compile",
        "precision",
        "attention",
    )
    assert list(vars(api.Result)["__annotations__"]) == [
        "job",
        "path",
        "error",
        "seconds",
        "contents",
        "suffix",
    ]


def test_commands():
    assert cli.list_commands(click.Context(cli)) == [
        "run",
        "check",
        "serve",
        "status",
        "top",
        "cancel",
        "submit",
        "profile",
        "simulate",
        "plan",
        "policies",
        "models",
        "report",
        "plot",
        "config",
        "doctor",
        "cache",
        "bench",
    ]


def test_options_of_run():
    assert options_of(subcommand("run")) == [
        "--again",
        "--attention",
        "--column",
        "--compile",
        "--device",
        "--dry-run",
        "--failed",
        "--force",
        "--format",
        "--frames",
        "--gpus",
        "--grace",
        "--graphs",
        "--hook-timeout",
        "--keep-if",
        "--limit",
        "--link",
        "--log-file",
        "--log-json",
        "--lookahead",
        "--lora",
        "--lora-dir",
        "--max-step-time",
        "--memory",
        "--model",
        "--negative-prompt",
        "--no-graphs",
        "--num-images",
        "--offload",
        "--on-done",
        "--on-file",
        "--only",
        "--output",
        "--output-name",
        "--overwrite",
        "--plain",
        "--policy",
        "--precision",
        "--prompt",
        "--prompt-syntax",
        "--quiet",
        "--random-weights",
        "--ranks",
        "--ranks-per-gpu",
        "--ray",
        "--ray-nodes",
        "--ray-resources",
        "--ray-scale",
        "--retries",
        "--seed",
        "--set",
        "--shard-size",
        "--shards",
        "--shared",
        "--size",
        "--skip-invalid",
        "--state",
        "--steps",
        "--tag",
        "--trace",
        "--transport",
        "--trust-remote-code",
        "--until",
        "--vae-dtype",
        "--vary",
        "--verbose",
        "--watch",
        "-n",
        "-o",
        "-p",
        "-q",
        "-v",
    ]


def test_check_has_the_options_of_run_that_decide_what_it_does():
    left_out = {
        "--again",
        "--dry-run",
        "--hook-timeout",
        "--keep-if",
        "--on-done",
        "--on-file",
        "--retries",
        "--verbose",
        "-v",
        "--grace",
        "--log-file",
        "--log-json",
        "--lookahead",
        "--quiet",
        "-q",
        "--trace",
        "--watch",
        "--ray",
        "--ray-nodes",
        "--ray-resources",
        "--ray-scale",
        "--shared",
    }
    shared = set(options_of(subcommand("run"))) - left_out
    assert options_of(subcommand("check")) == sorted(shared | {"--json"})


JOBS = [
    "--column",
    "--format",
    "--frames",
    "--limit",
    "--lora",
    "--lora-dir",
    "--negative-prompt",
    "--output-name",
    "--plain",
    "--only",
    "--prompt",
    "--prompt-syntax",
    "--seed",
    "--set",
    "--size",
    "--steps",
    "--tag",
    "--vary",
    "-p",
    "--num-images",
    "-n",
]
"""Of all commands that take jobs."""


def test_options_of_serve():
    assert options_of(subcommand("serve")) == [
        "--a1111",
        "--access-log",
        "--allow-origin",
        "--api-key",
        "--attention",
        "--compile",
        "--device",
        "--gpus",
        "--grace",
        "--graphs",
        "--host",
        "--keep",
        "--keep-bytes",
        "--key-file",
        "--link",
        "--log-file",
        "--log-json",
        "--lookahead",
        "--lora",
        "--max-body",
        "--max-frames",
        "--max-open",
        "--max-pixels",
        "--max-step-time",
        "--max-steps",
        "--max-streams",
        "--memory",
        "--model",
        "--no-graphs",
        "--no-key",
        "--offload",
        "--output",
        "--policy",
        "--port",
        "--precision",
        "--public-url",
        "--quiet",
        "--random-weights",
        "--ranks",
        "--ranks-per-gpu",
        "--ray",
        "--ray-nodes",
        "--ray-resources",
        "--ray-scale",
        "--root-path",
        "--served-model-name",
        "--shared",
        "--strict",
        "--transport",
        "--trust-remote-code",
        "--umask",
        "--vae-dtype",
        "--verbose",
        "--webhook",
        "--webhook-host",
        "--webhook-secret",
        "-o",
        "-q",
        "-v",
    ]


def test_options_of_the_other_commands():
    assert options_of(subcommand("profile")) == [
        "--attention",
        "--device",
        "--dry-run",
        "--gpus",
        "--graphs",
        "--link",
        "--model",
        "--no-graphs",
        "--output",
        "--precision",
        "--random-weights",
        "--ranks",
        "--size",
        "--transport",
        "--vae-dtype",
        "-o",
    ]
    assert options_of(subcommand("simulate")) == sorted(
        [
            "--attention",
            "--json",
            "--memory",
            "--model",
            "--nodes",
            "--output",
            "--policy",
            "--precision",
            "--profile",
            "--ranks",
            "-o",
            *JOBS,
        ]
    )
    assert options_of(subcommand("plan")) == sorted(
        [
            "--at",
            "--attention",
            "--by",
            "--json",
            "--memory",
            "--model",
            "--nodes",
            "--policy",
            "--precision",
            "--profile",
            "--ranks",
            *JOBS,
        ]
    )
    assert options_of(subcommand("report")) == ["--html", "--json", "--output", "--sheet", "-o"]
    assert options_of(subcommand("config")) == ["--json"]
    assert options_of(subcommand("status")) == options_of(subcommand("top")) == ["--api-key", "--json"]
    assert options_of(subcommand("cancel")) == ["--api-key", "--json", "--target"]
    assert options_of(subcommand("submit")) == sorted(["--api-key", "--json", "--target", *JOBS])
    assert options_of(subcommand("plot")) == ["--output", "--title", "-o"]
    assert options_of(subcommand("models")) == ["--pipelines"]
    assert options_of(subcommand("models", "make-tiny")) == []
    own = ["--device", "--minutes", "--output", "--random-weights", "--ranks", "-o"]
    assert options_of(subcommand("models", "prove")) == own
    assert options_of(subcommand("bench", "workload")) == [
        "--arrivals",
        "--deadlines-from",
        "--jobs",
        "--load",
        "--map",
        "--minutes",
        "--model",
        "--output",
        "--profile",
        "--ranks",
        "--seed",
        "--steps",
        "--timeout",
        "-o",
    ]
    assert options_of(subcommand("bench", "paper")) == [
        "--check",
        "--deadlines-from",
        "--device",
        "--figure",
        "--gpus",
        "--graphs",
        "--jobs",
        "--link",
        "--load",
        "--minutes",
        "--model",
        "--no-graphs",
        "--output",
        "--policy",
        "--profile",
        "--random-weights",
        "--ranks",
        "--ranks-per-gpu",
        "--seeds",
        "--simulate",
        "--steps",
        "--transport",
        "--vae-dtype",
        "-o",
    ]
    assert options_of(subcommand("bench", "compare")) == [
        "--against",
        "--deadlines-from",
        "--device",
        "--gpus",
        "--graphs",
        "--jobs",
        "--link",
        "--load",
        "--model",
        "--no-graphs",
        "--output",
        "--outside",
        "--policy",
        "--profile",
        "--random-weights",
        "--ranks",
        "--ranks-per-gpu",
        "--seed",
        "--simulate",
        "--slack",
        "--steps",
        "--timeout",
        "--transport",
        "--vae-dtype",
        "--workload",
        "-o",
    ]


def test_fields_of_a_job():
    assert list(FIELDS) == [
        "id",
        "prompt",
        "negative_prompt",
        "prompt_syntax",
        "model",
        "size",
        "width",
        "height",
        "frames",
        "fps",
        "steps",
        "guidance_scale",
        "guidance_scale_2",
        "boundary_ratio",
        "flow_shift",
        "true_cfg_scale",
        "seed",
        "image",
        "background",
        "args",
        "files",
        "scheduler",
        "lora",
        "sigmas",
        "recipe",
        "reuse",
        "upscale",
        "upscale_strength",
        "upscale_steps",
        "deadline",
        "arrival",
        "timeout",
        "priority",
        "tag",
        "output",
        "format",
        "quality",
    ]


def test_exit_codes():
    codes = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.GfgenError)
    }
    assert {name for name, code in codes.items() if code == 2} == {
        "InputError",
        "JobFileError",
        "JobError",
        "ModelError",
        "PolicyError",
        "LayoutError",
    }
    assert codes["LockedError"] == 75
    assert errors.InterruptedRunError("", signal_number=2).exit_code == 130
    assert errors.InterruptedRunError("", signal_number=15).exit_code == 143


def test_events_of_the_journal():
    assert journal.VERSION == 2
    assert events.RankTimes._fields == (
        "rank",
        "started_s",
        "ended_s",
        "waited_s",
        "moved_s",
        "idle_s",
        "peak_bytes",
        "is_first_use",
        "prepared_s",
    )
    assert {
        kind.__name__: [field.name for field in dataclasses.fields(kind)]
        for kind in vars(events).values()
        if inspect.isclass(kind) and issubclass(kind, events.Event) and kind is not events.Event
    } == {
        "JobArrived": ["time_s", "job_id", "spec_hash", "seed"],
        "JobTimedOut": ["time_s", "job_id"],
        "JobCancelled": ["time_s", "job_id"],
        "PriorityChanged": ["time_s", "job_id", "priority"],
        "RankReady": ["time_s", "rank", "incarnation", "startup_s"],
        "RankLost": ["time_s", "rank", "incarnation", "reason", "is_retired"],
        "TaskDone": ["time_s", "dispatch", "times"],
        "TaskFailed": ["time_s", "dispatch", "reason", "void", "lost"],
        "OutputWritten": [
            *("time_s", "job_id", "path", "size_bytes", "write_s", "writer", "sha256", "files", "made"),
        ],
        "OutputFailed": ["time_s", "job_id", "reason"],
        "FramesLost": ["time_s", "job_id", "reason", "lost"],
        "PolicyChanged": ["time_s", "policy", "reason"],
        "ModelsChanged": ["time_s", "models", "load_s", "reason"],
        "RankLoaded": ["time_s", "rank", "load_s", "copied"],
        "LoadFailed": ["time_s", "models", "reason"],
        "SpaceLeft": ["time_s", "free_bytes"],
        "StopRequested": ["time_s", "signal_number"],
        "ClosingTime": ["time_s"],
        "GraceOver": ["time_s"],
        "Wakeup": ["time_s"],
    }


def test_fields_of_a_profile():
    assert profile_file.FORMAT == 1
    assert [field.name for field in dataclasses.fields(profile_file.Profile)] == [
        "device",
        "date",
        "source",
        "num_ranks",
        "rows",
        "move_s",
        "move_bytes_per_s",
        "write_s",
        "dispatch_s",
        "versions",
        "calibration_s",
        "read_bytes_per_s",
        "peaks",
    ]
    assert [field.name for field in dataclasses.fields(profile_file.ProfileRow)] == [
        "model",
        "shape",
        "stage",
        "degrees",
        "seconds",
        "spread_s",
        "num_samples",
        "loaded_s",
        "flops",
        "state_bytes",
        "write_s",
        "basis",
    ]


def test_the_stages_are_what_journals_profiles_and_traces_call_them():
    assert list(Stage) == ["encode", "prepare", "denoise", "reuse", "refine", "decode"]


def test_what_a_policy_sees():
    assert [field.name for field in dataclasses.fields(Snapshot)] == [
        "now_s",
        "open",
        "busy",
        "running",
        "ranks",
        "max_degree",
        "costs",
        "orders",
        "recent",
        "parked",
        "load_s",
        "writers_free_s",
        "num_unseen",
        "unseen_s",
        "expects_more",
        "shares_cores",
        "foresee",
        "served_s",
        "kept",
    ]
    assert [field.name for field in dataclasses.fields(JobView)] == [
        "job_id",
        "tag",
        "model",
        "arrival_s",
        "deadline_s",
        "precedence",
        "next_task",
        "num_tasks",
        "remaining_s",
        "last_layout",
        "uses_cfg",
        "max_sequence_degree",
        "max_ulysses_degree",
        "shape",
        "max_decode_degree",
        "arrangement",
        "patches",
        "switch_s",
        "owner",
        "num_approximate",
        "num_approximable",
        "saving_s",
        "may_approximate",
        "write_s",
        "num_refined",
        "due_s",
    ]
