"""Build script: the native part of gfgen.gfc. Everything declarative is in pyproject.toml and MANIFEST.in."""

import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCES = Path("csrc/gfc")


class BuildWithKernels(build_py):
    """Copies the CUDA sources, which machines compile when they need them. Notes the commit."""

    def run(self) -> None:
        super().run()
        if Path(".git").exists():
            found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
            Path(self.build_lib, "gfgen", "commit.txt").write_text(found.stdout)
        for path in (*SOURCES.glob("*.h"), *SOURCES.glob("cuda/*")):
            target = Path(self.build_lib, "gfgen", "gfc", "csrc", path.relative_to(SOURCES))
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


class BuildLibrary(build_ext):
    """Names the library without a Python version: ctypes loads it, so any Python can use it."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class WheelOfPlatform(bdist_wheel):
    """Tags the wheel py3-none-PLATFORM: one wheel serves all Python versions on a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildWithKernels, "build_ext": BuildLibrary, "bdist_wheel": WheelOfPlatform},
    ext_modules=[
        Extension(
            # A plain shared library. The extension machinery builds it and puts it into the wheel.
            "gfgen.gfc._native",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"],
            language="c++",
        )
    ],
)
