"""A grouped matmul equals the reference in float64: ragged groups, every dtype, unwritten rows full of NaN."""

import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import GroupedMatmul, Groups, MatmulShape, capacity, group_rows, pick, xla
from pallas_kernels.grouped_matmul.cases import CASES, Case
from pallas_kernels.grouped_matmul.reference import reference_grouped_matmul
from pallas_kernels.weights import INT8, WeightFormat, dequantize
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.quantized import FORMATS, HALVES, make_parts, packed

pytestmark = pytest.mark.cpu_kernels

NUM_EXPERTS = 6
LAYER = 1
RAGGED = {
    "a few each, and some nothing": [3, 0, 1, 7, 0, 2],
    "one has all": [0, 0, 0, 101, 0, 0],
    "one row": [0, 0, 0, 0, 0, 1],
    "one each": [1] * NUM_EXPERTS,
    "many and few": [37, 4, 5, 6, 96, 1],
    "nothing": [0] * NUM_EXPERTS,
}


class Work(NamedTuple):
    """The arguments of a call, and the expected result."""

    x: jax.Array
    w: jax.Array | Quantized
    groups: Groups
    live: np.ndarray
    """The rows that belong to a group."""
    expected: np.ndarray
    bound: np.ndarray
    """The bound of the error of sums of rounded products."""


def place(counts: list[int], alignment: int) -> tuple[Groups, np.ndarray, int]:
    """Return groups, their rows, and the number of rows."""
    padded = [-(-count // alignment) * alignment for count in counts]
    starts = np.cumsum([0, *padded[:-1]])
    live = np.concatenate([np.arange(count) + start for start, count in zip(starts, counts, strict=True)])
    groups = Groups(jnp.asarray(starts, jnp.int32), jnp.asarray(counts, jnp.int32))
    return groups, live, capacity(max(1, sum(counts)), NUM_EXPERTS, alignment)


def make(
    op: GroupedMatmul,
    counts: list[int],
    o: int = 48,
    i: int = 96,
    dtype: Any = jnp.float32,
    *,
    is_int8: bool = False,
    activation: str | None = None,
) -> Work:
    """Make random numbers for the middle one of three layers; everything else is NaN."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")  # shown where a test fails
    rng = np.random.default_rng(seed)
    groups, live, num_rows = place(counts, op.row_alignment)
    x = np.full((num_rows, i), np.nan, np.float32)
    x[live] = rng.standard_normal((len(live), i))
    shape, scales = (3, NUM_EXPERTS, o, i), None
    if is_int8:
        w = jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
        scales = np.full(shape[:3], np.nan, np.float32)
        scales[LAYER] = rng.uniform(0.5, 2, shape[1:3]) / 400
    else:
        some = np.full(shape, np.nan, np.float32)
        some[LAYER] = rng.standard_normal(shape[1:]) * 0.25
        w = jnp.asarray(some, dtype)
    x = jnp.asarray(x, dtype)
    numbers = np.asarray(w, np.float64) * (1 if scales is None else scales[..., None])
    expected = reference_grouped_matmul(np.asarray(x), numbers, LAYER, groups, activation=activation)
    size = abs(np.asarray(w[LAYER], np.float64)) * (1 if scales is None else scales[LAYER][..., None])
    largest = np.nan_to_num(abs(np.asarray(x, np.float64))).sum(axis=1, keepdims=True) * size.max()
    bound = i * 2.0**-24 * largest * (1 + largest if activation else 1)
    weight = w if scales is None else Quantized({"codes": w, "scales": jnp.asarray(scales)[..., None]}, INT8)
    return Work(x, weight, groups, live, expected, bound)


def run(op: GroupedMatmul, work: Work, out_dtype: Any = None, activation: str | None = None) -> np.ndarray:
    """Multiply by a traced layer."""

    def multiply(work: Work, layer: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"activation": activation, "out_dtype": out_dtype}
        return op(work.x, work.w, layer, work.groups, **options)

    options = {"xla_allow_excess_precision": False}
    return np.asarray(jax.jit(multiply, compiler_options=options)(work, jnp.int32(LAYER)))


def check(op: GroupedMatmul, work: Work, out_dtype: Any = None, activation: str | None = None) -> None:
    got = run(op, work, out_dtype, activation)
    assert got.dtype == (out_dtype or work.x.dtype)
    rounding = 2.0**-8 if got.dtype == jnp.bfloat16 else 0
    # The contents of other rows may not even be cast.
    got, expected = got[work.live].astype(np.float64), work.expected[work.live]
    assert (abs(got - expected) <= work.bound[work.live] + rounding * abs(expected) + 1e-6).all()


@pytest.fixture(params=["xla", "cpu"])
def op(request: pytest.FixtureRequest) -> GroupedMatmul:
    return GroupedMatmul(request.param)


@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
def test_ragged_groups(op: GroupedMatmul, counts: list[int]) -> None:
    check(op, make(op, counts))


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_and_activations(op: GroupedMatmul, dtype: Any, activation: str | None, is_int8: bool) -> None:
    work = make(op, RAGGED["many and few"], 36, 160, dtype, is_int8=is_int8, activation=activation)
    check(op, work, activation=activation)


def test_bfloat16_to_float32(op: GroupedMatmul) -> None:
    check(op, make(op, [9, 1, 0, 2, 0, 0], dtype=jnp.bfloat16), jnp.float32)


@pytest.mark.parametrize(("is_int8", "activation"), [(False, None), (True, "silu")])
def test_ragged_dot_of_a_tpu(is_int8: bool, activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run plain XLA as on a TPU."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arguments, cpu, cuda, default: default(*arguments))
    op = GroupedMatmul("xla")
    for counts in (RAGGED["many and few"], RAGGED["one has all"]):
        work = make(op, counts, is_int8=is_int8, activation=activation)
        # Its stand-in on a CPU adds up rows times zeros.
        check(op, work._replace(x=jnp.nan_to_num(work.x)), activation=activation)


@pytest.mark.parametrize(("is_int8", "activation"), [(False, None), (True, "silu")])
@pytest.mark.parametrize("form", [xla.multiply_rows, partial(xla.multiply_batches, most_bytes=3 * 48 * 96 * 4)])
def test_plain_xla_of_a_gpu(form: Any, is_int8: bool, activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of a batch are of several experts, and there are several batches."""
    result = xla.Result(activation, jnp.float32)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arguments, **_: form(*arguments, result))
    op = GroupedMatmul("xla")
    for counts in RAGGED.values():
        check(op, make(op, counts, is_int8=is_int8, activation=activation), jnp.float32, activation)


def test_only_a_cpu_loops_for_a_few_rows() -> None:
    arguments = make(GroupedMatmul(), RAGGED["one each"])
    traced = jax.jit(lambda work: GroupedMatmul()(work.x, work.w, 1, work.groups)).trace(arguments)
    texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda", "tpu")}
    assert "while" in texts["cpu"]
    assert "ragged_dot" not in texts["cpu"]
    assert "ragged_dot" in texts["tpu"]
    assert "while" not in texts["tpu"] + texts["cuda"]
    assert "ragged_dot" not in texts["cuda"]


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: Any, activation: str | None, is_int8: bool) -> None:
    """A CPU's own kernel gives a row the same bits in groups of any size, at any place."""
    op = GroupedMatmul("cpu")
    whole = make(op, [0, 0, 0, 211, 0, 0], 36, 160, dtype, is_int8=is_int8, activation=activation)
    expected = run(op, whole, activation=activation)
    for counts in (
        [0, 0, 0, 1, 0, 0],
        [5, 0, 3, 2, 1, 1],
        [100, 0, 0, 3, 0, 0],
        [0, 0, 9, 7, 0, 1],
        [1, 1, 1, 97, 1, 1],
    ):
        groups, live, num_rows = place(counts, 4)
        start, count = int(groups.starts_e[3]), counts[3]
        x = np.full((num_rows, 160), np.nan, np.float32)
        x[live] = 1
        x[start : start + count] = whole.x[11 : 11 + count]
        work = whole._replace(x=jnp.asarray(x, dtype), groups=groups)
        got = run(op, work, activation=activation)[start : start + count]
        np.testing.assert_array_equal(got, expected[11 : 11 + count])


