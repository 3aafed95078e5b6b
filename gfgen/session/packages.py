"""The packages that come with gfgen: what `gfgen doctor` names, and what is looked for before ranks start."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

COMPUTING: Mapping[str, str] = {
    "torch": "torch",
    "diffusers": "diffusers",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface_hub",
    "numpy": "numpy",
    "pillow": "PIL",
    "tqdm": "tqdm",
}
"""What every run needs: the package's name -> the module's."""

VIDEOS: Mapping[str, str] = {"ftfy": "ftfy", "imageio": "imageio", "imageio-ffmpeg": "imageio_ffmpeg"}
"""What videos need besides."""

SERVING: Mapping[str, str] = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "pydantic": "pydantic",
    "httptools": "httptools",
    "python-multipart": "python_multipart",
    "prometheus_client": "prometheus_client",
}
"""What the HTTP process needs besides."""


def check_packages(packages: Mapping[str, str]) -> None:
    """Before processes start, each of which would die of it again and again; imports nothing.

    Raises: ModuleNotFoundError for the first one that is missing.
    """
    for module in packages.values():
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
