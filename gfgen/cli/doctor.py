"""`gfgen doctor` and `gfgen cache`, by package metadata, because importing torch takes seconds."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from gfgen.cli.options import A_MODEL, NamedPath
from gfgen.errors import InputError, RunError
from gfgen.errors import nearest as nearest_name
from gfgen.gfc import native
from gfgen.gfc.cuda.compiler import find_nvrtc, kept, kernels_dir
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.gfc.cuda.driver import SEE_DOCTOR, Driver, driver
from gfgen.gfc.cuda.selector import table_path
from gfgen.job.spec import JobSpec, lack_of
from gfgen.models.ahead.pool import Compiling, Uses, all_calls, compiler_dirs, needed
from gfgen.models.families.registry import HUB_IDS, find_configs
from gfgen.runtime.core.admission import admit
from gfgen.runtime.core.devices import by_reach
from gfgen.runtime.ipc.settings import HOST_PLAN
from gfgen.runtime.predict.links import DEFAULT_BYTES_PER_S, kept_links
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.predict.profile_store import BY_RUNS, export_times, import_times
from gfgen.session.admission import find_weightless
from gfgen.session.ranks import AskedRanks, Ranks
from gfgen.system.home import home
from gfgen.system.machine import (
    COMPUTING,
    OWN_POLICIES,
    PATCHING,
    SERVING,
    VIDEOS,
    available_bytes,
    cache_dir,
    cpu_quota,
    free_bytes,
    memory_limit,
    version_of,
)
from gfgen.system.wording import counted, size_in_words

_CUDNN = "nvidia-cudnn-frontend"
_INSTALL = "'pip install gfgen' installs it"
_MIN_CUDA = (12, 4)
"""The first version with all driver calls that the collectives need."""
_GIB = 1 << 30


@click.command()
def doctor() -> int:
    """Show what gfgen finds on this machine, what is missing, and how to install it.

    The exit code is 1 if gfgen cannot run at all.
    """
    missing: list[str] = []
    for section, lines in (
        ("machine", _machine()),
        ("packages", _packages(missing)),
        ("GPUs", _gpus(missing)),
        ("models", _models(missing)),
        ("caches", _caches()),
    ):
        click.echo(f"{section}")
        for line in lines:
            click.echo(f"  {line}")
    for line in missing:
        click.echo(f"missing: {line}")
    if not missing:
        click.echo("nothing is missing")
    return int(any(line.startswith("! ") for line in missing))


def _machine() -> Iterator[str]:
    yield f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield f"{len(os.sched_getaffinity(0))} CPU cores, {pages / _GIB:.0f} GiB of memory"
    quota, limit = cpu_quota(), memory_limit()
    limits = [] if quota is None else [f"{quota:.3g} cores"]
    limits += [] if limit is None else [f"{size_in_words(limit)} of memory"]
    if limits:
        yield f"limits of this container or job: {', '.join(limits)}"


def _packages(missing: list[str]) -> Iterator[str]:
    for name in COMPUTING:
        if number := version_of(name):
            yield f"{name} {number}"
        else:
            missing.append(f"! {name} ({_INSTALL})")
    purposes = {
        "videos": VIDEOS,
        "LoRAs": PATCHING,
        "policies of programs": OWN_POLICIES,
        "gfgen serve": SERVING,
    }
    for purpose, names in purposes.items():
        missing += [f"{name}, for {purpose} ({_INSTALL})" for name in names if not version_of(name)]
    if (lack := lack_of("mp4")) and version_of("imageio-ffmpeg"):
        missing.append(f"MP4 for videos ({lack})")
    specs = [each for name in ("torch", "diffusers", "transformers") if (each := find_spec(name))]
    if bare := [os.path.dirname(x.origin or "") for x in specs if not os.path.exists(x.cached or "")]:
        call = f"python -m compileall -q -j 0 {' '.join(bare)}"  # uv leaves them so, and runs may not write
        missing.append(f"bytecode, without which each start takes seconds longer ('{call}' makes it)")
    try:
        native.library()
        yield "native CPU collectives: ready"
    except RunError as error:
        missing.append(f"! native CPU collectives ({error})")


def _gpus(missing: list[str]) -> Iterator[str]:
    try:
        cuda = driver()
    except RunError as error:
        yield f"none ({str(error).removesuffix(SEE_DOCTOR)}): jobs run on CPU ranks"
        return
    yield f"driver for CUDA {'.'.join(map(str, cuda.version))}"
    if cuda.version < _MIN_CUDA:
        missing.append("an NVIDIA driver for CUDA 12.4 or newer, for collectives between GPUs")
    for device in range(cuda.num_devices):
        memory = cuda.memory_bytes(device) / _GIB
        yield f"{device}: {cuda.name(device)}, {memory:.0f} GiB, {cuda.architecture(device)}"
    yield from _links(cuda, missing)
    nvrtc = find_nvrtc()
    if nvrtc is None:
        missing.append("NVRTC, which compiles the collectives (it comes with a CUDA build of PyTorch)")
    else:
        yield f"kernel compiler: {nvrtc.name}"
    if number := version_of(_CUDNN):
        yield f"attention for prompts of any length: {_CUDNN} {number}"
    else:
        missing.append(f"{_CUDNN}, to share CUDA graphs between prompts of any length ({_INSTALL})")
    if "+cpu" in version_of("torch"):
        missing.append("a CUDA build of PyTorch: the installed one supports CPUs only (https://pytorch.org)")


def _models(missing: list[str], ranks: Ranks | None = None) -> Iterator[str]:
    """What fits on GPUs with a job of each model's defaults, and what streaming costs."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = "all of it" if locked == resource.RLIM_INFINITY else size_in_words(locked)
    available = size_in_words(available_bytes() or 0)
    yield f"main memory: {available} available; a program may pin {pinned} (ulimit -l)"
    try:
        ranks = ranks or AskedRanks(random_weights=True).here()
    except InputError as error:  # a GPU that is too old
        missing.append(f"! {error}")
        return
    for name in HUB_IDS if ranks.are_on_gpus else ():
        memory, spec = ranks.memory, JobSpec(id=name, prompt=name, model=name)
        jobs, _ = admit([spec], default_model=name, find_model=find_weightless)  # none if it needs a picture
        try:
            fitting, problems = memory.fit(jobs)
            yield from (f"{name}, {job.spec.size_text}: {memory.in_words(job.checkpoint)}" for job in fitting)
            yield from (f"{name}: {each}" for each in problems)
        except InputError as error:
            yield str(error)


