"""The table of pipelines in docs and package is that of the recorded results."""

import json
from pathlib import Path

import pytest

from benchmarks.pipelines import DOCS, REGISTRY, Result, read_results, registry, table, table_in

RESULTS = Path(__file__).parents[2] / "benchmarks/results/pipelines.jsonl"


def test_docs_and_package_have_the_last_results() -> None:
    results = read_results(RESULTS)
    assert REGISTRY.read_text() == registry(results)
    start, end = table_in(DOCS.read_text())
    assert DOCS.read_text() == f"{start}{table(results)}{end}"


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("LTXPipeline", "bitwise", ["in steps", "video"]),
        ("FluxPipeline", "different", ["as one task", "image"]),
        ("FluxPipeline", "not stepped", ["as one task", "image"]),
        ("FluxPipeline", "not built", ["not tried", "image"]),
        ("StableAudioPipeline", "bitwise", ["refused", "sound"]),
    ],
)
def test_a_result_in_the_package(name: str, kind: str, expected: list[str]) -> None:
    assert json.loads(registry([Result(name, kind)])) == {name: expected}


def test_the_last_result_of_a_pipeline_counts(tmp_path: Path) -> None:
    lines = [{"name": "B", "kind": "bitwise"}, {"name": "A", "kind": "not built"}]
    again = {"name": "B", "kind": "different", "arguments": ["image"]}
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (*lines, again)))
    assert read_results(path) == [Result("A", "not built"), Result("B", "different", arguments=("image",))]
