"""Lines of prompts with options of A1111 and kohya, and with LoRAs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gfgen.errors import JobError
from gfgen.job.inputs import A1111, KOHYA, OF_WEIGHTS, PromptLines
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
    text = "a fox --s 4\n# a comment\n--prompt dog --steps 3\na bird --s 0\n"
    parsed = read(tmp_path, text)
    ((_, kind),) = parsed.kinds
    assert kind == f"one prompt per line with {KOHYA}, {A1111}{OF_WEIGHTS}"
    assert [(spec.prompt, spec.steps) for spec in parsed.specs] == [("a fox", 4), ("dog", 3)]
    assert [problem.line for problem in parsed.problems] == [4]


def test_plain_lines_stay_as_they_are(tmp_path: Path) -> None:
    parsed = read(tmp_path, "a fox --s 4\n", is_plain=True)
    assert parsed.specs[0].prompt == "a fox --s 4"
    assert parsed.kinds[0][1] == "one prompt per line"


def test_other_files_are_not_searched_for_options(tmp_path: Path) -> None:
    assert read(tmp_path, '{"prompt": "a fox --s 4"}\n').specs[0].prompt == "a fox --s 4"


PROMPT = "a <lora:ink:0.8> fox <lora:old.safetensors>"


@pytest.mark.parametrize(
    ("text", "own"),
    [
        (PROMPT, []),
        (f"{PROMPT} --s 4", []),
        (json.dumps({"prompt": PROMPT, "lora": "own.safetensors"}), ["own.safetensors"]),
        (json.dumps([{"prompt": PROMPT}]), []),
        (f"prompt,steps\n{PROMPT},4", []),
        (None, []),
    ],
)
def test_loras_that_prompts_name_are_files_of_the_folder(
    tmp_path: Path, text: str | None, own: list[str]
) -> None:
    for name in ("ink", "old", "own"):
        save_file({"a.lora_A.weight": np.ones((2, 3), np.float32)}, tmp_path / f"{name}.safetensors")
    usual = {"lora": [{"path": "usual.safetensors"}]}
    if text is None:
        parsed = JobSource(prompts=(PROMPT,), lora_folder=tmp_path, fallbacks=usual).read()
    else:
        parsed = read(tmp_path, text, lora_folder=tmp_path, fallbacks=usual)
    (spec,) = parsed.specs
    assert (spec.prompt, parsed.problems) == ("a fox", ())
    expected = [*own, "ink.safetensors", "old.safetensors"]
    assert spec.lora_files == [str(tmp_path / name) for name in expected]
    assert [each["scale"] for each in spec.lora or ()][-2:] == [0.8, 1]
