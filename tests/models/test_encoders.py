"""Text encoders over a prompt's own tokens: embeddings as the pipeline's, in records of a few lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_worker_imitation import ImitationRecorder

from gfgen.job.spec import JobSpec
from gfgen.models.families import encoders
from gfgen.models.families.encoders import text_encoder_of
from gfgen.models.families.registry import load_adapter
from gfgen.models.fast.recording import Graphs

torch.set_num_threads(1)

CPU = torch.device("cpu")
ROUNDING = 1e-5
PROMPTS = ("a", "a red fox in the snow, " * 9, "rain " * 700)


@pytest.mark.parametrize("name", ["tiny-qwen-image", "tiny-wan"])
def test_embeddings_of_own_tokens_equal_the_pipelines_up_to_rounding(
    tiny_models: Mapping[str, Path], name: str
) -> None:
    adapter: Any = load_adapter(tiny_models[name])
    model = adapter._pipeline.text_encoder
    assert adapter._text_encoder is None, "on a CPU results are the pipeline's, bitwise"
    jobs = [JobSpec(id="a", prompt=prompt, width=64, height=64) for prompt in PROMPTS]
    specs = [adapter.geometry.resolve(job) for job in jobs]
    wanted = [adapter.encode(spec).tensors["prompt_embeds"] for spec in specs]
    adapter._text_encoder = text_encoder_of(model)
    adapter._embed.cache_clear()
    for spec, embeds in zip(specs, wanted, strict=True):
        found = adapter.encode(spec).tensors["prompt_embeds"]
        assert found.shape == embeds.shape
        assert (found - embeds).abs().max() <= ROUNDING * embeds.abs().max()


@pytest.mark.parametrize("name", ["tiny-qwen-image", "tiny-wan"])
def test_one_record_serves_all_prompts_of_a_length(
    tiny_models: Mapping[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "LENGTHS", (64, 128))
    monkeypatch.setattr("gfgen.models.fast.recording.WORTH_RECORDING", 0.0)
    adapter: Any = load_adapter(tiny_models[name])
    model = adapter._pipeline.text_encoder
    encoder = text_encoder_of(model)
    assert encoder is not None
    prompts = [list(range(3, 3 + length)) for length in (9, 50, 64, 90)]
    launched = [encoder(ids, lambda stack, inputs: stack(**inputs)[0]) for ids in prompts]
    graphs = Graphs(ImitationRecorder(), CPU)
    with torch.no_grad(), graphs.rehearsing(None):
        for rehearse in encoder.rehearsals(graphs):
            rehearse()
    assert len(graphs._records) == 2
    assert all(map(torch.equal, [encoder(ids, graphs) for ids in prompts], launched))
    assert len(graphs._records) == 2
