"""What the call of a diffusers pipeline takes, read from diffusers' source files without importing it.

signature_of("FluxPipeline") -> CallSignature -> problems of a job, and the arguments of its call

Importing diffusers imports torch and takes seconds. Admission needs only names, defaults and annotations.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gfgen.errors import ModelError, Problem, nearest
from gfgen.job.fields import MAX_SIGMA, OTHER_NAMES, shown
from gfgen.job.samplers import FLOW, SAMPLERS
from gfgen.job.spec import JobSpec

_BY_FIELD: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("prompt", "negative_prompt", "width", "height")},
    "frames": ("num_frames", "video_length"),
    "fps": ("frame_rate", "fps"),
    "steps": ("num_inference_steps",),
    **{name: (name,) for name in ("guidance_scale", "guidance_scale_2", "true_cfg_scale", "sigmas")},
}
"""Arguments that a field of the job sets; the first one that the call has."""

_SET_OTHERWISE = {
    "generator": "use seed",
    "seed": "use seed",
    "timesteps": "use steps or sigmas",
    "width": "use size",
    "height": "use size",
    "batch_size": "use num_images",
    "num_videos_per_prompt": "use num_images, which makes a job of each",
    "output_type": "gfgen writes pictures, videos and sound",
    "return_dict": "gfgen writes pictures, videos and sound",
    "latents": "use seed",
    "padding_mask_crop": "crop the picture and its mask before",
}
_HIDDEN = re.compile(r"callback|latents|embed|_kwargs$|attention_mask|_generator$|_ids$|_thw$|ip_adapter")
"""Arguments whose values no job file can hold, or that need weights which gfgen does not load."""
_NAMED_AS_FILES = re.compile(r"(^|_)(images?|videos?|mask|frames|hint)($|_)")
_PICTURES = re.compile(r"Image|PipelineMaskInput")
_ARRAYS = re.compile(r"Tensor|ndarray")

_OTHER_BRANCH = re.compile(r"\b(neg_noise_pred|noise_(pred_)?uncond) = (self\.transformer|current_model)\(")
_STRETCHES = re.compile(r"preprocess\(image, (height=)?height, (width=)?width(, crops_coords=.*)?\)")
_IS_NONE = re.compile(r"(?<![\w.])(\w+) is (?:not )?None")
_SCHEDULER_PACKAGES = re.compile(r"^(?:import (torchsde)| +from (scipy) import)", re.MULTILINE)
"""Imports of a scheduler's file, without which diffusers has no such class."""
SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")

_NEEDED = ("image", "mask_image", "control_image", "control_mask", "video")
"""Pictures that a call needs, whatever the default, unless its annotation says that they may be None."""


@dataclass(frozen=True, slots=True)
class JsonType:
    """JSON values that an annotation allows, in words."""

    words: str
    plural: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


TEXT = JsonType("a text", "texts", lambda value: isinstance(value, str))
WHOLE = JsonType(
    "a whole number", "whole numbers", lambda value: _is_number(value) and float(value).is_integer()
)
NUMBER = JsonType("a number", "numbers", _is_number)
FLAG = JsonType("true or false", "true or false", lambda value: isinstance(value, bool))
NULL = JsonType("null", "null", lambda value: value is None)
LIST = JsonType("a list", "lists", lambda value: isinstance(value, list))
_BY_NAME = {"str": TEXT, "int": WHOLE, "float": NUMBER, "bool": FLAG, "None": NULL}
_LISTS = ("list", "List", "tuple", "Tuple", "Iterable", "Sequence")


