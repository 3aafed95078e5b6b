"""Adapters of Wan and Qwen-Image: models that predict flow, with a causal VAE.

They use their pipelines' methods where possible (prompt, noise, condition, pictures in and out). The body of
the denoising loop and the end of `__call__` are functions of artifacts here. In fp32 every result is bitwise
equal to the pipeline's.

Legend: B batch (1), C channels, T H W latent frames, rows, columns; S tokens of the picture or video.
Source: diffusers 0.42 WanPipeline, WanImageToVideoPipeline and QwenImagePipeline, `__call__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import QwenImagePipeline, WanImageToVideoPipeline, WanPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families import solver
from gfgen.models.families.adapter import PIXEL_SUM, SAMPLE, Adapter, Fields, Patches
from gfgen.models.families.encoders import FOR_ANY_LENGTH, text_encoder_of
from gfgen.models.families.guidance import is_batch_faster, predict_branches
from gfgen.models.families.pictures import denormalize_latents, load_image, to_uint8
from gfgen.models.fast import causal_vae, stop_checks
from gfgen.models.fast.evaluation import Evaluator, evaluate
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.kernels import Quantised
from gfgen.models.fast.rows import padded_to
from gfgen.models.fast.texts import (
    NUM_TEXTS,
    common_length,
    forget_text_results,
    is_padded,
    keep_text_results,
    text_shape,
    with_texts,
)
from gfgen.models.geometry.model import Geometry
from gfgen.models.geometry.qwen import MAX_TEXT_TOKENS
from gfgen.models.geometry.rules import known, max_text_tokens
from gfgen.models.geometry.wan import TEXT_TOKENS
from gfgen.models.geometry.weights import EXPERTS, component_dtypes
from gfgen.models.loading.components import LoadPipeline
from gfgen.models.parallel import shared_decode
from gfgen.models.parallel.cudnn_attention import check_fp8_attention, is_fast
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.sequence_parallel import present_degrees
from gfgen.models.streaming.stream import stream_of


class FlowAdapter(Adapter):
    """Executors of one checkpoint; see `adapter.Adapter`. Pipelines are never called."""

    TEXT_TOKENS: ClassVar[int]
    """Where the pipeline cuts a prompt by default."""

    def __init__(self, geometry: Geometry, *, pipeline: Any, device: str) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        self._pipeline = pipeline
        self._vae = pipeline.vae
        self._experts = _transformers_of(pipeline)
        self._forward: Evaluator = evaluate
        self.patches = Patches(pipeline, changed=forget_text_results)
        self._schedulers = solver.Schedulers(pipeline.scheduler)
        is_on_gpu = self.device.type == "cuda"  # on CPUs results equal the pipeline's bitwise
        self._text_encoder = text_encoder_of(pipeline.text_encoder) if is_on_gpu else None
        self._embed = functools.lru_cache(NUM_TEXTS)(self._embed_text)

    @torch.no_grad()
    def encode(self, spec: JobSpec) -> Fields:
        num_tokens = max_text_tokens(spec, self.TEXT_TOKENS)
        tensors = {"prompt_embeds": self._embed(spec.prompt, num_tokens)}
        if self.geometry.uses_cfg(spec):
            tensors["negative_prompt_embeds"] = self._embed(spec.negative_prompt or "", num_tokens)
        return Fields(tensors)

    @torch.no_grad()
    def denoise(
        self,
        spec: JobSpec,
        prompt: Fields,
        condition: Fields,
        latents: Fields,
        *,
        step: int,
        parallel: Parallel | None = None,
    ) -> Fields:
        self.patches.merge(spec)

        def predicted(sample: Tensor, timestep: Tensor) -> Tensor:
            expert, scale = self._expert(spec, timestep=timestep)
            model_inputs = self._model_inputs(spec, condition, sample, timestep=timestep)
            guided, unguided = predict_branches(
                functools.partial(self._predict, spec, expert, model_inputs),
                prompt,
                spec=spec,
                geometry=self.geometry,
                parallel=parallel,
                takes_turns=stream_of(expert) is not None,
            )
            return guided if unguided is None else self._guide(guided, unguided, scale=scale)

        scheduler, pin = self._scheduler(spec), self._pin(spec, condition, step=step)
        keeps = spec.may_approximate
        return solver.solved_step(scheduler, latents, predicted, step=step, pin=pin, keeps_outputs=keeps)

    @torch.no_grad()
    def approximate(
        self, spec: JobSpec, prompt: Fields, condition: Fields, latents: Fields, *, step: int
    ) -> Fields:
        return solver.extrapolated_step(self._scheduler(spec), latents, step=step)

    @torch.no_grad()
    def decode(self, spec: JobSpec, latents: Fields, *, parallel: Parallel | None = None) -> Fields:
        sample_BCTHW = self._unpacked(spec, latents.tensors[SAMPLE].to(self.device))
        scaled_BCTHW = denormalize_latents(sample_BCTHW.to(self._vae.dtype), self._vae.config)
        pixels_BCTHW, first_row = shared_decode.decode_rows(self._vae, scaled_BCTHW, parallel)
        frames = to_uint8(self._pictures(pixels_BCTHW.float()), per_sample=spec.sample_bytes)
        tensors = {"frames": frames, PIXEL_SUM: pixels_BCTHW.sum(dtype=torch.float32)}
        return Fields(tensors, {"first_row": first_row})

    def evaluate_by(self, forward: Evaluator) -> None:
        self._forward = forward

    @property
    def takes_turns(self) -> bool:
        return any(map(stream_of, self._experts))

    def texts_to_rehearse(self) -> Sequence[Callable[[], object]]:
        return () if self._text_encoder is None else self._text_encoder.rehearsals(self._forward)

    def _embed_text(self, text: str, num_tokens: int) -> Tensor:
        """Embeddings of one prompt: [1, L, C]."""
        raise NotImplementedError

    def _scheduler(self, spec: JobSpec) -> Any:
        raise NotImplementedError

    def _expert(self, spec: JobSpec, *, timestep: Tensor) -> tuple[Any, float]:
        """The transformer of this timestep, and its guidance scale."""
        raise NotImplementedError

    def _model_inputs(
        self, spec: JobSpec, condition: Fields, sample: Tensor, *, timestep: Tensor
    ) -> dict[str, Any]:
        """The transformer's inputs but for texts."""
        raise NotImplementedError

    def _predict(
        self, spec: JobSpec, expert: Any, inputs: dict[str, Any], embeds: Sequence[Tensor]
    ) -> Tensor:
        """For the embeddings of branches of guidance: one, or several in one forward."""
        raise NotImplementedError

    def _guide(self, guided: Tensor, unguided: Tensor, *, scale: float) -> Tensor:
        return unguided + scale * (guided - unguided)

    def _pin(self, spec: JobSpec, condition: Fields, *, step: int) -> Callable[[Any], Any] | None:
        """What changes the sample after a step."""
        return None

    def _unpacked(self, spec: JobSpec, sample: Tensor) -> Tensor:
        """Latents as the VAE takes them."""
        return sample

    def _pictures(self, pixels_BCTHW: Tensor) -> Tensor:
        """[F, C, H, W] in [0, 1]."""
        raise NotImplementedError


