"""A default number of requests is lowered to what leaves room for more than their recurrent states."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxllm.execution.mesh import param_bytes
from jaxllm.loading.open import open_config
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.kv_cache_size import LEAST_SEQS, fit_num_seqs, step_config
from jaxllm.resolve.model import make_model
from tests.models.tiny import read_hf_config

GIBI = 2**30


def engine_config(folder: Path, case: str = "qwen3_next", **settings: Any) -> EngineConfig:
    """Return the settings of a tiny model, a hybrid's with heads of 1 MiB."""
    wide = {"linear_key_head_dim": 512, "linear_value_head_dim": 512} if case == "qwen3_next" else {}
    (folder / "config.json").write_text(json.dumps(read_hf_config(case) | wide))
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **settings)
    return args.create_engine_config(checkpoint=open_config(str(folder)))


def fitted(config: EngineConfig, limit: int | None) -> int:
    return fit_num_seqs(config, make_model(config).specs.param_specs(), limit).max_num_seqs


def test_states_take_at_most_half_of_what_parameters_leave(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(tmp_path)
    specs = make_model(config).specs.param_specs()
    limit = param_bytes(config.mesh, specs) + 2 * GIBI
    lowered = fit_num_seqs(config, specs, limit)
    assert (config.max_num_seqs, lowered.max_num_seqs) == (256, 64)
    assert step_config(lowered).kv_layout.state_bytes <= GIBI < step_config(config).kv_layout.state_bytes
    assert "max_num_seqs lowered from 256 to 64" in caplog.text
    assert fitted(config, limit - 2 * GIBI) == LEAST_SEQS, "the engine then says by itself what it lacks"
    assert fitted(config, limit + 62 * GIBI) == 256


def test_states_take_three_quarters_where_nothing_attends(tmp_path: Path) -> None:
    config = engine_config(tmp_path, "mamba2")
    specs, layout = make_model(config).specs.param_specs(), step_config(config).kv_layout
    free = -(-4 * replace(layout, max_num_seqs=128).state_bytes // 3)
    assert fitted(config, param_bytes(config.mesh, specs) + free) == 128
    assert fitted(config, param_bytes(config.mesh, specs) + free - 4) == 64
    assert fitted(config, param_bytes(config.mesh, specs) + 2 * free) == 256


def test_what_the_user_says_stands(tmp_path: Path) -> None:
    assert fitted(engine_config(tmp_path, max_num_seqs=200), 0) == 200
    assert fitted(engine_config(tmp_path, kv_cache_memory_bytes=GIBI), None) == 32


def test_models_without_states_are_left_alone(tmp_path: Path) -> None:
    assert fitted(engine_config(tmp_path, "qwen3_moe"), 0) == 256