@dataclass(frozen=True)
class Argument:
    name: str
    annotation: ast.expr | None
    is_required: bool
    may_be_none: bool
    default: Any = None
    """If it is a number, a text, true or false."""

    @functools.cached_property
    def text(self) -> str:
        return "" if self.annotation is None else ast.unparse(self.annotation)

    @property
    def types(self) -> list[JsonType]:
        return [] if self.annotation is None else list(_types(self.annotation))

    @functools.cached_property
    def takes_files(self) -> bool:
        is_array = _ARRAYS.search(self.text) and _NAMED_AS_FILES.search(self.name)
        return not _HIDDEN.search(self.name) and bool(is_array or _PICTURES.search(self.text))

    @functools.cached_property
    def is_needed_picture(self) -> bool:
        """Whether the call fails without it although it has a default."""
        is_picture = self.takes_files and bool(_PICTURES.search(self.text))
        return self.name in _NEEDED and is_picture and NULL not in self.types

    def accepts(self, value: Any) -> bool:
        """Whether a JSON value has the annotated type."""
        if self.annotation is None or (value is None and self.may_be_none):
            return True
        return any(each.accepts(value) for each in self.types)

    @property
    def accepted(self) -> str:
        """The annotated types in words; empty if no JSON value has one."""
        types = self.types
        others = [NULL] if self.may_be_none and types else []
        return " or ".join(dict.fromkeys(each.words for each in (*types, *others)))

    def value(self, given: Any) -> Any:
        """The value for the call: 5 and 5.0 are one value in a job, so they become one here, and JSON has no
        tuples, which some calls add up."""
        types = self.types
        if isinstance(given, list) and "tuple[" in self.text.lower() and "list[" not in self.text.lower():
            return tuple(given)
        if not _is_number(given) or (WHOLE in types) == (NUMBER in types):
            return given
        return float(given) if NUMBER in types else int(given) if WHOLE.accepts(given) else given


@dataclass(frozen=True, slots=True)
class CallSignature:
    pipeline_class: str
    arguments: Mapping[str, Argument]
    steps_scheduler: bool = False
    """Whether the call itself calls a scheduler's `step`."""
    guided_above: float | None = None
    """The guidance scale up to which there is no guidance; None if the source does not tell."""
    guidance_setting: str | None = None
    """The setting of the model that decides whether a guidance scale has an effect; None if none does."""
    calls_branches_apart: bool = False
    """Whether a guided step calls the transformer once for each branch."""
    stretches: bool = False
    """Whether `image` takes the size of the result, whatever its proportions."""

    @property
    def args(self) -> Mapping[str, str]:
        """The arguments that a job's `args` may have, and their accepted values in words."""
        return {
            name: argument.accepted
            for name, argument in self.arguments.items()
            if not argument.takes_files and argument.accepted
            if not _HIDDEN.search(name) and _field_for(name) is None
        }

    @property
    def files(self) -> list[str]:
        return [name for name, argument in self.arguments.items() if argument.takes_files]

    def argument_of(self, field: str) -> str | None:
        return next((name for name in _BY_FIELD[field] if name in self.arguments), None)

    def problems(self, spec: JobSpec, *, scheduler_class: str | None = None) -> Iterator[Problem]:
        """Everything in a job that this call does not take, and everything that it lacks.

        `scheduler_class` is the model's own.
        """
        yield from self._field_problems(spec)
        yield from self.args_problems(spec)
        for name in spec.files or {}:
            if (why := self._why_no_file(name)) is not None:
                yield Problem.of(f"files.{name}", None, why)
        yield from self._missing(spec)
        if spec.scheduler is not None or spec.sigmas is not None:
            yield from scheduler_problems(spec, scheduler_class)

    def args_problems(self, spec: JobSpec) -> Iterator[Problem]:
        for name, value in (spec.args or {}).items():
            if (why := self._why_no_arg(name, value)) is not None:
                yield Problem.of(f"args.{name}", shown(value), why)

    def arguments_for(self, spec: JobSpec) -> dict[str, Any]:
        """The arguments of the call for a job without problems, except for the files."""
        found = {}
        for field in _BY_FIELD:
            value, name = getattr(spec, field), self.argument_of(field)
            if value is not None and name is not None:
                found[name] = self.arguments[name].value(value)
        if "max_area" in self.arguments and spec.width and spec.height:  # else it replaces the size
            found["max_area"] = spec.width * spec.height
        return found | {name: self.arguments[name].value(value) for name, value in (spec.args or {}).items()}

    def _field_problems(self, spec: JobSpec) -> Iterator[Problem]:
        for field in _BY_FIELD:
            value = getattr(spec, field)
            # A file has `fps` even if the call does not ask for it, and a picture may have one frame.
            is_harmless = field in ("prompt", "fps", "steps") or (field == "frames" and value == 1)
            if value is not None and not is_harmless and self.argument_of(field) is None:
                name = "size" if field in ("width", "height") else field
                yield Problem.of(field, shown(value), f"{self.pipeline_class} takes no {name}; leave it out")
        if spec.image is not None and "image" not in self.arguments:
            advice = (None if self.files else self._sibling_with("image")) or self._its_files()
            reason = f"{self.pipeline_class} takes no image; {advice}"
            yield Problem.of("image", spec.image, reason)
        if spec.flow_shift is not None:
            yield Problem.of("flow_shift", spec.flow_shift, 'give "scheduler": {"shift": ...} instead')
        if spec.boundary_ratio is not None:
            reason = "needs a model with two experts (Wan2.2-A14B)"
            yield Problem.of("boundary_ratio", spec.boundary_ratio, reason)

    def _why_no_arg(self, name: str, value: Any) -> str | None:
        """Why `args` cannot have this; None if it can."""
        if (field := _field_for(name)) is not None:
            return f"is set by gfgen; {field}"
        argument = self.arguments.get(name)
        if argument is None:
            return self._unknown(name, list(self.args))
        if argument.takes_files:
            return f'is a picture or video; give its path in files: {{"{name}": "..."}}'
        if _HIDDEN.search(name) or not argument.accepted:
            return "takes what a job file cannot hold; leave it out"
        if name.startswith("num_images_per") and _is_number(value) and value < 1:
            return "at least 1 is accepted"
        return None if argument.accepts(value) else f"{argument.accepted} is accepted"

    def _why_no_file(self, name: str) -> str | None:
        argument = self.arguments.get(name)
        if argument is None:
            return self._unknown(name, self.files)
        if name.startswith("ip_adapter"):
            return "IP-Adapters are not loaded; leave it out"
        return None if argument.takes_files else f"takes no pictures; {self._its_files()}"

    def _unknown(self, name: str, known: list[str]) -> str:
        meant = OTHER_NAMES.get(name.lower())
        near = f"the field {meant}" if meant not in (None, "args") else nearest(name, known)
        hint = f"did you mean {near}?" if near else self._sibling_with(name)
        hint = hint or f"it takes {', '.join(known) or 'none'}"
        return f"is no such argument of {self.pipeline_class}; {hint}"

    def _sibling_with(self, name: str) -> str | None:
        """The class for the same weights that takes this argument, as advice."""
        stem = self.pipeline_class.removesuffix("Pipeline")
        for sibling in (f"{stem}{end}Pipeline" for end in ("Img2Img", "Inpaint")):
            if is_pipeline(sibling) and name in signature_of(sibling).arguments:
                return f'{sibling} takes it: make that the "_class_name" in the model_index.json of a copy'
        return None

    def _its_files(self) -> str:
        return f"its files are {', '.join(self.files)}" if self.files else "it takes no files"

    def _missing(self, spec: JobSpec) -> Iterator[Problem]:
        given = {*(spec.args or {}), *(spec.files or {}), *(["image"] if spec.image else [])}
        is_either = {"image", "video"} <= self.arguments.keys()
        for name, argument in self.arguments.items():
            is_needed = argument.is_required or (argument.is_needed_picture and not is_either)
            is_needed |= name == "control_mode" and "ControlNetUnion" in self.pipeline_class
            if is_needed and name not in given and _field_for(name) is None:
                what, field = "it", f"args.{name}"
                if argument.takes_files:
                    what, field = "a picture or video", "image" if name == "image" else f"files.{name}"
                yield Problem.of(field, None, f"missing; {self.pipeline_class} needs {what}")