@pytest.mark.parametrize("o", [8, 18, 1030])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_columns_that_are_no_whole_tiles(o: int, activation: str | None) -> None:
    o = 2 * o if activation else o
    check(
        GroupedMatmul("cpu"),
        make(GroupedMatmul("cpu"), [1, 0, 5, 4, 130, 2], o, activation=activation),
        None,
        activation,
    )


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "MXFP4", "AWQ"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_weights_equal_plain_ones(dtype: Any, name: str) -> None:
    check_packed(FORMATS[name], dtype)


@pytest.mark.parametrize("form", HALVES.values(), ids=HALVES)
def test_halves_equal_float32(form: WeightFormat) -> None:
    check_packed(form, jnp.float32)


def check_packed(form: WeightFormat, dtype: Any) -> None:
    """Compare with plain weights, to the bit, in groups of one row, of a few, and of many."""
    op, o, i = GroupedMatmul("cpu"), 36, 256
    parts = make_parts(form, o, i, lead=(3, NUM_EXPERTS))
    plain = jnp.asarray(dequantize(parts, form)).astype(dtype)
    quantized = Quantized(jax.tree.map(jnp.asarray, packed(parts, form)), form, is_packed=True)
    for activation in (None, "silu"):
        work = make(op, RAGGED["many and few"], o, i, dtype)
        expected, got = (run(op, work._replace(w=w), activation=activation)[work.live] for w in (plain, quantized))
        assert abs(expected.astype(np.float32)).max() > 1e-3
        np.testing.assert_array_equal(got, expected)


def test_rows_of_weights_that_are_too_long_for_the_stack() -> None:
    op = GroupedMatmul("cpu")
    check(op, make(op, [7, 0, 1, 0, 0, 2], 16, 33 * 1024, is_int8=True))


