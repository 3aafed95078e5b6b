"""Processes that run single tasks of an adapter; artifacts travel between them as bytes."""

from __future__ import annotations

import io
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked_modules import fork_server

from gfgen.job.spec import JobSpec

REPLY_TIMEOUT_S = 120


class SteppingProcess:
    """One process with adapters of its own; `call` runs one executor there."""

    def __init__(self) -> None:
        context = fork_server()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve_tasks, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, checkpoint: Path, method: str, spec: JobSpec, *artifacts: bytes, **options: int) -> bytes:
        """The executor's result, serialised."""
        self._connection.send((checkpoint, method, spec, artifacts, options))
        assert self._connection.poll(REPLY_TIMEOUT_S), f"no reply to {method} within {REPLY_TIMEOUT_S} s"
        reply = self._connection.recv()
        assert isinstance(reply, bytes), reply
        return reply

    def stop(self) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def serve_tasks(connection: Connection) -> None:
    """The child: run what is asked until the other end closes."""
    import torch

    from gfgen.models.families.registry import load_adapter

    torch.set_num_threads(1)
    adapters: dict[Path, Any] = {}
    while True:
        try:
            checkpoint, method, spec, artifacts, options = connection.recv()
        except EOFError:
            return
        try:
            if checkpoint not in adapters:
                adapters[checkpoint] = load_adapter(checkpoint)
            result = getattr(adapters[checkpoint], method)(spec, *map(loads, artifacts), **options)
            connection.send(dumps(result))
        except Exception as error:  # the test shows it
            connection.send(repr(error))


def dumps(value: Any) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def loads(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)
