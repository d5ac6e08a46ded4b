"""Imports go one way, jaxllm -> models -> pallas_kernels, and nothing heavy is imported at the front door."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from tests.architecture.sources import ROOT, Import, Source, find_imports, product, sources
from tests.engine.support import byte_level

HEAVY = {"flax", "jax", "jaxlib", "torch", "transformers"}
HOST_ONLY_MODULES = [
    "jaxllm.exceptions",
    "jaxllm.outputs",
    "jaxllm.beam_search",
    "jaxllm.decisions",
    "jaxllm.llm",
    "jaxllm.sampling_params",
    "jaxllm.core_messages",
    "jaxllm.parsers",
    "jaxllm.config",
    "jaxllm.resolve.vllm_config",
    "jaxllm.engine.online.async_llm",
    "jaxllm.engine.core.core_process",
    "jaxllm.engine.front.front_end",
    "jaxllm.engine.online.engine_client",
    "jaxllm.engine.client.remote_core",
    "jaxllm.engine.front.start",
    "jaxllm.media.fetching.connector",
    "jaxllm.scheduling.scheduler",
    "jaxllm.text.chat",
    "jaxllm.text.detokenizer",
    "jaxllm.text.logprobs",
    "jaxllm.text.reasoning",
    "jaxllm.text.templates",
    "jaxllm.speech.formats",
    "jaxllm.text.tokenizer_cache",
]


def offences(files: list[Source], is_wrong) -> list[str]:
    return [
        f"{source.where}:{imported.line} imports {imported.module}"
        for source in files
        for imported in source.imports
        if is_wrong(imported)
    ]


def inside(imported: Import, package: str) -> bool:
    """Return whether an import reaches into a package, as `import package.x` or as `from above import package`."""
    full = f"{imported.module}.{imported.name}" if imported.name else imported.module
    return any(name == package or name.startswith(package + ".") for name in (imported.module, full))


def test_kernels_import_only_compilers_and_themselves():
    allowed = {"jax", "llvmlite", "ml_dtypes", "numpy", "pallas_kernels"} | sys.stdlib_module_names
    assert not offences(sources("pallas_kernels"), lambda imported: imported.top not in allowed)


def test_models_import_only_kernels_and_themselves():
    """They are checked under their import name, so a relative import that climbs out of models shows as jaxllm."""

    def is_wrong(imported: Import) -> bool:
        return imported.top == "models" or (imported.top == "jaxllm" and not inside(imported, "jaxllm.models"))

    assert not offences(sources("models"), is_wrong)


def test_models_use_relative_imports_for_themselves():
    lines = [
        f"{source.where}:{number}"
        for source in sources("models")
        for number, line in enumerate(source.text.splitlines(), 1)
        if re.match(r"\s*(from|import) (jaxllm\.)?models\b", line)
    ]
    assert not lines


def test_jaxllm_imports_models_by_their_installed_name():
    assert not offences(sources("jaxllm"), lambda imported: imported.top == "models")
    assert (ROOT / "jaxllm" / "models").readlink().as_posix() == "../models"


def test_scheduling_imports_neither_jax_nor_numpy():
    banned = HEAVY | {"numpy", "ml_dtypes"}
    assert not offences(sources("jaxllm/scheduling"), lambda imported: imported.top in banned)


# A module imports from its own room and from rooms that stand before it, in functions and for types too.
ROOMS = (
    "pallas_kernels",
    "jaxllm.models",
    "jaxllm.version",
    "jaxllm.exceptions",
    "jaxllm.usage",
    "jaxllm.utils",
    "jaxllm.params",
    "jaxllm.lora.request",
    "jaxllm.steering.request",
    "jaxllm.sampling_params",
    "jaxllm.logits_processors",
    "jaxllm.pooling_params",
    "jaxllm.inputs",
    "jaxllm.logprobs",
    "jaxllm.outputs",
    "jaxllm.beam_search",
    "jaxllm.decisions",
    "jaxllm.core_messages",
    "jaxllm.parsers",
    "jaxllm.speculation",
    "jaxllm.config",
    "jaxllm.loading",
    "jaxllm.lora",
    "jaxllm.steering",
    "jaxllm.media",
    "jaxllm.text",
    "jaxllm.speech",
    "jaxllm.constraints",
    "jaxllm.scheduling",
    "jaxllm.sampling",
    "jaxllm.execution",
    "jaxllm.resolve",
    "jaxllm.hub",
    "jaxllm.selfcheck",
    "jaxllm.engine.transport",
    "jaxllm.engine.core",
    "jaxllm.engine.client",
    "jaxllm.engine.front",
    "jaxllm.engine.beam",
    "jaxllm.engine.decisions",
    "jaxllm.engine.online",
    "jaxllm.engine.offline",
    "jaxllm.engine",
    "jaxllm.llm",
    "jaxllm.distributed",
    "jaxllm.plugins",
    "jaxllm.tokenizers",
    "jaxllm.renderers",
    "jaxllm.as_vllm",
    "jaxllm.server.http",
    "jaxllm.server.models",
    "jaxllm.server.openai",
    "jaxllm.server.responses",
    "jaxllm.server.anthropic",
    "jaxllm.server.cohere",
    "jaxllm.server.pooling",
    "jaxllm.server.speech",
    "jaxllm.server.tokens",
    "jaxllm.server.decisions",
    "jaxllm.server.ollama",
    "jaxllm.server.operations",
    "jaxllm.server.grpc",
    "jaxllm.server.page",
    "jaxllm.server.processes",
    "jaxllm.server",
    "jaxllm.v1",
    "jaxllm",  # the front door: loads each name when it is asked for
    "jaxllm.check",
    "jaxllm.cli",
    "jaxllm.entrypoints",
)


def room(module: str) -> str:
    """Return the room that a module is in: the longest name in ROOMS that it begins with."""
    return max((name for name in ROOMS if module == name or module.startswith(f"{name}.")), key=len)


def test_every_file_is_in_a_room():
    strays = [source.where for source in product() if room(source.module) == "jaxllm" and source.module != "jaxllm"]
    assert not strays, "give these a room: name it in ROOMS, below all that may import from it"


def test_rooms_import_only_from_lower_ones():
    files = {source.module for source in product()}
    wrong = [
        f"{source.where}:{imported.line} imports {target}"
        for source in product()
        for imported in source.imports
        if (target := target_module(imported, files)) and ROOMS.index(room(target)) > ROOMS.index(room(source.module))
    ]
    assert not wrong


def test_no_import_cycles():
    """Imports in functions and for types count: a circle is one however late it closes."""
    files = {source.module for source in product()}
    graph = {
        source.module: {
            target
            for imported in source.imports
            if (target := target_module(imported, files)) and target != source.module
        }
        for source in product()
    }
    while leaves := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - leaves for name, needs in graph.items() if name not in leaves}
    while unneeded := set(graph) - set().union(*graph.values()):
        graph = {name: needs for name, needs in graph.items() if name not in unneeded}
    assert not graph, f"these modules import each other: {graph}"


def target_module(imported: Import, known: set[str]) -> str | None:
    """Return the module of ours that an import names; parent packages count only where they are named themselves."""
    submodule = f"{imported.module}.{imported.name}"
    return submodule if submodule in known else imported.module if imported.module in known else None


def test_lazy_and_type_only_imports_are_seen():
    text = "from __future__ import annotations\nif TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n"
    assert [imported.module for imported in find_imports(ast.walk(ast.parse(text)))] == ["__future__", "a", "b"]


IMPORTED_AS = {
    "grpcio": "grpc",
    "grpcio_health_checking": "grpc_health",
    "grpcio_reflection": "grpc_reflection",
    "opentelemetry_exporter_otlp": "opentelemetry",
    "opentelemetry_sdk": "opentelemetry",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
OPTIONAL = {
    "jaxllm.engine.front.tracing": "otel",
    "jaxllm.engine.client.core_actor": "ray",
    "jaxllm.media.audio.containers": "video",
    "jaxllm.media.frames": "video",
}
"""The modules that import what an extra has, each with its extra."""
FRONTENDS = ("jaxllm.server", "jaxllm.entrypoints", "jaxllm.cli")


def declared(lines: list[str]) -> set[str]:
    names = {re.split(r"[\[<>=!~ ]", line, maxsplit=1)[0].replace("-", "_") for line in lines}
    return {IMPORTED_AS.get(name, name) for name in names} - {"jaxllm"}


def test_third_party_imports_are_declared_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    core = declared(project["dependencies"])
    served = declared([line for name in ("serve", "grpc") for line in extras[name]])
    ours = {"jaxllm", "pallas_kernels"} | sys.stdlib_module_names
    files = [source for source in product() if source.module not in OPTIONAL]
    imports = {(imported.top, source.module.startswith(FRONTENDS)) for source in files for imported in source.imports}
    for optional in (source for source in product() if source.module in OPTIONAL):
        libraries = {imported.top for imported in optional.imports} - ours - core
        assert libraries == declared(extras[OPTIONAL[optional.module]])
    assert {name for name, in_front in imports if not in_front} - ours <= core
    assert core <= {name for name, _ in imports}, "declared, but nothing imports it"
    # Starlette comes with FastAPI, protobuf with grpcio's packages.
    assert {name for name, in_front in imports if in_front} - ours - core - {"starlette", "google"} <= served


def modules_after(statement: str) -> tuple[float, set[str]]:
    """Return the seconds that `statement` takes in a fresh interpreter, and the top-level modules then loaded."""
    program = (
        "import json, sys, time; start = time.perf_counter()\n"
        f"{statement}\n"
        "seconds = time.perf_counter() - start\n"
        "print(json.dumps([seconds, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


def test_import_jaxllm_is_quick_and_light():
    runs = [modules_after("import jaxllm") for _ in range(3)]
    assert runs[0][1] & HEAVY == set()
    assert min(seconds for seconds, _ in runs) < 1.0


@pytest.mark.parametrize("module", HOST_ONLY_MODULES)
def test_host_modules_load_without_jax_or_numpy(module: str):
    _, modules = modules_after(f"import {module}")
    assert modules & (HEAVY | {"numpy"}) == set()


def test_a_front_end_makes_text_of_parts_alone(tmp_path: Path):
    """Without jax and transformers it tokenizes, truncates, renders a chat and detokenizes; the results are these."""
    tokenizer = byte_level(bos=True)
    parts = tmp_path / "parts"
    parts.write_bytes(msgspec.msgpack.encode(tokenizer.parts))
    code = f"""
import msgspec
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.chat import ChatRenderer
from jaxllm.text.detokenizer import IncrementalDetokenizer
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_parts import TokenizerParts

def load_hf():
    raise AssertionError("a front end needs no transformers")

parts = msgspec.msgpack.decode(open({str(parts)!r}, "rb").read(), type=TokenizerParts)
tokenizer = Tokenizer(parts, load_hf)
prompt = ChatRenderer(tokenizer, None).render([{{"role": "user", "content": "hello wörld"}}], "messages")
(ids,) = tokenizer.encode([prompt.text], add_special_tokens=False)
stream = IncrementalDetokenizer(tokenizer, [], SamplingParams(skip_special_tokens=False))
stream.update(ids, finished=True, ends_in_stop_token=False)
assert stream.text == prompt.text == "<|im_start|>user\\nhello wörld<|im_end|>\\n<|im_start|>assistant\\n", stream.text
assert tokenizer.encode([prompt.text], keep=5)[0] == [3, *ids[:4]]
"""
    _, modules = modules_after(code)
    assert "tokenizers" in modules
    assert modules & (HEAVY | {"numpy"}) == set()
