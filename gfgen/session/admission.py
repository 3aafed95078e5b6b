"""From what a job file asks for to jobs that this machine can run: with its models and its memory."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from gfgen.errors import InputError, JobFileError, ModelError, Problem, listed
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.job.reader import passed_deadlines, read_jobs
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import (
    DEFAULT_MODEL,
    check_name,
    find_configs,
    resolve_checkpoint,
    resolve_configs,
)
from gfgen.models.geometry.model import load_geometry, weightless_geometry
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel, admit, tell_of_rounding
from gfgen.runtime.core.devices import CUDA, Devices
from gfgen.runtime.core.memory_check import (
    CONTEXT_BYTES,
    available_bytes,
    check_models,
    check_models_on_gpu,
    check_together,
    gpu_work_bytes,
    job_bytes,
    refuse_large,
    refuse_large_on_gpu,
)
from gfgen.runtime.ipc.arenas import SIDE_BYTES, default_plan
from gfgen.runtime.predict.job_bounds import JobBounds, StepTimes, beyond, certainly_late, too_long
from gfgen.system.wording import counted, first_of, in_words

logger = logging.getLogger(__name__)

Claim = Callable[[Sequence[AdmittedJob]], tuple[Sequence[AdmittedJob], Sequence[Problem]]]
RESTART = "stop the run and start it again: it loads what the files in its folder name"


def admit_file(
    source: str,
    admission: Admission,
    *,
    skip_invalid: bool,
    are_models_together: bool = False,
    done: Callable[[Sequence[AdmittedJob]], Collection[str]] = lambda jobs: (),
    claim: Claim = lambda jobs: (jobs, ()),
) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
    """The jobs to run, and what was wrong with others if those may be skipped.

    `done` gives the ids of those that need not run again: no bound applies to them. `claim` gives the jobs
    their files, and problems for those that cannot have them.

    Raises: JobFileError with every problem; InputError when a model does not fit into memory, or
            when all of them are to be there together and do not.
    """
    check_source(source)
    parsed = read_jobs("-" if source == "-" else Path(source))
    tell_of_unused(admission.default_model, parsed.specs)
    admitted, refused = admit(
        parsed.specs, default_model=admission.default_model, find_model=admission.find_model
    )
    models_bytes = admission.check({job.checkpoint for job in admitted})
    if are_models_together:
        check_together(models_bytes, available=admission.room_bytes)
    fitting, too_large = admission.refuse_large(admitted, models_bytes=models_bytes)
    fitting, beyond_bounds = admission.keep_bounds(fitting, done=done)
    fitting, without_file = claim(fitting)
    found = (*parsed.problems, *refused, *too_large, *beyond_bounds, *without_file)
    problems = sorted(found, key=lambda problem: problem.line or 0)
    if problems and not (skip_invalid and fitting):
        raise JobFileError(parsed.source, tuple(problems))
    if problems:
        logger.warning("%s: %s; these jobs are skipped", parsed.source, counted(len(problems), "problem"))
    for line in listed(problems):
        logger.warning("%s: %s", parsed.source, line)
    tell_of_rounding(fitting)
    return fitting, problems


def admit_weightless(source: str, *, default_model: str) -> Sequence[AdmittedJob]:
    """The jobs of a file as they would run, for simulations: no weights are needed, nothing is loaded.

    Raises: JobFileError with every problem, as `admit_file`.
    """
    check_source(source)
    parsed = read_jobs("-" if source == "-" else Path(source))
    tell_of_unused(default_model, parsed.specs)
    admitted, refused = admit(parsed.specs, default_model=default_model, find_model=find_weightless)
    problems = sorted((*parsed.problems, *refused), key=lambda problem: problem.line or 0)
    if problems:
        raise JobFileError(parsed.source, tuple(problems))
    return admitted


def check_source(source: str) -> None:
    """That a job file was named. Raises InputError for no name at all, as a script gives by mistake."""
    if not source:
        raise InputError("JOBS is empty; name a job file, or - for standard input")


def tell_of_unused(default_model: str, specs: Sequence[JobSpec]) -> None:
    """A log line when all jobs name another model than --model does."""
    names = {spec.model for spec in specs}
    if names and default_model != DEFAULT_MODEL and not names & {None, default_model}:
        logger.warning("--model %s has no effect: every job names its own", default_model)


def warn_of_passed_deadlines(
    jobs: Sequence[AdmittedJob], *, now: float, arrived_at: Mapping[tuple[str, str], float] | None = None
) -> None:
    """Log each job that cannot meet its deadline. `arrived_at` has first arrivals by (id, spec hash)."""
    keys = {job.job_id: (job.job_id, job.info.spec_hash) for job in jobs}
    known = {job_id: arrived_at[key] for job_id, key in keys.items() if arrived_at and key in arrived_at}
    for warning in passed_deadlines([job.spec for job in jobs], now=now, arrived_at=known):
        logger.warning("%s", warning)


def with_time(
    jobs: Sequence[AdmittedJob], step_times: Callable[[], StepTimes], *, closes_at: float | None
) -> tuple[Sequence[AdmittedJob], int]:
    """The jobs of which one step fits before --until, and how many others are left for another run.

    Names those, and warns of jobs that cannot make a step before their deadline.

    Raises: InputError if no job fits.
    """
    if closes_at is None and not any(job.spec.deadline_s or job.spec.deadline_at for job in jobs):
        return jobs, 0
    times, now = step_times(), time.time()
    left: dict[str, Problem] = {}
    if closes_at is not None:
        left_s = max(0.0, closes_at - now)
        found = too_long(jobs, times, left_s, f"the {in_words(left_s)} that --until leaves")
        left = {job.job_id: problem for job, problem in found}
    shown = first_of(list(left.values()), "job")
    if len(left) == len(jobs):
        lines = "\n".join(f"  {line}" for line in shown)
        raise InputError(f"--until leaves no time for a step of any job; nothing was started\n{lines}")
    for line in shown:
        logger.warning("left for another run: %s", line)
    kept = [job for job in jobs if job.job_id not in left]
    for line in first_of(list(certainly_late(kept, times, now=now)), "job"):
        logger.warning("%s", line)
    return kept, len(left)


class Admission:
    """Admits the jobs of one file after the other; each model is looked up once.

    With `loaded`, jobs of other models than those are refused, and nothing is downloaded.
    """

    def __init__(
        self,
        *,
        default_model: str,
        devices: Devices,
        has_random_weights: bool = False,
        vae_dtype: str = "auto",
        known: dict[str, ResolvedModel] | None = None,
        unusable: dict[str, str] | None = None,
        loaded: frozenset[Path] | None = None,
        help_: str = RESTART,
        bounds: JobBounds | None = None,
        step_times: StepTimes | None = None,
    ) -> None:
        self._help = help_
        self.default_model = default_model
        self._devices = devices
        self._has_random_weights = has_random_weights
        self._vae_dtype = vae_dtype
        self._known = {} if known is None else known
        self._unusable = {} if unusable is None else unusable
        """By name, what was wrong with a model that was asked for before any was loaded."""
        self._loaded = loaded
        self._bounds = bounds
        self._step_times = step_times
        """For the bound of a step, where there is one."""

    def __call__(self, specs: Sequence[JobSpec]) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        admitted, refused = admit(specs, default_model=self.default_model, find_model=self.find_model)
        fitting, too_large = self.refuse_large(admitted, models_bytes=self._loaded_bytes)
        kept, beyond_bounds = self.keep_bounds(fitting)
        return kept, (*refused, *too_large, *beyond_bounds)

    def keep_bounds(
        self,
        jobs: Sequence[AdmittedJob],
        *,
        done: Callable[[Sequence[AdmittedJob]], Collection[str]] = lambda jobs: (),
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """The jobs within the bounds of one job, and problems for the others but those that are done."""
        found = [] if self._bounds is None else list(beyond(jobs, self._bounds, self._step_times))
        if not found:
            return jobs, ()
        exempt = done([job for job, _ in found])
        refused = {job.job_id for job, _ in found} - set(exempt)
        return (
            [job for job in jobs if job.job_id not in refused],
            [problem for job, problem in found if job.job_id in refused],
        )

    def again(self, specs: Sequence[JobSpec]) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """As a call, for jobs that were admitted before: they may be running.

        They are held against what does not change while a server lives: models, --memory, and what GPUs
        have. Main memory that is short in this moment may be so because of these very jobs.
        """
        admitted, refused = admit(specs, default_model=self.default_model, find_model=self.find_model)
        if self._devices.kind == CUDA:
            fitting, too_large = self._on_gpus(admitted, self._loaded_bytes)
        else:
            fitting, too_large = refuse_large(admitted, models_bytes={}, available=self._devices.memory_bytes)
        return fitting, (*refused, *too_large)

    def check(self, checkpoints: Collection[Path]) -> Mapping[Path, int]:
        """Bytes that the weights of each of these models take: of main memory on all ranks, or of each GPU.

        Raises: InputError when there is less.
        """
        if self._devices.kind != CUDA:
            return check_models(
                checkpoints,
                num_ranks=self._devices.num_ranks,
                available=self.room_bytes,
                has_random_weights=self._has_random_weights,
            )
        return check_models_on_gpu(
            checkpoints,
            memory_bytes=self._devices.memory_bytes,
            beside_bytes=self._beside_bytes,
            has_random_weights=self._has_random_weights,
            vae_dtype=self._vae_dtype,
            where=self._devices.where,
        )

    def refuse_large(
        self, jobs: Sequence[AdmittedJob], *, models_bytes: Mapping[Path, int]
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """The jobs that fit beside their models, and a problem for each of the others."""
        if self._devices.kind != CUDA:
            return refuse_large(jobs, models_bytes=models_bytes, available=self.room_bytes)
        fitting, too_large = self._on_gpus(jobs, models_bytes)
        kept, too_much = refuse_large(fitting, models_bytes={}, available=available_bytes())
        return kept, (*too_large, *too_much)

    def too_large_for_gpus(
        self, jobs: Sequence[AdmittedJob], *, models_bytes: Mapping[Path, int]
    ) -> Sequence[Problem]:
        """A problem for each of the jobs that do not fit on a GPU beside their models."""
        return self._on_gpus(jobs, models_bytes)[1]

    def _on_gpus(
        self, jobs: Sequence[AdmittedJob], models_bytes: Mapping[Path, int]
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        return refuse_large_on_gpu(
            jobs,
            models_bytes=models_bytes,
            beside_bytes=self._beside_bytes,
            memory_bytes=self._devices.memory_bytes,
            where=self._devices.where,
        )

    def residency(
        self, jobs: Sequence[AdmittedJob], *, names: Mapping[str, Path] | None = None
    ) -> Residency | None:
        """Who lets the models of these jobs take turns; None where all of them fit together for good.

        `names` are models that are to be there although no job wants them yet: their jobs may turn out to be
        too large for all of them to stay.
        """
        room_bytes = self.room_bytes
        if room_bytes is None:
            return None
        checkpoints = {job.checkpoint for job in jobs} | set((names or {}).values())
        found = Residency(
            jobs,
            weights=self.check(checkpoints),
            work_bytes=gpu_work_bytes if self._devices.kind == CUDA else job_bytes,
            room_bytes=room_bytes,
            jobs_at_once=1 if self._devices.kind == CUDA else self._devices.num_ranks,
            names=names,
        )
        if not found.is_needed:
            return found if len(checkpoints) > 1 and names else None
        logger.info(
            "not all models fit together: they take turns, %s first", ", ".join(sorted(found.resident))
        )
        return found

    @property
    def room_bytes(self) -> int | None:
        """What there is for models and jobs: of each GPU, or of main memory; None where nobody knows."""
        limit = self._devices.memory_bytes
        if self._devices.kind == CUDA:
            return None if limit is None else limit - self._beside_bytes
        return min((room for room in (limit, available_bytes()) if room is not None), default=None)

    @property
    def _beside_bytes(self) -> int:
        """What is taken of each GPU before any model."""
        plan = default_plan(num_ranks=self._devices.num_ranks, are_on_gpus=True)
        return arena_bytes(plan) + SIDE_BYTES + CONTEXT_BYTES

    @functools.cached_property
    def _loaded_bytes(self) -> Mapping[Path, int]:
        """What loaded models take of each GPU; of main memory they have it already. Read once."""
        return self.check(self._loaded) if self._loaded and self._devices.kind == CUDA else {}

    def of_loaded(self, checkpoints: Collection[Path], *, help_: str = RESTART) -> Admission:
        """The same, once the workers have loaded these models and load no others; `help_` says what to do."""
        return Admission(
            default_model=self.default_model,
            devices=self._devices,
            has_random_weights=self._has_random_weights,
            vae_dtype=self._vae_dtype,
            known=self._known,
            unusable=self._unusable,
            loaded=frozenset(checkpoints),
            help_=help_,
            bounds=self._bounds,
            step_times=self._step_times,
        )

    def find_model(self, name: str) -> ResolvedModel:
        """The model of that name.

        Raises: ModelError when there is none, or when it is not loaded.
        """
        if name not in self._known and (self._loaded is None or Path(name).is_dir()):
            try:
                self._known[name] = self._look_up(name)
            except ModelError as error:
                self._unusable[name] = str(error)
                raise
        model = self._known.get(name)
        if model is None and name in self._unusable:
            raise ModelError(self._unusable[name])
        if model is None or (self._loaded is not None and model.checkpoint not in self._loaded):
            check_name(name)
            raise ModelError(f"model {name!r} is not loaded; {self._help}")
        return model

    def _look_up(self, name: str) -> ResolvedModel:
        if self._has_random_weights:
            checkpoint = resolve_configs(name)
            return ResolvedModel(name, checkpoint, weightless_geometry(checkpoint), has_random_weights=True)
        checkpoint = resolve_checkpoint(name)
        return ResolvedModel(name, checkpoint, load_geometry(checkpoint))


def find_weightless(name: str) -> ResolvedModel:
    configs = find_configs(name)
    return ResolvedModel(name, configs, weightless_geometry(configs))


def find_model(name: str) -> ResolvedModel:
    checkpoint = resolve_checkpoint(name)
    return ResolvedModel(name, checkpoint, load_geometry(checkpoint))
