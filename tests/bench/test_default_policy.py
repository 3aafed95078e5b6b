"""What auto decides for files without deadlines, simulated with the shipped profile of H200."""

import pytest

from benchmarks.default_policy import FILES, OTHERS, SAME_END, admitted, end_and_latency_s

# Tasks of the simulation vary, those of a look ahead do not: auto does not see what these gain by it.
WAITS_LONGER = {("20 Qwen-Image 512 to 1536", 2, None): 1.06, ("9 Qwen-Image, 4 Wan", 2, "80GB"): 1.03}
CASES = [
    ("20 Qwen-Image 1024", 1, None),
    ("20 Qwen-Image 1024", 2, None),
    ("20 Qwen-Image 512 to 1536", 2, None),
    ("9 Wan 832x480x49", 1, None),
    ("9 Wan 832x480x49", 2, None),
    ("9 Wan of three sizes", 2, None),
    ("8 Wan, 8 Qwen-Image, 8 to 10 steps", 2, None),
    ("8 Wan, 8 Qwen-Image, 8 to 10 steps", 2, "80GB"),
    ("9 Qwen-Image, 4 Wan", 2, None),
    ("9 Qwen-Image, 4 Wan", 2, "80GB"),
]


@pytest.mark.parametrize(("file", "num_ranks", "memory"), CASES)
def test_auto_ends_a_file_as_soon_as_the_best_policy_and_waits_as_little(file, num_ranks, memory):
    jobs = admitted(FILES[file])
    found = {
        policy: end_and_latency_s(jobs, policy, num_ranks=num_ranks, memory=memory)
        for policy in (*OTHERS, "auto")
        if int(policy.partition("degree=")[2] or 1) <= num_ranks
    }
    end_s, mean_s = found.pop("auto")
    soonest_s = min(end_s for end_s, _ in found.values())
    assert end_s <= SAME_END * soonest_s
    least_s = min(mean_s for each_s, mean_s in found.values() if each_s <= SAME_END * soonest_s)
    assert mean_s <= WAITS_LONGER.get((file, num_ranks, memory), 1.02) * least_s
    assert mean_s <= found["fcfs"][1] * 1.001
