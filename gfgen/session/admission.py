"""Admission of jobs in four stages: parse, resolve, fit, claim files.

parse     lines of files -> jobs as written (job/reader.py)
resolve   -> jobs as they run: names of patches become files, the model's geometry fills in the rest
fit       -> those for which there is memory (memory.py), and that are within the bounds on a job
claim     -> those with the files that they may replace (files/ownership.py)

Each stage gives the jobs that it keeps and the problems of the others.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gfgen.errors import InputError, JobFileError, ModelError, Problem, Warned, listed
from gfgen.job.inputs import PROMPTS
from gfgen.job.packed import FEW, Packed
from gfgen.job.reader import KEY_BYTES, JobSource, ParsedJobs, passed_deadlines, with_bar
from gfgen.job.spec import JobSpec, call_key, prompts_of
from gfgen.models.families.precision import Precision
from gfgen.models.families.registry import DEFAULT_MODEL, check_name, find_configs, resolve_checkpoint
from gfgen.models.geometry.model import load_geometry, weightless_geometry
from gfgen.models.geometry.rules import max_text_tokens
from gfgen.models.geometry.wan import TEXT_TOKENS
from gfgen.runtime.core.admission import JOBS, AdmittedJob, Judged, ResolvedModel, admit, tell_of_warnings
from gfgen.runtime.files.ownership import Claims
from gfgen.runtime.predict.job_bounds import JobBounds, StepTimes, beyond, certainly_late, too_long
from gfgen.runtime.predict.links import host_bytes_per_s
from gfgen.session.memory import HostMemory
from gfgen.system.lifeline import ask_child
from gfgen.system.linefile import write_whole
from gfgen.system.machine import cache_dir
from gfgen.system.wording import counted, first_of, in_words

logger = logging.getLogger(__name__)

Done = Callable[[Sequence[AdmittedJob]], Collection[str]]
"""Ids of the jobs that need not run."""
START_AGAIN = "stop the run and start it again: it loads what the files in its folder name"
"""What to do about a model that is not loaded."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection: jobs have no cycles, and visiting them takes time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not gc.get_freeze_count():  # another time would keep the garbage of a long session
            gc.freeze()  # nor does the run visit them


@dataclass(frozen=True, slots=True)
class AdmittedSource:
    """The jobs of a source that can run, and the problems of the others."""

    parsed: ParsedJobs
    jobs: Sequence[AdmittedJob]
    problems: Sequence[Problem]
    num_colliding: int = 0
    """Jobs whose file is in the way."""
    has_warnings: bool = True


def jobs_to_run(found: AdmittedSource, *, skip_invalid: bool = False) -> Judged:
    """The jobs, and the problems of the others if `skip_invalid`. Raises: JobFileError with every problem."""
    name, problems = found.parsed.source, found.problems
    if problems and not (skip_invalid and found.jobs):
        raise JobFileError(name, tuple(problems))
    if problems:
        logger.warning("%s: %s; these jobs are skipped", name, counted(len(problems), "problem"))
    for line in listed(problems):
        logger.warning("%s: %s", name, line)
    if found.has_warnings:
        tell_of_warnings((job.info.spec, job.info.warnings) for job in found.jobs)
    return found.jobs, problems


@no_collection()
def judge(
    source: JobSource,
    admission: Admission,
    *,
    claims: Claims | None = None,
    has_bar: bool = False,
    is_whole: bool = True,
) -> AdmittedSource:
    """The jobs that can run, with files by `claims`, and the problems of the others. Raises: InputError.

    is_whole: these are all jobs of a run, so options may have no effect, and asking a child takes no time
    of a run.
    """
    parsed = parse(source, admission.models.default, has_bar=has_bar, is_whole=is_whole)
    done = None if claims is None else claims.done
    if claims is not None and parsed.num_done and claims.depend_on_all(parsed.specs):
        source = replace(source, index=None)
        parsed = parse(source, admission.models.default, has_bar=has_bar, is_whole=is_whole)
    specs, problems = parsed.specs, list(parsed.problems)
    kept: list[AdmittedJob] | Packed[AdmittedJob] = [] if len(specs) <= FEW else Packed(JOBS)
    shown, num_colliding = with_bar(specs, "checking", is_shown=has_bar, unit=" jobs", total=len(specs)), 0
    size = max(1, len(specs)) if claims is None or claims.depend_on_all(specs) else FEW
    checkpoints, has_warnings = set[Path](), False
    for start in range(0, max(1, len(specs)), size):
        part = list(itertools.islice(shown, size))
        found, refused = admission(part, may_ask=is_whole, done=done)
        checkpoints |= {job.checkpoint for job in found}
        if claims is not None and claims.index is not None:
            claims.index.note({job.job_id: job.info for job in found}, part, parsed.keys[KEY_BYTES * start :])
        found, without_file = (found, ()) if claims is None else claims.claim(found)
        kept.extend(found)
        has_warnings = has_warnings or any(job.info.warnings for job in found)
        problems += (*refused, *without_file)
        num_colliding += len(without_file)
    if checkpoints and is_whole:
        admission.models.precision.tell_of_other_models(checkpoints)
    return AdmittedSource(parsed, kept, _by_line(problems), num_colliding, has_warnings)


