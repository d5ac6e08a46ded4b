"""House rules that a reader can rely on: sizes, where the environment is read, and what never appears."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT, Source, is_function, product

MAX_FILE_LINES = {"jaxllm": 400, "models": 400, "pallas_kernels": 900}
MAX_FUNCTION_LINES = {"jaxllm": 50, "models": 50, "pallas_kernels": 150}
# The kernels stand alone, and their interpreter must know how many threads XLA takes.
READS_ENVIRONMENT = {"jaxllm/config/environment.py", "pallas_kernels/paged_attention/gpu/common.py"}
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch"}
UNSAFE_BUILTINS = {"__import__", "compile", "eval", "exec"}
MACHINE_PATHS = re.compile("(?<![A-Za-z0-9_.])/" + r"(work|root|home/\w+|Users/\w+|opt/pypi\S*)/")

SOURCES = [pytest.param(source, id=source.where) for source in product()]


def top_folder(source: Source) -> str:
    return source.where.partition("/")[0]


@pytest.mark.parametrize("source", SOURCES)
def test_file_size(source: Source):
    assert len(source.text.splitlines()) <= MAX_FILE_LINES[top_folder(source)]


@pytest.mark.parametrize("source", SOURCES)
def test_function_size(source: Source):
    limit = MAX_FUNCTION_LINES[top_folder(source)]
    long = [f"{name}: {lines} lines" for name, lines in function_sizes(source.tree) if lines > limit]
    assert not long


def function_sizes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Lines of each function from its name to its end, less the docstring's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            skipped = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
            yield node.name, node.end_lineno - node.lineno + 1 - skipped


@pytest.mark.parametrize("source", SOURCES)
def test_environment_is_read_in_one_place(source: Source):
    if source.where in READS_ENVIRONMENT:
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    reads = [
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in names
    ]
    reads += [imported.line for imported in source.imports if imported.module == "os" and imported.name in names]
    assert not reads, f"lines {reads}"


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_runs_arbitrary_code(source: Source):
    found = [
        f"line {imported.line}: {imported.module}" for imported in source.imports if imported.top in UNSAFE_MODULES
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_BUILTINS:
            found.append(f"line {node.lineno}: {node.func.id}()")
    assert not found


@pytest.mark.parametrize("source", SOURCES)
def test_no_mutable_state_in_modules(source: Source):
    """No `global` statement: what changes lives in an object."""
    assert not [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Global)]


def test_every_folder_of_modules_is_a_package():
    folders = {source.path.parent for source in product()}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_no_machine_paths():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    found = []
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if not name or not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # binary test data
        found += [f"{name}: {match.group()}" for match in MACHINE_PATHS.finditer(text)]
    assert not found


def test_functions_are_recognised():
    tree = ast.parse("def f():\n    '''Doc.'''\n    return lambda: 1\n")
    assert [type(node).__name__ for node in ast.walk(tree) if is_function(node)] == ["FunctionDef", "Lambda"]
    assert list(function_sizes(tree)) == [("f", 2)]
