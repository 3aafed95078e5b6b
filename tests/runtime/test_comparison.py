from gfgen.cli.shown.simulated import table
from gfgen.runtime.core.metrics import Attainment, Latency, Summary

FAST = Summary(
    num_done=3,
    makespan_s=60.0,
    latency=Latency(10.0, 9.0, 20.0, 21.0),
    deadlines_by_tag={"S": Attainment(2, 2), "": Attainment(0, 1)},
    num_ranks=2,
    busy_s=90.0,
    moved_s=1.2,
)
FAILED = Summary(num_failed=3, makespan_s=5.0, deadlines_by_tag={"": Attainment(0, 3)})


def test_a_column_for_each_run_and_a_row_for_each_number():
    lines = table([("srtf", FAST), ("mine", FAILED)])
    rows = {line[:14].strip(): line[14:].split() for line in lines}
    assert lines[0].split() == ["srtf", "mine"]
    assert rows["jobs a minute"] == ["3.00", "0.00"]
    assert rows["jobs failed"] == ["0", "3"]
    assert rows["deadlines met"] == ["2/3", "67%", "0/3", "0%"]
    assert rows["S"] == ["2/2", "100%", "-"]
    assert rows["ranks busy"] == ["75%", "0%"]
    assert rows["latency, P95"] == ["20.0", "s", "-"]


def test_programs_get_every_number():
    entry = FAST.as_json()
    assert entry["deadlines"]["S"] == {"met": 2, "jobs": 2, "share": 1.0}
    assert entry["moved_s"] == 1.2
    assert entry["latency"]["p95_s"] == 20.0
    assert FAILED.as_json()["latency"] is None