@no_collection()
def admit_weightless(
    source: JobSource, *, default_model: str, has_bar: bool = False
) -> Sequence[AdmittedJob]:
    """The jobs for a simulation, which needs no weights. Raises JobFileError with every problem."""
    parsed = parse(source, default_model, has_bar=has_bar)
    specs = with_bar(parsed.specs, "checking", is_shown=has_bar, unit=" jobs", total=len(parsed.specs))
    admitted, refused = admit(specs, default_model=default_model, find_model=find_weightless)
    if problems := _by_line(parsed.problems, refused):
        raise JobFileError(parsed.source, problems)
    if any(job.has_nominal_flops or job.spec.patches for job in admitted):
        logger.warning("LoRAs, arguments of calls and long texts are not checked here; 'gfgen check' does it")
    return admitted


def parse(
    source: JobSource, default_model: str, *, has_bar: bool = False, is_whole: bool = True
) -> ParsedJobs:
    """The jobs as they are written, all of a run if `is_whole`. Raises: InputError for a file."""
    parsed = source.read(has_bar=has_bar)
    if is_whole:
        tell_of_unused(default_model, parsed.specs)
    if source.is_plain and not any(kind.startswith(PROMPTS) for _, kind in parsed.kinds):
        logger.warning("--plain has no effect: no job file has a prompt per line")
    for name, kind in parsed.kinds:
        logger.info("%s: read as %s", name, kind)
    if parsed.num_varied:
        jobs, lines = counted(len(parsed.specs), "job"), counted(parsed.num_varied, "line")
        logger.info("%s: %s, with variations of %s", parsed.source, jobs, lines)
    return parsed


