"""The evaluation as Markdown, JSON, a picture for each figure with curves, and one HTML page."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gfgen.bench.paper.figures import Figure, Table
from gfgen.errors import InputError, OutputError
from gfgen.system.linefile import write_whole
from gfgen.system.wording import table_head, table_row

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums }
td, th { border-bottom: 1px solid #8884; padding: .2rem .7rem; text-align: left } img { max-width: 100% }
:root { color-scheme: light dark }"""


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    figure: Figure
    conditions: str
    """Where its cells ran, of which commits, and what is missing."""
    tables: Sequence[Table]
    elsewhere: str | None = None
    """What another command printed."""


def write_page(folder: Path, head: str, sections: Sequence[Section]) -> list[str]:
    """Write the files; returns their names. Raises OutputError."""
    drawn = {each.name: picture for each in sections if (picture := _drawn(each)) is not None}
    tables = {each.name: [asdict(table) for table in each.tables] for each in sections}
    conditions = {each.name: each.conditions for each in sections}
    files: dict[str, bytes] = {
        "paper.json": json.dumps(
            {"head": head, "conditions": conditions, "tables": tables}, indent=1
        ).encode(),
        "paper.md": "\n".join(_markdown(head, sections)).encode(),
        "paper.html": "\n".join(_page(head, sections, drawn)).encode(),
        **{f"figure-{name}.png": picture for name, picture in drawn.items()},
    }
    try:
        _check_own(folder)
        for name, content in files.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise OutputError(f"cannot write {error.filename}: {error.strerror}") from None
    return list(files)


def _check_own(folder: Path) -> None:
    """Raises InputError for files of these names that no evaluation has written."""
    path = folder / "paper.json"
    names = [name for name in ("paper.json", "paper.md", "paper.html") if (folder / name).exists()]
    try:
        if names and "conditions" not in json.loads(path.read_text()):
            raise ValueError
    except (OSError, ValueError):
        raise InputError(f"{folder / names[0]}: another program's file; choose another --output") from None


def _markdown(head: str, sections: Sequence[Section]) -> Iterator[str]:
    yield from (f"# {head}", "")
    for each in sections:
        yield from (f"## {each.figure.title}", "", f"{each.figure.what}; {each.conditions}", "")
        for table in each.tables:
            yield from (f"**{table.title}**", "", table_head(*table.head))
            yield from (table_row(*row) for row in table.rows)
            yield ""
        yield from (each.elsewhere, "") if each.elsewhere else ()


def _page(head: str, sections: Sequence[Section], drawn: dict[str, bytes]) -> Iterator[str]:
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(head)}</title>"
    yield f"<style>{_STYLE}</style><h1>{html.escape(head)}</h1>"
    for each in sections:
        yield f"<h2>{html.escape(each.figure.title)}</h2><p>{html.escape(each.figure.what)};"
        yield f"{html.escape(each.conditions)}</p>"
        if each.name in drawn:
            content = base64.b64encode(drawn[each.name]).decode()
            yield f'<img alt="{html.escape(each.figure.what)}" src="data:image/png;base64,{content}">'
        for table in each.tables:
            yield f"<table><caption>{html.escape(table.title)}</caption>"
            yield _row(table.head, "th")
            yield from (_row(row, "td") for row in table.rows)
            yield "</table>"
        yield f"<pre>{html.escape(each.elsewhere)}</pre>" if each.elsewhere else ""
    yield "</html>"


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _drawn(section: Section) -> bytes | None:
    """A picture of the tables that have curves; None without any, or without matplotlib."""
    tables = [table for table in section.tables if table.curves]
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        return None
    if not tables:
        return None
    drawing = Drawing(figsize=(5 * len(tables), 3.5), layout="constrained")
    axes: Any = drawing.subplots(1, len(tables), squeeze=False)[0]
    for axis, table in zip(axes, tables, strict=True):
        for name, points in (table.curves or {}).items():
            axis.plot(*zip(*points, strict=True), label=name) if points else None
        axis.set_title(table.title, fontsize=9)
        axis.set_xlabel("minute" if table.head[0] == "class" else table.head[0])
        axis.set_ylabel(table.unit)
        axis.grid(alpha=0.25)
        axis.legend()
    file = io.BytesIO()
    drawing.savefig(file, dpi=110)
    return file.getvalue()
