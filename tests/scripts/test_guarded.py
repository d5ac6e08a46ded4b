"""scripts/guarded.py: a slow check runs again after every change that could make it fail."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import guarded
import msgspec
import pytest
from guarded import CHECKS, IMPORTED_AS, TIME, Check, Guard, name_of, pins, run
from source_graph import PUBLISHED, SourceGraph

CHECK = Check(leaves_out={"models/*/large*": "it is slow"})
EACH_PROCESSOR = Check(each_processor="it is compiled for the processor")
SOURCES = {
    "jaxllm/__init__.py": '_MODULES = {"LLM": "jaxllm.llm", "Other": "jaxllm.other"}\n\ndef __getattr__(name): ...\n',
    "jaxllm/llm.py": "def start():\n    from jaxllm.models import run\n    from . import limits\n",
    "jaxllm/limits.py": '"""Limits."""\n\n\ndef limit(x):\n    """Add one."""\n    return x + 1  # one\n',
    "jaxllm/other.py": "pass\n",
    "jaxllm/types.py": "pass\n",
    "jaxllm/cli/__init__.py": "",
    "jaxllm/cli/__main__.py": "import jaxllm.server.routes\n",
    "jaxllm/server/__init__.py": "",
    "jaxllm/server/routes.py": '"""Routes."""\n\n\ndef route():\n    """Answer."""\n',
    "jaxllm/server/page/index.html": "<html>",
    "models/__init__.py": 'def run(name):\n    import_module(f".families.{name}", __package__)\n',
    "models/plugins.py": "import pkgutil\nfrom . import plugged\n\npkgutil.iter_modules(plugged.__path__)\n",
    "models/plugged/__init__.py": "",
    "models/plugged/plugin.py": "pass\n",
    "models/families/__init__.py": "",
    "models/families/small.py": "from .. import plugins\n",
    "models/families/large.py": "pass\n",
    "pallas_kernels/__init__.py": "",
    "pallas_kernels/linear/__init__.py": 'KERNELS = "cpu.kernel:multiply", "pallas_kernels.gpu:multiply"\n',
    "pallas_kernels/linear/cpu/__init__.py": "",
    "pallas_kernels/linear/cpu/kernel.py": "import numpy\n",
    "pallas_kernels/gpu.py": "pass\n",
    "pallas_kernels/tpu.py": "pass\n",
    "scripts/serve.py": '"""Serve."""\nimport helper\n\nprint(__doc__)\n',
    "scripts/helper.py": "pass\n",
    "scripts/start.sh": "python scripts/started.py\n",
    "scripts/started.py": "pass\n",
    "tests/conftest.py": "",
    "tests/folder/conftest.py": "",
    "tests/folder/test_a.py": """
import pytest
from typing import TYPE_CHECKING
import pallas_kernels.linear
from jaxllm import LLM
from tests.folder import helper

if TYPE_CHECKING:
    from jaxllm import types

pytestmark = [pytest.mark.check]
""",
    "tests/folder/helper.py": """
'''A mention of tests.folder.unneeded, which is no use of it.'''
COMMAND = ["python", "-m", "jaxllm.cli", ROOT / "scripts" / "serve.py", "start.sh"]
PROGRAM = "import sys\\nfrom tests.folder import program\\n"
DATA = Path(__file__).parents[1] / "data" / "tiny" / name
""",
    "tests/folder/program.py": "pass\n",
    "tests/folder/unneeded.py": "pass\n",
    "tests/data/tiny/a/config.json": "{}",
    "tests/data/other/config.json": "{}",
    "tests/test_other.py": "import pytest\n\npytestmark = pytest.mark.checks\n",
    "tests/guarded.json": "{}\n",
    "pyproject.toml": '[tool.pytest.ini_options]\ntimeout = 300\nmarkers = ["a"]\n',
    "requirements.lock": "jax==1.0\njaxlib==1.0\nnumpy==2.0\npytest==9.0\nruff==1.0\n",
}
NEEDED = [
    *("jaxllm/__init__", "jaxllm/llm", "jaxllm/limits", "jaxllm/cli/__init__", "jaxllm/cli/__main__"),
    *(
        "jaxllm/server/routes",
        "models/__init__",
        "models/families/small",
        "models/plugged/plugin",
        "pallas_kernels/linear/__init__",
    ),
    *("pallas_kernels/linear/cpu/kernel", "pallas_kernels/gpu", "scripts/serve", "scripts/helper", "scripts/started"),
    *("tests/conftest", "tests/folder/conftest", "tests/folder/test_a", "tests/folder/helper", "tests/folder/program"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "jaxllm" / "models").symlink_to("../models")
    return tmp_path


def guard(root: Path, check: Check = CHECK) -> Guard:
    """Return a guard that looks at the files anew, with what the last one cached."""
    return Guard(root, {"check": check})


def run_check(root: Path, program: str = "", check: Check = CHECK) -> int:
    return run("check", [sys.executable, "-c", program], root, {"check": check})


def has_changed(root: Path, name: str, text: str) -> bool:
    """Return whether a check that has passed runs again after a file is written."""
    assert run_check(root) == 0
    assert guard(root).why_run("check") is None
    (root / name).write_text(text)
    return guard(root).why_run("check") is not None


def test_a_check_runs_until_it_has_passed(root: Path):
    assert "has never passed on" in (guard(root).why_run("check") or "")
    assert run_check(root, "raise SystemExit(3)") == 3
    assert guard(root).why_run("check")
    assert run_check(root) == 0
    assert guard(root).why_run("check") is None


def test_skipped_tests_are_counted(root: Path):
    assert run_check(root) == 0
    assert re.fullmatch(rf"passed before, on the same sources, {TIME.pattern}", guard(root).how_passed("check"))
    (root / "tests/test_skips.py").write_text("""
