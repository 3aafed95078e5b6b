"""Training `shapes` computes what diffusers computes, and a run can be stopped and taken up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from gfgen.job.spec import JobSpec
from gfgen.models.families.pictures import load_image
from gfgen.models.families.registry import load_adapter
from training import train
from training.codec import LatentScale, decode_clip, encode_moments
from training.flow_model import FlowModel
from training.muon import orthogonalized
from training.parts import MINIATURE, Parts, load, new_parts, save, set_latent_scale
from training.sampling import Recipe, prompt_embeds, sample_videos, token_timesteps
from training.supply import MAX_WORDS

torch.set_num_threads(1)

PROMPTS = ["a red circle on a blue background", "", "a small green square moves up"]
SIZES = ((2, 8, 12), (3, 8, 8), (1, 8, 12))


@pytest.fixture(scope="module")
def parts() -> Parts:
    """With weights from which nothing stays zero."""
    torch.manual_seed(3)
    made = new_parts(MINIATURE)
    for module in (made.text_encoder, made.vae, made.transformer):
        module.eval().requires_grad_(False)
    for module in (made.text_encoder, made.transformer):
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    set_latent_scale(made.vae, torch.randn(16).tolist(), torch.rand(16).add(0.5).tolist())
    return made


@pytest.fixture(scope="module")
def pipeline(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory; parts keep the dtype and weights that they have."""
    folder = tmp_path_factory.mktemp("shapes")
    save(parts, folder, dtype=torch.float32)
    return folder


def tokens_of(parts: Parts) -> torch.Tensor:
    found: Any = parts.tokenizer(PROMPTS, padding="max_length", max_length=MAX_WORDS, return_tensors="pt")
    return found.input_ids


def inputs_of(frames: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(frames)
    latents = torch.randn(len(PROMPTS), 16, frames, height, width, generator=generator)
    return latents, 1000 * torch.rand(len(PROMPTS), frames, generator=generator)


@pytest.mark.parametrize("size", SIZES)
def test_training_predicts_what_diffusers_predicts_with_padded_prompts(
    parts: Parts, size: tuple[int, int, int]
) -> None:
    latents, times = inputs_of(*size)
    expected = parts.transformer(
        hidden_states=latents,
        timestep=token_timesteps(times, latents),
        encoder_hidden_states=prompt_embeds(parts, PROMPTS),
        return_dict=False,
    )[0]
    found = FlowModel(parts)(latents, times, tokens_of(parts))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    in_bf16 = FlowModel(parts, dtype=torch.bfloat16)(latents, times, tokens_of(parts))
    assert (in_bf16 - expected).abs().max() < 0.03 * expected.abs().max()


def test_one_compiled_block_serves_all_videos_and_another_all_pictures(parts: Parts) -> None:
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    model = FlowModel(parts)
    model.compile_blocks(backend=backend)
    for size in ((5, 16, 16), (9, 16, 24), (1, 16, 16), (1, 16, 24)):
        model(*inputs_of(*size), tokens_of(parts))
    assert len(compiled) == 2


def test_the_vae_over_whole_clips_is_the_vae_over_chunks(parts: Parts) -> None:
    clip = torch.rand(1, 3, 9, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    posterior = parts.vae.encode(clip).latent_dist
    mean, log_variance = encode_moments(parts.vae, clip)
    assert torch.allclose(mean, posterior.mean, atol=1e-5)
    assert torch.allclose(log_variance, posterior.logvar, atol=1e-5)
    decoded = decode_clip(parts.vae, mean).clamp(-1, 1)
    assert torch.allclose(decoded, parts.vae.decode(mean).sample, atol=1e-5)


def test_latents_are_scaled_there_and_back(parts: Parts) -> None:
    scale, latents = LatentScale(parts.vae, "cpu"), torch.randn(2, 16, 2, 4, 4)
    assert torch.allclose(scale.denormalize(scale.normalize(latents)), latents, atol=1e-5)


@pytest.mark.parametrize("has_image", [False, True])
def test_many_at_once_are_what_the_adapter_makes_of_each(
    pipeline: Path, picture: Path, has_image: bool
) -> None:
    adapter: Any = load_adapter(pipeline)
    image = str(picture) if has_image else None
    job = adapter.geometry.resolve(
        JobSpec(id="a", prompt=PROMPTS[0], seed=11, width=64, height=64, frames=5, steps=3, image=image)
    )
    prompt = adapter.encode(job)
    condition, latents = adapter.prepare(job, prompt)
    given = adapter._image.video_processor.preprocess(load_image(str(picture)), height=64, width=64) / 2 + 0.5
    for step in range(3):
        latents = adapter.denoise(job, prompt, condition, latents, step=step)
    expected = adapter.decode(job, latents).tensors["frames"]
    recipe = Recipe(width=64, height=64, frames=5, steps=3)
    images = given.expand(2, -1, -1, -1) if has_image else None
    found = sample_videos(load(pipeline), PROMPTS[:2], recipe, seeds=(11, 12), images_BCHW=images)
    assert (found[0].int() - expected.int()).abs().max() <= 1


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(2, 48, 24, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalized(matrices).float())
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_a_stopped_run_goes_on_and_leaves_a_pipeline_that_gfgen_loads(tmp_path: Path) -> None:
    command = [str(tmp_path), "--miniature", "--device", "cpu", "--processes", "0", "--evaluate", "1"]
    train.main([*command, "--vae-seconds", "0", "--text-seconds", "0", "--max-steps", "2"])
    assert _notes(tmp_path) == (2, False)
    train.main([*command, "--max-steps", "1", "--finish"])
    assert _notes(tmp_path) == (3, True)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["resumed_at"] for line in log if "resumed_at" in line] == [2]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["from_text"]["right"]) >= {"background", "colour", "shape"}
    assert (tmp_path / "sheet.png").exists()
    adapter = load_adapter(tmp_path / "shapes")
    job = adapter.geometry.resolve(JobSpec(id="a", prompt=PROMPTS[0], seed=1))
    assert (job.width, job.height, job.frames, job.steps) == (128, 128, 17, 6)


def test_training_goes_on_from_a_pipeline_and_leaves_its_vae_as_it_is(pipeline: Path, tmp_path: Path) -> None:
    command = [str(tmp_path), "--from", str(pipeline), "--rate", "0.5", "--miniature", "--device", "cpu"]
    command += ["--processes", "0", "--evaluate", "0", "--max-steps", "1"]
    train.main(command)
    assert _notes(tmp_path) == (1, False)
    train.main([*command, "--finish"])
    assert _notes(tmp_path) == (2, True)
    old, new = load(pipeline), load(tmp_path / "shapes")
    assert new.vae.config.latents_mean == old.vae.config.latents_mean
    for name, weight in new.vae.state_dict().items():
        assert torch.equal(weight, old.vae.state_dict()[name].half().float())
    for name, weight in new.transformer.state_dict().items():
        # Two steps at a warm-up's rate: near to what it was, so it was no new beginning.
        assert torch.allclose(weight, old.transformer.state_dict()[name], atol=1e-2), name


def _notes(folder: Path) -> tuple[int, bool]:
    with safe_open(str(folder / "flow-0.safetensors"), framework="pt") as file:
        notes = file.metadata()
    return int(notes["step"]), notes["is_done"] == "1"
