"""Which models of a run compute in fp8 (`--precision`, `--attention`), and whether they can.

Imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gfgen.errors import InputError, ModelError
from gfgen.models.families.registry import HUB_IDS, at_hand, check_name
from gfgen.models.fast.kernels import Quantised
from gfgen.models.geometry.checkpoint import model_name, read_checkpoint
from gfgen.models.geometry.model import Geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.weights import EXPERTS, quantisation

logger = logging.getLogger(__name__)

AUTO: Literal["auto"] = "auto"
FP8: Literal["fp8"] = "fp8"
Word = Literal["auto", "fp8"]
"""auto: fp32 on a CPU, bf16 on GPUs."""

_FIRST_GPUS = {
    "precision": ((8, 9), "8.9 or later (such as L40S, H100, H200)"),
    "attention": ((9, 0), "9.0 or later (such as H100, H200, B200)"),
}
_WIDEST_HEAD = 128
"""That cuDNN's attention in fp8 takes on all of these GPUs."""
_SIDE = 16
"""Products in fp8 need layers whose inputs and outputs are multiples of this."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What --precision and --attention ask for; by default, no model computes in fewer bits than usual."""

    layers: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()

    @property
    def by_option(self) -> Mapping[str, tuple[str, ...]]:
        return {"precision": self.layers, "attention": self.attention}

    def of(self, checkpoint: Path) -> Mapping[str, Word]:
        return {option: _last_word(texts, checkpoint) for option, texts in self.by_option.items()}

    def quantised(self, checkpoint: Path) -> Quantised:
        return Quantised(*(word != AUTO for word in self.of(checkpoint).values()))

    def saved_bytes(self, checkpoint: Path) -> Mapping[str, tuple[int, int]]:
        """How much less than in bf16 the weights of a model take, by component: in fp8 a byte for each.

        Outside of blocks in all, and in each block.
        """
        found = dict[str, tuple[int, int]]()
        for component, config, channels in _experts(checkpoint) if self.quantised(checkpoint).layers else ():
            if "ffn_dim" in config:
                found[component] = 0, 8 * channels**2 + 2 * channels * config["ffn_dim"]
            else:  # Qwen-Image: attention and feed-forwards of two streams; modulation with scales of 2 bytes
                found[component] = config["num_layers"] * 12 * channels**2 * 31 // 32, 24 * channels**2
        return found

    def checked(self, *, capability: tuple[int, int] | None, device: str) -> Precision:
        """The same without what changes nothing.

        capability: the least of the run's GPUs, None for CPU ranks.
        Raises: InputError for another word, an unknown model, devices without fp8, or without cuDNN's
            package.
        """
        for option, text in self._texts():
            _check_device(option, text, capability=capability, device=device)
        return Precision(
            *(each if any(text.endswith(FP8) for text in each) else () for each in self.by_option.values())
        )

    def check_words(self) -> None:
        """Raises: InputError for another word."""
        for option, text in self._texts():
            _check_word(option, text)

    def _texts(self) -> Iterator[tuple[str, str]]:
        return ((option, text) for option, texts in self.by_option.items() for text in texts)

    def check_model(self, geometry: Geometry, checkpoint: Path) -> None:
        """Raises: ModelError for a model that cannot have the precision that it is asked for."""
        for option, word in self.of(checkpoint).items():
            if word == FP8:
                _check_family(geometry, checkpoint, option)
                (_check_layers if option == "precision" else _check_heads)(checkpoint)

    def tell_of_other_models(self, checkpoints: Collection[Path]) -> None:
        """Warn if an option names none of these models."""
        for option, text in self._texts():
            model, _, _ = text.rpartition("=")
            if model and not any(_is_model(checkpoint, model) for checkpoint in checkpoints):
                logger.warning("--%s %s has no effect: no job uses this model", option, text)

    def named(self, device: str) -> str:
        """A device in profiles: with fp8, tasks have other durations."""
        return " ".join((device, *self.layers, *(f"attention {text}" for text in self.attention)))


def is_named(device: str, name: str) -> bool:
    """Whether a device in profiles is the one of this name, in any precision."""
    return device == name or (device.startswith(f"{name} ") and device.endswith(FP8))


def _check_word(option: str, text: str) -> str:
    model, _, word = text.rpartition("=")
    if word not in (AUTO, FP8) or (not model and "=" in text):
        raise InputError(f"--{option} {text}: fp8, auto, or MODEL=fp8 is accepted")
    if model:
        try:
            check_name(model)
        except ModelError as error:
            raise InputError(f"--{option} {text}: {error}") from None
    return word


def _check_device(option: str, text: str, *, capability: tuple[int, int] | None, device: str) -> None:
    (first, such_as), word = _FIRST_GPUS[option], _check_word(option, text)
    if word == FP8 and (capability is None or capability < first):
        what = "attend in fp8" if option == "attention" else "compute in fp8"
        raise InputError(
            f"--{option} {text}: {device} cannot {what}; it needs NVIDIA GPUs of compute capability {such_as}"
        )
    if word == FP8 and option == "attention" and find_spec("cudnn") is None:
        raise InputError(f"--{option} {text}: it needs the package nvidia-cudnn-frontend")


def _last_word(texts: tuple[str, ...], checkpoint: Path) -> Word:
    """What names a model counts more than what does not, and later texts more than earlier ones."""
    found: Word = AUTO
    for text in sorted(texts, key=lambda each: "=" in each):
        model, _, word = text.rpartition("=")
        if not model or _is_model(checkpoint, model):
            found = FP8 if word == FP8 else AUTO
    return found


def _check_layers(checkpoint: Path) -> None:
    for component, config, channels in _experts(checkpoint):
        for layers, width in (("attention", channels), ("feed-forward", config.get("ffn_dim", channels))):
            if width % _SIDE:
                which = f"{layers} layers of {component}, which have {width} channels"
                raise _does_not_fit(checkpoint, "precision", f"{which}; multiples of {_SIDE} fit")


def _check_heads(checkpoint: Path) -> None:
    for component, config, _ in _experts(checkpoint):
        if (width := config["attention_head_dim"]) > _WIDEST_HEAD:
            which = f"heads of {component}, which have {width} channels"
            raise _does_not_fit(checkpoint, "attention", f"{which}; up to {_WIDEST_HEAD} fit")


def _does_not_fit(checkpoint: Path, option: str, what: str) -> ModelError:
    return ModelError(f"{model_name(checkpoint)}: --{option} fp8 does not fit the {what}")


def _check_family(geometry: Geometry, checkpoint: Path, option: str) -> None:
    asked = f"{model_name(checkpoint)}: --{option} fp8"
    if isinstance(geometry, PipelineGeometry):
        raise ModelError(f"{asked} is for Wan and Qwen-Image; its pipeline has nothing in fp8")
    if form := quantisation(checkpoint):
        raise ModelError(f"{asked} needs weights in bf16, and these are {form}")


def _experts(checkpoint: Path) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    configs = read_checkpoint(checkpoint, with_weights=False).configs
    for component in EXPERTS:
        if (config := configs.get(component)) is not None:
            yield component, config, config["num_attention_heads"] * config["attention_head_dim"]


def _is_model(checkpoint: Path, model: str) -> bool:
    return model_name(checkpoint) in (model, HUB_IDS.get(model)) or at_hand(model) == checkpoint
