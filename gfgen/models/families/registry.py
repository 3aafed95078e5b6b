"""Names of models to directories, and directories to adapters. Imports no torch by itself.

A model is given as a directory, as a short name, as a hub id ("org/name"), or as a file
(geometry/single_file.py). Of the short names one is of a trained model that comes with gfgen, and some are of
tiny models, which are written into a cache on first use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gfgen.errors import ModelError, nearest
from gfgen.job.images import NO_PICKLE, PICKLES
from gfgen.models.fast.kernels import NOT_QUANTISED, KernelChoice, Quantised
from gfgen.models.geometry import single_file
from gfgen.models.geometry.checkpoint import read_checkpoint
from gfgen.models.geometry.model import CONFIGS, load_geometry, weightless_geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.weights import EXPERTS, WHOLE, Placement
from gfgen.system.lifeline import output_of
from gfgen.system.machine import cache_dir

if TYPE_CHECKING:
    from gfgen.models.families.adapter import Adapter
    from gfgen.models.streaming.shards import Island

logger = logging.getLogger(__name__)

HUB_IDS = {
    "wan2.2-ti2v-5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "wan2.2-t2v-a14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "wan2.2-i2v-a14b": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "qwen-image": "Qwen/Qwen-Image",
}

WEIGHTS = Path(__file__).parents[1] / "weights"

DEFAULT_MODEL = "shapes"
"""For jobs that name none, where --model names none either."""

TINY_TIMEOUT_S = 300.0

_COMPILED = "is compiled for another runtime (TensorRT or ONNX); give the weights that it was made from"
_UNREAD = dict.fromkeys(PICKLES, NO_PICKLE) | dict.fromkeys((".engine", ".plan", ".trt", ".onnx"), _COMPILED)

HUB_TIMEOUT_S = 10.0
"""For the first answer of the hub: a firewall that drops packets is no reason to wait for minutes."""
HUB_PATTERNS = ("model_index.json", "gfgen.json", "*.py", "*/*")
"""Of a repository: not what lies beside the components, as weights in their original format."""


MODELS = {
    "shapes": "built in, trained: coloured shapes, at rest or moving, as prompts say; in seconds on a CPU",
    "tiny-wan": "built in, random weights: text or image to video, in seconds on a CPU",
    "tiny-wan-moe": "built in, random weights: text to video with two experts",
    "tiny-wan-moe-i2v": "built in, random weights: image to video with two experts",
    "tiny-qwen-image": "built in, random weights: text to image",
    "wan2.2-ti2v-5b": f"text or image to video, 5 B ({HUB_IDS['wan2.2-ti2v-5b']})",
    "wan2.2-t2v-a14b": f"text to video, 2 x 14 B ({HUB_IDS['wan2.2-t2v-a14b']})",
    "wan2.2-i2v-a14b": f"image to video, 2 x 14 B ({HUB_IDS['wan2.2-i2v-a14b']})",
    "qwen-image": f"text to image, 20 B ({HUB_IDS['qwen-image']})",
}
"""Short names, and what they stand for."""

PACKAGED = ("shapes",)
TINY_NAMES = tuple(name for name in MODELS if name.startswith("tiny-"))


def resolve_checkpoint(name_or_dir: str) -> Path:
    """The directory of a model; downloads or makes it where that is needed.

    Raises: ModelError for a name that nothing is known by, and for a download that fails.
    """
    if (path := at_hand(name_or_dir)) is not None:
        return path
    if name_or_dir in TINY_NAMES:
        return _tiny_checkpoint(name_or_dir)
    if _is_hub_id(hub_id := HUB_IDS.get(name_or_dir, name_or_dir)):
        return _downloaded(hub_id)
    raise ModelError(_unknown(name_or_dir))


def check_name(name_or_dir: str) -> None:
    """Downloads and makes nothing.

    Raises: ModelError for a name that nothing is known by.
    """
    is_known = name_or_dir in TINY_NAMES or _is_hub_id(HUB_IDS.get(name_or_dir, name_or_dir))
    if not is_known and at_hand(name_or_dir) is None:
        raise ModelError(_unknown(name_or_dir))


def check_here(name_or_dir: str) -> None:
    """Raises: ModelError for a model whose files are not all here; downloads nothing."""
    check_name(name_or_dir)
    if name_or_dir not in TINY_NAMES and at_hand(name_or_dir) is None:
        read_checkpoint(cached(HUB_IDS.get(name_or_dir, name_or_dir)), with_weights=True)


def find_configs(name_or_dir: str) -> Path:
    """The directory with a model's config files, for what needs no weights; downloads and makes nothing.

    Raises: ModelError for a name that no config files are here for.
    """
    if (path := at_hand(name_or_dir)) is not None:
        return path
    names = {hub_id: name for name, hub_id in HUB_IDS.items()}
    name = names.get(name_or_dir, name_or_dir)
    if name in HUB_IDS or name in TINY_NAMES:
        return CONFIGS / name
    if not _is_hub_id(name):
        raise ModelError(_unknown(name))
    if (folder := _snapshot(name)) is None:
        raise ModelError(
            f"model {name}: its config files are not here and nothing is downloaded for this; "
            f"{_near_hub_id(name)}run 'hf download {name}', or give its directory"
        )
    return folder


def load_adapter(
    checkpoint: Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    vae_dtype: str = "auto",
    has_random_weights: bool = False,
    trusts_code: bool = False,
    kernels: KernelChoice = "own",
    placement: Placement = WHOLE,
    copy_fd: int | None = None,
    island: Island | None = None,
    is_kept: bool = False,
    quantised: Quantised = NOT_QUANTISED,
) -> Adapter:
    """The adapter of a checkpoint, its weights on the device. Imports torch.

    dtype is float32 on a CPU and bfloat16 elsewhere unless told otherwise; vae_dtype is one of VAE_DTYPES.
    With random weights the directory need hold config files only. With `trusts_code` the checkpoint's own
    code may run. `kernels` are for pipelines without an adapter of their own, `quantised` for Wan and
    Qwen-Image. Blocks that do not stay on the device by `placement` are streamed from `copy_fd`, which ranks
    share, or from the other ranks of the island. If the model `is_kept`, all of it is there.

    Raises: ModelError for a broken directory, or an unknown family.
    """
    if has_random_weights:
        geometry = weightless_geometry(checkpoint)
    else:
        geometry = load_geometry(checkpoint, trusts_code=trusts_code)
    name = dtype or ("float32" if device == "cpu" else "bfloat16")
    import torch

    from gfgen.models.loading.components import load_pipeline
    from gfgen.models.loading.random_weights import random_pipeline
    from gfgen.models.streaming.host_copy import HostCopy
    from gfgen.models.streaming.placing import Kept, Placing

    brought = EXPERTS if quantised.layers else ()
    placing = Placing(placement, device=torch.device(device), copy_fd=copy_fd, brought=brought, island=island)
    load = partial(random_pipeline if has_random_weights else load_pipeline, placing=placing)
    options = {"device": device, "dtype": getattr(torch, name), "vae_dtype": vae_dtype, "load": load}
    adapter: Adapter
    if isinstance(geometry, PipelineGeometry):
        from gfgen.models.stepping.adapter import load_any

        adapter = load_any(checkpoint, geometry, kernels=kernels, **options)
    else:
        from gfgen.models.families.flow_adapter import load_flow

        adapter = load_flow(checkpoint, geometry, quantised=quantised, **options)
    placing.finish()
    adapter.read_bytes_per_s = placing.read_rate()
    if is_kept and copy_fd is not None:
        place = torch.device(device)
        adapter.kept = Kept(adapter.patches.pipeline, HostCopy(copy_fd, place), place)
    return adapter


def tiny_dir() -> Path:
    """Where the built-in models are kept; another place whenever the code that makes them changes."""
    code = Path(__file__).parents[1] / "loading" / "random_weights.py"
    sources = [code, *CONFIGS.glob("tiny-*/**/*.json")]
    version = hashlib.sha256(b"".join(source.read_bytes() for source in sorted(sources))).hexdigest()[:12]
    return cache_dir() / f"tiny-{version}"


def make_tiny_models(folder: Path, names: Sequence[str]) -> None:
    """Write the built-in models of these names into a folder, where they are not there yet.

    Made in a child process, so that this one stays free of torch. The child renames a
    finished directory into place: when two make the same model at once, both are right.

    Raises: ModelError with the child's reason.
    """
    what = f"model{'s' if len(names) > 1 else ''} {', '.join(names)}"
    try:
        output_of("gfgen.models.loading.random_weights", str(folder), *names, timeout_s=TINY_TIMEOUT_S)
    except ChildProcessError as error:
        raise ModelError(f"{what}: cannot be made in {folder}: {error}") from None


def at_hand(name_or_dir: str) -> Path | None:
    """The directory of a model that comes with gfgen, whatever folders are here, or the one that is given.

    A model in one file has a directory of links. None for a name that stands for no directory here.

    Raises: ModelError for no name at all, as a script gives by mistake: it would be the current folder.
    """
    if not name_or_dir:
        raise ModelError(f"a model's name is empty; accepted: {_accepted()}")
    if name_or_dir in PACKAGED:
        return WEIGHTS / name_or_dir
    path = Path(os.path.expanduser(name_or_dir))
    if single_file.is_single_file(name_or_dir) and not os.path.isdir(path):
        return _assembled(name_or_dir)
    return path.resolve() if os.path.isdir(path) else None


def _assembled(name: str) -> Path:
    """A directory with the weights of a file, and the rest of the model that it names or lies in."""
    base_name, file = single_file.split_name(name)
    if not base_name:
        base = single_file.base_beside(file)
    elif base_name in TINY_NAMES:
        base = _tiny_checkpoint(base_name)
    else:
        base = at_hand(base_name) or cached(HUB_IDS.get(base_name, base_name))
    return single_file.assemble(file, base, cache_dir() / "single-files")


def _is_hub_id(name: str) -> bool:
    is_file = Path(name).suffix.lower() in _UNREAD
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name[0] not in "./" and not is_file


def _tiny_checkpoint(name: str) -> Path:
    """A built-in model from the cache, made there first if need be."""
    folder = tiny_dir()
    if not (folder / name).is_dir():
        logger.info("making the built-in model %s in %s", name, folder)
        make_tiny_models(folder, [name])
    return folder / name


def _downloaded(hub_id: str) -> Path:
    """A hub repository's files in the hub's own cache; asks the hub only where they are not all there.

    So a batch goes on with the weights that it began with, and needs no network.
    """
    from huggingface_hub import snapshot_download

    lacking = "not in the hub's cache"
    if (folder := _snapshot(hub_id)) is not None:
        try:
            return read_checkpoint(folder, with_weights=True).path
        except ModelError as error:
            lacking = f"in the hub's cache, but not to be used ({str(error).partition('; ')[0]})"
    try:
        _check_format(hub_id)
        return Path(snapshot_download(hub_id, allow_patterns=HUB_PATTERNS))
    except ModelError:
        raise
    except Exception as error:  # the hub raises a dozen unrelated classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model {hub_id}: {lacking}, and downloading it failed ({reason}); {_near_hub_id(hub_id)}"
            f"run 'hf download {hub_id}' where there is a network, or give a directory"
        ) from error


def _snapshot(hub_id: str) -> Path | None:
    """The folder of a repository in the hub's cache, whole or not; None for what cannot be a hub id, too."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        index = try_to_load_from_cache(hub_id, "model_index.json")
    except HFValidationError:
        return None
    return Path(index).parent if isinstance(index, str) else None


