"""Choose the devices of a run, GPUs if a child process finds any: the parent never touches CUDA."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from gfgen.errors import InputError
from gfgen.layout import MAX_RANKS
from gfgen.system.lifeline import output_of

logger = logging.getLogger(__name__)

CPU, CUDA = "cpu", "cuda"
DEVICES = ("auto", CPU, CUDA)
TRANSPORTS = ("auto", "peer", "host")
DEFAULT_CPU_RANKS = 4

_SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia/version")
"""One of these exists wherever the driver can find a GPU; /dev/dxg on WSL."""
_PROBE_TIMEOUT_S = 60.0
FIRST_CAPABILITY = 8
"""The major number of the first GPUs that compute in bf16, and that Triton compiles for."""
MIN_MEMORY_BYTES = 10**6
"""A smaller limit probably lacks its unit."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    peers: frozenset[int] | None = None
    """GPUs whose memory it reaches, by the driver's numbers; None for all."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability, which says what the GPU can compute with."""

    @property
    def architecture(self) -> str:
        """Such as sm_90, as compilers call it."""
        return "sm_{}{}".format(*self.capability)


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a run's ranks; rank r uses GPU r modulo the number of GPUs."""

    kind: str
    num_ranks: int
    gpus: tuple[Gpu, ...] = ()
    memory_limit: int | None = None
    """The most bytes that a run may use of each GPU, or of main memory for CPU ranks."""
    ranks_per_gpu: int = 1
    """How many ranks share each GPU; the last GPUs may have fewer."""
    transport: str = "auto"
    """Ranks that do not reach each other's memory exchange through main memory, or with "peer" not at all.
    With "host" all exchange through main memory."""
    link_bytes_per_s: float | None = None
    """The most that a rank may send through main memory, for tests."""

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of the smallest GPU for each of its ranks, or for all CPU ranks; None: no limit."""
        limits = [] if self.memory_limit is None else [self.memory_limit]
        found = min([*limits, *(gpu.memory_bytes for gpu in self.gpus)], default=None)
        return None if found is None else found // self.ranks_per_gpu

    @property
    def rank_limit(self) -> int | None:
        """Bytes of its GPU that a rank may use; None for all."""
        return self.memory_limit if self.ranks_per_gpu == 1 else self.memory_bytes

    @property
    def where(self) -> str:
        """Describes `memory_bytes` on GPUs in words."""
        shared = self.ranks_per_gpu > 1
        return f"for each of {self.ranks_per_gpu} ranks that share a GPU" if shared else "on each GPU"

    @property
    def over_host(self) -> bool:
        """Whether ranks exchange through main memory, where steps can cross it."""
        return self.transport == "host" or len(self.islands) < len(self.near)

    @property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that exchange with each other. A layout stays within one."""
        near = self.near  # of other sizes than the largest stay alone
        return near if self.transport == "peer" else sets_of(range(self.num_ranks), near, MAX_RANKS)

    @property
    def near(self) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that exchange through each other's memory."""
        sets: list[list[int]] = []
        for rank in range(self.num_ranks):
            reached = (each for each in sets if all(self._reach(rank, other) for other in each))
            found = next(reached, None)
            if found is None:
                sets.append([rank])
            else:
                found.append(rank)
        return tuple(map(tuple, sets))

    def _reach(self, rank: int, other: int) -> bool:
        """Whether two ranks reach each other's memory. CPU ranks and ranks on one GPU do."""
        if self.transport == "host":
            return False
        if not self.gpus:
            return True
        one, two = rank % len(self.gpus), other % len(self.gpus)
        pairs = () if one == two else ((one, two), (two, one))
        return all(self.gpus[a].peers is None or b in (self.gpus[a].peers or ()) for a, b in pairs)


def by_reach(num_gpus: int, can_access: Callable[[int, int], bool]) -> Devices:
    """These GPUs as far as links count."""
    reached = [frozenset(b for b in range(num_gpus) if a != b and can_access(a, b)) for a in range(num_gpus)]
    return Devices(CUDA, num_gpus, tuple([Gpu("", 0, each) for each in reached]))


def sets_of(
    ranks: Sequence[int], near: Sequence[Sequence[int]], degree: int = 1
) -> tuple[tuple[int, ...], ...]:
    """These ranks, cut into sets that a layout of `degree` can be taken from, its ranks in a row.

    near: sets of ranks that reach each other's memory. For a layout of more ranks whole ones are together.
    """
    size = max(map(len, near))
    found = [tuple([rank for rank in ranks if rank in each]) for each in near]
    together = tuple([rank for each in found if len(each) == size for rank in each])
    if size == 1 or (degree > size and len(together) > size):
        return (together, *[each for each in found if 0 < len(each) < size])
    return tuple(filter(None, found))


