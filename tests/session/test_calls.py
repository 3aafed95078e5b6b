"""Calls and texts are asked about once, by a child process that is a fake here."""

import json
from pathlib import Path

import pytest
from builders import geometry_of

from gfgen.errors import ModelError
from gfgen.job.spec import JobSpec
from gfgen.runtime.core.admission import ResolvedModel, admit
from gfgen.session import admission

LONG = "a fox " * 30


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The questions so far; a scheduler is refused, and texts are read up to their fifth character."""
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model_index.json").write_text("{}")
    found = []

    def ask_child(module, questions, what):
        assert json.loads(json.dumps(questions)) is not None
        found.append(questions)
        return [
            {
                "calls": {
                    key: ({"refused": "\nno\n"} if "LCM" in str(fields["scheduler"]) else {"unknown": ""})
                    | {"most_bytes": 100, "idle": ["base_shift", "max_shift"]}
                    for key, fields in each["calls"].items()
                },
                "texts": dict.fromkeys(each["texts"], 5),
                "unknown": {one: one == "狐" for one in each["characters"]},
            }
            for each in questions
        ]

    monkeypatch.setattr(admission, "ask_child", ask_child)
    return found


def judged(tmp_path, *specs, **options):
    geometry = geometry_of("FluxPipeline", transformer={}, scheduler={})
    model = ResolvedModel("flux", tmp_path / "model", geometry)
    specs = [
        JobSpec(**{"id": f"j{n}", "prompt": "a fox", "line": n} | spec) for n, spec in enumerate(specs, 1)
    ]
    jobs, problems = admit(specs, default_model="flux", find_model=lambda name: model)
    assert not problems
    return admission.try_calls(jobs, trusts_code=False, **options)


def test_characters_that_a_tokenizer_lacks_are_warned_about(asked, tmp_path):
    guided = {"negative_prompt": "狐狐", "true_cfg_scale": 2.0}
    kept, _ = judged(tmp_path, {"prompt": "a 狐 {fox}"}, guided, {"prompt": "a é"})
    assert asked[0][0]["characters"] == ["{", "}", "é", "狐"]
    lost = "characters of the {} have no effect on a text encoder whose tokenizer lacks them: 狐"
    found = [[str(each) for each in job.info.warnings if "characters" in each.kind] for job in kept]
    assert found == [[lost.format("prompt")], [lost.format("negative_prompt")], []]
    judged(tmp_path, {"prompt": "a 狐 {fox}"})
    assert len(asked) == 1


def test_a_call_is_asked_about_once_for_equal_arguments(asked, tmp_path):
    specs = [{"seed": 1}, {"seed": 2, "prompt": "an owl"}, {"steps": 3}]
    kept, problems = judged(tmp_path, *specs)
    assert (len(kept), problems) == (3, [])
    assert [len(each["calls"]) for each in asked[0]] == [2]
    judged(tmp_path, *specs)
    assert len(asked) == 1
    (tmp_path / "model/model_index.json").write_text("{ }")  # another checkpoint
    judged(tmp_path, *specs)
    assert len(asked) == 2


def test_a_refused_call_is_a_problem_of_each_of_its_jobs(asked, tmp_path):
    wrong = {"scheduler": {"class": "LCMScheduler"}}
    kept, problems = judged(tmp_path, wrong, {}, wrong)
    assert [job.job_id for job in kept] == ["j2"]
    assert [str(problem) for problem in problems] == [
        "line 1: FluxPipeline refuses it: no",
        "line 3: FluxPipeline refuses it: no",
    ]


def test_a_request_gets_kept_answers_and_asks_nobody(asked, tmp_path, caplog):
    wrong = {"scheduler": {"class": "LCMScheduler"}}
    kept, problems = judged(tmp_path, wrong, {}, {"prompt": LONG}, may_ask=False)
    assert (len(kept), problems, asked) == (3, [], [])
    judged(tmp_path, wrong, {"prompt": LONG})
    caplog.clear()
    with caplog.at_level("INFO"):
        kept, problems = judged(tmp_path, wrong, {}, {"prompt": LONG}, may_ask=False)
    assert [str(problem) for problem in problems] == ["line 1: FluxPipeline refuses it: no"]
    assert [len(job.info.warnings) for job in kept] == [0, 1]
    assert (len(asked), caplog.text) == (1, "")


def test_words_that_no_encoder_reads_are_a_warning(asked, tmp_path):
    (job, short), _ = judged(tmp_path, {"prompt": LONG}, {})
    (warned,) = job.info.warnings
    assert warned.kind == "the end of a long prompt has no effect, because no text encoder reads it"
    assert warned.detail == "58 words from 'a fox a fox a fox a fox ...'"
    assert short.info.warnings == ()


def test_other_prompts_are_read_as_the_first_ones(asked, tmp_path):
    others = {"prompt_2": "an owl at 狐", "max_sequence_length": 64}
    (job, second), _ = judged(tmp_path, {"args": others}, {"args": others | {"prompt_2": "a cat"}})
    assert len(asked[0][0]["calls"]) == 1
    assert [str(each) for each in job.info.warnings] == [
        "the end of a long prompt_2 has no effect, because no text encoder reads it: 3 words from 'l at 狐'",
        "characters of the prompt_2 have no effect on a text encoder whose tokenizer lacks them: 狐",
    ]
    assert second.info.warnings == ()


def test_a_prompt_without_effect_has_one_warning(asked, tmp_path):
    (job,), _ = judged(tmp_path, {"args": {"negative_prompt_2": LONG + "狐"}})
    assert [str(each) for each in job.info.warnings] == ["negative_prompt_2 has no effect without guidance"]


def test_options_without_effect_are_warned_about_if_the_job_gives_them(asked, tmp_path):
    flow = {"class": "FlowMatchEulerDiscreteScheduler", "base_shift": 0.1}
    (job,), _ = judged(tmp_path, {"scheduler": flow})
    assert [str(each) for each in job.info.warnings] == [
        "scheduler.base_shift has no effect on the steps of this job"
    ]


def test_a_new_text_that_surely_fits_is_not_asked_about(asked, tmp_path):
    judged(tmp_path, {})
    judged(tmp_path, {"prompt": "b" * 100})
    assert len(asked) == 1
    judged(tmp_path, {"prompt": "b" * 101})
    assert len(asked) == 2
    judged(tmp_path, {"prompt": "b" * 101})
    assert len(asked) == 2


def test_jobs_run_unchecked_where_the_child_fails(asked, tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise ModelError("calls cannot be checked: boom")

    monkeypatch.setattr(admission, "ask_child", fails)
    with caplog.at_level("INFO"):
        kept, problems = judged(tmp_path, {})
    assert (len(kept), problems) == (1, [])
    assert "flux: calls are not checked before they run: calls cannot be checked: boom" in caplog.text
    assert not Path(tmp_path / "cache/calls").exists()
