"""Signals as something to select on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gfgen.errors import InterruptedRunError
from gfgen.system import signals
from gfgen.system.signals import SignalPipe

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)


def plain(number: signal.Signals) -> Any:
    """How a shell leaves it."""
    return signal.SIG_DFL if number in WARNINGS else signal.default_int_handler


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """None of them is ignored, whatever has started the tests."""
    previous = {number: signal.signal(number, plain(number)) for number in ALL}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ignored", ALL)
def test_what_was_ignored_stays_ignored(ignored: signal.Signals) -> None:
    signal.signal(ignored, signal.SIG_IGN)
    other = next(number for number in ALL if number != ignored)
    with contextlib.closing(SignalPipe()) as pipe:
        os.kill(os.getpid(), ignored)
        os.kill(os.getpid(), other)
        assert pipe.take() == [other]
    assert signal.getsignal(ignored) is signal.SIG_IGN


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_timeout_and_sessions_that_end_send_twice_counts_once(
    number: signal.Signals, second: signal.Signals
) -> None:
    with contextlib.closing(SignalPipe()) as pipe:
        os.kill(os.getpid(), number)
        assert pipe.take() == [number]
        os.kill(os.getpid(), second)
        assert pipe.take() == []
        os.kill(os.getpid(), signal.SIGINT)
        assert pipe.take() == [signal.SIGINT]


def test_each_ctrl_c_counts() -> None:
    with contextlib.closing(SignalPipe()) as pipe:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert pipe.take() == [signal.SIGINT] * 2


def test_handlers_are_as_before_when_it_is_closed() -> None:
    SignalPipe().close()
    assert [signal.getsignal(number) for number in ALL] == [plain(number) for number in ALL]


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_of_a_batch_system_stops_a_run_once(monkeypatch, number: signal.Signals) -> None:
    """SIGXCPU comes again every second; SIGTERM, later, is a second signal."""
    monkeypatch.setattr(signals, "ECHO_S", 0.0)
    with contextlib.closing(SignalPipe()) as pipe:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert pipe.take() == [number]
        os.kill(os.getpid(), number)
        assert pipe.take() == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert pipe.take() == [signal.SIGTERM]
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_that_the_program_around_a_run_handles_is_left_to_it(number: signal.Signals) -> None:
    came = []
    signal.signal(number, lambda *_: came.append(number))
    with contextlib.closing(SignalPipe()) as pipe:
        os.kill(os.getpid(), number)
        assert pipe.take() == []
    assert came == [number]


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_signal_interrupts_what_waits_for_something_else(comes_first: bool) -> None:
    with contextlib.closing(SignalPipe()) as pipe:
        if comes_first:
            os.kill(os.getpid(), signal.SIGTERM)
        with (
            pytest.raises(InterruptedRunError, match="stopped while models were loading") as stop,
            pipe.interrupting("models were loading"),
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.value.signal_number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)  # while it ends
    assert signal.getsignal(signal.SIGXCPU) is signal.SIG_IGN


def test_a_signal_counts_although_what_it_interrupts_catches_it() -> None:
    """As a logger does that is just writing, and a function of --keep-if may."""
    with (
        contextlib.closing(SignalPipe()) as pipe,
        pytest.raises(InterruptedRunError, match="stopped while results were judged") as stop,
        pipe.interrupting("results were judged"),
        contextlib.suppress(Exception),
    ):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.value.signal_number == signal.SIGINT


def test_a_signal_that_came_after_it_is_only_told() -> None:
    with contextlib.closing(SignalPipe()) as pipe:
        with pipe.interrupting("models were loading"):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert pipe.take() == [signal.SIGTERM]


def test_a_second_sigterm_that_comes_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_S", 0.0)
    with contextlib.closing(SignalPipe()) as pipe:
        os.kill(os.getpid(), signal.SIGTERM)
        assert pipe.take() == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert pipe.take() == [signal.SIGTERM]
