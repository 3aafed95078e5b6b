"""Kernels compiled at first use by NVRTC, which PyTorch's CUDA wheels bring, and kept on disk.

The cache key covers the sources, the options and the compiler's version, so you never have to clear it.
Compiling needs no toolkit, no torch and no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from gfgen.errors import RunError
from gfgen.system.linefile import write_whole
from gfgen.system.machine import cache_dir, locked, prepared_dirs

KERNELS = "cuda/kernels.cu"
OPTIONS = ("--std=c++17",)
_WAIT_S = 60.0
"""For another process to compile, which took 11.9 s of a core."""
_log = logging.getLogger(__name__)


def source_dir() -> Path:
    """csrc/gfc: in the package if it is installed, at the root in a checkout."""
    installed = Path(__file__).parent.parent / "csrc"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "csrc" / "gfc"


def kernels_dir() -> Path:
    return cache_dir() / "kernels"


def kept() -> list[Path]:
    """Kernels compiled on this machine; empty before ranks have run on its GPUs."""
    return sorted(kernels_dir().glob("*.cubin"))


def compiled(architecture: str, *, name: str = KERNELS, sources: Path | None = None) -> bytes:
    """The kernels' machine code for an architecture such as `sm_90`, from the cache if possible."""
    sources = sources or source_dir()
    library = load_nvrtc()
    file_name = _file_name(library, name, sources, architecture)
    if (cubin := _read(file_name)) is not None:
        return cubin
    path = kernels_dir() / file_name
    with locked(path.with_suffix(".lock"), timeout_s=_WAIT_S):
        if (cubin := _read(file_name)) is not None:  # by another process
            return cubin
        _log.info("compiling %s for %s", name, architecture)
        cubin = _compile(library, sources / name, (source_dir() / "cuda", sources), architecture)
        write_whole(path, cubin)
    return cubin


def is_kept(architecture: str) -> bool:
    """Whether `compiled` would find the exchanges between GPUs."""
    return _read(_file_name(load_nvrtc(), KERNELS, source_dir(), architecture)) is not None


def _file_name(library: ctypes.CDLL, name: str, sources: Path, architecture: str) -> str:
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    version = f"{major.value}.{minor.value}"
    digest = hashlib.sha256("\n".join((architecture, version, *OPTIONS)).encode())
    files = {sources / name, *source_dir().glob("*.h"), *source_dir().glob("cuda/*"), *sources.glob("*.h")}
    for path in sorted(files):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{Path(name).stem}-{digest.hexdigest()[:16]}-{architecture}.cubin"


def _read(file_name: str) -> bytes | None:
    """Machine code on disk; None for what a full disk or a crash left of it."""
    for folder in (kernels_dir(), *(each / "kernels" for each in prepared_dirs())):
        with contextlib.suppress(OSError):
            if content := (folder / file_name).read_bytes():
                return content
    return None


def find_nvrtc() -> Path | None:
    """NVRTC's library: in the wheels of Python's environment, or of a toolkit."""
    folders: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folders += [Path(root) / "cu13" / "lib", Path(root) / "cuda_nvrtc" / "lib"]
    folders += sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc.so.*"), key=lambda found: len(found.name)):
            return path
    return None


def load_nvrtc() -> ctypes.CDLL:
    path = find_nvrtc()
    if path is None:
        raise RunError(
            "NVRTC is missing: install a CUDA build of PyTorch, or `pip install nvidia-cuda-nvrtc`"
        )
    # The compiler opens this library by name only, which works if it is already loaded.
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(str(path))
    library.nvrtcCreateProgram.argtypes = (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p)
    library.nvrtcCompileProgram.argtypes = (c_void_p, c_int, POINTER(c_char_p))
    for name in ("CUBIN", "ProgramLog"):
        getattr(library, f"nvrtcGet{name}Size").argtypes = (c_void_p, POINTER(c_size_t))
        getattr(library, f"nvrtcGet{name}").argtypes = (c_void_p, c_char_p)
    library.nvrtcVersion.argtypes = (POINTER(c_int), POINTER(c_int))
    return library


def _compile(library: ctypes.CDLL, source: Path, includes: tuple[Path, ...], architecture: str) -> bytes:
    program = c_void_p()
    text = source.read_bytes()
    if library.nvrtcCreateProgram(byref(program), text, str(source).encode(), 0, None, None) != 0:
        raise RunError(f"NVRTC rejected {source.name}")
    options = [f"--gpu-architecture={architecture}", *OPTIONS, *(f"-I{path}" for path in includes)]
    encoded = (c_char_p * len(options))(*(option.encode() for option in options))
    if library.nvrtcCompileProgram(program, len(options), encoded) != 0:
        log = _text_of(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        raise RunError(f"NVRTC could not compile {source.name} for {architecture}:\n{log}")
    return _text_of(library, program, "CUBIN")


def _text_of(library: ctypes.CDLL, program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, byref(size))
    content = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, content)
    return content.raw
