"""Admit the jobs of a file that this machine can run, with its models and its memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gfgen.errors import InputError, JobError, JobFileError, ModelError, Problem, listed
from gfgen.job.reader import JobSource, ParsedJobs, passed_deadlines, with_bar
from gfgen.job.spec import JobSpec
from gfgen.models.families.precision import (
    ATTENTION,
    FP8,
    check_heads,
    check_layers,
    precision_of,
    tell_of_other_models,
)
from gfgen.models.families.registry import (
    DEFAULT_MODEL,
    check_name,
    find_configs,
    resolve_checkpoint,
)
from gfgen.models.geometry.model import load_geometry, weightless_geometry
from gfgen.models.lora.fit import LoraFits
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel, admit, tell_of_rounding
from gfgen.runtime.core.devices import CUDA, Devices
from gfgen.runtime.core.memory_check import (
    CONTEXT_BYTES,
    available_bytes,
    check_models,
    check_models_on_gpu,
    check_offloaded,
    check_together,
    gpu_job_bytes,
    gpu_work_bytes,
    job_bytes,
    refuse_large,
    refuse_large_on_gpu,
)
from gfgen.runtime.ipc.arenas import SIDE_BYTES, default_plan
from gfgen.runtime.predict.job_bounds import JobBounds, StepTimes, beyond, certainly_late, too_long
from gfgen.session.loras import (
    Lora,
    LoraMemory,
    LoraNeed,
    ServedLora,
    check_fit,
    loras_of,
    split_by_loras,
    with_served_loras,
)
from gfgen.system.wording import counted, first_of, in_words

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection: jobs have no cycles, and visiting them takes time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()  # nor does the run visit them


Claim = Callable[[Sequence[AdmittedJob]], tuple[Sequence[AdmittedJob], Sequence[Problem]]]


@dataclass(frozen=True, slots=True)
class AdmittedSource:
    """The jobs of a source that can run, and the problems of the others."""

    parsed: ParsedJobs
    jobs: Sequence[AdmittedJob]
    problems: Sequence[Problem]
    num_colliding: int = 0
    """Jobs whose file is in the way."""


def jobs_to_run(
    found: AdmittedSource, *, skip_invalid: bool = False
) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
    """The jobs, and the problems of the others if `skip_invalid`.

    Raises: JobFileError with every problem.
    """
    name, problems = found.parsed.source, found.problems
    if problems and not (skip_invalid and found.jobs):
        raise JobFileError(name, tuple(problems))
    if problems:
        logger.warning("%s: %s; these jobs are skipped", name, counted(len(problems), "problem"))
    for line in listed(problems):
        logger.warning("%s: %s", name, line)
    tell_of_rounding(found.jobs)
    return found.jobs, problems


@no_collection()
def judge(
    source: JobSource,
    admission: Admission,
    *,
    are_models_together: bool = False,
    has_bar: bool = False,
    done: Callable[[Sequence[AdmittedJob]], Collection[str]] = lambda jobs: (),
    claim: Claim = lambda jobs: (jobs, ()),
) -> AdmittedSource:
    """The jobs that can run, and the problems of the others.

    With `has_bar`, bars on the terminal show how far a long file is.
    `done` returns the ids of finished jobs, to which no bound applies. `claim` gives the jobs their files,
    and returns problems for those that cannot have them.

    Raises: InputError when a file cannot be read, when a model does not fit into memory, or when all of
            them must fit together and do not.
    """
    parsed = _read(source, admission.default_model, has_bar=has_bar)
    specs = _with_bar(parsed.specs, has_bar=has_bar)
    fitting, refused = admission.fitting(specs, are_models_together=are_models_together)
    if fitting:
        admission.tell_of_unused_precision({job.checkpoint for job in fitting})
    fitting, beyond_bounds = admission.keep_bounds(fitting, done=done)
    fitting, without_file = claim(fitting)
    problems = _by_line(parsed.problems, refused, beyond_bounds, without_file)
    return AdmittedSource(parsed, fitting, problems, num_colliding=len(without_file))


@no_collection()
def admit_weightless(
    source: JobSource, *, default_model: str, has_bar: bool = False
) -> Sequence[AdmittedJob]:
    """The jobs for a simulation, which needs no weights. Raises JobFileError with every problem."""
    parsed = _read(source, default_model, has_bar=has_bar)
    specs = _with_bar(parsed.specs, has_bar=has_bar)
    admitted, refused = admit(specs, default_model=default_model, find_model=find_weightless)
    if problems := _by_line(parsed.problems, refused):
        raise JobFileError(parsed.source, problems)
    return admitted


def _read(source: JobSource, default_model: str, *, has_bar: bool) -> ParsedJobs:
    parsed = source.read(has_bar=has_bar)
    tell_of_unused(default_model, parsed.specs)
    for name, kind in parsed.kinds:
        logger.info("%s: read as %s", name, kind)
    if parsed.num_varied:
        jobs, lines = counted(len(parsed.specs), "job"), counted(parsed.num_varied, "line")
        logger.info("%s: %s, with variations of %s", parsed.source, jobs, lines)
    return parsed


def _with_bar(specs: Sequence[JobSpec], *, has_bar: bool) -> Iterator[JobSpec]:
    return with_bar(specs, "checking", is_shown=has_bar, unit=" jobs", total=len(specs))


def _by_line(*problems: Sequence[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(itertools.chain(*problems), key=lambda problem: problem.line or 0))


def tell_of_unused(default_model: str, specs: Sequence[JobSpec]) -> None:
    """Log that --model has no effect if every job names another model."""
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
    """The jobs with time for one step before --until, and the number of the others, which are logged.

    Also warns of jobs that cannot make a step before their deadline.

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


