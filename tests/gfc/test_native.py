"""The evidence in C++: the model checker, random stress over processes, and ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "tests" / "gfc" / "native"
SOURCES = ROOT / "csrc" / "gfc"
LIMIT_S = 300
"""A hang ends a test; no run takes this long otherwise."""

FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]


def build(target: Path, sources: list[Path], *flags: str) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, *FLAGS, *flags, f"-I{SOURCES}", f"-I{NATIVE}"]
    objects = [target.with_name(f"{target.name}-{source.stem}.o") for source in sources]
    pairs = zip(map(str, sources), map(str, objects), strict=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: _compile([*command, "-c", pair[0], "-o", pair[1]]), pairs))
    _compile([*command, *map(str, objects), "-o", str(target)])
    return target


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    sources = [*NATIVE.glob("check*.cpp"), *NATIVE.glob("scenarios*.cpp")]
    checker = build(tmp_path_factory.mktemp("checker") / "check", sources)
    done = subprocess.run([str(checker)], capture_output=True, text=True, timeout=LIMIT_S)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("    ")]
    return [line.split(" | ") for line in lines]


def test_every_safe_variant_is_found_safe(verdicts: list[list[str]]) -> None:
    safe = [verdict for verdict in verdicts if verdict[1] == "safe"]
    assert len(safe) > 150  # 125 of them are all mixes of three groups over three ranks
    assert [verdict for verdict in safe if verdict[0] != "as expected"] == []


@pytest.mark.parametrize(
    "name",
    [
        "pull without exit barrier",
        "pull from double-buffered staging without exit barrier",
        "entry barrier decided locally",
        "one-way without credit",
        "broadcast without acknowledgement",
        "three chunks in flight on two banks",
        "orders that agree pair by pair only",
        "ulysses and ring groups share banks",
        "signal before the bytes",
        "chunks of heads read in place",
        "keys of a torus read in place",
        "slices in a single bank",
        "looking for sleepers before ringing",
    ],
)
def test_broken_variant_is_rejected(verdicts: list[list[str]], name: str) -> None:
    (verdict,) = [verdict for verdict in verdicts if verdict[2] == name]
    assert verdict[:2] == ["as expected", "broken"]


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("stress") / "stress"
    return build(target, [NATIVE / "stress.cpp", *SOURCES.glob("*.cpp")])


@pytest.mark.parametrize(
    ("num_ranks", "seed", "first_sequence"),
    [(2, 1, 0), (3, 2, 0xFFFFFF00), (4, 3, 0), (5, 4, 0xFFFFFFF0), (8, 5, 0), (8, 6, 0xFFFFFFFF)],
)
def test_random_overlapping_groups_move_every_byte(
    stress: Path, num_ranks: int, seed: int, first_sequence: int
) -> None:
    out = run(stress, "processes", str(num_ranks), "10000", str(seed), str(first_sequence))
    assert "0 ranks failed" in out


def test_ranks_as_threads_are_clean_under_thread_sanitizer(tmp_path: Path) -> None:
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    compiler = shutil.which("g++") or shutil.which("clang++") or "c++"
    built = subprocess.run(
        [compiler, "-fsanitize=thread", str(probe), "-o", str(tmp_path / "probe")],
        capture_output=True,
    )
    if built.returncode or subprocess.run([str(tmp_path / "probe")]).returncode:
        pytest.skip(f"{compiler} has no working ThreadSanitizer here")
    sources = [NATIVE / "stress.cpp", *SOURCES.glob("*.cpp")]
    stress = build(tmp_path / "stress", sources, "-fsanitize=thread", "-O1", "-g1")
    for num_ranks in ("2", "4", "6"):
        assert "0 ranks failed" in run(stress, "threads", num_ranks, "1500", num_ranks, "0xfffffff0")
