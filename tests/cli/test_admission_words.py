"""What is said of a job file before anything is admitted."""

import pytest

from gfgen.errors import ModelError, Warned
from gfgen.job.reader import JobSource
from gfgen.job.spec import JobSpec
from gfgen.models.families.precision import Precision
from gfgen.runtime.control.state import State
from gfgen.runtime.core.admission import admit, tell_of_warnings
from gfgen.runtime.core.events import Clock
from gfgen.runtime.files.resume import RunStart
from gfgen.runtime.predict.cost import CostModel
from gfgen.session.admission import Models, find_weightless, parse, tell_of_unused

NAMED = JobSpec(id="a", prompt="a fox", model="qwen-image")
NAMELESS = JobSpec(id="b", prompt="a fox")


@pytest.mark.parametrize(
    ("model", "jobs", "is_told"),
    [
        ("weights/Qwen-Image", [NAMED], True),
        ("weights/Qwen-Image", [NAMED, NAMELESS], False),
        ("qwen-image", [NAMED], False),
        ("shapes", [NAMED], False),
        ("weights/Qwen-Image", [], False),
    ],
)
def test_a_model_that_no_job_takes_is_told_to_have_no_effect(caplog, model, jobs, is_told):
    tell_of_unused(model, jobs)
    assert [record.getMessage() for record in caplog.records] == [
        f"--model {model} has no effect: every job names its own"
    ] * is_told


@pytest.mark.parametrize(
    ("asked", "told"), [("fp8", None), ("qwen-image=fp8", None), ("wan2.2-ti2v-5b=fp8", "wan2.2-ti2v-5b=fp8")]
)
def test_a_precision_for_a_model_of_no_job_is_told_to_have_no_effect(caplog, asked, told):
    Precision((asked,)).tell_of_other_models([find_weightless("qwen-image").checkpoint])
    expected = f"--precision {told} has no effect: no job uses this model"
    assert [record.getMessage() for record in caplog.records] == [expected] * (told is not None)


def test_plain_is_told_to_have_no_effect_without_lines_of_prompts(caplog, tmp_path):
    for name, text in (("a.jsonl", '{"prompt": "a fox"}\n'), ("b.txt", "a fox\n")):
        (tmp_path / name).write_text(text)
        parse(JobSource(files=(str(tmp_path / name),), is_plain=True), "shapes")
    assert [record.getMessage() for record in caplog.records] == [
        "--plain has no effect: no job file has a prompt per line"
    ]


def jobs_of(*specs):
    admitted, problems = admit(specs, default_model="shapes", find_model=find_weightless)
    assert not problems
    return admitted


def test_a_kind_of_warning_is_told_once_with_its_lines_their_number_and_details(caplog):
    small = {"prompt": "a fox", "width": 100, "height": 100}
    specs = [JobSpec(id=f"small-{line}", line=line, **small) for line in (1, 2, 5)]
    specs.append(JobSpec(id="short", prompt="a fox", frames=2, line=3))
    specs.append(JobSpec(id="exact", prompt="a fox", width=96, height=96, frames=9, line=4))
    other = Warned("is left out")
    jobs = [job.warned(other) if job.job_id == "exact" else job for job in jobs_of(*specs)]
    tell_of_warnings((job.info.spec, job.info.warnings) for job in jobs)
    assert [record.getMessage() for record in caplog.records] == [
        "lines 1, 2, 5, 3 (4 jobs): rounded by shapes: 100x100 -> 96x96; 2 -> 1 frames",
        "line 4: is left out",
    ]


def test_details_of_a_kind_that_are_told_are_bounded(caplog):
    sizes = [17 + 16 * number for number in range(12)]
    jobs = jobs_of(*[JobSpec(id=f"a{n}", prompt="x", width=n, height=64) for n in sizes])
    tell_of_warnings((job.info.spec, job.info.warnings) for job in jobs)
    assert [record.getMessage() for record in caplog.records] == [
        "job a17 (12 jobs): rounded by shapes: 17x64 -> 16x64; 33x64 -> 32x64; 49x64 -> 48x64 and 9 more"
    ]


def test_warnings_of_admission_are_those_of_the_running_job():
    (job,) = jobs_of(JobSpec(id="a", prompt="a fox", width=100, height=100, frames=2))
    state = State([job], RunStart(num_ranks=1), clock=Clock(virtual=True), costs=CostModel())
    assert state.jobs.records["a"].trouble.warnings == ["rounded by shapes: 100x100 -> 96x96, 2 -> 1 frames"]


def test_a_model_that_is_not_loaded_is_refused_without_looking_for_it(monkeypatch):
    monkeypatch.setattr(Models, "look_up", lambda *_: pytest.fail("looked up"))
    models = Models(default="shapes", loaded=frozenset())
    with pytest.raises(ModelError, match=r"model 'qwen-image' is not loaded; stop the run"):
        models.find("qwen-image")
