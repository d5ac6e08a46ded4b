"""The engine gives the same tokens with the kernels of a TPU and of a GPU, in their interpreters, as in plain XLA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pallas_kernels.paged_attention.gpu.common import INTERPRETER_THREADS
from tests.e2e.random_checkpoint import save_model

pytestmark = pytest.mark.engine_kernels

NUM_LAYERS = 2
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 9, "query_pre_attn_scalar": 64,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}  # fmt: skip
DEEPSEEK = {name: size for name, size in LLAMA.items() if name != "head_dim"} | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 2,
    "kv_lora_rank": 256, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 16,
    "first_k_dense_replace": NUM_LAYERS, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {"llama": LLAMA, "gemma": GEMMA, "deepseek": DEEPSEEK}


@pytest.mark.parametrize(
    ("config", "backend"),
    [("llama", "tpu"), ("gemma", "tpu"), ("deepseek", "tpu"), ("llama", "gpu"), ("gemma", "gpu"), ("deepseek", "gpu")],
)
def test_generates_what_xla_does(config: str, backend: str, tmp_path: Path) -> None:
    save_model(tmp_path, MODELS[config])
    command = [sys.executable, "-m", "tests.e2e.kernel_runs", str(tmp_path), backend]
    # Interpreted kernels are large programs that run a few times.
    environment = os.environ | {"NPROC": str(INTERPRETER_THREADS), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert child.returncode == 0, child.stderr[-4000:]
    results = json.loads(child.stdout.splitlines()[-1])
    plain, kernels = results["xla"], results[backend]
    assert (plain["implementation"], kernels["implementation"]) == ("xla", backend)
    for run in (plain, kernels):
        assert run["preemptions"] > 0
        assert run["chunks"] > 2, "prefilled in chunks, and once more after the preemption"
    assert plain["calls"] == 0
    assert kernels["calls"] == NUM_LAYERS * kernels["steps"], "once a layer in every step"
    assert kernels["tokens"] == plain["tokens"]
    np.testing.assert_allclose(kernels["logprobs"], plain["logprobs"], atol=1e-4 if backend == "tpu" else 0.1)
