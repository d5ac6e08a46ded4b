"""R18: no code from a request or a model's folder is run, and no check disappears under `python -O`."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from tests.architecture.sources import product
from tests.async_engine.support import mock_llm, tiny_args
from tests.e2e.tiny_engine import CASE
from tests.models.tiny import folder
from tests.server.support import served

CALLS = {
    "yaml": {"load", "load_all", "unsafe_load", "full_load", "Loader", "UnsafeLoader", "FullLoader"},
    "os": {"system", "popen", "execv", "execve", "execvp", "spawnl", "spawnv"},
    "torch": {"load"},
    "jinja2": {"Environment", "Template"},
    "runpy": {"run_path", "run_module"},
    "ctypes": {"CDLL"},
}
"""Functions that run code or make objects from data, by module."""
RUNS_PROGRAMS = {"jaxllm/as_vllm.py"}
"""What runs the program that its command line names, as Python itself would."""
LOADS_ARRAYS = {"numpy", "np", "jnp"}
# What is imported by a name that the one who starts the engine gives: middleware, processors, plugins.
IMPORTS_BY_NAME = {"import_module", "spec_from_file_location", "exec_module"}


def test_r18_nothing_in_the_product_runs_data() -> None:
    offences = []
    for source in (each for each in product() if each.where not in RUNS_PROGRAMS):
        harmless = [node.func for node in source.nodes if isinstance(node, ast.Call) and _loads_nothing(node)]
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node not in harmless:
                if node.attr in CALLS.get(node.value.id, ()):
                    offences.append(f"{source.where}:{node.lineno} {node.value.id}.{node.attr}")
                if node.value.id in LOADS_ARRAYS and node.attr in ("load", "loadtxt", "fromregex"):
                    offences.append(f"{source.where}:{node.lineno} {node.value.id}.{node.attr}")
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell", "trust_remote_code"):
                is_off = isinstance(node.value, ast.Constant) and node.value.value is False
                offences += [] if is_off else [f"{source.where}:{node.value.lineno} {node.arg}="]
        offences += [
            f"{source.where}:{imported.line} {imported.module}.{imported.name}"
            for imported in source.imports
            if imported.name in CALLS.get(imported.module, ())
        ]
    assert offences == []


def _loads_nothing(call: ast.Call) -> bool:
    """Return whether a call is `ctypes.CDLL(None)`, the process's own C library."""
    return ast.unparse(call) == "ctypes.CDLL(None)"


@pytest.mark.parametrize("part", ["server", "text", "engine", "loading"])
def test_r18_modules_are_imported_by_name_where_a_flag_names_them(part: str) -> None:
    """Only --middleware and trace exporters import modules by name in code that handles requests and folders."""
    importers = {
        source.where
        for source in product()
        if source.where.startswith(f"jaxllm/{part}/")
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in IMPORTS_BY_NAME
    }
    assert importers <= {"jaxllm/server/http/middleware.py", "jaxllm/engine/front/tracing.py"}


@pytest.mark.server
def test_r18_checks_hold_where_python_drops_assertions(repository: Path, tmp_path: Path) -> None:
    """Keys, limits of what is sent, and the sandbox of templates, tested under `python -O`."""
    code = """
import sys
import pytest
assert False, "with -O this is dropped"
sys.exit(pytest.main(sys.argv[1:]))
"""
    tests = ["tests/server/http/test_auth.py", "tests/server/http/test_limits.py", "tests/text/test_template_limits.py"]
    options = ["-q", "-n", "0", "-o", f"cache_dir={tmp_path}", "-W", "ignore::pytest.PytestConfigWarning"]
    chosen = ["-k", "not test_time and not test_size and not test_memory"]
    done = subprocess.run(
        [sys.executable, "-O", "-c", code, *options, *chosen, *tests],
        cwd=repository,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


class Bomb:
    """Whoever unpickles this runs it."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the file that exists once code was run."""
    return tmp_path / "marker"


@pytest.fixture
def evil(tmp_path: Path, marker: Path) -> Path:
    """Return a copy of a model's folder with code that makes the marker, and a config that names it."""
    copied = tmp_path / "model"
    shutil.copytree(folder(CASE), copied)
    config = json.loads((copied / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (copied / "config.json").write_text(json.dumps(config))
    for name in ("evil.py", "tokenization.py", "setup.py", "__init__.py"):
        (copied / name).write_text(f"open({str(marker)!r}, 'w')\n")
    return copied


def start(model: Path, **overrides: Any) -> None:
    args = tiny_args(None, **overrides)
    args.model = str(model)
    with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True):
        pass


@pytest.mark.engine
def test_r18_a_model_with_code_runs_without_it(evil: Path, marker: Path) -> None:
    """The architecture is one that jaxllm has."""
    start(evil)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_r18_pickled_weights_are_refused(evil: Path, marker: Path, name: str) -> None:
    """PyTorch's own files are zip files, whose pickles `tests/loading` fills with code."""
    for file in evil.glob("*.safetensors*"):
        file.unlink()
    (evil / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(VLLMValidationError, match=r"safetensors|no zip file"):
        start(evil)
    assert not marker.exists()


def test_r18_a_model_that_needs_its_code_is_refused(evil: Path, marker: Path) -> None:
    config = json.loads((evil / "config.json").read_text())
    (evil / "config.json").write_text(json.dumps(config | {"architectures": ["EvilModel"], "model_type": "evil"}))
    with pytest.raises(VLLMValidationError):
        start(evil)
    with pytest.raises(VLLMValidationError):
        start(evil, trust_remote_code=True)
    assert not marker.exists()


ESCAPES = [
    "{{ cycler.__init__.__globals__.os.popen(COMMAND).read() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system(COMMAND) }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ namespace.__init__.__globals__['os'] }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system(COMMAND) }}",
    "{{ strftime_now.__globals__ }}",
    "{{ dict.__init__.__globals__ }}",
]


def test_r18_a_models_template_cannot_leave_its_sandbox(tokenizer: str, marker: Path) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "return_prompt_text": True}
    args = tiny_args(tokenizer, chat_template="{{ 1 }}")
    with mock_llm(args, tokens_per_second=1000) as llm, served(llm, "--trust-request-chat-template") as server:
        for template in ESCAPES:
            text = template.replace("COMMAND", f"'touch {marker}'")
            llm.front.chat_renderer._default = text
            for fields in ({}, {"chat_template": text}):
                answer = server.post("/v1/chat/completions", body | fields)
                if answer.status == 200:  # an undefined value shows as nothing
                    assert answer.json["prompt_text"] in ("", "None"), (template, answer.body)
                else:
                    assert answer.status == 400, (template, answer.body)
                assert b"/etc/" not in answer.body
    assert not marker.exists()
