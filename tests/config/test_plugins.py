"""Plugins of installed packages are loaded once, before engine arguments are resolved; a bad one costs nothing else."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from jaxllm.config.environment import plugin_names
from jaxllm.config.plugins import GROUP, PluginLoader
from tests.architecture.sources import ROOT
from tests.config.test_engine_config import LLAMA

PLUGIN = """
from jaxllm import register_model
from jaxllm.config.plugins import load_plugins

CALLS = []

def good():
    load_plugins()  # does nothing: they are being loaded
    CALLS.append("good")
    register_model("MyForCausalLM", "jaxllm.models.families.llama:LLAMA")

def bad():
    raise KeyError("of the plugin")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that holds an installed package with plugins."""
    (tmp_path / "plugins_of_mine.py").write_text(PLUGIN)
    info = tmp_path / "plugins_of_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins-of-mine\nVersion: 1.0\n")
    lines = ["bad = plugins_of_mine:bad", "lost = no_such_module:f", "good = plugins_of_mine:good"]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
    monkeypatch.delenv("JAXLLM_PLUGINS", raising=False)
    return tmp_path


@pytest.mark.engine
def test_a_plugin_brings_a_model(folder: Path):
    """The process is a new one, as that of an engine core is."""
    (folder / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["MyForCausalLM"]}))
    program = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from jaxllm import EngineArgs\n"
        f"args = EngineArgs({str(folder)!r}, load_format='dummy')\n"
        "for _ in range(2): config = args.create_engine_config()\n"
        "import plugins_of_mine\n"
        "print(config.model_config.architecture, plugins_of_mine.CALLS)"
    )
    env = {"PYTHONPATH": f"{ROOT}:{folder}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "MyForCausalLM ['good']\n"
    assert "plugin 'bad' (plugins_of_mine:bad) failed" in done.stderr
    assert "KeyError: 'of the plugin'" in done.stderr
    assert "plugin 'lost' (no_such_module:f) failed" in done.stderr
    assert "loaded plugin 'good' (plugins_of_mine:good)" in done.stderr


def plugins(calls: list[str]) -> list[EntryPoint]:
    class Plugin(EntryPoint):
        def load(self):
            return lambda: calls.append(self.name)

    return [Plugin(name, f"module:{name}", GROUP) for name in ("one", "two", "three")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ["one", "two", "three"]), ("", []), ("two", ["two"]), (" three,one ,", ["one", "three"])],
)
def test_the_environment_restricts_them(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: list[str]):
    monkeypatch.delenv("JAXLLM_PLUGINS", raising=False)
    if value is not None:
        monkeypatch.setenv("JAXLLM_PLUGINS", value)
    calls: list[str] = []
    PluginLoader(lambda: plugins(calls), plugin_names).load()
    assert calls == expected


def test_a_plugin_that_is_not_installed(caplog: pytest.LogCaptureFixture):
    calls: list[str] = []
    PluginLoader(lambda: plugins(calls), lambda: ["one", "four"]).load()
    assert calls == ["one"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "JAXLLM_PLUGINS: no plugin 'four' is installed"
    ]


def test_threads_wait_until_they_are_loaded():
    calls: list[str] = []
    going_on, loaded = threading.Event(), []

    class Slow(EntryPoint):
        def load(self):
            return lambda: going_on.wait(10) and calls.append("slow")

    loader = PluginLoader(lambda: [Slow("slow", "module:slow", GROUP)], lambda: None)

    def load() -> None:
        loader.load()
        loaded.append(list(calls))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert loaded == []
    going_on.set()
    for thread in threads:
        thread.join()
    assert loaded == [["slow"]] * 3
