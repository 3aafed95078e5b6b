"""A pipeline's `__call__`, cut at its denoising loop into parts that run one at a time.

    __call__      encode | prepare | for i, t in enumerate(timesteps): | decode
                                   |     one iteration                 |

The parts are the statements of `__call__` itself, compiled from its source. Each runs in a namespace: a copy
of the module's globals with the local variables in it. So every variable of the loop is at hand between two
steps, also those that the pipeline hands to nobody (a second scheduler, the previous prediction).

Loops around the denoising loop (sections of a video) are walked by index, so a place in the call is one
index per loop: the last one counts iterations of the denoising loop.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Namespace = dict[str, Any]
Place = tuple[int, ...]
Part = Callable[[Namespace], None]

LOOPS = re.compile(r"timesteps|step_matrix|\brange\(.*steps\)")
"""What a denoising loop iterates over, in all pipelines of diffusers 0.42."""

_ITEM, _RESULT, _COMPLETED, _RETURNED = "__item", "__result", "__completed", "__returned"


class NotSteppableError(Exception):
    """A pipeline's call that cannot run step by step; the message says why, and where."""


class Returned(BaseException):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A place in the call that it can continue from."""

    place: Place
    is_end: bool
    is_last: bool
    """Whether no loop around it has another iteration."""
    num_iterations: int
    """Of all loops together, if the denoising loop is equally long in each iteration of the others."""


@dataclass(frozen=True, slots=True)
class Block:
    """Statements, then one that leads to the denoising loop, then statements."""

    before: Part
    nested: Block | Branch | Loop | None
    after: Part


@dataclass(frozen=True, slots=True)
class Branch:
    """An `if` around the denoising loop."""

    test: Part
    block: Block
    other: Part


@dataclass(frozen=True, slots=True)
class Loop:
    """The denoising loop (`block` is None), or one around it."""

    items: Part
    body: Part
    """One iteration, or for a loop around the denoising loop only the assignment of its variables."""
    block: Block | None


@dataclass(frozen=True, slots=True)
class Program:
    signature: inspect.Signature
    globals: Namespace
    encode: Part
    """The statements up to the one that encodes the prompt; `block` begins behind it."""
    block: Block
    read_by_prepare: frozenset[str]
    """Names that anything behind `encode` may read."""
    read_by_steps: frozenset[str]
    """Names that the loops, or anything behind them, may read."""
    read_by_decode: frozenset[str]
    """Names that anything behind the denoising loop may read."""
    changed: frozenset[str]

    def namespace(self, local: Mapping[str, Any]) -> Namespace:
        """Where the parts run, with these local variables."""
        return {**self.globals, _RETURNED: Returned, **local}

    def run(self, names: Namespace, place: Place | None = None) -> Iterator[Checkpoint]:
        """Run from behind `encode`, or from a place, and pause at every checkpoint.

        Between two checkpoints the denoising loop does at most one iteration. The first one is `place`.

        Raises: Returned, when the call returns.
        """
        return _run_block(self.block, names, place, ())


def _run_block(
    block: Block, names: Namespace, place: Place | None, outer: tuple[tuple[int, int], ...]
) -> Iterator[Checkpoint]:
    """`outer` has index and length of each loop around the block."""
    if place is None:
        block.before(names)
    if isinstance(block.nested, Block):
        yield from _run_block(block.nested, names, place, outer)
    elif isinstance(block.nested, Branch):
        if place is None:
            block.nested.test(names)
        if place is not None or names.pop(_RESULT):
            yield from _run_block(block.nested.block, names, place, outer)
        else:
            block.nested.other(names)
    elif block.nested is not None:
        yield from _run_loop(block.nested, names, place, outer)
    block.after(names)


def _run_loop(
    loop: Loop, names: Namespace, place: Place | None, outer: tuple[tuple[int, int], ...]
) -> Iterator[Checkpoint]:
    loop.items(names)
    items = list(names.pop(_RESULT))
    first = place[0] if place else 0
    for idx in range(first, len(items)):
        at = (*outer, (idx, len(items)))
        rest = place[1:] if place and idx == first else None
        if loop.block is None:
            yield _checkpoint(at)
        if loop.block is None or rest is None:
            names[_ITEM], names[_COMPLETED] = items[idx], False
            loop.body(names)
        if loop.block is not None:
            yield from _run_block(loop.block, names, rest, at)
        elif not names[_COMPLETED]:
            break
    if loop.block is None:
        yield _checkpoint((*outer, (len(items), len(items))))


def _checkpoint(at: tuple[tuple[int, int], ...]) -> Checkpoint:
    num_iterations = functools.reduce(lambda product, level: product * level[1], at, 1)
    is_last = all(idx == length - 1 for idx, length in at[:-1])
    return Checkpoint(tuple(idx for idx, _ in at), at[-1][0] == at[-1][1], is_last, num_iterations)


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
    make = _Maker(function.__code__.co_filename)
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
    return Program(
        signature=inspect.signature(function),
        globals=function.__globals__,
        encode=make.part(tree.body[:num_encode], ()),
        block=make.block(rest, path, ()),
        read_by_prepare=frozenset(read_names(rest)),
        read_by_steps=frozenset(read_by_steps),
        read_by_decode=frozenset(read_by_decode),
        changed=frozenset(changed_names([loops[0]])),
    )


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


class _Maker:
    def __init__(self, filename: str) -> None:
        self._filename = filename

    def block(
        self, statements: list[ast.stmt], path: Sequence[ast.stmt], around: tuple[ast.stmt, ...]
    ) -> Block:
        """`around` has the `with` and `try` statements in which the statements stand."""
        node, position = path[0], statements.index(path[0])
        nested: Block | Branch | Loop
        if isinstance(node, ast.If):
            is_other = path[1] in node.orelse
            chosen, other = (node.orelse, node.body) if is_other else (node.body, node.orelse)
            test = ast.UnaryOp(ast.Not(), node.test) if is_other else node.test
            nested = Branch(
                self._value(test, around), self.block(chosen, path[1:], around), self.part(other, around)
            )
        elif isinstance(node, ast.For):
            nested = self._loop(node, path, around)
        else:
            assert isinstance(node, (ast.With, ast.Try))
            nested = self.block(node.body, path[1:], (*around, node))
        before, after = statements[:position], statements[position + 1 :]
        return Block(self.part(before, around), nested, self.part(after, around))

    def part(self, statements: Sequence[ast.stmt], around: tuple[ast.stmt, ...]) -> Part:
        """What runs the statements in a namespace."""
        if not statements:
            return lambda names: None
        body = [_Rewritten().visit(stmt) for stmt in copy.deepcopy(list(statements))]
        for node in reversed(around):
            wrapped: Any = copy.copy(node)
            wrapped.body = body
            body = [wrapped]
        module = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
        code = compile(module, self._filename, "exec", dont_inherit=True)
        return functools.partial(exec, code)

    def _loop(self, node: ast.For, path: Sequence[ast.stmt], around: tuple[ast.stmt, ...]) -> Loop:
        item = ast.Name(_ITEM, ast.Load())
        statement: ast.stmt
        if len(path) > 1:
            statement, block = ast.Assign([node.target], item), self.block(node.body, path[1:], around)
        else:
            completed = ast.Assign([ast.Name(_COMPLETED, ast.Store())], ast.Constant(value=True))
            statement = ast.For(node.target, ast.Tuple([item], ast.Load()), node.body, [completed])
            block = None
        statement = ast.copy_location(statement, node)
        return Loop(self._value(node.iter, around), self.part([statement], around), block)

    def _value(self, expression: ast.expr, around: tuple[ast.stmt, ...]) -> Part:
        """What stores the value of an expression as `_RESULT`."""
        stored = ast.Assign([ast.Name(_RESULT, ast.Store())], expression)
        return self.part([ast.copy_location(stored, expression)], around)


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


class _Rewritten(ast.NodeTransformer):
    """Statements of a function that mean the same at the top level of a module."""

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        value = node.value or ast.Constant(value=None)
        call = ast.Call(ast.Name(_RETURNED, ast.Load()), [value], [])
        return ast.copy_location(ast.Raise(call, None), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node


# Names that statements read and change --------------------------------------------------------------


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
    if isinstance(node, ast.For):
        found |= _loads(node.iter) - defined
        _walk(node.body, defined | _stores(node.target), found)
        _walk(node.orelse, defined, found)
        return defined
    if isinstance(node, ast.While):
        found |= _loads(node.test) - defined
        _walk(node.body, defined, found)
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
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
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