def cached(hub_id: str) -> Path:
    """The folder of a repository in the hub's cache, whole or not. Raises: ModelError if there is none."""
    if (folder := _snapshot(hub_id)) is None:
        raise ModelError(f"model {hub_id} is not here; run 'hf download {hub_id}', or give a directory")
    return folder


def _check_format(hub_id: str) -> None:
    """Ask what a repository holds, before many gigabytes of it are downloaded.

    Raises: ModelError for one in another format, and what the hub raises.
    """
    from huggingface_hub import HfApi

    files = HfApi().model_info(hub_id, timeout=HUB_TIMEOUT_S).siblings or ()
    if files and not any(file.rfilename == "model_index.json" for file in files):
        raise ModelError(
            f"model {hub_id}: has no model_index.json, so it is not in diffusers' format; "
            f"is there a {hub_id}-Diffusers?"
        )


def _unknown(name: str) -> str:
    if reason := _UNREAD.get(Path(name).suffix.lower()):
        return f"model {name}: {reason}"
    if name[0] in "./~" or name.endswith("/") or name.count("/") > 1:
        there = "is a file" if os.path.exists(os.path.expanduser(name)) else "there is no such directory"
        return f"model {name}: {there}; {_accepted()} is accepted"
    near = nearest(name.lower(), MODELS, cutoff=0.5)
    hint = f"did you mean {near!r}? " if near else ""
    return f"model {name}: unknown; {hint}accepted: {_accepted()}"


def _accepted() -> str:
    return f"a directory, a hub id (org/name), MODEL:FILE.safetensors, or {', '.join(MODELS)}"


def _near_hub_id(hub_id: str) -> str:
    """A question, where it may be one of ours with a slip in it; the original Wan formats are among these."""
    near = nearest(hub_id, HUB_IDS.values(), cutoff=0.8)
    return f"did you mean {near!r}? " if near and near != hub_id else ""
