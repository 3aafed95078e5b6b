"""What a job was made with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gfgen.cli.shown.prediction import known_here
from gfgen.errors import InputError
from gfgen.models.families.precision import Precision
from gfgen.models.geometry.weight_files import weights_id
from gfgen.runtime.core.devices import CPU, CUDA, Devices, Gpu
from gfgen.session.ranks import AskedRanks, Ranks, differences, made_with


def checkpoint(folder: Path, content: bytes) -> Path:
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "model.safetensors").write_bytes(content)
    return folder


def test_equal_weights_have_one_hash_wherever_they_are(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "a", b"x" * 300_000), checkpoint(tmp_path / "b", b"x" * 300_000)
    assert weights_id(one) == weights_id(other)
    assert weights_id(one) != weights_id(checkpoint(tmp_path / "c", b"x" * 299_999 + b"y"))
    assert weights_id(one) != weights_id(checkpoint(tmp_path / "d", b"x" * 300_001))


def test_a_checkpoint_of_the_hub_has_its_revision(tmp_path: Path) -> None:
    assert weights_id(tmp_path / "models--x" / "snapshots" / "abc123") == "revision abc123"


def test_differences_are_named_with_both_values(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a", b"x")
    now = made_with(Ranks(Devices(CPU, 2)), path)
    assert differences(now, now) == []
    assert differences({}, now) == []
    older = now | {"versions": {**now["versions"], "torch": "1.0"}}
    assert differences(older, now) == [f"torch 1.0 (now {now['versions']['torch']})"]
    gpus = made_with(Ranks(Devices(CUDA, 1, (Gpu("NVIDIA H200", 1),)), has_random_weights=True), path)
    assert differences(now, gpus) == [
        f"weights {now['weights']} (now random)",
        "device cpu (now NVIDIA H200)",
    ]


def test_fp8_is_a_difference_and_nothing_else_mentions_precision(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a", b"x")
    usual = Ranks(Devices(CUDA, 1, (Gpu("NVIDIA H200", 1),)))
    before, now = made_with(usual, path), made_with(replace(usual, precision=Precision(("fp8",))), path)
    assert "precision" not in before
    assert differences(before, now) == ["precision auto (now fp8)"]
    assert differences(now, before) == ["precision fp8 (now auto)"]
    assert made_with(replace(usual, precision=Precision(("qwen-image=fp8",))), path) == before
    attending = replace(usual, precision=Precision(attention=("fp8",)))
    assert differences(before, made_with(attending, path)) == ["attention auto (now fp8)"]
    assert attending.profiled_as == "NVIDIA H200 attention fp8"
    assert usual.profiled_as == "NVIDIA H200"
    assert replace(usual, precision=Precision(("fp8",))).profiled_as == "NVIDIA H200 fp8"


def test_ranks_on_a_cpu_refuse_fp8() -> None:
    with pytest.raises(InputError, match="--precision fp8: a CPU cannot compute in fp8"):
        AskedRanks(device="cpu", precision=("fp8",)).here()
    with pytest.raises(InputError, match="--attention fp8: a CPU cannot attend in fp8"):
        AskedRanks(device="cpu", attention=("fp8",)).here()
    assert AskedRanks(device="cpu", precision=("auto",)).here().precision == Precision()


def test_times_in_bf16_predict_fp8_as_those_of_another_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    usual = Ranks(Devices(CUDA, 1, (Gpu("NVIDIA H200", 1),)))
    measured, scaled = known_here((), usual), known_here((), replace(usual, precision=Precision(("fp8",))))
    assert measured is not None and scaled is not None  # noqa: PT018
    assert {row.basis for row in measured.rows} == {"measured"}
    assert {row.basis for row in scaled.rows} == {"scaled"}, "as of another GPU, until a run has measured"
