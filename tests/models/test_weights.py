"""Weight files that are cut short or incomplete are found by their headers, before torch is needed."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from gfgen.errors import ModelError
from gfgen.models.geometry.model import CONFIGS, load_geometry
from gfgen.models.geometry.weight_files import check_weights, read_header, weight_files
from gfgen.models.geometry.weights import Footprint, Part, device_bytes, device_parts, footprint


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
    path = write(tmp_path / "model.safetensors", {"w": ("F32", [2, 3], 24)}, cut=cut)
    size = path.stat().st_size
    message = (
        rf"model\.safetensors: has {size} bytes, its header says {size + cut}: .* download the model again"
    )
    with pytest.raises(ModelError, match=message):
        check_weights(weight_files(tmp_path, "transformers"))


@pytest.mark.parametrize("content", [b"", b"\1\0\0", b"\xff" * 40, struct.pack("<Q", 2) + b"[]", b"\0" * 64])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*download the model again"):
        check_weights(weight_files(tmp_path, "transformers"))


def test_a_tensor_that_the_index_expects_and_no_shard_has_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", {"w": ("F32", [1], 4)})
    index = {"weight_map": {"w": "model-1.safetensors", "gone": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-1\.safetensors: no 'gone', which model\.safetensors\.index"):
        check_weights(weight_files(tmp_path, "transformers"))


def test_a_truncated_model_is_refused_when_its_geometry_is_read(
    tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_models["tiny-wan"], tmp_path / "model"))
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="is truncated or damaged") as refusal:
        load_geometry(model)
    assert "\n" not in str(refusal.value)


MODEL_INDEX = {
    "_class_name": "WanPipeline",
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "image_encoder": [None, None],
}
W = {"w": ("F32", [100], 400)}
HALF = {"w": ("BF16", [100], 200)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """100 parameters in fp32, and 100 in bf16."""
    (tmp_path / "model_index.json").write_text(json.dumps(MODEL_INDEX))
    write(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", W)
    write(tmp_path / "text_encoder" / "model.safetensors", HALF)
    return tmp_path


def shard(folder: Path, stem: str, count: int = 2) -> None:
    """The same weight, in the first of so many shards."""
    names = [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    write(folder / names[0], W)
    for number, name in enumerate(names[1:]):
        write(folder / name, {f"x{number}": ("F32", [0], 0)})
    weight_map = {"w": names[0]} | {f"x{number}": name for number, name in enumerate(names[1:])}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_fp32_weights_are_shared_and_others_are_converted_on_each_rank(checkpoint: Path) -> None:
    assert footprint(checkpoint) == Footprint(shared_bytes=400, private_bytes=400)
    assert footprint(checkpoint).on(4) == 400 + 4 * 400


@pytest.mark.parametrize(
    "path",
    [
        "transformer/diffusion_pytorch_model.fp16.safetensors",  # a variant, beside
        "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",  # of an older download
        "split_files/model.safetensors",  # no component's
        "Wan2.2_VAE.safetensors",  # the original format, beside
    ],
)
def test_weights_that_are_there_twice_count_once(checkpoint: Path, path: str) -> None:
    write(checkpoint / path, W)
    (checkpoint / "text_encoder" / "pytorch_model.bin").write_bytes(b"the same in another format")
    assert footprint(checkpoint) == Footprint(shared_bytes=400, private_bytes=400)
    assert sum(device_bytes(checkpoint).values()) == 2 * 200


def test_of_shards_and_one_file_those_count_that_are_loaded(checkpoint: Path) -> None:
    shard(checkpoint / "transformer", "diffusion_pytorch_model")
    shard(checkpoint / "text_encoder", "model")
    found = [path.name for path in weight_files(checkpoint / "transformer", "diffusers")]
    assert found == [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert [path.name for path in weight_files(checkpoint / "text_encoder", "transformers")] == [
        "model.safetensors"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "diffusion_pytorch_model.ema.safetensors",
            r"of variants \(diffusion_pytorch_model\.ema.* bf16 and fp16",
        ),
        ("diffusion_pytorch_model-00001-of-00002.safetensors", r"index\.json is missing"),
        ("wan.safetensors", r"wan\.safetensors is not read"),
    ],
)
def test_weights_that_would_not_be_loaded_are_refused(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path / name, W)
    with pytest.raises(ModelError, match=message):
        weight_files(tmp_path, "diffusers")


def test_a_link_to_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(ModelError, match=r"model\.safetensors: is a link to a file that does not exist"):
        weight_files(tmp_path, "transformers")


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.safetensors"])
def test_components_with_code_of_their_own_have_the_files_of_either_library(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path / name, W)
    assert weight_files(tmp_path, "my_code") == (tmp_path / name,)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4967368\n"


@pytest.mark.parametrize(
    "path",
    ["vae/diffusion_pytorch_model.safetensors", "vae/config.json", "tokenizer/tokenizer.json"],
)
def test_a_pointer_of_git_lfs_is_named(tiny_models: Mapping[str, Path], tmp_path: Path, path: str) -> None:
    model = Path(shutil.copytree(tiny_models["tiny-wan"], tmp_path / "model"))
    (model / path).write_bytes(POINTER)
    with pytest.raises(ModelError, match=rf"{path}: is a pointer of git-lfs .* run 'git lfs pull'"):
        load_geometry(model)


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
    found = device_parts(CONFIGS / name, counted={"vae": Part(1000)}, vae_dtype=vae_dtype)
    assert found == {"vae": Part(1000 * bytes_of_a_parameter)}
