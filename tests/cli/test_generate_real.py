"""`jaxllm generate` over the real engine: a file with good and bad prompts, killed in the middle and gone on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.batch import generate
from jaxllm.cli.main import main
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.resolve.engine_args import EngineArgs
from tests.cli.running import read_jsonl, write_jsonl
from tests.models.tiny import folder, read_goldens

pytestmark = pytest.mark.engine

CASE = "llama3_tied"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"prompt_token_ids": []}, "prompt"),
    "foreign": ({"prompt_token_ids": [99_999_999]}, "prompt_token_ids"),
    "long": ({"prompt_token_ids": [1] * 5000}, "prompt"),
    "text": ({"prompt": "no tokenizer here"}, "prompt"),
    "hot": ({"prompt_token_ids": [1], "temperature": 9}, "temperature"),
}


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    args = EngineArgs(
        str(folder(CASE)), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_num_batched_tokens=8
    )
    made = LLMEngine.from_engine_args(args)
    shutdown = made.shutdown
    yield made
    shutdown()


@pytest.fixture
def lines() -> list[dict[str, Any]]:
    """Return the goldens' prompts, a bad one after each."""
    bad = [line | {"id": name} for name, (line, _) in BAD.items()]
    good = [
        {"prompt_token_ids": golden.prompt.tolist(), "max_tokens": len(golden.tokens)} for golden in read_goldens(CASE)
    ]
    return [line for pair in zip((good * len(bad))[: len(bad)], bad, strict=True) for line in pair]


def test_a_file_of_prompts(
    engine: LLMEngine, lines: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(generate, "load_engine", lambda _args: engine)
    monkeypatch.setattr(engine, "shutdown", lambda: None)  # the second run needs it
    source, output = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = ["generate", str(folder(CASE)), "--input", str(source), "--output", str(output)]
    command += ["--temperature", "0", "--ignore-eos"]

    step, finished = engine.step, 0

    def dying_step() -> list[Any]:
        nonlocal finished
        if finished:
            raise KeyboardInterrupt
        outputs = step()
        finished += sum(output.finished for output in outputs)
        return outputs

    monkeypatch.setattr(engine, "step", dying_step)
    assert main(command) == 130
    assert 0 < len(read_jsonl(Path(f"{output}.partial.jsonl"))) < len(BAD)
    engine.abort_request([str(index) for index in range(len(lines))])
    monkeypatch.setattr(engine, "step", step)
    assert main(command) == 1

    records = read_jsonl(output)
    assert [record["index"] for record in records] == list(range(len(lines)))
    for record, line in zip(records, lines, strict=True):
        if "id" in line:
            assert (record["id"], record["parameter"]) == (line["id"], BAD[line["id"]][1])
            continue
        golden = next(each for each in read_goldens(CASE) if each.prompt.tolist() == line["prompt_token_ids"])
        assert record["outputs"][0]["token_ids"] == golden.tokens.tolist()
        assert record["num_prompt_tokens"] == len(golden.prompt)
