"""The abstract tree takes no memory, all of a checkpoint is read, and a program does not grow with depth."""

from __future__ import annotations

import gc
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import LayerLoop, Model, ModelConfig, ModelSpecs, get_family, supported_architectures
from jaxllm.models.families.mtp import MTP_HEADS
from jaxllm.models.layers import DecoderLayer
from jaxllm.models.params import ArraySpec, array_specs, unflatten
from jaxllm.models.reading import read_decoder
from jaxllm.models.specs import tower_loop
from tests.models.dense import dense_attention
from tests.models.running import attention_of, build_model, chunk_inputs, empty_pools
from tests.models.tiny import CASES, read_hf_config, read_tensors

pytestmark = pytest.mark.models

LLAMA_70B = {
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def abstract(spec: ArraySpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def abstract_params(model: Model) -> dict[str, Any]:
    return unflatten({path: abstract(spec) for path, spec in array_specs(model.specs.param_specs()).items()})


def forward_args(model: Model) -> tuple[Any, ...]:
    pools = jax.eval_shape(partial(empty_pools, model.config, model.dtype))
    tokens, batch = chunk_inputs(np.zeros(3, np.int32), 0, 3)
    return abstract_params(model), pools, tokens, [batch] * len(pools)


def deepened(config: ModelConfig, times: int) -> ModelConfig:
    return replace(config, layers=config.layers * times)


def test_abstract_tree_allocates_nothing() -> None:
    gc.collect()  # free the memory of earlier tests
    before = len(jax.live_arrays())
    model = Model(ModelSpecs(get_family("LlamaForCausalLM").read_config(LLAMA_70B), jnp.bfloat16))
    specs = model.specs.param_specs()
    assert len(jax.live_arrays()) == before
    assert sum(np.prod(spec.shape) for spec in specs.values()) == 70_553_706_496
    assert specs["layers.0.attn.k"].shape == (80, 8, 128, 8192)
    assert specs["layers.0.attn.k"].axes == ("layers", "kv_heads", "head_dim", "embed")
    assert specs["layers.0.attn.k"].hf_shape == (1024, 8192)
    assert specs["layers.0.attn.k"].sources[79] == "model.layers.79.self_attn.k_proj.weight"


def test_matrices_of_one_input_are_one_array() -> None:
    config = replace(get_family("LlamaForCausalLM").read_config(LLAMA_70B), num_shards=4)
    arrays = array_specs(ModelSpecs(config, jnp.bfloat16).param_specs())
    assert arrays["layers.0.attn.qkv"].shape == (80, 4, 16 + 2 + 2, 128, 8192)
    assert arrays["layers.0.attn.qkv"].axes == ("layers", "shards", "rows", "head_dim", "embed")
    assert list(arrays["layers.0.attn.qkv"].params) == [f"layers.0.attn.{name}" for name in "qkv"]
    assert arrays["layers.0.mlp.gate_up"].shape == (80, 4, 2 * 28_672 // 4, 8192)
    assert arrays["layers.0.mlp.down"].shape == (80, 8192, 28_672)
    unstacked = array_specs(ModelSpecs(config, jnp.bfloat16, LayerLoop.UNROLL).param_specs())
    assert list(unstacked["layers.79.mlp.gate_up"].params) == ["layers.79.mlp.gate", "layers.79.mlp.up"]


@pytest.mark.parametrize("loop", LayerLoop)
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_used_or_ignored_on_purpose(case: str, loop: LayerLoop) -> None:
    tensors = read_tensors(case)
    model = build_model(case, loop=loop)
    specs = model.specs.all_param_specs(tensors)
    taken = [(source, spec.hf_index) for spec in specs.values() for source in spec.sources]
    assert len(taken) == len(set(taken))
    used = [source for source, _ in taken]
    assert set(used) <= set(tensors)
    unused = set(tensors) - set(used)
    assert all(any(fnmatch(name, pattern) for pattern in model.specs.ignored_tensors) for name in unused)
    assert not unused or model.specs.family.is_wrapper
    assert not any(fnmatch(name, pattern) for pattern in model.specs.ignored_tensors for name in used)
    for path, spec in specs.items():
        assert len(spec.axes) == len(spec.shape)
        of_loop = tower_loop(loop) if path.startswith("encoder.") else loop
        assert spec.stacked == (of_loop.stacked and path.removeprefix("encoder.").startswith("layers."))
        assert {tensors[source].shape for source in spec.sources} == {spec.hf_shape}


@pytest.mark.parametrize(
    ("case", "usual", "other", "unused"),
    [
        ("opt", "model.decoder.", "decoder.", ["decoder.version"]),
        ("gpt2", "transformer.", "", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
    ],
)
def test_the_prefixes_and_masks_of_older_checkpoints(case: str, usual: str, other: str, unused: list[str]) -> None:
    model, tensors = build_model(case), read_tensors(case)
    renamed = [name.replace(usual, other) for name in tensors]
    sources = {
        of: {source for spec in model.specs.param_specs(names).values() for source in spec.sources}
        for of, names in (("usual", list(tensors)), ("other", renamed))
    }
    assert sources == {"usual": set(tensors), "other": set(renamed)}
    ignored = {name for name in (*renamed, *unused) if any(fnmatch(name, each) for each in model.specs.ignored_tensors)}
    assert ignored == set(unused)


def test_projections_of_layers_that_borrow_keys_and_values_are_ignored() -> None:
    model = build_model("gemma4_e2b")
    assert [layer.borrows_kv for layer in model.config.layers] == [False] * 3 + [True] * 3
    for name in ("k_proj", "v_proj", "k_norm"):
        source = f"model.language_model.layers.{{}}.self_attn.{name}.weight"
        ignored = [any(fnmatch(source.format(n), pattern) for pattern in model.specs.ignored_tensors) for n in range(6)]
        assert ignored == [False] * 3 + [True] * 3


@pytest.mark.parametrize("case", ["mistral3", "gemma3_multimodal"])
def test_wrappers_are_found_under_later_names_too(case: str) -> None:
    model = build_model(case)
    old = model.specs.param_specs(read_tensors(case))
    renamed = {later_name(name): tensor for name, tensor in read_tensors(case).items()}
    new = model.specs.param_specs(renamed)
    assert [spec.sources for spec in old.values()] != [spec.sources for spec in new.values()]
    for path, spec in new.items():
        assert set(spec.sources) <= set(renamed)
        assert spec.sources == tuple(map(later_name, old[path].sources))


def later_name(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return f"model.{name}"


@pytest.mark.parametrize(
    "architecture",
    [
        name
        for name in supported_architectures()
        if get_family(name).layer is DecoderLayer and name not in MTP_HEADS.values()
        # Others have latents or states alone.
        if "layers.attn.k" in get_family(name).names
    ],
)
def test_every_optional_parameter_has_a_name(architecture: str) -> None:
    hf = dict.fromkeys(LLAMA_70B, 4)
    options: dict[str, Any] = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), True)
    names = get_family(architecture).names
    post_norms, pre_norms = "layers.post_mlp_norm.scale" in names, "layers.mlp_norm.scale" in names
    q_norm = names.get("layers.attn.q_norm.scale")
    by_head, all_heads = (q_norm is not None and q_norm.layout == layout for layout in ("n h -> n h", "(n h) -> n h"))
    has_gate, is_gated = "layers.attn.gate" in names, "layers.mlp.gate" in names
    options["gate_by_head"] = has_gate and names["layers.attn.gate"].layout == "n d -> n d"
    options |= {"output_gate": has_gate, "qkv_bias": not has_gate, "qk_norm": q_norm is not None, "gated": is_gated}
    options |= {"pre_norms": pre_norms, "post_norms": post_norms, "qk_norm_all_heads": all_heads}
    options["qk_norm_by_head"] = by_head
    specs = ModelSpecs(read_decoder(hf, architecture=architecture, head_dim=2, **options), jnp.float32).param_specs()
    num_left_out = 2 * has_gate + 2 * (q_norm is None) + 2 * (not is_gated)
    assert len(specs) == 19 + 2 * pre_norms + 2 * post_norms - num_left_out


@pytest.mark.parametrize("case", ["llama3_tied", "gemma2", "gemma3"])
def test_program_size_does_not_grow_with_depth(case: str) -> None:
    def num_lines(times: int) -> int:
        model = Model(ModelSpecs(deepened(build_model(case).config, times), jnp.float32))
        return len(
            jax.jit(partial(model.forward, attention=[attention_of(group) for group in model.plan.groups]))
            .lower(*forward_args(model))
            .as_text()
            .splitlines()
        )

    assert num_lines(2) == num_lines(4)


@pytest.mark.parametrize("loop", LayerLoop)
@pytest.mark.parametrize("case", ["llama_bias", "gemma3", "gemma4_e2b", "ministral3"])
def test_bfloat16_stays_bfloat16_until_the_logits(case: str, loop: LayerLoop) -> None:
    model = build_model(case, dtype=jnp.bfloat16, loop=loop)
    args = forward_args(model)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        hidden, pools, _ = jax.eval_shape(
            partial(model.forward, attention=[cast(Any, dense_attention)] * len(args[1])), *args
        )
        logits = jax.eval_shape(model.logits, args[0], hidden, 3)
    assert {hidden.dtype, *(pool.k.dtype for pool in pools)} == {jnp.dtype(jnp.bfloat16)}
    assert logits.dtype == jnp.float32
    assert logits.shape == (hidden.shape[0], model.config.vocab_size)


def test_configs_are_hashable() -> None:
    for case in CASES:
        hf = read_hf_config(case)
        family = get_family(hf["architectures"][0])
        assert hash(family.read_config(hf)) == hash(family.read_config(hf))
