"""The model card's table of figures, from figures.json beside it.

python -m gfgen.models.shapes.card
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gfgen.models.families.registry import WEIGHTS

BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->"


def figures_table(report: Mapping[str, Any]) -> str:
    """What evaluation.write_report reports, as lines of markdown."""
    return "\n".join(_lines(report["from_text"], report["from_images"], report)) + "\n"


def _lines(text: Mapping[str, Any], images: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    settings = (
        f"{report['steps']} steps, guidance {report['guidance_scale']:g}, flow shift {report['flow_shift']:g}"
    )
    yield f"{report['questions']} prompts, {settings}:"
    yield ""
    yield "| right | from text | from images |"
    yield "|---|---|---|"
    for kind in text["right"] | images["right"]:
        yield f"| {kind} | {_share(text, kind)} | {_share(images, kind)} |"
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
