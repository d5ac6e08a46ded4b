"""The house rules hold: sizes, where the environment is read, and what never appears."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.architecture.module_state import find_module_state
from tests.architecture.sources import ROOT, Source, is_function, product

MAX_FILE_LINES = {"jaxllm": 600, "models": 600, "pallas_kernels": 900}
MAX_FUNCTION_LINES = {"jaxllm": 50, "models": 50, "pallas_kernels": 150}
# The kernels stand alone: a CPU's follow JAXLLM_CPU, and a GPU's interpreter must know how many threads XLA takes.
READS_ENVIRONMENT = {
    "jaxllm/config/environment.py",
    "pallas_kernels/native/processor.py",
    "pallas_kernels/paged_attention/gpu/common.py",
}
MAX_FOLDER_MODULES = 20
LARGE_FOLDERS = {"models/families"}  # one file for each family of models
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch"}
UNSAFE_BUILTINS = {"__import__", "compile", "eval", "exec"}
MACHINE_PATHS = re.compile("(?<![A-Za-z0-9_.])/" + r"(work|root|home/\w+|Users/\w+|opt/pypi\S*)/")

# Parsed once: every test below looks at all of them, and names each offence with its file.
SOURCES = product()


def test_file_sizes():
    sizes = {source.where: len(source.text.splitlines()) for source in SOURCES}
    assert not {where: size for where, size in sizes.items() if size > MAX_FILE_LINES[top_folder(where)]}


def test_folder_sizes():
    """A folder that a newcomer can look through has few modules; `__init__.py` aside."""
    modules = Counter(str(Path(source.where).parent) for source in SOURCES if source.path.name != "__init__.py")
    large = {folder for folder, number in modules.items() if number > MAX_FOLDER_MODULES}
    assert large <= LARGE_FOLDERS


def test_function_sizes():
    long = [
        f"{source.where}: {name} has {lines} lines"
        for source in SOURCES
        for name, lines in function_sizes(source.nodes)
        if lines > MAX_FUNCTION_LINES[top_folder(source.where)]
    ]
    assert not long


def top_folder(where: str) -> str:
    return where.partition("/")[0]


def function_sizes(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield each function's name and its lines from the name to the end, less the docstring's."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            skipped = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
            yield node.name, node.end_lineno - node.lineno + 1 - skipped


def test_environment_is_read_in_one_place():
    reads = [
        f"{source.where}:{line}"
        for source in SOURCES
        if source.where not in READS_ENVIRONMENT
        for line in environment_reads(source)
    ]
    assert not reads


def environment_reads(source: Source) -> list[int]:
    """Return the lines that read or write environment variables through `os`."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    lines = [
        node.lineno
        for node in source.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in names
    ]
    return lines + [imported.line for imported in source.imports if imported.module == "os" and imported.name in names]


def test_nothing_runs_arbitrary_code():
    offences = [
        f"{source.where}:{imported.line} imports {imported.module}"
        for source in SOURCES
        for imported in source.imports
        if imported.top in UNSAFE_MODULES
    ]
    offences += [
        f"{source.where}:{node.lineno} calls {node.func.id}()"
        for source in SOURCES
        for node in source.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_BUILTINS
    ]
    assert not offences


def test_no_mutable_state_in_modules():
    """What changes lives in an object."""
    offences = [f"{source.where}:{line} {name}" for source in SOURCES for line, name in find_module_state(source.tree)]
    assert not offences


STATE = """
from collections import defaultdict
from functools import cache, lru_cache
from itertools import count
import os
from jaxllm.models.registry import BUILT_IN
TABLE, NAMES = {}, [name for name in "ab"]
BY_NAME: dict[str, int] = defaultdict(int)
NUMBERS = count()
FIXED = {"a": 1}
OWNER = Owner(FIXED)
if TABLE is not None:
    SEEN = set[int]()
TABLE["at import"] = 1
def subscript(): TABLE["a"] = 1
def delete(): del TABLE["a"]
def augment(): BY_NAME["a"] += 1
def nested(): TABLE["a"].names.append(1)
def method(): return lambda: SEEN.add(1)
class Class:
    def method(self): NAMES.sort()
def number(): return next(NUMBERS)
def attribute(): subscript.calls = 1
def by_name(): setattr(OWNER, "calls", 1)
def imported(): BUILT_IN["a"] = 1
def declared():
    global NAMES
    NAMES = []
@cache
def kept(a): return a
@lru_cache(maxsize=None)
def kept_too(*a): return a
def library(): os.environ["a"] = "1"
def reads(name): return FIXED[name], FIXED.get(name), sorted(TABLE), OWNER.add(name)
def local():
    TABLE = {}
    TABLE["a"] = 1
    def inner(NAMES): TABLE.update(NAMES.pop())
@cache
def once(): return Owner()
@lru_cache(maxsize=9)
def few(a): return a
"""


def test_mutable_state_is_found():
    names = " ".join(name for _, name in find_module_state(ast.parse(STATE)))
    assert names == "TABLE TABLE BY_NAME TABLE SEEN NAMES NUMBERS subscript OWNER BUILT_IN NAMES kept kept_too"


def test_every_folder_of_modules_is_a_package():
    folders = {source.path.parent for source in SOURCES}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_no_machine_paths():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    offences = []
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if not name or not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # binary test data
        offences += [f"{name}: {match.group()}" for match in MACHINE_PATHS.finditer(text)]
    assert not offences


def test_functions_are_recognised():
    tree = ast.parse("def f():\n    '''Doc.'''\n    return lambda: 1\n")
    assert [type(node).__name__ for node in ast.walk(tree) if is_function(node)] == ["FunctionDef", "Lambda"]
    assert list(function_sizes(ast.walk(tree))) == [("f", 2)]
