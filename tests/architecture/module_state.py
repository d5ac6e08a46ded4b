"""Finds what a module keeps and changes outside of any object: a global, a container, or a cache without a bound."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import is_function

PRODUCT = ("jaxllm", "pallas_kernels")
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp, ast.GeneratorExp)
# Calls, by the last part of their name, that make what can be changed, iterators and queues among it.
MAKES_CONTAINER = re.compile(
    "ChainMap|Counter|OrderedDict|[A-Za-z]*Queue|Weak[A-Za-z]+|array|bytearray|count|cycle|defaultdict|deque|dict|iter|"
    "list|local|set"
)
CHANGES = re.compile(
    "__delitem__|__setitem__|add|append(left)?|clear|discard|extend(left)?|insert|move_to_end|pop(item|left)?|"
    "get_nowait|put(_nowait)?|remove|reverse|rotate|setdefault|sort|((symmetric_)?difference_|intersection_)?update"
)


def find_module_state(tree: ast.Module) -> list[tuple[int, str]]:
    """List line and name of each `global`, of each change of a module-level name's value by a function, and of each
    function whose results are all kept. Objects of the product's own classes may change: those are owners.
    """
    declared = [(node.lineno, name) for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    bindings = list(_bindings(tree))
    names = {name for name, _ in bindings}
    containers = {name for name, value in bindings if _is_container(value)}
    for *around, function in _functions(tree, ()):
        if isinstance(function, ast.FunctionDef) and _keeps_all(function):
            declared.append((function.lineno, function.name))
        for node in _own_nodes(function):
            name = _changed(node, containers, names)
            if name and not any(name in _locals(scope) for scope in (*around, function)):
                declared.append((getattr(node, "lineno", 0), name))
    return sorted(declared)


def _bindings(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a module binds, but for imported libraries, with what it binds each to."""
    for node in _own_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(PRODUCT)):
            yield from ((alias.asname or alias.name, alias) for alias in node.names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _targets(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def _targets(target: ast.AST, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names of an assignment's target, each with its own value where those are listed too."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if len(values) != len(target.elts):
            values = [value] * len(target.elts)
        for part, its_value in zip(target.elts, values, strict=True):
            yield from _targets(part, its_value)


def _functions(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, ...]]:
    """Yield each function inside a node as the last one of the functions around it."""
    for child in ast.iter_child_nodes(node):
        if is_function(child):
            yield *around, child
            yield from _functions(child, (*around, child))
        elif not isinstance(child, ast.expr_context | ast.operator | ast.Name | ast.Constant):
            yield from _functions(child, around)


def _locals(function: ast.AST) -> frozenset[str]:
    """Return a function's parameters and the names that it binds, less those that it declares global."""
    names, declared = set(), set()
    for node in _own_nodes(function):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Global):
            declared.update(node.names)
    return frozenset(names - declared)


def _is_container(value: ast.AST) -> bool:
    is_made = isinstance(value, ast.Call) and MAKES_CONTAINER.fullmatch(_last(value.func))
    return bool(is_made) or isinstance(value, CONTAINERS)


def _keeps_all(function: ast.FunctionDef) -> bool:
    """Return whether a cache without a bound keeps the results of a function for all that it is called with."""
    decorators = [ast.unparse(each).rpartition(".")[2] for each in function.decorator_list]
    has_arguments = any(ast.iter_child_nodes(function.args))
    return has_arguments and not {"cache", "lru_cache(None)", "lru_cache(maxsize=None)"}.isdisjoint(decorators)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module or function, without those in functions and classes inside it."""
    waiting = [scope]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            yield child
            if not is_function(child) and not isinstance(child, ast.ClassDef):
                waiting.append(child)


def _changed(node: ast.AST, containers: set[str], names: set[str]) -> str | None:
    """Return which of these names' values a node changes in place.

    No item or attribute of any may be set; a method call, or `next`, changes containers only.
    """
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        changed, may = _root(node), names
    elif isinstance(node, ast.Call) and _last(node.func) in ("setattr", "delattr") and node.args:
        changed, may = _root(node.args[0]), names
    elif isinstance(node, ast.Call) and _last(node.func) == "next" and node.args:
        changed, may = _root(node.args[0]), names & containers
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and CHANGES.fullmatch(node.func.attr):
        changed, may = _root(node.func), names & containers
    else:
        return None
    return changed if changed in may else None


def _root(node: ast.AST) -> str | None:
    """Return the name that a chain of attributes and items starts with."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _last(function: ast.AST) -> str:
    """Return the last part of the name of what is called, as `deque` of `collections.deque[int]`."""
    if isinstance(function, ast.Subscript):
        return _last(function.value)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
