"""A graph of the repository's files: which files each one imports, starts as a program or reads.

It is read from the source without importing it: import statements anywhere in a file and in programs that it holds as
strings, dotted names and paths in strings, folders of test data, and data files beside a module. What a file says by
itself is cached by its size and times.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

FOLDERS = ("jaxllm", "models", "pallas_kernels", "scripts", "tests")
ROOTS = ("", "scripts/")
"""The folders from which top-level modules are imported."""
LINKS = {"jaxllm/models/": "models/"}
"""The committed link to a folder: `jaxllm.models.config` is models/config.py."""
PUBLISHED = ("jaxllm/server/", "jaxllm/outputs.py", "jaxllm/pooling_params.py")
"""The docstrings of classes and functions in these files are descriptions in the server's OpenAPI document."""
CACHE = ".cache/source_graph.json"
NAME = re.compile(rf"\b(?:{'|'.join(FOLDERS)})(?:\.\w+)+")
FUNCTION = re.compile(r"\.*(\w+(?:\.\w+)*):\w+")
PROGRAM = re.compile(r"[\w./-]*\w\.(?:py|sh)\b")
DATA = re.compile(r"\btests/data(?:/[\w.-]+)*")
IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import\s+([\w, ]+)|import\s+([\w.]+))", re.MULTILINE)


@dataclass(frozen=True)
class Facts:
    """What one file says by itself."""

    digest: str
    """Digest of the bytes; for a Python file, of its syntax without comments and unpublished docstrings."""
    names: list[str] = field(default_factory=list)
    """Dotted names of what it imports, and those in its strings."""
    packages: list[str] = field(default_factory=list)
    """Packages whose modules it imports by computed names."""
    paths: list[str] = field(default_factory=list)
    """Programs and test data that it names."""
    lazy: Mapping[str, str] = field(default_factory=dict)
    """Modules that `__getattr__` imports, by the names it takes from them (PEP 562)."""
    marks: list[str] = field(default_factory=list)
    """Pytest's marks that it uses."""


def read_facts(path: str, content: bytes) -> Facts:
    """Return the facts of one file."""
    if not path.endswith(".py"):
        text = content.decode(errors="replace") if path.endswith(".sh") else ""
        return Facts(digest=hashlib.sha256(content).hexdigest(), paths=sorted(set(PROGRAM.findall(text))))
    reader = _Reader(path, keeps_docstrings=b"__doc__" in content)
    tree = ast.parse(content, path)
    reader.read(tree)
    return Facts(
        digest=hashlib.sha256(ast.dump(tree).encode()).hexdigest(),
        names=sorted(reader.names),
        packages=sorted(reader.packages),
        paths=sorted(reader.paths),
        lazy=reader.lazy,
        marks=sorted(reader.marks),
    )


