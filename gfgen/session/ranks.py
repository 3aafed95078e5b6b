"""The ranks of a run: their options, their admission, and their start."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfgen.errors import InputError, JobFileError
from gfgen.job.spec import JobSpec
from gfgen.models.families.precision import AUTO, Precision
from gfgen.models.fast.kernels import KernelChoice
from gfgen.models.geometry.checkpoint import model_name
from gfgen.models.geometry.weight_files import weights_id
from gfgen.models.geometry.weights import Placement
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import (
    CPU,
    DEFAULT_CPU_RANKS,
    Devices,
    choose_devices,
    parse_memory,
    show_only,
)
from gfgen.runtime.ipc.settings import RankSettings
from gfgen.runtime.predict.job_bounds import JobBounds, StepTimes
from gfgen.runtime.predict.profile_file import NO_PROFILE
from gfgen.runtime.predict.profile_store import find_profile
from gfgen.session.admission import Admission, Models
from gfgen.session.memory import GpuMemory, HostMemory
from gfgen.system import machine
from gfgen.system.machine import COMPUTING, check_packages, cpu_name, key_versions
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted

if TYPE_CHECKING:
    from gfgen.models.ahead.pool import Compiling, Uses
    from gfgen.runtime.processes.pool import WorkerPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    devices: Devices
    has_random_weights: bool = False
    vae_dtype: str = "auto"
    has_graphs: bool = True
    """CUDA graphs, on GPUs."""
    trusts_code: bool = False
    compile: str = "auto"
    """Whether blocks of general pipelines are compiled (kernels.py): auto, on or off."""
    precision: Precision = Precision()

    @property
    def num_ranks(self) -> int:
        return self.devices.num_ranks

    @property
    def are_on_gpus(self) -> bool:
        return self.devices.kind != CPU

    @property
    def gpu_name(self) -> str | None:
        """None for CPU ranks."""
        return self.devices.gpus[0].name if self.devices.gpus else None

    @property
    def profiled_as(self) -> str:
        """The name of the device in profiles."""
        return self.precision.named(self.device_name)

    @property
    def device_name(self) -> str:
        return self.gpu_name or cpu_name()

    @property
    def description(self) -> str:
        """Such as '4 x NVIDIA H200'."""
        if self.devices.gpus:
            ranks = f"{self.num_ranks} ranks on " if self.devices.ranks_per_gpu > 1 else ""
            return f"{ranks}{len(self.devices.gpus)} x {self.device_name}"
        return f"{counted(self.num_ranks, 'CPU rank')} on {self.device_name}"

    @property
    def words(self) -> tuple[str, ...]:
        """The command line options, except for the device and the number of ranks."""
        words = ["--random-weights"] if self.has_random_weights else []
        shared = self.devices.ranks_per_gpu
        words += ["--ranks-per-gpu", str(shared)] if shared > 1 else []
        words += ["--transport", self.devices.transport] if self.devices.transport != "auto" else []
        rate = self.devices.link_bytes_per_s
        words += ["--link", f"{rate / 1e9:g}GB/s"] if rate else []
        words += [] if self.vae_dtype == "auto" else ["--vae-dtype", self.vae_dtype]
        for option, texts in self.precision.by_option.items():
            words += [word for text in texts for word in (f"--{option}", text)]
        words += ["--trust-remote-code"] if self.trusts_code else []
        words += [] if self.compile == "auto" else ["--compile", self.compile]
        return (*words, *([] if self.has_graphs else ["--no-graphs"]))

    @property
    def settings(self) -> RankSettings:
        devices = self.devices
        return RankSettings(
            num_ranks=self.num_ranks,
            device=devices.kind,
            num_gpus=len(devices.gpus),
            islands=devices.islands,
            near=devices.near if devices.over_host else None,
            link_bytes_per_s=(devices.link_bytes_per_s or 0.0) if devices.over_host else 0.0,
            memory_limit=devices.rank_limit,
            has_random_weights=self.has_random_weights,
            vae_dtype=self.vae_dtype,
            precision=self.precision,
            has_graphs=self.has_graphs,
            trusts_code=self.trusts_code,
        )

    def step_times(self) -> StepTimes:
        """How long steps take at least, by this machine's profile."""
        found = find_profile(self.profiled_as)
        profile = None if found is None else found[1]
        return StepTimes(profile, kind=self.devices.kind, num_ranks=self.num_ranks)

    def admission(self, default_model: str, *, bounds: JobBounds | None = None) -> Admission:
        has_bounded_steps = bounds is not None and bounds.step_s is not None
        return Admission(
            models=Models(
                default=default_model,
                has_random_weights=self.has_random_weights,
                trusts_code=self.trusts_code,
                precision=self.precision,
            ),
            memory=self.memory,
            bounds=bounds,
            step_times=self.step_times() if has_bounded_steps else None,
        )

    @property
    def memory(self) -> HostMemory:
        if not self.are_on_gpus:
            return HostMemory(devices=self.devices, has_random_weights=self.has_random_weights)
        found = find_profile(self.profiled_as)
        return GpuMemory(
            profile=NO_PROFILE if found is None else found[1],
            devices=self.devices,
            has_random_weights=self.has_random_weights,
            vae_dtype=self.vae_dtype,
            precision=self.precision,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRanks:
    """The ranks that options ask for, on whichever machine."""

    ranks: int | None = None
    device: str = "auto"
    ranks_per_gpu: int = 1
    transport: str = "auto"
    link: str | None = None
    memory: str | None = None
    random_weights: bool = False
    vae_dtype: str = "auto"
    graphs: bool = True
    trust_remote_code: bool = False
    compile: str = "auto"
    precision: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()

    def here(self, *, cpu_ranks: int = DEFAULT_CPU_RANKS, gpus: str | None = None) -> Ranks:
        """These ranks on this machine, on no other GPUs than `gpus`, or `cpu_ranks` at most.

        Raises: InputError if it cannot have them.
        """
        if gpus is not None:
            show_only(gpus)
        limit = None if self.memory is None else parse_memory(self.memory)
        devices = choose_devices(
            self.device,
            self.ranks,
            memory_limit=limit,
            ranks_per_gpu=self.ranks_per_gpu,
            transport=self.transport,
            link=self.link,
        )
        if devices.kind == CPU:
            if gpus is not None:
                why = "no usable GPU ('gfgen doctor' says why); leave it out for the CPU"
                raise InputError(f"--gpus {gpus}: {why}")
            devices = replace(devices, num_ranks=self.ranks or machine.fitting_ranks(cpu_ranks))
        elif gpus is not None and self.ranks is None and len(devices.gpus) <= gpus.count(","):
            logger.warning("--gpus %s: only %d of them can be used", gpus, len(devices.gpus))
        capability = min((gpu.capability for gpu in devices.gpus), default=None)
        device = devices.gpus[0].name if devices.gpus else "a CPU"
        precision = Precision(self.precision, self.attention).checked(capability=capability, device=device)
        return Ranks(
            devices,
            self.random_weights,
            self.vae_dtype,
            self.graphs,
            self.trust_remote_code,
            self.compile,
            precision,
        )


def admitted_on(
    ranks: Ranks, specs: Sequence[JobSpec], *, default_model: str, source: str
) -> Sequence[AdmittedJob]:
    """Admit jobs for ranks with all models. Raises: JobFileError; InputError if the models do not fit."""
    admission = ranks.admission(default_model)
    jobs, problems = admission(specs)
    admission.memory.check_together({job.checkpoint for job in jobs})
    if problems:
        raise JobFileError(source, tuple(problems))
    return jobs


@contextlib.contextmanager
def ready_pool(
    checkpoints: Collection[Path],
    ranks: Ranks,
    signals: SignalPipe,
    *,
    worker_main: str | None = None,
    are_all_needed: bool = False,
    kernels: KernelChoice = "own",
    patch_copies_on_host: Collection[Path] = (),
    placements: Mapping[str, Placement] | None = None,
    kept: Mapping[Path, int] | None = None,
    keep_fds: Sequence[int] = (),
    jobs: Sequence[AdmittedJob] = (),
) -> Iterator[WorkerPool]:
    """Start workers with these models, without ranks that cannot start unless all are needed.

    `worker_main` replaces the workers' program. Kernels are for `jobs`, or for whatever the models can do.
    """
    from gfgen.runtime.processes.pool import WorkerPool
    from gfgen.runtime.processes.starting import wait_ready

    machine.check_limits(ranks.num_ranks)
    if not ranks.are_on_gpus:
        machine.check_code_memory()
    if worker_main is None:
        check_packages(COMPUTING)
    logger.info(
        "starting %s (%s) with %s",
        counted(ranks.num_ranks, "rank"),
        ranks.devices.kind,
        ", ".join(sorted(model_name(path) for path in checkpoints)),
    )
    if ranks.are_on_gpus:
        from gfgen.gfc.cuda import compiler

        if not compiler.kept():
            logger.info("compiling kernels first; this takes about 20 s, once per machine")
    if len(near := ranks.devices.near) > 1 and not (ranks.devices.over_host and len(near) == ranks.num_ranks):
        way = "through main memory" if ranks.devices.over_host else "not at all"
        logger.info("ranks with peer access: %s; others exchange %s", "; ".join(map(str, near)), way)
    settings = replace(
        ranks.settings,
        kernels=kernels,
        patch_copies_on_host=tuple(map(str, patch_copies_on_host)),
        placements=placements or {},
        kept={str(path): size for path, size in (kept or {}).items()},
        are_all_needed=are_all_needed,
    )
    began_s = time.monotonic()
    compiling = compile_ahead(ranks, checkpoints, jobs) if worker_main is None else contextlib.nullcontext()
    with compiling as ahead:
        with signals.interrupting("the models were loading; nothing was started"):
            started = WorkerPool(settings, sorted(checkpoints), worker_main=worker_main, keep_fds=keep_fds)
        with started as pool:
            wait_ready(pool, signals)
            ranks_s = time.monotonic() - began_s
            if ahead is not None:
                with signals.interrupting("kernels were being compiled; nothing was started"):
                    ahead.wait()
            _tell_times(pool, ranks_s=ranks_s, total_s=time.monotonic() - began_s)
            yield pool


def _tell_times(pool: WorkerPool, *, ranks_s: float, total_s: float) -> None:
    """Log where the time of a start went: until the last rank was ready, and in all."""
    rank_s, weights_s = max(((each.startup_s, each.weights_s) for each in pool.living), default=(0.0, 0.0))
    parts = (ranks_s - rank_s, max(0.0, rank_s - weights_s), weights_s, total_s - ranks_s)
    text = "ready after %.1f s: imports %.1f, device %.1f, weights %.1f, other kernels %.1f"
    logger.info(text, total_s, *parts)


def compile_ahead(
    ranks: Ranks, checkpoints: Collection[Path], jobs: Sequence[AdmittedJob]
) -> contextlib.AbstractContextManager[Compiling | None]:
    """Start to compile the kernels that ranks on GPUs will need; None for CPU ranks."""
    architectures = sorted({gpu.architecture for gpu in ranks.devices.gpus})
    if not architectures or find_spec("triton") is None:
        return contextlib.nullcontext()
    from gfgen.models.ahead.pool import Compiling, needed

    of_jobs: dict[Path, list[AdmittedJob]] = {path: [] for path in checkpoints}
    for job in jobs:
        of_jobs.setdefault(job.checkpoint, []).append(job)
    calls = needed({path: _uses(ranks, path, own) for path, own in of_jobs.items()})
    return Compiling(calls, architectures)


def _uses(ranks: Ranks, checkpoint: Path, jobs: Sequence[AdmittedJob]) -> Uses:
    """What these jobs do with their model, or everything that it can do in this run."""
    from gfgen.models.ahead.pool import Uses

    words = ranks.precision.of(checkpoint)
    uses = Uses(layers=(words["precision"],), attention=(words["attention"],), vae_dtypes=(ranks.vae_dtype,))
    if not jobs:
        return uses
    specs = [job.spec for job in jobs]
    return replace(
        uses,
        outputs={"video" if (spec.frames or 1) > 1 else "picture" for spec in specs},
        has_images=any(spec.image is not None for spec in specs),
        has_patches=any(spec.patches for spec in specs),
    )


def made_with(ranks: Ranks, checkpoint: Path, *, kernels: KernelChoice = "own") -> dict[str, Any]:
    """Plain values that are equal where equal jobs give equal files."""
    return {
        "versions": dict(key_versions()),
        "weights": "random" if ranks.has_random_weights else weights_id(checkpoint),
        "device": "cpu" if ranks.devices.kind == CPU else ranks.device_name,
        "vae_dtype": ranks.vae_dtype,
        **({} if kernels == "own" else {"kernels": kernels}),
        **{option: word for option, word in ranks.precision.of(checkpoint).items() if word != AUTO},
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    old, new = before.get("versions") or {}, now["versions"]
    found = [
        f"{name} {old[name]} (now {new.get(name, 'none')})" for name in old if old[name] != new.get(name)
    ]
    before, now = ({"precision": AUTO, "attention": AUTO, **each} for each in (before, now))
    return found + [
        f"{name} {before[name]} (now {now[name]})"
        for name in ("weights", "device", "vae_dtype", "precision", "attention")
        if name in before and before[name] != now[name]
    ]
