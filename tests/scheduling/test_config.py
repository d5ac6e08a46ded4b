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
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
            "does not go with enable_chunked_prefill",
        ),
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
    assert make_config(**settings, others=[window])
    with pytest.raises(ValueError, match="needs 7 blocks of 4 tokens, but the pool has 6"):
        make_config(**settings, others=[replace(window, num_blocks=7)])
    chunk = GroupConfig(num_blocks=4, attention_chunk=12)
    assert make_config(**settings, others=[chunk])
    with pytest.raises(ValueError, match="needs 3 blocks of 4 tokens, but the pool has 2"):
        make_config(**settings, others=[replace(chunk, num_blocks=3)])


@pytest.mark.parametrize(
    ("position", "windowed", "tiled", "chunked"),
    [(0, 0, 0, 0), (6, 0, 0, 0), (11, 1, 0, 0), (12, 1, 0, 3), (23, 4, 4, 3), (24, 4, 4, 6), (40, 8, 8, 9)],
)
def test_the_first_block_that_is_read(position: int, windowed: int, tiled: int, chunked: int):
    group = GroupConfig(num_blocks=9)
    assert group.first_wanted(position, 4) == 0
    assert replace(group, window=6).first_wanted(position, 4) == windowed
    assert replace(group, window=6, tile_blocks=4).first_wanted(position, 4) == tiled
    assert replace(group, attention_chunk=12).first_wanted(position, 4) == chunked


def test_a_request_holds_the_blocks_of_a_chunk_at_most():
    group = GroupConfig(num_blocks=9, attention_chunk=12)
    assert [group.most_blocks(length, 1, 4) for length in (1, 5, 12, 13, 100)] == [1, 2, 3, 3, 3]
    assert group.most_blocks(100, 64, 4) == 3, "a step is of one chunk"


def test_chunks_begin_with_a_block_and_cut_prompts():
    group = GroupConfig(num_blocks=9, attention_chunk=12)
    with pytest.raises(ValueError, match="block_size must divide attention_chunk=12, got 8"):
        make_config(others=[group], block_size=8)
    with pytest.raises(
        ValueError, match="attention_chunk=12 cuts prompts into chunks: it does not go with enable_chunked"
    ):
        make_config(others=[group], enable_chunked_prefill=False)
    assert make_config(others=[replace(group, attention_chunk=64, num_blocks=17)], enable_chunked_prefill=False)
    groups = [replace(group, attention_chunk=24), group, replace(group, window=4), group]
    assert make_config(others=groups).attention_chunks == (12, 24)
