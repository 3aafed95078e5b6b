"""A CPU rank's worker that loads nothing but the names of its models.

One whose name begins with "broken" cannot be loaded; under one that begins with "deadly" the process dies.
Under "shaky..." ranks other than the first fail once, and under "picky..." always; under "sleepy..." they get
nowhere.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gfgen.runtime.ipc.messages import WarmUpLater
from gfgen.runtime.ipc.settings import WorkerSettings
from gfgen.runtime.worker import entry, preparing


def main(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    def load_name(path: Path, **_: object) -> Any:
        if path.name.startswith("broken"):
            raise FileNotFoundError(f"{path.name} is broken")
        if path.name.startswith("shaky") and settings.rank:
            mark = path.with_name(f"{path.name} failed on {settings.rank}")
            if not mark.exists():
                mark.touch()
                raise FileNotFoundError(f"{path.name} is not there yet")
        if path.name.startswith("picky") and settings.rank:
            raise FileNotFoundError(f"{path.name} does not want rank {settings.rank}")
        if path.name.startswith("sleepy") and settings.rank:
            signal.pause()
        if path.name.startswith("deadly"):
            os.kill(os.getpid(), signal.SIGKILL)
        return SimpleNamespace(patches=SimpleNamespace(), read_bytes_per_s=0.0)

    def warm_up_later(preparation: preparing.Preparation, message: WarmUpLater, _: object) -> None:
        for item in message.items:
            name = f"warm {item.number} on {settings.rank} with {len(preparation._device.adapters)} models"
            Path(item.checkpoint).with_name(name).touch()

    entry.load_adapter = load_name
    preparing.Preparation.warm_up_later = warm_up_later  # type: ignore[assignment, method-assign]
    entry.main(channel_socket, settings)


def die(channel_socket: socket.socket, settings: WorkerSettings) -> None:
    """A worker that gets nowhere."""
    os._exit(3)
