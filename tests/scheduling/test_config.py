"""Settings that cannot work together are refused when they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxllm.scheduling.config import GroupConfig
from tests.scheduling.simulation import make_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"block_size": -1}, "block_size must be at least 1"),
        ({"policy": "lifo"}, "policy must be"),
        ({"max_num_seqs": 8, "max_rows": 7}, "max_rows must be at least 8"),
        ({"keys_depend_on_prompt": True}, "needs enable_prefix_caching=False"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be"),
        ({"max_model_len": 64, "block_size": 4, "num_blocks": 16}, "needs 16 blocks of 4 tokens, but the pool has 15"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 63}, "max_num_batched_tokens >= max_model_len"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 8}, "needs enable_chunked_prefill"),
    ],
)
def test_bad_settings_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


def test_the_smallest_pool_holds_one_request():
    assert make_config(max_model_len=61, block_size=4, num_blocks=17)
    window = GroupConfig(
        num_blocks=8, window=6, tile_blocks=2
    )  # tokens of a step, of the window and of a tile, and one
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 4}
    assert make_config(**settings, windows=[window])
    with pytest.raises(ValueError, match="needs 7 blocks of 4 tokens, but the pool has 6"):
        make_config(**settings, windows=[replace(window, num_blocks=7)])