def signature_of(pipeline_class: str, *, source: Path | None = None) -> CallSignature:
    """The arguments of a class of diffusers, or of one that is defined in `source`.

    Raises: ModelError for a class that the installed diffusers, or the file, lacks.
    """
    method_of = methods_of(pipeline_class, source=source)
    found = method_of("__call__")
    if found is None:
        where = f"diffusers {_version()}" if source is None else source
        raise ModelError(f"pipeline class {pipeline_class!r} is not in {where}")
    called = (ast.unparse(node.func) for node in ast.walk(found) if isinstance(node, ast.Call))
    steps_scheduler = any(name.endswith("scheduler.step") for name in called)
    guidance = _guidance(found, method_of("do_classifier_free_guidance"))
    guidance["calls_branches_apart"] = _OTHER_BRANCH.search(ast.unparse(found)) is not None
    guidance["stretches"] = _STRETCHES.search(ast.unparse(found)) is not None
    tested = " ".join(ast.unparse(each) for each in (found, method_of("check_inputs")) if each is not None)
    arguments = _arguments(found.args, may_be_none=_IS_NONE.findall(tested))
    return CallSignature(pipeline_class, arguments, steps_scheduler, **guidance)


def _guidance(call: ast.FunctionDef, is_guided: ast.FunctionDef | None) -> dict[str, Any]:
    """What the source says about guidance: `guided_above` is the least constant that a scale must exceed."""
    bounds, has_others = [], False
    for node in (node for method in (call, is_guided) if method is not None for node in ast.walk(method)):
        match node:
            case ast.BoolOp(op=ast.Or()):
                has_others |= "guidance_scale" in ast.unparse(node)
            case ast.Compare(left=left, ops=[ast.Gt()], comparators=[ast.Constant(value=bound)]):
                if re.fullmatch(r"(self\.)?_?guidance_scale", ast.unparse(left)):
                    bounds.append(float(bound))  # type: ignore[arg-type]
    setting = "guidance_embeds" if not bounds and ".config.guidance_embeds" in ast.unparse(call) else None
    if is_guided is not None and ".config.is_distilled" in ast.unparse(is_guided):
        setting = "is_distilled"
    return {"guided_above": None if has_others else min(bounds, default=None), "guidance_setting": setting}


