"""LoRA equals float64's: ragged sizes, every dtype, rows that do not depend on the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import Lora, LoraShape, sort_rows
from pallas_kernels.lora.cases import CASES
from pallas_kernels.lora.reference import reference_lora

pytestmark = pytest.mark.cpu_kernels

DTYPES = [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)]
IMPLEMENTATIONS = ["cpu", "xla"]
LAYER, NUM_LAYERS = 1, 2


class Step(NamedTuple):
    """The operands of one call."""

    x: jax.Array
    down: jax.Array
    up: jax.Array
    slots: np.ndarray
    plus: jax.Array
    parts: tuple[int, ...]
    num_slots: int

    def take(self, rows: Any) -> Step:
        """Return the step with some of its rows."""
        return self._replace(x=self.x[rows], slots=self.slots[rows], plus=self.plus[rows])


def make(
    t: int, k: int, parts: tuple[int, ...], dtypes: tuple[Any, Any], *, rank: int = 8, num_slots: int = 3, seed: int = 0
) -> Step:
    """Make a step of random slots; other layers are NaN, and B is zero beside each part's own outputs."""
    rng = np.random.default_rng(seed)
    dtype, out_dtype = dtypes
    n, stops, num_columns = sum(parts), np.cumsum(parts), num_slots * len(parts) * rank
    down = np.full((NUM_LAYERS, num_columns, k), np.nan)
    down[LAYER] = rng.standard_normal((num_columns, k)) * k**-0.5
    up = np.full((NUM_LAYERS, num_columns, n), np.nan)
    up[LAYER] = 0
    for column in range(num_columns):
        part = column // rank % len(parts)
        up[LAYER, column, stops[part] - parts[part] : stops[part]] = rng.standard_normal(parts[part])
    x, plus = rng.standard_normal((t, k)), rng.standard_normal((t, n))
    slots = rng.integers(0, num_slots + 1, t).astype(np.int32)
    x_ti, down_lci, up_lco = (jnp.asarray(each, dtype) for each in (x, down, up))
    return Step(x_ti, down_lci, up_lco, slots, jnp.asarray(plus, out_dtype), parts, num_slots)


def run(step: Step, out_dtype: Any, implementation: str = "cpu", *, adds: bool = True) -> np.ndarray:
    """Run the op on the second layer."""
    op = Lora(implementation)

    def program(x: jax.Array, down: jax.Array, up: jax.Array, slots: jax.Array, plus: jax.Array) -> jax.Array:
        where = (LAYER, sort_rows(slots), step.parts, step.num_slots)
        return op(x, down, up, *where, plus_to=plus if adds else None, out_dtype=out_dtype)

    return np.asarray(jax.jit(program)(step.x, step.down, step.up, jnp.asarray(step.slots), step.plus))


def check(step: Step, out_dtype: Any, implementation: str = "cpu", *, adds: bool = True) -> None:
    """Compare with the reference."""
    x, down, up = np.asarray(step.x), np.asarray(step.down[LAYER]), np.asarray(step.up[LAYER])
    plus = np.asarray(step.plus) if adds else None
    expected = reference_lora(x, down, up, step.slots, step.parts, step.num_slots, plus_to=plus)
    got = run(step, out_dtype, implementation, adds=adds).astype(np.float64)
    # Numbers that are rounded to bfloat16 in between may fall to either side.
    tolerance = 2.0**-6 if jnp.bfloat16 in (step.x.dtype, out_dtype) else 1e-5
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=8 * tolerance)
    if out_dtype == jnp.float32 and step.x.dtype == jnp.bfloat16:
        assert np.abs(got - expected).mean() < 2.0**-10


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(
    ("t", "k", "parts"),
    [
        (1, 32, (16,)),
        (3, 64, (5, 3)),
        (4, 96, (33,)),
        (7, 576, (576, 192, 192)),
        (95, 64, (100, 18)),
        (200, 160, (64,)),
    ],
)
def test_matches_the_reference(
    t: int, k: int, parts: tuple[int, ...], dtypes: tuple[Any, Any], implementation: str
) -> None:
    for adds in (True, False):
        check(make(t, k, parts, dtypes, seed=t), dtypes[1], implementation, adds=adds)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("case", ["smollm2-135m", "tiny"])
def test_real_shapes(case: str, name: str, dtypes: tuple[Any, Any]) -> None:
    k, parts = getattr(CASES[case], name)
    check(make(19, k, parts, dtypes, rank=16, num_slots=8), dtypes[1])


