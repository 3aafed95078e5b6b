"""`gfgen bench workload --arrivals`: job files from three public formats of traces."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gfgen.bench.traces import parse_map, read_trace
from gfgen.cli.main import cli
from gfgen.errors import InputError

FOLDER = Path(__file__).parents[2] / "docs/examples/traces"
IMAGE = "qwen-image,1024x1024,slack=2"


def workload(*words: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "workload", *words], obj={"debug": False})


def jobs_of(found: Result) -> list[dict[str, object]]:
    assert found.exception is None, found.output
    return [json.loads(line) for line in found.stdout.splitlines()[1:]]


def test_a_trace_of_gf_dit_keeps_its_sizes_and_counts_what_is_not_mapped() -> None:
    maps = ("--map", "S=qwen-image,slack=1.5", "--map", "L=qwen-image")
    found = workload("--arrivals", f"{FOLDER}/gf-dit.json", *maps)
    short, long = jobs_of(found)
    assert (short["width"], short["steps"], short.get("arrival", 0.0), short["tag"]) == (512, 20, 0.0, "S")
    assert (long["width"], long["arrival"], "deadline" in long) == (1536, 0.751, False)
    assert 0.5 < float(str(short["deadline"])) < 5  # 1.5 times the job alone
    assert "left out, since no --map names them: 1 request: M (1)" in found.stderr


def test_only_a_file_of_this_command_is_replaced(tmp_path: Path) -> None:
    mine, made = tmp_path / "mine.jsonl", tmp_path / "made.jsonl"
    mine.write_text('{"prompt": "a"}\n')
    words = ("--arrivals", f"{FOLDER}/katz.json", "--map", f"*={IMAGE}", "-o")
    with pytest.raises(InputError, match=r"mine\.jsonl: exists and is no file of this command"):
        CliRunner().invoke(cli, ["bench", "workload", *words, str(mine)], obj={}, catch_exceptions=False)
    assert mine.read_text() == '{"prompt": "a"}\n'
    assert [workload(*words, str(made)).exit_code for _ in range(2)] == [0, 0]


def test_traces_of_katz_have_dates_and_need_a_size() -> None:
    maps = ("--map", f"sdxl-a={IMAGE}", "--map", "*=wan2.2-ti2v-5b,832x480x49")
    jobs = jobs_of(workload("--arrivals", f"{FOLDER}/katz.json", *maps))
    assert [job.get("arrival", 0.0) for job in jobs] == [0.0, 3.0, 9.0]
    assert [job["model"] for job in jobs] == ["qwen-image", "wan2.2-ti2v-5b", "qwen-image"]
    assert ["deadline" in job for job in jobs] == [True, False, True]
    with pytest.raises(InputError, match="request 1 has no 'width', so name a size"):
        read_trace(FOLDER / "katz.json", dict([parse_map("sdxl-a=qwen-image")]))


def test_alibabas_trace_has_steps_and_several_images() -> None:
    jobs = jobs_of(workload("--arrivals", f"{FOLDER}/genai.csv", "--map", f"*={IMAGE}"))
    assert [(job["id"], job["steps"]) for job in jobs] == [
        ("00001-0", 20), ("00001-1", 20), ("00002-0", 30), ("00003-0", 25)
    ]  # fmt: skip
    jobs = jobs_of(workload("--arrivals", f"{FOLDER}/genai.csv", "--map", f"101={IMAGE}", "--jobs", "2"))
    assert [job["id"] for job in jobs] == ["00001-0", "00001-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--map", "x"), "KIND=MODEL[,WxH[xF]][,slack=X] is accepted"),
        (("--map", "S=unknown,64x64"), "no workload is defined for it"),
        ((), "no request is mapped; there are S (1), L (1), M (1)"),
        (("--map", "S=wan2.2-ti2v-5b,10000x10000x81"), "gf-dit.json: "),
    ],
)
def test_maps_that_do_not_fit_are_told(words: tuple[str, ...], message: str) -> None:
    assert message in str(workload("--arrivals", f"{FOLDER}/gf-dit.json", *words).exception)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for text, message in [
        ("{}", "not a trace"), ("[]", "it has no requests"), ('[{"a": 1}]', "have none of"),
        ('[{"timestamp": "soon", "base_model_id": 1}]', "request 1: "),
    ]:  # fmt: skip
        path = tmp_path / "trace.json"
        path.write_text(text)
        found = workload("--arrivals", str(path), "--map", f"*={IMAGE}")
        assert message in str(found.exception), text
    assert "give one of short" in workload().output
