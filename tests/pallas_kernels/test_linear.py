"""A CPU's matmul equals float64's: ragged sizes, every dtype, rows that do not depend on the others."""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np
import pytest

from jaxllm.loading.gguf.parts import FORMATS
from jaxllm.models.layers import ACTIVATIONS
from pallas_kernels.linear import Linear
from pallas_kernels.linear.cpu import Kind, can_multiply, cpu_linear
from pallas_kernels.linear.cpu.kernel import Kernel
from pallas_kernels.linear.reference import reference_linear
from pallas_kernels.native import compiling, objects, processor
from pallas_kernels.native.processor import AMX, AVX2, AVX512
from pallas_kernels.weights import INT8, WeightFormat
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.conftest import restrict
from tests.utils.ownership import give_away

pytestmark = pytest.mark.cpu_kernels

DTYPES = [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)]
FLOAT32 = Kind(jnp.float32, None, jnp.float32)


def make(t: int, n: int, k: int, dtype: Any, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((rows, k)), dtype) for rows in (t, n))  # type: ignore[return-value]


def multiply(x: jax.Array, w: jax.Array, out_dtype: Any) -> np.ndarray:
    return np.asarray(jax.jit(lambda x, w: cpu_linear(x, w[None], 0, out_dtype=out_dtype))(x, w), np.float64)


def exact(x: jax.Array, w: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize(
    ("t", "n", "k"), [(1, 4, 32), (3, 5, 64), (4, 33, 96), (6, 16, 32), (7, 300, 576), (95, 577, 64), (200, 18, 1536)]
)
def test_matches_float64(t: int, n: int, k: int, dtype: Any, out_dtype: Any) -> None:
    x, w = make(t, n, k, dtype)
    got, expected = multiply(x, w, out_dtype), exact(x, w)
    # A sum of k products, each rounded once, is within k / 2 units in the last place of the sum of their magnitudes.
    bound = k * 2.0**-24 * exact(abs(x), abs(w))
    if out_dtype == jnp.bfloat16:
        bound += 2.0**-8 * abs(expected)
    assert (abs(got - expected) <= bound).all()


@pytest.mark.parametrize("k", [160, 1600])  # the longer rows are multiplied in pieces where there are many
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: Any, out_dtype: Any, k: int) -> None:
    x, w = make(211, 101, k, dtype)
    whole = multiply(x, w, out_dtype)
    for start, count in ((0, 1), (0, 4), (3, 5), (5, 6), (60, 64), (90, 121), (210, 1)):
        np.testing.assert_array_equal(multiply(x[start : start + count], w, out_dtype), whole[start : start + count])


@pytest.mark.usefixtures("lesser_set")
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 9, 96), (7, 300, 32), (97, 40, 1600), (97, 70, 8192)])
def test_with_a_lesser_instruction_set(t: int, n: int, k: int, dtype: Any, out_dtype: Any) -> None:
    x, w = make(t, n, k, dtype)
    got = multiply(x, w, out_dtype)
    tolerance = 2.0**-8 if out_dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.asarray(got, np.float64), exact(x, w), rtol=tolerance, atol=1e-3)
    np.testing.assert_array_equal(multiply(x[:1], w, out_dtype), got[:1])


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize(("t", "n"), [(1, 16), (5, 18), (6, 33), (100, 50)])
def test_adds(t: int, n: int, dtype: Any, out_dtype: Any) -> None:
    x, w = make(t, n, 64, dtype)
    plus = jnp.asarray(np.random.default_rng(1).standard_normal((t, n)), out_dtype)
    got = jax.jit(lambda x, w, plus: cpu_linear(x, w[None], 0, out_dtype=out_dtype, plus_to=plus))(x, w, plus)
    expected = np.asarray(plus, np.float64) + exact(x, w)
    tolerance = 2.0**-8 if out_dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("t", "n", "k"), [(1, 16, 32), (5, 18, 64), (6, 32, 96), (100, 36, 64), (64, 3072, 576)])
