"""A colour for each job of a picture, and shades of it."""

from __future__ import annotations

PALETTE = (
    *("#88CCEE", "#CC6677", "#DDCC77", "#117733", "#332288", "#AA4499"),
    *("#44AA99", "#999933", "#882255", "#EE7733", "#6699CC", "#661100"),
)
"""Distinct also to the colour-blind. Source: CARTO "Safe", its grey replaced by an orange."""
LIGHTNESS = (1.0, 1.4, 0.65)
"""Beyond the palette the colours come again, lighter, then darker."""


def job_colour(idx: int) -> str:
    """The colour of the idx-th job; the first twelve are distinct to everyone."""
    lap, place = divmod(idx, len(PALETTE))
    return shaded(PALETTE[place], LIGHTNESS[lap % len(LIGHTNESS)])


def shaded(colour: str, lightness: float) -> str:
    """The colour mixed with white (lightness above 1, 2 is white) or black (below, 0 is black)."""
    target, weight = (255, lightness - 1) if lightness > 1 else (0, 1 - lightness)
    parts = (int(colour[idx : idx + 2], 16) for idx in (1, 3, 5))
    return "#" + "".join(f"{round(part + (target - part) * weight):02X}" for part in parts)


def hatching(colour: str) -> str:
    """A colour for lines over this one."""
    return shaded(colour, 0.6 if luminance(colour) > 0.1 else 1.5)


def luminance(colour: str) -> float:
    """How bright the colour looks, 0 to 1."""
    red, green, blue = (int(colour[idx : idx + 2], 16) / 255 for idx in (1, 3, 5))
    return float(0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2)