def methods_of(pipeline_class: str, *, source: Path | None) -> Callable[[str], ast.FunctionDef | None]:
    if source is None:
        return functools.partial(_definition, "pipelines", pipeline_class)
    return functools.partial(_definition_in, source, "pipelines", pipeline_class)


def is_pipeline(name: str) -> bool:
    return name in _files_by_class("pipelines")


def is_folder_of_pipelines(library: str) -> bool:
    """Whether a component's library in model_index.json is a folder of diffusers' pipelines, as "ltx2"."""
    return library.isidentifier() and (_root() / "pipelines" / library).is_dir()


def _field_for(name: str) -> str | None:
    """What to use in place of an argument that gfgen sets."""
    if name in _SET_OTHERWISE:
        return _SET_OTHERWISE[name]
    field = next((field for field, names in _BY_FIELD.items() if name in names), None)
    return None if field is None else f"use {field}"


def options_of(scheduler_class: str) -> Mapping[str, Argument]:
    """The options of a scheduler of diffusers; none if there is no such class."""
    return _method("schedulers", scheduler_class, "__init__") or {}


def takes_eta(scheduler_class: str) -> bool:
    found = _method("schedulers", scheduler_class, "step")
    return found is None or "eta" in found


def scheduler_problems(spec: JobSpec, own_class: str | None, *, is_flow: bool = False) -> Iterator[Problem]:
    options = dict(spec.scheduler or {})
    name = options.pop("class", own_class)
    if not isinstance(name, str):
        yield Problem.of("scheduler.class", shown(name), "the name of a scheduler of diffusers is accepted")
        return
    known = _method("schedulers", name, "__init__")
    if known is None:
        names = [each for each in _files_by_class("schedulers") if not each.startswith("_")]
        near = next((each for each in names if each.startswith(name)), None) or nearest(name, names)
        near = near or nearest(name.lower(), SAMPLERS)
        hint = f"; did you mean {near}?" if near else ""
        yield Problem.of("scheduler.class", name, f"is no scheduler of diffusers {_version()}{hint}")
        return
    for option, value in options.items():
        argument = known.get(option)
        if argument is None:
            near = nearest(option, known)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(known)}"
            yield Problem.of(f"scheduler.{option}", shown(value), f"is no option of {name}; {hint}")
        elif not argument.accepts(value):
            yield Problem.of(f"scheduler.{option}", shown(value), f"{argument.accepted} is accepted")
        elif value is True and option == "use_beta_sigmas" and importlib.util.find_spec("scipy") is None:
            yield Problem.of(f"scheduler.{option}", "true", "needs the package scipy; pip install scipy")
    for package in map("".join, _SCHEDULER_PACKAGES.findall(_files_by_class("schedulers")[name].read_text())):
        if importlib.util.find_spec(package) is None:
            yield Problem.of("scheduler.class", name, f"needs the package {package}; pip install {package}")
    if spec.sigmas is not None and "sigmas" not in (_method("schedulers", name, "set_timesteps") or {}):
        yield Problem.of("sigmas", None, f"{name} takes no sigmas; name another scheduler or leave them out")
    elif spec.sigmas is not None and (own := [each for each in SPACINGS if options.get(each) is True]):
        accepted = f"{own[0]} of the scheduler spaces the noise levels itself; leave one out"
        yield Problem.of("sigmas", shown(spec.sigmas), accepted)
    most = 1 if is_flow or FLOW in f"{own_class} {name}" else MAX_SIGMA
    if spec.sigmas is not None and (spec.sigmas[0] > most or spec.sigmas[-1] == 0):
        accepted = f"numbers up to {most:,} are accepted, without the 0 at the end, which the scheduler adds"
        yield Problem.of("sigmas", shown(spec.sigmas), accepted)


