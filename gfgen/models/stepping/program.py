"""A pipeline's `__call__`, cut at its denoising loop into parts that run one at a time.

    __call__      encode | prepare | for i, t in enumerate(timesteps): | decode
                                   |     one iteration                 |

The call is compiled from its source as a generator that pauses behind `encode` and before each iteration, and
that may also begin at such a place. Its local variables are in a namespace, a copy of the module's globals.
So every variable of the loop is at hand between two steps, also those that the pipeline hands to nobody (a
second scheduler, the previous prediction).

Loops around the denoising loop (sections of a video) are walked by index, so a place in the call is one
index per loop: the last one counts iterations of the denoising loop.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

Namespace = dict[str, Any]
Place = tuple[int, ...]

LOOPS = re.compile(r"timesteps|step_matrix|\brange\(.*steps\)")
"""What a denoising loop iterates over, in all pipelines of diffusers 0.42."""
BEHIND_ENCODE: Place = ()

_CALL, _PLACE, _CHECKPOINT = "__call", "__place", "__checkpoint"


class NotSteppableError(Exception):
    """A pipeline's call that cannot run step by step; the message says why, and where."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place in the call that it can continue from."""

    place: Place
    is_end: bool
    is_last: bool
    """Whether no loop around it has another iteration."""
    num_iterations: int
    """Of all loops together, if the denoising loop is equally long in each iteration of the others."""

    @staticmethod
    def at(*levels: tuple[int, int]) -> Checkpoint:
        """From index and length of each loop."""
        place, lengths = zip(*levels, strict=True)
        is_last = all(idx == length - 1 for idx, length in levels[:-1])
        return Checkpoint(place, place[-1] == lengths[-1], is_last, math.prod(lengths))


@dataclass(frozen=True, slots=True)
class Program:
    signature: inspect.Signature
    globals: Namespace
    code: CodeType
    read_by_prepare: frozenset[str]
    """Names that anything behind `encode` may read."""
    read_by_steps: frozenset[str]
    """Names that the loops, or anything behind them, may read."""
    read_by_decode: frozenset[str]
    """Names that anything behind the denoising loop may read."""
    changed: frozenset[str]

    def namespace(self, local: Mapping[str, Any]) -> Namespace:
        """Where the parts run, with these local variables."""
        return {**self.globals, _CHECKPOINT: Checkpoint.at, **local}

    def run(self, names: Namespace, place: Place | None = None) -> Generator[Any, None, Any]:
        """Run the call, or what follows a place; it returns what the call returns.

        It pauses behind `encode`, without a checkpoint, and then at every checkpoint; the first one is
        `place`. Between two checkpoints the denoising loop does at most one iteration.
        """
        exec(self.code, names)
        return names.pop(_CALL)(place)  # type: ignore[no-any-return]


def sets_processors(call: Callable[..., Any]) -> bool:
    """Whether a pipeline's `__call__`, given as the function of its class, replaces attention processors."""
    function: Any = inspect.unwrap(call)
    return "set_attn_processor" in function.__code__.co_names


@functools.cache
def program_of(call: Callable[..., Any]) -> Program:
    """The parts of a pipeline's `__call__`, given as the function of its class.

    Raises: NotSteppableError where no denoising loop is found, or it cannot be cut.
    """
    function: Any = inspect.unwrap(call)
    lines, first_line = inspect.getsourcelines(function)
    tree = ast.increment_lineno(ast.parse(textwrap.dedent("".join(lines))), first_line - 1).body[0]
    assert isinstance(tree, ast.FunctionDef)
    where = f"{function.__code__.co_filename}:{first_line}"
    if function.__code__.co_freevars:
        raise NotSteppableError(f"{where}: uses variables of another function")
    tree = _Pruned().visit(tree)
    path = _path_to_loop(tree)
    if not path:
        raise NotSteppableError(f"{where}: has no loop over timesteps")
    for loop in (node for node in path[:-1] if isinstance(node, ast.For)):
        if exits := _exits_of(loop, path):
            raise NotSteppableError(
                f"{function.__code__.co_filename}:{exits[0].lineno}: leaves a loop around"
            )
    return _build(tree, path, function)


