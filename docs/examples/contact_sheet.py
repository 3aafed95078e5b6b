"""A picture of what a run has made: each job's prompt with its frames, from first to last.

.venv/bin/python docs/examples/contact_sheet.py outputs/batch sheet.png
"""

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
from PIL import Image, ImageDraw, ImageFont

FRAMES, HEIGHT, GAP, CAPTION = 5, 96, 6, 40
NARROWEST, WIDTH = 204, 1032
"""Of a job, and of the whole."""
FONT = ImageFont.load_default(size=12)


def frames_of(path: Path) -> list[Image.Image]:
    """A picture, or frames of a video at equal distances."""
    if path.suffix != ".mp4":
        return [Image.open(path).convert("RGB")]
    video = iio.imread(path, plugin="FFMPEG")
    chosen = np.linspace(0, len(video) - 1, FRAMES).round().astype(int)
    return [Image.fromarray(video[idx]) for idx in chosen]


def words_of(entry: dict[str, Any]) -> str:
    """The prompt, and the picture that was given with it."""
    image = entry["image"]
    return f"{entry['prompt']} (from {Path(image).name})" if image else str(entry["prompt"])


def cell_of(prompt: str, frames: list[Image.Image]) -> Image.Image:
    small = [frame.resize((frame.width * HEIGHT // frame.height, HEIGHT)) for frame in frames]
    width = max(NARROWEST, sum(frame.width + GAP for frame in small))
    cell = Image.new("RGB", (width, CAPTION + HEIGHT + 2 * GAP), "white")
    text = "\n".join(textwrap.wrap(prompt, width // 6)[:3])
    pen = ImageDraw.Draw(cell)
    pen.multiline_text((0, CAPTION), text, fill="black", font=FONT, spacing=2, anchor="ld")
    for idx, frame in enumerate(small):
        cell.paste(frame, (idx * (frame.width + GAP), CAPTION + GAP))
    return cell


def rows_of(cells: list[Image.Image]) -> list[list[Image.Image]]:
    """As many beside each other as there is room for."""
    rows: list[list[Image.Image]] = [[]]
    for cell in cells:
        if sum(other.width for other in [*rows[-1], cell]) > WIDTH:
            rows.append([])
        rows[-1].append(cell)
    return rows


def main(folder: Path, sheet: Path) -> None:
    entries = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    done = {entry["id"]: entry for entry in entries if entry["status"] == "done"}
    cells = [cell_of(words_of(entry), frames_of(folder / entry["file"])) for entry in done.values()]
    rows = rows_of(sorted(cells, key=lambda cell: cell.width))
    whole = Image.new("RGB", (WIDTH, sum(row[0].height for row in rows)), "white")
    for number, row in enumerate(rows):
        left = GAP
        for cell in row:
            whole.paste(cell, (left, number * cell.height))
            left += cell.width
    whole.save(sheet, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
