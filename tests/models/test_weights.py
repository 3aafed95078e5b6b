"""Weight files that are cut short or incomplete are found by their headers, before torch is needed."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from gfgen.errors import ModelError
from gfgen.models.geometry import CONFIGS, load_geometry
from gfgen.models.geometry_weights import (
    Footprint,
    check_weights,
    device_bytes,
    footprint,
    read_header,
)


def write(path: Path, tensors: Mapping[str, tuple[str, list[int], int]], *, cut: int = 0) -> Path:
    """A safetensors file of (dtype, shape, bytes), without its last `cut` bytes."""
    header, end = {}, 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(end)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content[: len(content) - cut])
    return path


def test_a_whole_file_tells_its_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"w": ("F32", [2, 3], 24), "b": ("BF16", [3], 6)})
    assert {name: entry["shape"] for name, entry in read_header(path).items()} == {"w": [2, 3], "b": [3]}


@pytest.mark.parametrize("cut", [1, 24])
def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "a.safetensors", {"w": ("F32", [2, 3], 24)}, cut=cut)
    size = path.stat().st_size
    message = rf"a\.safetensors: has {size} bytes, its header says {size + cut}: .* download the model again"
    with pytest.raises(ModelError, match=message):
        check_weights(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\xff" * 40, struct.pack("<Q", 2) + b"[]", b"\0" * 64])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"a\.safetensors: .*download the model again"):
        check_weights(tmp_path)


def test_a_tensor_that_the_index_expects_and_no_shard_has_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", {"w": ("F32", [1], 4)})
    index = {"weight_map": {"w": "model-1.safetensors", "gone": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-1\.safetensors: no 'gone', which model\.safetensors\.index"):
        check_weights(tmp_path)


def test_a_truncated_model_is_refused_when_its_geometry_is_read(
    tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_models["tiny-wan"], tmp_path / "model"))
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="is truncated or damaged") as refusal:
        load_geometry(model)
    assert "\n" not in str(refusal.value)


def test_fp32_weights_are_shared_and_others_are_converted_on_each_rank(tmp_path: Path) -> None:
    write(tmp_path / "transformer" / "a.safetensors", {"w": ("F32", [100], 400)})
    write(tmp_path / "text_encoder" / "b.safetensors", {"w": ("BF16", [100], 200)})
    (tmp_path / "text_encoder" / "b.bin").write_bytes(b"the same in another format")
    assert footprint(tmp_path) == Footprint(shared_bytes=400, private_bytes=400)
    assert footprint(tmp_path).on(4) == 400 + 4 * 400


@pytest.mark.parametrize(
    ("name", "vae_dtype", "bytes_of_a_parameter"),
    [
        ("wan2.2-ti2v-5b", "auto", 4),
        ("wan2.2-ti2v-5b", "bfloat16", 2),
        ("qwen-image", "auto", 2),
        ("qwen-image", "float32", 4),
    ],
)
def test_a_vae_takes_what_its_dtype_takes(name, vae_dtype, bytes_of_a_parameter):
    found = device_bytes(CONFIGS / name, num_parameters={"vae": 1000}, vae_dtype=vae_dtype)
    assert found == 1000 * bytes_of_a_parameter
