"""Adapter of Qwen-Image: text to image, with true classifier-free guidance.

It uses the pipeline's methods where possible. The body of the denoising loop and the end of `__call__` are
functions of artifacts here. In fp32 every result is bitwise equal to the pipeline's.

Legend: B batch (1), S picture tokens, C channels, T H W latent frames (1), rows, columns.
Source: diffusers 0.42 QwenImagePipeline.__call__.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch.nn.attention import sdpa_kernel

from gfgen.job.spec import JobSpec
from gfgen.layout import Layout
from gfgen.models.families import solver
from gfgen.models.families.adapter import PIXEL_SUM, SAMPLE, BatchAdapter, Fields, Patches, StepInput
from gfgen.models.families.encoders import FOR_ANY_LENGTH, text_encoder_on
from gfgen.models.families.guidance import is_batch_faster, predict_branches
from gfgen.models.families.pictures import denormalize_latents, to_uint8
from gfgen.models.fast import causal_vae, stop_checks
from gfgen.models.fast.evaluation import Evaluator, evaluate
from gfgen.models.fast.fused import fuse
from gfgen.models.fast.kernels import NOT_QUANTISED, Quantised
from gfgen.models.fast.texts import NUM_TEXTS, common_length, is_padded, text_shape, with_texts
from gfgen.models.geometry.model import Geometry
from gfgen.models.geometry.qwen import MAX_TEXT_TOKENS
from gfgen.models.geometry.rules import known
from gfgen.models.geometry.schedulers import max_text_tokens
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.components import LoadPipeline, load_pipeline
from gfgen.models.parallel import shared_decode
from gfgen.models.parallel.counted_attention import is_fast
from gfgen.models.parallel.fp8_attention import check_fp8_attention
from gfgen.models.parallel.hooks import install
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.parallel.sequence_parallel import present_degrees
from gfgen.models.streaming.turns import streams


class QwenImageAdapter(BatchAdapter):
    """Executors of one Qwen-Image checkpoint; see `adapter.Adapter`."""

    def __init__(self, geometry: Geometry, *, pipeline: Any, device: str) -> None:
        self.geometry = geometry
        self.device = torch.device(device)
        self._pipeline = pipeline
        self._vae = pipeline.vae
        self._forward: Evaluator = evaluate
        self.patches = Patches(pipeline)
        self._schedulers = solver.Schedulers(pipeline.scheduler)
        self._text_encoder = text_encoder_on(self.device, pipeline.text_encoder)
        self._embed = functools.lru_cache(NUM_TEXTS)(self._embed_text)

    @torch.no_grad()
    def encode(self, spec: JobSpec) -> Fields:
        num_tokens = max_text_tokens(spec, MAX_TEXT_TOKENS)
        tensors = {"prompt_embeds": self._embed(spec.prompt, num_tokens)}
        if self.geometry.uses_cfg(spec):
            tensors["negative_prompt_embeds"] = self._embed(known(spec.negative_prompt), num_tokens)
        return Fields(tensors)

    @torch.no_grad()
    def prepare(self, spec: JobSpec, prompt: Fields) -> tuple[Fields, Fields]:
        generator = torch.Generator("cpu").manual_seed(known(spec.seed))
        noise_BSC = self._pipeline.prepare_latents(
            1,
            self._pipeline.transformer.config.in_channels // 4,
            spec.height,
            spec.width,
            prompt.tensors["prompt_embeds"].dtype,
            self.device,
            generator,
        )
        scheduler = self._scheduler(spec)
        scheduler.set_begin_index(0)
        return Fields(), solver.save_state(scheduler, noise_BSC, generator=generator)

    @torch.no_grad()
    def denoise_batch(
        self, inputs: Sequence[StepInput], *, step: int, parallel: Parallel | None = None
    ) -> list[Fields]:
        spec = inputs[0].spec
        self.patches.merge(spec)

        def predicted(sample_BSC: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            model_inputs = self._model_inputs(spec, sample_BSC, timestep=timestep)
            guided_BSC, unguided_BSC = predict_branches(
                functools.partial(self._predict, spec, model_inputs),
                [each.prompt for each in inputs],
                spec=spec,
                geometry=self.geometry,
                parallel=parallel,
                takes_turns=self.takes_turns,
            )
            if unguided_BSC is None:
                return guided_BSC
            return _guide(guided_BSC, unguided_BSC, scale=known(spec.true_cfg_scale))

        return solver.solved_step(inputs, self._scheduler, predicted, step=step)

    @torch.no_grad()
    def approximate(
        self, spec: JobSpec, prompt: Fields, condition: Fields, latents: Fields, *, step: int
    ) -> Fields:
        return solver.extrapolated_step(self._scheduler(spec), latents, step=step)

    @torch.no_grad()
    def decode(self, spec: JobSpec, latents: Fields, *, parallel: Parallel | None = None) -> Fields:
        sample_BSC = latents.tensors[SAMPLE].to(self.device)
        factor = self._pipeline.vae_scale_factor
        sample_BCTHW = self._pipeline._unpack_latents(sample_BSC, spec.height, spec.width, factor)
        scaled_BCTHW = denormalize_latents(sample_BCTHW.to(self._vae.dtype), self._vae.config)
        pixels_BCTHW, first_row = shared_decode.decode_rows(self._vae, scaled_BCTHW, parallel)
        picture_BCHW = pixels_BCTHW[:, :, 0].float()
        picture_BCHW = self._pipeline.image_processor.postprocess(picture_BCHW, output_type="pt")
        frames = to_uint8(picture_BCHW, per_sample=spec.sample_bytes)
        tensors = {"frames": frames, PIXEL_SUM: pixels_BCTHW.sum(dtype=torch.float32)}
        return Fields(tensors, {"first_row": first_row})

    def text_shape(self, spec: JobSpec, prompt: Fields, layout: Layout) -> tuple[object, ...]:
        embeds, degree = list(prompt.tensors.values()), layout.ulysses * layout.ring
        forwards = [[each] for each in embeds]
        if layout.cfg == 1 and is_batch_faster(self.geometry, spec, sequence_degree=degree, embeds=embeds):
            forwards = [embeds]
        pads = self._pads(spec)
        return tuple(text_shape(each, is_padded=pads, degrees=layout.degrees) for each in forwards)

    def text_shape_of_batch(self, inputs: Sequence[StepInput]) -> tuple[object, ...]:
        pads = self._pads(inputs[0].spec)
        forwards = [[each.prompt.tensors[name] for each in inputs] for name in inputs[0].prompt.tensors]
        return tuple(text_shape(each, is_padded=pads, degrees=(1, 1, 1)) for each in forwards)

    def evaluate_by(self, forward: Evaluator) -> None:
        self._forward = forward

    @property
    def takes_turns(self) -> bool:
        return streams(self._pipeline.transformer)

    def texts_to_rehearse(self) -> Sequence[Callable[[], object]]:
        return () if self._text_encoder is None else self._text_encoder.rehearsals(self._forward)

    def _embed_text(self, text: str, num_tokens: int) -> torch.Tensor:
        """Embeddings of one prompt. One prompt is never padded, so there is no mask."""
        if self._text_encoder is not None:
            start = self._pipeline.prompt_template_encode_start_idx
            ids = self._pipeline.tokenizer(
                self._pipeline.prompt_template_encode.format(text),
                max_length=start + num_tokens,
                truncation=True,
            ).input_ids
            return self._text_encoder(ids, self._forward)[:, start:]
        with sdpa_kernel(FOR_ANY_LENGTH):
            embeds, mask = self._pipeline.encode_prompt(
                prompt=text, device=self.device, max_sequence_length=num_tokens
            )
        assert mask is None, "a single prompt came back padded"
        return torch.as_tensor(embeds)

    def _scheduler(self, spec: JobSpec) -> Any:
        steps = known(spec.steps)
        config = self._schedulers.template(spec).config
        shift = calculate_shift(
            self.geometry.num_tokens(spec),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        return self._schedulers.new(spec, sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)

    def _model_inputs(
        self, spec: JobSpec, sample_BSC: torch.Tensor, *, timestep: torch.Tensor
    ) -> dict[str, Any]:
        timestep_B = timestep.to(self.device, non_blocking=True).expand(1).to(sample_BSC.dtype)
        factor = 2 * self._pipeline.vae_scale_factor
        grid = (1, known(spec.height) // factor, known(spec.width) // factor)
        return {
            "hidden_states": sample_BSC,
            "timestep": timestep_B / 1000,
            "img_shapes": [[grid]],
            "encoder_hidden_states_mask": None,
            "guidance": None,
            "attention_kwargs": dict[str, Any](),
        }

    def _pads(self, spec: JobSpec) -> bool:
        tokens, steps = self.geometry.num_tokens(spec), known(spec.steps)
        return is_padded(self._pipeline.transformer, picture_tokens=tokens, num_steps=steps)

    def _predict(self, spec: JobSpec, inputs: dict[str, Any], embeds: Sequence[torch.Tensor]) -> torch.Tensor:
        """Branches of classifier-free guidance, or one branch of several jobs."""
        transformer = self._pipeline.transformer
        if len(embeds) > 1 and not hasattr(transformer, "modulation"):
            return self._predict_unfused(inputs, embeds)
        length = common_length(embeds, degrees=present_degrees()) if self._pads(spec) else None
        return self._forward(transformer, with_texts(inputs, embeds, length=length))

    def _predict_unfused(self, inputs: dict[str, Any], embeds: Sequence[torch.Tensor]) -> torch.Tensor:
        """Jobs whose texts have the same length in one forward: only fused blocks ignore padding."""
        samples: Sequence[torch.Tensor] = inputs["hidden_states"].chunk(len(embeds))
        results = list(samples)
        alone = {name: x for name, x in inputs.items() if name != "attention_kwargs"}
        for length in dict.fromkeys(text.shape[1] for text in embeds):
            of_length = [idx for idx, text in enumerate(embeds) if text.shape[1] == length]
            alone["hidden_states"] = solver.stacked([samples[idx] for idx in of_length])
            texts = [embeds[idx] for idx in of_length]
            found = self._forward(self._pipeline.transformer, with_texts(alone, texts))
            for idx, result in zip(of_length, found.chunk(len(texts)), strict=True):
                results[idx] = result
        return torch.cat(results)


def load_qwen_image(
    checkpoint: Path,
    geometry: Geometry,
    *,
    device: str,
    dtype: torch.dtype,
    vae_dtype: str = "auto",
    load: LoadPipeline = load_pipeline,
    quantised: Quantised = NOT_QUANTISED,
) -> QwenImageAdapter:
    if quantised.attention:
        check_fp8_attention(torch.device(device))
    dtypes = component_dtypes(QwenImagePipeline.__name__, vae_dtype)
    pipeline = load(QwenImagePipeline, checkpoint, device=device, dtype=dtype, dtypes=dtypes)
    install(pipeline.transformer)
    if dtype != torch.float32:
        on = torch.device(device) if quantised.layers else None
        fuse(pipeline.transformer, fp8_on=on, attends_in_fp8=quantised.attention)
        is_fast(torch.device(device), dtype)  # tries it now: no task may wait for the device
    shared_decode.install(pipeline.vae)
    if torch.device(device).type == "cuda":
        causal_vae.install(pipeline.vae)
    stop_checks.install(pipeline.text_encoder, pipeline.transformer, pipeline.vae)
    return QwenImageAdapter(geometry, pipeline=pipeline, device=device)


def _guide(predicted_BSC: torch.Tensor, unguided_BSC: torch.Tensor, *, scale: float) -> torch.Tensor:
    """True classifier-free guidance: each token keeps the norm of its conditional prediction."""
    combined_BSC = unguided_BSC + scale * (predicted_BSC - unguided_BSC)
    length_BS1: torch.Tensor = torch.norm(predicted_BSC, dim=-1, keepdim=True)
    combined_length_BS1: torch.Tensor = torch.norm(combined_BSC, dim=-1, keepdim=True)
    return combined_BSC * (length_BS1 / combined_length_BS1)