def test_gates(t: int, n: int, k: int, activation: str, dtype: Any, out_dtype: Any) -> None:
    x, w = make(t, n, k, dtype)
    w = w * 0.25
    got = np.asarray(
        jax.jit(lambda x, w: cpu_linear(x, w[None], 0, out_dtype=out_dtype, activation=activation))(x, w), np.float64
    )
    gate, gated = np.split(exact(x, w), 2, axis=1)
    with jax.enable_x64(True):
        expected = np.asarray(ACTIVATIONS[activation](jnp.asarray(gate))) * gated
    bound = 1e-5 * np.linalg.norm(np.asarray(x, np.float64), axis=1, keepdims=True) * (1 + abs(gated))
    if out_dtype == jnp.bfloat16:
        bound += 2.0**-8 * abs(expected)
    assert (abs(got - expected) <= bound).all()


@pytest.mark.parametrize("lesser", [None, "avx2"])
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 16, 32), (5, 18, 64), (7, 36, 1600), (100, 36, 64)])
def test_adds_before_it_gates(
    t: int, n: int, k: int, dtype: Any, out_dtype: Any, lesser: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adding -0 changes no bit, and a row's sum is the same beside any others."""
    if lesser:
        restrict(lesser, monkeypatch)
    x, w = make(t, n, k, dtype)
    w = w * 0.25
    plus = jnp.asarray(np.random.default_rng(1).standard_normal((t, n)), out_dtype)

    def gate(rows: slice, plus: jax.Array | None) -> np.ndarray:
        options: dict[str, Any] = {"activation": "silu", "plus_to": None if plus is None else plus[rows]}
        return np.asarray(jax.jit(lambda x, w: cpu_linear(x, w[None], 0, out_dtype=out_dtype, **options))(x[rows], w))

    everything = slice(None)
    got, added = gate(everything, plus).astype(np.float64), np.asarray(plus, np.float64)
    expected = reference_linear(np.asarray(x), np.asarray(w), activation="silu", plus_to=added)
    bound = 1e-5 * np.linalg.norm(np.asarray(x, np.float64), axis=1, keepdims=True) * (2 + abs(added).max())
    if out_dtype == jnp.bfloat16:
        bound = bound + 2.0**-8 * abs(expected)
    assert (abs(got - expected) <= bound).all()
    np.testing.assert_array_equal(gate(everything, jnp.full_like(plus, -0.0)), gate(everything, None))
    np.testing.assert_array_equal(gate(slice(t // 2, t), plus), got[t // 2 :])


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("t", "n", "k"), [(1, 16, 32), (5, 18, 64), (6, 33, 96), (100, 35, 64)])
def test_activates_with_a_bias(t: int, n: int, k: int, activation: str | None, dtype: Any, out_dtype: Any) -> None:
    x, w = make(t, n, k, dtype)
    w = w * 0.25
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(n) * 3, out_dtype)
    options: dict[str, Any] = {"activation": activation, "is_gated": False, "bias_o": bias}
    got = np.asarray(jax.jit(lambda x, w: cpu_linear(x, w[None], 0, out_dtype=out_dtype, **options))(x, w), np.float64)
    total = exact(x, w) + np.asarray(bias, np.float64)
    with jax.enable_x64(True):
        expected = total if activation is None else np.asarray(ACTIVATIONS[activation](jnp.asarray(total)))
    bound = 1e-5 * (1 + np.linalg.norm(np.asarray(x, np.float64), axis=1, keepdims=True))
    if out_dtype == jnp.bfloat16:
        bound = bound + 2.0**-8 * abs(expected)
    assert (abs(got - expected) <= bound).all()


def test_gelu_keeps_what_is_far_out() -> None:
    x = jnp.asarray([[value, *[0.0] * 15] for value in (-40.0, -6.0, -1e-30, 0.0, 6.0, 3e38, np.inf, np.nan)])
    got = jax.jit(
        lambda x: cpu_linear(x, jnp.eye(16)[None], 0, out_dtype=jnp.float32, activation="gelu", is_gated=False)
    )(x)
    np.testing.assert_allclose(got[:6, 0], [0, -6e-9, -5e-31, 0, 6, 3e38], rtol=1e-6, atol=2e-6)
    assert got[6, 0] == np.inf
    assert np.isnan(got[7, 0])


def make_int8(n: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Return weights with every int8 value, and scales."""
    rng = np.random.default_rng(1)
    values = rng.integers(-127, 128, (n, k)).astype(np.int8)
    return jnp.asarray(values), jnp.asarray(rng.uniform(0.5, 2, n) / k, jnp.float32)


def multiply_int8(x: jax.Array, w: jax.Array, scales: jax.Array, out_dtype: Any, **options: Any) -> np.ndarray:
    """Multiply by the last of two layers."""
    stack, both = jnp.stack([jnp.zeros_like(w), w]), jnp.stack([scales * jnp.nan, scales])
    weight = Quantized({"codes": stack, "scales": both[..., None]}, INT8)
    program = jax.jit(lambda x, weight: cpu_linear(x, weight, 1, out_dtype=out_dtype, **options))
    return np.asarray(program(x, weight), np.float64)


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 4, 32), (3, 5, 64), (6, 18, 96), (7, 300, 576), (200, 33, 1536)])
def test_int8_matches_float64(t: int, n: int, k: int, dtype: Any, out_dtype: Any) -> None:
    x, (w, scales) = make(t, n, k, dtype)[0], make_int8(n, k)
    plus = jnp.asarray(np.random.default_rng(2).standard_normal((t, n)), out_dtype)
    scaled = np.asarray(w, np.float64) * np.asarray(scales, np.float64)[:, None]
    product = np.asarray(x, np.float64) @ scaled.T
    bound = k * 2.0**-24 * (abs(np.asarray(x, np.float64)) @ abs(scaled).T) + 1e-6
    for added, options in ((0, {}), (np.asarray(plus, np.float64), {"plus_to": plus})):
        rounding = 2.0**-8 * abs(product + added) if out_dtype == jnp.bfloat16 else 0
        got = multiply_int8(x, w, scales, out_dtype, **options)
        assert (abs(got - (product + added)) <= bound + rounding).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_int8_gates(activation: str, dtype: Any) -> None:
    """Gates in int8 equal those of a weight of x's dtype that needs no scales, except for the order of rounding."""
    # The last is too long to be converted for all rows at once.
    for t, n, k in ((1, 16, 32), (5, 18, 64), (100, 36, 64), (8, 16, 4160)):
        x, (w, scales) = make(t, n, k, dtype)[0], make_int8(n, k)
        powers = 2.0 ** jnp.floor(jnp.log2(scales))
        same = (w.astype(jnp.float32) * powers[:, None]).astype(dtype)
        expected = jax.jit(lambda x, w: cpu_linear(x, w[None], 0, out_dtype=jnp.float32, activation=activation))(
            x, same
        )
        got = multiply_int8(x, w, powers, jnp.float32, activation=activation)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [160, 1600])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_int8_rows_do_not_depend_on_the_others(dtype: Any, k: int) -> None:
    x, (w, scales) = make(100, 21, k, dtype)[0], make_int8(21, k)
    whole = multiply_int8(x, w, scales, dtype)
    for start, count in ((0, 1), (3, 5), (5, 6), (60, 40)):
        got = multiply_int8(x[start : start + count], w, scales, dtype)
        np.testing.assert_array_equal(got, whole[start : start + count])


@pytest.mark.skipif(not processor.host().has_avx512, reason="the processor has no AVX-512")
@pytest.mark.parametrize("k", [576, 4160])
def test_avx512_without_instructions_for_bfloat16(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_bfloat16 = dataclasses.replace(processor.restricted(processor.host(), "avx512"), has_bfloat16_dot=False)
    monkeypatch.setattr(processor, "current", lambda: without_bfloat16)
    name = compiling.register("linear_without", Kernel(Kind(jnp.bfloat16, None, jnp.float32)), None)
    x, w = make(17, 40, k, jnp.bfloat16)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((17, 40), jnp.float32))
    got = jax.jit(call)(x, w[None], jnp.int32(0), jnp.int32(17), jnp.zeros((0, 40)), jnp.zeros(0))
    np.testing.assert_allclose(got, exact(x, w), atol=1e-3)


@pytest.mark.usefixtures("lesser_set")
@pytest.mark.parametrize("t", [1, 7, 97])
def test_int8_with_a_lesser_instruction_set(t: int) -> None:
    x, (w, scales) = make(t, 9, 96, jnp.bfloat16)[0], make_int8(9, 96)
    got = multiply_int8(x, w, scales, jnp.float32)
    np.testing.assert_allclose(got, exact(x, w) * np.asarray(scales), atol=1e-4)


@pytest.mark.parametrize("form", [None, INT8, FORMATS["Q4_K"]], ids=["plain", "int8", "Q4_K"])
def test_amx_is_compiled_anywhere_on_x86(form: WeightFormat | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with_amx = processor.x86(
        "x86_64-unknown-linux-gnu", "sapphirerapids", dict.fromkeys((*AVX2, *AVX512, *AMX, "avx512bf16"), True)
    )
    monkeypatch.setattr(processor, "current", lambda: with_amx)
    kind = Kind(jnp.bfloat16, form, jnp.bfloat16, "silu")
    assembly = compiling.make_machine(with_amx).emit_assembly(llvm.parse_assembly(str(Kernel(kind).build("some"))))
    assert assembly.count("tdpbf16ps") >= 6
    assert "ldtilecfg" in assembly
    assert "tilerelease" in assembly


@pytest.mark.parametrize(("t", "n", "k"), [(1, 300, 4160), (17, 70, 4160), (33, 9, 2080), (97, 530, 2112)])
@pytest.mark.parametrize("is_gated", [True, False])
def test_long_rows_and_many_columns(t: int, n: int, k: int, is_gated: bool) -> None:
    """Sizes beyond a piece, a matrix and a unit of every way to multiply, with all addends."""
    rng = np.random.default_rng(3)
    n = 2 * n if is_gated else n
    x, w = make(t, n, k, jnp.bfloat16)
    w = w * k**-0.5
    options: dict[str, Any] = {"activation": "silu"} if is_gated else {}
    expected, bound = exact(x, w), 1e-3
    if is_gated:
        gate, gated = np.split(expected, 2, axis=1)
        expected = gate / (1 + np.exp(-gate)) * gated
    else:
        plus, bias = (jnp.asarray(rng.standard_normal(size), jnp.float32) for size in ((t, n), n))
        options |= {"plus_to": plus, "bias_o": bias}
        expected = expected + np.asarray(plus, np.float64) + np.asarray(bias, np.float64)
    program = jax.jit(lambda x, w: cpu_linear(x, w[None], 0, out_dtype=jnp.float32, **options))
    np.testing.assert_allclose(np.asarray(program(x, w), np.float64), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    ("t", "num_rows"), [(4, 2), (8, 3), (8, 5), (64, 33), (100, 1), (200, 101), (200, 200), (7, 0)]
)
def test_rows_of_padding_cost_nothing_and_hold_numbers(t: int, num_rows: int, activation: str | None) -> None:
    x, w = make(t, 96, 64, jnp.bfloat16)
    program = jax.jit(
        lambda x, w, num_rows: cpu_linear(
            x, w[None], 0, out_dtype=jnp.float32, num_rows=num_rows, activation=activation
        )
    )
    expected = program(x, w, t)
    got = np.asarray(program(x.at[num_rows + 6 :].set(jnp.nan), w, num_rows))
    np.testing.assert_array_equal(got[:num_rows], expected[:num_rows])
    assert not got[num_rows + 6 :].any()
    assert np.isfinite(got).all()


@pytest.mark.parametrize("layer", [0, 2])
def test_takes_one_layer(layer: int) -> None:
    x, w = make(5, 24, 64, jnp.bfloat16)
    stack = jnp.full((4, *w.shape), jnp.nan, w.dtype).at[layer].set(w)
    got = jax.jit(lambda layer: cpu_linear(x, stack, layer, out_dtype=jnp.float32))(jnp.int32(layer))
    np.testing.assert_array_equal(got, multiply(x, w, jnp.float32))


def test_other_rows_may_be_anything() -> None:
    x, w = make(8, 64, 64, jnp.bfloat16)
    expected = multiply(x, w, jnp.float32)
    got = multiply(x.at[5].set(jnp.nan).at[6].set(jnp.inf), w, jnp.float32)
    np.testing.assert_array_equal(got[:5], expected[:5])
    assert np.isnan(got[5]).all()


def test_many_at_once() -> None:
    """Calls share XLA's threads, and none waits for another's."""
    x, w = make(16, 960, 576, jnp.bfloat16)
    program = jax.jit(lambda x, w: cpu_linear(x, w[None], 0, out_dtype=jnp.float32)).lower(x, w).compile()
    expected = np.asarray(program(x, w))

    def repeat(_: int) -> bool:
        return all(np.array_equal(program(x, w), expected) for _ in range(200))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(repeat, range(8)))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8, 16), jnp.bfloat16), ((8, 40), jnp.float32), ((3, 64), jnp.float32), ((8, 64), jnp.float16)],
)
def test_says_what_it_cannot_multiply(shape: tuple[int, int], dtype: Any) -> None:
    assert not can_multiply(shape, dtype)
    assert can_multiply((8, 64), jnp.float32)


