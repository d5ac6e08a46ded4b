"""The engine with the kernels of a TPU and of a GPU, run in their interpreters: the same tokens as in plain XLA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm import SamplingParams
from pallas_kernels.paged_attention import IMPLEMENTATIONS
from tests.e2e.tiny_engine import Job, run_together, tiny_llm

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 1, "sliding_window": 20, "query_pre_attn_scalar": 64, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "max_num_batched_tokens": 32, "max_num_seqs": 3, "max_model_len": 80,
    "num_gpu_blocks_override": 7, "batch_invariant": False,
}  # fmt: skip
# A chunked prompt, one beyond the window, and a pool that is too small for all.
PROMPTS = (44, 12, 23)


@pytest.mark.parametrize(("backend", "dtype"), [("tpu", "float32"), ("gpu", "bfloat16")])
@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_generates_what_xla_does(
    config: dict[str, Any], backend: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, detokenize=False)
    jobs = [Job([(7 * i + length) % 120 + 3 for i in range(length)], sampling) for length in PROMPTS]
    num_runs = 0

    def count_run(_: Any) -> None:
        nonlocal num_runs
        num_runs += 1

    def load_counted() -> Any:
        run = IMPLEMENTATIONS[backend].load()

        def counted(*arguments: Any, **settings: Any) -> Any:
            out_tnh, pool = run(*arguments, **settings)
            jax.debug.callback(count_run, out_tnh[0, 0, 0])
            return out_tnh, pool

        return counted

    counting = dict(IMPLEMENTATIONS) | {backend: IMPLEMENTATIONS[backend]._replace(load=load_counted)}
    monkeypatch.setattr("pallas_kernels.paged_attention.IMPLEMENTATIONS", counting)
    found = {}
    for name in ("xla", backend):
        settings = SETTINGS | {"dtype": dtype, "attention_config": {"backend": name}}
        with tiny_llm(str(tmp_path), **settings) as (llm, scheduler):
            found[name] = run_together(llm, jobs)
            assert llm.llm_engine.config.attention.implementation == name
            assert scheduler.stats().num_preemptions > 0
            assert scheduler.num_prompt_chunks("0") > 1
            num_steps = len(scheduler.plans)
    assert num_runs == 2 * num_steps, "once a layer in every step, with the kernels only"
    for expected, got in zip(found["xla"], found[backend], strict=True):
        assert got.outputs[0].token_ids == expected.outputs[0].token_ids
