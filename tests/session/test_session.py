"""The Python interface, as docs/python.md shows it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gfgen.errors import JobFileError
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.devices import choose_devices
from gfgen.session.ranks import Ranks
from gfgen.session.session import Session, SessionOptions

DOC = Path(__file__).parents[2] / "docs" / "python.md"


def options_in(folder: Path) -> SessionOptions:
    return SessionOptions(
        output_dir=folder, ranks=Ranks(choose_devices("cpu", 1)), policy=load_policy("fcfs")
    )


def test_the_example_of_the_documentation_makes_two_pictures(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 jobs are done\n"
    assert len(list((tmp_path / "outputs" / "from-python").glob("*.png"))) == 2


def test_admission_names_every_problem_and_line(tmp_path: Path) -> None:
    with Session(options_in(tmp_path / "out")) as session, pytest.raises(JobFileError) as error:
        session.admit([{"prompt": "a fox", "stpes": 4}, {"frames": 3}])
    assert "line 1: stpes: not a field; did you mean steps?" in str(error.value)
    assert "line 2: prompt" in str(error.value)


def test_a_session_that_made_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with Session(options_in(tmp_path / "out")):
        pass
    assert not (tmp_path / "out").exists()
