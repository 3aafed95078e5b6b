"""The adapter of any diffusers pipeline: its call in steps, or as one task where it cannot be cut."""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from tqdm import tqdm

from gfgen.errors import ModelError
from gfgen.job.images import is_video, takes_frames
from gfgen.job.spec import JobSpec
from gfgen.job.weighted import Parts, weighted
from gfgen.layout import Layout
from gfgen.models.families import solver
from gfgen.models.families.adapter import PIXEL_SUM, SOUND, SOUND_RATE, UNCHECKED, Adapter, Fields, Patches
from gfgen.models.families.pictures import load_frames, load_video, to_uint8
from gfgen.models.fast import compiled, stop_checks
from gfgen.models.fast.compiled import channels_last, cut_texts
from gfgen.models.fast.evaluation import Evaluator, evaluate_call, is_recordable
from gfgen.models.fast.flux import fuse_flux, has_fused_blocks
from gfgen.models.fast.kernels import KernelChoice, using
from gfgen.models.geometry.call import CallSignature
from gfgen.models.geometry.model import Geometry
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.geometry.rules import call_of_second_pass, known, second_pass
from gfgen.models.geometry.weights import component_dtypes
from gfgen.models.loading.components import LoadPipeline, load_class, load_pipeline, without_warnings
from gfgen.models.parallel import hooks
from gfgen.models.parallel.branches import Evaluate, evaluate_itself, shared_step, unevaluated, watch
from gfgen.models.parallel.parallel import Parallel
from gfgen.models.stepping.program import NotSteppableError, sets_processors
from gfgen.models.stepping.stepper import IS_FINISHED, NUM_DONE, NUM_ITERATIONS, SEED, Stepper, is_finished
from gfgen.models.stepping.values import changes_in_calls, pack, parts_of, unpack
from gfgen.models.streaming.stream import stream_of
from gfgen.models.streaming.turns import present_place

logger = logging.getLogger(__name__)

DEFAULT_SOUND_RATE = 24_000
ENDS_IN_ZERO = ("EulerDiscreteScheduler", "LTXEulerAncestralRFScheduler")
"""Classes that take the last noise level, 0, in `sigmas`, not as a job. Source: diffusers 0.42."""