def _links(cuda: Driver, missing: list[str]) -> Iterator[str]:
    devices = range(cuda.num_devices)
    if by_reach(cuda.num_devices, cuda.can_access).over_host:
        across = f"go through main memory, of which {arena_bytes(HOST_PLAN) >> 20} MiB a GPU are pinned"
    else:
        across = "are not possible"
    for device in devices:
        peers = [peer for peer in devices if peer != device]
        reached = [peer for peer in peers if cuda.can_access(device, peer)]
        apart = [str(peer) for peer in peers if peer not in reached]
        if apart:
            missing.append(f"peer access from GPU {device} to {', '.join(apart)}: steps across them {across}")
        fast = [str(peer) for peer in reached if cuda.has_nvlink(device, peer)]
        slow = [str(peer) for peer in reached if str(peer) not in fast]
        if fast:
            yield f"{device} reaches {', '.join(fast)} over NVLink"
        if slow:
            yield f"{device} reaches {', '.join(slow)} over PCIe"
    if cuda.num_devices > 1:
        yield from _link_table(kept_links(cuda.name(0)))


def _link_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        assumed = f"{DEFAULT_BYTES_PER_S / 1e9:g} GB/s is assumed through main memory"
        yield f"links: not measured ('gfgen bench gfc'); {assumed}"
    for transport, where in (("peer", "peer memory"), ("host", "main memory")):
        pairs = {(row["from"], row["to"]): row for row in rows if row["transport"] == transport}
        devices = sorted({device for pair in pairs for device in pair})
        if pairs:
            yield f"links over {where}, GB/s each way (us of 4 KB), to GPU {', '.join(map(str, devices))}"
        for one in devices:
            found = [pairs.get((min(one, two), max(one, two))) for two in devices]
            cells = [f"{row['gb_per_s']:.1f} ({row['us']:.1f})" if row else "-" for row in found]
            yield f"  {one}: {'  '.join(f'{cell:>13}' for cell in cells)}"


