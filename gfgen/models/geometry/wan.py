"""Geometry of the Wan family: one transformer (2.1, 2.2-TI2V-5B) or two experts (2.2-A14B).

Shapes: latents [1, C, T, H, W] with T = (frames - 1) / 4 + 1 and H, W = pixels / 8 or / 16;
        tokens are patches of (1, 2, 2) of them.
Source: diffusers 0.42 WanPipeline and WanImageToVideoPipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gfgen.errors import JobError, ModelError, Problem
from gfgen.graph import Artifact, Stage, Trajectory
from gfgen.job.fields import MAX_FPS, MAX_FRAMES, MAX_SCALE, MAX_SHIFT, MAX_STEPS, MIN_FPS
from gfgen.job.recipes import with_recipe
from gfgen.job.spec import JobSpec
from gfgen.job.weighted import with_known_syntax
from gfgen.models.geometry import rules
from gfgen.models.geometry.checkpoint import SETTINGS_NAME, Checkpoint
from gfgen.models.geometry.vae import VaeShape

TEXT_TOKENS = 512
"""Length to which the pipelines pad every prompt (`max_sequence_length`)."""

SCHEDULERS = {"UniPCMultistepScheduler": 3, "FlowMatchEulerDiscreteScheduler": 0}
"""Supported schedulers, each with the number of latent-sized tensors in its state."""

_NUM_TRAIN = 1000

_FIELDS = ("width", "height", "frames", "fps", "steps", "guidance_scale", "guidance_scale_2")
FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "wan-ti2v": dict(zip(_FIELDS, (1280, 704, 121, 24, 50, 5.0), strict=False)),
    "wan-moe-t2v": dict(zip(_FIELDS, (1280, 720, 81, 16, 40, 4.0, 3.0), strict=True)),
    "wan-moe-i2v": dict(zip(_FIELDS, (1280, 720, 81, 16, 40, 3.5, 3.5), strict=True)),
    "wan-t2v": dict(zip(_FIELDS, (832, 480, 81, 16, 50, 5.0), strict=False)),
}
"""Source: the model cards of Wan-AI on the Hugging Face hub."""


@dataclass(frozen=True, slots=True)
class WanGeometry:
    family: str
    defaults: Mapping[str, Any]
    num_layers: int
    num_heads: int
    inner_dim: int
    ffn_dim: int
    text_dim: int
    freq_dim: int
    in_channels: int
    patch: tuple[int, int, int]
    temporal_factor: int
    spatial_factor: int
    num_solver_tensors: int
    text_encoder_flops: float
    vae: VaeShape

    has_alpha = False

    @property
    def kind(self) -> str:
        return "video"

    @property
    def has_two_experts(self) -> bool:
        return self.family.startswith("wan-moe")

    @property
    def scheduler_class(self) -> str:
        return next(name for name, number in SCHEDULERS.items() if number == self.num_solver_tensors)

    def resolve(self, spec: JobSpec) -> JobSpec:
        spec = with_known_syntax(with_recipe(spec, family=self.family))
        spec = rules.with_known_scheduler(spec, is_flow=True, own_class=self.scheduler_class)
        filled = self._fill_scales(spec)
        width, height = rules.known(filled.width), rules.known(filled.height)
        frames = rules.known(filled.frames)
        multiple = (self.spatial_factor * self.patch[2], self.spatial_factor * self.patch[1])
        rounded = rules.changed(
            filled,
            width=rules.floor_to_multiple(width, multiple[0]),
            height=rules.floor_to_multiple(height, multiple[1]),
            frames=self._rounded_frames(frames),
        )
        problems = [*self._field_problems(spec), *rules.reuse_problems(filled)]
        problems += rules.size_problems(width, height, multiple=multiple)
        if not any(problem.field in ("size", "frames") for problem in problems):
            problems += rules.token_problems(self.num_tokens(rounded), field="frames", value=frames)
        if problems:
            raise JobError(*problems)
        return rounded

    def output_kind(self, spec: JobSpec) -> str:
        frames = self.defaults["frames"] if spec.frames is None else spec.frames
        return "image" if self._rounded_frames(frames) == 1 else "video"

    def uses_cfg(self, spec: JobSpec) -> bool:
        return rules.known(spec.guidance_scale) > 1.0

    def num_tokens(self, spec: JobSpec) -> int:
        _, frames, height, width = self._latent_shape(spec)
        return (frames // self.patch[0]) * (height // self.patch[1]) * (width // self.patch[2])

    @property
    def attention_width(self) -> int:
        return self.num_layers * self.inner_dim

    def num_latent_rows(self, spec: JobSpec) -> int:
        return self._latent_shape(spec)[2]

    def shape_key(self, spec: JobSpec) -> str:
        key = f"{spec.width}x{spec.height}x{spec.frames}"
        key += ("+cfg" if self.uses_cfg(spec) else "") + ("+image" if spec.image else "")
        return key + rules.evaluations_key(spec)

    def trajectory(self, spec: JobSpec) -> Trajectory:
        latent = (1, *self._latent_shape(spec))
        names = ["prompt_embeds"] + ["negative_prompt_embeds"] * self.uses_cfg(spec)
        num_tokens = rules.max_text_tokens(spec, TEXT_TOKENS)
        prompt = tuple((name, (1, num_tokens, self.text_dim), "float32") for name in names)
        state = ["sample", "last_sample", "model_output_0", "model_output_1"][: 1 + self.num_solver_tensors]
        sides = rules.known(spec.frames), rules.known(spec.height), rules.known(spec.width)
        frames = (*sides, 3 * spec.sample_bytes)
        artifacts = (
            Artifact("prompt", prompt),
            Artifact("condition", self._condition_fields(spec)),
            rules.latents_artifact(
                spec, Artifact("latents", tuple((name, latent, "float32") for name in state))
            ),
            Artifact("frames", (("frames", frames, "uint8"),)),
        )
        trajectory = Trajectory(spec.id, rules.known(spec.steps), artifacts)
        output = None if spec.scheduler else (latent, "float32")
        return rules.with_reuse(trajectory, spec, output=output, switch=self._switch(spec))

    def flops(self, spec: JobSpec, stage: Stage) -> float:
        branches = 2 if self.uses_cfg(spec) else 1
        _, frames, height, width = self._latent_shape(spec)
        if stage is Stage.ENCODE:
            return branches * self.text_encoder_flops
        if stage is Stage.DENOISE:
            return branches * self._forward_flops(self.num_tokens(spec))
        if stage is Stage.DECODE:
            return self.vae.decode_flops(frames=frames, height=height, width=width)
        if spec.image is None or stage is Stage.APPROXIMATE:
            return 0.0
        encoded = frames if self.has_two_experts else 1
        return self.vae.encode_flops(frames=encoded, height=height, width=width)

    def _forward_flops(self, tokens: int) -> float:
        """One transformer forward; a multiply-add counts as 2."""
        dim, text = self.inner_dim, TEXT_TOKENS
        self_attention = 8.0 * tokens * dim**2 + 4.0 * tokens**2 * dim
        cross_attention = 4.0 * (tokens + text) * dim**2 + 4.0 * tokens * text * dim
        feed_forward = 4.0 * tokens * dim * self.ffn_dim
        patch_volume = self.patch[0] * self.patch[1] * self.patch[2]
        ends = 2.0 * tokens * dim * patch_volume * (self.in_channels + self.vae.z_dim)
        text_in = 2.0 * text * dim * (self.text_dim + dim)
        num_timesteps = tokens if self.family == "wan-ti2v" else 1
        modulation = 2.0 * num_timesteps * dim * (self.freq_dim + 7 * dim)
        per_layer = self_attention + cross_attention + feed_forward
        return self.num_layers * per_layer + ends + text_in + modulation

    def _switch(self, spec: JobSpec) -> int | None:
        """The first step of the second expert; None if one expert runs all steps.

        Source: diffusers 0.42, `set_timesteps` of UniPC with flow sigmas and of flow-match Euler.
        """
        if spec.boundary_ratio is None:
            return None
        steps, shift = rules.known(spec.steps), rules.known(spec.flow_shift)
        if self.num_solver_tensors:
            levels, last, most = steps, 1 / _NUM_TRAIN, 1 - 1e-6
        else:  # flow-match Euler ends at a level that is shifted already
            levels, last, most = max(1, steps - 1), _shifted(1 / _NUM_TRAIN, shift), 1.0
        falling = (1 - (1 - last) * step / levels for step in range(steps))
        sigmas = (min(_shifted(sigma, shift), most) for sigma in falling)
        low = (step for step, sigma in enumerate(sigmas) if sigma < spec.boundary_ratio)
        return next(low, None)

    def _latent_shape(self, spec: JobSpec) -> tuple[int, int, int, int]:
        """[C, T, H, W]."""
        frames = (rules.known(spec.frames) - 1) // self.temporal_factor + 1
        factor = self.spatial_factor
        return self.vae.z_dim, frames, rules.known(spec.height) // factor, rules.known(spec.width) // factor

    def _condition_fields(self, spec: JobSpec) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        if spec.image is None:
            return ()
        channels, frames, height, width = self._latent_shape(spec)
        size = (channels + self.temporal_factor, frames) if self.has_two_experts else (channels, 1)
        return (("condition", (1, *size, height, width), "float32"),)

    def _rounded_frames(self, frames: int) -> int:
        if frames % self.temporal_factor == 1:
            return frames
        return max(frames // self.temporal_factor * self.temporal_factor + 1, 1)

    def _field_problems(self, spec: JobSpec) -> Iterator[Problem]:
        own = self.scheduler_class
        yield from rules.flow_problems(spec, own_class=own, call="WanPipeline", most_tokens=TEXT_TOKENS)
        if (shift := rules.shift_of(spec)) is not None and spec.flow_shift not in (None, shift):
            yield Problem.of("flow_shift", spec.flow_shift, "scheduler has another one; give one of them")
        if (spec.scheduler or {}).get("use_dynamic_shifting"):
            reason = "this model's shift does not depend on the size; leave it out"
            yield Problem.of("scheduler.use_dynamic_shifting", "true", reason)
        if spec.reuse is not None and self.has_two_experts and (spec.scheduler or spec.sigmas):
            reason = "with scheduler or sigmas, the step that changes the expert is unknown; leave one out"
            yield Problem.of("reuse", spec.reuse, reason)
        yield from rules.useless(spec, "true_cfg_scale", "belongs to Qwen-Image; use guidance_scale")
        if not self.has_two_experts:
            reason = "needs a model with two experts (Wan2.2-A14B); this one has a single transformer"
            yield from rules.useless(spec, "guidance_scale_2", reason)
            yield from rules.useless(spec, "boundary_ratio", reason)
        if self.family in ("wan-moe-t2v", "wan-t2v"):
            others = "Wan2.2-TI2V-5B and Wan2.2-I2V-A14B take an image"
            yield from rules.useless(spec, "image", f"this model makes videos from text only; {others}")
        if self.family == "wan-moe-i2v" and spec.image is None:
            yield Problem.of("image", None, "this model animates a picture; give the path of one")
        yield from rules.whole_problems(spec, "frames", low=1, high=MAX_FRAMES)
        yield from rules.whole_problems(spec, "steps", low=1, high=MAX_STEPS)
        yield from rules.number_problems(spec, "fps", low=MIN_FPS, high=MAX_FPS)
        yield from rules.number_problems(spec, "guidance_scale", low=0, high=MAX_SCALE)
        yield from rules.number_problems(spec, "guidance_scale_2", low=0, high=MAX_SCALE)
        yield from rules.number_problems(spec, "boundary_ratio", low=0, high=1)
        yield from rules.number_problems(spec, "flow_shift", low=0, high=MAX_SHIFT, above=True)

    def _fill_scales(self, spec: JobSpec) -> JobSpec:
        """Fill in defaults. A single guidance scale applies to both experts, as in the pipeline."""
        spec = rules.changed(spec, flow_shift=rules.shift_of(spec)) if spec.flow_shift is None else spec
        if self.has_two_experts and spec.guidance_scale is not None and spec.guidance_scale_2 is None:
            spec = replace(spec, guidance_scale_2=spec.guidance_scale)
        return rules.fill_defaults(spec, self.defaults)


def wan_geometry(checkpoint: Checkpoint) -> WanGeometry:
    """Raises: ModelError for a variant that the adapters do not run."""
    family = _family_of(checkpoint)
    transformer = checkpoint.configs["transformer"]
    heads = checkpoint.value("transformer", "num_attention_heads")
    patch = tuple(checkpoint.value("transformer", "patch_size"))
    return WanGeometry(
        family=family,
        defaults=_defaults_of(checkpoint, family),
        num_layers=checkpoint.value("transformer", "num_layers"),
        num_heads=heads,
        inner_dim=heads * checkpoint.value("transformer", "attention_head_dim"),
        ffn_dim=checkpoint.value("transformer", "ffn_dim"),
        text_dim=transformer.get("text_dim", 4096),
        freq_dim=transformer.get("freq_dim", 256),
        in_channels=checkpoint.value("transformer", "in_channels"),
        patch=(patch[0], patch[1], patch[2]),
        temporal_factor=checkpoint.value("vae", "scale_factor_temporal", 4),
        spatial_factor=checkpoint.value("vae", "scale_factor_spatial", 8),
        num_solver_tensors=SCHEDULERS[str(checkpoint.class_of("scheduler"))],
        text_encoder_flops=_text_encoder_flops(checkpoint),
        vae=VaeShape.of(checkpoint),
    )


def _family_of(checkpoint: Checkpoint) -> str:
    """Which of the Wan models this is, from model_index.json and the channels of its transformer."""
    where = checkpoint.path / "model_index.json"
    checkpoint.check_components("a Wan pipeline")
    if (scheduler := checkpoint.class_of("scheduler")) not in SCHEDULERS:
        raise ModelError(f"{where}: scheduler {scheduler} is not supported; {' or '.join(SCHEDULERS)} is")
    if checkpoint.configs["transformer"].get("image_dim") is not None:
        raise ModelError(f"{where}: Wan 2.1 image to video (CLIP image encoder) is not supported; Wan 2.2 is")
    from_image = checkpoint.value("transformer", "in_channels") > checkpoint.value("vae", "z_dim")
    has_second = checkpoint.class_of("transformer_2") is not None
    if checkpoint.index.get("expand_timesteps"):
        return "wan-ti2v"
    if has_second and checkpoint.index.get("boundary_ratio") is not None:
        return "wan-moe-i2v" if from_image else "wan-moe-t2v"
    if from_image or has_second:
        raise ModelError(
            f"{where}: this Wan variant is not supported; TI2V-5B, T2V-A14B, I2V-A14B and 2.1 T2V are"
        )
    return "wan-t2v"


def _defaults_of(checkpoint: Checkpoint, family: str) -> dict[str, Any]:
    scheduler = checkpoint.configs["scheduler"]
    own: dict[str, Any] = {"flow_shift": scheduler.get("flow_shift", scheduler.get("shift", 1.0))}
    if family.startswith("wan-moe"):
        own["boundary_ratio"] = checkpoint.index["boundary_ratio"]
    where = str(checkpoint.path / SETTINGS_NAME)
    return rules.merge_defaults({**FAMILY_DEFAULTS[family], **own}, checkpoint.settings, where=where)


def _text_encoder_flops(checkpoint: Checkpoint) -> float:
    """One prompt of TEXT_TOKENS through the UMT5 encoder."""
    dim = checkpoint.value("text_encoder", "d_model")
    attention_dim = checkpoint.value("text_encoder", "num_heads") * checkpoint.value("text_encoder", "d_kv")
    projections = 4 * dim * attention_dim + 3 * dim * checkpoint.value("text_encoder", "d_ff")
    per_layer = 2.0 * TEXT_TOKENS * projections + 4.0 * TEXT_TOKENS**2 * attention_dim
    return float(checkpoint.value("text_encoder", "num_layers") * per_layer)


def _shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)