def is_string(node: ast.AST) -> bool:
    """Return whether a statement is a string alone: a docstring of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _Reader:
    """Collect what the syntax tree of the file `path` refers to, and remove the docstrings that nothing reads."""

    def __init__(self, path: str, *, keeps_docstrings: bool) -> None:
        self.keeps_docstrings = keeps_docstrings
        self.is_published = path.startswith(PUBLISHED)
        self.package = path.rpartition("/")[0].replace("/", ".")
        self.names: set[str] = set()
        self.packages: set[str] = set()
        self.paths: set[str] = set()
        self.lazy: dict[str, str] = {}
        self.marks: set[str] = set()

    def read(self, tree: ast.Module) -> None:
        tables, searched = self._read_lazy(tree), set[str]()
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            if is_string(node) or _is_for_types(node) or node in tables:
                continue
            match node:
                case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._remove_docstrings(node)
                case ast.Import(names=imported):
                    self.names |= {alias.name for alias in imported}
                case ast.ImportFrom(module=module, names=imported, level=level):
                    base = self._absolute("." * level + (module or ""))
                    self.names |= {f"{base}.{alias.name}" for alias in imported}
                case ast.Attribute(value=ast.Name(id=package), attr="__path__"):
                    searched.add(package)
                case ast.Attribute(value=ast.Attribute(value=ast.Name(id="pytest"), attr="mark"), attr=mark):
                    self.marks.add(mark)
                case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=args):
                    self._read_import_call(args)
                case ast.BinOp(op=ast.Div()):
                    waiting += self._read_path(node)
                    continue
                case ast.JoinedStr(values=values):
                    parts = [part.value if isinstance(part, ast.Constant) else "_" for part in values]
                    self._read_string("".join(map(str, parts)))
                case ast.Constant(value=str(text)):
                    self._read_string(text)
            waiting += ast.iter_child_nodes(node)
        self.packages |= {name for name in self.names if name.rpartition(".")[2] in searched}

    def _remove_docstrings(self, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Remove strings that are statements; where they are published, the first of a class or function stays."""
        if not self.keeps_docstrings:
            start = 1 if self.is_published and not isinstance(node, ast.Module) else 0
            node.body[start:] = [statement for statement in node.body[start:] if not is_string(statement)]

    def _absolute(self, module: str) -> str:
        level = len(module) - len(module.lstrip("."))
        if not level:
            return module
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - level + 1], *filter(None, [module.lstrip(".")])])

    def _read_lazy(self, tree: ast.Module) -> list[ast.stmt]:
        """Take the tables of names that a module's `__getattr__` imports: files that use the names need the modules."""
        if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
            return []
        tables: list[ast.stmt] = []
        for node in tree.body:
            match node:
                case ast.Assign(value=ast.Dict(values=[ast.Constant(value=str()), *_]) as table):
                    self.lazy.update(ast.literal_eval(table))
                    tables.append(node)
        return tables

    def _read_import_call(self, args: list[ast.expr]) -> None:
        """Take the package of `import_module(f"package.{module}")`, or a module that is named outright."""
        match args:
            case [ast.Constant(value=str(module)), *_]:
                self.names.add(self._absolute(module))
            case [ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]), *_]:
                self.packages.add(self._absolute(start.removesuffix(".")))

    def _read_path(self, node: ast.BinOp) -> Iterator[ast.AST]:
        """Take the constant ends of `folder / "data" / "name"`, and yield the parts of other kinds."""
        parts: list[ast.expr] = []
        whole: ast.expr = node
        while isinstance(whole, ast.BinOp) and isinstance(whole.op, ast.Div):
            parts.append(whole.right)
            whole = whole.left
        run: list[str] = []
        for part in (*reversed(parts), whole):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                run.append(part.value)
                continue
            end = "/".join(run)
            self._read_string(f"tests/{end}" if f"{end}/".startswith("data/") else end)
            run = []
            yield part

    def _read_string(self, text: str) -> None:
        self.names |= set(NAME.findall(text))
        self.paths |= {*PROGRAM.findall(text), *DATA.findall(text)}
        if function := FUNCTION.fullmatch(text):
            self.names |= {function.group(1), f"{self.package}.{function.group(1)}"}
        if "import " in text:
            for module, names, alone in IMPORT.findall(text):
                self.names |= {alone} if alone else {f"{module}.{name.strip()}" for name in names.split(",")}


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


