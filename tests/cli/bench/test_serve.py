"""`jaxllm bench serve` measures a server whose engine has no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.cli.main import main
from tests.server.support import Served

SMALL = ["--random-input-len", "8", "--random-output-len", "6", "--num-prompts", "5", "--disable-tqdm"]


def words(server: Served, tokenizer: str, *more: str) -> list[str]:
    return ["bench", "serve", "--base-url", server.url, "--tokenizer", tokenizer, *SMALL, *more]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_report_and_a_file(
    mock_server: Served, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
):
    more = ["--backend", backend, "--ignore-eos", "--metric-percentiles", "50,99", "--max-concurrency", "2"]
    saved = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert main(words(mock_server, tokenizer, *more, *saved, "--metadata", "by=test", "--num-warmups", "1")) == 0
    shown = capsys.readouterr().out
    for term in ("Successful requests:                     5", "Mean TTFT", "P99 TPOT", "Median ITL", "P50 E2EL"):
        assert term in shown
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["completed"], document["failed"], document["by"]) == (5, 0, "test")
    assert document["output_lens"] == [6] * 5
    assert document["total_output_tokens"] == 30
    assert document["max_concurrent_requests"] <= 2
    assert document["model_id"] == "tiny"
    for ttft, itls in zip(document["ttfts"], document["itls"], strict=True):
        assert ttft > 0
        assert len(itls) <= 5


def test_errors_are_counted_and_shown(mock_server: Served, tokenizer: str, capsys: pytest.CaptureFixture[str]):
    assert main(words(mock_server, tokenizer, "--model", "other")) == 1
    shown = capsys.readouterr()
    assert "Failed requests:                         5" in shown.out
    assert "5 failed: 404: The model `other` does not exist." in shown.err


def test_no_server(tokenizer: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--port", "1", "--tokenizer", tokenizer, *SMALL]) == 1
    assert "http://127.0.0.1:1/v1/models" in capsys.readouterr().err
    again = ["--model", "m", "--ready-check-timeout-sec", "0.01"]
    assert main(["bench", "serve", "--port", "1", "--tokenizer", tokenizer, *SMALL, *again]) == 1
    assert "the server was not ready in 0.01 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--goodput", "ttft"], "NAME:MILLISECONDS"),
        (["--goodput", "itl:5"], "NAME:MILLISECONDS"),
        (["--header", "x"], "KEY=VALUE"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-end-rps"),
        (["--save-result", "--result-dir", "nowhere"], "no such folder"),
        (["--base-url", "localhost:8000"], "http://"),
    ],
)
def test_misuse(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_config_file_gives_flags(
    mock_server: Served, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "bench.yaml"
    path.write_text(f"tokenizer: {tokenizer}\nnum-prompts: 2\nrandom-input-len: 4\nrandom-output-len: 2\n")
    assert main(["bench", "serve", "--base-url", mock_server.url, "--config", str(path), "--disable-tqdm"]) == 0
    assert "Successful requests:                     2" in capsys.readouterr().out
