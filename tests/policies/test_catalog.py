import re
import sys

import pytest

from gfgen.errors import PolicyError
from gfgen.policies.catalog import BUILT_IN, describe, load_policy, policy_of


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_policy_loads_and_says_what_it_is_for(name):
    assert load_policy(name).name == name
    _, text = describe(name)
    assert len(text.split("\n\n")) >= 2


def test_a_policy_may_bring_a_function_that_chooses_another(tmp_path):
    assert load_policy("srtf").choose is None
    assert load_policy("auto").choose is not None
    path = tmp_path / "mine.py"
    path.write_text(
        "def policy(snapshot):\n    return []\ndef choose_policy(snapshot, last):\n    return None\n"
    )
    assert load_policy(str(path)).choose(None, None) is None


def test_options_are_bound_with_their_type():
    assert load_policy("srtf, degree=2").decide.keywords == {"degree": 2}
    assert policy_of("srtf, degree=2").decide.keywords == {"degree": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strf", "did you mean srtf"),
        ("nonsense", "built in: legacy, fcfs, srtf, edf, triage, makespan, auto"),
        ("srtf,degre=2", "no option 'degre=2'; options: degree"),
        ("srtf,degree", "no option 'degree'"),
        ("srtf,degree=2,degree=4", "degree is given twice"),
        ("srtf,degree=two", "degree = two: a value of type int"),
        ("srtf,degree=0", "degree = 0: a whole number from 1 to 8 is accepted"),
        ("triage,degree=3", "degree = 3: 1, 2, 4 or 8 is accepted"),
        ("makespan,degree=0", "degree = 0: 1, 2, 4 or 8 is accepted"),
        ("fcfs,degree=-2", "degree = -2: a whole number from 1 to 8"),
        ("legacy,degree=-1", "degree = -1: a whole number from 0 to 8"),
        ("legacy,degree=9", "degree = 9: a whole number from 0 to 8"),
        ("edf,degree=2", "options: rescue"),
        ("missing.py", "no such file"),
        ("no_such_module:policy", "cannot import no_such_module"),
        ("gfgen.layout:nothing", "has no function nothing"),
    ],
)
def test_a_wrong_policy_is_named_with_what_would_be_accepted(text, message):
    with pytest.raises(PolicyError, match=message):
        load_policy(text)


def test_a_policy_comes_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def policy(snapshot, *, greedy: bool = False):\n    return []\n")
    assert load_policy(f"{path},greedy=yes").decide.keywords == {"greedy": True}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def policy(): return []", "(too many positional arguments); a function policy(snapshot, *, option"),
        ("def policy(*, degree=1): return []", "it cannot be called with a snapshot alone"),
        ("def policy(snapshot, jobs): return []", "missing a required argument: 'jobs'"),
        ("def policy(snapshot, *, degree): return []", "'degree'"),
        ("class policy:\n    def __init__(self, snapshot): pass", "it is a class"),
        ("async def policy(snapshot): return []", "it is asynchronous"),
        ("policy = max", "it cannot be called with a snapshot alone (no signature found"),
        ("policy = 7", "has no function policy"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("raise ValueError('one\\ntwo')", "ValueError: one two"),
    ],
)
def test_what_cannot_be_called_as_a_policy_is_refused_before_anything_starts(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_text(source + "\n")
    with pytest.raises(PolicyError, match=re.escape(message)):
        load_policy(str(path))


@pytest.mark.parametrize(
    "source",
    [
        "def policy(*arguments, **options): return []",
        "class Mine:\n    def __call__(self, snapshot): return []\npolicy = Mine()",
        "def policy(snapshot: 'Unknown', *, degree: 'Unknown' = 1): return []",
    ],
)
def test_whatever_can_be_called_with_a_snapshot_is_a_policy(tmp_path, source):
    path = tmp_path / "mine.py"
    path.write_text(source + "\n")
    assert load_policy(str(path)).decide(None) == []


def test_a_file_may_say_which_numbers_an_option_accepts(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from typing import Annotated\n"
        "def policy(snapshot, *, width: Annotated[int, range(2, 5)] = 2):\n    return []\n"
    )
    assert load_policy(f"{path},width=4").options == {"width": 4}
    with pytest.raises(PolicyError, match="width = 5: a whole number from 2 to 4 is accepted"):
        load_policy(f"{path},width=5")


def test_a_file_may_hold_several_policies(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def other(snapshot):\n    return []\n")
    assert load_policy(f"{path}:other").decide(None) == []


def test_a_module_of_the_current_folder_is_imported(tmp_path, monkeypatch):
    (tmp_path / "night_shift.py").write_text("def policy(snapshot):\n    return []\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    assert load_policy("night_shift:policy").name == "night_shift:policy"


def test_a_file_that_fails_to_import_is_one_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("1 / 0\n")
    with pytest.raises(PolicyError, match="ZeroDivisionError: division by zero"):
        load_policy(str(path))