class PipelineAdapter(Adapter):
    def __init__(
        self, geometry: PipelineGeometry, pipeline: Any, *, device: str, kernels: KernelChoice = "own"
    ) -> None:
        self.geometry: Geometry = geometry
        self._signature = geometry.signature
        self.pipeline = pipeline
        self._device = device
        self._kernels: KernelChoice = kernels
        self._evaluate: Evaluate = evaluate_itself
        transformers = _transformers(pipeline)
        # With processors that a call sets, a record would keep those of one job.
        has_own = sets_processors(type(pipeline).__call__)
        self._can_record = any(map(is_recordable, transformers)) and not has_own
        self.is_rehearsed = self._can_record or kernels == "compiled"
        for transformer in transformers:
            prepare_kernels(transformer, may_copy=device != "cpu")
        if kernels != "own" and device != "cpu":
            channels_last(pipeline)
        self._shares_tokens = _prepare_sharing(pipeline, geometry)
        self.patches = Patches(pipeline)
        self._calls = functools.lru_cache(2 * solver.NUM_SCHEDULERS)(self._new_call)

    def encode(self, spec: JobSpec) -> Fields:
        self.patches.merge(spec)
        prompt = self._call(spec).encode(self.arguments(spec), seed=known(spec.seed))
        prompt.scalars[UNCHECKED] = True
        return prompt

    def prepare(self, spec: JobSpec, prompt: Fields) -> tuple[Fields, Fields]:
        self.patches.merge(spec)  # some calls encode their prompts here
        condition, latents = self._call(spec).prepare(prompt)
        condition.scalars[UNCHECKED] = True
        return condition, latents

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
        """Each step takes its share of the pipeline's iterations, which may be fewer or more than steps."""
        if parallel is not None and parallel.sequence.size > 1 and not self._shares_tokens:
            parallel = None  # each rank evaluates the whole step
        self.patches.merge(spec)
        if (number := step - known(spec.steps)) == 0:
            return self._begin_second_pass(spec, latents)
        call, num_steps = self._call(spec, is_second=number > 0), known(spec.steps)
        if number > 0:
            prompt, condition, latents = parted(latents)
            step, num_steps = number - 1, spec.num_refined - 1
        is_last = step == num_steps - 1
        until = math.ceil(latents.number(NUM_ITERATIONS) * (step + 1) / num_steps)
        while not is_finished(latents) and (is_last or latents.number(NUM_DONE) < until):
            iteration = functools.partial(call.step, prompt, condition, latents)
            with using(self._kernels):
                if spec.may_approximate and number < 0:
                    latents = self._with_outputs(iteration, latents, parallel)
                else:
                    latents = shared_step(iteration, parallel, self._evaluate)
        return joined(prompt, condition, latents) if number > 0 else latents

    def _begin_second_pass(self, spec: JobSpec, latents: Fields) -> Fields:
        """Each rank of a layout does the same."""
        pictures = _floats(self._call(spec).decode(latents))
        if not pictures.isfinite().all():
            raise ModelError("NaN or infinity in the first pass's picture; --vae-dtype float32 may help")
        first = to_uint8(pictures.movedim(-1, 1))
        signature = known(call_of_second_pass(self._signature))
        picture = Image.fromarray(first[0].cpu().numpy())  # as its PNG would be read
        picture = picture.resize(known(spec.enlarged), Image.Resampling.LANCZOS)
        arguments = self.arguments(second_pass(spec, signature), signature, image=picture)
        call = self._call(spec, is_second=True)
        prompt = call.encode(arguments, seed=known(spec.seed))
        return joined(prompt, *call.prepare(prompt))

    def _with_outputs(
        self, iteration: Callable[[], Fields], given: Fields, parallel: Parallel | None
    ) -> Fields:
        caught: list[torch.Tensor] = []

        def afresh() -> Fields:  # two halves of a layout run an iteration twice
            caught.clear()
            with solver.catching(caught):
                return iteration()

        state = shared_step(afresh, parallel, self._evaluate, notes_shapes=True)
        solver.keep_outputs(state, given, caught, step=given.number(NUM_DONE))
        return state

    def approximate(
        self, spec: JobSpec, prompt: Fields, condition: Fields, latents: Fields, *, step: int
    ) -> Fields:
        """A step that has no iteration, or too few outputs before it, runs as usual."""
        number, call = latents.number(NUM_DONE), self._call(spec)
        until = math.ceil(latents.number(NUM_ITERATIONS) * (step + 1) / known(spec.steps))
        if isinstance(call, WholeCall):
            raise ModelError(f"reuse: {self.geometry.family} runs each job as one task; leave reuse out")
        if until > number + 1:
            num = latents.number(NUM_ITERATIONS)
            raise ModelError(f"reuse: the call has {num} iterations for {spec.steps} steps; leave reuse out")
        is_last = number == latents.number(NUM_ITERATIONS) - 1
        if until == number or is_last or not solver.can_extrapolate(latents):
            return self.denoise(spec, prompt, condition, latents, step=step)
        with solver.giving(solver.extrapolated(latents, step=number)), unevaluated():
            state = call.step(prompt, condition, latents)
        solver.carry_outputs(state, latents)
        return state

    def decode(self, spec: JobSpec, latents: Fields, *, parallel: Parallel | None = None) -> Fields:
        self.patches.merge(spec)
        second, _, latents = parted(latents)
        output = self._call(spec, is_second=bool(second.scalars)).decode(latents)
        if any(getattr(output, "nsfw_content_detected", None) or ()):
            logger.error("job %s: the model's safety checker made a picture black; try another seed", spec.id)
        pictures = _floats(output)
        frames = to_uint8(pictures.movedim(-1, 1), per_sample=spec.sample_bytes)
        made = Fields({"frames": frames, PIXEL_SUM: pictures.sum(dtype=torch.float32)}, {"first_row": 0})
        if (sound_CS := _sound(output)) is not None:
            made.tensors[SOUND], made.scalars[SOUND_RATE] = sound_CS, self._sound_rate()
        return made

    def text_shape(self, spec: JobSpec, prompt: Fields, layout: Layout) -> tuple[object, ...]:
        return tuple(tensor.shape for tensor in prompt.tensors.values())

    def evaluate_by(self, forward: Evaluator) -> None:
        if self._can_record:
            self._evaluate = functools.partial(evaluate_call, by=forward)

    @property
    def takes_turns(self) -> bool:
        """Not where calls change more than their pipeline and its scheduler, which each of them has."""
        pipeline = self.pipeline
        changed = [name for name, part in pipeline.components.items() if changes_in_calls(part)]
        may_take = changed == ["scheduler"] and not sets_processors(type(pipeline).__call__)
        return may_take and any(map(stream_of, _transformers(pipeline)))

    def _sound_rate(self) -> int:
        """Samples per second, which the component that makes sound has in its config."""
        for part in self.pipeline.components.values():
            config = getattr(part, "config", {})
            for name in ("output_sampling_rate", "sampling_rate"):
                if isinstance(rate := getattr(config, name, None), int):
                    return rate
        return DEFAULT_SOUND_RATE

    def _call(self, spec: JobSpec, *, is_second: bool = False) -> Stepper | WholeCall:
        options = None if spec.scheduler is None else json.dumps(spec.scheduler, sort_keys=True)
        return self._calls(options, present_place(), is_second)

    def _new_call(self, scheduler: str | None, place: int, is_second: bool) -> Stepper | WholeCall:
        """Calls that take turns have pipelines of their own, since a call sets attributes of its pipeline."""
        pipeline, kind = self.pipeline, type(self.pipeline)
        if is_second and (found := known(call_of_second_pass(self._signature))) is not self._signature:
            kind = getattr(diffusers, found.pipeline_class)
        if scheduler is not None or place or is_second:
            made = solver.scheduler_like(pipeline.scheduler, json.loads(scheduler or "{}"))
            parts, settings = kind._get_signature_keys(kind)
            given = {name: value for name, value in pipeline.config.items() if name in settings}
            given |= {name: part for name, part in pipeline.components.items() if name in parts}
            config = made._internal_dict
            pipeline = kind(**{**given, "scheduler": made})
            made._internal_dict = config  # Stable Diffusion's constructor replaces options
        for part in pipeline.components.values():
            if isinstance(part, diffusers.SchedulerMixin):
                solver.watch_scheduler(part)
        try:
            return Stepper(pipeline, device=self._device)
        except NotSteppableError as error:
            logger.warning("%s: runs each job as one task: %s", self.geometry.family, error)
            return WholeCall(pipeline, device=self._device)

    def arguments(
        self, spec: JobSpec, signature: CallSignature | None = None, *, image: Image.Image | None = None
    ) -> dict[str, Any]:
        """Of the pipeline's call, or of another one, in which `image` stands for the job's."""
        signature = signature or self._signature
        arguments = signature.arguments_for(spec)
        own = type(getattr(self.pipeline, "scheduler", None)).__name__
        if "sigmas" in arguments and (spec.scheduler or {}).get("class", own) in ENDS_IN_ZERO:
            arguments["sigmas"] = [*arguments["sigmas"], 0.0]
        if image is not None:
            arguments["image"], spec = image, replace(spec, image=None)
        arguments |= given_files(spec, has_alpha=self.geometry.has_alpha)
        if "output_type" in signature.arguments:
            arguments["output_type"] = "pt" if _can_keep_pictures(self.pipeline) else "np"
        if spec.prompt_syntax is not None:
            made = with_embeddings(self.pipeline, arguments, device=self._device)
            arguments = {name: made[name] for name in made if name in signature.arguments}
        return arguments