class WanAdapter(FlowAdapter):
    """Wan2.2-TI2V-5B, Wan2.2-A14B (two experts) and Wan 2.1 text to video.

    `_pipeline` is that for texts, `_image` that for images, with the same components.
    """

    TEXT_TOKENS = TEXT_TOKENS

    def __init__(self, geometry: Geometry, *, pipeline: Any, device: str) -> None:
        flags = {name: pipeline.config[name] for name in ("boundary_ratio", "expand_timesteps")}
        names = ("tokenizer", "text_encoder", "vae", "scheduler", *EXPERTS)
        parts = {name: getattr(pipeline, name) for name in names} | flags
        super().__init__(geometry, pipeline=WanPipeline(**parts), device=device)
        self._image = WanImageToVideoPipeline(**parts)
        self._dtype: torch.dtype = pipeline.transformer.dtype

    def _embed_text(self, text: str, num_tokens: int) -> Tensor:
        """Embeddings of one prompt: [1, num_tokens, C], with zeros after its own tokens."""
        if self._text_encoder is not None:
            limit = {"max_length": num_tokens, "truncation": True}
            ids = self._pipeline.tokenizer(prompt_clean(text), **limit).input_ids
            return padded_to(num_tokens, self._text_encoder(ids, self._forward).to(self._dtype))
        embeds, _ = self._pipeline.encode_prompt(
            prompt=text, do_classifier_free_guidance=False, max_sequence_length=num_tokens, device=self.device
        )
        return torch.as_tensor(embeds, dtype=self._dtype)

    @torch.no_grad()
    def prepare(self, spec: JobSpec, prompt: Fields) -> tuple[Fields, Fields]:
        shape = (1, self._vae.config.z_dim, spec.height, spec.width, spec.frames)
        generator = torch.Generator("cpu").manual_seed(known(spec.seed))
        noise: tuple[Any, ...] = (torch.float32, self.device, generator)
        scheduler = self._scheduler(spec)
        if spec.image is None:
            # Only the text pipeline sets this; the image pipeline finds the first step by its timestep.
            scheduler.set_begin_index(0)
            return Fields(), solver.save_state(
                scheduler, self._pipeline.prepare_latents(*shape, *noise), generator=generator
            )
        picture = load_image(spec.image, sha256=spec.image_sha256, background=spec.background)
        size = {"height": spec.height, "width": spec.width}
        picture = self._image.video_processor.preprocess(picture, **size)
        picture = picture.to(self.device, dtype=torch.float32)
        latents, condition, *_ = self._image.prepare_latents(picture, *shape, *noise)
        return Fields({"condition": condition}), solver.save_state(scheduler, latents, generator=generator)

    def text_shape(self, spec: JobSpec, prompt: Fields, layout: Layout) -> tuple[object, ...]:
        return tuple(x.shape[1] for x in prompt.tensors.values())

    def shortest(self, latents: Fields) -> Fields:
        """The first frame, and one with frames before it."""
        return Fields({SAMPLE: latents.tensors[SAMPLE][:, :, :2]})

    @property
    def _per_token(self) -> bool:
        """Whether the transformer takes a timestep per token (Wan2.2-TI2V-5B)."""
        return bool(self._pipeline.config.expand_timesteps)

    def _scheduler(self, spec: JobSpec) -> Any:
        kind: type = type(self._schedulers.template(spec))
        taken = solver.parameters_of(kind)
        shift = "flow_shift" if "flow_shift" in taken else "shift"
        return self._schedulers.new(spec, **{shift: spec.flow_shift})

    def _expert(self, spec: JobSpec, *, timestep: Tensor) -> tuple[Any, float]:
        high, low = self._experts
        num_train = self._pipeline.scheduler.config.num_train_timesteps
        if spec.boundary_ratio is None or timestep >= spec.boundary_ratio * num_train:
            return high, known(spec.guidance_scale)
        return low, known(spec.guidance_scale_2)

    def _model_inputs(
        self, spec: JobSpec, condition: Fields, sample: Tensor, *, timestep: Tensor
    ) -> dict[str, Any]:
        image_BCTHW, model_input = condition.tensors.get("condition"), sample
        if image_BCTHW is not None and self._per_token:
            model_input = _pin_first_frame(sample, image_BCTHW)
        elif image_BCTHW is not None:
            model_input = torch.cat([sample, image_BCTHW], dim=1)
        timestep = self._model_timestep(timestep, sample, has_image=image_BCTHW is not None)
        return {"hidden_states": model_input.to(self._dtype), "timestep": timestep}

    def _model_timestep(self, timestep: Tensor, sample_BCTHW: Tensor, *, has_image: bool) -> Tensor:
        """[1], or [1, S] where tokens differ.

        Without an image all tokens have the same timestep. In fp32 it is given per token, as in the
        pipeline; in bf16 once, which gives equal results (measured) and saves gigabytes of modulation in
        every block.
        """
        timestep = timestep.to(self.device, non_blocking=True)
        if not self._per_token or (self._dtype != torch.float32 and not has_image):
            return timestep.expand(1)
        mask_BCTHW = _first_frame_mask(sample_BCTHW) if has_image else torch.ones_like(sample_BCTHW[:, :1])
        per_token = (mask_BCTHW[0][0][:, ::2, ::2] * timestep).flatten()
        return per_token.unsqueeze(0)

    def _predict(
        self, spec: JobSpec, expert: Any, inputs: dict[str, Any], embeds: Sequence[Tensor]
    ) -> Tensor:
        return self._forward(expert, with_texts(inputs, embeds))

    def _pin(self, spec: JobSpec, condition: Fields, *, step: int) -> Callable[[Any], Any] | None:
        image_BCTHW = condition.tensors.get("condition")
        if image_BCTHW is None or not self._per_token or step < known(spec.steps) - 1:
            return None
        return functools.partial(_pin_first_frame, image_BCTHW=image_BCTHW)

    def _pictures(self, pixels_BCTHW: Tensor) -> Tensor:
        made: Tensor = self._pipeline.video_processor.postprocess_video(pixels_BCTHW, output_type="pt")[0]
        return made


