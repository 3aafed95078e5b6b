"""Moments that options name: times of day, dates with a time, and durations from now."""

from __future__ import annotations

from datetime import datetime, timedelta

from gfgen.errors import InputError
from gfgen.job.fields import MAX_YEAR, MIN_YEAR, parse_duration

_CLOCK_FORMATS = ("%H:%M", "%H:%M:%S")
_ACCEPTED = 'a time of day like "06:00", a time like "2026-11-21T06:00", or a duration like "8h" is accepted'


def closing_at(text: str, *, now: float, option: str = "--until") -> float:
    """Unix time of what an option says; a time of day is the next one on this machine's clock.

    Raises: InputError for what is no time, and for a time that has passed.
    """
    moment = _time_of_day(text, now) or _date_and_time(text)
    if moment is None:
        duration_s = parse_duration(text)
        if not duration_s:
            raise InputError(f"{option} {text!r}: {_ACCEPTED}")
        return now + duration_s
    if not MIN_YEAR <= moment.year <= MAX_YEAR:
        raise InputError(f"{option} {text!r}: a year from {MIN_YEAR} to {MAX_YEAR} is accepted")
    if moment.timestamp() <= now:
        raise InputError(f"{option} {text!r}: has passed; {_ACCEPTED}")
    return moment.timestamp()


def _time_of_day(text: str, now: float) -> datetime | None:
    today = datetime.fromtimestamp(now)
    for form in _CLOCK_FORMATS:
        try:
            at = datetime.strptime(text.strip(), form).time()
        except ValueError:
            continue
        moment = datetime.combine(today.date(), at)
        if moment.timestamp() <= now:
            moment = datetime.combine(today.date() + timedelta(days=1), at)
        return moment
    return None


def _date_and_time(text: str) -> datetime | None:
    """A date without a time of day is refused: 2026-11-21 could mean its begin or its end."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return moment if ":" in text else None
