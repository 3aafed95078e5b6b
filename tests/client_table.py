"""The table of clients in docs/serving.md, from the tests that make their calls.

    PYTHONPATH=.:tests:tests/server python -m client_table

writes it. A test is marked with `@calls(client, *what, result=...)`; it passes if the result is as it says.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/serving.md"
MODULES = ("test_openai_client", "test_litellm", "test_clients", "test_curl")
START, END = "<!-- tests/client_table.py writes this table -->\n", "<!-- end of the table -->\n"
VERSIONS = {
    "openai": re.findall(r"^openai==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0],
    "LiteLLM": "1.110.2",
    "vLLM-Omni": "benchmarks at 0780e45",
    "GF-DiT": "benchmarks at 442531e",
    "SGLang": "benchmarks of 0.5.23",
    "curl": "7.88.1",
}
"""What the calls were last tried with, or read from. Newer ones may differ."""
_rows: list[tuple[str, str, str]] = []


def calls(client: str, *what: str, result: str) -> Callable[[Any], Any]:
    """Mark a test that makes these calls as this client does."""

    def mark(test: Any) -> Any:
        _rows.extend((client, each, result) for each in what)
        return test

    return mark


def table() -> Iterator[str]:
    """Markdown, in the order of the clients and then of the tests; calls with equal results share a row."""
    for name in MODULES:
        importlib.import_module(name)
    yield "| client | version | call | result |\n|---|---|---|---|\n"
    for client, version in VERSIONS.items():
        by_result: dict[str, list[str]] = {}
        for _, call, result in (row for row in _rows if row[0] == client):
            by_result.setdefault(result, []).append(call)
        for result, found in by_result.items():
            yield f"| {client} | {version} | {'; '.join(found)} | {result} |\n"


def written() -> str:
    """The document with the table as it should be."""
    text = DOCUMENT.read_text()
    head, _, rest = text.partition(START)
    return head + START + "".join(table()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    from client_table import written as of_the_module  # the tests register their calls there

    DOCUMENT.write_text(of_the_module())
