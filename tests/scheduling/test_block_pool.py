"""Blocks are free, shared, found again, and evicted in the right order."""

from __future__ import annotations

import pytest

from jaxllm.scheduling.cache.block_pool import BlockPool, LinkedBlocks


def fill(pool: BlockPool, text: bytes, parent: bytes | None = None) -> tuple[int, bytes]:
    """Take one block and register it with the given content; return it and its hash."""
    (block_id,) = pool.take(1)
    block_hash = pool.hash_block(parent, text)
    pool.register(block_id, block_hash, text)
    return block_id, block_hash


def test_linked_blocks_keep_order_through_removals():
    blocks = LinkedBlocks(6)
    for block_id in (1, 2, 3, 4):
        blocks.append(block_id)
    blocks.prepend(5)
    blocks.remove(2)
    assert list(blocks) == [5, 1, 3, 4]
    assert [blocks.pop_first(), blocks.pop_first()] == [5, 1]
    blocks.remove(4)
    assert (list(blocks), len(blocks)) == ([3], 1)
    blocks.remove(3)
    with pytest.raises(IndexError):
        blocks.pop_first()


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    with pytest.raises(IndexError, match="1 blocks wanted, 0 available"):
        pool.take(1)


def test_a_forgotten_block_is_the_next_to_be_taken():
    pool = BlockPool(4)
    first, _ = fill(pool, b"first")
    second, second_hash = fill(pool, b"second")
    pool.release([first])
    pool.release([second])
    pool.forget(second)
    assert pool.find(second_hash, b"second") is None
    assert list(pool.take(1)) == [second]
    pool.check([[second]])


def test_a_released_block_is_found_until_it_is_taken():
    pool = BlockPool(4)
    block_id, block_hash = fill(pool, b"abcd")
    pool.release([block_id])
    assert (pool.num_cached, pool.num_available, pool.num_in_use) == (1, 3, 0)
    assert pool.find(block_hash, b"abcd") == block_id
    pool.take(2)
    assert pool.find(block_hash, b"abcd") == block_id, "blocks without content go first"
    assert list(pool.take(1)) == [block_id]
    assert pool.find(block_hash, b"abcd") is None
    assert pool.num_cached == 0


def test_blocks_without_content_are_taken_first():
    pool = BlockPool(3)
    (known, _), (unknown,) = fill(pool, b"abcd"), pool.take(1)
    pool.release([known])
    pool.release([unknown])
    assert list(pool.take(2)) == [unknown, known]


def test_eviction_is_least_recently_used_and_tail_first():
    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    for i, block_id in enumerate([*first, *second]):
        pool.register(block_id, pool.hash_block(None, bytes([i])), bytes([i]))
    pool.release(second)
    pool.release(first)
    assert list(pool.take(4)) == [second[1], second[0], first[1], first[0]]


def test_a_found_block_moves_to_the_end_of_the_line():
    pool = BlockPool(3)
    (old, _), (new, _) = fill(pool, b"old"), fill(pool, b"new")
    pool.release([old])
    pool.release([new])
    pool.share([old])
    assert (pool.num_in_use, pool.num_cached) == (1, 1)
    pool.release([old])
    assert list(pool.take(2)) == [new, old]


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    block_id, _ = fill(pool, b"abcd")
    pool.share([block_id])
    pool.check([[block_id], [block_id]])
    pool.release([block_id])
    assert pool.num_in_use == 1
    pool.check([[block_id]])
    pool.release([block_id])
    assert pool.num_in_use == 0
    pool.check([])


def test_a_hash_collision_is_a_miss():
    pool = BlockPool(3)
    _, block_hash = fill(pool, b"abcd")
    assert pool.find(block_hash, b"abce") is None


def test_the_first_of_two_equal_blocks_stays_the_known_one():
    pool = BlockPool(4)
    first, block_hash = fill(pool, b"abcd")
    second, _ = fill(pool, b"abcd")
    assert pool.find(block_hash, b"abcd") == first
    pool.release([first, second])
    assert pool.num_cached == 1
    pool.check([])


def test_hashes_depend_on_parent_content_key_and_pool():
    pool = BlockPool(2)
    parent = pool.hash_block(None, b"abcd")
    hashes = [
        parent,
        pool.hash_block(None, b"abce"),
        pool.hash_block(parent, b"abcd"),
        pool.hash_block(None, b"abcd", b"salt"),
        BlockPool(2).hash_block(None, b"abcd"),
    ]
    assert len(set(hashes)) == len(hashes)
    assert {len(block_hash) for block_hash in hashes} == {32}
    assert pool.hash_block(None, b"abcd") == parent


def test_forgetting_needs_an_idle_pool():
    pool = BlockPool(3)
    block_id, block_hash = fill(pool, b"abcd")
    assert not pool.forget_all()
    assert pool.find(block_hash, b"abcd") == block_id
    pool.release([block_id])
    assert pool.forget_all()
    assert pool.find(block_hash, b"abcd") is None
    assert (pool.num_cached, pool.num_available) == (0, 2)
    pool.check([])


def lose_a_block(pool: BlockPool) -> None:
    pool._unheld.pop_first()


def free_a_held_block(pool: BlockPool) -> None:
    pool._unheld.append(1)


def miscount_a_holder(pool: BlockPool) -> None:
    pool._num_holders[1] += 1


def miscount_the_cached(pool: BlockPool) -> None:
    pool.num_cached += 1


def leave_a_stale_hash(pool: BlockPool) -> None:
    pool._block_by_hash[b"stale"] = 2


def circulate_the_null_block(pool: BlockPool) -> None:
    pool._num_holders[0] = 1


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        free_a_held_block,
        miscount_a_holder,
        miscount_the_cached,
        leave_a_stale_hash,
        circulate_the_null_block,
    ],
)
def test_check_notices_damage(damage):
    pool = BlockPool(5)
    assert list(pool.take(1)) == [1]
    pool.check([[1]])
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check([[1]])


def test_check_notices_a_table_that_nobody_released():
    pool = BlockPool(5)
    pool.take(2)
    with pytest.raises(AssertionError, match="a block is lost"):
        pool.check([[1]])
    with pytest.raises(AssertionError, match="wrong number of holders"):
        pool.check([[1, 2], [2]])
