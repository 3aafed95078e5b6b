"""--graphs and --no-graphs: what is the default, what is told, what recorded commands say."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gfgen.cli.main import cli
from gfgen.runtime.core.devices import CPU, CUDA, Devices, Gpu
from gfgen.runtime.core.metrics import Summary
from gfgen.session.ranks import Ranks

GPUS = Devices(CUDA, 2, (Gpu("NVIDIA H200", 140 * 10**9),) * 2)


@pytest.mark.parametrize("devices", [GPUS, Devices(CPU, 2)], ids=["GPUs", "CPU ranks"])
@pytest.mark.parametrize(
    ("given", "has_graphs"), [((), True), (("--graphs",), True), (("--no-graphs",), False)], ids=str
)
def test_steps_are_graphs_unless_told_otherwise_and_what_has_no_effect_is_told_if_it_was_given(
    given: tuple[str, ...],
    has_graphs: bool,
    devices: Devices,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    seen = []

    def run_jobs(session: object, admitted: object, options: object, claims: object) -> Summary:
        seen.append(options)
        return Summary()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gfgen.session.ranks.choose_devices", lambda *_, **__: devices)
    monkeypatch.setattr("gfgen.cli.run.run_jobs", run_jobs)
    result = CliRunner().invoke(cli, ["run", "-", *given], input='{"prompt": "a fox"}', obj={"debug": False})
    assert result.exit_code == 0, result.output
    assert [options.ranks.has_graphs for options in seen] == [has_graphs]
    assert [f"{word} has no effect" in result.output for word in given] == [devices.kind == CPU] * len(given)
    assert given or "graphs" not in result.output


def test_offload_is_accepted_and_said_to_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gfgen.session.ranks.choose_devices", lambda *_, **__: GPUS)
    monkeypatch.setattr("gfgen.cli.run.run_jobs", lambda *_, **__: Summary())
    given = ["run", "-", "--offload"]
    result = CliRunner().invoke(cli, given, input='{"prompt": "a fox"}', obj={"debug": False})
    assert result.exit_code == 0, result.output
    assert result.output.count("--offload has no effect any more") == 1


def test_recorded_commands_say_so_where_steps_are_not_graphs() -> None:
    assert Ranks(GPUS).words == ()
    assert Ranks(GPUS, has_random_weights=True, has_graphs=False).words == ("--random-weights", "--no-graphs")
    shared = Ranks(Devices(CUDA, 2, GPUS.gpus[:1], ranks_per_gpu=2))
    assert shared.words == ("--ranks-per-gpu", "2")
    assert shared.description == "2 ranks on 1 x NVIDIA H200"
