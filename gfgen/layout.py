"""Execution layouts: which ranks run a task, and how they share the work.

A layout is an ordered tuple of ranks with the degrees of each kind of parallelism. The order
matters: a rank's slot (its position) decides which shard it holds. Slots count the sequence
dimension fastest, so the ranks of one CFG half are neighbours:

    slot = ((cfg_idx * torus + torus_idx) * ring + ring_idx) * ulysses + ulysses_idx
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Any

from gfgen.errors import LayoutError

MAX_RANKS = 8
"""Ranks of one machine; the descriptor of a group has space for this many."""

Degrees = tuple[int, ...]
"""(cfg, ulysses, ring), as `Layout.degrees`; then torus, where it is above 1. So files and names from before
there was a torus keep their meaning."""
ALONE: Degrees = (1, 1, 1)


def with_torus(degrees: Degrees) -> tuple[int, int, int, int]:
    """(cfg, ulysses, ring, torus)."""
    cfg, ulysses, ring, torus = (*degrees, 1)[:4]
    return cfg, ulysses, ring, torus


@dataclass(frozen=True, slots=True)
class Layout:
    """An ordered set of ranks and how they are used.

    `cfg` ranks groups evaluate the branches of classifier-free guidance, `ulysses` splits
    attention by heads, `ring` by key blocks, `torus` by heads that are exchanged during attention;
    their product is the number of ranks. A decode has a layout of its own (`bands`), in which the
    shards of the sequence are bands of rows.

    Raises: LayoutError when ranks repeat, or their number is not the product of the degrees.
    """

    ranks: tuple[int, ...]
    cfg: int = 1
    ulysses: int = 1
    ring: int = 1
    torus: int = 1
    degrees: Degrees = field(init=False, repr=False, compare=False)
    """What decides shard shapes, whichever ranks are used."""

    def __post_init__(self) -> None:
        degrees = (self.cfg, self.ulysses, self.ring, self.torus)
        object.__setattr__(self, "degrees", degrees if self.torus > 1 else degrees[:3])
        if not 1 <= len(self.ranks) <= MAX_RANKS:
            raise LayoutError(f"a layout has 1 to {MAX_RANKS} ranks, got {len(self.ranks)}")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise LayoutError(f"ranks must differ and not be negative, got {self.ranks}")
        if min(degrees) < 1 or self.cfg > 2:
            raise LayoutError(f"degrees start at 1 and cfg ends at 2, got {self}")
        if prod(degrees) != len(self.ranks):
            raise LayoutError(f"cfg x torus x ulysses x ring must be the number of ranks, got {self}")

    def __reduce__(self) -> tuple[type[Layout], tuple[Any, ...]]:
        """Pickle in a third of the time of a frozen dataclass, for the message of every step."""
        return Layout, (self.ranks, *self.degrees)

    @classmethod
    def single(cls, rank: int) -> Layout:
        """The layout of one rank alone."""
        return cls(ranks=(rank,))

    @classmethod
    def sharing(cls, ranks: tuple[int, ...], *, cfg: int, most_ulysses: int) -> Layout:
        """As many Ulysses ranks as there are heads for, and rings of the rest.

        Ulysses first: its exchanges shrink with the degree, while in a ring every rank takes the
        keys of all others.
        """
        num_shards = len(ranks) // cfg
        degrees = range(1, min(num_shards, most_ulysses) + 1)
        ulysses = max(degree for degree in degrees if num_shards % degree == 0)
        return cls(ranks, cfg=cfg, ulysses=ulysses, ring=num_shards // ulysses)

    @classmethod
    def bands(cls, ranks: tuple[int, ...]) -> Layout:
        """The layout of a decode: each rank has a band of the picture's rows, from top to bottom."""
        return cls(ranks, ulysses=len(ranks))

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def sequence_degree(self) -> int:
        """Number of shards that the token sequence is cut into."""
        return self.ulysses * self.ring * self.torus

    @property
    def head_degree(self) -> int:
        """Number of parts that the heads of attention are cut into."""
        return self.ulysses * self.torus

    def slot_of(self, rank: int) -> int:
        """Position of a rank in this layout; raises LayoutError when it is not in it."""
        try:
            return self.ranks.index(rank)
        except ValueError:
            raise LayoutError(f"rank {rank} is not in {self}") from None

    def __str__(self) -> str:
        ranks = ",".join(map(str, self.ranks))
        kinds = [f"{name}{n}" for name, n in zip(("cfg", "u", "r", "t"), self.degrees, strict=False) if n > 1]
        return f"[{ranks}]" + ("x".join(kinds) and f" {'x'.join(kinds)}")


