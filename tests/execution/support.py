"""Tests run a small model's steps here, without an engine around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.execution.kv_pool import KVGroup
from jaxllm.execution.launcher import Launcher
from jaxllm.execution.mesh import make_mesh
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.programs.background import Programs
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.step_config import StepConfig
from jaxllm.loading.load import init_dummy
from jaxllm.models import LayerLoop, Model, ModelConfig, ModelSpecs, get_family
from pallas_kernels.paged_attention import AttentionShape, PagedAttention

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


HOSTILE: dict[str, Any] = {
    "jax_debug_infs": True,
    "jax_debug_nans": True,
    "jax_disable_jit": True,
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_threefry_partitionable": False,
    "jax_transfer_guard": "disallow_explicit",
}


@contextmanager
def hostile_jax() -> Iterator[None]:
    """Set what a user may have set for other work, and what breaks a program that relies on JAX's defaults."""
    before = {name: getattr(jax.config, name) for name in HOSTILE}
    try:
        for name, value in HOSTILE.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def model_config(num_layers: int = 2) -> ModelConfig:
    """Return the config of a small Llama."""
    return get_family("LlamaForCausalLM").read_config(HF_CONFIG | {"num_hidden_layers": num_layers})


def make_attention(dtype: Any = jnp.float32) -> PagedAttention:
    """Return the attention of a small Llama in plain XLA."""
    return PagedAttention(AttentionShape(4, 2, 16, 16, jnp.dtype(dtype), jnp.dtype(dtype)))


def make_group(num_layers: int = 2, dtype: Any = jnp.float32) -> KVGroup:
    """Return the one cache group of a small Llama."""
    return KVGroup(attention=make_attention(dtype), num_layers=num_layers, window=None)


def make_compiler(
    num_layers: int = 2, *, dtype: Any = jnp.float32, loop: LayerLoop = LayerLoop.IN_PLACE, **changes: Any
) -> StepCompiler:
    """Return the compiler of a small Llama's steps, which go through the layers as on a CPU."""
    config = StepConfig(
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=512,
        groups=(make_group(num_layers, dtype),),
        max_logprobs=5,
        platform="cpu",
    )
    mesh = make_mesh(jax.devices()[:1])
    return StepCompiler(replace(config, **changes), Model(ModelSpecs(model_config(num_layers), dtype, loop)), mesh)


def make_runner(num_blocks: int = 33, **changes: Any) -> ModelRunner:
    """Return a runner with dummy weights that compiles nothing ahead."""
    compiler = make_compiler(**changes)
    programs = Programs(partial(compiler.compile, num_blocks=num_blocks), compiler.shapes.programs(), ahead=False)
    return ModelRunner(Launcher(compiler, programs, lambda: init_dummy(compiler.model.specs.param_specs(), 0)))