@pytest.mark.parametrize(
    ("shape", "activation"), [((14, 64), "silu"), ((17, 64), "silu"), ((16, 64), "relu"), ((16, 16), "silu")]
)
def test_says_what_it_cannot_gate(shape: tuple[int, int], activation: str) -> None:
    assert not can_multiply(shape, jnp.bfloat16, activation)
    assert can_multiply((16, 64), jnp.bfloat16, "silu")


def test_code_comes_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name))

    def register(name: str) -> None:
        compiling._Registry().register(name, Kernel(FLOAT32), tmp_path)

    register("linear_kept")
    monkeypatch.setattr(compiling, "compile_for", lambda *_: pytest.fail("compiled again"))
    register("linear_kept")
    assert registered == ["linear_kept", "linear_kept"]
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        register("linear_other")


def test_threads_that_register_first_at_once_share_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Slow(compiling._Registry):
        def __init__(self) -> None:
            time.sleep(0.1)
            made.append("registry")
            super().__init__()

        def register(self, name: str, kernel: Any, folder: Path | None) -> None:
            pass

    monkeypatch.setattr(compiling, "_registry", functools.cache(Slow))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: compiling.register(name, Kernel(FLOAT32), None), "abcd"))
    assert made == ["registry"]


@pytest.mark.parametrize("content", [b"", b"abc", b"0000rest"])
def test_a_broken_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "code"
    objects.save(path, b"machine code")
    assert objects.load(path) == b"machine code"
    path.write_bytes(content)
    assert objects.load(path) is None
    assert objects.load(tmp_path / "none") is None

    objects.save(tmp_path / "code" / "below a file", b"code")


