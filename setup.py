"""Build script: the native part of gfgen.gfc. Everything declarative is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

SOURCES = Path("csrc/gfc")


class BuildWithKernels(build_py):
    """Ships the CUDA sources: they are compiled where they are used, at first use."""

    def run(self) -> None:
        super().run()
        for path in (*SOURCES.glob("*.h"), *SOURCES.glob("cuda/*")):
            target = Path(self.build_lib, "gfgen", "gfc", "csrc", path.relative_to(SOURCES))
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(
    cmdclass={"build_py": BuildWithKernels},
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
    ],
)
