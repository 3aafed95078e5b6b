"""What the sdist and the wheel hold: everything that an install needs from the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"PKG-INFO", "setup.cfg"}
EXCLUDED = {".ci/run", ".dockerignore", ".gitignore", ".pre-commit-config.yaml"}
KERNELS = {path.name for path in (ROOT / "csrc/gfc/cuda").iterdir()}


def build(folder: Path, kind: str, target: Path) -> Path:
    """Build as pip does, with the setuptools that is installed."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def sdist(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy that holds only what is in the repository."""
    clean = tmp_path_factory.mktemp("clean")
    for name in tracked:
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clean / name)
    return build(clean, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone, as by an installer that finds no wheel for its platform."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (folder,) = unpacked.iterdir()
    return build(folder, "wheel", tmp_path_factory.mktemp("wheel"))


def test_an_sdist_holds_the_repository(sdist: Path, tracked: set[str]) -> None:
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    ours = {name for name in packed - GENERATED if not name.startswith("gfgen.egg-info/")}
    assert ours == tracked - EXCLUDED


def test_a_wheel_holds_the_package_its_library_and_the_kernels(wheel: Path, tracked: set[str]) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {name for name in tracked if name.startswith("gfgen/")}
    sources = {name.removeprefix("csrc/gfc/") for name in tracked if name.startswith("csrc/gfc/")}
    kernels = {f"gfgen/gfc/csrc/{name}" for name in sources if not name.endswith(".cpp")}
    assert {f"gfgen/gfc/csrc/cuda/{name}" for name in KERNELS} <= kernels
    assert packed == package | kernels | {"gfgen/gfc/_native.so"}


def test_a_wheel_is_for_all_pythons_of_a_platform(wheel: Path) -> None:
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform != "any"
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_pinned_versions_are_within_the_ranges_of_the_package() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (wanted for extra in project["optional-dependencies"].values() for wanted in extra)
    for wanted in map(Requirement, (*project["dependencies"], *extras)):
        if wanted.name != project["name"]:
            assert pins[wanted.name] in wanted.specifier, wanted
