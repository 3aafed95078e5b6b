"""Plant one-token faults in the modules that decide, and count those that the nearest tests notice.

The sample has equally many faults of each package, at random with a seed. A test that fails notices a fault,
and so does a file of tests that takes three times its time, and 5 s. Each fault is planted in memory, in a
fork. Other processes that tests start do not have it. Not planted: faults in assertions (which are tests
themselves), annotations and decorators.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import resource
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import groupby
from pathlib import Path
from types import CodeType
from typing import Any

import click
import hypothesis
import pytest
import torch  # noqa: F401  (forks have what takes long to import)

from benchmarks.measured import head, row

ROOT = Path(__file__).parent.parent
PACKAGES = {"job": "test_job_", "policies": "policies/test_"}  # and how the paths of their tests begin
PACKAGES |= {f"runtime/{name}": "runtime/test_" for name in ("control", "core", "files", "ipc", "predict")}
NEAREST = {  # the tests of their subject, for modules without tests of their name
    "policies/test_policies": "edf fcfs srtf",
    "policies/test_triage": "allotment speed",
    "runtime/test_arenas": "settings",
    "runtime/test_channel": "messages",
    "runtime/test_outputs": "metadata",
    "runtime/test_profile": "profile_file",
    "runtime/test_run_profile": "profile_store scaling",
    "runtime/test_state": "decider dispatch events job_record jobs ranks",
    "test_job": "fields",
    "test_job_formats": "spec",
    "test_job_inputs": "reader",
}
SWAPPED: dict[Any, Any] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot}
SWAPPED |= {ast.In: ast.NotIn, ast.And: ast.Or, ast.Add: ast.Sub, ast.Mult: ast.Div, ast.Break: ast.Continue}
SWAPPED |= {new: old for old, new in SWAPPED.items()}


Fault = tuple[str, int]
"""A module's path, and a number among all faults that it could have."""


def faults(node: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], None]]]:
    """The nodes from this one down in which a fault can be planted, and how."""
    match node:
        case ast.Assert():
            return
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() if type(node.op) in SWAPPED:
            yield node, partial(setattr, node, "op", SWAPPED[type(node.op)]())
        case ast.Compare():
            for place, old in enumerate(node.ops):
                yield node, partial(node.ops.__setitem__, place, SWAPPED[type(old)]())
        case ast.Constant(value=bool() as value):
            yield node, partial(setattr, node, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield node, partial(setattr, node, "value", value + 1)
        case ast.UnaryOp(op=ast.Not()):
            yield node, partial(setattr, node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        case ast.Return(value=ast.expr() as result) if ast.unparse(result) != "None":
            yield node, partial(setattr, node, "value", ast.Constant(None))
        case ast.Break() | ast.Continue():
            yield node, partial(setattr, node, "__class__", SWAPPED[type(node)])
    for name, found in ast.iter_fields(node):
        for child in found if isinstance(found, list) else [found]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                yield from faults(child)


def planted(fault: Fault) -> tuple[CodeType, str]:
    """The module's code with this fault, and where it is, in words."""
    tree = ast.parse(source := (ROOT / fault[0]).read_text())
    node, plant = list(faults(tree))[fault[1]]
    line, before = getattr(node, "lineno", 0), ast.unparse(node)
    plant()
    words = f"{line}: {before} -> {ast.unparse(node)}  in: {source.splitlines()[line - 1].strip()}"
    return compile(ast.fix_missing_locations(tree), ROOT / fault[0], "exec"), " ".join(words.split())


def sampled(package: str, *, number: int, seed: int) -> list[Fault]:
    every: list[Fault] = []
    for path in sorted((ROOT / "gfgen" / package).glob("*.py")):
        found = faults(ast.parse(path.read_text()))
        every += [(str(path.relative_to(ROOT)), at) for at, _ in enumerate(found)]
    return random.Random(f"{seed} {package}").sample(every, min(len(every), number))


def nearest(fault: Fault) -> str:
    """The tests of its module: the file of its name, perhaps in the plural, or else of its subject."""
    path = Path(fault[0])
    named = [PACKAGES[str(path.parent.relative_to("gfgen"))] + path.stem + end for end in ("", "s")]
    named += [tests for tests, names in NEAREST.items() if path.stem in names.split()]
    return next(f"tests/{each}.py" for each in named if (ROOT / f"tests/{each}.py").is_file())


def run_tests(tests: str, fault: Fault | None, scratch: str) -> int:
    """pytest's result, in a fork."""
    for stream in (1, 2):
        os.dup2(os.open(f"{scratch}/output", os.O_WRONLY | os.O_CREAT), stream)
    if fault is not None:
        path, (code, _), read = str(ROOT / fault[0]), planted(fault), SourceFileLoader.get_code

        def changed(loader: Any, name: str) -> CodeType | None:
            return code if loader.path == path else read(loader, name)

        SourceFileLoader.get_code = changed  # type: ignore[assignment, method-assign]
    hypothesis.settings.register_profile("no hurry", deadline=None, database=None, derandomize=True)
    hypothesis.settings.load_profile("no hurry")
    options = ["-x", "-n", "0", "-W", "ignore::pytest.PytestAssertRewriteWarning", f"--basetemp={scratch}/t"]
    return pytest.main([*options, tests])


def verdict(tests: str, fault: Fault | None, *, limit_s: int = 300) -> str:
    """`survived`, `killed` or `time-out`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        if (child := os.fork()) == 0:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
            resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))  # a loop may fill memory
            os._exit(run_tests(tests, fault, scratch))
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
        signal.alarm(10 * limit_s)
        _, status = os.waitpid(child, 0)
        signal.alarm(0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if fault is None and status:
            raise click.ClickException(Path(scratch, "output").read_text())
    return "time-out" if os.WIFSIGNALED(status) else "killed" if os.WEXITSTATUS(status) else "survived"


@click.command()
@click.option("--sample", default=406, show_default=True, help="How many faults, of all packages.")
@click.option("--seed", default=1, show_default=True)
@click.option("--package", "packages", multiple=True, type=click.Choice([*PACKAGES]), default=[*PACKAGES])
def main(sample: int, seed: int, packages: tuple[str, ...]) -> None:
    os.chdir(ROOT)
    found = [f for each in packages for f in sampled(each, number=sample // len(PACKAGES), seed=seed)]
    counts = Counter[tuple[str, str]]()
    for tests, group in groupby(sorted(found, key=lambda each: (nearest(each), each)), nearest):
        before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        verdict(tests, None)
        limit_s = 5 + int(3 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s))
        for fault in group:
            result = verdict(tests, fault, limit_s=limit_s)
            counts[str(Path(fault[0]).parent), result] += 1
            click.echo(f"{result} {fault[0]}#{fault[1]} {planted(fault)[1]}")
    click.echo(head("package", "faults", "killed", "time-out", "survived"))
    for package in sorted({package for package, _ in counts}):
        numbers = [counts[package, result] for result in ("killed", "time-out", "survived")]
        click.echo(row(package, sum(numbers), *numbers))


if __name__ == "__main__":
    main()
