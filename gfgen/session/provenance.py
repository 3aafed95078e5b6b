"""What a job was made with: versions, weights and precision, for the manifest and `gfgen check`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gfgen.models.fast.kernels import KernelChoice
from gfgen.runtime.core.devices import CPU
from gfgen.session.ranks import Ranks
from gfgen.system.machine import key_versions

EDGE_BYTES = 2**16
"""Of each end of a weight file that count for its hash; reading all of 60 GB would take minutes."""
_WEIGHTS = ("*.safetensors", "*.bin")


def made_with(ranks: Ranks, checkpoint: Path, *, kernels: KernelChoice = "own") -> dict[str, Any]:
    """Plain values that are equal where equal jobs give equal files."""
    return {
        "versions": dict(key_versions()),
        "weights": "random" if ranks.has_random_weights else weights_id(checkpoint),
        "device": "cpu" if ranks.devices.kind == CPU else ranks.device_name,
        "vae_dtype": ranks.vae_dtype,
        **({} if kernels == "own" else {"kernels": kernels}),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs in words, such as 'torch 2.10.0 (now 2.11.0)'."""
    old, new = before.get("versions") or {}, now["versions"]
    found = [
        f"{name} {old[name]} (now {new.get(name, 'none')})" for name in old if old[name] != new.get(name)
    ]
    return found + [
        f"{name} {before[name]} (now {now[name]})"
        for name in ("weights", "device", "vae_dtype")
        if name in before and before[name] != now[name]
    ]


@functools.cache
def weights_id(checkpoint: Path) -> str:
    """The revision of a checkpoint from the hub, or a hash of its weight files' names, sizes and ends."""
    if checkpoint.parent.name == "snapshots":
        return f"revision {checkpoint.name}"
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _WEIGHTS for path in checkpoint.rglob(pattern)):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.relative_to(checkpoint)} {size}\n".encode())
            digest.update(file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return f"sha256 {digest.hexdigest()[:16]}"