import pytest

@pytest.mark.parametrize("number", [1, 2, 3])
def test(number):
    if number > 1:
        pytest.skip("a tool is missing")

@pytest.mark.xfail
def test_known():
    raise AssertionError
""")
    pytest_alone = f"pytest.main(['-q', '-c', '/dev/null', '--rootdir={root}', '{root}/tests/test_skips.py'])"
    assert run_check(root, f"import pytest; raise SystemExit({pytest_alone})") == 0
    assert guard(root).how_passed("check").endswith(", 2 skipped")
    assert guard(root).why_run("check") is None


def test_checks_that_have_not_passed_for_the_longest_time_come_first(root: Path):
    passed = {"a": "0, 2025-12-02 09:00, 0 skipped", "b": "0, 2025-12-01 23:59", "c": "0, 70 skipped"}
    (root / "tests/guarded.json").write_text(json.dumps({name: {guarded.PYTHON: passed[name]} for name in passed}))
    checks = {name: Check() for name in "abcd"}
    assert Guard(root, checks).by_age() == ["c", "d", "b", "a"]
    Guard(root, checks).record("d", "0", 0)
    assert Guard(root, checks).by_age() == ["c", "b", "a", "d"]


def test_an_edit_during_the_run_is_not_recorded(root: Path, capsys: pytest.CaptureFixture[str]):
    edit = f"open({str(root / 'jaxllm/limits.py')!r}, 'w').write('changed = 1')"
    assert run_check(root, edit) == 1
    assert "its sources changed while it ran" in capsys.readouterr().err
    assert guard(root).why_run("check")


def test_an_edit_that_is_undone_during_the_run_is_not_recorded(root: Path):
    path = str(root / "jaxllm/limits.py")
    assert (
        run_check(root, f"text = open({path!r}).read()\nfor each in ('1', text): open({path!r}, 'w').write(each)") == 1
    )


def test_other_files_of_a_check_count(root: Path):
    (root / "page.md").write_text("one")
    check = replace(CHECK, pages=("page.md",))
    assert run_check(root, check=check) == 0
    (root / "page.md").write_text("two")
    assert guard(root, check).why_run("check")


@pytest.mark.parametrize("name", [f"{name}.py" for name in NEEDED])
def test_a_change_of_a_needed_module_is_seen(root: Path, name: str):
    assert has_changed(root, name, SOURCES[name] + "changed = 1\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("models/families/new.py", "pass\n"),
        ("scripts/start.sh", "changed"),
        ("jaxllm/server/page/index.html", "changed"),
        ("tests/data/tiny/a/config.json", "[]"),
        ("tests/data/tiny/new.json", "[]"),
        ("tests/test_new.py", "import pytest\n\npytestmark = pytest.mark.check\n"),
        ("jaxllm/limits.py", "def limit(x):\n    return x + 2\n"),
        ("requirements.lock", SOURCES["requirements.lock"].replace("numpy==2.0", "numpy==2.1")),
        ("requirements.lock", SOURCES["requirements.lock"].replace("pytest==9.0", "pytest==9.1")),
        ("pyproject.toml", SOURCES["pyproject.toml"].replace("300", "3")),
    ],
)
def test_other_changes_that_matter_are_seen(root: Path, name: str, text: str):
    assert has_changed(root, name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("jaxllm/limits.py", '"""The limits."""\n\n# A comment.\ndef limit(x):\n    return x + 1\n'),
        ("jaxllm/server/routes.py", SOURCES["jaxllm/server/routes.py"].replace("Routes", "The routes")),
        *((f"{name}.py", "changed = 1\n") for name in ("jaxllm/other", "jaxllm/types", "models/families/large")),
        *(
            (f"{name}.py", "changed = 1\n")
            for name in ("pallas_kernels/tpu", "tests/test_other", "tests/folder/unneeded")
        ),
        ("tests/data/other/config.json", "[]"),
        ("requirements.lock", SOURCES["requirements.lock"].replace("ruff==1.0", "ruff==1.1")),
        ("pyproject.toml", SOURCES["pyproject.toml"].replace('"a"', '"a", "b"')),
    ],
)
def test_changes_that_do_not_matter_are_not(root: Path, name: str, text: str):
    assert not has_changed(root, name, text)


def test_docstrings_that_the_server_publishes_count(root: Path):
    assert has_changed(
        root, "jaxllm/server/routes.py", SOURCES["jaxllm/server/routes.py"].replace("Answer", "Answer a request")
    )


def test_docstrings_that_a_program_prints_count(root: Path):
    assert has_changed(root, "scripts/serve.py", SOURCES["scripts/serve.py"].replace("Serve", "Serve a model"))


def test_all_described_types_are_in_published_files():
    from jaxllm.server.app import build_app
    from jaxllm.server.openapi import described_types
    from tests.server.support import command_line

    kinds = described_types(build_app(command_line()).routes)
    _, components = msgspec.json.schema_components(kinds, ref_template="{name}")
    ours = [(name.replace(".", "/"), module) for name, module in sys.modules.items() if name.startswith("jaxllm.")]
    published = [module for name, module in ours if f"{name}.py".startswith(PUBLISHED)]
    classes = {
        name
        for module in published
        for name, kind in vars(module).items()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    }
    assert not components.keys() - classes, f"described, but not in {PUBLISHED}"


def test_a_check_may_have_to_pass_on_each_kind_of_processor(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guarded, "processor", lambda: "x86_64 amx")
    assert run_check(root, check=EACH_PROCESSOR) == 0
    monkeypatch.setattr(guarded, "processor", lambda: "x86_64 avx2")
    assert guard(root, EACH_PROCESSOR).why_run("check") == f"has never passed on x86_64 avx2, {guarded.PYTHON}"
    assert run_check(root, check=EACH_PROCESSOR) == 0
    monkeypatch.setattr(guarded, "processor", lambda: "x86_64 amx")
    assert guard(root, EACH_PROCESSOR).why_run("check") is None
    assert len(json.loads((root / "tests/guarded.json").read_text())["check"]) == 2
    monkeypatch.setattr(guarded, "PYTHON", "Python 3.99")
    assert guard(root, EACH_PROCESSOR).why_run("check") == "has never passed on x86_64 amx, Python 3.99"


def test_other_checks_hold_on_all_processors(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guarded, "processor", lambda: "x86_64 amx")
    assert run_check(root) == 0
    monkeypatch.setattr(guarded, "processor", lambda: "x86_64 avx2")
    assert guard(root).why_run("check") is None
    monkeypatch.setattr(guarded, "PYTHON", "Python 3.99")
    assert guard(root).why_run("check") == "has never passed on Python 3.99"


def test_facts_of_unchanged_files_come_from_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch):
    first = guard(root)
    first.digest("check")
    first.graph.save()
    with monkeypatch.context() as patch:
        patch.setattr("source_graph.read_facts", lambda path, content: pytest.fail(f"{path} was read"))
        assert guard(root).digest("check") == first.digest("check")
    (root / "jaxllm/limits.py").write_text("changed = 1\n")
    assert guard(root).digest("check") != first.digest("check")


def test_pins_are_those_of_imported_packages_and_their_requirements():
    lock = "# Comment.\nruff==1.0\nJinja2==3.0\nMarkupSafe==2.0\npyzmq==27.0\n"
    assert pins(lock, {"jinja2", "zmq", "os", "unknown"}) == {"Jinja2==3.0", "MarkupSafe==2.0", "pyzmq==27.0"}


@pytest.fixture(scope="module")
def guard_of_repository(repository: Path) -> Guard:
    guard = Guard(repository)
    for check in CHECKS:
        guard.files(check)
    guard.graph.save()
    return guard


def test_every_package_that_a_check_imports_is_pinned_or_optional(repository: Path, guard_of_repository: Guard):
    """A package that the lock does not name has no version in a digest."""
    lock = (repository / "requirements.lock").read_text()
    names = {name_of(line) for line in lock.splitlines() if "==" in line}
    paths = set(itertools.chain.from_iterable(map(guard_of_repository.files, CHECKS)))
    product = [path for path in paths if path.startswith(("jaxllm/", "models/", "pallas_kernels/"))]
    imported = {top for path in product if path.endswith(".py") for top in imported_tops(repository / path)}
    unknown = {top for top in imported - sys.stdlib_module_names if not is_pinned(top, names)}
    assert unknown <= {"jaxllm", "pallas_kernels", "ray", "torch"}, "name their packages in IMPORTED_AS"


def imported_tops(path: Path) -> set[str]:
    pattern = r"^\s*(?:from (\w+)[\w.]* import |import (\w+)[\w.]*(?: as \w+)?$)"
    return {top or other for top, other in re.findall(pattern, path.read_text(), re.MULTILINE)}


def is_pinned(top: str, names: set[str]) -> bool:
    return all(name in names for name in IMPORTED_AS.get(top, (name_of(top),)))


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_every_check_finds_its_sources(guard_of_repository: Guard, check: str):
    assert len(guard_of_repository.files(check)) > 10
    assert guard_of_repository.digest(check)


def test_patterns_of_what_is_left_out_match_files(guard_of_repository: Guard):
    """A file that has moved would no longer be left out."""
    patterns = {pattern for check in CHECKS.values() for pattern in check.leaves_out}
    assert [
        pattern for pattern in sorted(patterns) if not fnmatch.filter(guard_of_repository.graph.files, pattern)
    ] == []


def test_every_marked_check_has_its_tests_and_runs(repository: Path, guard_of_repository: Guard):
    settings = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {line.partition(":")[0] for line in settings["markers"]}
    assert markers == CHECKS.keys() - {"tpu_compiler"}
    script = (repository / "scripts/test.sh").read_text()
    [interpreted] = re.findall(r"^interpreted=\(([\w ]+)\)", script, re.MULTILINE)
    assert set(interpreted.split()) <= markers
    for check in markers:
        for path in guard_of_repository.tests(check):
            assert Path(path).name.startswith("test_"), f"{path} marks {check}, but pytest does not collect its tests"


def test_a_mark_in_any_folder_is_found(root: Path):
    (root / "tests/deep/er").mkdir(parents=True)
    (root / "tests/deep/er/test_b.py").write_text("import pytest\n\n@pytest.mark.check\ndef test(): ...\n")
    assert guard(root).tests("check") == ["tests/deep/er/test_b.py", "tests/folder/test_a.py"]


UNDERSTOOD = {
    "_MODULES[name]",  # the table of a module with `__getattr__`
    "families.__path__",
    "f'transformers.models.{family}.image_processing_pil_{family}'",
    'f"{families.__name__}.{name}"',
    *("f'jaxllm.parsers.tools.{module}'", "f'pallas_kernels.{module}'"),
    # Modules of users or of other packages.
    *("EXPORTERS[traces_protocol()]", "module", "module_name", "name", "self._name", "words[0]", "words[1]"),
    "Path(plugin_path).stem",
}
"""Arguments of functions that import a module by a computed name: scripts/source_graph.py finds these modules."""


def test_modules_that_are_imported_by_computed_names_are_found(repository: Path, guard_of_repository: Guard):
    functions = "import_module|iter_modules|walk_packages|__import__|run_module|run_path|spec_from_file_location"
    for path in guard_of_repository.graph.files:
        if path.startswith(("jaxllm/", "models/", "pallas_kernels/")) and path.endswith(".py"):
            text = (repository / path).read_text()
            if re.search(rf"\b({functions})\(", text):
                calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args]
                for call in calls:
                    if re.fullmatch(rf"([\w.]+\.)?({functions})", ast.unparse(call.func)):
                        argument = ast.unparse(call.args[0])
                        assert isinstance(call.args[0], ast.Constant) or argument in UNDERSTOOD, f"{path}: {argument}"


@pytest.mark.parametrize(
    ("checks", "message"),
    [({"check": Check(programs=("scripts/gone.py",))}, "gone.py"), ({"unmarked": Check()}, "no test has the mark")],
)
def test_wrong_checks_are_refused(root: Path, checks: Mapping[str, Check], message: str):
    (name,) = checks
    with pytest.raises((FileNotFoundError, LookupError), match=message):
        Guard(root, checks).files(name)


def test_needs_are_found_through_the_link(root: Path):
    assert "models/__init__.py" in SourceGraph(root).needs("jaxllm/llm.py")
