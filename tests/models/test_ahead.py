"""Kernels that are compiled before they are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kernel_list import made_list
from gfgen.gfc.cuda import compiler
from gfgen.models.ahead import compiling
from gfgen.models.ahead import pool as places
from gfgen.models.ahead.compiling import EXCHANGES, outcomes
from gfgen.models.ahead.pool import LIST, Compiling, Uses, all_calls, compiler_dirs, needed, pin_compilers
from gfgen.models.families.registry import WEIGHTS
from gfgen.models.geometry.model import CONFIGS
from gfgen.system.machine import locked

QWEN, WAN = CONFIGS / "qwen-image", CONFIGS / "wan2.2-ti2v-5b"
PLAIN = Uses(layers=("auto",), attention=("auto",), vae_dtypes=("auto",), has_images=False, has_patches=False)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path / "gfgen"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for name in ("TRITON_CACHE_MANAGER", "TRITON_PTXAS_PATH", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)
    return tmp_path


# The list -------------------------------------------------------------------------------------------


def test_the_list_has_what_the_modules_launch() -> None:
    assert made_list() == json.loads(LIST.read_text()), "run python -m benchmarks.kernel_list"


def test_a_run_needs_only_the_kernels_of_its_jobs() -> None:
    def number(checkpoint: Path, **changes: Any) -> int:
        given = {name: getattr(PLAIN, name) for name in ("layers", "attention", "vae_dtypes")}
        options = {**given, "has_images": False, "has_patches": False, "outputs": ("video",), **changes}
        return len(needed({checkpoint: Uses(**options)}))

    # Decodes: 27 of Wan 2.2, 14 of Qwen-Image; denoising; and the one with which ranks try the compiler.
    assert number(WAN) == 27 + 6 + 1
    assert number(QWEN, outputs=("picture",)) == 14 + 4 + 1
    assert number(WAN, has_images=True) > number(WAN, layers=("fp8",)) > number(WAN)
    assert number(WAN, has_patches=True) == number(WAN) + 4
    both = needed({WAN: PLAIN, QWEN: PLAIN})
    assert len(both) == len({json.dumps(call) for call in both})
    assert number(WEIGHTS / "shapes") > 0


# The pool -------------------------------------------------------------------------------------------


def pretended(item: compiling.Item) -> str:
    if item[0] == "sm_1":
        raise ValueError("no such GPU")
    return "compiled"


def killed(item: compiling.Item) -> str:
    os._exit(1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # of torch's, here
def test_a_kernel_that_fails_does_not_end_the_others() -> None:
    items: list[compiling.Item] = [(name, None) for name in ("sm_1", "sm_90")]
    failed, made = outcomes(items, pretended)
    assert failed == (EXCHANGES, "missing", "ValueError: no such GPU")
    assert made == (EXCHANGES, "compiled", "")
    assert [each[:2] for each in outcomes(items, killed)] == [(EXCHANGES, "missing")] * 2


def test_a_process_waits_for_what_another_one_makes(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from gfgen.system.machine import locked\n"
        "lock, made = map(Path, sys.argv[1:])\n"
        "with locked(lock, timeout_s=60):\n"
        "    if not made.exists():\n"
        "        time.sleep(0.2); made.open('x').close()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "lock"), str(tmp_path / "made")]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]


def test_a_lock_that_is_never_released_is_waited_for_once(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", timeout_s=1):
        began_s = time.monotonic()
        locked(tmp_path / "lock", timeout_s=0.1).close()
        assert time.monotonic() - began_s >= 0.1


def test_a_kernel_that_does_not_compile_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    call = ("gfgen.models.fast.row_kernels:_nothing", [], {})
    with Compiling([call], ["sm_90"]) as pool:
        assert pool.wait().counts["denoising", "missing"] == 1
    assert "not compiled ahead: " in caplog.text


def test_processes_that_were_killed_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pool = Compiling(all_calls(), ["sm_90"])
    pool._process.kill()
    assert pool.wait().counts.total() == 0
    assert "not compiled ahead: the process ended" in caplog.text
    pool.close()


# The caches -----------------------------------------------------------------------------------------


def test_exchanges_are_compiled_once_and_again_when_damaged(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def compile(library: object, source: Path, includes: object, architecture: str) -> bytes:
        made.append(architecture)
        return b"machine code"

    monkeypatch.setattr(compiler, "load_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda *_: 0))
    monkeypatch.setattr(compiler, "_compile", compile)
    assert not compiler.is_kept("sm_90")
    assert [compiler.compiled("sm_90") for _ in range(2)] == [b"machine code"] * 2
    assert compiler.is_kept("sm_90")
    (path,) = compiler.kept()
    path.write_bytes(b"")
    assert not compiler.is_kept("sm_90")
    assert (compiler.compiled("sm_90"), made) == (b"machine code", ["sm_90"] * 2)
    (caches / "gfgen").rename(caches / "prepared")
    assert not compiler.is_kept("sm_90")
    monkeypatch.setenv("GFGEN_PREPARED", str(caches / "prepared"))
    assert compiler.is_kept("sm_90")


def test_what_the_user_has_set_stays(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_dirs() == {"inductor": caches / "gfgen/inductor", "triton": caches / "triton"}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/else")
    pin_compilers()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/else"
    assert os.environ["TRITON_CACHE_MANAGER"].startswith("gfgen.models.ahead.store:")
    assert compiler_dirs()["inductor"] == Path("/else")


@pytest.mark.parametrize("target", [None, "/proc/none"])
def test_caches_that_cannot_be_written_are_temporary(
    caches: Path, caplog: pytest.LogCaptureFixture, target: str | None
) -> None:
    if target is None:
        (caches / "gfgen").write_text("a file")
    else:  # where even root makes no folder, though `access` allows it
        (caches / "gfgen").symlink_to(target)
    pin_compilers()
    made = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert made.is_dir()
    assert not made.is_relative_to(caches)
    assert os.environ["TRITON_CACHE_DIR"] == str(caches / "triton")
    assert f"{caches}/gfgen/inductor cannot be written" in caplog.text


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which CUDA builds of PyTorch bring")
def test_triton_compiles_for_a_gpu_that_is_not_here(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = needed({QWEN: PLAIN})[:2]

    def found(*, compiles: bool) -> dict[str, int]:
        with Compiling(calls, ["sm_90"], compiles=compiles) as pool:
            return {outcome: n for (kind, outcome), n in pool.wait().counts.items() if kind == "denoising"}

    assert found(compiles=False) == {"missing": 2}
    assert not (caches / "triton").exists()
    assert found(compiles=True) == {"compiled": 2}
    assert found(compiles=True) == {"present": 2}
    first, second = (caches / "triton").rglob("*.cubin")
    first.write_bytes(b"")
    second.unlink()
    assert found(compiles=False) == {"missing": 2}
    assert found(compiles=True) == {"compiled": 2}
    (caches / "prepared").mkdir()
    (caches / "triton").rename(caches / "prepared" / "triton")
    assert found(compiles=False) == {"missing": 2}
    monkeypatch.setenv("GFGEN_PREPARED", str(caches / "prepared"))
    assert found(compiles=False) == {"present": 2}


def test_programs_of_others_keep_their_own_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook may run in an environment without gfgen, where Triton would not find our cache."""
    for name in ("TRITON_CACHE_MANAGER", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_PTXAS_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    places.pin_compilers()
    assert os.environ["TRITON_CACHE_MANAGER"] == places.STORE
    assert "TRITON_CACHE_MANAGER" not in places.environment_of_others()
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "their:own")
    assert places.environment_of_others()["TRITON_CACHE_MANAGER"] == "their:own"
