"""What GPUs this process may use, as JSON on standard output; run as a program.

For parents that fork: asking the driver initialises CUDA, which must not happen in a process whose
children are to use it. `CUDA_VISIBLE_DEVICES` is heeded, as the driver does.
"""

from __future__ import annotations

import json
import sys

from gfgen.errors import RunError
from gfgen.gfc.cuda.driver import driver


def probe() -> str:
    """[[name, bytes of memory, [devices whose memory it reaches]], ...], in the order of the driver."""
    cuda = driver()
    devices = range(cuda.num_devices)
    return json.dumps(
        [
            [
                cuda.name(device),
                cuda.memory_bytes(device),
                [peer for peer in devices if peer != device and cuda.can_access(device, peer)],
            ]
            for device in devices
        ]
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(probe())
    except RunError as error:
        sys.exit(str(error))
