"""Prompts with weights and of any length, on small Stable Diffusion and SDXL checkpoints."""

import contextlib
import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import compel
import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import pre_tokenizers

from gfgen.errors import JobError
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import load_adapter
from gfgen.models.geometry.weights import Placement, count_parts
from gfgen.models.stepping.check import moved
from gfgen.models.stepping.outlined import answers
from gfgen.models.streaming.stream import stream_of
from gfgen.runtime.ipc.settings import RankSettings, WorkerSettings
from gfgen.runtime.worker.entry import load_model

LONG = ", ".join(f"a red fox number {number}" for number in range(12)) + ". It sleeps."
JOB = JobSpec(
    id="a",
    prompt="a red fox",
    negative_prompt="blurry",
    prompt_syntax="a1111",
    width=64,
    height=64,
    steps=3,
    guidance_scale=3.0,
    seed=3,
)


def tokenizer() -> Any:
    """Letters, and letters at the end of a word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {word: idx for idx, word in enumerate(words)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def encoder_config() -> Any:
    return transformers.CLIPTextConfig(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=32,
        bos_token_id=0,
        eos_token_id=1,
    )


def small(kind: Any, **others: Any) -> Any:
    is_large = "XL" in kind.__name__
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        more: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
        added: dict[str, Any] = {}
        if is_large:
            more = {
                "text_encoder_2": transformers.CLIPTextModelWithProjection(encoder_config()),
                "tokenizer_2": tokenizer(),
            }
            added = {
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 6 * 8 + 32,
            }
        unet = diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(32, 32),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            attention_head_dim=2,
            cross_attention_dim=64 if is_large else 32,
            **added,
        )
        return kind(
            unet=unet,
            vae=diffusers.AutoencoderKL(block_out_channels=(8, 8, 8, 8), norm_num_groups=4,
                down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4),
            text_encoder=transformers.CLIPTextModel(encoder_config()),
            tokenizer=tokenizer(),
            scheduler=diffusers.EulerDiscreteScheduler(steps_offset=1),
            **more,
            **others,
        )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weighted")
    kinds: dict[str, Any] = {
        "sd": diffusers.StableDiffusionPipeline,
        "sd-img2img": diffusers.StableDiffusionImg2ImgPipeline,
        "sdxl": diffusers.StableDiffusionXLPipeline,
        "sdxl-inpaint": diffusers.StableDiffusionXLInpaintPipeline,
    }
    for name, kind in kinds.items():
        small(kind).save_pretrained(folder / name)
    return {name: folder / name for name in kinds}


@functools.cache
def two_adapters(checkpoint: Path) -> list[Any]:
    return [load_adapter(checkpoint) for _ in range(2)]


def run(checkpoint: Path, spec: JobSpec) -> np.ndarray:
    """Frames of a job whose tasks alternate between two adapters, which have had other jobs before."""
    adapters = two_adapters(checkpoint)
    spec = adapters[0].geometry.resolve(spec)
    prompt = moved(adapters[0].encode(spec))
    condition, latents = map(moved, adapters[1].prepare(spec, prompt))
    for step in range(spec.steps or 0):
        latents = moved(adapters[step % 2].denoise(spec, prompt, condition, latents, step=step))
    return adapters[1].decode(spec, latents).tensors["frames"].numpy()


def own_call(checkpoint: Path, **arguments: Any) -> np.ndarray:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(checkpoint)
    arguments = {name: value(pipeline) if callable(value) else value for name, value in arguments.items()}
    arguments = arguments.pop("made", {}) | arguments
    if "image" not in arguments:
        arguments |= {"width": 64, "height": 64}
    made = pipeline(
        **arguments,
        num_inference_steps=3,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    )
    return (made.images * 255).round().astype(np.uint8)


def of_sd(prompt: str, negative: str | None) -> Any:
    def made(pipeline: Any) -> dict[str, Any]:
        found = compel.CompelForSD(pipeline)(prompt, negative)
        return {"prompt_embeds": found.embeds, "negative_prompt_embeds": found.negative_embeds}

    return made


def of_sdxl(prompt: str, negative: str | None, *, plain: str) -> Any:
    """compel pools its own syntax as text, so the pooled embeddings are those of a text without it."""

    def made(pipeline: Any) -> dict[str, Any]:
        make = compel.CompelForSDXL(pipeline)
        found, pooled = make(prompt, negative_prompt=negative), make(plain, negative_prompt=negative)
        return {
            "prompt_embeds": found.embeds,
            "negative_prompt_embeds": found.negative_embeds,
            "pooled_prompt_embeds": pooled.pooled_embeds,
            "negative_pooled_prompt_embeds": pooled.negative_pooled_embeds,
        }

    return made


PROMPTS = {
    "a red fox": "a red fox",
    "a (red:1.3) fox, (calm:0.6)": "a (red)1.3 fox, (calm)0.6",
    "a ((red)) fox [at night]": "a (red)1.21 fox (at night)0.909091",
    "a red fox BREAK (night:1.2)": '("a red fox", "(night)1.2").and()',
    LONG: LONG,
    f"(blue:1.4) {LONG}": f"(blue)1.4 {LONG}",
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_pictures_are_those_of_a_call_with_compels_embeddings(
    checkpoints: dict[str, Path], prompt: str
) -> None:
    spec = dataclasses.replace(JOB, prompt=prompt)
    wanted = own_call(checkpoints["sd"], made=of_sd(PROMPTS[prompt], "blurry"))
    assert np.array_equal(run(checkpoints["sd"], spec), wanted)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_two_encoders_give_one_embedding_and_the_second_one_pools(
    checkpoints: dict[str, Path], prompt: str
) -> None:
    spec = dataclasses.replace(JOB, prompt=prompt)
    plain = "".join(char for char in prompt.replace("BREAK ", "") if char not in "()[]:.1234560")
    plain = prompt if prompt == LONG else f"blue {LONG}" if LONG in prompt else plain
    wanted = own_call(checkpoints["sdxl"], made=of_sdxl(PROMPTS[prompt], "blurry", plain=plain))
    assert np.array_equal(run(checkpoints["sdxl"], spec), wanted)


@pytest.mark.parametrize("prompt", ["a (red:1.3) fox", LONG])
def test_a_negative_prompt_that_is_not_there_is_what_the_call_makes_of_it(
    checkpoints: dict[str, Path], prompt: str
) -> None:
    """SDXL makes zeros of it, Stable Diffusion encodes an empty text."""
    spec = dataclasses.replace(JOB, prompt=prompt, negative_prompt=None)
    of_compel = prompt.replace("(red:1.3)", "(red)1.3")
    wanted = own_call(checkpoints["sd"], made=of_sd(of_compel, ""))
    assert np.array_equal(run(checkpoints["sd"], spec), wanted)
    plain = prompt.replace("(red:1.3)", "red")
    wanted = own_call(checkpoints["sdxl"], made=of_sdxl(of_compel, None, plain=plain))
    assert np.array_equal(run(checkpoints["sdxl"], spec), wanted)


def test_short_texts_without_weights_are_those_of_the_call(checkpoints: dict[str, Path]) -> None:
    for name in ("sd", "sdxl"):
        wanted = own_call(checkpoints[name], prompt="a red fox", negative_prompt="blurry")
        assert np.array_equal(run(checkpoints[name], JOB), wanted)
        weighted = dataclasses.replace(JOB, prompt="a (red:1.3) fox")
        assert not np.array_equal(run(checkpoints[name], weighted), wanted)
        literal = dataclasses.replace(weighted, prompt_syntax=None)
        wanted = own_call(checkpoints[name], prompt=literal.prompt, negative_prompt="blurry")
        assert np.array_equal(run(checkpoints[name], literal), wanted)


@pytest.mark.parametrize(("name", "end"), [("sd", ""), ("sdxl", "_2")])
def test_a_word_of_several_vectors_is_that_of_the_call(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, end: str
) -> None:
    """Also one that only the second tokenizer has."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(checkpoints[name])
    parts = {part: getattr(pipeline, f"{part}{end}") for part in ("tokenizer", "text_encoder")}
    width = parts["text_encoder"].config.hidden_size
    pipeline.load_textual_inversion({"<toy>": torch.linspace(-1, 1, 3 * width).view(3, width)}, **parts)
    pipeline.save_pretrained(tmp_path)
    wanted = own_call(tmp_path, prompt="a red <toy> here", negative_prompt="blurry")
    for syntax in ("a1111", None):
        job = dataclasses.replace(JOB, prompt="a red <toy> here", prompt_syntax=syntax)
        assert np.array_equal(run(tmp_path, job), wanted)


