"""What `python -m benchmarks.serve` prints."""

from __future__ import annotations

import pytest

from benchmarks.serve import ServingReport, job_of_run, prompt_of, table_of


def test_what_http_adds_is_the_difference_of_medians():
    report = ServingReport(
        num_ranks=2,
        run_s=[0.100, 0.110, 0.900],
        http_s=[0.111, 0.113, 0.800],
        post_s=[0.006] * 199 + [0.020],
        post_cpu_s=0.0035,
        open_post_s=[0.005] * 98 + [0.070] * 2,
        file_s=0.020,
        requests_s=0.043,
        status_per_s=1234.5,
        front_cpu_s=0.25,
        turn_s=0.012,
        burst_turn_s=0.034,
    )
    assert report.added_s == pytest.approx(0.003)
    text = "\n".join(table_of(report))
    assert "| added by HTTP | under 5 ms and the transfer | +3.0 ms |" in text
    assert "busy ranks: median | at most 8 ms | 6.0 ms |" in text
    assert "P99 | at most 30 ms | 6.0 ms |" in text
    assert "with its events | | 3.5 ms of CPU |" in text
    assert (
        "| POST with 24 open jobs: median | | 5.0 ms |\n| the same: P99 | at most 60 ms | 70.0 ms |" in text
    )
    assert "| added to each | at most 10 ms | +23.0 ms |" in text
    assert "1,234 a second" in text
    assert "34.0 ms" in text


def test_the_jobs_of_a_run_have_to_be_encoded_one_by_one_as_those_over_http():
    prompts = [job_of_run(number)["prompt"] for number in range(5)]
    assert len(set(prompts)) == len(prompts)
    assert prompts == [prompt_of(number) for number in range(5)]
