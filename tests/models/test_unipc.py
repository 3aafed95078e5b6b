"""UniPC without waiting: the bits of diffusers' own on a CPU, and nothing that waits for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gfgen.models.families.solver import HostUniPC

torch.set_num_threads(1)

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}
CONFIGS = [
    FLOW,  # Wan's own
    FLOW | {"solver_order": 1},
    FLOW | {"solver_order": 3},
    FLOW | {"solver_type": "bh1", "lower_order_final": False, "final_sigmas_type": "sigma_min"},
    FLOW | {"disable_corrector": [0, 1]},
    {"prediction_type": "epsilon", "predict_x0": False, "final_sigmas_type": "sigma_min"},
]
SHAPE = (1, 4, 3, 6, 5)


def steps(scheduler: Any, *, device: str = "cpu", num_steps: int = 6) -> list[torch.Tensor]:
    """Samples after each step, for the same predictions."""
    scheduler.set_timesteps(num_steps)
    scheduler.set_begin_index(0)
    noise = torch.Generator().manual_seed(1)
    sample = torch.randn(SHAPE, generator=noise).to(device, non_blocking=True)
    samples = []
    for timestep in scheduler.timesteps:
        predicted = torch.randn(SHAPE, generator=noise).to(device, non_blocking=True)
        sample = scheduler.step(predicted, timestep, sample, return_dict=False)[0]
        samples.append(sample)
    return samples


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_bits_are_those_of_diffusers(config: dict[str, Any]) -> None:
    wanted = steps(UniPCMultistepScheduler(**config))
    found = steps(HostUniPC(**config))
    assert all(map(torch.equal, found, wanted))


class Waits(TorchDispatchMode):
    """Notes what would make the host wait for a device, which meta tensors stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, result)) if torch.is_tensor(x)]
        devices = {x.device.type for x in tensors}
        is_copy = name in ("_to_copy", "copy_") and not kwargs.get("non_blocking")
        if (is_copy and len(devices) == 2) or ("linalg" in name and "meta" in devices):
            self.found.append(name)
        return result


@pytest.mark.parametrize(("kind", "is_waiting"), [(HostUniPC, False), (UniPCMultistepScheduler, True)])
def test_no_step_waits_for_a_device(kind: Any, is_waiting: bool) -> None:
    """diffusers' own shows that waiting would be seen; reading a value raises by itself."""
    with Waits() as waits:
        steps(kind(**FLOW), device="meta")
    assert bool(waits.found) is is_waiting, waits.found
