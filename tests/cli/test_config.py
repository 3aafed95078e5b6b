"""Defaults from gfgen.toml, the user's file and GFGEN_ variables; `gfgen config`; --gpus."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gfgen.cli import run as run_module
from gfgen.cli.main import cli, main
from gfgen.cli.options import JobOptions, Named, NamedPath, RankOptions, given_in, group, option, takes
from gfgen.errors import InputError
from gfgen.runtime.core.devices import CPU, CUDA, Devices, Gpu
from gfgen.runtime.core.metrics import Summary


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of-user"))
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a red circle", "tag": "S"}\n')
    return tmp_path


@pytest.fixture
def runs(monkeypatch):
    """The options of each run, which does nothing."""
    given: list[Any] = []

    def run_jobs(session, jobs, options, claims):
        given.append(options)
        return Summary()

    monkeypatch.setattr(run_module, "run_jobs", run_jobs)
    return given


def gfgen(capsys, *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def of_user(text: str) -> None:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "gfgen" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_nearer_settings_count_before_others(capsys, folder, runs, monkeypatch):
    def policy(*arguments: str) -> str:
        code, _, err = gfgen(capsys, "run", "jobs.jsonl", "--device", "cpu", *arguments)
        assert code == 0, err
        name: str = runs.pop().policy.name
        return name

    of_user('policy = "fcfs"\n')
    assert policy() == "fcfs"
    of_user('policy = "fcfs"\n[run]\npolicy = "edf"\n')
    assert policy() == "edf"
    (folder / "gfgen.toml").write_text('policy = "srtf"\n')
    assert policy() == "srtf"
    monkeypatch.setenv("GFGEN_POLICY", "makespan")
    assert policy() == "makespan"
    monkeypatch.setenv("GFGEN_RUN_POLICY", "legacy")
    assert policy() == "legacy"
    assert policy("--policy", "fcfs") == "fcfs"


def test_check_has_the_options_of_run_unless_it_has_its_own(capsys, folder, monkeypatch):
    def output(*arguments: str) -> str:
        code, out, err = gfgen(capsys, "check", "jobs.jsonl", "--json", "--device", "cpu", *arguments)
        assert code == 0, err
        name: str = json.loads(out)["output"]
        return name

    of_user('output = "of-all"\n[run]\noutput = "of-user"\n')
    assert output() == "of-user"
    (folder / "gfgen.toml").write_text('\ufeff[run]\noutput = "of-run"\ngrace = "5s"\n')
    assert output() == "of-run"
    (folder / "gfgen.toml").write_text('[run]\noutput = "of-run"\n[check]\noutput = "of-check"\n')
    assert output() == "of-check"
    monkeypatch.setenv("GFGEN_RUN_OUTPUT", "of-variable")
    assert output() == "of-variable"
    assert (
        "--output of-variable  (from GFGEN_RUN_OUTPUT)" in gfgen(capsys, "config")[1].split("gfgen check")[1]
    )


def test_numbers_flags_lists_and_names_with_dashes_are_read(capsys, folder, runs):
    (folder / "gfgen.toml").write_text(
        'ranks = 3\ndevice = "cpu"\n[run]\nlog-json = true\ngrace = "5s"\ntag = "S"\n'
        'set = ["steps=4", "seed=1"]\ngraphs = false\n'
    )
    code, _, err = gfgen(capsys, "run", "jobs.jsonl")
    assert code == 0, err
    (options,) = runs
    assert (options.ranks.num_ranks, options.logs.log_json, options.grace_s) == (3, True, 5)
    assert not options.ranks.has_graphs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[run]\npolcy = "srtf"', "gfgen.toml: [run] polcy: no such option; did you mean policy?"),
        ("policy = ", "gfgen.toml: not TOML"),
        ('run = "x"', "gfgen.toml: run: write a table, such as [run]"),
        ('policy = "strf"', "did you mean srtf?"),
        ('ranks = "many"', "'many' is not a valid integer"),
    ],
)
def test_a_faulty_file_says_what_is_wrong_before_anything_starts(capsys, folder, runs, text, message):
    (folder / "gfgen.toml").write_text(text)
    for command in ("run", "check"):
        code, _, err = gfgen(capsys, command, "jobs.jsonl")
        assert (code, runs) == (2, [])
        assert message in err


def test_a_pipe_is_not_waited_for(capsys, folder, runs):
    os.mkfifo(folder / "gfgen.toml")
    assert gfgen(capsys, "run", "jobs.jsonl")[::2] == (
        2,
        "gfgen: gfgen.toml: a named pipe, which might never end; write a file\n",
    )


def test_a_link_to_nowhere_is_no_missing_file(capsys, folder, runs):
    (folder / "gfgen.toml").symlink_to("unmounted/gfgen.toml")
    assert gfgen(capsys, "run", "jobs.jsonl")[::2] == (
        2,
        "gfgen: gfgen.toml: cannot be read (No such file or directory)\n",
    )


def test_subcommands_have_tables_in_the_table_of_their_group(capsys, folder):
    (folder / "gfgen.toml").write_text("[bench.workload]\njobs = 3\n")
    code, out, err = gfgen(capsys, "bench", "workload", "short")
    assert code == 0, err
    assert len(out.splitlines()) == 4


def test_config_shows_each_setting_and_where_it_comes_from(capsys, folder, monkeypatch):
    of_user('policy = "fcfs"\n')
    (folder / "gfgen.toml").write_text("[run]\nranks = 2\n")
    monkeypatch.setenv("GFGEN_SERVE_PORT", "4000")
    monkeypatch.setenv("GFGEN_API_KEY", "a-very-secret-key")
    code, out, _ = gfgen(capsys, "config")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "gfgen.toml: read"
    assert "  --ranks 2  (from gfgen.toml)" in lines
    assert any(line.startswith("  --policy fcfs  (from ") and line.endswith("config.toml)") for line in lines)
    assert "  --port 4000  (from GFGEN_SERVE_PORT)" in lines
    assert "secret" not in out
    code, out, _ = gfgen(capsys, "config", "--json")
    assert json.loads(out)["commands"]["run"]["ranks"] == {"value": 2, "from": "gfgen.toml"}


def test_config_finds_names_that_no_command_has(capsys, folder):
    (folder / "gfgen.toml").write_text('polcy = "srtf"\n')
    code, _, err = gfgen(capsys, "config")
    assert code == 2
    assert "gfgen.toml: polcy: no such option; did you mean policy?" in err
    assert gfgen(capsys, "policies")[0] == 0


def test_config_names_mistyped_variables(capsys, folder, monkeypatch):
    monkeypatch.setenv("GFGEN_POLCY", "edf")
    code, _, err = gfgen(capsys, "config")
    assert code == 2
    assert err == "gfgen: GFGEN_POLCY: no such option; did you mean GFGEN_POLICY?\n"


def test_config_knows_the_variables_of_caches(capsys, folder, monkeypatch):
    for name in ("GFGEN_CACHE", "GFGEN_PREPARED"):
        monkeypatch.setenv(name, str(folder))
    assert gfgen(capsys, "config")[0] == 0


@pytest.mark.parametrize(("name", "is_told"), [("GFGEN_RUN_STEP", True), ("GFGEN_RUN_STEPS", False)])
def test_a_run_tells_of_a_mistyped_variable(capsys, folder, monkeypatch, name, is_told):
    monkeypatch.setenv(name, "3")
    _, _, err = gfgen(capsys, "check", "-p", "a fox", "--device", "cpu")
    told = "GFGEN_RUN_STEP: no such option; did you mean GFGEN_RUN_STEPS?"
    assert (told in err) == is_told


@pytest.mark.parametrize(
    ("arguments", "hint"), [(["rnu"], "Did you mean 'run'?"), (["jobs.jsonl"], "'gfgen run jobs.jsonl'")]
)
def test_a_mistyped_command_gets_a_suggestion(capsys, folder, arguments, hint):
    code, _, err = gfgen(capsys, *arguments)
    assert code == 2
    assert hint in err


# GPUs -------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """What CUDA_VISIBLE_DEVICES is when GPUs are looked for."""
    found: list[str | None] = []

    def choose(*_: object, **__: object) -> Devices:
        found.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return Devices(CUDA, 1, (Gpu("NVIDIA H200", 140 * 10**9),))

    monkeypatch.setattr("gfgen.session.ranks.choose_devices", choose)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return found


def test_only_the_named_gpus_are_visible(seen, monkeypatch):
    RankOptions(gpus="0, 2").found()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")
    RankOptions(gpus="2,0").found()
    assert seen == ["0,2", "GPU-7,4"]


@pytest.mark.parametrize("gpus", ["", "a", "0,0", "-1", "0,", "3"])
def test_other_lists_of_gpus_are_refused(seen, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(InputError, match="--gpus"):
        RankOptions(gpus=gpus).found()


def test_gpus_without_a_usable_one_are_an_error(monkeypatch):
    monkeypatch.setattr("gfgen.session.ranks.choose_devices", lambda *_, **__: Devices(CPU, 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        InputError, match=r"--gpus 0: no usable GPU \('gfgen doctor' says why\); leave it out"
    ):
        RankOptions(gpus="0").found()


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/fox")
    for kind in (NamedPath(), NamedPath(dir_okay=False)):
        assert kind.convert("~/a b", None, None) == Path("/home/fox/a b")
    assert Named("x").convert("~/a.jsonl", None, None) == "/home/fox/a.jsonl"
    assert Named("x").convert("a~b", None, None) == "a~b"
    found = [
        param for command in commands(cli) for param in command.params if isinstance(param.type, click.Path)
    ]
    assert [param.name for param in found if not isinstance(param.type, NamedPath)] == []


def commands(group: click.Command) -> Iterator[click.Command]:
    yield group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            yield from commands(group.get_command(context, name) or click.Command(name))


def test_an_option_that_was_given_is_named_as_on_the_command_line():
    assert given_in(JobOptions(jobs=("a.jsonl",))) is None
    assert given_in(JobOptions(num_images="2")) == "--num-images"
    assert given_in(JobOptions(loras=("a",))) == "--lora"
    assert given_in(JobOptions(loras=("a",)), "vary", "limit") is None


def test_a_command_takes_some_options_of_a_dataclass_and_others_of_its_own():
    @click.command()
    @takes(ranks=group(RankOptions, without=("gpus", "memory"), ranks=option("How many.", default=3)))
    @click.option("--name")
    def command(ranks, *, name):
        click.echo(f"{ranks.ranks} {ranks.device} {ranks.memory} {name}")

    assert CliRunner().invoke(command, ["--device", "cpu", "--name", "a"]).output == "3 cpu None a\n"
    assert "No such option '--gpus'" in CliRunner().invoke(command, ["--gpus", "0"]).output


def test_recipes_of_files_have_names_in_jobs_and_in_the_list(capsys, folder):
    of_user("[recipes.mine.wan]\nsteps = 9\n[recipes.theirs.wan]\nsteps = 3\n")
    (folder / "gfgen.toml").write_text("[recipes.mine.wan]\nsteps = 2\n")
    (folder / "jobs.jsonl").write_text('{"prompt": "a fox", "recipe": "mine"}\n')
    code, out, _ = gfgen(capsys, "check", "jobs.jsonl", "--json")
    assert (code, json.loads(out)["problems"]) == (0, [])
    _, out, _ = gfgen(capsys, "models")
    assert {"recipe mine: wan", "recipe theirs: wan"} <= set(out.splitlines())
    assert gfgen(capsys, "config")[0] == 0
    (folder / "gfgen.toml").write_text("recipes = 3\n")
    code, _, err = gfgen(capsys, "check", "jobs.jsonl")
    assert code == 2
    assert "gfgen.toml: recipes: write tables, such as [recipes.mine.wan]" in err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[recipes.mine]\nsteps = 3",
            "mine: the family of models is missing; write a table such as [recipes.mine.wan]",
        ),
        ("[recipes.mine]", "mine: the family of models is missing; write a table such as [recipes.mine.wan]"),
        ("[recipes]\nmine = 4", "mine: the family of models is missing"),
        ("[recipes.mine.wan]\nsteps = 0", "mine: steps = 0: a whole number from 1 to 1,000"),
        ("[recipes.mine.wan]\nstpes = 3", "mine: stpes is not one of steps, "),
    ],
)
@pytest.mark.parametrize("command", [["check", "jobs.jsonl"], ["models"], ["serve", "--device", "cpu"]])
def test_what_is_wrong_with_a_recipe_names_its_file(capsys, folder, text, problem, command):
    (folder / "gfgen.toml").write_text(f"{text}\n")
    (folder / "jobs.jsonl").write_text('{"prompt": "a fox", "recipe": "mine"}\n')
    code, _, err = gfgen(capsys, *command)
    assert code == 2
    assert f"gfgen.toml: recipes.{problem}" in err


def test_short_options_stand_for_fields_of_all_jobs():
    given = JobOptions(prompts=("a fox",), negative_prompt="a=b", output_name="{id}.webp", format="webp")
    assert given.source().overrides == {"negative_prompt": "a=b", "output": "{id}.webp", "format": "webp"}
    one, two = (JobOptions(prompts=names, output_name="a.webp") for names in (("fox",), ("fox", "owl")))
    assert [spec.output for spec in one.source().read().specs] == ["a.webp"]
    (problem,) = two.source().read().problems
    assert "already writes a.webp" in str(problem)
