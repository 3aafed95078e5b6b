"""Loading a diffusers pipeline from a directory: quietly, offline, onto one device."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import GGUFQuantizationConfig, pipelines
from diffusers.loaders.single_file import load_single_file_sub_model
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import load_single_file_checkpoint
from diffusers.utils import logging as diffusers_logging
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from gfgen.errors import ModelError, in_one_line
from gfgen.models.geometry.checkpoint import Checkpoint, OwnClass, read_checkpoint
from gfgen.models.geometry.weight_files import (
    is_published,
    is_scale,
    own_tensors,
    part_of,
    part_of_key,
    scales_of,
    variant_of,
)
from gfgen.models.geometry.weights import EXPERTS, ComponentFiles, component_files, components_of, has_weights
from gfgen.models.streaming.placing import IN_PLACE, Placing
from gfgen.system.wording import named

logger = logging.getLogger(__name__)


OWN_CODE = "gfgen_own_code"
"""The package of classes that come with checkpoints; a module's name depends on its folder alone."""
_UNUSED = ("lm_head.weight",)
"""Only hidden states of a text encoder are used, so it may lack its head."""


LoadPipeline = Callable[..., Any]


def load_pipeline(
    pipeline_class: Any,
    checkpoint: Path,
    *,
    device: str,
    dtype: torch.dtype,
    dtypes: Mapping[str, str] | None = None,
    own_code: Mapping[str, OwnClass] | None = None,
    placing: Placing = IN_PLACE,
) -> Any:
    """A pipeline of this class with its weights on the device, ready for inference.

    Components named in `dtypes` have a dtype of their own; modules that diffusers keeps in fp32 stay so.
    Those in `own_code` are of classes in the checkpoint's own files, which are run. Blocks that `placing`
    takes are in host memory until the caller places them; layers of transformers have the scales of their
    files. On a CPU, weights stored in the wanted dtype are mapped, not copied. To another device they are
    copied one by one.

    Raises: ModelError when the directory does not hold what the class needs.
    """
    wanted = {"default": dtype} | {name: getattr(torch, each) for name, each in (dtypes or {}).items()}
    try:
        with without_progress_bars():
            taken = inspect.signature(pipeline_class).parameters

            def load(files: ComponentFiles, kind: Any) -> Any:
                name = files.folder.name
                place = "cpu" if placing.takes(name) else device
                model = _load_model(files, kind, device=place, dtype=wanted.get(name, dtype))
                if placing.takes(name):
                    placing.begin(name, model)
                    if name in EXPERTS:
                        note_scales(model, files)
                return model

            if own_code:
                pipeline = _with_own_code(pipeline_class, checkpoint, own_code, load)
            else:
                models = {
                    name: load(files, class_of(files.library, files.class_name))
                    for name, files in component_files(checkpoint).items()
                    if name in taken
                }
                index = read_checkpoint(checkpoint, with_weights=False).index
                absent = (name for name, entry in index.items() if entry == [None, None])
                models |= dict.fromkeys(taken.keys() & absent)  # diffusers asks for them
                pipeline = pipeline_class.from_pretrained(
                    str(checkpoint), dtype=wanted, local_files_only=True, **models
                )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError, AttributeError) as error:
        reason = first_line(error).partition(". If you want to instead")[0]  # advice for programmers
        name = pipeline_class.__name__
        raise ModelError(f"model {checkpoint}: cannot be loaded as {name}: {reason}") from error
    logger.info("loaded %s from %s on %s in %s", pipeline_class.__name__, checkpoint, device, dtype)
    return pipeline


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def load_component(checkpoint: Path, name: str, *, dtype: torch.dtype) -> Any:
    files = component_files(checkpoint)[name]
    with without_progress_bars():
        kind = class_of(files.library, files.class_name)
        return _load_model(files, kind, device="cpu", dtype=dtype)


def load_class(own: OwnClass) -> Any:
    """A class from a checkpoint's own file, which is run.

    Each folder is a package of its own, so that files of two checkpoints may have one name.

    Raises: ModelError if that fails.
    """
    folder = own.source.parent
    package = f"{OWN_CODE}.of_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    for name, path in ((OWN_CODE, []), (package, [str(folder)])):
        parent: Any = sys.modules.setdefault(name, types.ModuleType(name))
        parent.__path__ = path
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        return getattr(importlib.import_module(f"{package}.{own.source.stem}"), own.name)
    except Exception as error:  # of code that is not ours
        raise ModelError(f"{own.source}: {own.name} cannot be loaded: {in_one_line(error)}") from error
    finally:
        sys.dont_write_bytecode = writes


