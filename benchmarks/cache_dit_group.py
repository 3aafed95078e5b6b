"""cache-dit at its best, for `first_run.py replicas --cache-dit`: all GPUs make one job after the other.

`pip install cache-dit==1.5.3 einops` beside gfgen. Words of the option, with commas: `async` overlaps
exchanges (of Qwen-Image; Wan has none), `vae` decodes tiles on all GPUs (not CPU ranks; other pixels),
`cudnn` is its attention by cuDNN, `anything` its uneven shares of videos, `plain` nothing. Texts grow by the
few tokens that make shares even; uneven ones do not compile with PyTorch 2.13. Of a job with `reuse` the
same steps are computed as by gfgen; the others run the first block, and TaylorSeer (order 1) extrapolates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import cache_dit
import diffusers
from cache_dit import DBCacheConfig, ParallelismConfig, TaylorSeerCalibratorConfig

from benchmarks.replicas import Replica, Settings
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.rules import chosen_steps
from gfgen.models.stepping.check import join_group

CALIBRATOR = TaylorSeerCalibratorConfig(taylorseer_order=1)


class Group(Replica):
    """One of the ranks that make each job together; rank 0 returns the frames."""

    def __init__(self, settings: Settings, specs: Sequence[JobSpec], device: str) -> None:
        self._rank, self._words = settings.rank, settings.cache_dit.split(",")
        assert not (unknown := {*self._words} - {"plain", "async", "vae", "cudnn", "anything"}), unknown
        assert settings.encodes, "the GPUs have to hold all models"
        self._has_cache = settings.num_ranks == 1 or any(spec.reuse for spec in specs)  # one: unused
        if settings.num_ranks > 1:
            store = f"{settings.folder}/store"
            join_group(rank=settings.rank, num_ranks=settings.num_ranks, store=store, device=device)
        cache_dit.set_compile_configs(descent_tuning=False)
        super().__init__(settings._replace(rank=0), specs, device)  # all warm up in one order

    def _compile(self, pipeline: Any) -> None:
        transformer, num_ranks = pipeline.transformer, self._settings.num_ranks
        if self._has_cache:  # a call of its own: of a transformer, 1.5.3 does not take both in one
            cache_dit.enable_cache(transformer, DBCacheConfig(), CALIBRATOR)
        if num_ranks > 1:
            is_wan = isinstance(pipeline, diffusers.WanPipeline)
            config = ParallelismConfig(
                ulysses_size=num_ranks,
                ulysses_async="async" in self._words and not is_wan,
                ulysses_anything="anything" in self._words and is_wan,
                attention_backend="_sdpa_cudnn" if "cudnn" in self._words else None,
                extra_parallel_modules=[pipeline.vae] if "vae" in self._words else [],
            )
            cache_dit.enable_cache(transformer, parallelism_config=config)
        super()._compile(pipeline)

    def generate(self, spec: JobSpec, *, steps: int | None = None, is_decoded: bool = True) -> Any:
        """As plain diffusers does, with texts of even length and, if asked, with the cache of cache-dit."""
        pipeline, number = self._pipelines[spec.model], steps or spec.steps or 0
        if not spec.fps:
            prompt, negative = (self._even(pipeline, text) for text in (spec.prompt, spec.negative_prompt))
            spec = dataclasses.replace(spec, prompt=prompt, negative_prompt=negative)
        if self._has_cache:
            reused = chosen_steps(number, float(spec.reuse or 0.0))
            config = DBCacheConfig(
                Fn_compute_blocks=1,
                enable_separate_cfg=max(spec.guidance_scale or 0.0, spec.true_cfg_scale or 0.0) > 1,
                num_inference_steps=number,
                steps_computation_mask=[int(step not in reused) for step in range(number)],
                steps_computation_policy="static",
            )
            cache_dit.refresh_context(pipeline.transformer, cache_config=config, calibrator_config=CALIBRATOR)
        shares_decode = self._rank == 0 or "vae" in self._words
        frames = super().generate(spec, steps=steps, is_decoded=is_decoded and shares_decode)
        return frames if self._rank == 0 else None

    def _even(self, pipeline: Any, text: str | None) -> Any:
        template, start = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
        tokens, num_ranks = pipeline.tokenizer, self._settings.num_ranks
        while text and (len(tokens(template.format(text)).input_ids) - start) % num_ranks:
            text += " the"
        return text
