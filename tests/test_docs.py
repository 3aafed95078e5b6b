"""What the documents say is so."""

import itertools
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from builders import make_job, simulate

from gfgen.cli.main import cli

ROOT = Path(__file__).parent.parent
TABLES = runpy.run_path(str(ROOT / "docs/tables.py"))
FOLDERS = ("*.md", "docs/*.md", "benchmarks/**/*.md", "gfgen/**/*.md")
DOCUMENTS = [path for pattern in FOLDERS for path in ROOT.glob(pattern)]
PAGES = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
"""What says how things are now."""


def test_every_example_is_linked_from_a_page():
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    examples = ("Caddyfile", "*.conf", "gfgen-*", "shortest_first.py")
    names = [path.name for pattern in examples for path in ROOT.glob(f"docs/examples/{pattern}")]
    assert [name for name in names if f"examples/{name}" not in pages] == []


def test_the_tables_of_the_pages_are_those_that_the_code_gives():
    """Else run `.venv/bin/python docs/tables.py`."""
    for page in ROOT.glob("docs/*.md"):
        assert page.read_text() == TABLES["with_tables"](page.read_text()), page


def test_the_example_policy_finishes_a_batch():
    jobs = [make_job(f"job-{i}", steps=1 + i % 4) for i in range(6)]
    recorder = simulate(jobs, policy=f"{ROOT / 'docs/examples/shortest_first.py'},patience_s=3")
    assert len(recorder.outcomes) == 6


@pytest.mark.parametrize(("patience_s", "first"), [(3600, "short"), (0.3, "long")])
def test_the_example_policy_lets_a_long_job_wait_for_as_long_as_it_is_told(patience_s, first):
    jobs = [make_job("long", steps=9), make_job("short", steps=2, arrival_s=0.5)]
    policy = f"{ROOT / 'docs/examples/shortest_first.py'},patience_s={patience_s}"
    recorder = simulate(jobs, policy=policy, num_ranks=1)
    assert recorder.outcomes[0].info.spec.id == first


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target, part in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", document.read_text()):
        if not target.startswith("http"):
            path = document.parent / target if target else document
            assert path.exists(), target
            assert not part or part in anchors(path), f"{target}#{part}"


def anchors(document: Path) -> list[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_name_files_that_exist(document):
    for target in re.findall(r"(?:jobs|docs|benchmarks)/[\w./-]+\.(?:jsonl|py|md|png)", document.read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_measurements_that_pages_name_exist(document):
    for name in re.findall(r"-m benchmarks\.(\w+)", document.read_text()):
        assert (ROOT / f"benchmarks/{name}.py").exists(), name


def commands_of(document: Path) -> Iterator[list[str]]:
    """The words after gfgen, in blocks of shell and in code within lines."""
    text = document.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`((?:\.venv/bin/)?gfgen [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in lines:
        if match := re.search(r"(?:^|[ /])gfgen ([a-z].*)", re.sub(r" #.*", "", " ".join(line.split()))):
            words = shlex.shlex(match[1], posix=True, punctuation_chars="|&;><")
            words.whitespace_split = True
            yield list(itertools.takewhile(lambda word: word[:1] not in "|&;>.", words))


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_printed_commands_and_their_options_exist(document):
    for words in commands_of(document):
        command = cli
        if words[:2] == ["bench", "--compare"] or words[:2] == ["bench", "$ROWS"]:
            words = ["bench", "compare", *("--policy" if word == "--compare" else word for word in words[1:])]
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            command = command.get_command(click.Context(command), words.pop(0))
            assert command is not None, words
        command.make_parser(click.Context(command)).parse_args(words)