def _build(tree: ast.FunctionDef, path: Sequence[ast.stmt], function: Any) -> Program:
    num_encode = _num_encode(tree.body[: tree.body.index(path[0])])
    rest = tree.body[num_encode:]
    loops = [node for node in path if isinstance(node, ast.For)]
    wrappers = [node for node in path if isinstance(node, (ast.With, ast.Try))]
    entered = [item for node in wrappers if isinstance(node, ast.With) for item in node.items]
    heads = [ast.Expr(x) for x in [*(loop.iter for loop in loops), *(item.context_expr for item in entered)]]
    handlers = [stmt for node in wrappers if isinstance(node, ast.Try) for stmt in _handling(node)]
    behind = [*heads, *handlers, *_behind(tree.body, path)]
    bound = {name for item in entered if item.optional_vars for name in changed_names([item.optional_vars])}
    read_by_decode = _read_by_each(behind) - bound
    read_by_steps = (_read_by_each(loops) | read_by_decode) - bound
    sets = {
        "read_by_prepare": read_names(rest),
        "read_by_steps": read_by_steps,
        "read_by_decode": read_by_decode,
        "changed": changed_names([loops[0]]),
    }  # before `_compiled`, which changes the tree
    code = _compiled(tree, path, num_encode, function.__code__.co_filename)
    kept = {name: frozenset(names) for name, names in sets.items()}
    return Program(inspect.signature(function), function.__globals__, code, **kept)


def _read_by_each(statements: Iterable[ast.stmt]) -> set[str]:
    return {name for statement in statements for name in read_names([statement])}


def _path_to_loop(tree: ast.FunctionDef) -> list[ast.stmt]:
    def descend(node: ast.stmt) -> list[ast.stmt]:
        for child in _children(node):
            if path := descend(child):
                return [node, *path]
        is_loop = isinstance(node, ast.For) and LOOPS.search(ast.unparse(node.iter)) and _computes(node)
        return [node] if is_loop else []

    return next((path for node in tree.body if (path := descend(node))), [])


def _computes(loop: ast.stmt) -> bool:
    calls = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
    names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
    return "step" in names or any("transformer" in name for name in names)


def _children(node: ast.stmt) -> list[ast.stmt]:
    """Statements that a path may lead through."""
    if isinstance(node, (ast.With, ast.Try)):
        return node.body
    return [*node.body, *node.orelse] if isinstance(node, (ast.For, ast.If)) else []


def _num_encode(statements: Sequence[ast.stmt]) -> int:
    """How many statements there are up to the last one that encodes a prompt."""
    has_prompt = [bool(re.search(r"\.encode_prompt\w*\(", ast.unparse(stmt))) for stmt in statements]
    return len(statements) - has_prompt[::-1].index(True) if True in has_prompt else 0


