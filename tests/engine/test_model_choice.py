"""The model that an engine runs: which weights stay quantized is in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.model import make_model

QUANTIZED = Path(__file__).parents[1] / "data" / "quantized"


def said(case: str, caplog: pytest.LogCaptureFixture) -> str:
    args = EngineArgs(model=str(QUANTIZED / case), skip_tokenizer_init=True, dtype="float32")
    with caplog.at_level("WARNING", "jaxllm"):
        make_model(args.create_engine_config())
    return caplog.text


def test_widened_weights_are_named(caplog: pytest.LogCaptureFixture):
    """A CPU's kernels want rows of a multiple of 64 numbers: here those of 32 are widened, those of 64 are not."""
    text = said("awq", caplog)
    assert "widened as they are loaded: model.layers.0.self_attn" in text
    assert "and 2 more" in text
    assert "mlp.down_proj" not in text


def test_nothing_is_said_of_plain_weights(caplog: pytest.LogCaptureFixture):
    assert "widened" not in said("../tiny/qwen3", caplog)
