"""Two ranks on two streams of one process and one GPU, for compute-sanitizer.

compute-sanitizer --tool memcheck python tests/gfc/cuda_one_process.py
"""

from __future__ import annotations

import os
import random

import cuda_programs as programs
import torch

from gfgen.gfc.arena import CONTROL_PLAN, ArenaPlan, create_arena
from gfgen.gfc.cuda.device_arena import DeviceArena
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.descriptor import Descriptor
from gfgen.layout import Layout

NUM_RANKS, NUM_DISPATCHES = 2, 60
PLAN = ArenaPlan(data_bytes=8 << 20, post_bytes=1 << 20)


def main() -> None:
    torch.zeros(1, device="cuda")
    arenas = [DeviceArena.create(PLAN, device=0) for _ in range(NUM_RANKS)]
    incarnations = dict.fromkeys(range(NUM_RANKS), 1)
    endpoints = []
    for rank in range(NUM_RANKS):
        peers = {peer: os.dup(fd) for peer, (_, fd) in enumerate(arenas) if peer != rank}
        control = create_arena(CONTROL_PLAN, rank=rank, incarnation=1)
        endpoint = CudaEndpoint(
            arenas[rank][0], rank=rank, peer_fds=peers, incarnations=incarnations, control_fd=control,
            timeout_s=60,
        )  # fmt: skip
        endpoint.selector = programs.mixed_selector(endpoint)
        endpoints.append(endpoint)
    streams = [torch.cuda.Stream() for _ in range(NUM_RANKS)]
    checkers = [programs.Checker(endpoint) for endpoint in endpoints]
    torch.cuda.synchronize()
    for checker, stream in zip(checkers, streams, strict=True):
        with torch.cuda.stream(stream):
            programs.warm_up(checker)
    rng = random.Random(3)
    num_cases = 0
    for number in range(NUM_DISPATCHES):
        ranks = tuple(rng.sample(range(NUM_RANKS), NUM_RANKS))
        layout = Layout(ranks, ulysses=2) if rng.random() < 0.5 else Layout(ranks, cfg=2)
        cases = [programs.random_case(rng) for _ in range(6)]
        groups = []
        for endpoint, stream in zip(endpoints, streams, strict=True):
            with torch.cuda.stream(stream):
                group = endpoint.group(Descriptor(number + 1, layout, (1,) * NUM_RANKS))
                group.enter()
                groups.append(group)
        for case in cases:
            num_cases += 1
            for group, checker, stream in zip(groups, checkers, streams, strict=True):
                with torch.cuda.stream(stream):
                    programs.run_case(group.subgroup(case.kind), checker, case)
        for group, stream in zip(groups, streams, strict=True):
            with torch.cuda.stream(stream):
                group.finish()
    wrong = [checker.count()[0] for checker in checkers]
    print(f"{num_cases} collectives on {NUM_RANKS} ranks, wrong items: {wrong}")
    for endpoint in endpoints:
        endpoint.close()
    raise SystemExit(any(wrong))


if __name__ == "__main__":
    main()
