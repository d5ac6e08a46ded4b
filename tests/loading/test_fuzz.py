"""Bytes from strangers: only ValueError comes out, and nothing larger than the file is allocated."""

from __future__ import annotations

import contextlib
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.names import check_names
from jaxllm.loading.safetensors import SafetensorsFile
from jaxllm.loading.torch_files.archive import TorchFile
from jaxllm.models import ModelSpecs
from jaxllm.resolve.checkpoint_settings import read_model_config
from tests.loading.files import Q8_0, gguf_bytes, gguf_f32, llama_metadata, safetensors_bytes
from tests.loading.torch_writer import program, storage_of, tensor, zip_bytes

pytestmark = pytest.mark.loading

SLACK_BYTES = 1 << 20
NUM_EXAMPLES = 150

SAFETENSORS = safetensors_bytes({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.int8)})
TORCH = (Path(__file__).resolve().parents[1] / "data/torch/tensors.bin").read_bytes()
FLOATS = storage_of(np.zeros(6, np.float32), "0")
TORCH_PICKLE = program({"a": tensor(FLOATS, (2, 3)), "b": tensor(FLOATS._replace(key="1"), (3, 2), (1, 3))})
GGUF = gguf_bytes(
    llama_metadata() | {"tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.ggml.scores": [0.0, -1.0]},
    gguf_f32({"token_embd.weight": np.ones((6, 8)), "rope_freqs.weight": np.ones(2)})
    | {"blk.0.attn_q.weight": (Q8_0, (8, 32), b"\1" * 272)},
)
# Numbers that length, offset and count fields break on.
EXTREMES = (0, 1, 7, 0x7F, 0x80, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


@st.composite
def mutated(draw: st.DrawFn, valid: bytes) -> bytes:
    """Draw a valid file with some bytes overwritten, put in, taken out or cut off."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(("byte", "number", "insert", "delete", "cut")))
        if kind == "byte":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            width = draw(st.sampled_from((1, 4, 8)))
            data[at : at + width] = (draw(st.sampled_from(EXTREMES)) % 256**width).to_bytes(width, "little")
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == "delete":
            del data[at : at + draw(st.integers(1, 16))]
        else:
            del data[at:]
    return bytes(data)


def read_safetensors(path: Path) -> None:
    file = SafetensorsFile(path)
    for name in file.entries:
        np.array(file.read(name))
        file.release(name)


def read_torch(path: Path) -> None:
    file = TorchFile(path)
    for name in file.entries:
        np.array(file.read(name))
        file.release(name)


def read_gguf(path: Path) -> None:
    file = GGUFFile(path)
    for key in file.keys:
        if file.is_array(key):
            try:
                file.strings(key)
            except ValueError:
                file.array(key)
    for name in file.tensors:
        file.data(name).sum()
        file.release(name)


def read_gguf_model(path: Path) -> None:
    checkpoint = GGUFCheckpoint(path)
    for name in checkpoint.tensors:
        checkpoint.read(name)


def survives(read: Callable[[Path], None], data: bytes, allowance: int) -> None:
    """Assert that reading `data` raises nothing but ValueError, and stays within `allowance` bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(data)
        tracemalloc.start()
        try:
            read(path)
        except ValueError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak <= allowance


@settings(max_examples=NUM_EXAMPLES)
@given(data=st.one_of(st.binary(max_size=200), mutated(SAFETENSORS)))
def test_safetensors(data: bytes):
    survives(read_safetensors, data, len(data) + SLACK_BYTES)


@settings(max_examples=2 * NUM_EXAMPLES)
@given(data=mutated(TORCH))
def test_torch_files(data: bytes):
    survives(read_torch, data, len(data) + SLACK_BYTES)


@settings(max_examples=2 * NUM_EXAMPLES)
@given(data=mutated(TORCH_PICKLE))
@example(data=TORCH_PICKLE.replace(b"ctorch._utils", b"ct\\orch._utils"))
def test_pickles_of_torch_files(data: bytes):
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ValueError):
        (path := Path(folder) / "x.bin").write_bytes(zip_bytes(data, {str(i): bytes(24) for i in range(3)}))
        read_torch(path)


@settings(max_examples=NUM_EXAMPLES)
@given(data=st.one_of(st.binary(max_size=200).map(lambda rest: b"GGUF\3\0\0\0" + rest), mutated(GGUF)))
def test_gguf(data: bytes):
    survives(read_gguf, data, len(data) + SLACK_BYTES)


@settings(max_examples=NUM_EXAMPLES)
@given(data=mutated(GGUF))
def test_gguf_as_a_model(data: bytes):
    # A block-quantized tensor grows at most 13 times when it becomes float32.
    survives(read_gguf_model, data, 13 * len(data) + SLACK_BYTES)


