"""Lines of prompts with options of A1111 and kohya, and with LoRAs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gfgen.errors import JobError
from gfgen.job.inputs import A1111, KOHYA, LORAS, OF_WEIGHTS, PromptLines
from gfgen.job.reader import JobSource, ParsedJobs


def job(line: str, **options: Any) -> dict[str, Any]:
    return dict(PromptLines(**options).job(line))


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ('--prompt "a red fox" --steps 4', {"prompt": "a red fox", "steps": 4}),
        (
            '--prompt "a fox" --negative_prompt "dark, blurry" --seed 5 --cfg_scale 3.5 --width 64 '
            "--height 32",
            {"prompt": "a fox", "negative_prompt": "dark, blurry", "seed": 5, "guidance_scale": 3.5,
             "width": 64, "height": 32},
        ),
        ('--sampler_name "Euler a" --prompt fox', {"scheduler": "Euler a", "prompt": "fox"}),
        ("--prompt a red fox --sampler_name Euler a", {"scheduler": "Euler a", "prompt": "a red fox"}),
        ("--prompt fox --seed -1 --sd_model m", {"prompt": "fox", "seed": -1, "model": "m"}),
        ("--prompt fox --batch_size 2 --n_iter 3", {"prompt": "fox", "num_images": 6}),
        (
            "a red fox, quietly --n ugly, dark --w 64 --h 32 --d 7 --s 4 --l 2.5",
            {"prompt": "a red fox, quietly", "negative_prompt": "ugly, dark", "width": 64, "height": 32,
             "seed": 7, "steps": 4, "guidance_scale": 2.5},
        ),
        ("a fox --s x", {"prompt": "a fox", "steps": "x"}),
        ("a fox -- n", {"prompt": "a fox -- n"}),
        ("a fox --no-background", {"prompt": "a fox --no-background"}),
        ("--ar 16:9 a fox", {"prompt": "--ar 16:9 a fox"}),
        ("a <lora:ink:0.8> fox", {"prompt": "a <lora:ink:0.8> fox"}),
        ("a (red:1.3) fox", {"prompt": "a (red:1.3) fox"}),
    ],
)  # fmt: skip
def test_a_line_gives_the_job_that_it_means(line: str, fields: dict[str, Any]) -> None:
    found = job(line)
    assert found.pop("prompt_syntax", None) == ("auto" if "--prompt" in line else None)
    assert found == fields
    assert job(line, is_plain=True) == {"prompt": line}


def test_loras_are_files_of_the_folder() -> None:
    found = job("a <lora:ink:0.8> fox --s 4 <lora:old.safetensors>", loras=Path("/loras"))
    assert found == {
        "prompt": "a fox",
        "steps": 4,
        "lora": [
            {"path": "/loras/ink.safetensors", "scale": 0.8},
            {"path": "/loras/old.safetensors", "scale": 1},
        ],
    }


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a fox --s 4 --x 1", "--x = 1: is none of the options of kohya; --n, --w, --h, --d, --s, --l are"),
        ("--prompt fox --step 4", "--step = 4: is none of the options of A1111; did you mean --steps?"),
        ("a fox --s 4 --s 5", "--s = 5: is there twice"),
        ('--prompt "a fox', "its quotes are not closed"),
    ],
)  # fmt: skip
def test_unknown_options_beside_known_ones_are_problems(line: str, problem: str) -> None:
    with pytest.raises(JobError) as refused:
        job(line)
    assert problem in str(refused.value.problems[0])


def read(tmp_path: Path, text: str, **options: Any) -> ParsedJobs:
    path = tmp_path / "prompts.txt"
    path.write_text(text)
    return JobSource(files=(str(path),), **options).read()


def test_a_file_says_once_what_was_recognised(tmp_path: Path) -> None:
    text = "a fox --s 4\n# a comment\na <lora:ink:1> cat\n--prompt dog --steps 3\na bird --s 0\n"
    parsed = read(tmp_path, text, lora_folder=tmp_path)
    ((_, kind),) = parsed.kinds
    assert kind == f"one prompt per line with {KOHYA}, {LORAS}, {A1111}{OF_WEIGHTS}"
    assert [(spec.prompt, spec.steps) for spec in parsed.specs] == [("a fox", 4), ("dog", 3)]
    assert [problem.line for problem in parsed.problems] == [3, 5]


def test_plain_lines_stay_as_they_are(tmp_path: Path) -> None:
    parsed = read(tmp_path, "a fox --s 4\n", is_plain=True)
    assert parsed.specs[0].prompt == "a fox --s 4"
    assert parsed.kinds[0][1] == "one prompt per line"


def test_other_files_are_not_searched_for_options(tmp_path: Path) -> None:
    parsed = read(tmp_path, '{"prompt": "a fox --s 4 <lora:ink:1>"}\n', lora_folder=tmp_path)
    assert parsed.specs[0].prompt == "a fox --s 4 <lora:ink:1>"
