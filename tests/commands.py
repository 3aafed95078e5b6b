"""Commands of gfgen in this process: its fork server has torch, which one of their own would import anew."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from gfgen.cli.main import main


def gfgen(folder: Path, *arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command that is started in a folder."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main(list(map(str, arguments)))
    said, told = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    assert "Traceback" not in told
    return int(ended.value.code or 0), said, told
