"""`jaxllm embed` over the real engine: what HF gives, for a file with bad lines that is gone on with after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.cli.batch import embed
from jaxllm.cli.main import main
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.resolve.engine_args import EngineArgs
from tests.cli.running import read_jsonl, write_jsonl
from tests.models.pooled import read_pooled_goldens
from tests.models.tiny import folder

pytestmark = pytest.mark.engine

FLAGS = ["--dtype", "float32", "--skip-tokenizer-init", "--enforce-eager"]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "foreign": ({"prompt_token_ids": [99_999_999]}, "prompt_token_ids"),
    "long": ({"prompt_token_ids": [5] * 100}, "prompt"),
    "text": ({"text": "no tokenizer here"}, "prompt"),
}


def test_a_file_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    goldens = read_pooled_goldens("bert")
    lines = [{"prompt_token_ids": each.tokens.tolist(), "token_type_ids": each.types.tolist()} for each in goldens]
    lines += [line | {"id": name} for name, (line, _) in BAD.items()]
    source, output = write_jsonl(tmp_path / "in.jsonl", lines), tmp_path / "out.npy"
    command = ["embed", str(folder("bert")), "--input", str(source), "--output", str(output), *FLAGS]

    def load_dying(engine_args: EngineArgs) -> LLMEngine:
        engine = LLMEngine.from_engine_args(engine_args)
        step, finished = engine.step, 0

        def dying_step() -> list[Any]:
            nonlocal finished
            if finished:
                raise KeyboardInterrupt
            outputs = step()
            finished += len(outputs)
            return outputs

        monkeypatch.setattr(engine, "step", dying_step)
        return engine

    with monkeypatch.context() as patch:
        patch.setattr(embed, "load_engine", load_dying)
        assert main([*command, "--max-num-seqs", "2"]) == 130
    assert 0 < len(read_jsonl(Path(f"{output}.partial.jsonl"))) < len(goldens)
    assert main(command) == 1

    matrix = np.load(output)
    wanted = np.stack([golden.output[0] for golden in goldens])  # of the first token
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(matrix[: len(goldens)], wanted, rtol=0, atol=1e-4)
    assert np.isnan(matrix[len(goldens) :]).all()
    errors = read_jsonl(Path(f"{output}.errors.jsonl"))
    assert [(each["id"], each["parameter"]) for each in errors] == [(name, BAD[name][1]) for name in BAD]


def test_classes(tmp_path: Path):
    goldens = read_pooled_goldens("xlm_roberta_classifier")
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt_token_ids": golden.tokens.tolist()} for golden in goldens])
    output = tmp_path / "out.jsonl"
    model = str(folder("xlm_roberta_classifier"))
    assert main(["embed", model, "--task", "classify", "--input", str(source), "--output", str(output), *FLAGS]) == 0
    for record, golden in zip(read_jsonl(output), goldens, strict=True):
        powers = np.exp(golden.output - golden.output.max())
        np.testing.assert_allclose(record["probs"], powers / powers.sum(), rtol=0, atol=1e-4)
        assert record["label"] == f"LABEL_{golden.output.argmax()}"
