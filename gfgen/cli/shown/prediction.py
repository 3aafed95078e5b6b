"""Profiles and numbers of ranks for `plan`, `simulate` and `bench`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import click

from gfgen.cluster.simulated import MAX_NODES, Nodes
from gfgen.errors import InputError, JobFileError
from gfgen.graph import Stage
from gfgen.layout import ALONE, MAX_RANKS
from gfgen.models.families.precision import Precision, is_named
from gfgen.models.families.registry import PACKAGED
from gfgen.models.geometry.checkpoint import model_name
from gfgen.runtime.control.residency import LOAD_BYTES_PER_S, Residency
from gfgen.runtime.control.sharing import MAX_JOBS
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CUDA, Devices, find_gpus, parse_memory
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import NO_PROFILE, Profile, check_profile
from gfgen.runtime.predict.profile_store import find_profile, first_fitting, open_profile, shipped_profiles
from gfgen.session.memory import GpuMemory
from gfgen.session.ranks import Ranks
from gfgen.system.machine import cpu_name
from gfgen.system.wording import counted, named, size_in_words

DEFAULT_RANKS = 4
AT_LOADING = f"at {LOAD_BYTES_PER_S / 1e9:g} GB a second, which is an estimate"


def counts_of(name: str, most: int) -> Callable[[object], tuple[int, ...]]:
    """A type of options: numbers of ranks or of nodes, such as 4, 1,2,4 or 1..8."""

    def counts(value: object) -> tuple[int, ...]:
        text, found = str(value), set[int]()
        with contextlib.suppress(ValueError):
            for part in text.split(","):
                first, dots, last = part.partition("..")
                found |= {*range(int(first), int(last or first if dots else first) + 1)} or {0}
            if 1 <= min(found) <= max(found) <= most:
                return tuple(sorted(found))
        raise click.BadParameter(f"{text!r}: give 1 to {most} {name}, such as 4, 1,2,4 or 1..{most}")

    return counts


rank_counts = counts_of("ranks", MAX_RANKS)


def nodes_of(text: object) -> Nodes:
    """Machines, such as 4x8 or 4xh200x8."""
    found = re.fullmatch(r"(\d+)x(?:(.+)x)?(\d+)", str(text))
    number, num_ranks = (int(found[1]), int(found[3])) if found else (0, 0)
    if found is None or not (1 <= number <= MAX_NODES and 1 <= num_ranks <= MAX_RANKS):
        most = f"up to {MAX_NODES} nodes with up to {MAX_RANKS} ranks"
        raise click.BadParameter(f"{text!r}: give {most}, such as 4x8 or 4xh200x8")
    return Nodes(number, num_ranks, found[2] and found[2].lower())


def profile_of_nodes(path: Path | None, jobs: Sequence[AdmittedJob], nodes: Nodes) -> Profile:
    """The profile in the file or of these devices. Raises: InputError if none can predict the jobs."""
    if path is None and nodes.device is not None:
        known = [each for each in _known(jobs) if nodes.device in each.device.lower()]
        if not known:
            devices = ", ".join(dict.fromkeys(each.device for each in _known(jobs)))
            raise InputError(
                f"--nodes: no profile of {nodes.device!r}; there are {devices}: name one with --profile"
            )
        fit = [each for each in known if each.knows(jobs)] or known
        profile = max(fit, key=lambda each: each.num_ranks)
        check_profile(profile, jobs, num_ranks=1)
        return profile
    return choose_profile(path, jobs, num_ranks=nodes.num_ranks, least=1)


def choose_profile(
    path: Path | None, jobs: Sequence[AdmittedJob], *, num_ranks: int, least: int | None = None
) -> Profile:
    """The profile in the file, this machine's, or a shipped one. Raises: InputError if none can predict."""
    known = _fitting(path, jobs)
    found = first_fitting(known, jobs, num_ranks=num_ranks)
    profile = found or max(known, key=lambda each: each.num_ranks, default=None) or open_profile(path)
    check_profile(profile, jobs, num_ranks=least or num_ranks)
    return profile