def _first_frame_mask(sample_BCTHW: Tensor) -> Tensor:
    """[B, 1, T, H, W]: 0 in the first latent frame, which the image gives; 1 elsewhere."""
    mask = torch.ones_like(sample_BCTHW[:, :1])
    mask[:, :, 0] = 0
    return mask


def _pin_first_frame(sample_BCTHW: Tensor, image_BCTHW: Tensor) -> Tensor:
    """The sample with the encoded image ([B, C, 1, H, W]) as its first latent frame."""
    mask = _first_frame_mask(sample_BCTHW)
    return (1 - mask) * image_BCTHW + mask * sample_BCTHW


class QwenImageAdapter(FlowAdapter):
    """Qwen-Image: text to picture, with true classifier-free guidance."""

    TEXT_TOKENS = MAX_TEXT_TOKENS

    @torch.no_grad()
    def prepare(self, spec: JobSpec, prompt: Fields) -> tuple[Fields, Fields]:
        generator = torch.Generator("cpu").manual_seed(known(spec.seed))
        shape = (1, self._pipeline.transformer.config.in_channels // 4, spec.height, spec.width)
        dtype = prompt.tensors["prompt_embeds"].dtype
        noise_BSC = self._pipeline.prepare_latents(*shape, dtype, self.device, generator)
        scheduler = self._scheduler(spec)
        scheduler.set_begin_index(0)
        return Fields(), solver.save_state(scheduler, noise_BSC, generator=generator)

    def text_shape(self, spec: JobSpec, prompt: Fields, layout: Layout) -> tuple[object, ...]:
        embeds, degree = list(prompt.tensors.values()), layout.sequence_degree
        forwards = [[each] for each in embeds]
        if layout.cfg == 1 and is_batch_faster(self.geometry, spec, sequence_degree=degree, embeds=embeds):
            forwards = [embeds]
        pads = self._pads(spec)
        return tuple(text_shape(each, is_padded=pads, degrees=layout.degrees) for each in forwards)

    def _embed_text(self, text: str, num_tokens: int) -> Tensor:
        """Embeddings of one prompt. One prompt is never padded, so there is no mask."""
        if self._text_encoder is not None:
            start = self._pipeline.prompt_template_encode_start_idx
            limit = {"max_length": start + num_tokens, "truncation": True}
            whole = self._pipeline.prompt_template_encode.format(text)
            ids = self._pipeline.tokenizer(whole, **limit).input_ids
            return self._text_encoder(ids, self._forward)[:, start:]
        with sdpa_kernel(FOR_ANY_LENGTH):
            embeds, mask = self._pipeline.encode_prompt(
                prompt=text, device=self.device, max_sequence_length=num_tokens
            )
        assert mask is None, "a single prompt came back padded"
        return torch.as_tensor(embeds)

    def _scheduler(self, spec: JobSpec) -> Any:
        steps, config = known(spec.steps), self._schedulers.template(spec).config
        defaults = {
            "base_image_seq_len": 256,
            "max_image_seq_len": 4096,
            "base_shift": 0.5,
            "max_shift": 1.15,
        }
        numbers = (config.get(name, default) for name, default in defaults.items())
        shift = calculate_shift(self.geometry.num_tokens(spec), *numbers)
        return self._schedulers.new(spec, sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)

    def _expert(self, spec: JobSpec, *, timestep: Tensor) -> tuple[Any, float]:
        return self._pipeline.transformer, known(spec.true_cfg_scale)

    def _model_inputs(
        self, spec: JobSpec, condition: Fields, sample: Tensor, *, timestep: Tensor
    ) -> dict[str, Any]:
        timestep_B = timestep.to(self.device, non_blocking=True).expand(1).to(sample.dtype)
        factor = 2 * self._pipeline.vae_scale_factor
        grid = (1, known(spec.height) // factor, known(spec.width) // factor)
        return {
            "hidden_states": sample,
            "timestep": timestep_B / 1000,
            "img_shapes": [[grid]],
            "encoder_hidden_states_mask": None,
            "guidance": None,
            "attention_kwargs": dict[str, Any](),
        }

    def _pads(self, spec: JobSpec) -> bool:
        tokens, steps = self.geometry.num_tokens(spec), known(spec.steps)
        return is_padded(self._pipeline.transformer, picture_tokens=tokens, num_steps=steps)

    def _predict(
        self, spec: JobSpec, expert: Any, inputs: dict[str, Any], embeds: Sequence[Tensor]
    ) -> Tensor:
        if len(embeds) > 1 and not hasattr(expert, "modulation"):
            # Only fused blocks ignore padding.
            return torch.cat([self._predict(spec, expert, inputs, [each]) for each in embeds])
        length = common_length(embeds, degrees=present_degrees()) if self._pads(spec) else None
        return self._forward(expert, with_texts(inputs, embeds, length=length))

    def _guide(self, guided: Tensor, unguided: Tensor, *, scale: float) -> Tensor:
        """True classifier-free guidance: each token keeps the norm of its conditional prediction."""
        combined_BSC = super()._guide(guided, unguided, scale=scale)
        length_BS1: Tensor = torch.norm(guided, dim=-1, keepdim=True)
        combined_length_BS1: Tensor = torch.norm(combined_BSC, dim=-1, keepdim=True)
        return combined_BSC * (length_BS1 / combined_length_BS1)

    def _unpacked(self, spec: JobSpec, sample: Tensor) -> Tensor:
        factor = self._pipeline.vae_scale_factor
        unpacked: Tensor = self._pipeline._unpack_latents(sample, spec.height, spec.width, factor)
        return unpacked

    def _pictures(self, pixels_BCTHW: Tensor) -> Tensor:
        made: Tensor = self._pipeline.image_processor.postprocess(pixels_BCTHW[:, :, 0], output_type="pt")
        return made


def load_flow(
    checkpoint: Path,
    geometry: Geometry,
    *,
    device: str,
    dtype: torch.dtype,
    vae_dtype: str,
    load: LoadPipeline,
    quantised: Quantised,
) -> FlowAdapter:
    """The adapter of a checkpoint, its components on the device. By default Wan's VAE stays in fp32."""
    place = torch.device(device)
    is_qwen = geometry.family == "qwen-image"
    if quantised.attention:
        check_fp8_attention(place)
    pipeline_class = QwenImagePipeline if is_qwen else WanPipeline
    if geometry.family == "wan-moe-i2v":
        pipeline_class = WanImageToVideoPipeline
    dtypes = component_dtypes(pipeline_class.__name__, vae_dtype)
    pipeline = load(pipeline_class, checkpoint, device=device, dtype=dtype, dtypes=dtypes)
    transformers = list(filter(None, _transformers_of(pipeline)))
    for transformer in transformers:
        install(transformer)
        if dtype != torch.float32:
            on = place if quantised.layers else None
            fuse(transformer, fp8_on=on, attends_in_fp8=quantised.attention)
        elif device == "cpu" and not is_qwen:
            keep_text_results(transformer)
    if is_qwen and dtype != torch.float32:
        is_fast(place, dtype)  # tries it now: no task may wait for the device
    shared_decode.install(pipeline.vae)
    if place.type == "cuda":
        causal_vae.install(pipeline.vae)
    stop_checks.install(pipeline.text_encoder, *transformers, pipeline.vae)
    kind = QwenImageAdapter if is_qwen else WanAdapter
    return kind(geometry, pipeline=pipeline, device=device)


def _transformers_of(pipeline: Any) -> tuple[Any, ...]:
    """Its transformer and its second expert, None if it has none."""
    return tuple(getattr(pipeline, name, None) for name in EXPERTS)
