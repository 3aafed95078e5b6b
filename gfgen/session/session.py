"""One session: ranks with their models, a folder, and runs of the control loop on them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gfgen.errors import InputError, ModelError, OutputError
from gfgen.job.reader import JobSource
from gfgen.job.spec import JobSpec
from gfgen.layout import Degrees
from gfgen.models.families.registry import DEFAULT_MODEL
from gfgen.policies.catalog import NamedPolicy
from gfgen.runtime.control.backlog import Backlog
from gfgen.runtime.control.ranks import LOOKAHEAD_S
from gfgen.runtime.control.residency import Residency
from gfgen.runtime.core.admission import AdmittedJob, admit
from gfgen.runtime.core.events import Clock
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobInfo, Observer, with_view
from gfgen.runtime.files import resume
from gfgen.runtime.files.journal import JOURNAL_NAME, Journal, first_arrivals, journal_header
from gfgen.runtime.files.lock import hold_folder
from gfgen.runtime.files.manifest import MANIFEST_NAME, ManifestWriter
from gfgen.runtime.files.ownership import STDIN, Claims
from gfgen.runtime.files.resume import FIRST_USE_S, GRACE_S, RunStart
from gfgen.runtime.ipc.content import remove_leftovers
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.job_bounds import JobBounds
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.predict.profile_store import find_profile, keep_measured, runs_path
from gfgen.session.admission import Admission, jobs_to_run, judge, warn_of_passed_deadlines
from gfgen.session.ranks import Ranks, made_with, ready_pool
from gfgen.system.linefile import FULL
from gfgen.system.machine import free_bytes
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

if TYPE_CHECKING:
    from gfgen.runtime.control.control import Control, Intake
    from gfgen.runtime.control.decider import Chooser
    from gfgen.runtime.processes.pool import WorkerPool
    from gfgen.runtime.processes.workers import Requests, WarmUps

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    output_dir: Path
    ranks: Ranks
    policy: NamedPolicy
    model: str = DEFAULT_MODEL
    lookahead_s: float = LOOKAHEAD_S
    grace_s: float = GRACE_S
    closes_at: float | None = None
    """Unix time at which the run stops."""
    job_file: str = STDIN
    """The job file or the watched folder as recorded; STDIN: unknown, so files of other jobs stay."""
    job_bounds: JobBounds | None = None
    keeps_records: bool = True
    """Writes a journal and a manifest into the output folder."""
    waits_for_space: bool = False
    """A job that finishes on a full disk waits for room; otherwise it fails."""
    named_at: float = field(default_factory=time.time)
    """Unix time of {time} in names, unless the folder had an earlier run."""
    forced_from: int | None = None
    """See `Claims.forced_from`."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    intake: Intake | None = None
    backlog: Backlog = field(default_factory=Backlog)
    """Where further jobs wait that are there at the start."""
    observers: Sequence[Observer] = ()
    """Observers of the run that stay open after it, such as the source itself."""
    requests: Requests | None = None
    chooser: Chooser | None = None
    """Replaces the policy's own."""
    on_turn: Callable[[float], None] | None = None
    """Called with the seconds of each turn of the control loop."""
    watched: Path | None = None


@dataclass(frozen=True, slots=True)
class RunSetup:
    options: SessionOptions
    clock: Clock
    start: RunStart
    profile: Profile | None
    arrivals: Arrivals
    keeps_measured: bool
    """Later runs may predict from the task times of this one."""


