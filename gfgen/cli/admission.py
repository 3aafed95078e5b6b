"""From what a job file asks for to jobs that this machine can run: with its models and its memory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from gfgen.errors import JobFileError, ModelError, Problem
from gfgen.job import passed_deadlines, read_jobs
from gfgen.jobspec import JobSpec
from gfgen.models.geometry import load_geometry, weightless_geometry
from gfgen.models.registry import find_configs, resolve_checkpoint
from gfgen.runtime.admission import AdmittedJob, Model, admit
from gfgen.runtime.memory import available_bytes, check_models, refuse_large

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "tiny-wan"
"""For jobs that name none, where --model names none either."""


def admit_file(
    source: str, *, default_model: str, num_ranks: int, skip_invalid: bool
) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
    """The jobs to run, and what was wrong with others if those may be skipped.

    Raises: JobFileError with every problem; InputError when the models do not fit into memory.
    """
    parsed = read_jobs("-" if source == "-" else Path(source))
    admitted, refused = admit(parsed.specs, default_model=default_model, find_model=find_model)
    available = available_bytes()
    checkpoints = {job.checkpoint for job in admitted}
    models_bytes = check_models(checkpoints, num_ranks=num_ranks, available=available)
    admitted, too_large = refuse_large(admitted, models_bytes=models_bytes, available=available)
    problems = sorted((*parsed.problems, *refused, *too_large), key=lambda problem: problem.line or 0)
    if problems and not (skip_invalid and admitted):
        raise JobFileError(parsed.source, tuple(problems))
    for problem in problems:
        logger.warning("skipped: %s", problem)
    return admitted, problems


def admit_weightless(source: str, *, default_model: str) -> Sequence[AdmittedJob]:
    """The jobs of a file as they would run, for simulations: no weights are needed, nothing is loaded.

    Raises: JobFileError with every problem, as `admit_file`.
    """
    parsed = read_jobs("-" if source == "-" else Path(source))
    admitted, refused = admit(parsed.specs, default_model=default_model, find_model=_find_weightless)
    problems = sorted((*parsed.problems, *refused), key=lambda problem: problem.line or 0)
    if problems:
        raise JobFileError(parsed.source, tuple(problems))
    return admitted


def warn_of_passed_deadlines(
    jobs: Sequence[AdmittedJob], *, now: float, arrived_at: Mapping[str, float] | None = None
) -> None:
    """A log line for each job that cannot meet its deadline whatever is done."""
    for warning in passed_deadlines([job.spec for job in jobs], now=now, arrived_at=arrived_at):
        logger.warning("%s", warning)


class Admission:
    """Admits the jobs of one file after the other; each model is looked up once.

    With `loaded`, jobs of other models than those are refused, and nothing is downloaded.
    """

    def __init__(
        self,
        *,
        default_model: str,
        known: dict[str, Model] | None = None,
        loaded: frozenset[Path] | None = None,
    ) -> None:
        self._default_model = default_model
        self._known = {} if known is None else known
        self._loaded = loaded

    def __call__(self, specs: Sequence[JobSpec]) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        admitted, refused = admit(specs, default_model=self._default_model, find_model=self.find_model)
        fitting, too_large = refuse_large(admitted, models_bytes=0, available=available_bytes())
        return fitting, (*refused, *too_large)

    def of_loaded(self, checkpoints: Collection[Path]) -> Admission:
        """The same, once the workers have loaded these models and load no others."""
        return Admission(default_model=self._default_model, known=self._known, loaded=frozenset(checkpoints))

    def find_model(self, name: str) -> Model:
        """The model of that name.

        Raises: ModelError when there is none, or when it is not loaded.
        """
        if name not in self._known and (self._loaded is None or Path(name).is_dir()):
            self._known[name] = find_model(name)
        model = self._known.get(name)
        if model is None or (self._loaded is not None and model.checkpoint not in self._loaded):
            raise ModelError(
                f"model {name!r} is not loaded; stop the run and start it again: it loads what the files "
                "in its folder name"
            )
        return model


def _find_weightless(name: str) -> Model:
    configs = find_configs(name)
    return Model(name, configs, weightless_geometry(configs))


def find_model(name: str) -> Model:
    checkpoint = resolve_checkpoint(name)
    return Model(name, checkpoint, load_geometry(checkpoint))
