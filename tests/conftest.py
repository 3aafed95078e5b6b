"""Fixtures for every test folder."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import forked_modules
import pytest

from gfgen.models.families import registry
from gfgen.models.families.registry import TINY_NAMES, make_tiny_models, resolve_checkpoint, tiny_dir
from gfgen.runtime.control.state import State
from gfgen.system import lifeline
from gfgen.system.signals import FOR_THE_RUN

MAX_CHECKED_JOBS = 100
"""A check looks at every job, so the few tests with thousands of jobs go without."""
ALL_CHECKED, SOME_CHECKED = 300, 8
"""The first changes of a state are all followed by a check, of later ones each eighth: simulations of whole
files are thousands of the same changes, and what is wrong stays so until the next check."""


def pytest_configure() -> None:
    """As from a terminal: a run that was started where signals are ignored (nohup, a script's background)
    ignores them, and what tests start would, too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Collections of garbage need not go through the modules and tests that are there for good."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """A command that ends in a test may leave signals ignored, and what later tests start would, too."""
    before = {number: signal.getsignal(number) for number in FOR_THE_RUN}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a command has set up writes to a stream that ends with its test."""
    logger = logging.getLogger("gfgen")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    for handler in set(logger.handlers).difference(handlers):
        handler.close()
    logger.setLevel(level)
    logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture(autouse=True)
def no_settings_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Commands read no options from the user's own file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-config"))


@pytest.fixture(scope="session", autouse=True)
def faults_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where faulty workers count; set before the fork server starts, whose children inherit it."""
    os.environ["GFGEN_TEST_FAULTS"] = str(tmp_path_factory.mktemp("faults"))


@pytest.fixture(autouse=True)
def checked_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants of every state hold after each event and each dispatch."""
    changes = WeakKeyDictionary[State, int]()

    def checked(change: Callable[[State, Any], Any]) -> Callable[[State, Any], Any]:
        def change_and_check(state: State, argument: Any) -> Any:
            result = change(state, argument)
            changes[state] = number = changes.get(state, 0) + 1
            is_due = number <= ALL_CHECKED or number % SOME_CHECKED == 0
            if is_due and len(state.jobs.records) <= MAX_CHECKED_JOBS:
                state.check()
            return result

        return change_and_check

    monkeypatch.setattr(State, "apply", checked(State.apply))
    monkeypatch.setattr(State, "begin", checked(State.begin))


@pytest.fixture(scope="session", autouse=True)
def modules_in_forks(faults_folder: None) -> Iterator[None]:
    """Modules that commands ask need not import torch each time. Not beside GPUs, where the fork server must
    not ask for them."""
    with pytest.MonkeyPatch.context() as patch:
        if not Path("/dev/nvidiactl").exists():
            patch.setattr(lifeline, "output_of", forked_modules.output_of)
            patch.setattr(registry, "output_of", forked_modules.output_of)
        yield


@pytest.fixture(scope="session")
def tiny_models(pytestconfig: pytest.Config) -> Iterator[Mapping[str, Path]]:
    """Directories of the built-in tiny models by name, made once and kept in pytest's cache.

    For the session GFGEN_CACHE points there, so their names resolve to them in child
    processes too.
    """
    cache = pytestconfig.cache
    assert cache is not None
    before = os.environ.get("GFGEN_CACHE")
    os.environ["GFGEN_CACHE"] = str(cache.mkdir("gfgen"))
    try:
        if missing := [name for name in TINY_NAMES if not (tiny_dir() / name).is_dir()]:
            make_tiny_models(tiny_dir(), missing)  # by one process, since each imports torch first
        yield {name: resolve_checkpoint(name) for name in TINY_NAMES}
    finally:
        if before is None:
            del os.environ["GFGEN_CACHE"]
        else:
            os.environ["GFGEN_CACHE"] = before


@pytest.fixture(scope="session")
def store_port() -> Iterator[int]:
    """The port of an object store (object_store.py), in a process of its own."""
    from object_store import served_store

    with served_store() as port:
        yield port