class Session:
    """Holds the output folder inside `with`, and ranks after `load`, or the ranks of a given `pool`."""

    def __init__(self, options: SessionOptions, *, pool: WorkerPool | None = None) -> None:
        self.options = options
        self.residency: Residency | None = None
        """Lets models take turns if they do not all fit."""
        self.checkpoints: frozenset[Path] = frozenset()
        """The models of `load`, including those that wait for their turn."""
        self._pool = pool
        self._stack = contextlib.ExitStack()
        self._lock = -1
        self._warm: set[tuple[str, str, Degrees]] = set()
        """Models, shapes and degrees that ranks have prepared before a run."""
        self._models: Mapping[str, Path] = {}
        """Those of `load`, by name."""
        self._peaks = Counter[str]()  # as `Profile.peaks`
        self.signal_number: int | None = None
        """Of the signal that came in the last run."""
        self.stop_signal: int | None = None
        """The signal that stopped the last run, if jobs were left."""

    def __enter__(self) -> Session:
        """Raises: LockedError when another run holds the folder; InputError when it cannot be written."""
        self._lock = self._stack.enter_context(_held_folder(self.options.output_dir))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    @functools.cached_property
    def signals(self) -> SignalPipe:
        """Catches signals from the first access on."""
        return self._stack.enter_context(contextlib.closing(SignalPipe()))

    @functools.cached_property
    def admission(self) -> Admission:
        return self.options.ranks.admission(self.options.model, bounds=self.options.job_bounds)

    @property
    def pool(self) -> WorkerPool:
        assert self._pool is not None, "load() comes first"
        return self._pool

    @property
    def num_own_ranks(self) -> int:
        """The ranks of this machine, as far as the run uses them."""
        return self.pool.num_ranks

    def admit(self, lines: Sequence[Mapping[str, Any]]) -> Sequence[AdmittedJob]:
        """The jobs of these lines that are not done. Raises: as `judge` and `jobs_to_run`."""
        options = self.options
        claims = Claims(output_dir=options.output_dir, job_file=options.job_file, named_at=options.named_at)
        jobs, _ = jobs_to_run(judge(JobSource(given=tuple(lines)), self.admission, claims=claims))
        return [job for job in jobs if job.job_id not in claims.done_ids]

    def load(
        self, jobs: Sequence[AdmittedJob], *, models: Sequence[str] = (), are_all_needed: bool = False
    ) -> None:
        """Start ranks with the models of these jobs and with `models`, and prepare the first job's tasks.

        are_all_needed: no rank may be missing, and all tasks are prepared now, as in measurements.
        Raises: InputError when a model does not fit; WorkerError; InterruptedRunError.
        """
        import gfgen.runtime.control.control  # before ranks load, since the package may change meanwhile
        import gfgen.runtime.processes.workers
        import gfgen.runtime.simulate.choosers
        import gfgen.session.live  # noqa: F401
        from gfgen.session.warming import choose_kernels

        options = self.options
        for below in {(options.output_dir / job.info.file).parent for job in jobs} - {options.output_dir}:
            if below.is_dir():
                remove_leftovers(below)  # of killed runs, in the subfolders that these jobs name
        found = {name: self.admission.models.find(name) for name in models}
        named = {name: model.checkpoint for name, model in found.items()}
        checkpoints = {*named.values(), *(job.checkpoint for job in jobs)}
        memory = self.admission.memory
        usual = [JobSpec(id=name, prompt=name, model=name) for name in models]
        memory.fit(admit(usual, default_model="", find_model=self.admission.models.find)[0])
        memory.check_waiting(checkpoints)
        self.residency = memory.residency(jobs, names=named or None)
        self.checkpoints = frozenset(checkpoints)
        self._models = {**named, **{job.spec.model or "": job.checkpoint for job in jobs}}
        held: Collection[Path] = checkpoints
        kept: Mapping[Path, int] = {}
        if self.residency is not None:
            held = self.residency.checkpoints
            # If each model has its turn once, a copy would cost time.
            times = {(each.spec.arrival_s, each.spec.priority, each.spec.deadline_s) for each in jobs}
            may_return = self.residency.is_needed and (bool(models) or len(times) > 1)
            kept = self.residency.kept = memory.kept(checkpoints) if may_return else {}
        kernels = choose_kernels(options.ranks, jobs, profile=memory.profile, output_dir=options.output_dir)
        ready = ready_pool(
            held,
            options.ranks,
            self.signals,
            are_all_needed=are_all_needed,
            kernels=kernels,
            patch_copies_on_host=memory.copies_on_host(checkpoints),
            placements=memory.streaming(checkpoints),
            kept=kept,
            keep_fds=[self._lock],
            jobs=jobs,
        )
        self._pool = self._stack.enter_context(ready)
        self.warm_up(jobs, are_all_needed=are_all_needed)

    def warm_up(self, jobs: Sequence[AdmittedJob], *, are_all_needed: bool = False) -> None:
        """Let GPUs prepare the tasks of these jobs, the first job's now; only of models that ranks hold."""
        from gfgen.session.warming import warm_up

        if (choose := self._warm_ups(self.options)) is not None:
            held = [job for job in jobs if str(job.checkpoint) in self.pool.models.checkpoints]
            items = choose(held)
            now, later = (items, ()) if are_all_needed else (items[:1], items[1:])
            warm_up(self.pool, now, later, signals=self.signals)
            kinds = {job.job_id: (job.spec.model or "", job.shape) for job in held}
            self._warm |= {(*kinds[item.spec.id], degrees) for item in now for degrees in item.degrees}

    def _warm_ups(self, options: SessionOptions) -> WarmUps | None:
        from gfgen.session.warming import warm_ups_of

        return warm_ups_of(options.ranks.devices, options.policy)

    def run(
        self,
        jobs: Sequence[AdmittedJob],
        *,
        options: SessionOptions | None = None,
        observers: Sequence[Observer] = (),
        num_skipped: int = 0,
        arrivals: Arrivals | None = None,
        profile: Profile | None = None,
        clock: Clock | None = None,
    ) -> Summary:
        """Run the control loop until all jobs have ended or the run stops. The ranks can be used again.

        `options` replaces the session's; `profile` this machine's, and then measured times are not kept.
        Raises: InterruptedRunError when a second signal did not let steps end.
        """
        options, clock = options or self.options, clock or Clock()
        arrivals = arrivals or Arrivals()
        setup = RunSetup(
            options,
            clock,
            self._start(jobs, options, clock, arrivals),
            profile or known_profile(options.ranks),
            arrivals,
            keeps_measured=profile is None,
        )
        if options.keeps_records:
            from gfgen.session.live import LiveRun

            warn_of_passed_deadlines(jobs, now=clock.started_at, arrived_at=setup.start.arrived_at)
            manifest = ManifestWriter(options.output_dir / MANIFEST_NAME, made_with=self._made_with)
            live = LiveRun(options.output_dir, started_at=clock.started_at, watched=arrivals.watched)
            if arrivals.requests is None and live.fileno() >= 0:
                setup = replace(setup, arrivals=replace(arrivals, requests=live))
            observers = (manifest, *observers, live)
        seen_by = with_view([*observers, *arrivals.observers], arrivals.backlog)
        with contextlib.ExitStack() as stack:
            for observer in observers:
                stack.callback(observer.close)
            control = self._control(
                jobs,
                setup,
                stack,
                observers=seen_by,
                num_skipped=num_skipped,
                journal=self._journal(jobs, setup, stack),
            )
            summary = control.run()
            for use in summary.memory.values():
                self._peaks |= use.task_peaks
        state = control.state
        self.signal_number = state.closing.stop_signal
        self.stop_signal = self.signal_number if state.jobs.records or arrivals.backlog else None
        return summary

    def _control(
        self, jobs: Sequence[AdmittedJob], setup: RunSetup, stack: contextlib.ExitStack, **records: Any
    ) -> Control:
        """The control loop; `records` are options of `Control`. `stack` is closed after the run."""
        from gfgen.runtime.control.control import Control, Steering  # which a refused job file never needs
        from gfgen.runtime.control.state import State
        from gfgen.runtime.processes.workers import JobMemory, ProcessBackend
        from gfgen.runtime.simulate.choosers import ThreadedChooser

        options, arrivals, ranks = setup.options, setup.arrivals, setup.options.ranks
        has_files = options.keeps_records or options.waits_for_space  # else another run writes them
        costs = CostModel(setup.profile, shares_cores=_share_cores(ranks))
        own_chooser = stack.enter_context(contextlib.closing(ThreadedChooser(options.policy.choose)))
        memory = JobMemory(jobs, options.output_dir, setup.start.resume)
        may_come = arrivals.intake is not None
        self.pool.needed = None if may_come else lambda: {str(x.checkpoint) for x in memory.jobs.values()}
        backend = ProcessBackend(
            self.pool,
            memory,
            clock=setup.clock,
            signals=self.signals,
            requests=arrivals.requests,
            warm_ups=self._warm_ups(options),
            waits_for_space=options.waits_for_space,
        )
        stack.callback(backend.close)
        if setup.keeps_measured:
            stack.callback(self._keep_measured, ranks, costs)
        return Control(
            jobs,
            state=State(jobs, setup.start, clock=setup.clock, costs=costs),
            backend=backend,
            policy=options.policy,
            steering=Steering(
                intake=arrivals.intake,
                backlog=arrivals.backlog,
                chooser=arrivals.chooser or own_chooser,
                residency=self.residency,
                free_bytes=partial(free_bytes, options.output_dir) if has_files else None,
                on_turn=arrivals.on_turn,
            ),
            **records,
        )

    def _keep_measured(self, ranks: Ranks, costs: CostModel) -> None:
        """Keep what later runs predict from; no task times if an option or streamed blocks change them."""
        changes = self.pool.settings.placements or ranks.devices.link_bytes_per_s
        are_usual = ranks.vae_dtype == "auto" and ranks.has_graphs and not changes
        keep_measured(
            runs_path(ranks.profiled_as),
            costs.classes.values() if are_usual else (),
            device=ranks.profiled_as,
            num_ranks=max(map(len, self.pool.islands)),
            share_cores=_share_cores(ranks),
            read_bytes_per_s=self.admission.memory.profile.read_bytes_per_s,
            peaks=dict(self._peaks),
        )

    def _made_with(self, info: JobInfo) -> Mapping[str, Any] | None:
        """None if the model is not there any more, or its files cannot be read."""
        try:
            checkpoint = self.admission.models.find(info.spec.model or "").checkpoint
            return made_with(self.options.ranks, checkpoint, kernels=self.pool.settings.kernels)
        except (ModelError, OSError):
            return None

    def _first_arrivals(
        self, jobs: Sequence[AdmittedJob], options: SessionOptions, arrivals: Arrivals
    ) -> Mapping[tuple[str, str], float]:
        """Empty if no job needs them."""
        has_deadlines = any(
            job.spec.deadline_s or job.spec.deadline_clock
            for job in itertools.chain(jobs, arrivals.backlog.timed())
        )
        if not options.keeps_records or not (has_deadlines or arrivals.intake):
            return {}
        return first_arrivals(options.output_dir / JOURNAL_NAME, forced_from=options.forced_from)

    def _start(
        self, jobs: Sequence[AdmittedJob], options: SessionOptions, clock: Clock, arrivals: Arrivals
    ) -> RunStart:
        pool, folder, memory = self.pool, options.output_dir, self.admission.memory
        if rates := [each.read_bytes_per_s for each in pool.living if each.read_bytes_per_s]:
            memory.profile = replace(memory.profile, read_bytes_per_s=round(median(rates)))
        return RunStart(
            num_ranks=pool.num_ranks,
            num_writers=pool.num_writers,
            lookahead_s=options.lookahead_s,
            started_at=clock.started_at,
            last_number=pool.last_number,
            arrived_at=self._first_arrivals(jobs, options, arrivals),
            resume=resume.find(
                folder, jobs, weights_mark=pool.models.weights_mark, computed_with=pool.settings.computed_with
            ),
            closes_s=None if options.closes_at is None else options.closes_at - clock.started_at,
            grace_s=options.grace_s,
            resident=None if self.residency is None else self.residency.resident,
            islands=pool.islands,
            near=pool.settings.near,
            reads_s=memory.reads_s(self._models),
            first_use_s=FIRST_USE_S if options.ranks.are_on_gpus else 0.0,
            warm=self._warm,
        )

    def _journal(
        self, jobs: Sequence[AdmittedJob], setup: RunSetup, stack: contextlib.ExitStack
    ) -> Journal | None:
        options = setup.options
        if not options.keeps_records:
            return None
        header = journal_header(
            [job.info for job in jobs],
            setup.start,
            policy=options.policy.name,
            profile=None if setup.profile is None else setup.profile.hash,
            job_file=options.job_file,
            claimed={"named_at": options.named_at, "forced_from": options.forced_from}
            | setup.arrivals.backlog.header,
        )
        journal = Journal(options.output_dir / JOURNAL_NAME, header=header)
        stack.callback(journal.close)
        return journal