def known_here(jobs: Sequence[AdmittedJob], ranks: Ranks) -> Profile | None:
    """This machine's profile for these ranks, or a shipped one, which is of bf16, that has the models."""
    calibrate = not ranks.are_on_gpus and any(job.model_in() in PACKAGED for job in jobs)
    found = find_profile(ranks.profiled_as, calibrate=calibrate)
    own = None if found is None else found[1]
    if not ranks.are_on_gpus or ranks.precision != Precision():
        return own
    known = [*([own] if own else []), *shipped_profiles()]
    return first_fitting(known, jobs, num_ranks=ranks.num_ranks) or own


def default_ranks(path: Path | None, jobs: Sequence[AdmittedJob]) -> tuple[int, ...]:
    """The default of `gfgen run`, or fewer if no profile has as many."""
    known = _fitting(path, jobs) or [open_profile(path)]
    return (min(DEFAULT_RANKS, max(each.num_ranks for each in known)),)


def unseen_shapes(profile: Profile, jobs: Sequence[AdmittedJob]) -> str | None:
    """Say which shapes of other diffusers pipelines the profile lacks; None if it has all of them."""
    seen = {(row.model, row.shape) for row in profile.rows if row.stage is Stage.DENOISE}
    known, nominal = profile.models, [job for job in jobs if job.has_nominal_flops]
    unseen = {job.shape: None for job in nominal if (job.model_in(known), job.shape) not in seen}
    if not unseen:
        return None
    until = "The times of new shapes are guesses from their sizes until a run measures them."
    return f"Not measured yet: {named(list(unseen), 'shape')}. {until}"


def machine(profile: Profile, jobs: Sequence[AdmittedJob], *, num_ranks: int) -> str:
    """The predicted machine and the basis of the prediction, such as '4 x NVIDIA H200 (measured here)'."""
    is_shipped = profile in shipped_profiles()
    gpu = gpu_name()
    is_of_gpu = gpu is not None and is_named(profile.device, gpu)
    is_here = not is_shipped and (is_of_gpu or profile.device == cpu_name())
    known = profile.models
    models = {job.model_in(known) for job in jobs}
    found = {row.basis for row in profile.rows if row.model in models}
    notes = ["scaled from another machine, not measured"]
    if "measured" in found:
        notes = ["measured here" if is_here else "measured on another machine"]
    elif "runs" in found:
        notes = ["measured by runs here" + (", the rest scaled" if "scaled" in found else "")]
    if "core" in profile.device:
        return f"{counted(num_ranks, 'CPU rank')} ({'; '.join([profile.device, *notes])})"
    if not is_of_gpu:
        notes.append("this machine has no GPU" if gpu is None else f"this machine has {gpu}")
    return f"{num_ranks} x {profile.device} ({'; '.join(notes)})"


@cache
def gpu_name() -> str | None:
    gpus = find_gpus()
    return gpus[0].name if gpus else None


def describe(profile: Profile) -> str:
    return f"the profile of {profile.device} ({profile.date})"


def _fitting(path: Path | None, jobs: Sequence[AdmittedJob]) -> list[Profile]:
    """Without a file: this machine's profiles and shipped ones that have the models."""
    return [each for each in _known(jobs) if each.knows(jobs)] if path is None else []


def _known(jobs: Sequence[AdmittedJob]) -> list[Profile]:
    calibrate = any(job.model_in() in PACKAGED for job in jobs)
    devices = [name for name in (gpu_name(), cpu_name()) if name]
    own = [each[1] for name in devices if (each := find_profile(name, calibrate=calibrate))]
    return [*own, *shipped_profiles()]