def _with_own_code(
    pipeline_class: Any,
    checkpoint: Path,
    own_code: Mapping[str, OwnClass],
    load: Callable[[ComponentFiles, Any], Any],
) -> Any:
    """A pipeline with components of its own classes, which diffusers would not accept."""
    index, files = read_checkpoint(checkpoint, with_weights=False).index, component_files(checkpoint)
    taken = inspect.signature(pipeline_class).parameters
    parts: dict[str, Any] = {name: None if value == [None, None] else value for name, value in index.items()}
    for name, (library, class_name) in components_of(index).items():
        kind = load_class(own_code[name]) if name in own_code else class_of(library, class_name)
        if name in files:
            parts[name] = load(files[name], kind)
        else:
            parts[name] = kind.from_pretrained(str(checkpoint / name), local_files_only=True)
    return pipeline_class(**{name: part for name, part in parts.items() if name in taken})


def class_of(library: str, class_name: str) -> Any:
    module = library if library in ("diffusers", "transformers") else f"diffusers.pipelines.{library}"
    return getattr(importlib.import_module(module), class_name)


def _load_model(component: ComponentFiles, kind: Any, *, device: str, dtype: torch.dtype) -> Any:
    """One component, with every weight from its files.

    Raises: ModelError for missing weights, which libraries would leave out or draw at random.
    """
    if is_published(component.files[0]):
        return _from_published(component, dtype=dtype).to(device)
    options: dict[str, Any] = {"use_safetensors": component.files[0].suffix == ".safetensors"}
    if device != "cpu":
        options["device_map"] = {"": torch.device(device)}
    if variant := variant_of(component.files[0]):
        options["variant"] = variant
    scales = read_scales(component.files)
    with without_warnings() if scales else nullcontext():  # that files have scales
        model, report = kind.from_pretrained(
            str(component.folder), dtype=dtype, local_files_only=True, output_loading_info=True, **options
        )
    _scale(model, scales, component.folder)
    tied = getattr(model, "all_tied_weights_keys", {})
    missing = [name for name in sorted(report["missing_keys"]) if name not in tied and name not in _UNUSED]
    if missing:
        names = named([*map(repr, missing)], "tensor")
        reason = "which its config.json asks for; download the model again"
        raise ModelError(f"{component.folder}: its files lack {names}, {reason}")
    unused = [name for name in sorted(report["unexpected_keys"]) if not is_scale(name)]
    if unused and component.library != "transformers":  # whose encoders leave out heads and decoders
        text = "%s: its files have %s, without effect, since its config.json does not ask for it"
        logger.warning(text, component.folder, named([*map(repr, unused)], "tensor"))
    if component.quantisation:
        return model  # bitsandbytes refuses a move, even to where the model is
    return model.to(device)  # tables of positions, which are in no file


def read_scales(files: Collection[Path]) -> dict[str, Tensor]:
    """The scales of weights in fp8, by the weight's name; in fp32, one number or one for each row."""
    found = {}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for weight, scale in scales_of(file.keys()).items():
                    found[weight] = file.get_tensor(scale).float().flatten()
    return found