def test_the_files_that_are_mutated_are_valid(tmp_path: Path):
    for name, data, read in (
        ("a", SAFETENSORS, read_safetensors),
        ("a", TORCH, read_torch),
        ("b", GGUF, read_gguf),
        ("b", GGUF, read_gguf_model),
    ):
        (tmp_path / name).write_bytes(data)
        read(tmp_path / name)


TOKENIZERS: dict[str, dict[str, Any]] = {
    "llama": {"scores": [0.0, 0.0, -1.0, -2.0, -3.0, -4.0], "unknown_token_id": 0},
    "gpt2": {"merges": ["a b"], "pre": "qwen2"},
    "bert": {"cls_token_id": 0, "seperator_token_id": 1, "unknown_token_id": 2},
}
TOKENS = {"tokens": ["<s>", "</s>", "a", "b", "ab", "\u2581"], "token_type": [3, 3, 1, 1, 1, 1], "bos_token_id": 0}
VALUES = st.one_of(
    st.sampled_from((0, 1, 2, 7, 1000, 2**31 - 1, 2**31, 2**32 - 1, -1, -(2**31), "", "x", "yarn", "llama")),
    st.booleans(),
    st.floats(width=32),
    st.lists(st.integers(-2, 2**31), min_size=1, max_size=3),
    st.lists(st.floats(width=32), min_size=1, max_size=2),
    st.lists(st.text(max_size=3), min_size=1, max_size=8),
)


ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "glm4moe", "gpt-oss", "gemma2", "gemma3"),
    *("qwen35", "qwen3next", "lfm2moe", "granitehybrid", "nemotron_h_moe", "mamba2", "deepseek2", "bert"),
)
STATES = {"conv_kernel": 4, "state_size": 4, "group_count": 1, "time_step_rank": 2, "inner_size": 8}
LATENTS = {"kv_lora_rank": 8, "q_lora_rank": 8, "key_length_mla": 8, "value_length_mla": 4}
LAYER = {
    **{f"blk.0.{name}.weight": (8, 8) for name in ("attn_qkv", "ssm_out", "attn_q", "attn_k", "ffn_gate_inp")},
    **dict.fromkeys(("token_types.weight", "blk.0.ssm_a", "blk.0.ssm_d"), (2, 1)),
    "blk.0.ssm_norm.weight": (1, 8),
    "blk.0.attn_k_b.weight": (2, 4, 8),
    "blk.0.attn_v_b.weight": (2, 8, 4),
}


@st.composite
def contradicting_models(draw: st.DrawFn) -> bytes:
    """Draw a whole GGUF file in which some metadata say something else, or are missing."""
    arch = draw(st.sampled_from(ARCHITECTURES))
    kind = draw(st.sampled_from(tuple(TOKENIZERS)))
    tokenizer = TOKENS | TOKENIZERS[kind] | {"model": kind, "eos_token_id": 1}
    more = {"attention.sliding_window": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    more |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    more |= {"expert_shared_feed_forward_length": 8, "nextn_predict_layers": 0}
    more |= {f"ssm.{key}": value for key, value in STATES.items()} | {"shortconv.l_cache": 3}
    more |= {f"attention.{key}": value for key, value in LATENTS.items()} | {"rope.dimension_count": 2}
    more |= {"pooling_type": 1, "expert_shared_count": 1, "expert_group_count": 1, "leading_dense_block_count": 0}
    metadata = llama_metadata(arch, more) | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    for key in draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=3)):
        if key == "general.architecture" or draw(st.booleans()):
            metadata.pop(key, None)
        else:
            metadata[key] = draw(VALUES)
    layer = {name: np.ones(LAYER[name]) for name in draw(st.sets(st.sampled_from(sorted(LAYER))))}
    tensors = {"token_embd.weight": np.ones((6, 8)), "output_norm.weight": np.ones(8)} | layer
    return gguf_bytes(metadata, gguf_f32(tensors))


def read_settings(path: Path) -> None:
    """Do all that is done before weights are read; config and tokenizer may fail one without the other."""
    checkpoint = GGUFCheckpoint(path)
    with contextlib.suppress(ValueError):
        checkpoint.tokenizer()
    model_config = read_model_config("x.gguf", checkpoint, checkpoint.config)
    check_names(ModelSpecs(model_config, "float32").param_specs(checkpoint.tensors), checkpoint)


@settings(max_examples=NUM_EXAMPLES)
@given(data=contradicting_models())
def test_gguf_metadata(data: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"."):  # at least its tensors are missing
            read_settings(path)
