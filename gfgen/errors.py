"""Every exception that gfgen raises on purpose, with the exit code of the command it ends.

    GfgenError                  1   something went wrong; the message says what to do
      InputError                2   what the user gave is wrong
        JobFileError            2   one or more lines of a job file (all of them, at once)
        JobError                2   one or more fields of one job (all of them, at once)
        ModelError              2   a model that is unknown, missing, incomplete or broken
        PolicyError             2   a policy or a policy option that does not exist
        LayoutError             2   ranks or degrees that do not fit together
      RunError                  1   a run that cannot go on
        PolicyFault             1   a policy raised, or decided something illegal
        StalledError            1   jobs are open, nothing runs and nothing was decided
        WorkerError             1   a worker process died or could not start
        OutputError             1   a finished job could not be written
        CollectiveError         1   an exchange between ranks failed
          PeerTimeoutError      1   a peer did not answer in time
          AbortedError          1   the host gave the exchange up
          ProtocolError         1   a peer sent what this exchange did not expect
      LockedError              75   another run holds the output folder (EX_TEMPFAIL)
      InterruptedRunError     130   stopped by SIGINT (143: SIGTERM; 128 and the signal's number)

What a user did wrong raises one of these, with a message of one line that names the field
or path, the value, and what would be accepted. `assert` is for mistakes of our own.
"""

from __future__ import annotations

import copyreg
import os
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_PROBLEMS_SHOWN = 20


class GfgenError(Exception):
    """Base of all; a command that ends with it prints one line and exits with `exit_code`."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors pass between processes, whatever their classes are made from."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InputError(GfgenError):
    """What the user gave is wrong; nothing was started."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one job, as a person would want to read it."""

    line: int | None
    field: str | None
    value: str | None
    accepted: str
    note: str | None = None
    """What several problems have in common; a list of them says it once, at its end."""

    def __str__(self) -> str:
        place = "" if self.line is None else f"{at(self.line)}: "
        subject = "" if self.field is None else self.field
        if self.value is not None:
            subject = f"{subject} = {self.value}" if subject else self.value
        return f"{place}{subject}: {self.accepted}" if subject else f"{place}{self.accepted}"

    @classmethod
    def of(cls, field: str | None, value: object, accepted: str) -> Problem:
        """A problem whose line is not known, with any value as a person can read it."""
        return cls(line=None, field=field, value=_shortened(value), accepted=accepted)


REFUSALS = (ValueError, TypeError, ImportError, KeyError)
"""What a pipeline raises for arguments that it refuses, at each try."""


@dataclass(frozen=True, slots=True)
class Warned:
    """Something in a job that does not act as written, although the job runs (runtime/core/admission.py)."""

    kind: str
    """What it is, in words that are equal for all such jobs; the log has each kind once per job file."""
    detail: str = ""
    """What differs between these jobs, such as the words that are left out."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def at(line: int) -> str:
    """A line of a job file in words, or what is in its place (job/inputs.py)."""
    return f"{getattr(line, 'place', 'line')} {line}"


def listed(problems: Sequence[Problem], *, limit: int = MAX_PROBLEMS_SHOWN) -> list[str]:
    """A line for each of the first `limit` problems, the number of the others, and every note once.

    What a field accepts is said once, too; later lines have only the hint of each value.
    """
    lines, said = [], dict[object, int | None]()
    for problem in problems[:limit]:
        accepted, _, hint = problem.accepted.rpartition("; ")
        kind, line = (problem.field, accepted or hint), problem.line
        if problem.field and problem.value is not None and kind in said and accepted:
            problem = replace(problem, accepted=hint)
        elif problem.field and problem.value is not None and (first := said.get(kind)) not in (None, line):
            problem = replace(problem, accepted=f"as in {at(first)}")
        if said.get(kind) is None:  # the first without a hint of its own
            said[kind] = None if accepted else line
        lines.append(str(problem))
    if (num_others := len(problems) - limit) > 0:
        lines.append(f"and {num_others:,} more problem{'s' if num_others != 1 else ''}")
    return [*lines, *dict.fromkeys(problem.note for problem in problems if problem.note)]


class JobFileError(InputError):
    """One or more lines of a job file are wrong; `problems` has all of them, the message the first."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        lines = "\n".join(f"  {line}" for line in listed(problems))
        count = f"{len(problems):,} problem{'s' if len(problems) != 1 else ''}"
        super().__init__(f"{source}: {count}; nothing was started\n{lines}")


class JobError(InputError):
    """Fields of one job are wrong; `problems` lists every one of them.

    Raised where the line is not known (admission by a model's geometry); whoever knows the
    line gets the problems at it from `at_line`.
    """

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))

    def at_line(self, line: int | None) -> tuple[Problem, ...]:
        return tuple([replace(problem, line=line) for problem in self.problems])


class ModelError(InputError):
    """A model is unknown, missing, incomplete or broken."""


class PolicyError(InputError):
    """A policy or one of its options does not exist or has a wrong value."""


class LayoutError(InputError):
    """Ranks or degrees do not fit together."""


class RunError(GfgenError):
    """The run cannot go on."""


class PolicyFault(RunError):
    """A policy raised an exception or decided something illegal; the message names it."""


class StalledError(RunError):
    """Jobs are open, nothing is running, and the policy decided nothing; names the jobs."""


class WorkerError(RunError):
    """A worker process died, hung, or could not start."""


class OutputError(RunError):
    """A finished job could not be written to its file."""


class CollectiveError(RunError):
    """An exchange between ranks failed; names rank, peer, dispatch, expected and seen."""


class PeerTimeoutError(CollectiveError):
    """A peer did not answer within the time-out."""


class AbortedError(CollectiveError):
    """The host gave up the dispatch that this exchange belongs to, or one with which it shares an edge."""


class ProtocolError(CollectiveError):
    """A peer's signal does not belong to this exchange."""


class LockedError(GfgenError):
    """Another run holds the output folder."""

    exit_code = 75


class InterruptedRunError(GfgenError):
    """The run was stopped by a signal; finished jobs are safe, the rest resumes."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


def in_one_line(error: BaseException, *, limit: int = 300) -> str:
    """'ZeroDivisionError: division by zero', whatever the message looks like."""
    try:
        text = " ".join(str(error).split())
        if isinstance(error, AssertionError) and not text:
            text = "".join(each.line or "" for each in traceback.extract_tb(error.__traceback__)[-1:])
    except Exception:  # the message of a user's own exception may be broken too
        text = "its message cannot be shown"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def without_secrets(text: str) -> str:
    """Without the user and the query of URLs, which may be a key or a signature, and the keys of S3."""
    text = re.sub(r"://[^/@\s]*@", "://", re.sub(r"(://[^\s?#]*)[?#][^\s'\")]*", r"\1", text))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        text = text.replace(os.environ.get(name) or "\0", f"${name}")
    return text


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The only known name that ends in a mistyped one, or else the one that it resembles most."""
    import difflib  # 6 ms that only a mistyped name pays

    # Comparing takes quadratic time, and a longer name resembles none.
    names = list(known)
    longer = [each for each in names if f"_{each}".endswith(f"_{name}")]  # steps: num_inference_steps
    near = longer if len(longer) == 1 else difflib.get_close_matches(name[:40], names, n=1, cutoff=cutoff)
    return near[0] if near else None


def whole(value: object) -> object:
    """A float without a fraction as a whole number, which people read more easily; others as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _shortened(value: object, limit: int = 80) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else repr(whole(value))
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
