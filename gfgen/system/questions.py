"""Questions to a child process that imports what its parent must not, as JSON on its pipes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from gfgen.errors import GfgenError, ModelError, in_one_line
from gfgen.system.lifeline import module_command, module_environment

TIMEOUT_S = 300.0


def ask_child(module: str, asked: object, what: str) -> Any:
    """The answers of a module that runs as a program (`answer_all`).

    Raises: ModelError, which says what cannot be checked.
    """
    try:
        done = subprocess.run(
            module_command(module),
            input=json.dumps(asked),
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=module_environment(),
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"checking {what} took over {TIMEOUT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(f"{what} cannot be checked: {reason}") from None
    return json.loads(done.stdout.splitlines()[-1])


def answer_all(answer: Callable[..., Any]) -> None:
    """Answer the questions that `ask_child` sends; one that fails says nothing of others."""
    answers = []
    for asked in json.load(sys.stdin):
        try:
            answers.append(answer(asked))
        except Exception as error:
            said = str(error) if isinstance(error, GfgenError) else in_one_line(error)
            answers.append({"error": said})
    print(json.dumps(answers))