def _behind(siblings: list[ast.stmt], path: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements that follow one of the path, at every level."""
    found = []
    for node, following in zip(path, [*path[1:], None], strict=True):
        found += siblings[siblings.index(node) + 1 :]
        if isinstance(node, ast.If) and following in node.orelse:
            siblings = node.orelse
        elif following is not None:
            siblings = node.body  # type: ignore[attr-defined]
    return found


def _handling(node: ast.Try) -> list[ast.stmt]:
    return [*(stmt for handler in node.handlers for stmt in handler.body), *node.orelse, *node.finalbody]


def _exits_of(loop: ast.For, path: Sequence[ast.stmt]) -> list[ast.stmt]:
    """`break` and `continue` of a loop around the denoising loop."""
    found: list[ast.stmt] = []

    def visit(node: ast.stmt) -> None:
        if isinstance(node, (ast.Break, ast.Continue)):
            found.append(node)
        elif not isinstance(node, (ast.For, ast.While, ast.FunctionDef)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    visit(child)

    for statement in loop.body:
        visit(statement)
    return found


def _compiled(tree: ast.FunctionDef, path: Sequence[ast.stmt], num_encode: int, filename: str) -> CodeType:
    """What defines the generator."""
    inner = [node for statement in tree.body for node in ast.walk(statement)]
    local = changed_names(tree.body) | {node.name for node in inner if isinstance(node, ast.FunctionDef)}
    local |= {node.name for node in inner if isinstance(node, ast.ExceptHandler) and node.name}
    made: Any = ast.parse(f"def {_CALL}({_PLACE}):\n if {_PLACE} is None:\n  yield")
    (function,) = made.body
    (start,) = function.body
    start.body = [*tree.body[:num_encode], *start.body]
    function.body = [ast.Global(sorted(local)), start, *_cut(tree.body[num_encode:], path, [])]
    return compile(ast.fix_missing_locations(_AsGlobals().visit(made)), filename, "exec", dont_inherit=True)


def _cut(statements: list[ast.stmt], path: Sequence[ast.stmt], levels: list[str]) -> list[ast.stmt]:
    """The statements, except what is before a given place. `levels` has the loops around, as text."""
    node: Any = path[0]
    position = statements.index(node)
    before, after = statements[:position], statements[position + 1 :]
    if isinstance(node, ast.For):
        nested = _cut_loop(node, path, levels)
    elif isinstance(node, ast.If) and path[1] in node.orelse:
        node.test = ast.BoolOp(ast.And(), [_expression(f"not {_PLACE}"), node.test])
        nested, node.orelse = [node], _cut(node.orelse, path[1:], levels)
    elif isinstance(node, ast.If):
        node.test = ast.BoolOp(ast.Or(), [_expression(_PLACE), node.test])
        nested, node.body = [node], _cut(node.body, path[1:], levels)
    else:
        nested, node.body = [node], _cut(node.body, path[1:], levels)
    return [*_unless_placed(before), *nested, *after]


def _cut_loop(node: ast.For, path: Sequence[ast.stmt], levels: list[str]) -> list[ast.stmt]:
    depth = len(levels)
    items, at = f"__items_{depth}", f"__at_{depth}"
    stored = ast.copy_location(ast.Assign([ast.Name(items, ast.Store())], _expression("list()")), node)
    stored.value.args = [node.iter]  # type: ignore[attr-defined]
    first = ast.parse(f"__first = {_PLACE}[{depth}] if {_PLACE} else 0").body
    chosen = ast.copy_location(ast.Assign([node.target], _expression(f"{items}[{at}]")), node)
    around = [*levels, f"({at}, len({items}))"]
    end: list[ast.stmt] = []
    if len(path) > 1:
        body = [*_unless_placed([chosen]), *_cut(node.body, path[1:], around)]
    else:
        first += ast.parse(f"{_PLACE} = ()").body
        pause = ast.parse(f"yield {_CHECKPOINT}({', '.join(around)})").body
        end = ast.parse(f"yield {_CHECKPOINT}({', '.join([*levels, f'(len({items}),) * 2'])})").body
        body = [*pause, chosen, *node.body]
    node.target = ast.Name(at, ast.Store())
    node.iter, node.body = _expression(f"range(__first, len({items}))"), body
    return [stored, *first, node, *end]


def _unless_placed(statements: list[ast.stmt]) -> list[ast.stmt]:
    return [ast.If(_expression(f"not {_PLACE}"), statements, [])] if statements else []


def _expression(text: str) -> Any:
    return ast.parse(text, mode="eval").body


class _Pruned(ast.NodeTransformer):
    """Without branches that are never taken, since jobs have no callbacks and steps end where they are cut.

    The first seem to change the prompt in each step, the second leave loops.
    """

    def visit_If(self, node: ast.If) -> ast.stmt | None:
        self.generic_visit(node)
        if ast.unparse(node.test) in ("callback_on_step_end is not None", "self.interrupt"):
            return None
        if not node.body:
            node.body = [ast.Pass()]
        return node


class _AsGlobals(ast.NodeTransformer):
    """Without annotations, which global names cannot have."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        made = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
        return ast.copy_location(made, node)


MUTATORS = frozenset(
    ("add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "sort", "update")
)
"""Methods of lists, dictionaries and sets that change them; a tensor's end in an underscore."""

_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def read_names(statements: Sequence[ast.stmt]) -> set[str]:
    """Names that the statements may read before they assign them.

    Conservative: a name that is assigned on some paths only counts as read by what follows.
    """
    found: set[str] = set()
    _walk(statements, frozenset(), found)
    return found


def changed_names(statements: Iterable[ast.AST]) -> set[str]:
    """Names that the statements assign, or whose values they change in place."""
    found: set[str] = set()
    for node in (inner for statement in statements for inner in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(node.id)
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            found |= _base(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            if method in MUTATORS or (method.endswith("_") and not method.endswith("__")):
                found |= _base(node.func)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _base(node: ast.expr) -> set[str]:
    """The name that `a.b[c].d` begins with."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _walk(statements: Sequence[ast.stmt], defined: frozenset[str], found: set[str]) -> frozenset[str] | None:
    """Add the names that are read; returns those that are assigned behind it, None if it is never left."""
    for statement in statements:
        after = _statement(statement, defined, found)
        if after is None:
            return None
        defined = after
    return defined


def _statement(node: ast.stmt, defined: frozenset[str], found: set[str]) -> frozenset[str] | None:
    if isinstance(node, ast.If):
        found |= _loads(node.test) - defined
        ends = [_walk(branch, defined, found) for branch in (node.body, node.orelse)]
        open_ends = [end for end in ends if end is not None]
        return frozenset.intersection(*open_ends) if open_ends else None
    if isinstance(node, (ast.For, ast.While)):
        head, target = (node.iter, [node.target]) if isinstance(node, ast.For) else (node.test, [])
        found |= _loads(head) - defined
        _walk(node.body, defined.union(*map(_stores, target)), found)
        _walk(node.orelse, defined, found)
        return defined
    if isinstance(node, ast.With):
        for item in node.items:
            found |= _loads(item.context_expr) - defined
            defined |= _stores(item.optional_vars) if item.optional_vars else frozenset()
        return _walk(node.body, defined, found)
    if isinstance(node, ast.Try):
        _walk(node.body, defined, found)
        for handler in node.handlers:
            named = frozenset((handler.name,)) if handler.name else frozenset()
            _walk(handler.body, defined | named, found)
        _walk(node.orelse, defined, found)
        _walk(node.finalbody, defined, found)
        return defined
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found |= {node.target.id} - defined
    found |= _loads(node) - defined
    return None if isinstance(node, _EXITS) else defined | _stores(node)


def _loads(node: ast.AST) -> set[str]:
    """Names that an expression or a simple statement reads, without those of its own scopes."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    names = {name for child in ast.iter_child_nodes(node) for name in _loads(child)}
    if isinstance(node, _COMPREHENSIONS):
        first, own = node.generators[0], {x for part in node.generators for x in _stores(part.target)}
        return (names - own) | _loads(first.iter)
    if isinstance(node, _SCOPES):
        arguments = {x.arg for x in ast.walk(node) if isinstance(x, ast.arg)}
        stored = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        return names - arguments - stored
    return names


def _stores(node: ast.AST) -> frozenset[str]:
    """Names that a simple statement assigns for certain."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return frozenset((node.name,))
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return frozenset()
    return frozenset(x for x in changed_names([node]) if x not in _loads_as_base(node))


def _loads_as_base(node: ast.AST) -> set[str]:
    """Names that a statement only changes in place, as in `a[0] = b`."""
    inner = [x for x in ast.walk(node) if isinstance(x, ast.Name)]
    stored = {x.id for x in inner if isinstance(x.ctx, ast.Store)}
    return {x.id for x in inner if isinstance(x.ctx, ast.Load)} - stored