@pytest.mark.parametrize("name", ["sd-img2img", "sdxl-inpaint"])
def test_pipelines_that_take_pictures_take_weights(
    checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    picture = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    picture.save(tmp_path / "a.png")
    given: dict[str, Any] = {"image": picture, "strength": 0.9}
    spec = dataclasses.replace(
        JOB, prompt="a (red:1.3) fox", image=str(tmp_path / "a.png"), args={"strength": 0.9}
    )
    if name == "sd-img2img":
        spec = dataclasses.replace(spec, width=None, height=None)
        made = of_sd("a (red)1.3 fox", "blurry")
    else:
        spec = dataclasses.replace(spec, files={"mask_image": str(tmp_path / "a.png")})
        given |= {"mask_image": picture, "width": 64, "height": 64}
        made = of_sdxl("a (red)1.3 fox", "blurry", plain="a red fox")
    wanted = own_call(checkpoints[name], made=made, **given)
    assert np.array_equal(run(checkpoints[name], spec), wanted)


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_calls_with_weights_are_tried_without_weights_of_the_model_and_read_all_words(
    checkpoints: dict[str, Path], name: str
) -> None:
    job = dataclasses.asdict(JOB)
    found = answers(
        {
            "checkpoint": str(checkpoints[name]),
            "trusts_code": False,
            "calls": {"a1111": job, "plain": {**job, "prompt_syntax": None}},
            "texts": {"all": ("a1111", "prompt", LONG), "cut": ("plain", "prompt", LONG)},
        }
    )
    assert [found["calls"][key]["unknown"] for key in ("a1111", "plain")] == [None, None]
    assert found["texts"]["all"] == len(LONG) > found["texts"]["cut"]


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_streamed_encoders_make_the_same(checkpoints: dict[str, Path], name: str) -> None:
    adapter, parts = load_adapter(checkpoints[name]), count_parts(checkpoints[name])
    blocks = {part: frozenset(each.blocks) for part, each in parts.items() if "text" in part}
    ranks = RankSettings(num_ranks=1, placements={str(checkpoints[name]): Placement(blocks, 2)})
    streaming: Any = load_model(WorkerSettings(0, (), ranks), str(checkpoints[name]))
    assert stream_of(streaming.pipeline.text_encoder) is not None
    spec = adapter.geometry.resolve(dataclasses.replace(JOB, prompt="a (red:1.3) fox, (calm:0.6)"))
    before, after = adapter.encode(spec).tensors, streaming.encode(spec).tensors
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_all_texts_can_be_encoded(checkpoints: dict[str, Path]) -> None:
    adapter = load_adapter(checkpoints["sd"])
    pick = random.Random(1)
    for _ in range(20):
        words = pick.choices(
            ["a", "fox", ",", ".", "(", ")", "[", "]", ":0.4)", ":1.3)", "!", "é", "BREAK"], k=40
        )
        spec = dataclasses.replace(JOB, prompt=" ".join(words), negative_prompt=" ".join(words[::-1]))
        with contextlib.suppress(JobError):
            prompt = adapter.encode(adapter.geometry.resolve(spec))
            assert all(torch.isfinite(each).all() for each in prompt.tensors.values())