@pytest.mark.usefixtures("lesser_set")
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("t", "k", "parts"), [(1, 96, (9,)), (7, 32, (300, 20)), (97, 64, (40, 32))])
def test_with_a_lesser_instruction_set(t: int, k: int, parts: tuple[int, ...], dtypes: tuple[Any, Any]) -> None:
    step = make(t, k, parts, dtypes)
    check(step, dtypes[1])
    check(step, dtypes[1], adds=False)
    check_company(step, dtypes[1])


def check_company(step: Step, out_dtype: Any) -> None:
    """Assert that rows get the same bits alone, in other company and in another order."""
    for adds in (True, False):
        whole = run(step, out_dtype, adds=adds)
        rng = np.random.default_rng(0)
        count = len(step.slots)
        picks = [np.arange(1), np.arange(count // 2, count), rng.permutation(count), rng.integers(0, count, 2 * count)]
        for rows in picks:
            np.testing.assert_array_equal(run(step.take(rows), out_dtype, adds=adds), whole[rows])
        same = step._replace(slots=np.full_like(step.slots, 2))
        of_one = run(same, out_dtype, adds=adds)
        is_of_slot = step.slots == 2
        np.testing.assert_array_equal(of_one[is_of_slot], whole[is_of_slot])


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("k", [64, 1600])
def test_a_row_does_not_depend_on_the_others(k: int, dtypes: tuple[Any, Any]) -> None:
    check_company(make(61, k, (101, 64), dtypes, rank=16), dtypes[1])


def test_shares_of_columns_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are few and B is large, a unit has a share of the columns of each part."""
    step = make(2, 64, (3000, 5000, 70), (jnp.float32, jnp.float32), rank=16)
    step = step._replace(slots=np.array([1, 3], np.int32))
    one = run(step, jnp.float32)
    monkeypatch.setattr("pallas_kernels.lora.cpu.kernel.num_cores", lambda: 5)
    monkeypatch.setattr("pallas_kernels.lora.cpu.kernel.CHUNK_BYTES", 1 << 15)
    monkeypatch.setattr("pallas_kernels.lora.cpu.Kind.name", "lora_in_shares")
    np.testing.assert_array_equal(run(step, jnp.float32), one)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_rows_without_an_adapter_stay_as_they_are(dtypes: tuple[Any, Any], implementation: str) -> None:
    step = make(12, 64, (64, 40), dtypes)
    step = step._replace(plus=step.plus.at[::3].set(-0.0))
    for slots in (np.zeros_like(step.slots), step.slots):
        got = run(step._replace(slots=slots), dtypes[1], implementation)
        np.testing.assert_array_equal(got[slots == 0], np.asarray(step.plus)[slots == 0])


@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_row_without_an_adapter_is_what_changes_no_sum(dtypes: tuple[Any, Any]) -> None:
    step = make(9, 64, (64, 37), dtypes)
    made = run(step, dtypes[1], adds=False)[step.slots == 0].astype(np.float32)
    assert len(made)
    assert (made == 0).all()
    assert np.signbit(made).all()


def test_nothing_of_other_slots_is_read() -> None:
    """Empty slots may hold anything, and so may rows of no slot."""
    step = make(9, 64, (64, 32), (jnp.bfloat16, jnp.bfloat16))
    rank = 8
    slots = np.array([0, 2, 2, 0, 2, 2, 2, 2, 0], np.int32)
    expected = run(step._replace(slots=slots), jnp.bfloat16)
    is_of_slot = jnp.arange(step.down.shape[1]) // (2 * rank) == 1
    poisoned = step._replace(
        slots=slots,
        down=jnp.where(is_of_slot[:, None], step.down, jnp.nan),
        up=jnp.where(is_of_slot[:, None], step.up, jnp.nan),
        x=step.x.at[slots == 0].set(jnp.nan),
    )
    np.testing.assert_array_equal(run(poisoned, jnp.bfloat16), expected)


def test_what_the_kernel_cannot_take_is_left_to_xla() -> None:
    shape = LoraShape(8, 64, (64,), jnp.bfloat16, jnp.bfloat16)
    op = Lora("cpu")
    assert op.refusal(shape) is None
    assert "rank" in str(op.refusal(shape._replace(rank=1)))
    assert "multiple of 64 bytes" in str(op.refusal(shape._replace(num_inputs=40)))
    assert "float16" in str(op.refusal(shape._replace(dtype=jnp.float16)))
    check(make(5, 40, (64,), (jnp.float32, jnp.float32), rank=1), jnp.float32)


def test_arrays_that_do_not_fit_are_refused() -> None:
    step = make(3, 64, (64,), (jnp.float32, jnp.float32))
    with pytest.raises(ValueError, match="do not fit each other"):
        run(step._replace(x=step.x[:, :32]), jnp.float32)
    with pytest.raises(ValueError, match="slots and of parts"):
        run(step._replace(parts=(60,)), jnp.float32)
