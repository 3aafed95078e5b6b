"""Colours of jobs and their shades."""

from __future__ import annotations

PALETTE = (
    *("#88CCEE", "#CC6677", "#DDCC77", "#117733", "#332288", "#AA4499"),
    *("#44AA99", "#999933", "#882255", "#EE7733", "#6699CC", "#661100"),
)
"""Distinct for colour-blind readers. Source: CARTO "Safe", with orange instead of grey."""
LIGHTNESS = (1.0, 1.4, 0.65)
"""After the palette the colours repeat, lighter, then darker."""


def job_colour(idx: int) -> str:
    lap, place = divmod(idx, len(PALETTE))
    return shaded(PALETTE[place], LIGHTNESS[lap % len(LIGHTNESS)])


def shaded(colour: str, lightness: float) -> str:
    """Mix the colour with white (lightness 1 to 2) or black (1 to 0)."""
    target, weight = (255, lightness - 1) if lightness > 1 else (0, 1 - lightness)
    parts = (int(colour[idx : idx + 2], 16) for idx in (1, 3, 5))
    return "#" + "".join(f"{round(part + (target - part) * weight):02X}" for part in parts)


def hatching(colour: str) -> str:
    """A colour for lines on this one."""
    return shaded(colour, 0.6 if luminance(colour) > 0.1 else 1.5)


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1."""
    red, green, blue = (int(colour[idx : idx + 2], 16) / 255 for idx in (1, 3, 5))
    return float(0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2)
