"""What sharing one GPU costs: exchanges, and the end of a killed process. Prints as it goes."""

import os
import signal
import time

import slices_programs as programs

from gfgen.gfc.arena import Plan
from gfgen.gfc.cuda.ranks import CudaRanks

PLAN = Plan(data_bytes=64 << 20, post_bytes=4 << 20)


def say(*words):
    print(f"[{time.monotonic() - BEGAN:6.1f}]", *words, flush=True)


def end_of(ranks, rank):
    began = time.monotonic()
    os.kill(ranks.processes[rank].pid, signal.SIGKILL)
    ranks.processes[rank].join(40)
    return round(time.monotonic() - began, 2), ranks.processes[rank].exitcode


def main():
    for num in (2, 4):
        began = time.monotonic()
        ranks = CudaRanks(num, PLAN, timeout_s=10, num_devices=1)
        say(num, "ranks start in", round(time.monotonic() - began, 1))
        for num_bytes in (0, 1 << 10, 1 << 20):
            found = ranks.run(range(num), programs.laps, num, ranks.next_dispatch(), 100, num_bytes)
            say(num, "ranks,", num_bytes, "bytes: ms per exchange", [round(x, 3) for x in found])
        say(
            "alone", ranks.run((0,), programs.compute, 50), "all", ranks.run(range(num), programs.compute, 50)
        )
        if num == 2:
            for what in ("idle", "sleep"):
                dispatch = ranks.next_dispatch()
                ranks.submit(0, programs.wait_for_peer, dispatch, 15.0)
                ranks.submit(1, programs.enter_and, dispatch, what)
                time.sleep(2)
                say("rank 0 waits in a kernel, rank 1:", what, "-> its end took", end_of(ranks, 1))
                say("rank 0 says", ranks.result(0))
                ranks.close()
                if what == "idle":
                    ranks = CudaRanks(num, PLAN, timeout_s=10, num_devices=1)
            continue
        ranks.close()


if __name__ == "__main__":
    BEGAN = time.monotonic()
    main()
