"""What gfgen and the libraries under it keep between runs; other files in gfgen's folder are left alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gfgen.errors import RunError
from gfgen.models.ahead.places import compiler_dirs
from gfgen.system.machine import cache_dir

_PATTERNS: Mapping[str, tuple[str, Sequence[str]]] = {
    "profiles": ("measured task times", ("profiles/*.json", "profiles/.*.part")),
    "kernels": ("compiled exchanges between GPUs", ("kernels/*.cubin", "kernels/tmp*", "kernels/*.lock")),
    "inductor": ("compiled blocks (`--compile`)", ("inductor",)),
    "tables": ("choices of `gfgen bench gfc --tune`", ("gfc-*.json",)),
    "tiny-models": ("built-in models for tests", ("tiny-*",)),
    "single-files": ("links to files of weights", ("single-files",)),
    "calls": ("which calls pipelines refuse, and what they read of texts", ("calls/*.json", "calls/.*.part")),
    "previews": ("colours for previews", ("previews/*.json",)),
}


@dataclass(frozen=True, slots=True)
class Cache:
    name: str
    about: str
    paths: Sequence[Path]
    """Its files, and folders that belong to it as a whole."""

    @property
    def size_bytes(self) -> int:
        return sum(map(size_of, self.paths))

    def clear(self) -> None:
        for path in self.paths:
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise RunError(f"{path}: cannot be deleted ({error.strerror})") from None


def own_caches() -> dict[str, Cache]:
    """gfgen's own, by name, also those that are empty."""
    folder = cache_dir()
    return {
        name: Cache(name, about, sorted(path for pattern in patterns for path in folder.glob(pattern)))
        for name, (about, patterns) in _PATTERNS.items()
    }


def hub_dir() -> Path:
    """Where models from the Hugging Face hub are, as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def hub_models() -> Iterator[tuple[str, Path]]:
    for path in sorted(hub_dir().glob("models--*")):
        yield path.name.removeprefix("models--").replace("--", "/"), path


def other_compiler_dirs() -> dict[str, Path]:
    """Caches of PyTorch's compilers that are not in gfgen's folder."""
    folder = cache_dir()
    return {name: path for name, path in compiler_dirs().items() if not path.is_relative_to(folder)}


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links count as themselves."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if path.is_symlink() or path.exists() else 0
    return sum(size_of(Path(folder, name)) for folder, _, names in os.walk(path) for name in names)