@dataclass(kw_only=True)
class Admission:
    """Admits jobs; each model is looked up once."""

    default_model: str
    devices: Devices
    has_random_weights: bool = False
    vae_dtype: str = "auto"
    is_offloaded: bool = False
    precision: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    trusts_code: bool = False
    known: dict[str, ResolvedModel] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    """By name, what was wrong with a model that was looked up before any was loaded."""
    loaded: frozenset[Path] | None = None
    """Jobs of other models than these are refused, and nothing is downloaded. None: any model."""
    help_: str = "stop the run and start it again: it loads what the files in its folder name"
    """What to do about a model that is not loaded."""
    bounds: JobBounds | None = None
    step_times: StepTimes | None = None
    """For the bound of a step."""
    lora_fits: LoraFits = field(default_factory=LoraFits)
    lora_needs: dict[Path, LoraNeed] = field(default_factory=dict)
    """Of admitted jobs and served LoRAs, by model."""
    served_loras: Mapping[str, ServedLora] = field(default_factory=dict)
    """By the name that requests give."""

    def __call__(self, specs: Sequence[JobSpec]) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        admitted, refused = self._admit(specs)
        fitting, too_large = self._refuse_large(admitted, self._loaded_bytes)
        fitting, without_room = self._refuse_loras(fitting, self._loaded_bytes)
        kept, beyond_bounds = self.keep_bounds(fitting)
        return kept, (*refused, *too_large, *without_room, *beyond_bounds)

    def fitting(
        self, specs: Iterable[JobSpec], *, are_models_together: bool = False
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """The jobs that fit into memory, and the problems of the others.

        Raises: InputError when a model does not fit, or when all of them must fit together and do not.
        """
        admitted, refused = self._admit(specs)
        models_bytes = self.check(checkpoints := {job.checkpoint for job in admitted})
        self.check_offloaded(checkpoints)
        if are_models_together:
            check_together(models_bytes, available=self.room_bytes)
        fitting, too_large = self._refuse_large(admitted, models_bytes)
        fitting, without_room = self._refuse_loras(fitting, models_bytes)
        return fitting, (*refused, *too_large, *without_room)

    def keep_bounds(
        self,
        jobs: Sequence[AdmittedJob],
        *,
        done: Callable[[Sequence[AdmittedJob]], Collection[str]] = lambda jobs: (),
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """The jobs that are within the bounds or done, and problems for the others."""
        found = [] if self.bounds is None else list(beyond(jobs, self.bounds, self.step_times))
        if not found:
            return jobs, ()
        exempt = done([job for job, _ in found])
        refused = {job.job_id for job, _ in found} - set(exempt)
        return (
            [job for job in jobs if job.job_id not in refused],
            [problem for job, problem in found if job.job_id in refused],
        )

    def again(self, specs: Sequence[JobSpec]) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """Admit jobs that were admitted before and may be running.

        This checks only what does not change while a server lives: models, --memory, and the memory of
        GPUs. If main memory is short now, these very jobs may be the reason.
        """
        admitted, refused = self._admit(specs)
        if self.devices.kind == CUDA:
            fitting, too_large = self.refuse_large_on_gpus(admitted, self._loaded_bytes)
        else:
            fitting, too_large = refuse_large(admitted, models_bytes={}, available=self.devices.memory_bytes)
        return fitting, (*refused, *too_large)

    def check(self, checkpoints: Collection[Path]) -> Mapping[Path, int]:
        """Bytes of weights by model: in main memory for all ranks, or on each GPU.

        Raises: InputError when a model does not fit.
        """
        if self.devices.kind != CUDA:
            return check_models(
                checkpoints,
                num_ranks=self.devices.num_ranks,
                available=self.room_bytes,
                has_random_weights=self.has_random_weights,
            )
        return check_models_on_gpu(
            checkpoints,
            memory_bytes=self.devices.memory_bytes,
            beside_bytes=self._beside_bytes,
            has_random_weights=self.has_random_weights,
            vae_dtype=self.vae_dtype,
            precision=self.precision,
            is_offloaded=self.is_offloaded,
            where=self.devices.where,
        )

    def tell_of_unused_precision(self, checkpoints: Collection[Path]) -> None:
        """Log if --precision or --attention names none of these models."""
        tell_of_other_models(self.precision, checkpoints)
        tell_of_other_models(self.attention, checkpoints, option=ATTENTION)

    def check_offloaded(self, checkpoints: Collection[Path]) -> int:
        """Bytes of main memory that --offload takes. Raises: InputError when they are not available."""
        if not self.is_offloaded:
            return 0
        return check_offloaded(
            checkpoints,
            num_ranks=self.devices.num_ranks,
            available=available_bytes(),
            has_random_weights=self.has_random_weights,
        )

    def _admit(self, specs: Iterable[JobSpec]) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        unknown: list[Problem] = []
        jobs, refused = admit(
            self._with_files(specs, unknown), default_model=self.default_model, find_model=self.find_model
        )
        fitting, unfit = split_by_loras(jobs, self.lora_fits, is_offloaded=self.is_offloaded)
        return fitting, (*unknown, *refused, *unfit)

    def _with_files(self, specs: Iterable[JobSpec], unknown: list[Problem]) -> Iterator[JobSpec]:
        """The jobs with files in place of names of LoRAs; appends problems of names that are not served."""
        for spec in specs:
            try:
                yield with_served_loras(spec, self.served_loras)
            except JobError as error:
                unknown += error.at_line(spec.line)

    def _refuse_loras(
        self, jobs: Sequence[AdmittedJob], models_bytes: Mapping[Path, int]
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """The jobs for whose LoRAs there is room beside the model and the LoRAs of earlier jobs."""
        asking, memory = [job for job in jobs if job.spec.lora], self._lora_memory
        if not asking or memory is None:
            return jobs, ()
        checkpoints = {job.checkpoint for job in asking}
        news = {path for path in checkpoints if not memory.needs.get(path, LoraNeed()).loras}
        for path in checkpoints - memory.needs.keys() if self.devices.kind == CUDA else ():
            own = [job for job in asking if job.checkpoint == path]
            size = models_bytes[path] if path in models_bytes else self.check([path])[path]
            loras, work = frozenset[Lora]().union(*map(loras_of, own)), max(map(gpu_work_bytes, own))
            memory.place(path, loras, weights=size, work=work)
        found = memory.refuse(
            asking,
            beside=lambda job: models_bytes.get(job.checkpoint, 0) + self._work_bytes(job),
            host_room_bytes=self._host_room_bytes(checkpoints),
        )
        refused = dict(found)
        memory.tell_of_copies(news)
        return [job for job in jobs if job.job_id not in refused], tuple(refused.values())

    def lora_bytes(self) -> Mapping[Path, int]:
        """By model, what LoRAs take: on each GPU, or in main memory on all ranks."""
        return {} if (memory := self._lora_memory) is None else memory.by_model()

    def lora_copies_on_host(self, checkpoints: Collection[Path]) -> Collection[Path]:
        """The models of which main memory has the copies of the weights that LoRAs change on GPUs."""
        memory = self._lora_memory
        if memory is None or self.devices.kind != CUDA:
            return ()
        memory.place_rest(self.check(set(checkpoints) - memory.needs.keys()), on_host=self.is_offloaded)
        return [path for path in checkpoints if memory.needs[path].is_on_host]

    def check_served_loras(self, served: Mapping[str, ServedLora], checkpoints: Sequence[Path]) -> None:
        """Raises: InputError for a LoRA that fits no model, and if there is no room for all of them."""
        if not served:
            return
        check_fit(served, checkpoints, self.lora_fits)
        if (memory := self._lora_memory) is not None:
            shas = {lora.sha256 for lora in served.values()}
            room = self._host_room_bytes(checkpoints)
            memory.add_served(self.check(checkpoints), shas, host_room_bytes=room)

    @property
    def _lora_memory(self) -> LoraMemory | None:
        """None if the memory is unknown."""
        room_bytes = self.room_bytes
        if room_bytes is None:
            return None
        return LoraMemory(self.lora_fits, self.devices, self.lora_needs, room_bytes, self.precision)

    def _host_room_bytes(self, checkpoints: Collection[Path]) -> float:
        """Main memory for copies of weights."""
        available = available_bytes()
        offloaded = 0 if self.loaded is not None else self.check_offloaded(checkpoints)
        return math.inf if available is None else available - offloaded

    def _work_bytes(self, job: AdmittedJob) -> int:
        return gpu_job_bytes(job) if self.devices.kind == CUDA else job_bytes(job)

    def _refuse_large(
        self, jobs: Sequence[AdmittedJob], models_bytes: Mapping[Path, int]
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        """The jobs that fit together with their models, and a problem for each of the others."""
        if self.devices.kind != CUDA:
            return refuse_large(jobs, models_bytes=models_bytes, available=self.room_bytes)
        fitting, too_large = self.refuse_large_on_gpus(jobs, models_bytes)
        kept, too_much = refuse_large(fitting, models_bytes={}, available=available_bytes())
        return kept, (*too_large, *too_much)

    def refuse_large_on_gpus(
        self, jobs: Sequence[AdmittedJob], models_bytes: Mapping[Path, int]
    ) -> tuple[Sequence[AdmittedJob], Sequence[Problem]]:
        return refuse_large_on_gpu(
            jobs,
            models_bytes=models_bytes,
            beside_bytes=self._beside_bytes,
            memory_bytes=self.devices.memory_bytes,
            where=self.devices.where,
        )

    def residency(
        self, jobs: Sequence[AdmittedJob], *, names: Mapping[str, Path] | None = None
    ) -> Residency | None:
        """Lets the models of these jobs take turns; None if all of them always fit together.

        `names` are models that must be loaded although no job uses them yet. Their jobs may be too large for
        all models to stay.
        """
        room_bytes = self.room_bytes
        if room_bytes is None:
            return None
        checkpoints = {job.checkpoint for job in jobs} | set((names or {}).values())
        of_loras = self.lora_bytes()
        found = Residency(
            jobs,
            weights={path: size + of_loras.get(path, 0) for path, size in self.check(checkpoints).items()},
            work_bytes=gpu_work_bytes if self.devices.kind == CUDA else job_bytes,
            room_bytes=room_bytes,
            jobs_at_once=1 if self.devices.kind == CUDA else self.devices.num_ranks,
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
        """Memory for models and jobs, of each GPU or of main memory; None if unknown."""
        limit = self.devices.memory_bytes
        if self.devices.kind == CUDA:
            return None if limit is None else limit - self._beside_bytes
        return min((room for room in (limit, available_bytes()) if room is not None), default=None)

    @property
    def _beside_bytes(self) -> int:
        """Memory of each GPU that is used before any model is loaded."""
        from gfgen.gfc.cuda.device_arena import arena_bytes

        plan = default_plan(num_ranks=self.devices.num_ranks, are_on_gpus=True)
        return arena_bytes(plan) + SIDE_BYTES + CONTEXT_BYTES

    @functools.cached_property
    def _loaded_bytes(self) -> Mapping[Path, int]:
        """Bytes of loaded models on each GPU. In main memory, available memory already excludes them."""
        return self.check(self.loaded) if self.loaded and self.devices.kind == CUDA else {}

    def find_model(self, name: str) -> ResolvedModel:
        """Raises ModelError when there is no such model, or when it is not loaded."""
        if name not in self.known and (self.loaded is None or Path(name).is_dir()):
            try:
                self.known[name] = self._look_up(name)
            except ModelError as error:
                self.unusable[name] = str(error)
                raise
        model = self.known.get(name)
        if model is None and name in self.unusable:
            raise ModelError(self.unusable[name])
        if model is None or (self.loaded is not None and model.checkpoint not in self.loaded):
            check_name(name)
            raise ModelError(f"model {name!r} is not loaded; {self.help_}")
        return model

    def _look_up(self, name: str) -> ResolvedModel:
        model = resolved_model(name, has_random_weights=self.has_random_weights, trusts_code=self.trusts_code)
        if precision_of(self.precision, model.checkpoint) == FP8:
            check_layers(model.geometry, model.checkpoint)
        if precision_of(self.attention, model.checkpoint) == FP8:
            check_heads(model.geometry, model.checkpoint)
        return model


def resolved_model(name: str, *, has_random_weights: bool, trusts_code: bool) -> ResolvedModel:
    """A model with what a run needs of it, which may be downloaded. Raises: ModelError."""
    if has_random_weights:
        return replace(find_weightless(name), has_random_weights=True)
    checkpoint = resolve_checkpoint(name)
    return ResolvedModel(name, checkpoint, load_geometry(checkpoint, trusts_code=trusts_code))


def find_weightless(name: str) -> ResolvedModel:
    configs = find_configs(name)
    return ResolvedModel(name, configs, weightless_geometry(configs))
