import pytest

from gfgen.errors import PolicyError
from gfgen.policies.catalog import BUILT_IN, describe, load_policy


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_policy_loads_and_says_what_it_is_for(name):
    assert load_policy(name).name == name
    _, text = describe(name)
    assert len(text.split("\n\n")) >= 2


def test_options_are_bound_with_their_type():
    assert load_policy("srtf, degree=2").decide.keywords == {"degree": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("strf", "did you mean srtf"),
        ("nonsense", "built in: legacy, fcfs, srtf, edf"),
        ("srtf,degre=2", "no option 'degre=2'; options: degree"),
        ("srtf,degree", "no option 'degree'"),
        ("srtf,degree=two", "degree = two: a value of type int"),
        ("edf,degree=2", "options: none"),
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


def test_a_file_may_hold_several_policies(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def other(snapshot):\n    return []\n")
    assert load_policy(f"{path}:other").decide(None) == []


def test_a_file_that_fails_to_import_is_one_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("1 / 0\n")
    with pytest.raises(PolicyError, match="ZeroDivisionError: division by zero"):
        load_policy(str(path))
