"""The phases of a process, from its start to its end, and the transitions between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    STARTING = "starting"
    """It loads its models."""
    INTRODUCING = "introducing"
    """Its models are loaded. It maps the arenas of its peers, and they map its own."""
    WARMING = "warming"
    """It runs steps like those of the jobs, so that they are ready."""
    SERVING = "serving"
    """It takes tasks, or files."""
    LOADING = "loading"
    """It changes its models after its earlier tasks, and prepares their steps."""
    ENDING = "ending"
    """It was killed, and its channel has not ended."""
    STUCK = "stuck"
    """It was killed and does not end. It runs none of our code, but its device is not free."""
    ENDED = "ended"
    """Its process is reaped. A worker without a successor stays in this phase: its rank is retired."""


_GOES_AWAY = {Phase.ENDING: "killed", Phase.ENDED: "its channel has ended"}
TRANSITIONS: Mapping[Phase, Mapping[Phase, str]] = {
    Phase.STARTING: {
        Phase.INTRODUCING: "a worker says that it is ready",
        Phase.SERVING: "a writer says that it is ready",
        **_GOES_AWAY,
    },
    Phase.INTRODUCING: {
        Phase.LOADING: "all know it; other models were asked for since it started",
        Phase.WARMING: "all know it; steps of the jobs at hand have to get ready",
        Phase.SERVING: "all know it",
        **_GOES_AWAY,
    },
    Phase.WARMING: {
        Phase.SERVING: "the last step is ready",
        Phase.WARMING: "more steps have to get ready",
        Phase.LOADING: "other models are asked for",
        **_GOES_AWAY,
    },
    Phase.SERVING: {
        Phase.WARMING: "steps have to get ready before a run",
        Phase.LOADING: "other models are asked for",
        **_GOES_AWAY,
    },
    Phase.LOADING: {
        Phase.SERVING: "the models are loaded and the last step is ready",
        Phase.LOADING: "other models are asked for, or more steps",
        **_GOES_AWAY,
    },
    Phase.ENDING: {
        Phase.ENDED: "reaped",
        Phase.STUCK: "still there after its time to end",
    },
    Phase.STUCK: {},
    Phase.ENDED: {},
}
"""By phase: the phases that may follow, and their causes."""
STARTS = frozenset({Phase.STARTING, Phase.INTRODUCING})
GONE = frozenset({Phase.ENDED, Phase.STUCK})
