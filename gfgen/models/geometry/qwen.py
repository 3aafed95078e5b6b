"""Geometry of Qwen-Image: one picture, latents packed in patches of 2 x 2.

Shapes: latents [1, S, 64] with S = (height / 16) x (width / 16).
Source: diffusers 0.42 QwenImagePipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gfgen.errors import JobError, ModelError, Problem
from gfgen.graph import Artifact, Stage, Trajectory
from gfgen.job.fields import MAX_SCALE, MAX_STEPS
from gfgen.job.recipes import with_recipe
from gfgen.job.spec import JobSpec
from gfgen.job.weighted import with_known_syntax
from gfgen.models.geometry import rules
from gfgen.models.geometry.checkpoint import SETTINGS_NAME, Checkpoint
from gfgen.models.geometry.vae import VaeShape

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
MAX_TEXT_TOKENS, MOST_TEXT_TOKENS = 512, 1024
"""Where the pipeline cuts a prompt (`max_sequence_length`), and the most that it accepts."""

TEMPLATE_TOKENS = 39
"""The pipeline's template around a prompt: 34 tokens before it, later cut off, and 5 after it."""

TYPICAL_TEXT_TOKENS = 64
"""For FLOPs, because only the tokenizer knows the length. A guided step at 1024x1024 is then 139 TFLOP."""

FAMILY_DEFAULTS: Mapping[str, Any] = {
    "width": 1328,
    "height": 1328,
    "frames": 1,
    "steps": 50,
    "true_cfg_scale": 4.0,
    "negative_prompt": " ",
}
"""Source: the model card of Qwen/Qwen-Image; its negative prompt is one space."""


