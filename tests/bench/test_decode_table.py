"""The rows of `python -m benchmarks.decode`, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import decode
from benchmarks.decode import SHAPES, DecodeRow, measure_decodes, table_of
from gfgen.bench import gfc
from gfgen.errors import InputError
from gfgen.layout import Layout
from gfgen.models.geometry.model import shipped_geometry


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_are_those_of_the_models(shape: Any) -> None:
    vae: Any = shipped_geometry(shape.model).vae  # type: ignore[attr-defined]
    assert shape.latents[1] == vae.z_dim


def test_groups_work_side_by_side_and_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class FourGpus:
        num_devices = 4

    class FakeRanks:
        def __init__(self, num_ranks: int, plan: object) -> None:
            self.layouts: dict[int, Layout] = {}

        def next_dispatch(self, count: int) -> int:
            return 1

        def run(self, ranks: Any, program: object, shape: object, dtype: str) -> list[Any]:
            psnr_db = None if dtype == "float32" else 40.0
            return [result(8.0, psnr_db=psnr_db, spread=9.0) for _ in ranks]

        def submit(self, rank: int, program: object, shape: object, layout: Layout, number: int) -> None:
            self.layouts[rank] = layout

        def result(self, rank: int) -> Any:
            layout = self.layouts[rank]
            assert layout.slot_of(rank) == rank % layout.degree
            return result(8.0 / layout.degree + 0.1 * rank, distance=1e-4, max_levels=1)

        def close(self) -> None: ...

    def result(seconds: float, *, psnr_db: float | None = 50.0, **fields: Any) -> dict[str, Any]:
        return {"times_s": [seconds], "first_s": 9.0, "peak_gb": 1.0, "psnr_db": psnr_db, **fields}

    monkeypatch.setattr(gfc, "driver", FourGpus)
    monkeypatch.setattr(decode, "CudaRanks", FakeRanks)
    told: list[DecodeRow] = []
    rows = measure_decodes(num_gpus=4, tell=told.append)
    assert {row.shape for row in told} == {shape.name for shape in SHAPES}
    assert sorted(told, key=repr) == sorted(rows, key=repr)
    assert [row.degree for row in rows] == [1, 2, 4] * 5
    assert [row.seconds for row in rows[:3]] == pytest.approx([8.0, 4.3, 2.3])
    text = "\n".join(table_of(rows, device="4 x GPU", command="python -m benchmarks.decode"))
    assert "| wan-1280x704x81 | bfloat16 | 4 | 2.300 | 3.48 | 9.0 | 1.0 | 1.0e-04 | 1 | 50.0 |" in text
    assert len(measure_decodes(num_gpus=4, seconds=0)) == 1
    with pytest.raises(InputError, match="this machine has 4 NVIDIA GPUs"):
        measure_decodes(num_gpus=5)
