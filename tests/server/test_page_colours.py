"""The jobs' colours on the page can be told apart, also by those who do not see all colours."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

import gfgen.server

CSS = (Path(gfgen.server.__file__).parent / "page" / "page.css").read_text()
LIGHT, DARK = CSS.split("@media (prefers-color-scheme: dark)")

# What is left of linear RGB without one kind of cones. Source: Machado, Oliveira, Fernandes 2009, table 1.
SIGHTS = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
LEAST_DISTANCE = 0.11
"""In OKLab. The palette of Okabe and Ito with black keeps 0.076."""

Triple = tuple[float, float, float]


def times(matrix: tuple[Triple, ...], vector: Triple) -> Triple:
    a, b, c = (sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix)
    return a, b, c


def linear(colour: str) -> Triple:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return r, g, b


def seen(colour: str, sight: str) -> Triple:
    r, g, b = (min(1.0, max(0.0, c)) for c in times(SIGHTS[sight], linear(colour)))
    x, y, z = (math.cbrt(c) for c in times(TO_CONES, (r, g, b)))
    return times(TO_LAB, (x, y, z))


def brightness(colour: str) -> float:
    r, g, b = linear(colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def colours(part: str) -> tuple[list[str], str]:
    """The jobs' colours, which are the same in light and dark, and the panel's."""
    panel = re.findall(r"--panel: (#[0-9a-f]{6});", part)[0]
    return re.findall(r"--c\d: (#[0-9a-f]{6});", CSS), panel


@pytest.mark.parametrize("part", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_any_two_colours_can_be_told_apart(part, sight):
    shown, _ = colours(part)
    assert len(shown) == 7
    for one, other in itertools.combinations(shown, 2):
        assert math.dist(seen(one, sight), seen(other, sight)) >= LEAST_DISTANCE, (one, other)


@pytest.mark.parametrize("part", [LIGHT, DARK], ids=["light", "dark"])
def test_every_colour_stands_out_from_its_ground(part):
    shown, panel = colours(part)
    for colour in shown:
        low, high = sorted((brightness(colour), brightness(panel)))
        assert (high + 0.05) / (low + 0.05) >= 3.0, colour