@dataclass(frozen=True, slots=True)
class QwenGeometry:
    family: str
    defaults: Mapping[str, Any]
    num_layers: int
    num_heads: int
    inner_dim: int
    text_dim: int
    in_channels: int
    shift_terminal: float | None
    """To which the model's own scheduler stretches its noise levels."""
    shifts_by_size: bool
    encoder_params: int
    """Parameters of the language model's layers, which every prompt token passes through."""
    vae: VaeShape

    @property
    def kind(self) -> str:
        return "image"

    @property
    def has_alpha(self) -> bool:
        return self.vae.pixel_channels == 4

    @property
    def multiple(self) -> int:
        """Side of a token in pixels: the VAE's factor times the packing."""
        return 2 << len(self.vae.temporal_downsample)

    def resolve(self, spec: JobSpec) -> JobSpec:
        spec = with_known_syntax(with_recipe(spec, family=self.family))
        spec = rules.with_known_scheduler(spec, is_flow=True, own_class=SCHEDULER)
        filled = rules.fill_defaults(spec, self.defaults)
        width, height = rules.known(filled.width), rules.known(filled.height)
        rounded = rules.changed(
            filled,
            width=rules.floor_to_multiple(width, self.multiple),
            height=rules.floor_to_multiple(height, self.multiple),
            frames=1,
        )
        multiple = (self.multiple, self.multiple)
        problems = [*self._field_problems(spec), *rules.reuse_problems(filled)]
        problems += rules.size_problems(width, height, multiple=multiple)
        if not any(problem.field == "size" for problem in problems):
            size = f"{width}x{height}"
            problems += rules.token_problems(self.num_tokens(rounded), field="size", value=size)
        if problems:
            raise JobError(*problems)
        return rounded

    def output_kind(self, spec: JobSpec) -> str:
        return "image"

    def uses_cfg(self, spec: JobSpec) -> bool:
        return rules.known(spec.true_cfg_scale) > 1.0

    def num_tokens(self, spec: JobSpec) -> int:
        return (rules.known(spec.height) // self.multiple) * (rules.known(spec.width) // self.multiple)

    @property
    def attention_width(self) -> int:
        return self.num_layers * self.inner_dim

    def num_latent_rows(self, spec: JobSpec) -> int:
        return rules.known(spec.height) // (self.multiple // 2)

    def shape_key(self, spec: JobSpec) -> str:
        return (
            f"{spec.width}x{spec.height}"
            + ("+cfg" if self.uses_cfg(spec) else "")
            + rules.evaluations_key(spec)
        )

    def trajectory(self, spec: JobSpec) -> Trajectory:
        names = ["prompt_embeds"] + ["negative_prompt_embeds"] * self.uses_cfg(spec)
        num_tokens = rules.max_text_tokens(spec, MAX_TEXT_TOKENS)
        prompt = tuple((name, (1, num_tokens, self.text_dim), "float32") for name in names)
        latent = (1, self.num_tokens(spec), self.in_channels)
        pixel_bytes = (4 if self.has_alpha else 3) * spec.sample_bytes
        picture = (1, rules.known(spec.height), rules.known(spec.width), pixel_bytes)
        artifacts = (
            Artifact("prompt", prompt),
            Artifact("condition", ()),
            rules.latents_artifact(spec, Artifact("latents", (("sample", latent, "float32"),))),
            Artifact("frames", (("frames", picture, "uint8"),)),
        )
        trajectory = Trajectory(spec.id, rules.known(spec.steps), artifacts)
        return rules.with_reuse(trajectory, spec, output=None if spec.scheduler else (latent, "float32"))

    def flops(self, spec: JobSpec, stage: Stage) -> float:
        branches = 2 if self.uses_cfg(spec) else 1
        if stage is Stage.ENCODE:
            return branches * 2.0 * self.encoder_params * (TYPICAL_TEXT_TOKENS + TEMPLATE_TOKENS)
        if stage is Stage.DENOISE:
            return branches * self._forward_flops(self.num_tokens(spec))
        if stage in (Stage.PREPARE, Stage.APPROXIMATE):
            return 0.0
        rows, columns = (rules.known(side) // (self.multiple // 2) for side in (spec.height, spec.width))
        return self.vae.decode_flops(frames=1, height=rows, width=columns)

    def _forward_flops(self, tokens: int) -> float:
        """One transformer forward; a multiply-add counts as 2.

        Text and picture have separate weights (4 projections, a feed-forward of 4 x) and attend to each
        other in one sequence.
        """
        dim, sequence = self.inner_dim, tokens + TYPICAL_TEXT_TOKENS
        per_layer = 24.0 * sequence * dim**2 + 4.0 * sequence**2 * dim
        modulation = 24.0 * dim**2
        ends = 2.0 * dim * (tokens * 2 * self.in_channels + TYPICAL_TEXT_TOKENS * self.text_dim)
        return self.num_layers * (per_layer + modulation) + ends

    def _field_problems(self, spec: JobSpec) -> Iterator[Problem]:
        own = {"own_class": SCHEDULER, "call": "QwenImagePipeline"}
        yield from rules.flow_problems(spec, **own, most_tokens=MOST_TEXT_TOKENS)
        if "num_images_per_prompt" in (spec.args or {}):
            yield Problem.of("args.num_images_per_prompt", None, "use num_images, which makes a job of each")
        for name in ("guidance_scale", "guidance_scale_2"):
            yield from rules.useless(spec, name, "has no effect on Qwen-Image; use true_cfg_scale")
        yield from rules.useless(spec, "boundary_ratio", "needs a model with two experts (Wan2.2-A14B)")
        yield from rules.shift_problems(spec, SCHEDULER, {"use_dynamic_shifting": self.shifts_by_size})
        yield from rules.useless(
            spec, "flow_shift", "has no effect on Qwen-Image; its shift depends on the size"
        )
        yield from rules.useless(spec, "image", "this model makes pictures from text only; leave it out")
        yield from rules.useless(spec, "fps", "this model makes single pictures; leave it out")
        if spec.frames not in (None, 1):
            yield Problem.of(
                "frames", spec.frames, "this model makes single pictures; leave it out or give 1"
            )
        # Stretching a schedule of one step to a terminal value divides by zero.
        stretches = (spec.scheduler or {}).get("shift_terminal", self.shift_terminal)
        yield from rules.whole_problems(spec, "steps", low=2 if stretches else 1, high=MAX_STEPS)
        yield from rules.number_problems(spec, "true_cfg_scale", low=0, high=MAX_SCALE)


def qwen_geometry(checkpoint: Checkpoint) -> QwenGeometry:
    """Raises: ModelError for a variant that the adapter does not run."""
    _check_variant(checkpoint)
    where = str(checkpoint.path / SETTINGS_NAME)
    heads = checkpoint.value("transformer", "num_attention_heads")
    return QwenGeometry(
        family="qwen-image",
        defaults=rules.merge_defaults(FAMILY_DEFAULTS, checkpoint.settings, where=where),
        num_layers=checkpoint.value("transformer", "num_layers"),
        num_heads=heads,
        inner_dim=heads * checkpoint.value("transformer", "attention_head_dim"),
        text_dim=checkpoint.value("transformer", "joint_attention_dim"),
        in_channels=checkpoint.value("transformer", "in_channels"),
        shift_terminal=checkpoint.configs["scheduler"].get("shift_terminal"),
        shifts_by_size=bool(checkpoint.configs["scheduler"].get("use_dynamic_shifting")),
        encoder_params=_encoder_params(checkpoint.configs["text_encoder"]),
        vae=VaeShape.of(checkpoint),
    )


def _check_variant(checkpoint: Checkpoint) -> None:
    where = checkpoint.path / "model_index.json"
    checkpoint.check_components("Qwen-Image")
    scheduler = checkpoint.class_of("scheduler")
    if scheduler != SCHEDULER:
        raise ModelError(f"{where}: scheduler {scheduler} is not supported; {SCHEDULER} is")
    if checkpoint.configs["transformer"].get("guidance_embeds"):
        raise ModelError(f"{where}: guidance-distilled Qwen-Image is not supported; the released one is")


def _encoder_params(config: Mapping[str, Any]) -> int:
    """Parameters of the language layers of a Qwen2.5-VL config, old (flat) or new (nested)."""
    text = {**config, **config.get("text_config", {})}
    dim = text["hidden_size"]
    kv_dim = dim * text["num_key_value_heads"] // text["num_attention_heads"]
    per_layer = 2 * dim * dim + 2 * dim * kv_dim + 3 * dim * text["intermediate_size"]
    return int(text["num_hidden_layers"] * per_layer)