@dataclass(frozen=True, slots=True)
class Limits:
    """How many ranks can share the tasks of a job."""

    uses_cfg: bool = False
    """Whether a step evaluates two guidance branches, which two halves of the ranks can share."""
    max_sequence_degree: int = 1
    """The most ranks that can share the tokens of one branch."""
    max_ulysses_degree: int = MAX_RANKS
    """The most of them that can share the heads; beyond that they share keys, in rings."""
    max_decode_degree: int = 1
    """The most ranks that can share the rows of a decode."""
    exchanged_bytes: float = 0.0
    """Queries, keys, values and results of all tokens in a step's attentions; 0 if unknown."""
    attention: float = 0.0
    """The share of a step's operations that these attentions are."""
    link_bytes_per_s: float = 0.0
    """Of slow links, over which ranks exchange heads in a torus; 0: they reach each other's memory."""
    num_near: int = 1
    """How many ranks in a row reach each other's memory where other links are slow."""

    @property
    def step_degree(self) -> int:
        """The most ranks that one denoising step can use."""
        return self.max_sequence_degree * (2 if self.uses_cfg else 1)

    def num_apart(self, degrees: Degrees) -> int:
        """Into how many sets that reach each other's memory the ranks of a branch fall."""
        if not self.link_bytes_per_s or prod(degrees) <= self.num_near:
            return 1
        sequence = prod(degrees[1:])
        return sequence // gcd(sequence, self.num_near)

    def ways(self, num_ranks: int) -> tuple[Degrees, ...]:
        """The degrees in which a step can use so many ranks, or the most that it can use.

        Guidance branches on two halves come first: halves exchange once in a step, ranks that share a
        sequence twice in every attention.
        """
        return _ways(self, num_ranks)


@functools.lru_cache(maxsize=1024)
def _ways(limits: Limits, num_ranks: int) -> tuple[Degrees, ...]:
    """`Limits.ways`; kept, since predictions ask again whenever they change."""
    num_ranks = min(num_ranks, limits.step_degree)
    branches = (2, 1) if limits.uses_cfg and num_ranks % 2 == 0 else (1,)
    shared = [(cfg, min(num_ranks // cfg, limits.max_sequence_degree)) for cfg in branches]
    most = max(cfg * sequence for cfg, sequence in shared)
    layouts = [
        Layout.sharing(tuple(range(most)), cfg=cfg, most_ulysses=limits.max_ulysses_degree)
        for cfg, sequence in shared
        if cfg * sequence == most
    ]
    # As many heads as can be are exchanged over slow links, the rest beside them (StreamFusion, 4.2).
    toruses = [gcd(each.ulysses, limits.num_apart(each.degrees)) for each in layouts]
    layouts = [
        replace(each, ulysses=each.ulysses // torus, torus=torus)
        for each, torus in zip(layouts, toruses, strict=True)
    ]
    return tuple([each.degrees for each in layouts])


def shard_bounds(length: int, num_shards: int, shard_idx: int) -> tuple[int, int]:
    """First and one-past-last element of a shard; lengths differ by one at most.

    Longer shards come first, as in `torch.tensor_split`, so shards depend on the global
    length and the degree alone and no rank has to be asked for its length.
    """
    if not 0 <= shard_idx < num_shards:
        raise LayoutError(f"shard {shard_idx} of {num_shards} does not exist")
    base, longer = divmod(length, num_shards)
    start = shard_idx * base + min(shard_idx, longer)
    return start, start + base + (1 if shard_idx < longer else 0)