class WholeCall:
    """A pipeline that is called as a whole, behind the interface of `Stepper`: all of it is the decode."""

    def __init__(self, pipeline: Any, *, device: str) -> None:
        self._pipeline = pipeline
        self._parts = parts_of(pipeline)
        self._device = torch.device(device)
        pipeline.set_progress_bar_config(disable=True)

    def encode(self, args: Mapping[str, Any], *, seed: int) -> Fields:
        prompt = pack(args, self._parts)
        prompt.scalars[SEED] = seed
        return prompt

    def prepare(self, prompt: Fields) -> tuple[Fields, Fields]:
        done = {IS_FINISHED: True, NUM_ITERATIONS: 0, NUM_DONE: 0}
        scalars = {name: value for name, value in prompt.scalars.items() if name != UNCHECKED}
        return Fields(), Fields(prompt.tensors, {**scalars, **done})

    def step(self, prompt: Fields, condition: Fields, state: Fields) -> Fields:
        return state

    @torch.no_grad()
    def decode(self, state: Fields) -> Any:
        args = unpack(state, self._parts, device=self._device, is_copied=True)
        seed = state.number(SEED)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self._pipeline(**args, generator=torch.Generator("cpu").manual_seed(seed))


# A step hands on latents alone. In a second pass they hold the prompt and the condition of its own call, too.


_PARTS = ("prompt", "condition", "")


def joined(*artifacts: Fields) -> Fields:
    """Prompt, condition and latents as latents; only the names of their own fields are without an @."""
    made = Fields()
    for part, fields in zip(_PARTS, artifacts, strict=True):
        end = part and f"@{part}"
        made.tensors |= {f"{name}{end}": tensor for name, tensor in fields.tensors.items()}
        made.scalars |= {f"{name}{end}": value for name, value in fields.scalars.items()}
    return made


