"""LoRA files that jobs name: where they are, and whether they are LoRAs at all. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

MAX_LORA_BYTES = 8 * 2**30
USUAL_NAME = "pytorch_lora_weights.safetensors"
"""What diffusers calls the only file of a folder."""
MARKS = ("lora", "lokr")
"""In names of a LoRA's tensors, in every format that diffusers converts."""


class LoraError(ValueError):
    """A file that is no LoRA, or cannot be read."""


class LoraFiles:
    """Finds and checks the LoRA files of jobs, each once. Relative paths count from a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = functools.cache(self._find_checked)

    def check(self, name: str, file: str | None) -> tuple[Path, str]:
        """The absolute path of a file, or of `file` in a folder or hub repository, and its SHA-256.

        Raises: LoraError when it is missing, unreadable or no LoRA.
        """
        try:
            return self._found(name, file)
        except (OSError, RuntimeError) as error:  # a loop of links, an unknown ~user, a name too long
            reason = getattr(error, "strerror", None) or error
            raise LoraError(f"{name[:80]} cannot be read ({reason})") from None

    def check_name(self, name: str) -> None:
        raise LoraError(f"name {name!r} is for requests over HTTP; give a path")

    def _find_checked(self, name: str, file: str | None) -> tuple[Path, str]:
        path = self._find(name, file)
        return path, _check_file(path)

    def _find(self, name: str, file: str | None) -> Path:
        path = (self._folder / Path(name).expanduser()).resolve()
        if path.is_dir():
            return path / file if file is not None else _only_file(path)
        if path.exists():
            if file is not None:
                raise LoraError(f"{path} is a file; leave `file` out")
            return path
        if name.count("/") != 1 or name.endswith(".safetensors"):
            raise LoraError(f"{path} does not exist")
        return _from_hub(name, file or USUAL_NAME)


class NamedLoras(LoraFiles):
    """Refuses all paths, for jobs that come from other machines. The run knows the names."""

    def __init__(self) -> None:
        super().__init__(Path())

    def check(self, name: str, file: str | None) -> tuple[Path, str]:
        example = '{"name": "ink"}'
        raise LoraError(f"paths are not accepted over HTTP; name a LoRA of the server, such as {example}")

    def check_name(self, name: str) -> None:
        """Accepts all names."""


def _only_file(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"))
    usual = folder / USUAL_NAME
    if usual in found or len(found) == 1:
        return usual if usual in found else found[0]
    raise LoraError(f"{folder} has {len(found)} files *.safetensors; name one of them with `file`")


def _from_hub(repository: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(repository, file)
        return Path(cached if isinstance(cached, str) else hf_hub_download(repository, file))
    except Exception as error:  # the hub raises a dozen unrelated classes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LoraError(f"neither a file nor {file} of hub repository {repository} ({reason})") from None


def _check_file(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():  # a pipe or a device could block or never end
        raise LoraError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    if path.stat().st_size > MAX_LORA_BYTES:
        raise LoraError(f"{path} has more than {MAX_LORA_BYTES // 2**30} GiB")
    try:
        with safe_open(path, framework="np") as tensors:
            names = list(tensors.keys())
    except SafetensorError as error:
        raise LoraError(f"{path} is no whole safetensors file ({error})") from None
    if not any(mark in name for name in names for mark in MARKS):
        example = f", but such as {names[0]}" if names else ""
        raise LoraError(f"{path} is no LoRA: none of its tensors is named like one{example}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
