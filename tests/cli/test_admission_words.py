"""What is said of a job file before anything is admitted."""

import pytest

from gfgen.cli.admission import tell_of_unused
from gfgen.job import JobSpec

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
