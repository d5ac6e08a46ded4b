"""The product's source files as syntax trees, and the modules each one imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One imported module under its absolute name; `name` is what is taken out of it, if anything."""

    module: str
    name: str | None
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """One Python file of the product. `module` is its import name: models/config.py is jaxllm.models.config."""

    path: Path
    module: str

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.where)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The tree's nodes in the order of `ast.walk`, which takes about as long as parsing."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        package = self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]
        return find_imports(self.nodes, package)


def find_imports(nodes: Iterable[ast.AST], package: str = "") -> list[Import]:
    """List every import of a file in `package`, those in functions and for type checkers too, by absolute names."""
    imports: list[Import] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            imports += [Import(alias.name, None, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            imports += [Import(module, alias.name, node.lineno) for alias in node.names]
    return imports


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


@cache
def sources(folder: str) -> list[Source]:
    """List every Python file under one top-level folder, without following the link jaxllm/models."""
    return [Source(path, module_name(path)) for path in python_files(ROOT / folder)]


def product() -> list[Source]:
    return sources("jaxllm") + sources("models") + sources("pallas_kernels")


def python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir():
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "models":
        parts.insert(0, "jaxllm")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
