"""Fixtures for tests that run models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stepping_process import SteppingProcess


@pytest.fixture(scope="session")
def two_processes() -> Iterator[tuple[SteppingProcess, SteppingProcess]]:
    """Two processes that share nothing; all families use the same two, to import torch once each."""
    pair = (SteppingProcess(), SteppingProcess())
    yield pair
    for process in pair:
        process.stop()


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small picture with colours, with an opaque alpha channel, lying on its side by its EXIF data."""
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[0:90, 0:140]
    pixels = np.stack(
        [columns * 255 // 140, rows * 255 // 90, (rows + columns) % 256, 255 + 0 * rows], axis=-1
    )
    image = Image.fromarray(pixels.astype("uint8"), mode=None)
    exif = image.getexif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    image.save(path, exif=exif)
    return path
