"""A KV cache of windows holds several times the tokens that it would if all layers kept everything."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxllm.config.arguments import EngineArguments
from jaxllm.execution.kv_pool import KVLayout
from jaxllm.execution.mesh import make_mesh
from jaxllm.models import get_family
from jaxllm.resolve.resolve_ops import Picker, choose_attention
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.plan import StepResult
from jaxllm.scheduling.scheduler import Scheduler
from tests.scheduling.simulation import all_outputs, make_request

pytestmark = pytest.mark.programs

GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
BLOCK_SIZE, STEP, NUM_OUTPUTS, NUM_REQUESTS = 128, 2048, 2048, 100


@pytest.mark.parametrize(("max_num_seqs", "gibibytes"), [(8, 1), (256, 1), (256, 16), (1024, 4)])
def test_gemma_3_1b_holds_three_times_the_tokens(max_num_seqs: int, gibibytes: int) -> None:
    length = GEMMA_3_1B["max_position_embeddings"]
    config = get_family("Gemma3ForCausalLM").read_config(GEMMA_3_1B).within(length)
    args = EngineArguments(model="gemma-3-1b")
    groups = choose_attention(
        args, config, "bfloat16", BLOCK_SIZE, Picker(make_mesh(jax.devices("cpu")[:1]), "cpu", {})
    )
    assert sorted((group.num_layers, group.window) for group in groups if group.window) == [(22, 512)]
    windows = KVLayout(groups=groups, max_num_seqs=max_num_seqs, max_num_batched_tokens=STEP, max_model_len=length)
    everything = replace(windows, groups=(replace(groups[0], num_layers=26, window=None),))
    held = [tokens_held(layout, gibibytes * 2**30) for layout in (windows, everything)]
    assert held[0] >= 3 * held[1]


def tokens_held(layout: KVLayout, num_bytes: int) -> int:
    """Return the most tokens that a KV cache of a size in bytes holds at once for requests of the longest length."""
    most = layout.most_blocks(num_bytes)
    groups = zip(layout.groups, layout.num_blocks(most), strict=True)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=layout.max_num_seqs,
            max_num_batched_tokens=layout.max_num_batched_tokens,
            max_model_len=layout.max_model_len,
            block_size=layout.block_size,
            groups=tuple(group.config(size) for group, size in groups),
            enable_prefix_caching=False,
        )
    )
    num_prompt_tokens = layout.max_model_len - NUM_OUTPUTS
    ids = [str(number) for number in range(NUM_REQUESTS)]
    for request_id in ids:
        scheduler.add_request(make_request(request_id, [1] * num_prompt_tokens, max_tokens=NUM_OUTPUTS))
    most_held, ended = 0, [False]
    # All that have room are admitted long before the first one ends, or gives its blocks up.
    while not scheduler.stats().num_preemptions and not any(ended):
        plan = scheduler.plan()
        assert plan is not None
        rows = len(plan.chunks)
        outputs = all_outputs(*scheduler.commit(plan, StepResult([0] * rows, [None] * rows, [[]] * rows)))
        ended = [output.finish_reason is not None for output in outputs]
        most_held = max(most_held, sum(map(scheduler.num_computed_tokens, ids)))
    return most_held
