"""Ray in this process: actors are objects, and calls run at once."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any


class ActorDiedError(Exception):
    """As Ray's."""


class GetTimeoutError(Exception):
    """As Ray's."""


class FakeRay:
    """`make` makes the actor of a machine from its id; `machines` are those of the cluster, by id."""

    exceptions = SimpleNamespace(ActorDiedError=ActorDiedError, GetTimeoutError=GetTimeoutError)

    def __init__(self, machines: dict[str, dict[str, float]], make: Any) -> None:
        self.machines, self._make = machines, make
        self.options_of: list[dict[str, Any]] = []
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
        self.util = SimpleNamespace(scheduling_strategies=strategies)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": ray_id,
                "Alive": True,
                "Resources": {"CPU": 4.0, **resources},
                "NodeManagerHostname": ray_id,
            }
            for ray_id, resources in self.machines.items()
        ]

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, **options: Any) -> Any:
        self.options_of.append(options)
        ray_id = options["scheduling_strategy"]
        return SimpleNamespace(remote=lambda *_: Handle(self._make(ray_id)))

    def get(self, call: Any, timeout: float | None = None) -> Any:
        return call()

    def kill(self, actor: Any) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Handle:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        def remote(*arguments: Any) -> Any:
            try:
                result = method(*arguments)
            except Exception as raised:
                return partial(_raise, raised)
            return lambda: result

        return SimpleNamespace(remote=remote)


def _raise(error: Exception) -> None:
    raise error
