"""Loading a diffusers pipeline from a directory: quietly, offline, onto one device."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from gfgen.errors import ModelError
from gfgen.models.geometry.weights import ComponentFiles, component_files

logger = logging.getLogger(__name__)


_UNUSED = ("lm_head.weight",)
"""Only hidden states of a text encoder are used, so it may lack its head."""


LoadPipeline = Callable[..., Any]
"""`load_pipeline`, or `random_pipeline` with the same parameters."""


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
    On a CPU, weights stored in the wanted dtype are mapped, not copied. To another device weights are copied
    one by one, so a component needs no main memory beyond the file's pages.

    Raises: ModelError when the directory does not hold what the class needs.
    """
    wanted = {"default": dtype} | {name: getattr(torch, each) for name, each in (dtypes or {}).items()}
    try:
        with without_progress_bars():
            taken = inspect.signature(pipeline_class).parameters
            models = {
                name: _load_model(files, device=device, dtype=wanted.get(name, dtype))
                for name, files in component_files(checkpoint).items()
                if name in taken
            }
            pipeline = pipeline_class.from_pretrained(
                str(checkpoint), dtype=wanted, local_files_only=True, **models
            )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = reason.partition(". If you want to instead")[0]  # advice for programmers
        raise ModelError(
            f"model {checkpoint}: cannot be loaded as {pipeline_class.__name__}: {reason}"
        ) from error
    logger.info("loaded %s from %s on %s in %s", pipeline_class.__name__, checkpoint, device, dtype)
    return pipeline


def _load_model(component: ComponentFiles, *, device: str, dtype: torch.dtype) -> Any:
    """One component, with every weight from its files.

    Raises: ModelError for missing weights, which libraries would leave out or draw at random.
    """
    is_library = component.library in ("diffusers", "transformers")
    module = component.library if is_library else f"diffusers.pipelines.{component.library}"
    kind = getattr(importlib.import_module(module), component.class_name)
    place = {} if device == "cpu" else {"device_map": {"": torch.device(device)}}
    model, report = kind.from_pretrained(
        str(component.folder),
        dtype=dtype,
        use_safetensors=component.files[0].suffix == ".safetensors",
        local_files_only=True,
        output_loading_info=True,
        **place,
    )
    tied = getattr(model, "all_tied_weights_keys", {})
    missing = [name for name in sorted(report["missing_keys"]) if name not in tied and name not in _UNUSED]
    if missing:
        others = f" and {len(missing) - 1:,} others" if len(missing) > 1 else ""
        raise ModelError(
            f"{component.folder}: its files lack {missing[0]!r}{others}, which its config.json asks for; "
            "download the model again"
        )
    return model.to(device)  # tables of positions, which are in no file


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside, diffusers and transformers show no progress bars, which would disturb the run's display."""
    shown = [lib for lib in (diffusers_logging, transformers_logging) if lib.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()