# Annotations ----------------------------------------------------------------------------------------


def _types(annotation: ast.expr) -> Iterator[JsonType]:
    match annotation:
        case ast.BinOp(left=left, right=right):
            yield from _types(left)
            yield from _types(right)
        case ast.Constant(value=None):
            yield NULL
        case ast.Constant(value=str(text)):
            yield from _types(ast.parse(text, mode="eval").body)
        case ast.Name(id="Any"):
            yield from (replace(each, accepts=lambda value: True) for each in (*_BY_NAME.values(), LIST))
        case ast.Name(id=name) if name in _LISTS:
            yield LIST
        case ast.Name(id=name) if name in _BY_NAME:
            yield _BY_NAME[name]
        case ast.Subscript(value=outer, slice=inner):
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            yield from _generic(ast.unparse(outer).rpartition(".")[2], items)


def _generic(outer: str, items: list[ast.expr]) -> Iterator[JsonType]:
    if outer == "Literal":
        for value in (each.value for each in items if isinstance(each, ast.Constant)):
            yield JsonType(shown(value), "", functools.partial(operator.eq, value))
        return
    types = [each for item in items for each in _types(item)]
    if outer in ("Optional", "Union"):
        yield from (*types, NULL) if outer == "Optional" else types
    elif outer in _LISTS and types:
        plurals = " or ".join(dict.fromkeys(each.plural or "lists" for each in types))

        def accepts(value: Any) -> bool:
            return isinstance(value, list) and all(any(each.accepts(x) for each in types) for x in value)

        yield JsonType(f"a list of {plurals}", "lists", accepts)


# The source of diffusers ------------------------------------------------------------------------------


@functools.cache
def _method(package: str, class_name: str, method: str) -> Mapping[str, Argument] | None:
    """The arguments of a method by name; None if there is no such class, or if it lacks the method."""
    found = _definition(package, class_name, method)
    return None if found is None else _arguments(found.args)


@functools.cache
def _definition(package: str, class_name: str, method: str) -> ast.FunctionDef | None:
    """A method; None if there is no such class, or if it lacks the method."""
    path = _files_by_class(package).get(class_name)
    return None if path is None else _definition_in(path, package, class_name, method)


def _definition_in(path: Path, package: str, class_name: str, method: str) -> ast.FunctionDef | None:
    """The same for a class in a file, whose bases may be in the package."""
    try:
        classes = {node.name: node for node in _parsed(path).body if isinstance(node, ast.ClassDef)}
    except (OSError, SyntaxError) as error:
        raise ModelError(f"{path}: cannot be read as Python ({error})") from None
    if class_name not in classes:
        return None
    for node in classes[class_name].body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            return node
    bases = (ast.unparse(base).rpartition(".")[2] for base in classes[class_name].bases)
    bases = (base for base in bases if base != "DiffusionPipeline")  # a long file, which has none of these
    return next(filter(None, (_definition(package, base, method) for base in bases)), None)


def _arguments(parameters: ast.arguments, *, may_be_none: Collection[str] = ()) -> Mapping[str, Argument]:
    named = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
    defaults = [*parameters.defaults, *parameters.kw_defaults]
    found = {}
    for each, default in zip(named[1:], [None] * (len(named) - 1 - len(defaults)) + defaults, strict=True):
        value = default.value if isinstance(default, ast.Constant) else None
        is_none = each.arg in may_be_none or (isinstance(default, ast.Constant) and value is None)
        found[each.arg] = Argument(each.arg, each.annotation, default is None, is_none, value)
    return found


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@functools.cache
def _files_by_class(package: str) -> Mapping[str, Path]:
    """The source file of each class in a package of diffusers."""
    found: dict[str, Path] = {}
    pattern = re.compile(rb"^class (\w+)", re.MULTILINE)
    for path in sorted((_root() / package).rglob("*.py")):
        for name in pattern.findall(path.read_bytes()):
            found.setdefault(name.decode(), path)
    return found


def _root() -> Path:
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        raise ModelError("diffusers is not installed; pip install diffusers")
    return Path(spec.origin).parent


def _version() -> str:
    from importlib.metadata import version

    return version("diffusers")
