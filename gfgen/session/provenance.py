"""What a job was made with: versions, weights and precision, for the manifest and `gfgen check`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gfgen.models.families.precision import AUTO, FP8, precision_of
from gfgen.models.fast.kernels import KernelChoice
from gfgen.models.geometry.weight_files import weights_id
from gfgen.runtime.core.devices import CPU
from gfgen.session.ranks import Ranks
from gfgen.system.machine import key_versions


def made_with(ranks: Ranks, checkpoint: Path, *, kernels: KernelChoice = "own") -> dict[str, Any]:
    """Plain values that are equal where equal jobs give equal files."""
    return {
        "versions": dict(key_versions()),
        "weights": "random" if ranks.has_random_weights else weights_id(checkpoint),
        "device": "cpu" if ranks.devices.kind == CPU else ranks.device_name,
        "vae_dtype": ranks.vae_dtype,
        **({} if kernels == "own" else {"kernels": kernels}),
        **({} if precision_of(ranks.precision, checkpoint) == AUTO else {"precision": FP8}),
        **({} if precision_of(ranks.attention, checkpoint) == AUTO else {"attention": FP8}),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs in words, such as 'torch 2.10.0 (now 2.11.0)'."""
    old, new = before.get("versions") or {}, now["versions"]
    found = [
        f"{name} {old[name]} (now {new.get(name, 'none')})" for name in old if old[name] != new.get(name)
    ]
    before, now = ({"precision": AUTO, "attention": AUTO, **each} for each in (before, now))
    return found + [
        f"{name} {before[name]} (now {now[name]})"
        for name in ("weights", "device", "vae_dtype", "precision", "attention")
        if name in before and before[name] != now[name]
    ]