def _caches() -> Iterator[str]:
    yield f"compiled exchanges: {len(kept())} in {_short(kernels_dir())}"
    if find_spec("triton") is not None and (architectures := _architectures()):
        with Compiling(all_calls(), architectures, compiles=False) as counting:
            report = counting.wait()
        ready = f"{report.number('present')} of {report.counts.total()} are compiled"
        yield f"kernels for {', '.join(architectures)}: {ready} (`gfgen cache fill` compiles the others)"
    tables = [path.name for path in own_caches()["tables"].paths]
    example = _short(table_path("name"))
    yield f"tuned tables: {', '.join(tables) or f'none (`gfgen bench gfc --tune` writes {example})'}"
    hub = hub_dir()
    free = free_bytes(hub) / _GIB
    yield f"models: {_short(hub)}{'' if hub.is_dir() else ' (does not exist yet)'}, {free:.0f} GiB free"


def _architectures() -> list[str]:
    try:
        cuda = driver()
    except RunError:
        return []
    return sorted({cuda.architecture(device) for device in range(cuda.num_devices)})


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def cache(ctx: click.Context, *, as_json: bool) -> None:
    """List what gfgen keeps between runs, models from the hub, and the sizes of both."""
    if ctx.invoked_subcommand is not None:
        return
    own = own_caches().values()
    models = {name: size_of(path) for name, path in hub_models()}
    compilers = {name: size_of(path) for name, path in other_compiler_dirs().items()}
    if as_json:
        click.echo(json.dumps({
            "folder": str(cache_dir()),
            "caches": [_facts(each) for each in own],
            "hub": {"folder": str(hub_dir()), "size_bytes": models},
            "compilers": [{"name": name, "folder": str(path), "size_bytes": compilers[name]}
                          for name, path in other_compiler_dirs().items()],
        }))  # fmt: skip
        return
    click.echo(f"of gfgen, in {_short(cache_dir())} ('gfgen cache clear' deletes them)")
    for each in own:
        click.echo(f"  {each.name:<12}{size_in_words(each.size_bytes):>11}  {each.about}")
    click.echo(f"models from the hub, in {_short(hub_dir())} ('hf cache rm model/ID' deletes one)")
    for name, size in models.items():
        click.echo(f"  {size_in_words(size):>11}  {name}")
    click.echo("of PyTorch's compilers, also for other programs")
    for name, path in other_compiler_dirs().items():
        click.echo(f"  {name:<12}{size_in_words(compilers[name]):>11}  {_short(path)}")


@cache.command()
@click.argument("models", nargs=-1, type=A_MODEL)
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    metavar="sm_90",
    help="Compile for such GPUs; may be repeated. By default for those of this machine.",
)
def fill(models: tuple[str, ...], *, architectures: tuple[str, ...]) -> int:
    """Compile the kernels of MODELS for GPUs, so that no run has to; by default of all that gfgen knows.

    This needs no GPU. The exit code is 1 if a kernel cannot be compiled.
    """
    if find_spec("triton") is None:
        raise RunError("Triton is missing: install a CUDA build of PyTorch, which brings it")
    for each in architectures:
        if not re.fullmatch(r"sm_\d{2,3}", each):
            raise InputError(f"--arch {each}: a name like sm_90 is accepted")
    if not (found := list(dict.fromkeys(architectures)) or _architectures()):
        raise InputError("there is no GPU here: name the architecture, as with --arch sm_90")
    calls = needed({find_configs(name): Uses() for name in models}) if models else all_calls()
    with Compiling(calls, found) as compiling:
        report = compiling.wait()
    for kind in dict.fromkeys(kind for kind, _ in report.counts):
        numbers = (f"{report.counts[kind, each]} {each}" for each in ("compiled", "present", "missing"))
        click.echo(f"{kind:<12}{', '.join(numbers)}")
    click.echo(f"for {', '.join(found)}, in {report.duration_s:.1f} s")
    return int(report.number("missing") > 0 or not report.counts)