def _by_line(*problems: Sequence[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(itertools.chain(*problems), key=lambda problem: problem.line or 0))


def tell_of_unused(default_model: str, specs: Sequence[JobSpec]) -> None:
    """Log that --model has no effect if every job names another model."""
    names = {spec.model for spec in specs} if default_model != DEFAULT_MODEL else ()
    if names and not names & {None, default_model}:
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
    """Jobs with time for a step before --until, and the number of others. Raises: InputError if none."""
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
class Models:
    """The models that jobs may name; each is looked up once."""

    default: str
    has_random_weights: bool = False
    trusts_code: bool = False
    precision: Precision = Precision()
    known: dict[str, ResolvedModel | str] = field(default_factory=dict)
    """By name: the model, or what is wrong with it."""
    loaded: frozenset[Path] | None = None
    """Jobs of other models than these are refused, and nothing is downloaded. None: any model."""
    help_: str = START_AGAIN
    """What to do about a model that is not loaded."""

    def find(self, name: str) -> ResolvedModel:
        """Raises ModelError when there is no such model, or when it is not loaded."""
        found = self.known.get(name)
        if not isinstance(found, ResolvedModel) and (self.loaded is None or os.path.isdir(name)):
            try:
                found = self.look_up(name)
            except ModelError as error:
                found = str(error)
            self.known[name] = found
        if isinstance(found, str):
            raise ModelError(found)
        if found is None or (self.loaded is not None and found.checkpoint not in self.loaded):
            check_name(name)
            raise ModelError(f"model {name!r} is not loaded; {self.help_}")
        return found

    def look_up(self, name: str) -> ResolvedModel:
        model = resolved_model(name, has_random_weights=self.has_random_weights, trusts_code=self.trusts_code)
        self.precision.check_model(model.geometry, model.checkpoint)
        return model

    def try_calls(self, jobs: Sequence[AdmittedJob], *, may_ask: bool = True) -> Judged:
        """The jobs whose calls their pipelines do not refuse."""
        if self.has_random_weights:
            return jobs, ()
        return try_calls(jobs, trusts_code=self.trusts_code, may_ask=may_ask)


@dataclass(kw_only=True)
class Admission:
    """The stages between a parsed job and its file, with what a run knows of models and memory."""

    models: Models
    memory: HostMemory
    bounds: JobBounds | None = None
    step_times: StepTimes | None = None
    """For the bound of a step."""

    def __call__(
        self,
        specs: Sequence[JobSpec],
        *,
        may_ask: bool = False,
        done: Done | None = None,
    ) -> Judged:
        jobs, refused = self.resolve(specs)
        jobs, unlike = self.models.try_calls(jobs, may_ask=may_ask)
        jobs, unfit = self.fit(jobs, done=done)
        return jobs, (*refused, *unlike, *unfit)

    def again(self, specs: Sequence[JobSpec]) -> Judged:
        """The same for jobs that were admitted before and may be running (`HostMemory.fit`)."""
        jobs, refused = self.resolve(specs)
        jobs, unfit = self.memory.fit(jobs, is_new=False)
        return jobs, (*refused, *unfit)

    def resolve(self, specs: Sequence[JobSpec]) -> Judged:
        named, unknown = self.memory.patches.named(specs)
        jobs, refused = admit(named, default_model=self.models.default, find_model=self.models.find)
        if rate := self._link_bytes_per_s:
            most = max(map(len, self.memory.devices.near))
            over = functools.partial(replace, link_bytes_per_s=rate, num_near=most)
            jobs = tuple(replace(job, limits=over(job.limits)) for job in jobs)
        return jobs, (*unknown, *refused)

    @functools.cached_property
    def _link_bytes_per_s(self) -> float:
        """Of main memory, over which ranks exchange; 0 if they reach each other's."""
        devices = self.memory.devices
        name = devices.gpus[0].name if devices.gpus else None
        return host_bytes_per_s(name, devices.link_bytes_per_s) if devices.over_host else 0.0

    def fit(self, jobs: Sequence[AdmittedJob], *, done: Done | None = None) -> Judged:
        """Those that fit into memory and, unless `done`, the bounds. Raises: InputError for a model."""
        jobs, too_large = self.memory.fit(jobs)
        found = [] if self.bounds is None else list(beyond(jobs, self.bounds, self.step_times))
        exempt = done([job for job, _ in found]) if found and done is not None else ()
        found = [(job, problem) for job, problem in found if job.job_id not in exempt]
        refused = {job.job_id for job, _ in found}
        kept = [job for job in jobs if job.job_id not in refused] if refused else jobs
        return kept, (*too_large, *(problem for _, problem in found))

    def of_loaded(self, checkpoints: frozenset[Path], *, help_: str = START_AGAIN) -> Admission:
        """The same when ranks have loaded these models: jobs of others are refused, with this help."""
        models = replace(self.models, loaded=checkpoints, help_=help_)
        return replace(self, models=models, memory=replace(self.memory, is_loaded=True))


def resolved_model(name: str, *, has_random_weights: bool, trusts_code: bool) -> ResolvedModel:
    """A model with what a run needs of it, which may be downloaded. Raises: ModelError."""
    if has_random_weights:
        return replace(find_weightless(name), has_random_weights=True)
    checkpoint = resolve_checkpoint(name)
    return ResolvedModel(name, checkpoint, load_geometry(checkpoint, trusts_code=trusts_code))


def find_weightless(name: str) -> ResolvedModel:
    configs = find_configs(name)
    return ResolvedModel(name, configs, weightless_geometry(configs))


SAFE_BYTES = 75
"""No text encoder keeps fewer tokens, and a token has a byte or more."""
Answers = dict[str, dict[str, Any]]
"""By call and by text."""
_SHOWN_WORDS = 8


def try_calls(jobs: Sequence[AdmittedJob], *, trusts_code: bool, may_ask: bool = True) -> Judged:
    """The jobs whose calls their pipelines do not refuse, with warnings for texts that are cut. Kept answers
    count alone unless a child process may be asked, which takes seconds."""
    groups: dict[Path, list[tuple[str, AdmittedJob]]] = defaultdict(list)
    for job in jobs:
        most = max_text_tokens(job.spec, TEXT_TOKENS) - 2
        if job.has_nominal_flops or any(_long_texts(prompts_of(job.spec), most)):
            groups[job.checkpoint].append((_key(job), job))
    known = {checkpoint: _read(checkpoint) for checkpoint in groups}
    questions = [
        {"checkpoint": str(path), "trusts_code": trusts_code, **asked}
        for path, own in groups.items()
        if may_ask and (asked := _asked(own, known[path]))["calls"]
    ]
    try:
        found = ask_child("gfgen.models.stepping.outlined", questions, "calls") if questions else ()
    except ModelError as error:
        found = [{"error": str(error)}] * len(questions)
    unchecked: dict[Path, str] = {}
    for question, answer in zip(questions, found, strict=True):
        path = Path(question["checkpoint"])
        if "error" in answer:
            unchecked[path] = answer["error"]
        else:
            known[path] = {name: kept | answer.get(name, {}) for name, kept in known[path].items()}
            with contextlib.suppress(OSError):  # then it is asked again
                write_whole(_place(path), json.dumps(known[path]))
    judged: dict[str, AdmittedJob | Problem] = {}
    for path, own in groups.items():
        calls = known[path]["calls"]
        judged |= {job.job_id: _judged(job, known[path], key) for key, job in own if key in calls}
        unknown = [why for key, _ in own if (why := calls.get(key, {}).get("unknown"))]
        if may_ask and (why := unchecked.get(path) or next(iter(unknown), None)):
            logger.info("%s: calls are not checked before they run: %s", own[0][1].spec.model, why)
    all_jobs = [judged.get(job.job_id, job) for job in jobs]
    kept = [each for each in all_jobs if isinstance(each, AdmittedJob)]
    return kept, [each for each in all_jobs if isinstance(each, Problem)]


def _asked(jobs: Sequence[tuple[str, AdmittedJob]], known: Answers) -> dict[str, Any]:
    """What jobs of a checkpoint need beyond the known answers."""
    calls: dict[str, Any] = {}
    texts: dict[str, tuple[str, str, str]] = {}
    characters: set[str] = set()
    for key, job in jobs:
        answer, prompts = known["calls"].get(key), prompts_of(job.spec)
        odd = set(_ODD.findall("".join(prompts.values())))
        characters |= (odd := odd - known["unknown"].keys())
        safe = SAFE_BYTES if len(prompts) == 2 else 0  # perhaps no encoder gets a prompt_2
        most = safe if answer is None else answer["most_bytes"]
        new = {_text_id(key, *each): (key, *each) for each in _long_texts(prompts, most)}
        texts |= (new := {name: text for name, text in new.items() if name not in known["texts"]})
        if new or odd or answer is None:
            calls.setdefault(key, asdict(job.spec))
    return {"calls": calls, "texts": texts, "characters": sorted(characters)}


def _judged(job: AdmittedJob, found: Answers, key: str) -> AdmittedJob | Problem:
    spec = job.spec
    if (refused := found["calls"][key].get("refused")) is not None:
        why = f"{job.info.family} refuses it: {' '.join(refused.split())}"
        return replace(Problem.of(None, None, why), line=spec.line)
    for name in sorted({*found["calls"][key].get("idle", ())} & {*(job.info.asked.scheduler or {})}):
        job = job.warned(Warned(f"scheduler.{name} has no effect on the steps of this job"))
    told = {warned.kind.partition(" has no effect")[0] for warned in job.info.warnings}
    for name, text in ((name, text) for name, text in prompts_of(spec).items() if name not in told):
        read = found["texts"].get(_text_id(key, name, text), len(text))
        if rest := text[read:].split():
            what = f"the end of a long {name}" if read or name == "prompt" else f"all of {name}"
            kind = f"{what} has no effect, because no text encoder reads it"
            shown = " ".join(rest[:_SHOWN_WORDS]) + (" ..." if len(rest) > _SHOWN_WORDS else "")
            job = job.warned(Warned(kind, f"{counted(len(rest), 'word')} from {shown!r}"))
        if unknown := [each for each in dict.fromkeys(_ODD.findall(text)) if found["unknown"].get(each)]:
            kind = f"characters of the {name} have no effect on a text encoder whose tokenizer lacks them"
            job = job.warned(Warned(kind, " ".join(unknown)))
    return job


def _key(job: AdmittedJob) -> str:
    """Equal for jobs of a checkpoint whose calls are refused alike; families of gfgen's own refuse none."""
    own = str(job.spec.args) if job.spec.args else ""
    said = call_key(job.spec) if job.has_nominal_flops else own
    return hashlib.sha256(said.encode()).hexdigest()[:20]


def _text_id(key: str, name: str, text: str) -> str:
    return hashlib.sha256(f"{key} {name} {text}".encode()).hexdigest()[:20]


def _long_texts(prompts: Mapping[str, str], most_bytes: int) -> Iterator[tuple[str, str]]:
    return (each for each in prompts.items() if len(each[1].encode()) > most_bytes)


_ODD = re.compile(r"""[^A-Za-z0-9\s.,;:!?'"()/&%$#@*+=_-]""")
"""Characters that a tokenizer may not know."""
_ANSWERS = 7
"""A number that rises when calls are tried otherwise."""


def _place(checkpoint: Path) -> Path:
    """The file of a checkpoint's answers, which has another name when something changes."""
    paths = [path for pattern in ("*", "*/*") for path in sorted(checkpoint.glob(pattern))]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    versions = [_ANSWERS, *(version(package) for package in ("diffusers", "transformers"))]
    return cache_dir() / "calls" / f"{hashlib.sha256(repr((stats, versions)).encode()).hexdigest()[:32]}.json"


def _read(checkpoint: Path) -> Answers:
    found: Answers = {"calls": {}, "texts": {}, "unknown": {}}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(_place(checkpoint).read_text())
    return found
