"""How many GPUs a benchmark may ask for."""

from __future__ import annotations

from gfgen.errors import InputError
from gfgen.gfc.cuda.driver import driver
from gfgen.system.wording import counted


def check_count(num_gpus: int, *, at_least: int = 1) -> None:
    """Raises: InputError for more GPUs than there are, or fewer than the benchmark needs."""
    found = driver().num_devices
    if not at_least <= num_gpus <= found:
        needed = f"this needs {at_least} at least; " if at_least > 1 else ""
        raise InputError(f"--gpus {num_gpus}: {needed}this machine has {counted(found, 'NVIDIA GPU')}")
