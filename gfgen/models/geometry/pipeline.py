"""Geometry of any other diffusers pipeline: what its call takes, from diffusers' source (`call.py`).

Its sizes are those that a job asks for, rounded down to a multiple. Bytes of its artifacts are
unknown before it runs, so they have room in the job's slab, which takes memory only where it is written to.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gfgen.errors import JobError, ModelError, Problem
from gfgen.graph import Artifact, Stage, Trajectory
from gfgen.job.fields import MAX_STEPS
from gfgen.job.recipes import with_recipe
from gfgen.job.samplers import FLOW
from gfgen.job.spec import SHAPE_FIELDS, JobSpec, num_pictures
from gfgen.job.weighted import with_known_syntax
from gfgen.models.geometry import rules
from gfgen.models.geometry.call import CallSignature, methods_of, signature_of
from gfgen.models.geometry.checkpoint import SETTINGS_NAME, Checkpoint, OwnClass

DEFAULTS: Mapping[str, Any] = {"width": 1024, "height": 1024, "steps": 50}
"""Where neither the call nor the checkpoint's gfgen.json has a number."""
DEFAULT_FPS = 16
ROOM_BYTES = 4 << 30
"""Room for an artifact of unknown size: addresses in a sparse file, not memory."""
_TYPICAL_PARAMETERS = 2e9
"""For the first estimate of a step; after a step of a shape, its measured time takes over."""
_TOKEN_SIDE, _TOKEN_FRAMES = 16, 4
"""Pixels and frames of a token, in the same estimate."""
TOKEN_SIDES: Mapping[str, int] = {
    "ChronoEditTransformer3DModel": 16,
    "CogVideoXTransformer3DModel": 16,
    "Flux2Transformer2DModel": 16,
    "FluxTransformer2DModel": 16,
    "HeliosTransformer3DModel": 64,  # the first stage of a pyramid has a quarter of the rows
    "HunyuanImageTransformer2DModel": 32,
    "HunyuanVideoTransformer3DModel": 16,
    "LTX2VideoTransformer3DModel": 32,
    "LTXVideoTransformer3DModel": 32,
    "OvisImageTransformer2DModel": 16,
    "QwenImageTransformer2DModel": 16,
    "SD3Transformer2DModel": 16,
    "SkyReelsV2Transformer3DModel": 16,
    "WanTransformer3DModel": 32,
    "WanVACETransformer3DModel": 16,
    "ZImageTransformer2DModel": 16,
}
"""Classes of transformers whose tokens ranks can share, and the most pixels along a token's side.

Each has a plan (parallel/plans.py); its steps were compared with one rank (benchmarks/results/pipelines.md).
"""
GUIDED = frozenset(
    (
        *TOKEN_SIDES,
        *("AllegroTransformer3DModel", "AnyFlowTransformer3DModel", "AuraFlowTransformer2DModel"),
        *("BriaFiboTransformer2DModel", "BriaTransformer2DModel", "ChromaTransformer2DModel"),
        *("CogView3PlusTransformer2DModel", "CogView4Transformer2DModel", "EasyAnimateTransformer3DModel"),
        *("ErnieImageTransformer2DModel", "HunyuanVideoFramepackTransformer3DModel"),
        *("Kandinsky5Transformer3DModel", "Krea2Transformer2DModel", "LatteTransformer3DModel"),
        *("Lumina2Transformer2DModel", "LuminaNextDiT2DModel", "MochiTransformer3DModel"),
        *("PRXTransformer2DModel", "PixArtTransformer2DModel", "SanaTransformer2DModel"),
    )
)
"""Classes whose guidance two halves of a layout can share, from the same comparison."""
SEVERAL_PICTURES = frozenset(
    (
        *("BriaFibo2Pipeline", "BriaFiboEditPipeline", "Flux2KleinKVPipeline", "Flux2KleinPipeline"),
        *("Flux2Pipeline", "QwenImage21Pipeline", "QwenImageEditPlusPipeline", "ZImageOmniPipeline"),
    )
)
"""Pipelines that make one result of several pictures in `image`; in others a list is a batch.

Source: the calls of diffusers 0.42.
"""
NO_PICTURES = re.compile("Audio|AceStep|Proteina|Marigold")
"""Pipelines that make only sound, proteins, or maps of numbers below 0."""
_SEVERAL = re.compile("Multi(ControlNet|Adapter)")
_LARGE = "CLIPTextModelWithProjection"
_EMBEDS = {"CLIPTextModel": "", f"CLIPTextModel {_LARGE}": "pooled_", _LARGE: "pooled_"}
"""By the text encoders of a UNet whose prompts can have weights: what embeddings its call takes."""
_UNSHARED = re.compile("PAG|KleinKV|DiffusionForcing|InContext|HDR")
"""Pipelines whose attention differs from their transformer's plan: perturbed, cached, or with a mask."""


