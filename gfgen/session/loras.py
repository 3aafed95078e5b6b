"""LoRAs of jobs and of a server: which fit their model, and which weights they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gfgen.errors import InputError, ModelError, Problem, Warned
from gfgen.job.images import LoraError, LoraFiles
from gfgen.job.spec import JobSpec
from gfgen.models.geometry.weights import TEXT_ENCODER, Placement
from gfgen.models.lora.fit import LoraFits
from gfgen.runtime.core.admission import AdmittedJob


def split_by_loras(
    jobs: Sequence[AdmittedJob], fits: LoraFits, *, placement: Placement = Placement()
) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
    """The jobs whose LoRAs fit their models, and problems for the others."""
    asking = [job for job in jobs if job.spec.lora]
    if not asking:
        return jobs, ()
    try:
        fits.look(
            (job.checkpoint, lora["sha256"], Path(path)) for job in asking for lora, path in _entries(job)
        )
    except ModelError as error:
        why = Problem.of("lora", None, str(error))
        kept = [job for job in jobs if not job.spec.lora]
        return kept, [replace(why, line=job.spec.line) for job in asking]
    kept, problems, known = list[AdmittedJob](), list[Problem](), dict[object, Problem | tuple[Warned, ...]]()
    for job in jobs:
        found = []
        for lora, path in _entries(job):
            what = lora["sha256"], lora.get("target"), lora.get("partial")
            if (key := (job.checkpoint, job.spec.model, path, *what)) not in known:
                known[key] = _judged(fits, job, lora, path, placement=placement)
            found.append(known[key])
        refused = [replace(each, line=job.spec.line) for each in found if isinstance(each, Problem)]
        if not refused:
            kept.append(job.warned(*(text for each in found if isinstance(each, tuple) for text in each)))
        problems += refused
    return kept, problems


@dataclass(frozen=True, slots=True)
class ServedLora:
    path: Path
    sha256: str


def find_loras(options: Sequence[str]) -> Mapping[str, ServedLora]:
    """The LoRAs of --lora NAME=PATH, by name. Raises: InputError for a file that is none."""
    files, found = LoraFiles(Path()), dict[str, ServedLora]()
    for option in options:
        name, _, path = option.partition("=")
        if name in found:
            raise InputError(f"--lora {option}: the name is given twice; give each LoRA its own")
        try:
            found[name] = ServedLora(*files.check(path, None))
        except LoraError as error:
            raise InputError(f"--lora {option}: {error}") from None
    return found


def check_fit(served: Mapping[str, ServedLora], checkpoints: Sequence[Path], fits: LoraFits) -> None:
    """Raises: InputError for a LoRA that fits none of these models."""
    fits.look((path, lora.sha256, lora.path) for lora in served.values() for path in checkpoints)
    for name, lora in served.items():
        found = [fits.of(path, lora.sha256) for path in checkpoints]
        errors = [fit.error or fit.lacking for fit in found]
        if all(errors):
            raise InputError(f"--lora {name}={errors[0]}")


def with_served_loras(
    specs: Iterable[JobSpec], served: Mapping[str, ServedLora]
) -> tuple[Sequence[JobSpec], Sequence[Problem]]:
    """The jobs with files in place of names of LoRAs, and problems for names that are not served."""
    kept: list[JobSpec] = []
    problems: list[Problem] = []
    for spec in specs:
        if spec.lora is None or spec.lora_files is not None:
            kept.append(spec)
        elif unknown := [entry["name"] for entry in spec.lora if entry["name"] not in served]:
            there = f"there are {', '.join(served)}" if served else "start it with --lora NAME=PATH"
            problem = Problem.of("lora", unknown[0], f"is no LoRA of this server; {there}")
            problems.append(replace(problem, line=spec.line))
        else:
            files = [served[entry["name"]] for entry in spec.lora]
            used: list[Mapping[str, Any]] = [
                {"sha256": file.sha256} | {key: entry[key] for key in entry if key != "name"}
                for file, entry in zip(files, spec.lora, strict=True)
            ]
            kept.append(replace(spec, lora=used, lora_files=[str(file.path) for file in files]))
    return kept, problems


def _entries(job: AdmittedJob) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The LoRAs of a job and their paths."""
    return zip(job.spec.lora or (), job.spec.lora_files or (), strict=True)


def _judged(
    fits: LoraFits, job: AdmittedJob, lora: Mapping[str, Any], path: str, *, placement: Placement
) -> Problem | tuple[Warned, ...]:
    """What is wrong with a LoRA for a model, or what jobs with it are warned of."""
    fit, target = fits.of(job.checkpoint, lora["sha256"]), lora.get("target")
    if fit.error is not None:
        return Problem.of("lora", None, fit.error)
    if fit.lacking is not None and not lora.get("partial"):
        return Problem.of("lora", None, f'{fit.lacking}; "partial": true leaves them out')
    if target is not None and target not in fit.components:
        return Problem.of(
            "lora.target", target, f"{' or '.join(fit.components)} is accepted for {job.spec.model}"
        )
    if not (changed := fit.changed_in(target)):
        return Problem.of("lora.target", target, f"{path} changes no layer of it; leave it out")
    if not placement.holds_all and any(
        TEXT_ENCODER.fullmatch(weight.partition(".")[0]) for weight in changed
    ):
        return Problem.of("lora", None, f"{path} changes a text encoder; run it without --offload")
    left_out = () if fit.lacking is None else (Warned("LoRA left out in part", fit.lacking),)
    return (*left_out, *(Warned("LoRA", f"{path}: {text}") for text in fit.warnings))


Lora = tuple[str, str | None]
"""The hash of a LoRA, and the model that a job applies it to."""


def loras_of(job: AdmittedJob) -> Set[Lora]:
    return {(lora["sha256"], lora.get("target")) for lora in job.spec.lora or ()}


@dataclass(frozen=True, slots=True)
class LoraNeed:
    """What LoRAs of a model need beside it: copies of the weights that they change, and their factors."""

    is_on_host: bool = False
    """Main memory has GPUs' copies of the weights that they change; a GPU has one of these at a time."""
    loras: frozenset[Lora] = frozenset()
    changed: Mapping[str, int] = field(default_factory=dict)
    """Parameters by weight that they change."""
    factors: Mapping[str, int] = field(default_factory=dict)
    """Their own parameters, by hash."""


@dataclass(frozen=True, slots=True)
class LoraNeeds:
    """Of admitted jobs and served LoRAs. Copies stay until the run ends, so they add up over jobs.

    Where a model's copies are is decided once, with its first LoRAs, and changes no bits.
    """

    fits: LoraFits = field(default_factory=LoraFits)
    by_model: dict[Path, LoraNeed] = field(default_factory=dict)

    def of(self, checkpoint: Path, loras: Set[Lora] = frozenset()) -> LoraNeed:
        """What a model's LoRAs and these need together."""
        need = self.by_model.get(checkpoint, LoraNeed())
        if loras <= need.loras:
            return need
        changed, factors = dict(need.changed), dict(need.factors)
        for sha256, target in loras:
            fit = self.fits.of(checkpoint, sha256)
            changed.update(fit.changed_in(target))
            factors[sha256] = fit.num_factors
        return LoraNeed(need.is_on_host, need.loras | loras, changed, factors)
