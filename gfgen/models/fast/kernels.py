"""Which kernels the step of a pipeline without an adapter of its own uses, and what the others have in fp8.

    own        those of the pipeline's statements: the bits are those of diffusers
    fused      fused blocks where gfgen has them (flux.py), texts without padding (compiled.py)
    compiled   the same, and other blocks compiled (compiled.py)

The control plane decides, because all ranks that share a step must agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

KernelChoice = Literal["own", "fused", "compiled"]


class Quantised(NamedTuple):
    """Which parts of the transformers of Wan or Qwen-Image are in fp8."""

    layers: bool = False
    attention: bool = False


NOT_QUANTISED = Quantised()

# Per context and so per thread: ranks may be threads around one model.
_CHOICE: ContextVar[KernelChoice] = ContextVar("kernels", default="own")


@contextmanager
def using(choice: KernelChoice) -> Iterator[None]:
    """Inside, prepared transformers use these kernels."""
    token = _CHOICE.set(choice)
    try:
        yield
    finally:
        _CHOICE.reset(token)


def present_choice() -> KernelChoice:
    """The choice of the `with using(...)` around the caller."""
    return _CHOICE.get()
