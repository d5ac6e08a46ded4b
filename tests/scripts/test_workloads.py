"""scripts/lib/workloads.py: plain XLA's answer is right, and a wrong kernel does not pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from lib.workloads import LAYER, NUM_LAYERS, Workload, compare, make_workload, pick_kernels, ragged_decodes, xla_answer

from pallas_kernels.paged_attention import FusedPool, SplitPool
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.reference import reference_paged_attention

pytestmark = pytest.mark.kernels

CASE = CASES["smollm2-135m"]
CHUNKS = [(1500, 1), (1, 1), (300, 170)]


def whole(pool: FusedPool) -> FusedPool:
    """Return a pool of all layers, of LAYER's."""
    return FusedPool(jnp.concatenate([pool.kv] * NUM_LAYERS))


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_xlas_answer_is_the_references(kv_dtype: DTypeLike) -> None:
    op = pick_kernels(CASE, 32, kv_dtype, "gpu")
    work = make_workload(op, CASE, CHUNKS)
    got = xla_answer(op, work)
    h = CASE.head_dim
    kv = np.asarray(work.pool.kv)
    pool = SplitPool(kv[..., :h].swapaxes(-1, -2), kv[..., h:])
    q, k, v, batch, rope, _ = work.inputs
    q, k, v = (np.asarray(x) for x in (q, k, v))
    settings = {**work.settings._asdict(), "layer": LAYER, "num_layers": NUM_LAYERS, "rope": rope}
    exact, after = reference_paged_attention(q, k, v, pool, batch, **settings)
    assert np.isnan(kv.astype(np.float32)).any(), "what nobody wrote is poison"
    expected = FusedPool.of(SplitPool(*(jnp.asarray(x) for x in after)))
    num_blocks = len(kv) // NUM_LAYERS
    expected = FusedPool(expected.kv[LAYER * num_blocks : (LAYER + 1) * num_blocks].astype(got[1].kv.dtype))
    assert compare(work, (got[0], whole(got[1])), (jnp.asarray(exact), expected))["missed"] == []


@pytest.fixture(scope="module")
def answered() -> tuple[Workload, tuple[jnp.ndarray, FusedPool]]:
    op = pick_kernels(CASE, 64, jnp.bfloat16, "gpu")
    work = make_workload(op, CASE, [(8192, 1), *CHUNKS])
    return work, xla_answer(op, work)


def test_a_lost_tile_is_noticed(answered: tuple[Workload, tuple[jnp.ndarray, FusedPool]]) -> None:
    work, (out, pool) = answered
    assert compare(work, (out, whole(pool)), (out, pool)) == {"error": 0.0, "missed": []}
    op = pick_kernels(CASE, 64, jnp.bfloat16, "gpu")
    block = LAYER * (len(work.pool.kv) // NUM_LAYERS) + work.inputs.batch.block_tables_sm[0, 7]
    hurt = work._replace(pool=FusedPool(work.pool.kv.at[block].multiply(-1)))
    [missed] = compare(work, (xla_answer(op, hurt)[0], whole(pool)), (out, pool))["missed"]
    assert "error" in missed


def test_poison_and_a_wrong_pool_are_noticed(answered: tuple[Workload, tuple[jnp.ndarray, FusedPool]]) -> None:
    work, (out, pool) = answered
    slot = int(work.inputs.batch.slots_t[0])
    wrong = whole(FusedPool(pool.kv.at[slot // 64, 1, slot % 64, 3].multiply(-1)))
    assert compare(work, (out, wrong), (out, pool))["missed"] == ["the pool differs"]
    poisoned = compare(work, (out.at[0, 0, 0].set(jnp.nan), whole(pool)), (out, pool))["missed"]
    assert len(poisoned) == 2


def test_padding_to_the_shapes_of_others_changes_nothing() -> None:
    op = pick_kernels(CASE, 64, jnp.bfloat16, "gpu")
    alone, padded = (make_workload(op, CASE, CHUNKS[:2], like=like) for like in (None, [(2000, 1)] * 9))
    largest = make_workload(op, CASE, [(2000, 1)] * 9)
    shapes = [jax.tree.map(jnp.shape, work[:2]) for work in (padded, largest)]
    assert shapes[0] == shapes[1], "they share programs"
    compared = compare(padded, (xla_answer(op, padded)[0], padded.pool), xla_answer(op, padded))
    assert compared["error"] == 0
    assert np.flatnonzero(padded.inputs.batch.slots_t).tolist() == np.flatnonzero(alone.inputs.batch.slots_t).tolist()
    assert padded.inputs.batch.num_decodes == 2
    assert padded.inputs.batch.tile_seqs_i.size == 0, "a GPU's decodes come without room for tiles"
    assert padded.inputs.batch.context_lens_s.tolist() == [1500, 1, *[0] * 7]


def test_contexts_are_ragged() -> None:
    chunks = ragged_decodes(64, 8192)
    assert len({length for length, _ in chunks}) > 50
    assert max(length for length, _ in chunks) == 8192