def test_a_file_of_another_user_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.save(tmp_path / "code", b"machine code")
    give_away(monkeypatch, tmp_path / "code")
    assert objects.load(tmp_path / "code") is None


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
@pytest.mark.parametrize(("activation", "is_gated"), [(None, True), ("silu", True), ("gelu", False)])
def test_the_op_is_the_reference(implementation: str, activation: str | None, is_gated: bool) -> None:
    x, w = make(5, 24, 64, jnp.float32)
    options: dict[str, Any] = {"activation": activation, "is_gated": is_gated}
    if not (activation and is_gated):
        rng = np.random.default_rng(1)
        options |= {"plus_to": rng.standard_normal((5, 24), np.float32), "bias_o": rng.standard_normal(24, np.float32)}
    got = jax.jit(lambda x, w: Linear(implementation)(x, w[None], 0, **options))(x, w)
    np.testing.assert_allclose(got, reference_linear(np.asarray(x), np.asarray(w), **options), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["cpu", "xla", "gpu", "tpu"])
def test_float32_weights_of_bfloat16_rows_are_not_rounded(implementation: str) -> None:
    x, w = make(37, 1, 200, jnp.bfloat16)[0], make(1, 24, 200, jnp.float32)[1]
    got = jax.jit(lambda x, w: Linear(implementation)(x, w[None], 0, out_dtype=jnp.float32))(x, w)
    assert (abs(np.asarray(got, np.float64) - exact(x, w)) <= 200 * 2.0**-24 * exact(abs(x), abs(w))).all()