def scaled(weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """A weight in fp8, or its exact value in another type, times its scale.

    The product is made in fp32 and rounded once, so all devices make the same bits.
    """
    rows = scale.to(weight.device).view(-1, *(1,) * (weight.ndim - 1))
    return (weight.float() * rows).to(dtype)


def _scale(model: Any, scales: Mapping[str, Tensor], folder: Path) -> None:
    """Multiply weights that were loaded without their scales; fp32 and bf16 hold all values of fp8."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if unknown := sorted(scales.keys() - parameters.keys()):
        raise ModelError(f"{folder}: has a scale for {unknown[0]!r}, which {type(model).__name__} lacks")
    distinct = {id(parameters[name]): name for name in scales}  # tied weights have several names
    for name in distinct.values():
        parameter, scale = parameters[name], scales[name]
        parameter.data = scaled(parameter.data, scale, dtype=parameter.dtype)


def note_scales(model: Any, component: ComponentFiles) -> None:
    """Tell linear layers the scales of weights that the files have in e4m3; without a scale it is 1."""
    scales = read_scales(component.files)
    found = {
        name.removeprefix("model.diffusion_model."): scales.get(name, torch.ones(1))
        for path in component.files
        if path.suffix == ".safetensors"
        for name, entry in own_tensors(path).items()
        if entry["dtype"] == "F8_E4M3"
    }
    if is_published(component.files[0]) and not found.keys() <= model.state_dict().keys():
        found = SINGLE_FILE_LOADABLE_CLASSES[type(model).__name__]["checkpoint_mapping_fn"](checkpoint=found)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and (scale := found.get(f"{name}.weight")) is not None:
            layer.file_scales = scale.expand(layer.out_features)


def _published_tensors(component: ComponentFiles, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of files in a published layout for diffusers' converters; the component's without fp8.

    A product with a scale is in fp32 outside of blocks, where diffusers may keep it so.
    """
    found: dict[str, Tensor] = {}
    for path in component.files:
        found |= load_single_file_checkpoint(str(path))
    scales = {weight: found[scale].float().flatten() for weight, scale in scales_of(found).items()}
    part, has_unet = part_of(component.folder.name), component.folder.name == "unet"
    for name in [name for name in found if part_of_key(name) == part]:
        tensor = found.pop(name)
        if is_scale(name):
            continue
        if name in scales:
            wide = torch.float32 if "blocks." not in name else dtype
            tensor = scaled(tensor, scales[name], dtype=wide)
        elif tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            tensor = tensor.to(dtype)
        elif getattr(getattr(tensor, "quant_type", None), "name", None) == "BF16":
            from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

            # diffusers leaves it as bytes if its layer is not linear
            tensor = dequantize_gguf_tensor(tensor).bfloat16()
        found[name if has_unet else name.removeprefix("model.diffusion_model.")] = tensor
    return found


def _from_published(component: ComponentFiles, *, dtype: torch.dtype) -> Any:
    """A component from files in a published layout, as diffusers' `from_single_file` converts it.

    Parameters that diffusers keeps in fp32 stay so, as with `from_pretrained`; `from_single_file` casts them.

    Raises: ModelError for missing weights, which diffusers would leave without memory, and for others than
        the component's.
    """
    path = component.files[0]
    options: dict[str, Any] = {}
    if path.suffix == ".gguf":
        options = {"quantization_config": GGUFQuantizationConfig(compute_dtype=dtype), "torch_dtype": dtype}
    try:
        model = load_single_file_sub_model(
            component.library,
            component.class_name,
            component.folder.name,
            _published_tensors(component, dtype=dtype),
            pipelines,
            hasattr(pipelines, component.library),
            str(component.folder.parent),
            local_files_only=True,
            **options,
        )
    except NotImplementedError as error:  # torch moves no tensors without memory
        config = component.folder / "config.json"
        raise ModelError(f"{path.resolve()}: lacks weights that {config} asks for") from error
    except Exception as error:  # whatever diffusers' converters meet in weights that they do not expect
        kind = component.class_name
        raise ModelError(f"{path.resolve()}: cannot be read as {kind}: {in_one_line(error)}") from error
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, each in model.named_parameters() if not options else ():
        each.data = each.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
    return model.eval()


def weightless(files: Checkpoint, name: str) -> Any:
    """A component without weights; one that has none, such as a tokenizer, is whole."""
    own = files.own_code.get(name)
    kind = class_of(*files.index[name]) if own is None else load_class(own)
    folder = str(files.path / name)
    if not has_weights(name):
        return kind.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        if hasattr(kind, "load_config"):
            return kind.from_config(kind.load_config(folder))
        return kind(AutoConfig.from_pretrained(folder))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, diffusers and transformers log errors only."""
    with ExitStack() as stack:
        for library in (diffusers_logging, transformers_logging):
            stack.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity_error()
        yield


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside, diffusers and transformers show no progress bars, which would disturb the run's display."""
    with ExitStack() as stack:
        for library in (diffusers_logging, transformers_logging):
            if library.is_progress_bar_enabled():
                stack.callback(library.enable_progress_bar)
                library.disable_progress_bar()
        yield
