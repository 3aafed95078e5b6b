"""The model card's table of figures, from figures.json beside it.

python -m training.card
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gfgen.models.families.registry import WEIGHTS

BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->"
COLUMNS = {
    "from_text": "from text",
    "from_images": "from images",
    "without_background": "no background named",
    "adjectives_after": "adjectives after nouns",
}
"""Groups of prompts in a report, and what the table calls them."""


def figures_table(report: Mapping[str, Any]) -> str:
    """What evaluation.write_report reports, as lines of markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    columns = [report[name] for name in COLUMNS]
    settings = (
        f"{report['steps']} steps, guidance {report['guidance_scale']:g}, flow shift {report['flow_shift']:g}"
    )
    yield f"{report['questions']} prompts, {settings}:"
    yield ""
    yield f"| right | {' | '.join(COLUMNS.values())} |"
    yield "|---" * (1 + len(columns)) + "|"
    for kind in dict.fromkeys(kind for column in columns for kind in column["right"]):
        yield f"| {kind} | {' | '.join(_share(column, kind) for column in columns)} |"
    yield ""
    yield f"Frames that the VAE has encoded and decoded: {report['reconstruction_db']:g} dB (PSNR)."


def _share(figures: Mapping[str, Any], kind: str) -> str:
    """ "97.4% of 500", or nothing where there was no such question."""
    if kind not in figures["right"]:
        return ""
    return f"{100 * figures['right'][kind]:.1f}% of {figures['of'][kind]}"


def main(folder: Path = WEIGHTS) -> None:
    """Put the table into the card."""
    card = folder / "README.md"
    table = figures_table(json.loads((folder / "figures.json").read_text(encoding="utf-8")))
    text = card.read_text(encoding="utf-8")
    filled, number = re.subn(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table}{END}", text, flags=re.DOTALL)
    assert number == 1, f"{card} has no one place for figures"
    card.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
