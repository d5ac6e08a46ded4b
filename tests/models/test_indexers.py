"""Which layers choose tokens, which attend to a choice of others, and what is left out where all tokens are chosen."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import ModelConfig, ModelSpecs, get_family
from jaxllm.models.inputs import last_positions
from jaxllm.models.plan import LayerPlan
from pallas_kernels.chosen import to_lists
from pallas_kernels.paged_attention.batches import ragged_batch
from tests.models.tiny import read_hf_config, read_tensors

SPARSE = ("deepseek_v32", "glm_moe_dsa", "dots3_note", "mistral_large4")


def read(case: str, **changes: Any) -> ModelConfig:
    hf = read_hf_config(case)
    text = {"text_config": hf["text_config"] | changes} if "text_config" in hf else changes
    return get_family(hf["architectures"][0]).read_config(hf | text)


def test_layers_that_borrow_a_choice_have_no_keys_of_their_own() -> None:
    groups = LayerPlan(read("glm_moe_dsa").layers).groups
    [(latents, all_layers), (keys, choosing)] = groups.items()
    assert (latents.is_indexer, all_layers, keys.is_indexer, choosing) == (False, (0, 1, 2, 3, 4), True, (0, 1, 3))
    # Layers that borrow latents as well as layers that compute them choose tokens.
    groups = LayerPlan(read("mistral_large4").layers).groups
    assert [(group.head_dim, layers) for group, layers in groups.items()] == [(48, (0, 4)), (32, (0, 1, 3)), (32, (1,))]


@pytest.mark.parametrize(
    ("changes", "borrows"),
    [
        ({"indexer_types": None}, [False] * 5),
        ({"indexer_types": None, "index_topk_freq": 2}, [False, False, True, False, True]),
        ({"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 1}, [False, True, True, False, True]),
        ({"indexer_types": None, "index_topk_pattern": "FSSFS"}, [False, True, True, False, True]),
        ({"indexer_types": ["full", "shared", "full", "shared", "shared"]}, [False, True, False, True, True]),
    ],
)
def test_layers_that_borrow_are_listed_or_counted(changes: dict[str, Any], borrows: list[bool]) -> None:
    assert [layer.borrows_choice for layer in read("glm_moe_dsa", **changes).layers] == borrows


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("glm_moe_dsa", {"indexer_types": ["full"] * 4}, "expected one for each of 5 layers"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 4 + ["none"]}, "expected full or shared"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 5}, "the first indexer is shared"),
        ("glm_moe_dsa", {"index_topk": 0}, "index_topk is 0"),
        ("deepseek_v32", {"index_head_dim": 8}, "an indexer of heads of 8"),
        ("mistral_large4", {"kv_source_layers": [0, 1, 0, 1]}, "kv_source_layers has 4 numbers"),
        ("mistral_large4", {"kv_source_layers": [0, 1, 1, 1, 4]}, "kv_source_layers has 1 for layer 2"),
        ("mistral_large4", {"kv_source_layers": [0, 1, 2, 1, 0]}, "kv_source_layers has 0 for layer 4"),
        ("dots3_note", {"q_lora_rank": None, "per_layer_config": None}, "q_lora_rank is None"),
    ],
)
def test_refusals_name_what_is_wrong(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(case, **changes)


def test_published_dots3_has_its_windows_under_keys_of_their_own() -> None:
    hf = {"use_dsa": True, "layer_types": ["full_attention", "sliding_attention"] * 2, "per_layer_config": None}
    sizes = {"swa_num_attention_heads": 4, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 48, "swa_head_dim": 48}
    sizes |= {"swa_qk_nope_head_dim": 32, "swa_v_head_dim": 16}
    thetas = {"rope_parameters": None, "rope_theta": 1000.0, "swa_rope_theta": 100.0}
    published = {key: value for key, value in (read_hf_config("dots3_note") | hf | sizes | thetas).items() if value}
    assert get_family("Dots3NoteForCausalLM").read_config(published) == read("dots3_note")


@pytest.mark.parametrize("case", SPARSE)
def test_indexers_that_choose_all_tokens_are_left_out(case: str) -> None:
    config = read(case)
    assert config.within(13) != config.within(12)
    for length in (13, 12):
        tensor_names = read_tensors(case).keys()
        specs = ModelSpecs(config.within(length), "float32", tensor_names=tensor_names)
        used = {source for spec in specs.param_specs().values() for source in spec.sources}
        assert any(".indexer." in name for name in used) == (length > 12)
        # No tensor is unexpected.
        for name in tensor_names - used:
            assert any(fnmatchcase(name, pattern) for pattern in specs.ignored_tensors), name
        assert any(group.is_indexer for group in specs.plan.groups) == (length > 12)


def test_windows_of_latents_are_the_last_positions() -> None:
    chunks = [(9, 1), (1, 1), (30, 7), (5, 5), (12, 2)]
    batch = ragged_batch(chunks, [[1, 2]] * 5, block_size=16, query_tile=4, row_alignment=8, padding=3)
    batch = jax.tree.map(jnp.asarray, batch)
    positions = to_lists(np.asarray(last_positions(batch, 6, len(batch.slots_t), 16)))
    for (length, count), start in zip(chunks, batch.query_starts_s, strict=False):
        for i in range(count):
            last = length - count + i
            assert positions[start + i].tolist() == list(range(max(0, last - 5), last + 1))
