"""A draft head without an engine equals HF's parts in float32, with every loop over its model's layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxllm.loading.load import load_params
from jaxllm.loading.open import open_checkpoint
from jaxllm.models import LayerLoop, Model, ModelSpecs, get_family
from jaxllm.models.config import DraftHead, FeatureSpec
from jaxllm.models.families.eagle3 import EAGLE3_HEAD
from jaxllm.models.families.mtp import MTP_HEADS
from tests.models.heads import CASES, HEADS, model_folder, read_goldens
from tests.models.running import attention_of, chunk_inputs, empty_pools, recurrence_of, state_inputs

pytestmark = pytest.mark.models

TOLERANCE = 1e-4


def read_config(case: str) -> dict[str, Any]:
    return json.loads((HEADS / case / "config.json").read_text())


def build(case: str, loop: LayerLoop) -> tuple[Model, Any, Model, Any]:
    """Return a model and its draft head, each with its parameters."""
    checkpoints = [open_checkpoint(str(path)) for path in (model_folder(case), HEADS / case)]
    for checkpoint in checkpoints:
        checkpoint.fetch()
    (architecture,) = checkpoints[0].config["architectures"]
    family = get_family(architecture)
    head_family = get_family(MTP_HEADS.get(architecture, EAGLE3_HEAD))
    head_config = head_family.read_config(checkpoints[1].config)
    assert head_config.draft_head is not None
    config = family.read_config(checkpoints[0].config, checkpoints[0].tensors)
    model = Model(ModelSpecs(config, jnp.float32, loop), features=head_config.draft_head.features)
    specs = model.specs.param_specs(checkpoints[0].tensors)
    tables = ("embed.table", "lm_head.table") if case.startswith("mtp") else ("embed.table",)
    lent = {path: specs[path] for path in tables if path in specs}
    head = Model(ModelSpecs(head_config, jnp.float32, loop, lent=lent))
    params = load_params(specs, checkpoints[0])
    own_specs = {
        path: spec for path, spec in head.specs.param_specs(checkpoints[1].tensors).items() if path not in lent
    }
    shared = {owner: params[owner] for owner in (path.partition(".")[0] for path in lent)}
    return model, params, head, load_params(own_specs, checkpoints[1]) | shared


@cache
def runner(case: str, loop: LayerLoop) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that gives the log-probabilities [t, v] of all tokens of a sequence except the first two."""
    model, params, head, head_params = build(case, loop)
    plan, of_head = model.plan, [attention_of(group) for group in head.plan.groups]
    ops = [attention_of(group) for group in plan.attention_groups]
    ops += [recurrence_of(group) for group in plan.state_groups]

    @jax.jit
    def step(
        params: Any, head_params: Any, pools: Any, head_pools: Any, inputs: Any, head_inputs: Any, count: Array
    ) -> Array:
        tokens, batch = inputs
        batches = [*(batch for _ in plan.attention_groups), *(state_inputs(0, count) for _ in plan.state_groups)]
        out = model.forward(params, pools, tokens, batches, attention=ops)
        tokens, batch = head_inputs
        features_td = head.read_features(head_params, out.features_tf, count)
        inputs_of_head = {"attention": of_head, "features_td": features_td}
        hidden_td, _, _ = head.forward(head_params, head_pools, tokens, [batch] * len(of_head), **inputs_of_head)
        return jax.nn.log_softmax(head.logits(head_params, hidden_td, count))

    def run(sequence: np.ndarray) -> np.ndarray:
        count = len(sequence) - 1
        pools = [empty_pools(each.config) for each in (model, head)]
        inputs = [chunk_inputs(ids, 0, count) for ids in (sequence[:-1], sequence[1:])]
        return np.asarray(step(params, head_params, *pools, *inputs, jnp.int32(count)))[:count]

    return run


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_match_hf(case: str) -> None:
    for golden in read_goldens(case):
        if golden.logprobs is not None:
            logprobs = runner(case, LayerLoop.SCAN)(golden.sequence)
            np.testing.assert_allclose(logprobs, golden.logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("loop", [LayerLoop.UNROLL, LayerLoop.SWITCH, LayerLoop.IN_PLACE])
def test_all_loops_have_the_same_features(loop: LayerLoop) -> None:
    golden = read_goldens("eagle3")[1]
    assert golden.logprobs is not None
    logprobs = runner("eagle3", loop)(golden.sequence)
    np.testing.assert_allclose(logprobs, golden.logprobs, rtol=0, atol=TOLERANCE)


def test_depths_follow_from_the_number_of_layers() -> None:
    config = read_config("eagle3") | {"num_target_layers": 32}
    del config["eagle_config"]
    head = read_head(config)
    assert head.features == FeatureSpec((2, 16, 29), 3 * 48)
    assert head.num_guessed_ids == 64
    assert not head.norms_stream


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_depths_may_be_those_of_outputs(where: str) -> None:
    """By default features are the inputs of layers 2, half and 3 from the end; lists that begin with 1 count
    outputs."""
    depths = {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}
    changes = {"eagle_config": depths} if where == "inside" else {"eagle_config": None} | depths
    assert read_head(read_config("eagle3") | changes).features.layers == (2, 47, 91)


def test_heads_of_speculators_norm_their_stream_unless_they_say_otherwise() -> None:
    config = read_config("eagle3_speculators")
    assert config.pop("norm_before_residual")
    assert read_head(config).norms_stream
    assert not read_head(config | {"norm_before_residual": False}).norms_stream


def read_head(config: dict[str, Any]) -> DraftHead:
    head = get_family(EAGLE3_HEAD).read_config(config).draft_head
    assert head is not None
    return head


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"draft_vocab_size": 257}, "draft_vocab_size is 257"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"norm_output": True}, "norm_output"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"eagle_config": None}, "it is a draft head"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": None, "num_target_layers": 4}, "num_target_layers is 4"),
    ],
)
def test_heads_of_other_forms_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_family(EAGLE3_HEAD).read_config(read_config("eagle3") | changes)


def test_a_checkpoint_without_a_further_layer_has_no_mtp_head() -> None:
    config = read_config("mtp_glm4_moe") | {"num_nextn_predict_layers": 0}
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 0"):
        get_family("Glm4MoeMTPModel").read_config(config)
