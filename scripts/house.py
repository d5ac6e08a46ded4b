#!/usr/bin/env python3
"""Measure the source tree of git revisions or folders, and print them side by side.

    scripts/house.py                     HEAD
    scripts/house.py c0ce1991 HEAD       before and after
    scripts/house.py c0ce1991 .          before, and the working tree
    scripts/house.py --json FILE ...     the same figures as JSON too

A revision is read through `git archive`, so the working tree stays as it is. What the rows count:

- *product*: Python files under jaxllm, models and pallas_kernels; *scripts* and *tests*: those under the folders of
  that name. Generated files and jaxllm/models, a link, do not count. Rows that name none of these count the product.
- *files in a folder*: Python files of one folder without its subfolders, `__init__.py` aside; scripts count.
- *lines of a function*: from `def` to its last line, without decorators. Methods and nested functions count.
- *with docstring* and *annotated*: functions, nested ones too; *annotated* have a type for every parameter, `self` and
  `cls` aside, and for the result.
- *public functions and classes*: names without a leading underscore at the top level of a module; a name that two
  modules define counts once. *public names*: of every module its own, and assigned names too, imports aside.
- *unused elsewhere*: public names that no other Python file in the tree imports from their module or takes as an
  attribute after importing the module, and that no string of another file ends in (`"module:function"`, as registries
  name functions).
- *import circles*: groups of two or more modules (or folders) that reach each other by imports, also by imports inside
  functions; the number of their members is in brackets. A submodule stands for itself, not for the packages above it;
  modules directly in jaxllm are no folder, and each stands for itself there too.
- *imports that run up*: against the order of ROOMS in that tree's tests/architecture/test_imports.py.
- *words*: runs of characters between spaces.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("jaxllm", "models", "pallas_kernels")
MAX_FILES = 20

type Figures = dict[str, str]
type Graph = dict[str, set[str]]
type Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class File:
    """A Python file: its path from the root and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, FUNCTIONS)]

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def top(self) -> str:
        return self.path.partition("/")[0]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def module(self) -> str:
        """The name that imports use: scripts import each other without `scripts`, and models lie in jaxllm."""
        name = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"jaxllm.{name}" if self.top == "models" else name.removeprefix("scripts.")

    @cached_property
    def imports(self) -> list[tuple[str, str]]:
        """Every import as its absolute module and the name that is taken from it, "" for the module."""
        package = (self.module if self.is_package else self.module.rpartition(".")[0]).split(".")
        pairs: list[tuple[str, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                pairs += [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                module = ".".join([*above, *([node.module] if node.module else [])])
                pairs += [(module, alias.name) for alias in node.names]
        return pairs


def read_files(root: Path) -> list[File]:
    """Read the Python files of a tree, without links, hidden folders and generated files."""
    return [
        File(path.relative_to(root).as_posix(), path.read_text())
        for path in sorted(root.rglob("*.py"))
        if not is_left_out(path.relative_to(root)) and not path.is_symlink()
    ]


def is_left_out(path: Path) -> bool:
    is_linked = path.parts[:2] == ("jaxllm", "models")
    return is_linked or path.name.endswith("_pb2.py") or any(part.startswith(".") for part in path.parts)


def measure(root: Path) -> Figures:
    files = read_files(root)
    product = [file for file in files if file.top in PRODUCT]
    scripts = [file for file in files if file.top == "scripts"]
    tests = [file for file in files if file.top == "tests"]
    kinds = {"product": product, "scripts": scripts, "tests": tests}
    figures = {f"{kind}: files, lines": f"{len(kept)}, {count_lines(kept):,}" for kind, kept in kinds.items()}
    functions = [function for file in product for function in file.functions]
    figures["lines of a file: median / p90 / max"] = spread([file.lines for file in product])
    figures["lines of a function: median / p90 / max"] = spread([count_function_lines(node) for node in functions])
    figures["with docstring"] = share(ast.get_docstring(function) is not None for function in functions)
    figures["annotated"] = share(is_annotated(function) for function in functions)
    figures |= name_figures(product, files) | import_figures(product, root)
    readme = (root / "README.md").read_text()
    pages = list((root / "docs").rglob("*.md"))
    figures["README: words, lines, bytes"] = (
        f"{len(readme.split()):,}, {len(readme.splitlines())}, {len(readme.encode()):,}"
    )
    figures["docs: pages, words"] = f"{len(pages)}, {sum(len(page.read_text().split()) for page in pages):,}"
    other = sum(len(page.read_text().split()) for page in root.rglob("*.md") if not is_left_out(page.relative_to(root)))
    figures["all Markdown: words"] = f"{other:,}"
    return figures | folder_figures(product + scripts)


def count_lines(files: list[File]) -> int:
    return sum(file.lines for file in files)


def count_function_lines(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def spread(values: list[int]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.0f} / {ordered[len(ordered) * 9 // 10]} / {ordered[-1]}"


def share(truths: Iterator[bool]) -> str:
    kept = list(truths)
    return f"{100 * sum(kept) / len(kept):.1f} %"


def folder_figures(files: list[File]) -> Figures:
    counts = Counter(file.folder for file in files if not file.is_package)
    crowded = {f"  {folder}": str(count) for folder, count in counts.most_common() if count > MAX_FILES}
    return {
        "folders": str(len(counts)),
        "files in a folder: median / p90 / max": spread(list(counts.values())),
        f"folders with more than {MAX_FILES} files": str(len(crowded)),
    } | crowded


def is_annotated(function: Function) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    typed = all(argument.annotation or argument.arg in ("self", "cls") for argument in named)
    return typed and (function.returns is not None)


def public_names(file: File) -> set[str]:
    """Return the names that a module defines at its top level, imports and private ones aside."""
    names: set[str] = set()
    for node in file.tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.TypeAlias(name=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


def name_figures(product: list[File], files: list[File]) -> Figures:
    """Count the public names, and those that no other file uses."""
    taken: dict[str, set[str]] = defaultdict(set)  # of a module: the names that others take from it
    quoted: dict[str, set[str]] = defaultdict(set)  # of a name: the files with a string that ends in it
    modules = {file.module for file in files}
    for file in files:
        attributes = {node.attr for node in file.nodes if isinstance(node, ast.Attribute)}
        for module, name in file.imports:
            taken[module].add(name)
            whole = f"{module}.{name}" if name else module
            if whole in modules:
                taken[whole] |= attributes
        strings = [node.value for node in file.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for string in strings:
            if quote := re.fullmatch(r"(?:[\w.]+[.:])?([A-Za-z]\w*)", string):
                quoted[quote[1]].add(file.path)
    names = [(file, name) for file in product for name in public_names(file)]
    kinds = (*FUNCTIONS, ast.ClassDef)
    definitions = {node.name for file in product for node in file.tree.body if isinstance(node, kinds)}
    unused = [(file, name) for file, name in names if name not in taken[file.module] and not quoted[name] - {file.path}]
    return {
        "public functions and classes": f"{sum(not name.startswith('_') for name in definitions):,}",
        "public names": f"{len(names):,}",
        "  unused elsewhere": str(len(unused)),
    }


def import_figures(product: list[File], root: Path) -> Figures:
    files = {file.module: file for file in product}
    modules: Graph = {
        file.module: {target for pair in file.imports if (target := imported_module(pair, files))} - {file.module}
        for file in product
    }
    folder = {file.module: file.path if file.folder == "jaxllm" else file.folder for file in product}
    folders: Graph = defaultdict(set)
    for module, targets in modules.items():
        folders[folder[module]] |= {folder[target] for target in targets} - {folder[module]}
    figures = {
        f"import circles between {what}": f"{len(circles)} ({sum(map(len, circles))})"
        for what, circles in (("modules", find_circles(modules)), ("folders", find_circles(folders)))
    }
    figures["imports between modules, between folders"] = ", ".join(
        f"{sum(map(len, graph.values())):,}" for graph in (modules, folders)
    )
    rooms = read_rooms(root / "tests" / "architecture" / "test_imports.py")
    rank = {module: room_rank(module, rooms) for module in modules}
    rising = sum(rank[target] > rank[module] for module, targets in modules.items() for target in targets)
    return figures | {"rooms, imports that run up": f"{len(rooms)}, {rising}"}


def imported_module(pair: tuple[str, str], files: dict[str, File]) -> str | None:
    module, name = pair
    return whole if (whole := f"{module}.{name}") in files else module if module in files else None


def find_circles(graph: Graph) -> list[set[str]]:
    """Return the groups of two or more nodes that reach each other."""
    reached = {node: reach(node, graph) for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return [set(group) for group in groups if len(group) > 1]


def reach(node: str, graph: Graph) -> set[str]:
    nodes: set[str] = set()
    waiting = [node]
    while waiting:
        for target in graph.get(waiting.pop(), set()) - nodes:
            nodes.add(target)
            waiting.append(target)
    return nodes


def read_rooms(path: Path) -> list[str]:
    """Return the module prefixes of ROOMS, lowest first."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="ROOMS")], value=value):
                return list(ast.literal_eval(value))
    raise LookupError(f"{path} assigns no ROOMS")


def room_rank(module: str, rooms: list[str]) -> int:
    return max((len(room), rank) for rank, room in enumerate(rooms) if module == room or module.startswith(f"{room}."))[
        1
    ]


def measure_tree(tree: str) -> Figures:
    """Measure a folder, or else a git revision."""
    if Path(tree).is_dir():
        return measure(Path(tree).resolve())
    archive = subprocess.run(["git", "archive", tree], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return measure(Path(folder))


def print_table(columns: dict[str, Figures]) -> None:
    rows = list(dict.fromkeys(row for figures in columns.values() for row in figures))
    cells = [["", *columns], *([row, *(figures.get(row, "-") for figures in columns.values())] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    for first, *others in cells:
        aligned = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        print(f"| {' | '.join(aligned)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", default=["HEAD"], metavar="TREE", help="a git revision or a folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    columns = {tree: measure_tree(tree) for tree in arguments.trees}
    if arguments.json:
        arguments.json.write_text(json.dumps(columns, indent=2) + "\n")
    print_table(columns)


if __name__ == "__main__":
    main()