def parted(latents: Fields) -> list[Fields]:
    """What was joined; the first is empty for latents of a first pass."""
    parts = {part: Fields() for part in _PARTS}
    for name, tensor in latents.tensors.items():
        own, _, part = name.partition("@")
        parts[part].tensors[own] = tensor
    for name, value in latents.scalars.items():
        own, _, part = name.partition("@")
        parts[part].scalars[own] = value
    return list(parts.values())


def load_any(
    checkpoint: Path,
    geometry: PipelineGeometry,
    *,
    device: str,
    dtype: torch.dtype,
    vae_dtype: str = "auto",
    load: LoadPipeline = load_pipeline,
    kernels: KernelChoice = "own",
) -> PipelineAdapter:
    if (own_class := geometry.own_code.get("pipeline")) is not None:
        kind = load_class(own_class)
    elif (kind := getattr(diffusers, geometry.family, None)) is None:
        raise ModelError(f"model {checkpoint}: diffusers {diffusers.__version__} lacks {geometry.family}")
    # tqdm's own lock is a semaphore of the system, which outlives a killed process.
    tqdm.set_lock(threading.RLock())
    dtypes = component_dtypes(geometry.family, vae_dtype)
    own = {"own_code": geometry.own_code} if geometry.own_code else {}
    pipeline = load(kind, checkpoint, device=device, dtype=dtype, dtypes=dtypes, **own)
    tile_if_needed(pipeline)
    stop_checks.install(*(x for x in pipeline.components.values() if isinstance(x, torch.nn.Module)))
    return PipelineAdapter(geometry, pipeline, device=device, kernels=kernels)


def tile_if_needed(pipeline: Any) -> None:
    """Let a VAE decode in tiles that cannot decode otherwise."""
    if isinstance(pipeline.components.get("vae"), diffusers.AutoencoderKLAllegro):
        pipeline.vae.enable_tiling()


def prepare_kernels(transformer: torch.nn.Module, *, may_copy: bool) -> None:
    """Let steps choose the kernels of a transformer (fast/kernels.py).

    may_copy: weights may be copied, which on CPUs are mappings that ranks share.
    """
    is_plain = not getattr(transformer, "is_quantized", False)
    if may_copy and is_plain and has_fused_blocks(transformer):
        fuse_flux(transformer)
        return
    compiled.prepare(transformer, has_any_texts=cut_texts(transformer))


def _transformers(pipeline: Any) -> list[torch.nn.Module]:
    """The pipeline's transformers, or its UNet: what steps evaluate."""
    return [
        part
        for name, part in pipeline.components.items()
        if ("transformer" in name and isinstance(part, torch.nn.Module))
        or isinstance(part, diffusers.UNet2DConditionModel)
    ]


def _can_keep_pictures(pipeline: Any) -> bool:
    """Whether pictures may stay on the device until they are bytes, so that the next task need not wait."""
    has_unet = isinstance(pipeline.components.get("unet"), diffusers.UNet2DConditionModel)
    return has_unet and type(getattr(pipeline, "image_processor", None)) is VaeImageProcessor


def _prepare_sharing(pipeline: Any, geometry: PipelineGeometry) -> bool:
    """Let ranks share steps of a pipeline; whether they can share tokens, not only guidance."""
    transformers = _transformers(pipeline)
    for transformer in transformers:
        watch(transformer)
    if geometry.token_side is None:
        return False
    try:
        for transformer in transformers:
            hooks.install(transformer)
    except ModelError as error:
        logger.warning("%s: ranks do not share tokens: %s", geometry.family, error)
        return False
    return True


def given_files(spec: JobSpec, *, has_alpha: bool) -> dict[str, Any]:
    """The pictures and videos of a job, by argument of its call."""
    colours = {"background": spec.background, "has_alpha": has_alpha}
    files = ({} if spec.image is None else {"image": spec.image}) | dict(spec.files or {})
    hashes = {"image": spec.image_sha256, **(spec.files_sha256 or {})}
    return {name: _load(name, path, hashes.get(name), **colours) for name, path in files.items()}


