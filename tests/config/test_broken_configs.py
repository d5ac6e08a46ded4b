"""Files of a checkpoint with values of the wrong type or size, and arguments likewise: each a clear error by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.kv_pool import PoolRequest, count_blocks
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.kv_cache_size import step_config
from jaxllm.utils import files
from jaxllm.utils.files import read_text
from tests.config.test_engine_config import LLAMA

HUGE = 10**400


def refused(folder: Path, **fields: Any) -> str:
    """Settle a configuration that has to be refused, and return the message."""
    arguments: dict[str, Any] = {"model": str(folder), "load_format": "dummy"} | fields
    with pytest.raises(VLLMValidationError) as caught:
        EngineArgs(**arguments).create_engine_config()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def write(folder: Path, name: str = "config.json", **values: Any) -> None:
    (folder / name).write_text(json.dumps((LLAMA if name == "config.json" else {}) | values))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("architectures", ("LlamaForCausalLM", 3, [3], [None], [[]], {"a": 1}, True, ["x" * 10**6])),
        ("quantization_config", ([1], "x", 3, True)),
        ("quantized", ({"quant_method": 3}, {"quant_method": ["a"]}, {"quant_method": "x" * 10**6})),
        ("text_config", (3, [1], "x")),
        ("RoPE scaling", (1e-9, 1e-5)),
        ("vocab_size", (None, "x", [], {}, HUGE, -1, 1.5, True)),
    ],
)
def test_config_json(tmp_path: Path, name: str, values: tuple[Any, ...]):
    for value in values:
        match name:
            case "RoPE scaling":
                write(tmp_path, rope_scaling={"rope_type": "linear", "factor": value})
            case "quantized":
                write(tmp_path, quantization_config=value)
            case "text_config":
                write(tmp_path, architectures=["Gemma3ForConditionalGeneration"], dtype=None, text_config=value)
            case _:
                write(tmp_path, **{name: value})
        assert name in refused(tmp_path)


def test_eos_token_id_of_generation_config(tmp_path: Path):
    write(tmp_path)
    for value in ("x", [None], ["a"], {"a": 1}, -1, 1.5, True, HUGE, [HUGE], [True], [[1]], list(range(10**5))):
        write(tmp_path, "generation_config.json", eos_token_id=value)
        assert "eos_token_id of generation_config" in refused(tmp_path)
    write(tmp_path, "generation_config.json", eos_token_id=[1, 2])
    args = EngineArgs(model=str(tmp_path), load_format="dummy")
    assert args.create_engine_config().generation_config["eos_token_id"] == [1, 2]


def test_weight_map(tmp_path: Path):
    write(tmp_path)
    for value in (3, [], {"a": 3}, {"a": "x" * 5000}, {"a": "\0"}, {"a": ""}, {"a": "."}, {"a": ".."}, {"a": "\ud800"}):
        write(tmp_path, "model.safetensors.index.json", weight_map=value)
        assert refused(tmp_path, load_format="auto").startswith(f"{tmp_path}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hf_overrides", {1: 2}),
        ("hf_overrides", {"a": np.float32(1.0)}),
        ("override_generation_config", {"a": {1, 2}}),
        ("dtype", np),
        ("dtype", HUGE),
        ("max_num_seqs", HUGE),
        ("max_num_seqs", "9" * 400),
        ("max_num_seqs", "9" * 5000),
        ("generation_config", "/dev/zero"),
        ("chat_template", "/dev/zero"),
        ("generation_config", "~nobody-of-that-name/x"),
        ("chat_template", "~nobody-of-that-name/x"),
    ],
)
def test_arguments(tmp_path: Path, name: str, value: Any):
    write(tmp_path)
    assert name in refused(tmp_path, **{name: value})


def test_files_are_regular_and_not_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path)
    (tmp_path / "generation_config.json").symlink_to("/dev/zero")
    EngineArgs(model=str(tmp_path), load_format="dummy").create_engine_config()  # no file, as for any that is missing
    for path, reason in ((Path("/dev/zero"), "not a regular file"), (tmp_path / "none", "no such file")):
        with pytest.raises(OSError, match=reason):
            read_text(path)
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 8)
    with pytest.raises(ValueError, match="longer than 8 bytes"):
        read_text(tmp_path / "config.json")


def test_more_blocks_than_memory(tmp_path: Path):
    write(tmp_path)
    config = EngineArgs(model=str(tmp_path), load_format="dummy").create_engine_config()
    for limit in (None, 2**40):
        request = PoolRequest(
            layout=step_config(config).kv_layout,
            num_gpu_blocks_override=2**31 - 1,
            kv_cache_memory_bytes=None,
            memory_limit=limit,
        )
        with pytest.raises(VLLMValidationError, match=r"^num_gpu_blocks_override=2147483647 .* or less") as caught:
            count_blocks(request, used_bytes=0)
        assert caught.value.parameter == "num_gpu_blocks_override"
