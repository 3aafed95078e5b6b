"""Reading a diffusers-format directory without torch: config files and weight files.

Anything wrong with a directory raises `ModelError`: one line that says what is missing or unknown, where,
and what would be accepted.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gfgen.errors import ModelError
from gfgen.models.geometry.call import is_folder_of_pipelines, is_pipeline
from gfgen.models.geometry.weight_files import check_weights, refuse_pointer, weight_files
from gfgen.models.geometry.weights import components_of, has_weights, quantisation_of

CONFIG_NAMES = {"scheduler": "scheduler_config.json", "tokenizer": "tokenizer_config.json"}

VOCABULARIES = ("tokenizer.json", "spiece.model", "vocab.json")

PIPELINE_CODE = "pipeline.py"

QUANTISERS = ("bitsandbytes", "torchao")
"""Packages that read weights which they have quantised, through diffusers' own config."""

SETTINGS_NAME = "gfgen.json"
"""Optional gfgen file in a checkpoint: objects "defaults", "num_parameters" and "block_parameters"."""


@dataclass(frozen=True, slots=True)
class OwnClass:
    source: Path
    name: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parsed config files of one checkpoint; the family interprets them."""

    path: Path
    index: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]

    @property
    def pipeline_class(self) -> str:
        return class_name_of(self.index)

    @property
    def own_code(self) -> Mapping[str, OwnClass]:
        """The classes in the checkpoint's own Python files, by component; "pipeline" is its pipeline's."""
        found = {}
        if isinstance(name := self.index["_class_name"], list):
            found["pipeline"] = OwnClass(self.path / f"{name[0]}.py", name[1])
        elif (self.path / PIPELINE_CODE).is_file() and not is_pipeline(name):
            found["pipeline"] = OwnClass(self.path / PIPELINE_CODE, name)
        for component, config in self.configs.items():
            library, kind = self.index[component]
            if library in ("diffusers", "transformers"):
                mapped = (config.get("auto_map") or {}).get(kind) if kind.startswith("Auto") else None
                library, _, kind = str(mapped or "").rpartition(".")
            elif is_folder_of_pipelines(library):
                library = ""
            if library:
                found[component] = OwnClass(self.path / component / f"{library}.py", kind)
        return found

    def class_of(self, component: str) -> str | None:
        entry = self.index.get(component)
        return entry[1] if isinstance(entry, list) and len(entry) == 2 else None

    def check_components(self, pipeline: str) -> None:
        """Raises: ModelError if one of the components that every supported pipeline has is missing."""
        for component in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler"):
            if self.class_of(component) is None:
                where = self.path / "model_index.json"
                raise ModelError(f"{where}: no component {component!r}; {pipeline} needs one")

    def value(self, component: str, key: str, default: Any = None) -> Any:
        """One value of a component's config; ModelError if it is missing and has no default."""
        found = self.configs[component].get(key, default)
        if found is None and default is None:
            name = CONFIG_NAMES.get(component, "config.json")
            raise ModelError(f"{self.path / component / name}: no {key!r}, which this family's shapes need")
        return found


def read_checkpoint(path: Path, *, with_weights: bool) -> Checkpoint:
    """The config files of a diffusers-format directory.

    Raises: ModelError for a missing directory, a missing or broken file, and, if `with_weights`, a component
            without weights or vocabulary.
    """
    if not path.is_dir():
        reason = "is not a directory" if path.exists() else "does not exist"
        raise ModelError(f"model {path}: {reason}; give a directory that holds a model_index.json")
    if not (path / "model_index.json").exists() and (snapshots := list(path.glob("snapshots/*"))):
        newest = max(snapshots, key=lambda snapshot: snapshot.stat().st_mtime_ns)
        raise ModelError(f"model {path}: is a folder of the hub's cache; give its hub id, or {newest}")
    index = _read_object(path / "model_index.json", purpose="a diffusers-format model directory has one")
    if not class_name_of(index):
        raise ModelError(f"{path / 'model_index.json'}: no '_class_name' of a diffusers pipeline in it")
    components = components_of(index)
    configs = {name: _read_config(path, name) for name in components}
    settings = _read_settings(path / SETTINGS_NAME)
    for name in components if with_weights else ():
        if name == "tokenizer":
            _check_vocabulary(path / name)
        elif has_weights(name):
            is_quantised = _check_quantisation(path / name / "config.json", configs[name])
            check_weights(weight_files(path / name, index[name][0]), is_quantised=is_quantised)
    return Checkpoint(path, index, configs, settings)


def class_name_of(index: Mapping[str, Any]) -> str:
    """The pipeline class in a model_index.json: a name, or [module, name]; empty if there is none."""
    name = index.get("_class_name")
    if isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name):
        return str(name[1])
    return name if isinstance(name, str) else ""


def model_name(path: Path) -> str:
    """The name for people: the folder's name, or the hub id if it is a snapshot in the hub's cache."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def _read_config(path: Path, component: str) -> Mapping[str, Any]:
    if not (path / component).is_dir():
        raise ModelError(f"model {path}: the folder {component!r} is missing, but model_index.json names it")
    name = CONFIG_NAMES.get(component, "config.json")
    if not has_weights(component) and component != "scheduler" and not (path / component / name).exists():
        return {}
    return _read_object(path / component / name, purpose=f"the component {component!r} needs it")


def _check_quantisation(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether a component is quantised. Raises: ModelError if nothing here reads it."""
    if (package := quantisation_of(config)) is None:
        return False
    if package not in QUANTISERS:
        accepted = " and ".join(QUANTISERS)
        raise ModelError(f"{path}: is quantised with {package}, which is not read; {accepted} are")
    if importlib.util.find_spec(package) is None:
        raise ModelError(f"{path}: is quantised, and reading it needs a package: pip install {package}")
    return True


def _read_object(path: Path, *, purpose: str) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; {purpose}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        refuse_pointer(path)
        raise ModelError(f"{path}: is not valid JSON (line {error.lineno}: {error.msg})") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(parsed).__name__}")
    return parsed


def _read_settings(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    settings = _read_object(path, purpose="optional settings of gfgen")
    for key in ("defaults", "num_parameters", "block_parameters"):
        if not isinstance(settings.get(key, {}), dict):
            raise ModelError(f"{path}: {key!r} must be an object")
    return settings


def _check_vocabulary(folder: Path) -> None:
    """Without this check, a tokenizer loads without its vocabulary and maps every word to nothing."""
    found = [folder / name for name in VOCABULARIES if (folder / name).is_file()]
    if not found:
        names = " or ".join(VOCABULARIES)
        raise ModelError(f"{folder}: no vocabulary ({names}) in it; download the model again")
    merges = folder / "merges.txt"
    if found == [folder / "vocab.json"] and not merges.is_file():
        raise ModelError(f"{merges}: missing; vocab.json needs it; download the model again")
    for file in found:
        refuse_pointer(file)
