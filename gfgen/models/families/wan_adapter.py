"""Adapter of the Wan family: Wan2.2-TI2V-5B, Wan2.2-A14B (two experts), Wan 2.1 text to video.

It uses the pipelines' methods where possible (prompt, noise, condition, pictures in and out). The body of
the denoising loop and the end of `__call__` are functions of artifacts here. In fp32 every result is bitwise
equal to the pipeline's.

Legend: B batch (1), C latent channels, T H W latent frames, rows, columns; S tokens.
Source: diffusers 0.42 WanPipeline.__call__ and WanImageToVideoPipeline.__call__.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families import solver
from gfgen.models.families.adapter import PIXEL_SUM, SAMPLE, BatchAdapter, Fields, Patches, StepInput
from gfgen.models.families.encoders import text_encoder_on
from gfgen.models.families.guidance import predict_branches
from gfgen.models.families.pictures import denormalize_latents, load_image, to_uint8
from gfgen.models.fast import causal_vae, stop_checks
from gfgen.models.fast.evaluation import Evaluator, evaluate
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.kernels import NOT_QUANTISED, Quantised
from gfgen.models.fast.rows import padded_to
from gfgen.models.fast.texts import NUM_TEXTS, forget_text_results, keep_text_results, with_texts
from gfgen.models.geometry.model import Geometry
from gfgen.models.geometry.rules import known
from gfgen.models.geometry.schedulers import max_text_tokens
from gfgen.models.geometry.wan import TEXT_TOKENS
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.components import LoadPipeline, load_pipeline
from gfgen.models.parallel import shared_decode
from gfgen.models.parallel.fp8_attention import check_fp8_attention
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.streaming.turns import streams


class WanAdapter(BatchAdapter):
    """Executors of one Wan checkpoint; see `adapter.Adapter`.

    `text_pipeline` and `image_pipeline` have the same components. Only their methods are used; they are
    never called.
    """

    def __init__(self, geometry: Geometry, *, text_pipeline: Any, image_pipeline: Any, device: str) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        self._text = text_pipeline
        self._image = image_pipeline
        self._vae = text_pipeline.vae
        self._experts = (text_pipeline.transformer, text_pipeline.transformer_2)
        self._dtype: torch.dtype = text_pipeline.transformer.dtype
        self._forward: Evaluator = evaluate
        self.patches = Patches(text_pipeline, changed=forget_text_results)
        self._schedulers = solver.Schedulers(text_pipeline.scheduler)
        self._text_encoder = text_encoder_on(self.device, text_pipeline.text_encoder)
        self._embed = functools.lru_cache(NUM_TEXTS)(self._embed_text)

    @torch.no_grad()
    def encode(self, spec: JobSpec) -> Fields:
        num_tokens = max_text_tokens(spec, TEXT_TOKENS)
        tensors = {"prompt_embeds": self._embed(spec.prompt, num_tokens)}
        if self.geometry.uses_cfg(spec):
            tensors["negative_prompt_embeds"] = self._embed(spec.negative_prompt or "", num_tokens)
        return Fields(tensors)

    def _embed_text(self, text: str, num_tokens: int) -> torch.Tensor:
        """Embeddings of one prompt: [1, num_tokens, C], with zeros after its own tokens."""
        if self._text_encoder is not None:
            limit = {"max_length": num_tokens, "truncation": True}
            ids = self._text.tokenizer(prompt_clean(text), **limit).input_ids
            return padded_to(num_tokens, self._text_encoder(ids, self._forward).to(self._dtype))
        embeds, _ = self._text.encode_prompt(
            prompt=text,
            do_classifier_free_guidance=False,
            max_sequence_length=num_tokens,
            device=self.device,
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
                scheduler, self._text.prepare_latents(*shape, *noise), generator=generator
            )
        picture = self._image.video_processor.preprocess(
            load_image(spec.image, sha256=spec.image_sha256, background=spec.background),
            height=spec.height,
            width=spec.width,
        )
        picture = picture.to(self.device, dtype=torch.float32)
        latents, condition, *_ = self._image.prepare_latents(picture, *shape, *noise)
        return Fields({"condition": condition}), solver.save_state(scheduler, latents, generator=generator)

    @torch.no_grad()
    def denoise_batch(
        self, inputs: Sequence[StepInput], *, step: int, parallel: Parallel | None = None
    ) -> list[Fields]:
        spec, image_BCTHW = inputs[0].spec, inputs[0].condition.tensors.get("condition")
        assert len(inputs) == 1 or image_BCTHW is None, "jobs with images have steps of their own"
        self.patches.merge(spec)

        def predicted(sample_BCTHW: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            expert, scale = self._expert(spec, timestep=timestep)
            shared = {
                "hidden_states": self._model_input(sample_BCTHW, image_BCTHW),
                "timestep": self._model_timestep(timestep, sample_BCTHW, has_image=image_BCTHW is not None),
            }
            guided_BCTHW, unguided = predict_branches(
                functools.partial(self._predict, expert, shared),
                [each.prompt for each in inputs],
                spec=spec,
                geometry=self.geometry,
                parallel=parallel,
                takes_turns=streams(expert),
            )
            return guided_BCTHW if unguided is None else unguided + scale * (guided_BCTHW - unguided)

        pin = None
        if step == known(spec.steps) - 1 and image_BCTHW is not None and self._per_token:
            pin = functools.partial(_pin_first_frame, image_BCTHW=image_BCTHW)
        return solver.solved_step(inputs, self._scheduler, predicted, step=step, pin=pin)

    @torch.no_grad()
    def approximate(
        self, spec: JobSpec, prompt: Fields, condition: Fields, latents: Fields, *, step: int
    ) -> Fields:
        return solver.extrapolated_step(self._scheduler(spec), latents, step=step)

    @torch.no_grad()
    def decode(self, spec: JobSpec, latents: Fields, *, parallel: Parallel | None = None) -> Fields:
        sample_BCTHW = latents.tensors[SAMPLE].to(self.device, dtype=self._vae.dtype)
        scaled = denormalize_latents(sample_BCTHW, self._vae.config)
        video, first_row = shared_decode.decode_rows(self._vae, scaled, parallel)
        pictures = self._text.video_processor.postprocess_video(video.float(), output_type="pt")[0]
        frames = to_uint8(pictures, per_sample=spec.sample_bytes)
        tensors = {"frames": frames, PIXEL_SUM: video.sum(dtype=torch.float32)}
        return Fields(tensors, {"first_row": first_row})

    def text_shape(self, spec: JobSpec, prompt: Fields, layout: Layout) -> tuple[object, ...]:
        return tuple(x.shape[1] for x in prompt.tensors.values())

    def text_shape_of_batch(self, inputs: Sequence[StepInput]) -> tuple[object, ...]:
        return (len(inputs),)

    def evaluate_by(self, forward: Evaluator) -> None:
        self._forward = forward

    @property
    def takes_turns(self) -> bool:
        return any(map(streams, self._experts))

    def texts_to_rehearse(self) -> Sequence[Callable[[], object]]:
        return () if self._text_encoder is None else self._text_encoder.rehearsals(self._forward)

    def shortest(self, latents: Fields) -> Fields:
        """The first frame, and one with frames before it."""
        return Fields({SAMPLE: latents.tensors[SAMPLE][:, :, :2]})

    @property
    def _per_token(self) -> bool:
        """Whether the transformer takes a timestep per token (Wan2.2-TI2V-5B)."""
        return bool(self._text.config.expand_timesteps)

    def _scheduler(self, spec: JobSpec) -> Any:
        kind: type = type(self._schedulers.template(spec))
        taken = solver.parameters_of(kind)
        shift = "flow_shift" if "flow_shift" in taken else "shift"
        return self._schedulers.new(spec, **{shift: spec.flow_shift})

    def _expert(self, spec: JobSpec, *, timestep: torch.Tensor) -> tuple[Any, float]:
        """The transformer of this timestep, and its guidance scale."""
        high, low = self._experts
        num_train = self._text.scheduler.config.num_train_timesteps
        if spec.boundary_ratio is None or timestep >= spec.boundary_ratio * num_train:
            return high, known(spec.guidance_scale)
        return low, known(spec.guidance_scale_2)

    def _model_input(self, sample_BCTHW: torch.Tensor, image_BCTHW: torch.Tensor | None) -> torch.Tensor:
        if image_BCTHW is not None and self._per_token:
            sample_BCTHW = _pin_first_frame(sample_BCTHW, image_BCTHW)
        elif image_BCTHW is not None:
            sample_BCTHW = torch.cat([sample_BCTHW, image_BCTHW], dim=1)
        return sample_BCTHW.to(self._dtype)

    def _model_timestep(
        self, timestep: torch.Tensor, sample_BCTHW: torch.Tensor, *, has_image: bool
    ) -> torch.Tensor:
        """[1], or [1, S] where tokens differ; all samples of a batch have the same.

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
        self, expert: Any, inputs: dict[str, torch.Tensor], embeds: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Branches of guidance, or one branch of several jobs; all texts are padded to the same length."""
        return self._forward(expert, with_texts(inputs, embeds))


def load_wan(
    checkpoint: Path,
    geometry: Geometry,
    *,
    device: str,
    dtype: torch.dtype,
    vae_dtype: str = "auto",
    load: LoadPipeline = load_pipeline,
    quantised: Quantised = NOT_QUANTISED,
) -> WanAdapter:
    """The adapter of a Wan checkpoint, its components on the device.

    By default the VAE stays in fp32, as on the model cards.
    """
    if quantised.attention:
        check_fp8_attention(torch.device(device))
    pipeline_class = WanImageToVideoPipeline if geometry.family == "wan-moe-i2v" else WanPipeline
    dtypes = component_dtypes(pipeline_class.__name__, vae_dtype)
    loaded = load(pipeline_class, checkpoint, device=device, dtype=dtype, dtypes=dtypes)
    names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer", "transformer_2")
    parts = {name: getattr(loaded, name) for name in names}
    for transformer in filter(None, (loaded.transformer, loaded.transformer_2)):
        install(transformer)
        if dtype != torch.float32:
            on = torch.device(device) if quantised.layers else None
            fuse(transformer, fp8_on=on, attends_in_fp8=quantised.attention)
        elif device == "cpu":
            keep_text_results(transformer)
    shared_decode.install(loaded.vae)
    if torch.device(device).type == "cuda":
        causal_vae.install(loaded.vae)
    stop_checks.install(loaded.text_encoder, loaded.transformer, loaded.transformer_2, loaded.vae)
    flags = {name: loaded.config[name] for name in ("boundary_ratio", "expand_timesteps")}
    return WanAdapter(
        geometry,
        text_pipeline=WanPipeline(**parts, **flags),
        image_pipeline=WanImageToVideoPipeline(**parts, **flags),
        device=device,
    )


def _first_frame_mask(sample_BCTHW: torch.Tensor) -> torch.Tensor:
    """[B, 1, T, H, W]: 0 in the first latent frame, which the image gives; 1 elsewhere."""
    mask = torch.ones_like(sample_BCTHW[:, :1])
    mask[:, :, 0] = 0
    return mask


def _pin_first_frame(sample_BCTHW: torch.Tensor, image_BCTHW: torch.Tensor) -> torch.Tensor:
    """The sample with the encoded image ([B, C, 1, H, W]) as its first latent frame."""
    mask = _first_frame_mask(sample_BCTHW)
    return (1 - mask) * image_BCTHW + mask * sample_BCTHW
