"""Loading a diffusers pipeline from a directory: quietly, offline, onto one device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from gfgen.errors import ModelError

logger = logging.getLogger(__name__)


class LoadPipeline(Protocol):
    """`load_pipeline`, or what takes its place."""

    def __call__(
        self,
        pipeline_class: Any,
        checkpoint: Path,
        *,
        device: str,
        dtype: torch.dtype,
        dtypes: Mapping[str, str] | None = None,
    ) -> Any:
        """A pipeline of this class with its weights on the device, ready for inference."""
        ...


def load_pipeline(
    pipeline_class: Any,
    checkpoint: Path,
    *,
    device: str,
    dtype: torch.dtype,
    dtypes: Mapping[str, str] | None = None,
) -> Any:
    """A pipeline of this class with its weights on the device, ready for inference.

    Components named in `dtypes` have a dtype of their own; modules that diffusers keeps in fp32 stay so.
    Weights of the dtype in which they are stored are mapped and not copied.

    Raises: ModelError when the directory does not hold what the class needs.
    """
    wanted = {"default": dtype} | {name: getattr(torch, each) for name, each in (dtypes or {}).items()}
    try:
        with without_progress_bars():
            pipeline = pipeline_class.from_pretrained(str(checkpoint), dtype=wanted, local_files_only=True)
            pipeline.to(device)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {checkpoint}: cannot be loaded as {pipeline_class.__name__}: {reason}"
        ) from error
    logger.info("loaded %s from %s on %s in %s", pipeline_class.__name__, checkpoint, device, dtype)
    return pipeline


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside, diffusers and transformers show no bars: they would tear the run's own display."""
    shown = [lib for lib in (diffusers_logging, transformers_logging) if lib.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()
