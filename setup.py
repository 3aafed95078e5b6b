"""Build script: the native part of gfgen.gfc. Everything declarative is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("csrc/gfc")

setup(
    ext_modules=[
        Extension(
            # A plain shared library that ctypes loads: it works with any Python and any torch.
            # The extension machinery gives it its name, its wheel and its place.
            "gfgen.gfc._native",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"],
            language="c++",
        )
    ]
)