@pytest.mark.parametrize("alignment", [1, 4, 8])
@pytest.mark.parametrize(("t", "j", "num_experts"), [(1, 1, 1), (1, 8, 128), (7, 2, 3), (33, 4, 9), (130, 8, 16)])
def test_grouping_equals_a_loop(t: int, j: int, num_experts: int, alignment: int) -> None:
    rng = np.random.default_rng()
    experts_tj = rng.integers(-1, num_experts + 1, (t, j))  # the first and the last one are none
    if t == 7:
        experts_tj[:] = 1
    num_tokens = t - t // 5
    make = jax.jit(group_rows, static_argnums=(1, 2))
    grouping = jax.tree.map(np.asarray, make(experts_tj, num_experts, alignment, num_tokens))
    groups, tokens_r, experts_r, rows_tj = grouping
    assert len(tokens_r) == capacity(t * j, num_experts, alignment)
    row = 0
    for expert in range(num_experts):
        assert groups.starts_e[expert] == row
        choices = np.argwhere(experts_tj[:num_tokens] == expert)
        assert groups.counts_e[expert] == len(choices)
        np.testing.assert_array_equal(tokens_r[row : row + len(choices)], choices[:, 0])
        np.testing.assert_array_equal(experts_r[row : row + len(choices)], expert)
        np.testing.assert_array_equal(rows_tj[tuple(choices.T)], np.arange(row, row + len(choices)))
        row += -(-len(choices) // alignment) * alignment
    assert row <= len(tokens_r)
    assert ((tokens_r >= 0) & (tokens_r < t)).all()
    assert ((experts_r >= 0) & (experts_r < num_experts)).all()
    assert ((rows_tj >= 0) & (rows_tj < len(tokens_r))).all()


def test_capacity_holds_the_most_scattered_choices() -> None:
    assert capacity(5, 128, 8) == 40
    assert capacity(64, 8, 8) == 64 + 8 * 7
    assert capacity(3, 2, 4) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((8, 5))}, r"\[rows, in\]"),
        ({"w": jnp.zeros((6, 48, 96))}, r"\[layers, experts, out, in\]"),
        ({"w": jnp.zeros((3, 5, 48, 96))}, "not of w's 5 experts"),
        ({"w": jnp.zeros((3, 6, 48, 96), jnp.bfloat16)}, "w must be float32, as x is, or quantized, not bfloat16"),
    ],
)
def test_refuses_arrays_that_do_not_fit(change: dict[str, jax.Array], message: str) -> None:
    work = make(GroupedMatmul(), RAGGED["one each"])
    with pytest.raises(ValueError, match=f"grouped_matmul: .*{message}"):
        run(GroupedMatmul(), work._replace(**change))


@pytest.mark.parametrize(("o", "activation"), [(48, "relu"), (47, "silu")])
def test_refuses_an_activation(o: int, activation: str) -> None:
    with pytest.raises(ValueError, match=f"not '{activation}' with {o}"):
        run(GroupedMatmul(), make(GroupedMatmul(), RAGGED["one each"], o), activation=activation)


def test_a_platform_without_a_kernel_runs_plain_xla() -> None:
    shapes = CASES["small"].shapes()
    assert pick(shapes, "rocm") == (GroupedMatmul("xla"), None)
    assert pick(shapes, "cpu") == (GroupedMatmul("cpu"), None)
    assert pick(shapes, "cpu", "xla") == (GroupedMatmul("xla"), None)
    with pytest.raises(ValueError, match="there is no implementation 'cuda', only xla, cpu"):
        pick(shapes, "cpu", "cuda")


def test_says_what_a_cpu_cannot_multiply() -> None:
    shapes = Case(4, 2, 40, 64).shapes(jnp.float32)
    op, reason = pick(shapes, "cpu")
    assert op == GroupedMatmul("xla")
    assert reason is not None
    with pytest.raises(ValueError, match=re.escape(f"'cpu' cannot run this model here: {reason}")):
        pick(shapes, "cpu", "cpu")
    with pytest.raises(ValueError, match="'cpu' does not run on a gpu"):
        pick(shapes, "gpu", "cpu")
    op = GroupedMatmul("cpu")
    with pytest.raises(ValueError, match=r"'cpu' cannot run this: a row of weights .* not \[48, 40\]"):
        run(op, make(op, RAGGED["one each"], i=40))
    work = make(op, RAGGED["one each"])
    with pytest.raises(ValueError, match="a multiple of 4 rows, not 6"):
        run(op, work._replace(x=work.x[:6]))
    assert "float32, not float16" in str(pick(CASES["tiny"].shapes(jnp.float16), "cpu")[1])


def test_a_kernel_is_compiled_ahead() -> None:
    GroupedMatmul("cpu").prepare(CASES["tiny"].shapes(jnp.float32))
    GroupedMatmul("xla").prepare(CASES["tiny"].shapes(jnp.float32))


def test_cases_are_the_models_matmuls() -> None:
    gate_up, down = CASES["qwen3-30b-a3b"].shapes(jnp.bfloat16, INT8)
    assert gate_up == MatmulShape(128, 1536, 2048, jnp.bfloat16, INT8, jnp.bfloat16, "silu")
    assert (gate_up.num_columns, down.num_outputs, down.num_inputs) == (768, 2048, 768)
