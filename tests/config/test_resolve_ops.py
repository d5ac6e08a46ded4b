"""What a self check disproves runs in plain XLA, and the log says so; other ops stay as they are."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from jaxllm import EngineArgs
from jaxllm.models.shapes import linear_shapes
from jaxllm.resolve.resolve_engine import resolve
from jaxllm.resolve.resolve_ops import EngineOps
from pallas_kernels.linear import Linear
from pallas_kernels.native import processor
from tests.models.tiny import folder

DATA = Path(__file__).parents[1] / "data"
MEDIA, QUANTIZED = DATA / "media", DATA / "quantized"


def implementations(ops: EngineOps) -> dict[str, str]:
    """Return the implementation of each op."""
    groups = {type(group.attention).__name__: group.attention.implementation for group in ops.kv_groups}
    states = {
        type(op).__name__: op.implementation
        for group in ops.state_groups
        for op in (group.ops.conv, group.ops.scan)
        if op
    }
    tower = {type(each.attention).__name__: each.attention.implementation for each in ops.towers.values()}
    layers = {"Linear": ops.layers.linear.implementation, "GroupedMatmul": ops.layers.grouped_matmul.implementation}
    return groups | states | tower | layers


@pytest.mark.parametrize(
    ("case", "op", "name", "words"),
    [
        ("qwen3_next", "recurrent_state.causal_conv", "CausalConv", "the causal convolution runs"),
        ("qwen3_next", "recurrent_state.gated_delta", "GatedDelta", "the gated delta rule runs"),
        ("qwen3_next", "grouped_matmul", "GroupedMatmul", "experts are multiplied"),
        ("qwen3_vl", "segment_attention", "SegmentAttention", "images are attended"),
        ("deepseek_v2", "latent_attention", "LatentAttention", "attention runs"),
    ],
)
def test_one_op_is_disproved(
    case: str, op: str, name: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if processor.current().name == "plain":
        pytest.skip("no kernels")
    shutil.copytree(folder(case), tmp_path, dirs_exist_ok=True)
    if (media := MEDIA / case / "preprocessor_config.json").exists():
        shutil.copy(media, tmp_path)
    args = EngineArgs(str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    with caplog.at_level(logging.WARNING, "jaxllm"):
        before = implementations(resolve(args).ops)
        assert not caplog.messages
        after = implementations(resolve(args, disproved={op: "they hung"}).ops)
    assert before[name] == "cpu"
    # On a CPU the matmuls follow attention.
    assert after == before | {name: "xla"} | ({"Linear": "xla"} if words == "attention runs" else {})
    assert set(caplog.messages) == {f"{words} in plain XLA, not in the cpu's own kernels: they hung"}


def test_one_format_of_weights_is_disproved(caplog: pytest.LogCaptureFixture) -> None:
    """Weights of other formats stay with the kernels; if all are wrong, none do."""
    if processor.current().name == "plain":
        pytest.skip("no kernels")
    args = EngineArgs(str(QUANTIZED / "ct_w8a8"), skip_tokenizer_init=True, dtype="float32")
    name = "int8+scales:float32"
    wrong = {f"linear of {name}": "they hung"}
    with caplog.at_level(logging.WARNING, "jaxllm"):
        ops = resolve(args, disproved=wrong).ops
    (message,) = caplog.messages
    assert message == f"weights of {name} are multiplied in plain XLA, not in the cpu's own kernels: they hung"
    names = {shape.format: ops.layers.linear.refusal(shape) for shape in linear_shapes(ops.specs) if shape.format}
    assert {form.name: reason for form, reason in names.items()} == {
        "bfloat16": None,
        name: f"weights of {name} are left out",
    }
    ops = resolve(args, disproved=wrong | {"linear of bfloat16": "they hung"}).ops
    assert ops.layers.linear == Linear("xla")
