"""Pictures and videos on their way into a model, and pictures with alpha on their way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered
from diffusers.utils.loading_utils import load_image as diffusers_image
from diffusers.utils.loading_utils import load_video as diffusers_video
from movies import write_videos
from PIL import Image
from test_job_images import NOISE, movie, transparent_kinds

from gfgen.errors import JobError
from gfgen.job.spec import JobSpec, output_name
from gfgen.models.families.adapter import Adapter
from gfgen.models.families.pictures import load_frames, load_image, load_video
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.model import load_geometry
from gfgen.models.stepping.adapter import as_frames, given_files
from gfgen.models.stepping.check import moved

torch.set_num_threads(1)


def test_a_picture_without_transparent_pixels_is_that_of_diffusers(picture: Path) -> None:
    assert np.array_equal(np.asarray(load_image(picture)), np.asarray(diffusers_image(str(picture))))


@pytest.mark.parametrize("mode", ["RGBA", "P", "RGB", "LA", "PA"])
def test_a_transparent_mask_is_that_of_diffusers(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("mask.tiff" if mode == "PA" else "mask.png")
    kinds = {**transparent_kinds(), "LA": Image.fromarray(NOISE).convert("LA")}
    kinds[mode].save(path)
    files = {"mask_image": str(path), "control_mask": [str(path)]}
    given = given_files(JobSpec(id="a", prompt="a", files=files), has_alpha=False)
    process = VaeImageProcessor(do_convert_grayscale=True, do_resize=False).preprocess
    with Image.open(path) as theirs:
        assert torch.equal(process(given["mask_image"]), process(theirs))
        assert torch.equal(process(given["control_mask"]), process(theirs))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # diffusers leaves the file open
@pytest.mark.parametrize("times", [100, [20, 100, 500, 20]], ids=["even", "uneven"])
def test_frames_of_an_animation_are_those_of_diffusers(tmp_path: Path, times: Any) -> None:
    path = movie(tmp_path / "a.gif", times)
    theirs = [np.asarray(frame.convert("RGB")) for frame in diffusers_video(str(path))]
    assert np.array_equal([np.asarray(frame) for frame in load_frames(path)], theirs)
    assert len(theirs) == 4


def test_an_animated_webp_as_gfgen_writes_it_gives_its_frames(tmp_path: Path) -> None:
    path = movie(tmp_path / "a.webp", lossless=True)
    frames = np.stack([np.roll(NOISE[..., :3], idx, 1) for idx in range(4)])
    assert np.array_equal([np.asarray(frame) for frame in load_frames(path)], frames)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_videos(tmp_path_factory.mktemp("videos"))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # imageio leaves a pipe to the collector
@pytest.mark.parametrize("name", ["uneven.mp4", "phone.mp4", "even.mkv"])
def test_frames_of_a_video_are_those_of_diffusers(videos: Path, name: str) -> None:
    theirs = [np.asarray(frame) for frame in diffusers_video(str(videos / name))]
    assert np.array_equal([np.asarray(frame) for frame in load_video(videos / name)], theirs)


def made_by(adapter: Adapter, spec: JobSpec) -> np.ndarray:
    prompt = moved(adapter.encode(spec))
    condition, latents = map(moved, adapter.prepare(spec, prompt))
    for step in range(spec.steps or 0):
        latents = moved(adapter.denoise(spec, prompt, condition, latents, step=step))
    return adapter.decode(spec, latents).tensors["frames"].numpy()


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-qwen-image"])
def test_pictures_of_16_bits_are_the_rounded_floats_of_the_pipeline(
    tiny_models: Mapping[str, Path], name: str
) -> None:
    adapter = load_adapter(tiny_models[name])
    asked = JobSpec(id="a", prompt="a fox", width=64, height=64, steps=2, seed=5, format="png16")
    scale: dict[str, Any] = {"frames": 5} if name == "tiny-wan" else {"true_cfg_scale": 1.0}
    asked = dataclasses.replace(asked, **scale)
    spec = adapter.geometry.resolve(asked)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tiny_models[name])
    size = {"width": 64, "height": 64, "num_inference_steps": 2} | ({"num_frames": 5} if spec.fps else scale)
    theirs = pipeline(
        prompt="a fox", generator=torch.Generator("cpu").manual_seed(5), output_type="np", **size
    )[0]
    made = made_by(adapter, spec)
    assert made.dtype == np.uint8
    wanted = np.asarray(theirs).reshape(-1, 64, 64, 3)
    assert np.array_equal(made.view("<u2"), (wanted * np.float32(65_535)).round())
    shape = adapter.geometry.trajectory(spec).frames_shape or made.shape
    assert made.shape == shape == (len(wanted), 64, 64, 6)


def layered_checkpoint(base: Path, folder: Path) -> Path:
    """A Qwen-Image-Layered checkpoint whose VAE has four channels, as the published one."""
    parts = diffusers.QwenImagePipeline.from_pretrained(base)
    transformer, vae = (
        {name: value for name, value in dict(part.config).items() if name[0] != "_"}
        for part in (parts.transformer, parts.vae)
    )
    torch.manual_seed(0)
    pipeline = diffusers.QwenImageLayeredPipeline(
        vae=diffusers.AutoencoderKLQwenImage(**vae | {"input_channels": 4}),
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        processor=parts.tokenizer,
        transformer=diffusers.QwenImageTransformer2DModel(
            **transformer | {"use_layer3d_rope": True, "use_additional_t_cond": True}
        ),
        scheduler=parts.scheduler,
    )
    pipeline.save_pretrained(folder)
    return folder


def test_layers_have_the_alpha_of_the_pipelines_own_call(
    tiny_models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The call knows two sizes, of which the smaller one takes a minute.
    monkeypatch.setattr(pipeline_qwenimage_layered, "calculate_dimensions", lambda area, ratio: (64, 64))
    checkpoint = layered_checkpoint(tiny_models["tiny-qwen-image"], tmp_path / "layered")
    Image.fromarray(NOISE).resize((64, 64)).save(tmp_path / "cut.png")
    adapter = load_adapter(checkpoint)
    asked = JobSpec(
        id="a", prompt="a fox", image=str(tmp_path / "cut.png"), args={"layers": 2}, steps=2, seed=5
    )
    spec = adapter.geometry.resolve(asked)
    ours = made_by(adapter, spec)

    pipeline = diffusers.QwenImageLayeredPipeline.from_pretrained(checkpoint)
    with Image.open(tmp_path / "cut.png") as image:
        theirs = pipeline(
            image=image.convert("RGBA"),
            prompt="a fox",
            layers=2,
            num_inference_steps=2,
            generator=torch.Generator("cpu").manual_seed(5),
        ).images[0]
    assert [layer.mode for layer in theirs] == ["RGBA"] * 2
    assert np.array_equal(ours, [np.asarray(layer) for layer in theirs])

    geometry = load_geometry(checkpoint)
    assert geometry.has_alpha
    options = {"kind": geometry.output_kind(spec), "has_alpha": geometry.has_alpha}
    jpeg = dataclasses.replace(spec, format="jpeg")
    with pytest.raises(
        JobError, match=r"format = jpeg: has no alpha, .* use png, webp or avif, or give background"
    ):
        output_name(jpeg, **options)
    assert output_name(dataclasses.replace(jpeg, background="#ffffff"), **options) == "a.jpg"


def test_qwen_image_with_a_vae_of_four_channels_makes_alpha(
    tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    base = diffusers.QwenImagePipeline.from_pretrained(tiny_models["tiny-qwen-image"])
    vae = {name: value for name, value in dict(base.vae.config).items() if name[0] != "_"}
    torch.manual_seed(0)
    base.register_modules(vae=diffusers.AutoencoderKLQwenImage(**vae | {"input_channels": 4}))
    base.save_pretrained(tmp_path)
    adapter = load_adapter(tmp_path)
    asked = JobSpec(id="a", prompt="a fox", width=64, height=64, steps=2, seed=5, true_cfg_scale=1.0)
    spec = adapter.geometry.resolve(asked)
    assert adapter.geometry.trajectory(spec).frames_shape == (1, 64, 64, 4)
    generator = torch.Generator("cpu").manual_seed(5)
    size = {"width": 64, "height": 64, "num_inference_steps": 2, "true_cfg_scale": 1.0}
    (theirs,) = base(prompt="a fox", generator=generator, **size).images
    assert theirs.mode == "RGBA"
    assert np.array_equal(made_by(adapter, spec)[0], np.asarray(theirs))


@pytest.mark.parametrize("channels", [3, 4])
def test_outputs_have_three_or_four_channels(channels: int) -> None:
    made = np.full((2, 4, 6, channels), 0.5, np.float32)
    frames = as_frames(type("Output", (), {"images": made}))
    assert frames.shape == (2, 4, 6, channels)
    assert frames.unique().tolist() == [128]
    deep = as_frames(type("Output", (), {"images": made}), per_sample=2)
    assert np.unique(deep.numpy().view("<u2")).tolist() == [32_768]
    eight = as_frames(type("Output", (), {"images": frames.numpy()}), per_sample=2)
    assert np.unique(eight.numpy().view("<u2")).tolist() == [128 * 257]
