"""The job line in a file's metadata; `python -m benchmarks.lines` tries it for every pipeline."""

from pathlib import Path

import pytest
import torch

from benchmarks.lines import SAME, again

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["FluxPipeline", "LTXImageToVideoPipeline", "PixArtSigmaPipeline"])
def test_the_line_in_a_file_gives_its_bytes_again(name: str, tmp_path: Path) -> None:
    assert again(name, tmp_path) == SAME
