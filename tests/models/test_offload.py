"""`--offload`: text encoders and idle experts in host memory give the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from gfgen.job.spec import JobSpec
from gfgen.models.geometry.weights import Placement
from gfgen.models.loading.components import load_pipeline
from gfgen.models.loading.stored_weights import StoredWeights
from gfgen.models.loading.waiting import let_wait
from gfgen.models.lora import merging
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.worker.entry import load_model

torch.set_num_threads(1)


def result(adapter: Any, spec: JobSpec) -> torch.Tensor:
    prompt = adapter.encode(spec)
    condition, latents = adapter.prepare(spec, prompt)
    for step in range(spec.steps or 0):
        latents = adapter.denoise(spec, prompt, condition, latents, step=step)
    frames: torch.Tensor = adapter.decode(spec, latents).tensors["frames"]
    return frames


@pytest.mark.parametrize(
    ("name", "has_random_weights"), [("tiny-wan-moe", False), ("tiny-qwen-image", False), ("tiny-wan", True)]
)
def test_an_offloaded_model_makes_the_pictures_of_the_whole_one(
    tiny_models: Mapping[str, Path], name: str, has_random_weights: bool
) -> None:
    job, found = JobSpec(id="a", prompt="a red fox", seed=1, width=64, height=64, steps=2), []
    for offloads in (False, True):
        ranks = RankSettings(
            num_ranks=1,
            has_random_weights=has_random_weights,
            placement=Placement(holds_all=not offloads),
            patch_copies_on_host=(str(tiny_models[name]),) if offloads else (),
        )
        adapter: Any = load_model(WorkerSettings(0, (), ranks), str(tiny_models[name]))
        assert adapter.patches.keeps_on_host is offloads
        assert adapter.patches.stored == StoredWeights(tiny_models[name], has_random_weights)
        spec = adapter.geometry.resolve(job)
        found.append(result(adapter, spec))
        pipeline = adapter._pipeline if name == "tiny-qwen-image" else adapter._text
        on_meta = {parameter.is_meta for parameter in pipeline.text_encoder.parameters()}
        assert on_meta == {offloads}, "between tasks the device holds no text encoder"
    assert torch.equal(*found)


def test_a_pipelines_own_call_works_with_offloaded_parts(
    tiny_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # diffusers looks for a part on a GPU, and finds none here
    monkeypatch.setattr(diffusers.DiffusionPipeline, "_execution_device", torch.device("cpu"))
    checkpoint = tiny_models["tiny-wan-moe"]
    load = partial(load_pipeline, diffusers.WanPipeline, checkpoint, device="cpu", dtype=torch.float32)
    call = {"prompt": "a red fox", "width": 64, "height": 64, "num_frames": 5, "num_inference_steps": 2}
    videos = [
        load(placement=Placement(holds_all=not offloads))(
            **call, generator=torch.Generator().manual_seed(1), output_type="pt"
        )
        for offloads in (False, True)
    ]
    assert torch.equal(videos[0].frames, videos[1].frames)


class Expert(torch.nn.Module):
    """Knows on which of two pretended devices it is."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.device("cpu")

    def to(self, device: Any, *_: Any, **__: Any) -> Expert:
        self.place = torch.device(device)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Expert:
        """Asks where the given function would take a weight."""
        assert not recurse, "layer by layer"
        return self.to(fn.keywords["device"])

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield SimpleNamespace(device=self.place)

    def forward(self) -> str:
        return self.place.type


def test_the_device_holds_the_expert_of_the_present_step_alone() -> None:
    high, low = Expert(), Expert()
    parts = {"transformer": high, "transformer_2": low, "vae": torch.nn.Linear(1, 1)}
    let_wait(SimpleNamespace(components=parts), torch.device("meta"))
    assert [high.place.type, low.place.type] == ["cpu", "cpu"], "until the first step"
    for expert, other in ((high, low), (high, low), (low, high), (high, low)):
        assert expert() == "meta"
        assert other.place.type == "cpu"


class Change:
    """Notes where it is computed."""

    parameter = "weight"

    def __init__(self) -> None:
        self.places: set[str] = set()

    def add(self, source: torch.Tensor, scale: float, *, out: torch.Tensor) -> None:
        self.places |= {source.device.type, out.device.type}


def test_loras_of_an_expert_in_host_memory_are_merged_on_the_device() -> None:
    expert, change = torch.nn.Linear(2, 2), Change()
    parts = {"transformer": expert, "transformer_2": torch.nn.Linear(2, 2)}
    let_wait(SimpleNamespace(components=parts), torch.device("meta"))
    with pytest.raises(NotImplementedError, match="out of meta tensor"):  # it has no values to write back
        merging._Model(expert).set({"weight": [(change, 1.0)]})
    assert change.places == {"meta"}


@pytest.mark.parametrize("keeps_on_host", [False, True])
def test_a_lora_is_merged_and_taken_out_wherever_the_original_weights_are(keeps_on_host: bool) -> None:
    up, down = torch.randn(4, 2), torch.randn(2, 3)
    layer = torch.nn.Linear(3, 4)
    original = layer.weight.data.clone()
    model = merging._Model(layer, keeps_on_host=keeps_on_host)
    model.set({"weight": [(merging._Product("weight", up, down, 1.0, 1.0), 0.5)]})
    assert torch.equal(layer.weight.data, original + 0.5 * (up @ down))
    model.set({})
    assert torch.equal(layer.weight.data, original)


def test_copies_in_host_memory_share_blocks_and_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned, and usual memory takes its place."""
    monkeypatch.setattr(merging, "_BLOCK_BYTES", 200)
    memory = merging._HostMemory()
    weights = [torch.randn(3, 5).bfloat16(), torch.randn(7), torch.randn(9, 9), torch.randn(2).half()]
    copies = [memory.copy_of(weight, is_pinned=True) for weight in weights]
    assert all(map(torch.equal, copies, weights))
    places = [copy.untyped_storage().data_ptr() for copy in copies]
    assert [place == places[0] for place in places] == [True, True, False, False]
    assert len({copy.data_ptr() for copy in copies}) == len(copies)


@pytest.mark.gpu
def test_an_experts_place_changes_no_bit_of_a_merged_lora() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    up, down = torch.randn(256, 16).bfloat16(), torch.randn(16, 256).bfloat16()
    change = merging._Product("weight", up, down, 1.0, 1.0)
    expert = torch.nn.Linear(256, 256).bfloat16()
    parts = {"transformer": expert, "transformer_2": torch.nn.Linear(2, 2)}
    let_wait(SimpleNamespace(components=parts), torch.device("cuda"))
    model = merging._Model(expert, keeps_on_host=True)
    found = []
    for place in ("cpu", "cuda"):
        expert.to(place)
        model.set({"weight": [(change, 0.3)]})
        found.append(expert.weight.data.cpu())
    assert torch.equal(*found)
    assert {base.device.type for base in model._base.values()} == {"cpu"}


def test_text_encoders_and_experts_are_offloaded_and_a_transformer_alone_is_not() -> None:
    parts = ["text_encoder", "text_encoder_2", "tokenizer", "transformer", "vae"]
    placement = Placement(holds_all=False)
    assert [name for name in parts if placement.waits(name, parts)] == ["text_encoder", "text_encoder_2"]
    assert placement.waits("transformer", [*parts, "transformer_2"])
    assert not any(Placement().waits(name, parts) for name in parts)
