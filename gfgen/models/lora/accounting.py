"""Which parameters the tensors of a LoRA fill: one comparison for all formats. Imports no torch.

A tensor's name is LAYER.KIND. A layer is a module of one of the pipeline's models, also without or with
another prefix, flattened (`lora_unet_blocks_0_attn1_to_q`), or fused (`to_qkv`). The kinds of its tensors say
which parameters it creates. A tensor that fills no parameter is a problem, and a parameter without one, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gfgen.errors import ModelError
from gfgen.job.images import settings_file
from gfgen.models.geometry.weight_files import read_header
from gfgen.models.geometry.weights import EXPERTS, component_files, quantisation_in
from gfgen.system.lifeline import ask_child
from gfgen.system.wording import counted

SECOND = "transformer_2"
"""The second expert. It gets the layers of the first one, unless the file has some of its own."""
FUSED = {"to_qkv": ("to_q", "to_k", "to_v"), "to_kv": ("to_k", "to_v")}
FUSED |= {"to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}
"""Layers whose outputs are those of others, concatenated, all of one width."""
_WRAPPERS = ("base_model.model.", "diffusion_model.", "module.", "_orig_mod.", "model.")
"""What trainers and their frameworks put before the names of a model."""
_MAIN = ("transformer", "unet")
_FLATTENED: dict[str, tuple[str, ...]] = dict.fromkeys(("lora_unet_", "lora_transformer_", "lycoris_"), _MAIN)
_FLATTENED |= {f"lora_te{idx}_": ("text_encoder",) for idx in ("", 1)} | {"lora_te2_": ("text_encoder_2",)}
"""Beginnings of flattened names, and the models that they stand for."""
_PAIRS = [("lora_A", "lora_B")]
_PAIRS += [(f"{name}down", f"{name}up") for name in ("lora_", "lora.", "lora_linear_layer.")]
_WHOLE = ("alpha", "diff", "diff_b", *(f"lokr_w{n}{part}" for n in (1, 2) for part in ("", "_a", "_b")))
_KINDS = {f"{down}.weight": "down" for down, _ in _PAIRS} | {f"{up}.weight": "up" for _, up in _PAIRS}
_KINDS |= {f"{up}.bias": "up_bias" for _, up in _PAIRS} | {name: name for name in _WHOLE}
_TENSOR = re.compile(rf"(.+?)\.({'|'.join(map(re.escape, _KINDS))})")
_ADAPTER = re.compile(r"(\.lora_[AB]|\.lokr_w[12](?:_[ab])?)\.(?!weight$|bias$)[^.]+(?=\.weight$|\.bias$|$)")
_OTHER_KINDS = {"DoRA": "dora_scale|lora_magnitude_vector", "LoHa": "hada_w[12]_|hada_t", "OFT": "oft_"}
_METADATA = "lora_adapter_metadata"
"""Key of a file's metadata with settings of peft. Source: diffusers 0.42 loaders/lora_base.py."""
_UNSUPPORTED = ("use_dora", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens")
_NUMBERS = ("r", "lora_alpha", "alpha", "rank_pattern", "alpha_pattern")
MAX_NAMED = 5

Shapes = Mapping[str, Sequence[int]]


def plain(name: str) -> str:
    """A tensor's name without that of its adapter (`lora_A.default.weight`)."""
    return _ADAPTER.sub(r"\1", name)


def split(name: str) -> tuple[str, str] | None:
    """A tensor's layer and kind; None for a name that no format defines."""
    match = _TENSOR.fullmatch(plain(name))
    return None if match is None else (match[1], _KINDS[match[2]])


def unwrapped(name: str) -> str:
    """A name without the prefixes that trainers add."""
    while found := next((each for each in _WRAPPERS if name.startswith(each)), None):
        name = name.removeprefix(found)
    return name


def is_flattened(name: str) -> bool:
    return name.startswith(tuple(_FLATTENED))


@dataclass(frozen=True, slots=True)
class Settings:
    """What peft wrote about its adapters: into the file, or into adapter_config.json in the same folder."""

    values: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @staticmethod
    def of(path: Path) -> Settings:
        """Raises: ModelError for settings that cannot be read or are not supported."""
        from safetensors import SafetensorError, safe_open

        beside, source = settings_file(path), _METADATA
        try:
            with safe_open(path, framework="np") as file:
                text = (file.metadata() or {}).get(_METADATA)
            if text is None and beside is not None:
                text, source = beside.read_text(encoding="utf-8"), beside.name
            values = {} if text is None else dict(json.loads(text))
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise ModelError(f"{path}: {source} cannot be read ({error})") from None
        for name, value in values.items():
            key = name.rpartition(".")[2]
            if key in _UNSUPPORTED and value:
                raise ModelError(f"{path}: {source} has {name}, which gfgen cannot merge")
            numbers = value.values() if isinstance(value, dict) and key.endswith("_pattern") else (value,)
            are_wrong = value is not None and not all(isinstance(x, int | float) and x > 0 for x in numbers)
            if key in _NUMBERS and are_wrong:
                raise ModelError(f"{path}: {source} has {name} {value}; numbers above 0 are accepted")
            if key == "peft_type" and value not in ("LORA", "LOKR"):
                raise ModelError(f"{path}: {source} has {name} {value}; LORA and LOKR are accepted")
        return Settings(values, source if values else "")

    def get(self, component: str, key: str, default: Any = None) -> Any:
        return self.values.get(f"{component}.{key}", self.values.get(key, default))

    def rank(self, component: str, module: str) -> int | None:
        rank: int | None = _by_pattern(self.get(component, "rank_pattern"), module, self.get(component, "r"))
        return rank

    def scaling(self, component: str, module: str, rank: int | None) -> tuple[float, float] | None:
        """Alpha and what it is divided by, for a layer of this rank. The default alpha is peft's."""
        whole = self.get(component, "lora_alpha", self.get(component, "alpha"))
        if ((said := self.rank(component, module)) is None and whole is None) or not (rank := said or rank):
            return None
        alpha = _by_pattern(self.get(component, "alpha_pattern"), module, 8 if whole is None else whole)
        return float(alpha), math.sqrt(rank) if self.get(component, "use_rslora") else rank


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Source: peft 0.21 utils/other.py get_pattern_key."""
    for pattern, value in (patterns or {}).items():
        with contextlib.suppress(re.error):
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    return default


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer of a LoRA and the layers of a model that it changes: one, or the parts of a fused one."""

    component: str
    parts: tuple[str, ...]
    tensors: Mapping[str, str]
    parameters: Mapping[str, int]
    """What it changes, without the component, and how many numbers that is."""
    scaling: tuple[float, float] | None = None
    """Alpha and what it is divided by, if the settings say; a tensor `alpha` comes first."""


@dataclass(slots=True)
class Match:
    placed: list[Placed] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    """Tensors of layers that the models lack."""
    odd: list[str] = field(default_factory=list)
    """Other tensors that fill nothing."""
    missing: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    """Layers of another rank than the settings say."""

    @property
    def num_problems(self) -> int:
        return sum(map(len, (self.lacking, self.odd, self.missing, self.misshaped, self.ranks)))

    @property
    def changed(self) -> dict[str, int]:
        """The weights that it changes, such as "transformer.blocks.0.attn1.to_q.weight", and their sizes."""
        return {f"{one.component}.{name}": n for one in self.placed for name, n in one.parameters.items()}

    def what_lacks(self, pipeline: str) -> str | None:
        if not self.lacking:
            return None
        tensors = f"{counted(len(self.lacking), 'tensor')} that fill nothing here: {first(self.lacking)}"
        return f"made for another model, which has {tensors}; this one is {pipeline}"

    def warnings(self, settings: Settings, names: Collection[str]) -> list[str]:
        """What acts although diffusers leaves it out; `names` are those of the file."""
        alphas = {one.tensors["alpha"] for one in self.placed if "alpha" in one.tensors} & set(names)
        alphas = {name for name in alphas if not is_flattened(name)}
        dense = [one for one in self.placed if one.tensors.keys() & {"diff", "diff_b"}]
        found = [f"alpha of {counted(len(alphas), 'layer')}"] if alphas else []
        found += [f"whole differences of {counted(len(dense), 'layer')}"] if dense else []
        found += [f"the scale in {settings.source}"] if settings.source not in ("", _METADATA) else []
        return [f"acts on what diffusers may leave out: {', '.join(found)}"] if found else []

    def error(self, pipeline: str) -> str | None:
        """Why it cannot be merged, also if what the models lack is left out."""
        found = []
        for kind, pattern in _OTHER_KINDS.items():
            if names := [name for name in self.odd if re.search(pattern, name)]:
                found.append(f"is of the kind {kind} ({first(names)}), which gfgen cannot merge; give a LoRA")
        if self.odd and not found:
            found.append(f"{counted(len(self.odd), 'tensor')} of it fill nothing: {first(self.odd)}")
        if self.missing:
            found.append(f"lacks {counted(len(self.missing), 'tensor')}: {first(self.missing)}")
        if self.misshaped:
            layers = first(self.misshaped)
            found.append(f"made for another model, with other sizes of {layers}; this one is {pipeline}")
        if self.ranks:
            found.append(f"has another rank than its settings say in {first(self.ranks)}")
        if not self.placed and not found:
            found.append(self.what_lacks(pipeline) or "changes no layer of this model")
        return "; ".join(found) or None


def first(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def compare(tensors: Shapes, weights: Shapes, settings: Settings) -> Match:
    """Compare the tensors of a file with the parameters of models, named COMPONENT.PARAMETER."""
    match, places = Match(), _Places(weights)
    groups: dict[str | tuple[str, ...], dict[str, str]] = {}
    for name in sorted(tensors):
        if (parsed := split(name)) is None:
            match.odd.append(name)
            continue
        key = places.find(parsed[0]) or parsed[0]
        if groups.setdefault(key, {}).setdefault(parsed[1], name) != name:
            match.odd.append(name)
    has_second = any(isinstance(key, tuple) and key[0].startswith(f"{SECOND}.") for key in groups)
    for key, kinds in groups.items():
        missing, odd = _pairs(kinds)
        match.missing += missing
        match.odd += odd
        kept = {kind: name for kind, name in kinds.items() if name not in odd}
        if isinstance(key, str):
            match.lacking += kept.values()
        elif kept and not missing:
            _place(match, key, kept, tensors, weights, settings)
            if places.has_second and not has_second and key[0].startswith("transformer."):
                twin = tuple(path.replace("transformer.", f"{SECOND}.", 1) for path in key)
                _place(match, twin, kept, tensors, weights, settings)
    for names in (match.lacking, match.odd, match.misshaped, match.ranks):
        names[:] = dict.fromkeys(names)  # both experts have the same
    return match


def _pairs(kinds: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The parameters of a layer that nothing fills, and its tensors that fill nothing."""
    missing, odd, names = [], [], list(kinds.values())
    layer, _ = split(names[0]) or ("", "")
    has_lora = not kinds.keys().isdisjoint({"down", "up", "up_bias"})
    has_lokr = any(kind.startswith("lokr") for kind in kinds)
    if has_lora:
        pair = next(pair for pair in _PAIRS if any(f".{each}." in name for each in pair for name in names))
        both = zip(("down", "up"), pair, strict=True)
        missing += [f"{layer}.{name}.weight" for kind, name in both if kind not in kinds]
    for factor in ("lokr_w1", "lokr_w2") if has_lokr else ():
        halves = [f"{factor}_a", f"{factor}_b"]
        there = [half for half in halves if half in kinds]
        if factor in kinds:
            odd += [kinds[half] for half in there]
        elif len(there) < 2:
            missing += [f"{layer}.{each}" for each in (halves if there else [factor]) if each not in there]
    if "alpha" in kinds and not has_lora and not has_lokr:
        odd.append(kinds["alpha"])
    return missing, odd


def _place(
    match: Match,
    paths: tuple[str, ...],
    kinds: Mapping[str, str],
    tensors: Shapes,
    weights: Shapes,
    settings: Settings,
) -> None:
    """Add a layer to what is placed, or to what does not fit."""
    component, _, module = paths[0].partition(".")
    names = [f"{path}.weight" if f"{path}.weight" in weights else path for path in paths]
    biases = [f"{path}.bias" for path in paths]
    parts = tuple(path.removeprefix(f"{component}.") for path in paths)
    if not all(bias in weights for bias in biases):
        match.odd += [kinds[kind] for kind in ("up_bias", "diff_b") if kind in kinds]
        kinds = {kind: name for kind, name in kinds.items() if kind not in ("up_bias", "diff_b")}
    if not all(name in weights for name in names):
        match.lacking += kinds.values()
        return
    shapes, own = {kind: tensors[name] for kind, name in kinds.items()}, [weights[name] for name in names]
    whole = [sum(shape[0] for shape in own), *own[0][1:]] if own[0] else []
    if any(list(shape) != list(own[0]) for shape in own) or not _fit(shapes, whole):
        match.misshaped.append(", ".join(parts))
        return
    rank = shapes["down"][0] if "down" in shapes else None
    if rank is not None and settings.rank(component, module) not in (None, rank):
        match.ranks.append(module)
        return
    changed = names if kinds.keys() - {"up_bias", "diff_b", "alpha"} else []
    changed = [*changed, *(biases if kinds.keys() & {"up_bias", "diff_b"} else [])]
    parameters = {name.removeprefix(f"{component}."): math.prod(weights[name]) for name in changed}
    scaling = settings.scaling(component, module, rank)
    if parameters:
        match.placed.append(Placed(component, parts, kinds, parameters, scaling))


def _fit(shapes: Shapes, weight: Sequence[int]) -> bool:
    """Whether the tensors of a layer, by kind, have the sizes that they need for this weight."""
    rows, num_inputs = weight[0] if weight else 1, math.prod(weight[1:])
    sizes = {"alpha": 1, "up_bias": rows, "diff_b": rows}
    if any(math.prod(shapes[kind]) != size for kind, size in sizes.items() if kind in shapes):
        return False
    if "diff" in shapes and list(shapes["diff"]) != list(weight):
        return False
    factors = [shape for kind, shape in shapes.items() if kind not in (*sizes, "diff")]
    if any(len(shape) < 2 or 0 in shape or len(weight) < 2 for shape in factors):
        return False
    if "down" in shapes:
        up, rank = shapes["up"], shapes["down"][0]
        if math.prod(shapes["down"]) != rank * num_inputs or (up[0], math.prod(up)) != (rows, rows * rank):
            return False
    if not any(kind.startswith("lokr") for kind in shapes):
        return True
    left, right = _kronecker(shapes, "lokr_w1"), _kronecker(shapes, "lokr_w2")
    return (left[0] * right[0], left[1] * right[1]) == (rows, num_inputs)


def _kronecker(shapes: Shapes, factor: str) -> tuple[int, int]:
    """Rows and columns of a factor, which may be a product of two; 0 if these do not fit each other."""
    if factor in shapes:
        return shapes[factor][0], math.prod(shapes[factor][1:])
    a, b = shapes[f"{factor}_a"], shapes[f"{factor}_b"]
    return (a[0], math.prod(b[1:])) if a[1] == b[0] else (0, 0)


class _Places:
    """Finds the layers of models by the names that files have."""

    def __init__(self, weights: Shapes) -> None:
        self._known: dict[str, str] = {}
        self._flattened: dict[str, str] = {}
        components = dict.fromkeys(name.partition(".")[0] for name in weights)
        self._mains = [name for name in components if name in _MAIN] or list(components)[:1]
        self.has_second = SECOND in components
        for name in weights:
            path = name.rpartition(".")[0] if name.endswith((".weight", ".bias")) else name
            component, _, module = path.partition(".")
            bare = module.removeprefix("text_model.")  # transformers 5 leaves it out, and files have it
            others = (bare, f"text_model.{bare}") if component.startswith("text_encoder") else ()
            for spelling in (module, *others):
                self._known.setdefault(f"{component}.{spelling}", path)
                self._flattened.setdefault(f"{component}.{spelling.replace('.', '_')}", path)

    def find(self, layer: str) -> tuple[str, ...] | None:
        """The layer's path; those of its parts if it is fused in the file; None if no model has it."""
        for bare in (layer, unwrapped(layer)):
            for name in (bare, *(f"{main}.{bare}" for main in self._mains)):
                parent, _, last = name.rpartition(".")
                for parts in ([name], [f"{parent}.{part}" for part in FUSED.get(last, ())]):
                    if parts and all(part in self._known for part in parts):
                        return tuple(self._known[part] for part in parts)
        for beginning, components in _FLATTENED.items():
            for component in components if layer.startswith(beginning) else ():
                if path := self._flattened.get(f"{component}.{layer.removeprefix(beginning)}"):
                    return (path,)
        return None


# Fits, before anything is loaded --------------------------------------------------------------------
# Headers answer for files whose names are those of the model's layers. For others a child process
# (reading.py) lets diffusers convert the file and compares it with a model without weights.


KEPT_FILES = 16
"""LoRAs whose factors stay on a rank's device; the least recently used goes first."""


@dataclass(frozen=True, slots=True)
class LoraFit:
    error: str | None = None
    """Why it does not fit; the rest is empty then."""
    changed: Mapping[str, int] = field(default_factory=dict)
    """By weight, such as "transformer.blocks.0.attn1.to_q.weight": its parameters; 0 if it stays as it is and
    the change runs beside its layer."""
    num_factors: int = 0
    components: Sequence[str] = ()
    lacking: str | None = None
    """About the layers that the models lack; they are an error unless a job says that this is right."""
    warnings: Sequence[str] = ()

    def changed_in(self, target: str | None) -> Mapping[str, int]:
        """The weights that it changes in one model, or in all."""
        if target is None:
            return self.changed
        return {name: number for name, number in self.changed.items() if name.startswith(f"{target}.")}


class LoraFits:
    """Answers for pairs of a model and a LoRA; each is looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, str], LoraFit] = {}

    def look(self, wanted: Iterable[tuple[Path, str, Path]]) -> None:
        """Look at pairs of a checkpoint and a LoRA, given by its hash and path, all at once.

        Raises: ModelError when the child process fails.
        """
        unclear = dict[tuple[Path, str], Path]()
        for checkpoint, sha256, path in wanted:
            if (key := (checkpoint, sha256)) in self._known or key in unclear:
                continue
            if (fit := by_headers(checkpoint, path)) is not None:
                self._known[key] = fit
            else:
                unclear[key] = path
        if unclear:
            asked = [[str(checkpoint), str(path)] for (checkpoint, _), path in unclear.items()]
            answers = ask_child("gfgen.models.lora.reading", asked, "LoRAs")
            self._known |= {key: LoraFit(**found) for key, found in zip(unclear, answers, strict=True)}

    def of(self, checkpoint: Path, sha256: str) -> LoraFit:
        return self._known[checkpoint, sha256]


def by_headers(checkpoint: Path, path: Path) -> LoraFit | None:
    """The answer if headers show that the LoRA fits; None if the child process has to be asked."""
    try:
        entries = read_header(path)
        files = component_files(checkpoint)
        for form in (quantisation_in(checkpoint / name) for name in (*EXPERTS, "unet")):
            if form not in (None, "GGUF"):
                return LoraFit(error=f"{path}: cannot be merged into a {form} model; give GGUF, bf16 or fp16")
        components = tuple(name for name in ("transformer", "unet", SECOND) if name in files)
        weights = {
            f"{component}.{name}": entry["shape"]
            for component in components
            for file in files[component].files
            for name, entry in read_header(file).items()
        }
        settings = Settings.of(path)
        match = compare({name: entry["shape"] for name, entry in entries.items()}, weights, settings)
    except (ModelError, KeyError):
        return None
    if match.num_problems or not match.placed:
        return None
    size = sum(math.prod(entry["shape"]) for entry in entries.values())
    return LoraFit(None, match.changed, size, components, warnings=match.warnings(settings, entries))
