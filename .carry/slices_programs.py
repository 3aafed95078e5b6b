"""Programs of slices_probe.py."""

import time

import torch

from gfgen.gfc.descriptor import Descriptor
from gfgen.layout import Layout


def laps(endpoint, num_ranks, dispatch, count, num_bytes):
    """Milliseconds of an exchange: one launch after the other, then the device is waited for."""
    group = endpoint.group(
        Descriptor(dispatch, Layout(tuple(range(num_ranks)), ulysses=num_ranks), (1,) * num_ranks)
    )
    x = torch.zeros(max(1, num_bytes), dtype=torch.uint8, device=endpoint.torch_device)
    group.enter()
    group.finish()
    began = time.perf_counter()
    for _ in range(count):
        group.all_gather(x) if num_bytes else group.barrier()
    group.finish()
    return (time.perf_counter() - began) * 1e3 / count


def wait_for_peer(endpoint, dispatch, seconds):
    """Waits in a kernel for rank 1, or for rank 0; how long, and how it ended."""
    began = time.monotonic()
    try:
        group = endpoint.group(Descriptor(dispatch, Layout((0, 1), ulysses=2), (1, 1)), timeout_s=seconds)
        group.enter()
        group.finish()
        group.barrier()
        group.finish()
    except Exception as error:
        return round(time.monotonic() - began, 2), f"{type(error).__name__}"
    return round(time.monotonic() - began, 2), ""


def enter_and(endpoint, dispatch, what):
    """Enters, and then: nothing, or a kernel without end."""
    group = endpoint.group(Descriptor(dispatch, Layout((0, 1), ulysses=2), (1, 1)))
    group.enter()
    group.finish()
    if what == "sleep":
        torch.cuda._sleep(2**62)
        torch.cuda.synchronize()
    time.sleep(60)


def compute(endpoint, count):
    """Seconds of some matrix products."""
    x = torch.randn(4096, 4096, device=endpoint.torch_device)
    (x @ x).sum().item()
    began = time.perf_counter()
    for _ in range(count):
        x @ x
    torch.cuda.synchronize()
    return round(time.perf_counter() - began, 3)