@cache.command()
@click.argument("names", nargs=-1)
@click.option("--yes", is_flag=True, help="Delete without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print what was deleted as JSON; needs --yes.")
def clear(names: tuple[str, ...], *, yes: bool, as_json: bool) -> None:
    """Delete gfgen's caches: all of them, or NAMES. Nothing else is ever deleted.

    Do this while no run is active. gfgen makes kernels and built-in models again when it needs them.
    """
    known = own_caches()
    for name in names:
        if name not in known:
            hint = f"did you mean {near}? " if (near := nearest_name(name, known)) else ""
            raise InputError(f"{name}: no cache of gfgen; {hint}there are {', '.join(known)}")
    chosen = [known[name] for name in dict.fromkeys(names or known) if known[name].paths]
    facts = [_facts(each) for each in chosen]
    total = sum(fact["size_bytes"] for fact in facts)
    what = f"{', '.join(each.name for each in chosen)} ({size_in_words(total)}) in {_short(cache_dir())}"
    if chosen and not yes:
        if as_json or not sys.stdin.isatty():
            raise InputError("gfgen cache clear asks before it deletes; without a terminal, give --yes")
        click.confirm(f"Delete {what}?", abort=True)
    for each in chosen:
        each.clear()
    if as_json:
        click.echo(json.dumps({"deleted": facts, "size_bytes": total}))
    else:
        click.echo(f"deleted {what}" if chosen else "nothing to delete")


@cache.command("export")
@click.argument("file", type=NamedPath(dir_okay=False))
def export_command(file: Path) -> None:
    """Write the task times that were measured here to FILE, for other machines with such GPUs.

    'gfgen cache import FILE' takes them there.
    """
    for profile in export_times(file):
        click.echo(f"wrote {_words(profile)}")


@cache.command("import")
@click.argument("file", type=NamedPath(exists=True, dir_okay=False))
def import_command(file: Path) -> None:
    """Take the task times of FILE, which 'gfgen cache export' wrote, unless those here are as new."""
    for profile, reason in import_times(file):
        click.echo(f"took {_words(profile)}" if reason is None else f"left {_words(profile)}: {reason}")


def _words(profile: Profile) -> str:
    source = "runs" if profile.source == BY_RUNS else "gfgen profile"
    return f"{counted(len(profile.rows), 'time')} on {profile.device}, of {source}, {profile.date}"


def _facts(cache: Cache) -> dict[str, Any]:
    return {"name": cache.name, "about": cache.about, "paths": [str(path) for path in cache.paths],
            "size_bytes": cache.size_bytes}  # fmt: skip


def _short(path: Path) -> str:
    own = home()  # in a container perhaps the root folder
    return f"~/{path.relative_to(own)}" if own.name and path.is_relative_to(own) else str(path)


_PATTERNS: Mapping[str, tuple[str, Sequence[str]]] = {
    "profiles": ("measured task times", ("profiles/*.json", "profiles/.*.part")),
    "kernels": ("compiled exchanges between GPUs", ("kernels/*.cubin", "kernels/tmp*", "kernels/*.lock")),
    "inductor": ("compiled blocks (`--compile`)", ("inductor",)),
    "tables": ("choices of `gfgen bench gfc --tune`", ("gfc-*.json",)),
    "tiny-models": ("built-in models for tests", ("tiny-*",)),
    "single-files": ("links to files of weights", ("single-files",)),
    "calls": ("which calls pipelines refuse, and what they read of texts", ("calls/*.json", "calls/.*.part")),
    "previews": ("colours for previews", ("previews/*.json",)),
}


@dataclass(frozen=True, slots=True)
class Cache:
    name: str
    about: str
    paths: Sequence[Path]
    """Its files, and folders that belong to it as a whole."""

    @property
    def size_bytes(self) -> int:
        return sum(map(size_of, self.paths))

    def clear(self) -> None:
        for path in self.paths:
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise RunError(f"{path}: cannot be deleted ({error.strerror})") from None


def own_caches() -> dict[str, Cache]:
    """gfgen's own, by name, also those that are empty."""
    folder = cache_dir()
    return {
        name: Cache(name, about, sorted(path for pattern in patterns for path in folder.glob(pattern)))
        for name, (about, patterns) in _PATTERNS.items()
    }


def hub_dir() -> Path:
    """Where models from the Hugging Face hub are, as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def hub_models() -> Iterator[tuple[str, Path]]:
    for path in sorted(hub_dir().glob("models--*")):
        yield path.name.removeprefix("models--").replace("--", "/"), path


def other_compiler_dirs() -> dict[str, Path]:
    """Caches of PyTorch's compilers that are not in gfgen's folder."""
    folder = cache_dir()
    return {name: path for name, path in compiler_dirs().items() if not path.is_relative_to(folder)}


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; links count as themselves."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if path.is_symlink() or path.exists() else 0
    return sum(size_of(Path(folder, name)) for folder, _, names in os.walk(path) for name in names)
