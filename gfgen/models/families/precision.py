"""Which models of a run compute in fp8 (`--precision`, `--attention`), and whether they can.

Imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gfgen.errors import InputError, ModelError
from gfgen.models.families.registry import HUB_IDS, at_hand, check_name
from gfgen.models.geometry.checkpoint import model_name, read_checkpoint
from gfgen.models.geometry.model import Geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.weight_files import SINGLE_FILE
from gfgen.models.geometry.weights import EXPERTS

logger = logging.getLogger(__name__)

AUTO: Literal["auto"] = "auto"
FP8: Literal["fp8"] = "fp8"
Precision = Literal["auto", "fp8"]
"""auto: fp32 on a CPU, bf16 on GPUs."""


PRECISION, ATTENTION = "--precision", "--attention"
_FIRST_GPUS = {
    PRECISION: ((8, 9), "8.9 or later (such as L40S, H100, H200)"),
    ATTENTION: ((9, 0), "9.0 or later (such as H100, H200, B200)"),
}
"""The first capability that has it, and in words."""
_WIDEST_HEAD = 128
"""That cuDNN's attention in fp8 takes on all of these GPUs."""
_SIDE = 16
"""Products in fp8 need layers whose inputs and outputs are multiples of this."""


def check_precision(
    asked: Sequence[str], *, capability: tuple[int, int] | None, device: str, option: str = PRECISION
) -> None:
    """Check what an option asks for; `capability` is the least of the run's GPUs, None for CPU ranks.

    Raises: InputError for another word, an unknown model, devices without fp8, or without cuDNN's package.
    """
    first, such_as = _FIRST_GPUS[option]
    for text in asked:
        model, _, precision = text.rpartition("=")
        if precision not in (AUTO, FP8) or (not model and "=" in text):
            raise InputError(f"{option} {text}: fp8, auto, or MODEL=fp8 is accepted")
        if model:
            try:
                check_name(model)
            except ModelError as error:
                raise InputError(f"{option} {text}: {error}") from None
        if precision == FP8 and (capability is None or capability < first):
            what = "attend in fp8" if option == ATTENTION else "compute in fp8"
            raise InputError(
                f"{option} {text}: {device} cannot {what}; it needs NVIDIA GPUs of compute capability "
                f"{such_as}"
            )
        if precision == FP8 and option == ATTENTION and find_spec("cudnn") is None:
            raise InputError(f"{option} {text}: it needs the package nvidia-cudnn-frontend")


def precision_of(asked: Sequence[str], checkpoint: Path) -> Precision:
    """What an option says of a checkpoint; what names it counts more, and later more than earlier."""
    found: Precision = AUTO
    for text in sorted(asked, key=lambda each: "=" in each):
        model, _, precision = text.rpartition("=")
        if not model or _is_model(checkpoint, model):
            found = FP8 if precision == FP8 else AUTO
    return found


def tell_of_other_models(
    asked: Sequence[str], checkpoints: Collection[Path], *, option: str = PRECISION
) -> None:
    """Warn of values of an option that name none of these models."""
    for text in asked:
        model, _, _ = text.rpartition("=")
        if model and not any(_is_model(checkpoint, model) for checkpoint in checkpoints):
            logger.warning("%s %s has no effect: no job uses this model", option, text)


def check_layers(geometry: Geometry, checkpoint: Path) -> None:
    """Raises: ModelError for a model that cannot be in fp8; it names the layers."""
    _check_family(geometry, checkpoint, PRECISION)
    for component, config, channels in _experts(checkpoint):
        for layers, width in (("attention", channels), ("feed-forward", config.get("ffn_dim", channels))):
            if width % _SIDE:
                raise ModelError(
                    f"{model_name(checkpoint)}: --precision fp8 does not fit the {layers} layers of "
                    f"{component}, which have {width} channels; multiples of {_SIDE} fit"
                )


def check_heads(geometry: Geometry, checkpoint: Path) -> None:
    """Raises: ModelError for a model whose attention cannot be in fp8."""
    _check_family(geometry, checkpoint, ATTENTION)
    for component, config, _ in _experts(checkpoint):
        if (width := config["attention_head_dim"]) > _WIDEST_HEAD:
            raise ModelError(
                f"{model_name(checkpoint)}: --attention fp8 does not fit the heads of {component}, which "
                f"have {width} channels; up to {_WIDEST_HEAD} fit"
            )


def _check_family(geometry: Geometry, checkpoint: Path, option: str) -> None:
    if isinstance(geometry, PipelineGeometry):
        raise ModelError(
            f"{model_name(checkpoint)}: {option} fp8 is for Wan and Qwen-Image; "
            "its pipeline has nothing in fp8"
        )
    if any(checkpoint.glob(f"*/{SINGLE_FILE}.gguf")):
        raise ModelError(f"{model_name(checkpoint)}: {option} fp8 needs weights in bf16, and these are GGUF")


def saved_bytes(checkpoint: Path) -> Mapping[str, int]:
    """How much less than in bf16 the weights of a model take in fp8, by component: a byte for each weight."""
    found = {}
    for component, config, channels in _experts(checkpoint):
        if "ffn_dim" in config:
            of_block = 8 * channels**2 + 2 * channels * config["ffn_dim"]
        else:  # Qwen-Image: attention and feed-forwards of two streams; modulation with scales of 2 bytes
            of_block = 24 * channels**2 + 12 * channels**2 * 31 // 32
        found[component] = config["num_layers"] * of_block
    return found


def _experts(checkpoint: Path) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """The transformers of a model: name, config and channels."""
    configs = read_checkpoint(checkpoint, with_weights=False).configs
    for component in EXPERTS:
        if (config := configs.get(component)) is not None:
            yield component, config, config["num_attention_heads"] * config["attention_head_dim"]


def _is_model(checkpoint: Path, model: str) -> bool:
    return model_name(checkpoint) in (model, HUB_IDS.get(model)) or at_hand(model) == checkpoint