_NO_LINK = "--link limits exchanges through main memory only (docs/install.md)"


def choose_devices(
    kind: str = "auto",
    num_ranks: int | None = None,
    *,
    memory_limit: int | None = None,
    ranks_per_gpu: int = 1,
    transport: str = "auto",
    link: str | None = None,
    find: Callable[[], Sequence[Gpu]] | None = None,
) -> Devices:
    """The devices of these options, each of them optional. Raises: InputError if there are fewer GPUs."""
    find = find or (lambda: find_gpus(must_ask=kind == CUDA))
    rate = None if link is None else float(parse_memory(link.removesuffix("/s"), option="--link"))
    gpus: Sequence[Gpu] = () if kind == CPU else find()
    if not gpus:
        if kind == CUDA:
            raise InputError("--device cuda: no usable GPU ('gfgen doctor' says why); use cpu")
        acts = transport == "auto" or (transport == "host" and link is not None)
        unused = ["--ranks-per-gpu"] * (ranks_per_gpu > 1) + [f"--transport {transport}"] * (not acts)
        for option in unused:
            logger.warning("%s has no effect on CPU ranks", option)
        count = num_ranks or DEFAULT_CPU_RANKS
        if link is not None and transport != "host":
            logger.warning(_NO_LINK)
        return Devices(CPU, count, memory_limit=memory_limit, transport=transport, link_bytes_per_s=rate)
    most = min(ranks_per_gpu * len(gpus), MAX_RANKS)
    count = num_ranks or most
    if count > most:
        shared = f" with {ranks_per_gpu} ranks each" if ranks_per_gpu > 1 else ""
        raise InputError(
            f"--ranks {count}: there are {len(gpus)} GPUs{shared}; {most} at most, or --device cpu"
        )
    if ranks_per_gpu > 1:
        logger.warning("%d ranks share each GPU and take turns: slower than one rank per GPU", ranks_per_gpu)
    used = gpus[: -(-count // ranks_per_gpu)]
    for gpu in used:
        if 0 < gpu.capability[0] < FIRST_CAPABILITY:
            needed = f"bf16 needs compute capability {FIRST_CAPABILITY}.0, which is not {gpu.architecture}"
            raise InputError(f"{gpu.name}: {needed}; leave such GPUs out with --gpus, or use --device cpu")
    devices = Devices(CUDA, count, tuple(used), memory_limit, ranks_per_gpu, transport, rate)
    if link is not None and not devices.over_host:
        logger.warning(_NO_LINK)
    return devices


def parse_memory(text: str, *, option: str = "--memory") -> int:
    """Bytes of a size like "40GB" or "500 MB". Raises: InputError if the text is not a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)B?", text.strip())
    size = 0 if found is None else int(float(found[1]) * _UNITS[found[2].upper()])
    if size < MIN_MEMORY_BYTES:
        raise InputError(f"{option} {text!r}: a size like 40GB or 500MB is accepted")
    return size


def find_gpus(*, must_ask: bool = False) -> tuple[Gpu, ...]:
    """The GPUs that torch can use; `must_ask`: ask the driver even if the system shows no sign of one."""
    if not must_ask and not any(os.path.exists(sign) for sign in _SIGNS):
        return ()
    if _is_torch_for_cpus():
        there = "there is a GPU, but " if any(os.path.exists(sign) for sign in _SIGNS) else ""
        logger.warning("%sthis PyTorch is built for CPUs only: see 'gfgen doctor'", there)
        return ()
    try:
        found = json.loads(output_of("gfgen.gfc.cuda.driver", timeout_s=_PROBE_TIMEOUT_S))
    except ChildProcessError as error:
        logger.warning("GPUs cannot be used: %s", error)
        return ()
    return tuple(Gpu(name, size, frozenset(peers), tuple(version)) for name, size, peers, version in found)


def _is_torch_for_cpus() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def show_only(gpus: str) -> None:
    """Hide the other GPUs from this process and its children; numbers are those of `gfgen doctor`."""
    shown = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    chosen = [part.strip() for part in gpus.split(",")]
    if len(set(chosen)) < len(chosen) or not all(part.isascii() and part.isdigit() for part in chosen):
        raise InputError(f"--gpus {gpus}: numbers of GPUs are accepted, such as 0,2")
    if shown and any(int(part) >= len(shown) for part in chosen):
        raise InputError(f"--gpus {gpus}: CUDA_VISIBLE_DEVICES shows {len(shown)} GPUs, from 0")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown[int(part)] if shown else part for part in chosen)
