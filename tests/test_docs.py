"""What the documents say is so."""

import re
from pathlib import Path

import pytest
from builders import make_job, simulate

ROOT = Path(__file__).parent.parent
FOLDERS = ("*.md", "docs/*.md", "benchmarks/**/*.md", "gfgen/**/*.md")
DOCUMENTS = [path for pattern in FOLDERS for path in ROOT.glob(pattern)]


def test_the_example_policy_in_the_docs_is_the_one_in_the_folder():
    code = (ROOT / "docs/examples/shortest_first.py").read_text()
    assert f"```python\n{code}```" in (ROOT / "docs/policies.md").read_text()


@pytest.mark.parametrize("unit", sorted(path.name for path in ROOT.glob("docs/examples/gfgen-*")))
def test_the_systemd_units_in_the_docs_are_those_in_the_folder(unit):
    document = "docs/serving.md" if unit == "gfgen-serve.service" else "docs/cron.md"
    assert f"```ini\n{(ROOT / 'docs/examples' / unit).read_text()}```" in (ROOT / document).read_text()


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
def test_links_to_files_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_name_files_that_exist(document):
    for target in re.findall(r"(?:jobs|docs|benchmarks)/[\w./-]+\.(?:jsonl|py|md|png)", document.read_text()):
        assert (ROOT / target).exists(), target