def _share_cores(ranks: Ranks) -> bool:
    return not ranks.are_on_gpus and ranks.num_ranks > 1


def known_profile(ranks: Ranks) -> Profile | None:
    found = find_profile(ranks.profiled_as)
    if found is None:
        return None
    path, profile = found
    logger.info("predictions start from the profile of %s: %s", profile.date, path)
    return profile


@contextlib.contextmanager
def _held_folder(folder: Path) -> Iterator[int]:
    """Lock the output folder without leftovers; yields the descriptor. If it is new and empty, it goes."""
    made = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        try_to_write(folder)
    except OSError as error:
        reason = "this is a file" if os.path.isfile(folder) else f"cannot write there ({error.strerror})"
        kind = OutputError if error.errno in FULL else InputError
        raise kind(f"--output {folder}: {reason}; name another folder") from None
    try:
        with hold_folder(folder) as lock:
            try:
                tempfile.gettempdir()
            except OSError:  # nowhere else can this process and its children put temporary files
                tempfile.tempdir = os.environ["TMPDIR"] = str(folder.absolute())
                logger.warning("no folder for temporary files can be written, so %s has them", folder)
            if num_leftovers := remove_leftovers(folder):
                logger.info("removed %s of an earlier run", counted(num_leftovers, "unfinished file"))
            yield lock
    finally:
        with contextlib.suppress(OSError):
            for each in made:
                each.rmdir()


def try_to_write(folder: Path) -> None:
    """Create the folder and a temporary file in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
