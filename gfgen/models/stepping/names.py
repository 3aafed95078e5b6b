"""Which local variables a run of statements reads from outside, and which it changes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

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
