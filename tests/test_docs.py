"""What the documents say is so."""

import re
import runpy
from pathlib import Path

import pytest
from builders import make_job, simulate

ROOT = Path(__file__).parent.parent
TABLES = runpy.run_path(str(ROOT / "docs/tables.py"))
FOLDERS = ("*.md", "docs/*.md", "benchmarks/**/*.md", "gfgen/**/*.md")
DOCUMENTS = [path for pattern in FOLDERS for path in ROOT.glob(pattern)]


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
