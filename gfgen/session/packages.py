"""The packages that gfgen needs, for `gfgen doctor` and for checks before processes start."""

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
"""Every run needs these: package name -> module name."""

VIDEOS: Mapping[str, str] = {"ftfy": "ftfy", "imageio": "imageio", "imageio-ffmpeg": "imageio_ffmpeg"}

LORAS: Mapping[str, str] = {"peft": "peft"}

SERVING: Mapping[str, str] = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "pydantic": "pydantic",
    "httptools": "httptools",
    "httpx": "httpx",
    "python-multipart": "python_multipart",
    "prometheus_client": "prometheus_client",
}


def check_packages(packages: Mapping[str, str]) -> None:
    """Raises ModuleNotFoundError for the first missing package, before processes fail; imports nothing."""
    for module in packages.values():
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