@dataclass(frozen=True, slots=True)
class PipelineGeometry:
    signature: CallSignature
    defaults: Mapping[str, Any]
    scheduler_class: str | None
    num_heads: int = 1
    token_side: int | None = None
    """The most pixels along a token's side, if ranks can share the tokens."""
    own_code: Mapping[str, OwnClass] = field(default_factory=dict)
    why_no_reuse: str | None = None
    shares_guidance: bool = False
    multiple: int = 1
    why_no_guidance: str | None = None
    """Why a guidance scale has no effect; None if it may have one."""
    has_clip: bool = False
    has_alpha: bool = False
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.signature.pipeline_class

    @property
    def kind(self) -> str:
        return "video" if self._makes_videos else "image"

    @property
    def takes_size(self) -> bool:
        """Whether a job says the size; otherwise the call takes it from its pictures or its config."""
        return "width" in self.signature.arguments

    @property
    def _makes_videos(self) -> bool:
        takes = {"num_frames", "video_length", "video", "control_video"} & self.signature.arguments.keys()
        return bool(takes) or "Video" in self.family

    def resolve(self, spec: JobSpec) -> JobSpec:
        spec = with_known_syntax(with_recipe(spec, family=self.family), has_clip=self.has_clip)
        spec = rules.with_known_scheduler(spec, is_flow=(self.scheduler_class or "").startswith(FLOW))
        problems = [*self.signature.problems(spec, scheduler_class=self.scheduler_class)]
        problems += self._number_problems(spec)
        problems += rules.shift_problems(spec, self.scheduler_class, self.scheduler)
        problems += rules.prediction_problems(spec, self.scheduler_class, self.scheduler)
        filled = rules.fill_defaults(spec, self.defaults)
        for name in ("width", "height"):
            if (side := getattr(filled, name)) is not None:
                filled = rules.changed(filled, **{name: rules.floor_to_multiple(side, self.multiple)})
        filled = rules.with_second_pass(filled, multiple=self.multiple)
        may_refine = not self.has_alpha and not self._makes_videos
        problems += rules.second_pass_problems(filled, self.signature, is_picture=may_refine)
        if self.why_no_reuse is not None:
            problems += rules.useless(spec, "reuse", self.why_no_reuse)
        else:
            problems += rules.reuse_problems(filled)
        if problems:
            raise JobError(*problems)
        return filled if self._makes_videos else rules.changed(filled, frames=1, fps=None)

    def output_kind(self, spec: JobSpec) -> str:
        return self.kind

    def trajectory(self, spec: JobSpec) -> Trajectory:
        pictures = rules.known(spec.frames) * num_pictures(spec.args)
        pixels = pictures * math.prod(spec.enlarged or _size(spec))
        artifacts = (
            *(Artifact(name, (), room_bytes=ROOM_BYTES) for name in ("prompt", "condition", "latents")),
            Artifact("frames", (), room_bytes=pixels * (4 if self.has_alpha else 3) * spec.sample_bytes),
        )
        first = Trajectory(spec.id, rules.known(spec.steps), artifacts)
        reused, more = rules.with_reuse(first, spec, output=None), spec.num_refined
        return replace(reused, num_steps=reused.num_steps + more, num_refined=more)

    def num_tokens(self, spec: JobSpec) -> int:
        """At least those of one frame, and 1 if they are unknown: as many ranks can share them."""
        if self.token_side is None:
            return 1
        rows, columns = (side // self.token_side for side in _size(spec))
        return max(1, rows * columns)

    @property
    def attention_width(self) -> int:
        return 0

    def num_latent_rows(self, spec: JobSpec) -> int:
        return 1

    def uses_cfg(self, spec: JobSpec) -> bool:
        has_branches = "negative_prompt" in self.signature.arguments
        return self.shares_guidance and has_branches and self.is_guided(spec)

    def flops(self, spec: JobSpec, stage: Stage) -> float:
        if stage not in (Stage.DENOISE, Stage.REFINE):
            return 0.0
        frames = (rules.known(spec.frames) - 1) // _TOKEN_FRAMES + 1
        size = spec.enlarged or (0, 0) if stage is Stage.REFINE else _size(spec)
        rows, columns = (side // _TOKEN_SIDE for side in size)
        return 2.0 * _TYPICAL_PARAMETERS * frames * rows * columns

    def shape_key(self, spec: JobSpec) -> str:
        size = spec.size_text + (f"x{spec.frames}" if self._makes_videos else "")
        size += ("+cfg" if self.is_guided(spec) else "") + rules.evaluations_key(spec)
        size += f"+after={spec.width}x{spec.height}x{spec.num_refined}" if spec.enlarged else ""
        args = sorted((spec.args or {}).items())
        numbers = [f"+{name}={value:g}" for name, value in args if isinstance(value, (int, float))]
        return "".join((size, *numbers, *(f"+{name}" for name in sorted(spec.files or ()))))

    def ignores_negative_prompt(self, spec: JobSpec) -> bool:
        """Whether a negative prompt has no effect, as far as the source tells."""
        field, scale, default = self._guidance(spec)
        if field == "guidance_scale" and self.why_no_guidance is not None:
            return True
        above = 1.0 if field == "true_cfg_scale" else self.signature.guided_above
        scale = default if scale is None else scale
        return above is not None and isinstance(scale, (int, float)) and scale <= above

    def _guidance(self, spec: JobSpec) -> tuple[str, Any, Any]:
        """The field that sets the guidance, the job's value, and the call's default."""
        taken = self.signature.arguments
        field = "true_cfg_scale" if "true_cfg_scale" in taken else "guidance_scale"
        argument = self.signature.argument_of(field)
        return field, getattr(spec, field), taken[argument].default if argument else None

    def is_guided(self, spec: JobSpec) -> bool:
        """Whether the call evaluates more than one branch, as far as its arguments tell.

        Calls with `true_cfg_scale` do so only if there is a negative prompt; their `guidance_scale` is an
        input of the transformer.
        """
        taken, (field, scale, default) = self.signature.arguments, self._guidance(spec)
        if field == "true_cfg_scale" and "negative_prompt" in taken and spec.negative_prompt is None:
            return False
        if scale in (None, default):  # a default may be an input of the transformer
            scale = default if "negative_prompt" in taken else None
        return isinstance(scale, (int, float)) and scale > 1

    def _number_problems(self, spec: JobSpec) -> Iterator[Problem]:
        yield from rules.whole_problems(spec, "steps", low=1, high=MAX_STEPS)
        if spec.width is not None and spec.height is not None:
            yield from rules.size_problems(spec.width, spec.height, multiple=(max(8, self.multiple),) * 2)
        if spec.sample_bytes > 1 and "output_type" not in self.signature.arguments:
            yield Problem.of("format", spec.format, "this model gives pictures of 8 bits; use png")
        if not self._makes_videos:
            reason = "this model makes single pictures; leave it out"
            if spec.frames not in (None, 1):
                yield Problem.of("frames", spec.frames, f"{reason} or give 1")
            yield from rules.useless(spec, "fps", reason)


def pipeline_geometry(checkpoint: Checkpoint) -> PipelineGeometry:
    """Raises: ModelError for a class that diffusers lacks, for code that is missing, and for sound."""
    where = checkpoint.path / "model_index.json"
    code = checkpoint.own_code
    for own in code.values():
        if not own.source.is_file():
            raise ModelError(f"{where}: its code is missing: there is no {own.source}")
    source = code["pipeline"].source if "pipeline" in code else None
    try:
        signature = signature_of(checkpoint.pipeline_class, source=source)
    except ModelError as error:
        raise ModelError(f"{where}: {error}; install a diffusers that has it, or use another model") from None
    if NO_PICTURES.search(checkpoint.pipeline_class):
        raise ModelError(f"{where}: {checkpoint.pipeline_class} makes neither pictures nor videos")
    if several := [x for x in checkpoint.configs if _SEVERAL.search(checkpoint.class_of(x) or "")]:
        raise ModelError(f"{where}: {several[0]} is several networks, which are not read; give one of them")
    vae = checkpoint.configs.get("vae", {})
    return PipelineGeometry(
        multiple=size_multiple(checkpoint, methods_of(checkpoint.pipeline_class, source=source)),
        signature=signature,
        defaults=rules.merge_defaults(
            _defaults(signature), checkpoint.settings, where=str(checkpoint.path / SETTINGS_NAME)
        ),
        scheduler_class=checkpoint.class_of("scheduler"),
        has_alpha=4 == vae.get("input_channels", vae.get("in_channels")) == vae.get("out_channels", 4),
        scheduler=checkpoint.configs.get("scheduler", {}),
        own_code=code,
        why_no_reuse=_why_no_reuse(checkpoint, signature),
        why_no_guidance=_why_no_guidance(checkpoint, signature),
        has_clip=_has_clip(checkpoint, signature),
        **_sharing(checkpoint),
    )


def _size(spec: JobSpec) -> tuple[int, int]:
    """Height and width, or an estimate for a call that takes no size."""
    return spec.height or DEFAULTS["height"], spec.width or DEFAULTS["width"]


def _why_no_reuse(checkpoint: Checkpoint, signature: CallSignature) -> str | None:
    transformers = [part for part in checkpoint.configs if "transformer" in part]
    reason = (
        None if signature.steps_scheduler else "hands its outputs to no scheduler, where they could be caught"
    )
    if len(transformers) > 1:
        reason = "changes between transformers at steps that are unknown in advance"
    if not transformers:
        reason = "has no transformer whose outputs could be reused"
    return reason and f"{signature.pipeline_class} {reason}; leave it out"


def _why_no_guidance(checkpoint: Checkpoint, signature: CallSignature) -> str | None:
    if signature.guidance_setting == "is_distilled" and checkpoint.index.get("is_distilled"):
        return "the model is distilled"
    takes = any(config.get("guidance_embeds") for config in checkpoint.configs.values())
    if signature.guidance_setting == "guidance_embeds" and not takes:
        return "its transformer takes none (guidance_embeds)"
    return None


def _has_clip(checkpoint: Checkpoint, signature: CallSignature) -> bool:
    kinds = [checkpoint.class_of(f"text_encoder{end}") for end in ("", "_2", "_3")]
    embeds = f"{_EMBEDS.get(' '.join(filter(None, kinds)), 'no_')}prompt_embeds"
    return checkpoint.class_of("unet") is not None and embeds in signature.arguments


def _sharing(checkpoint: Checkpoint) -> dict[str, Any]:
    """How ranks can share steps: the fields of the geometry that follow from the transformers."""
    names = [name for name in checkpoint.configs if "transformer" in name]
    kinds = [checkpoint.class_of(name) or "" for name in names]
    if not names or checkpoint.own_code or _UNSHARED.search(checkpoint.pipeline_class):
        return {}
    is_distilled = bool(checkpoint.index.get("is_distilled"))
    found: dict[str, Any] = {"shares_guidance": not is_distilled and all(kind in GUIDED for kind in kinds)}
    heads = [_num_heads(checkpoint.configs[name]) for name in names]
    if all(kind in TOKEN_SIDES for kind in kinds) and all(heads):
        found |= {"num_heads": min(heads), "token_side": max(TOKEN_SIDES[kind] for kind in kinds)}
    return found


def _num_heads(config: Mapping[str, Any]) -> int:
    """0 if the config does not have them, or if keys have others than queries."""
    heads = config.get("num_attention_heads", config.get("n_heads"))
    return heads if isinstance(heads, int) and config.get("n_kv_heads", heads) == heads else 0


def _defaults(signature: CallSignature) -> dict[str, Any]:
    """The call's own numbers, and common ones where it has none."""
    found = dict(DEFAULTS) if "width" in signature.arguments else {"steps": DEFAULTS["steps"]}
    for name in (*SHAPE_FIELDS, "guidance_scale", "guidance_scale_2", "true_cfg_scale"):
        argument = signature.argument_of(name)
        value = signature.arguments[argument].default if argument else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = int(value) if name in SHAPE_FIELDS else float(value)
    return {"frames": 1, "fps": DEFAULT_FPS, **found}


# Multiples of sizes ---------------------------------------------------------------------------------
# Expressions such as `height % (self.vae_scale_factor * 2)` in a pipeline's source are evaluated over the
# configs, without importing diffusers. Besides, a size has whole patches of the transformer's.


_FACTORS = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_scale_factor",
    "vae_spatial_compression_ratio",
)
_BUILTINS = {"len": len, "getattr": getattr, "hasattr": hasattr, "max": max, "min": min, "int": int}


def size_multiple(checkpoint: Checkpoint, method_of: Callable[[str], ast.FunctionDef | None]) -> int:
    """`method_of` finds a method of the pipeline's class by its name."""
    parts = {name: _Part(config) for name, config in checkpoint.configs.items()}
    pipeline = _Part(parts | {name: None for name in checkpoint.index if name not in parts})
    moduli: list[Any] = []
    for method in filter(None, map(method_of, ("__init__", "check_inputs", "__call__"))):
        names = {"self": pipeline}
        nodes = [node for node in ast.walk(method) if isinstance(node, (ast.Assign, ast.BinOp))]
        for node in sorted(nodes, key=lambda node: node.lineno):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]):
                    names[name] = _value(node.value, names)
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)]):
                    pipeline[name] = _value(node.value, names)
                case ast.BinOp(left=ast.Name(id="height" | "width"), op=ast.Mod()):
                    moduli.append(_value(node.right, names))
    factor = max(_whole(pipeline.get(name)) for name in _FACTORS)
    configs = [config for name, config in checkpoint.configs.items() if "transformer" in name]
    patches = [config.get("patch_size", config.get("all_patch_size")) for config in configs]
    patch = max([1, *(_whole(side[-1] if isinstance(side, list) and side else side) for side in patches)])
    return math.lcm(*map(_whole, moduli), factor * patch)


def _whole(value: Any) -> int:
    """1 for what configs do not tell."""
    return value if type(value) is int and value > 0 else 1


def _value(expression: ast.expr, names: dict[str, Any]) -> Any:
    """The value of an expression of diffusers; None if it needs more than configs."""
    try:
        return eval(compile(ast.Expression(expression), "", "eval"), {"__builtins__": _BUILTINS}, names)
    except Exception:  # whatever code raises that expects a loaded pipeline
        return None


class _Part(dict[str, Any]):
    """The pipeline or a component, whose attributes are those of its config."""

    def __getattr__(self, name: str) -> Any:
        if name != "config" and name not in self:
            raise AttributeError(name)
        return self if name == "config" else self[name]