def _load(name: str, path: str | list[str], sha256: str | list[str] | None, **colours: Any) -> Any:
    """A picture, the frames of a video or an animation, or a list of pictures."""
    if "mask" in name:  # whose alpha diffusers drops
        colours["background"] = ""
    if isinstance(path, list):
        hashes = sha256 if isinstance(sha256, list) else [sha256] * len(path)
        return [_load("image", each, one, **colours) for each, one in zip(path, hashes, strict=True)]
    assert not isinstance(sha256, list)
    if is_video(path):
        return load_video(path, sha256=sha256)
    frames = load_frames(path, sha256=sha256, most=None if takes_frames(name) else 1, **colours)
    return frames if len(frames) > 1 or "video" in name else frames[0]


def as_frames(output: Any, *, per_sample: int = 1) -> torch.Tensor:
    """What a pipeline returned as uint8 [F, H, W, C]; several pictures of one call are frames.

    C is 3, or 4 with alpha, times the bytes per sample.
    """
    return to_uint8(_floats(output).movedim(-1, 1), per_sample=per_sample)


def _floats(output: Any) -> torch.Tensor:
    values = [getattr(output, name, None) for name in ("images", "frames", "video", "videos")]
    found = next((value for value in values if value is not None), None)
    if found is None:
        found = output[0]
    pictures = _stacked(found)[..., :4]
    return pictures / 255 if pictures.dtype == torch.uint8 else pictures


def _sound(output: Any) -> torch.Tensor | None:
    """What a pipeline returned as sound, float32 [C, S]; None if it made none."""
    found = getattr(output, "audio", None)
    if found is None:
        return None
    samples = torch.as_tensor(np.asarray(found) if isinstance(found, list) else found).float().cpu()
    while samples.dim() > 2:  # one job has one sound
        samples = samples[0]
    return samples.reshape(-1, samples.shape[-1]).clamp(-1, 1).contiguous()


def _stacked(value: Any) -> torch.Tensor:
    if isinstance(value, list):
        return torch.cat([_stacked(each) for each in value])
    is_tensor = isinstance(value, torch.Tensor)
    pictures = value.movedim(-3, -1) if is_tensor else torch.from_numpy(np.array(value))
    return pictures.reshape(-1, *pictures.shape[-3:])


@torch.no_grad()
@without_warnings()
def with_embeddings(pipeline: Any, arguments: Mapping[str, Any], *, device: str) -> dict[str, Any]:
    """The arguments of a call with embeddings in place of its texts."""
    from compel import Compel, ReturnedEmbeddingsType  # seconds that only such jobs pay

    kind = ReturnedEmbeddingsType.LAST_HIDDEN_STATES_NORMALIZED
    if is_large := getattr(pipeline, "text_encoder_2", None) is not None:
        kind = ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED
    texts = {"": arguments["prompt"], "negative_": arguments.get("negative_prompt")}
    if is_large and texts["negative_"] is None and pipeline.config.get("force_zeros_for_empty_prompt"):
        del texts["negative_"]  # the call makes zeros
    expand = getattr(pipeline, "maybe_convert_prompt", lambda text, _: text)  # words of several vectors
    parts = [weighted(text or "") for text in texts.values()]
    options = {"returned_embeddings_type": kind, "truncate_long_prompts": False, "device": device}
    makers = []  # new for each job: they keep an embedding, which LoRAs change
    for end in ("", "_2"):
        if (encoder := getattr(pipeline, f"text_encoder{end}", None)) is not None:
            makers.append(Compel(getattr(pipeline, f"tokenizer{end}"), encoder, **options))
    embeds: Any = torch.cat([_embeddings(maker, parts, expand) for maker in makers], dim=-1)
    made = dict(zip((f"{name}prompt_embeds" for name in texts), embeds.split(1), strict=True))
    for name, each in zip(texts, parts, strict=True) if is_large else ():
        provider = makers[-1].conditioning_provider
        plain = " ".join(expand(text, provider.tokenizer) for part in each for text, _ in part)
        made[f"{name}pooled_prompt_embeds"] = provider.get_pooled_embeddings([plain], device=device)
    return {name: arguments[name] for name in arguments if name not in ("prompt", "negative_prompt")} | made


def _embeddings(maker: Any, texts: list[Parts], expand: Callable[[str, Any], str]) -> torch.Tensor:
    """[texts, tokens, channels]; all as long as the longest."""
    from compel.prompt_parser import Conjunction, FlattenedPrompt

    words = maker.conditioning_provider.tokenizer
    every = ([[(expand(text, words), weight) for text, weight in part] for part in parts] for parts in texts)
    prompts = (Conjunction([FlattenedPrompt(part) for part in parts]) for parts in every)
    made = [maker.build_conditioning_tensor_for_conjunction(prompt)[0] for prompt in prompts]
    return torch.cat(maker.pad_conditioning_tensors_to_same_length(made))