class SourceGraph:
    """The files under `root`, and the files that each of them needs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._facts: dict[str, Facts] = {}
        self._needs: dict[str, set[str]] = {}
        self._cache = _read_cache(root / CACHE)

    def facts(self, path: str) -> Facts:
        """Return the facts of a file, from the cache unless the file's size or times are others."""
        if path not in self._facts:
            status = (self._root / path).stat()
            stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            entry = self._cache.get(path)
            if entry is None or entry[0] != stamp:
                entry = [stamp, asdict(read_facts(path, (self._root / path).read_bytes()))]
                self._cache[path] = entry
            self._facts[path] = Facts(**entry[1])
        return self._facts[path]

    def save(self) -> None:
        """Write the cache for the next graph."""
        path = self._root / CACHE
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"reader": _reader(), "files": self._cache}))
        new.replace(path)

    def closure(self, starts: Iterable[str], is_left_out: Callable[[str], bool]) -> dict[str, str | None]:
        """Return all files that `starts` need, each with a file that needs it.

        Files that are left out are not followed either.
        """
        closed: dict[str, str | None] = dict.fromkeys(starts)
        waiting = list(closed)
        for path in waiting:  # which grows
            for needed in sorted(self.needs(path)):
                if needed not in closed and not is_left_out(needed):
                    closed[needed] = path
                    waiting.append(needed)
        return closed

    def needs(self, path: str) -> set[str]:
        """Return the files that a file needs directly."""
        if path not in self._needs:
            facts = self.facts(path)
            needs: set[str] = set()
            for name in facts.names:
                needs.update(self._module(name))
            for package in facts.packages:
                needs.update(self._modules_in(package))
            for text in facts.paths:
                needs.update(self._path(path, text))
            if path.endswith(".py"):
                needs.update(self._data_beside.get(os.path.dirname(path), ()))
            self._needs[path] = needs - {path}
        return self._needs[path]

    def _module(self, name: str) -> Iterator[str]:
        """Yield the files that are run to import a dotted name. What is left of the name are attributes."""
        for top in ROOTS:
            folder, parts = top, name.split(".")
            while parts:
                stem = f"{folder}{parts.pop(0)}"
                folder = LINKS.get(f"{stem}/", f"{stem}/")
                files = [file for file in (f"{stem}.py", f"{folder}__init__.py") if file in self.files]
                yield from files
                if not parts and f"{folder}__main__.py" in self.files:
                    yield f"{folder}__main__.py"
                for file in files:
                    yield from self._lazy_modules(self.facts(file).lazy, parts)

    def _lazy_modules(self, lazy: Mapping[str, str], parts: list[str]) -> Iterator[str]:
        """Yield the modules behind a name in a package's table, or behind all where the package itself is named."""
        names = lazy if parts in ([], ["*"]) else lazy.keys() & {parts[0]}
        for module in sorted({lazy[name] for name in names}):
            yield from self._module(module)

    def _modules_in(self, package: str) -> Iterator[str]:
        for top in ROOTS:
            folder = f"{top}{package.replace('.', '/')}/"
            for link, target in LINKS.items():
                folder = folder.replace(link, target, 1)
            yield from (file for file in self.files if file.startswith(folder) and file.endswith(".py"))

    def _path(self, path: str, text: str) -> Iterator[str]:
        """Yield the programs and data that a path in the file `path` may mean."""
        text = text.strip("/")
        for folder in ("", "scripts/", "tests/", f"{os.path.dirname(path)}/"):
            if f"{folder}{text}" in self.files:
                yield f"{folder}{text}"
            elif f"{folder}{text}/".startswith("tests/data/"):
                yield from (file for file in self.files if file.startswith(f"{folder}{text}/"))

    @cached_property
    def _data_beside(self) -> Mapping[str, list[str]]:
        """The product's data files by the nearest folder that has modules."""
        beside: dict[str, list[str]] = {}
        homes = {os.path.dirname(file) for file in self.files if file.endswith(".py")}
        for file in sorted(self.files):
            if not file.startswith(("scripts/", "tests/")) and not file.endswith((".py", ".pyi", ".md", "py.typed")):
                folder = os.path.dirname(file)
                while folder and folder not in homes:
                    folder = os.path.dirname(folder)
                beside.setdefault(folder, []).append(file)
        return beside

    @cached_property
    def files(self) -> frozenset[str]:
        """All files of the source folders, as paths from the root; links are not followed."""
        files: set[str] = set()
        for top in FOLDERS:
            for folder, folders, names in os.walk(self._root / top):
                folders[:] = [name for name in folders if name != "__pycache__"]
                relative = os.path.relpath(folder, self._root)
                files |= {f"{relative}/{name}" for name in names}
        return frozenset(files)


def _read_cache(path: Path) -> dict[str, list]:
    try:
        cache = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return cache["files"] if cache.get("reader") == _reader() else {}


def _reader() -> str:
    """Return what the cached facts depend on besides the files: this program and Python's syntax trees."""
    return f"{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} {sys.version}"