@dataclass(frozen=True, slots=True)
class SimulatedMemory:
    jobs: Sequence[AdmittedJob]
    weights: Mapping[Path, int]
    room_bytes: int | None = None
    reads_s: Mapping[str, float] = field(default_factory=dict)  # as in `RunStart`
    streamed: Mapping[str, int] = field(default_factory=dict)
    """Bytes in main memory of models that do not fit as a whole."""
    precision: Precision = Precision()

    @classmethod
    def of(
        cls,
        jobs: Sequence[AdmittedJob],
        memory: str | None,
        *,
        source: str,
        precision: Precision = Precision(),
    ) -> SimulatedMemory:
        room_bytes = None if memory is None else parse_memory(memory)
        gpus = _memory(1, room_bytes, jobs, precision)
        weights = gpus.weights({job.checkpoint for job in jobs})
        if room_bytes is not None:
            _, too_large = gpus.on_gpus(jobs, weights)
            if too_large:
                raise JobFileError(source, tuple(too_large))
        reads_s = gpus.reads_s({job.spec.model or "": job.checkpoint for job in jobs})
        sizes = {model_name(path): gpus.placement(path).streamed_bytes for path in sorted(weights)}
        streamed = {name: size for name, size in sizes.items() if size}
        return cls(jobs, weights, room_bytes, reads_s, streamed, precision)

    def residency(self, num_ranks: int) -> Residency | None:
        if self.room_bytes is None:
            return None
        return _memory(num_ranks, self.room_bytes, self.jobs, self.precision).residency(self.jobs)

    def in_words(self, num_ranks: int, profile: Profile) -> str | None:
        """What is assumed; None with one model that fits, or if all models are known to fit."""
        said = list[str]()
        if self.streamed:
            names, taken = " and ".join(self.streamed), (self.room_bytes or 0, sum(self.streamed.values()))
            text = "{} would be streamed in {} of each GPU, from {} of main memory"
            text = text.format(names, *map(size_in_words, taken))
            said.append("; ".join([text, *slowdowns(self.jobs, profile, self.reads_s)]) + ".")
        if self.room_bytes is None and len(sizes := self.weights.values()) > 1:
            size = f" (weights of {size_in_words(sum(sizes))})" if all(sizes) else ""
            said.append(
                f"This assumes that all {len(sizes)} models fit into memory at once{size}. "
                "With --memory SIZE, models that do not fit take turns."
            )
        if self.room_bytes is not None and self.residency(num_ranks) is not None:
            size = size_in_words(self.room_bytes)
            said.append(f"Models take turns in {size} of each GPU. This assumes that they load {AT_LOADING}.")
        return " ".join(said) or None


def _memory(
    num_ranks: int, room_bytes: int | None, jobs: Sequence[AdmittedJob], precision: Precision
) -> GpuMemory:
    devices, known = Devices(CUDA, num_ranks, memory_limit=room_bytes), find_profile(gpu_name())
    profile = NO_PROFILE if known is None else known[1]
    found = GpuMemory(devices=devices, has_random_weights=True, profile=profile, precision=precision)
    found.note(jobs)
    return found


def slowdowns(jobs: Sequence[AdmittedJob], profile: Profile, reads_s: Mapping[str, float]) -> list[str]:
    """What streaming costs, by a profile: a line for each model that it has, of the job that loses most."""
    costs, found = (CostModel(profile), CostModel(profile)), dict[str, list[float]]()
    costs[1].reads_s = reads_s
    for job in jobs:
        if (name := job.spec.model or "") in reads_s and profile.knows([job]):
            kinds = [(each, each.class_of(job, num_sharers=n)) for n in (1, MAX_JOBS) for each in costs]
            times_s = [each.estimate(kind, Stage.DENOISE, ALONE).seconds for each, kind in kinds]
            found[name] = max(found.get(name, []), [times_s[1] / times_s[0], times_s[3] / times_s[2]])
    text = "a step of {} takes {:.1f} times as long as with resident weights, {:.1f} if {} jobs share it"
    return [text.format(name, *ratios, MAX_JOBS) for name, ratios in found.items()]
