"""Elastic generation of pictures and videos on the GPUs of one machine.

import gfgen
for result in gfgen.generate(["a red fox", "a blue whale"], steps=8, seed=1):
    result.image.save(f"{result.job.id}.png")

Errors are in `gfgen.errors`; a policy uses `gfgen.snapshot` and `gfgen.layout`; docs/python.md has the rest.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gfgen import errors
    from gfgen.api import Session, check, generate, plan
    from gfgen.session.result import Result as Result

__all__ = ["Session", "check", "errors", "generate", "plan"]


def __getattr__(name: str) -> object:
    if name not in (*__all__, "Result", "ray"):
        raise AttributeError(f"module 'gfgen' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"gfgen.{name if name in ('errors', 'ray') else 'api'}")
    return vars(module).get(name, module)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
