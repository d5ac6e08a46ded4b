"""--config FILE.yaml: the command line wins over the file, the file over the defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.config_file import apply_config_file
from jaxllm.cli.main import make_parser
from jaxllm.exceptions import VLLMValidationError
from tests.cli.fake_engine import FakeEngine
from tests.cli.running import run_generate


def parse(path: Path, text: str, *words: str) -> argparse.Namespace:
    path.write_text(text)
    parser, commands = make_parser()
    apply_config_file(commands["generate"], ["--config", str(path), *words])
    return parser.parse_args(["generate", "--config", str(path), *words])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("max-model-len: 4K", "max_model_len", 4096),
        ("max_model_len: 2048", "max_model_len", 2048),
        ("max-model-len: auto", "max_model_len", -1),
        ("gpu-memory-utilization: 0.5", "gpu_memory_utilization", 0.5),
        ("gpu-memory-utilization: 1", "gpu_memory_utilization", 1.0),
        ("enable-prefix-caching: false", "enable_prefix_caching", False),
        ("enforce-eager: true", "enforce_eager", True),
        ("hf-overrides: {rope_theta: 5}", "hf_overrides", {"rope_theta": 5}),
        ("stop: END", "stop", ["END"]),
        ("stop: [a, b]", "stop", ["a", "b"]),
        ("stop-token-ids: [1, 2]", "stop_token_ids", [1, 2]),
        ("prompt: [a, b]", "prompt", ["a", "b"]),
        ("temperature: 0.7", "temperature", 0.7),
        ("chat: true", "chat", True),
        ("hf-token: true", "hf_token", True),
        ("hf-token: abc", "hf_token", "abc"),
        ("model: org/name", "model", "org/name"),
        ("tokenizer: null", "tokenizer", None),
        ("", "dtype", "auto"),
    ],
)
def test_values(file: Path, text: str, name: str, value: Any):
    assert getattr(parse(file, text), name) == value


def test_repeated_flags_are_collected(file: Path):
    assert parse(file, "stop: [a, b]", "--stop", "c", "--stop", "d").stop == ["c", "d"]
    assert parse(file, "stop: [a, b]").stop == ["a", "b"]


def test_the_command_line_wins(file: Path):
    text = "max-model-len: 1k\ntemperature: 0.5\nenforce-eager: true\nstop: [a]"
    args = parse(file, text, "m", "--max-model-len", "2k", "--temperature", "0.1", "--no-enforce-eager", "--stop", "b")
    assert (args.model_tag, args.max_model_len, args.temperature, args.enforce_eager) == ("m", 2000, 0.1, False)
    assert args.stop == ["b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modle-len: 3", "'max-model-len'"),
        ("config: other.yaml", "no flag is called"),
        ("max-model-len: many", "max-model-len"),
        ("seed: [1, 2]", "seed"),
        ("chat: 1", "true or false"),
        ("hf-overrides: 3", "JSON object"),
        ("- a\n- b", "flag: value"),
        ("a: b: c", "config.yaml"),
        ("pipeline-parallel-size: two", None),
    ],
)
def test_bad_files(file: Path, text: str, message: str | None):
    if message is None:
        file.write_text(text)
        with pytest.raises(VLLMValidationError, match="pipeline_parallel_size='two' is not supported"):
            run_generate(FakeEngine(), "m", "--prompt", "a", "--config", file)
        return
    with pytest.raises(VLLMValidationError, match=message):
        parse(file, text)


def test_a_whole_run_from_a_file(file: Path, capsys: pytest.CaptureFixture[str]):
    file.write_text("model: m\nprompt: abc\nmax-tokens: 3\nn: 2\n")
    engine = FakeEngine()
    assert run_generate(engine, f"--config={file}") == 0
    ((_, prompt, params, _),) = engine.requests
    assert (prompt, params.max_tokens, params.n) == ({"prompt": "abc"}, 3, 2)
    assert "cut off" not in capsys.readouterr().err


def test_the_models_name_on_the_command_line_wins(file: Path, tmp_path: Path):
    file.write_text("model: from-file\n")
    seen: list[str] = []
    parser, commands = make_parser()
    words = ["from-command-line", "--prompt", "a", "--config", str(file), "--output", str(tmp_path / "o.json")]
    apply_config_file(commands["generate"], words)
    args = parser.parse_args(["generate", *words])

    def make_engine(engine_args: Any) -> FakeEngine:
        seen.append(engine_args.model)
        return FakeEngine()

    assert args.run(args, make_engine) == 0
    assert seen == ["from-command-line"]
