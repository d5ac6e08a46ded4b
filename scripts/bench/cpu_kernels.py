"""Compare a CPU's own kernels with plain XLA, in turns: one layer's attention, the matmuls of all layers, and so on.

    scripts/bench.py cpu_kernels [--case smollm2-135m] [--part grouped] [--hf-python PATH] [--quick] [--json OUT]

Figures are medians of the rounds, in milliseconds. Attention gets a pool that does not fit the caches; matmuls get
each layer's weights, as a step does. Grouped matmuls are compared with the matmuls of the active experts, each
over its own rows, by the CPU's own kernel and by plain XLA. Matmuls by packed weights are compared with the CPU's own
by the same weights in bfloat16 or float32; at one row memory is the bound of both, and the rows show GB/s read.
Ops of recurrent state are compared with plain XLA; their GB/s count states read and written. With --hf-python the
delta rule, attention over latents and attention within segments are compared with HF's in torch as well. Segments are
those of vision towers; their GFLOP/s stand beside those of the CPU's own matmul of 1,024 rows by 4096 x 1024 weights,
which ran in the same turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lib.machine import describe_machine
from lib.results import make_parser, save
from lib.sheet import print_sheet
from peers.torch_layers import torch_layers

from jaxllm.execution.options import compiler_options
from jaxllm.loading.gguf.parts import FORMATS
from pallas_kernels.grouped_matmul import GroupedMatmul, Groups, MatmulShape, capacity
from pallas_kernels.grouped_matmul.cases import CASES as CASES_OF_EXPERTS
from pallas_kernels.latent_attention import LatentAttention
from pallas_kernels.latent_attention.cases import CASES as CASES_OF_LATENTS
from pallas_kernels.linear import Linear
from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, PagedAttention
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.recurrent_state import StateBatch
from pallas_kernels.recurrent_state.batches import Chunk, state_batch
from pallas_kernels.recurrent_state.causal_conv import CausalConv, ConvShape
from pallas_kernels.recurrent_state.causal_conv.cases import CASES as CASES_OF_CONV
from pallas_kernels.recurrent_state.gated_delta import GatedDelta, GatedDeltaShape
from pallas_kernels.recurrent_state.gated_delta.cases import CASES as CASES_OF_DELTA
from pallas_kernels.recurrent_state.state_space import StateSpace
from pallas_kernels.recurrent_state.state_space.cases import CASES as CASES_OF_SCAN
from pallas_kernels.segment_attention import SegmentAttention
from pallas_kernels.weights import INT8, WeightFormat
from pallas_kernels.weights.held import Quantized

Matrix = tuple[jax.Array, jax.Array | None]
"""Weights, and scales if they are int8."""
ROUNDS, QUICK_ROUNDS = 15, 3
LAYERS = 4
"""The number of layers of the pool that attention goes through."""
BLOCK_SIZE = 128
STEPS = {
    "64 decodes at 30 to 300": [(30 + 270 * i // 63, 1) for i in range(64)],
    "64 decodes at 256": [(256, 1)] * 64,
    "1 decode at 256": [(256, 1)],
    "1 decode at 8,000": [(8000, 1)],
    "prefill of 512": [(512, 512)],
    "prefill of 512 at 8,000": [(8000, 512)],
}
LATENT_CASE = "deepseek-v2-lite"
"""The model whose attention over latents is measured."""
HF_DIMS = (192, 128)
"""The dimensions of its keys and values, which HF caches for each head."""
LATENT_STEPS = {
    **{f"{count} decodes at {length:,}": [(length, 1)] * count for length in (256, 2000) for count in (1, 16, 64)},
    "prefill of 512": [(512, 512)],
    "prefill of 512 at 2,000": [(2000, 512)],
}
MATRICES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""The matrices of each of SmolLM2-135M's layers."""
NUM_LAYERS = 30
ROWS = (4, 64, 512)
GROUPED_CASE = "qwen3-30b-a3b"
"""The model whose experts' MLPs are measured: 64 of its experts, 8 of them with rows."""
NUM_EXPERTS, NUM_ACTIVE = 64, 8
GROUPED_ROWS = (1, 8, 64, 512)
QUANTIZED = {
    **{name: FORMATS[name] for name in ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q2_K", "Q3_K", "MXFP4")},
    "AWQ": WeightFormat(4, 128, zero_dtype="uint8"),
    "int8": INT8,
    "bfloat16": WeightFormat(16, values="bfloat16"),
}
QUANTIZED_MATRIX, QUANTIZED_BYTES = (8192, 2048), 128 << 20
"""The size of packed matrices, and their bytes in all, more than any cache holds."""
QUANTIZED_ROWS = (1, 4, 16, 512)
WAYS = ("xla", "cpu")
"""The implementations of attention that are compared."""
STATE_STEPS = {**{f"{count} decodes": [1] * count for count in (1, 16, 64)}, "prefill of 512": [512]}
"""The numbers of tokens of the sequences in a step over recurrent states."""
MOST_STATE_LAYERS, MOST_STATE_BYTES = 36, 512 << 20
"""The most layers and bytes of the pool of states: as many layers as a model, if memory and time allow."""
STATE_OPS: Mapping[str, Any] = {
    "delta rule of Qwen3-Next": GatedDelta(CASES_OF_DELTA["qwen3-next-80b-a3b"].shape()),
    "convolution of Qwen3-Next": CausalConv(CASES_OF_CONV["qwen3-next-80b-a3b"].shape()),
    "scan of Nemotron-H 8B": StateSpace(CASES_OF_SCAN["nemotron-h-8b"].shape()),
}
SEGMENT_CASES = {
    "Qwen3-VL 2B, 1,024 patches": (16, 64, 1, 1024),
    "Qwen3-VL 2B, 4,096 patches": (16, 64, 1, 4096),
    "Qwen3-VL 8B, 1,024 patches": (16, 72, 1, 1024),
    "SmolVLM-256M, 3 tiles": (12, 64, 3, 1024),
    "Qwen2.5-VL, 64 windows": (16, 80, 64, 64),
}
"""Heads and their size, and the segments of a picture and their length, in the layers of towers."""
TOWER_MATRIX = (4096, 1024)
PARTS = ("attention", "latents", "segments", "matmuls", "grouped", "quantized", "states")


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--case", choices=CASES, default="smollm2-135m", help="whose attention (default: %(default)s)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part, may be given several times")
    parser.add_argument("--hf-python", metavar="PATH", help="Python of scripts/peers.sh DIR hf")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, no figures to keep")
    args = parser.parse_args()
    parts, rounds = args.part or PARTS, QUICK_ROUNDS if args.quick else ROUNDS
    rows = []
    if "attention" in parts:
        rows += [attention_row(args.case, name, chunks, rounds) for name, chunks in STEPS.items()]
    for dtype in (jnp.bfloat16, jnp.float32) if "latents" in parts else ():
        rows += [latents_row(name, chunks, dtype, rounds, args.hf_python) for name, chunks in LATENT_STEPS.items()]
    for dtype in (jnp.bfloat16, jnp.float32) if "segments" in parts else ():
        rows += [segments_row(name, dtype, rounds, args.hf_python) for name in SEGMENT_CASES]
    for dtype in (jnp.bfloat16, jnp.float32):
        rows += [matmul_row(count, dtype, rounds) for count in ROWS if "matmuls" in parts]
    for dtype in (jnp.bfloat16, jnp.float32, jnp.int8) if "grouped" in parts else ():
        rows += grouped_rows(dtype, rounds)
    for dtype in (jnp.bfloat16, jnp.float32) if "quantized" in parts else ():
        taken = [name for name, form in QUANTIZED.items() if dtype == jnp.float32 or not form.is_half]
        rows += [quantized_row(name, count, dtype, rounds) for name in taken for count in QUANTIZED_ROWS]
    for name in STATE_OPS if "states" in parts else ():
        rows += [states_row(name, step, rounds, args.hf_python) for step in STATE_STEPS]
    print_sheet(rows)
    report = {"machine": describe_machine(), "date": date.today().isoformat(), "jax": jax.__version__}
    save(args.json, report | {"case": args.case, "rows": rows})
    return 0


def attention_row(case: str, name: str, chunks: list[tuple[int, int]], rounds: int) -> dict[str, Any]:
    """Return the milliseconds of one layer, in bfloat16."""
    shape = CASES[case].shape(block_size=BLOCK_SIZE)
    heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    ops = [PagedAttention(shape, implementation) for implementation in WAYS]
    times = attention_times(
        ops, [(each, shape.head_dim) for each in heads], chunks, rounds, window=NO_WINDOW, scale=0.125
    )
    return {"what": f"attention, {name}", **times}


def latents_row(
    name: str, chunks: list[tuple[int, int]], dtype: Any, rounds: int, hf_python: str | None
) -> dict[str, Any]:
    """Return the milliseconds of one layer, the GB/s of latents read once per row, and the GFLOP/s."""
    shape = CASES_OF_LATENTS[LATENT_CASE].shape(block_size=BLOCK_SIZE, dtype=dtype)
    ops = [LatentAttention(shape, implementation) for implementation in WAYS]
    sizes = [(shape.num_heads, shape.key_dim), (shape.key_dim,)]
    (length, tokens), *_ = chunks
    of_hf = {"sequences": len(chunks), "tokens": tokens, "length": length, "heads": shape.num_heads, "dims": HF_DIMS}
    with hf_layers(hf_python if dtype == jnp.bfloat16 else None, "latents", layers=LAYERS, **of_hf) as others:
        times = attention_times(ops, sizes, chunks, rounds, others, scale=0.125)
    seen = sum(chunk * length - chunk * (chunk - 1) // 2 for length, chunk in chunks)
    flops = 2 * shape.num_heads * (shape.key_dim + shape.latent_dim) * seen
    read = sum(length for length, _ in chunks) * shape.key_dim * shape.dtype.itemsize
    speeds = {"GB/s": read / times["cpu ms"] / 1e6, "GFLOP/s": flops / times["cpu ms"] / 1e6}
    speeds = {each: float(f"{speed:.3g}") for each, speed in speeds.items()}
    return {"what": f"attention over latents, {name}, {shape.dtype.name}", **times, **speeds}


def segments_row(name: str, dtype: Any, rounds: int, hf_python: str | None) -> dict[str, Any]:
    """Return the milliseconds of one layer's attention within segments, and the GFLOP/s beside those of a matmul."""
    (n, h, count, length), rng, kind = SEGMENT_CASES[name], np.random.default_rng(0), jnp.dtype(dtype)
    starts = np.arange(count * length, dtype=np.int32) // length * length
    bounds = jnp.asarray(starts), jnp.asarray(starts + length)
    q, k, v = (jnp.asarray(rng.standard_normal((count * length, n, h)), dtype) for _ in range(3))
    options = compiler_options("cpu", dtype, True)
    programs: dict[str, Callable[[], Any]] = {}
    for implementation in WAYS:
        attend = jax.jit(partial(SegmentAttention(implementation), scale=h**-0.5), compiler_options=options)
        programs[implementation] = partial(attend, q, k, v, *bounds)
    weight = jnp.asarray(rng.standard_normal(TOWER_MATRIX), dtype)
    x = jnp.asarray(rng.standard_normal((1024, TOWER_MATRIX[1])), dtype)
    programs["matmul"] = partial(jax.jit(lambda x, w: Linear("cpu")(x, w[None], 0)), x, weight)
    of_hf = {"layers": 1, "segments": count, "tokens": length, "heads": n, "dims": h, "dtype": kind.name}
    with hf_layers(hf_python, "segments", **of_hf) as others:

        def run(which: str) -> None:
            if which in others:
                others[which]()
            else:
                jax.block_until_ready(programs[which]())

        times = in_turns(run, (*programs, *others), rounds)
    flops = {"cpu": 4 * count * length**2 * n * h, "matmul": 2 * len(x) * weight.size}
    speeds = {f"{each} GFLOP/s": round(work / times[f"{each} ms"] / 1e6) for each, work in flops.items()}
    return {"what": f"segments, {name}, {kind.name}", **times, **speeds}


def attention_times(
    ops: Sequence[Any],
    sizes: Sequence[tuple[int, ...]],
    chunks: list[tuple[int, int]],
    rounds: int,
    others: Mapping[str, Callable[[], None]] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return the milliseconds of a layer by each op, which takes arrays of these sizes for each token.

    `others` run as many layers of something else, by name.
    """
    rng = np.random.default_rng(0)
    counts = [-(-length // BLOCK_SIZE) for length, _ in chunks]
    ids = iter(rng.permutation(np.arange(1, sum(counts) + 1)).tolist())
    blocks = [[next(ids) for _ in range(count)] for count in counts]
    programs, states = {}, {}
    for op in ops:
        made = ragged_batch(chunks, blocks, block_size=BLOCK_SIZE, query_tile=op.tiles.query, row_alignment=1)
        batch = jax.tree.map(jnp.asarray, made)
        dtype = op.shape.dtype
        arrays = [jnp.asarray(rng.standard_normal((len(batch.slots_t), *size)), dtype) for size in sizes]
        spec = op.pool_spec(LAYERS, sum(counts) + 1)
        states[op.implementation] = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), spec)
        run = jax.jit(
            partial(attend_layers, op, settings),
            donate_argnums=1,
            compiler_options=compiler_options("cpu", dtype, True),
        )
        programs[op.implementation] = partial(run, arrays, batch=batch)

    def step(implementation: str) -> None:
        if others and implementation in others:
            others[implementation]()
        else:
            out, states[implementation] = programs[implementation](states[implementation])
            out.block_until_ready()

    return in_turns(step, (*programs, *(others or ())), rounds, 1 / LAYERS)


@contextmanager
def hf_layers(python: str | None, op: str, **sizes: Any) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield a function that runs HF's layers, if there is a Python with torch."""
    if python is None:
        yield {}
        return
    with torch_layers(python, op, **sizes) as layers:
        yield {"torch": layers.run}


def attend_layers(
    op: Any, settings: Mapping[str, Any], arrays: Sequence[jax.Array], pool: Any, batch: AttentionBatch
) -> tuple[jax.Array, Any]:
    """Attend in one layer after the other; the output of a layer is the query of the next."""
    q, *others = arrays
    for layer in range(LAYERS):
        out, pool = op(q, *others, pool, batch, layer=jnp.int32(layer), num_layers=LAYERS, **settings)
        q = out if out.shape == q.shape else jnp.concatenate((out, q[..., out.shape[-1] :]), -1)
    return q, pool


def matmul_row(num_rows: int, dtype: Any, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of all layers' matmuls."""
    rng = np.random.default_rng(0)
    layers = [
        [jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * 0.02, dtype) for shape in MATRICES]
        for _ in range(NUM_LAYERS)
    ]
    x = jnp.asarray(rng.standard_normal((num_rows, MATRICES[0][1])), dtype)
    ways: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
        "xla": partial(jnp.einsum, "tk,nk->tn", precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None),
        "cpu": lambda x, w: Linear("cpu")(x, w[None], 0),
    }
    # XLA at its fastest: this makes float32 depend on the batch.
    options = compiler_options("cpu", dtype, dtype == jnp.bfloat16)
    programs = {name: jax.jit(partial(multiply_layers, way), compiler_options=options) for name, way in ways.items()}
    label = f"matmuls, {num_rows} rows, {jnp.dtype(dtype).name}"
    return {
        "what": label,
        **in_turns(lambda name: programs[name](x, layers).block_until_ready(), ("xla", "cpu"), rounds),
    }


def multiply_layers(multiply: Callable[..., jax.Array], x: jax.Array, layers: Any) -> jax.Array:
    """Do one layer's matmuls after the other's."""
    for qkv, out, gate_up, down in layers:
        x = multiply(multiply(x, qkv)[:, : out.shape[1]], out)
        x = multiply(multiply(x, gate_up)[:, : down.shape[1]], down)
    return x


def grouped_rows(dtype: Any, rounds: int) -> list[dict[str, Any]]:
    """Return the milliseconds of the MLPs of one layer's experts, for each number of rows; int8 is beside bfloat16."""
    x_dtype = jnp.bfloat16 if dtype == jnp.int8 else dtype
    case = CASES_OF_EXPERTS[GROUPED_CASE]._replace(num_experts=NUM_EXPERTS)
    experts = make_experts(case.shapes(x_dtype, INT8 if dtype == jnp.int8 else None))
    op = GroupedMatmul("cpu")
    active = np.linspace(0, NUM_EXPERTS - 1, NUM_ACTIVE).astype(np.int32)
    rng = np.random.default_rng(0)
    rows = []
    for count in GROUPED_ROWS:
        counts_e = np.zeros(NUM_EXPERTS, np.int32)
        np.add.at(counts_e, active[np.arange(count) % NUM_ACTIVE], 1)
        alignment = op.row_alignment
        padded_e = -(-counts_e // alignment) * alignment
        starts_e = (np.cumsum(padded_e) - padded_e).astype(np.int32)
        num_rows = capacity(count, NUM_EXPERTS, alignment)
        x = jnp.asarray(rng.standard_normal((num_rows, case.hidden_size)), x_dtype)
        spans = [(int(e), int(starts_e[e]), int(counts_e[e])) for e in active if counts_e[e]]
        parts = [x[start : start + number] for _, start, number in spans]
        weights = [tuple(None if a is None else a[0, e] for a in matrix) for e, *_ in spans for matrix in experts]
        groups = Groups(jnp.asarray(starts_e), jnp.asarray(counts_e))
        options = compiler_options("cpu", x_dtype, x_dtype == jnp.bfloat16)
        by_linear = jax.jit(partial(multiply_parts, [expert for expert, *_ in spans]))
        programs = {
            "grouped": partial(jax.jit(partial(multiply_groups, op)), x, experts, groups),
            "linear": partial(by_linear, parts, experts),
            "xla": partial(jax.jit(multiply_parts_plainly, compiler_options=options), parts, weights),
        }
        label = f"grouped matmuls, {count} rows, {jnp.dtype(dtype).name}"
        times = in_turns(
            lambda name, programs=programs: jax.block_until_ready(programs[name]()), tuple(programs), rounds
        )
        times.pop("times")
        quickest = min(times["linear ms"], times["xla ms"])
        rows.append({"what": label, **times, "of quickest": round(times["grouped ms"] / quickest, 2)})
    return rows


def make_experts(shapes: Sequence[MatmulShape]) -> list[Matrix]:
    """Return weights [1, e, o, i] and scales for each matmul."""
    rng, experts = np.random.default_rng(0), []
    for shape in shapes:
        size = (1, shape.num_experts, shape.num_outputs, shape.num_inputs)
        if shape.weight_dtype == jnp.int8:
            scales = jnp.full(size[:3], 2.0**-12, jnp.float32)
            experts.append((jnp.asarray(rng.integers(-127, 128, size, np.int8)), scales))
        else:
            experts.append((jnp.asarray(rng.standard_normal(size, np.float32) * 0.02, shape.weight_dtype), None))
    return experts


def multiply_groups(op: GroupedMatmul, x: jax.Array, experts: Sequence[Matrix], groups: Groups) -> jax.Array:
    """Do the MLPs of all groups at once."""
    (gate_up, gate_up_scales), (down, down_scales) = experts
    x = op(x, with_scales(gate_up, gate_up_scales), 0, groups, activation="silu")
    return op(x, with_scales(down, down_scales), 0, groups)


def multiply_parts(active: Sequence[int], parts: Sequence[jax.Array], experts: Sequence[Matrix]) -> list[jax.Array]:
    """Do each expert's MLP by the CPU's own matmul."""
    (gate_up, gate_up_scales), (down, down_scales) = (
        (w[0], None if scales is None else scales[0]) for w, scales in experts
    )
    outs, linear = [], Linear("cpu")
    for expert, x in zip(active, parts, strict=True):
        gated = linear(x, with_scales(gate_up, gate_up_scales), expert, activation="silu")
        outs.append(linear(gated, with_scales(down, down_scales), expert))
    return outs


def with_scales(values: jax.Array, scales: jax.Array | None) -> jax.Array | Quantized:
    """Return weights [e, o, i] as the op takes them."""
    return values if scales is None else Quantized({"codes": values, "scales": scales[..., None]}, INT8)


def multiply_parts_plainly(parts: Sequence[jax.Array], weights: Sequence[Matrix]) -> list[jax.Array]:
    """Do each expert's MLP, whose weights are arrays of their own, in plain XLA."""
    precision = jax.lax.Precision.HIGHEST if parts[0].dtype == jnp.float32 else None

    def multiply(x: jax.Array, w: jax.Array, scales: jax.Array | None) -> jax.Array:
        out = jnp.einsum("ti,oi->to", x, w.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
        return out if scales is None else out * scales

    outs = []
    for x, gate_up, down in zip(parts, weights[::2], weights[1::2], strict=True):
        gate, up = jnp.split(multiply(x, *gate_up), 2, axis=1)
        outs.append(multiply((jax.nn.silu(gate) * up).astype(x.dtype), *down).astype(x.dtype))
    return outs


def quantized_row(name: str, num_rows: int, dtype: Any, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a matmul by packed weights, and by weights of x's dtype."""
    rng, form, (n, k) = np.random.default_rng(0), QUANTIZED[name], QUANTIZED_MATRIX
    sizes = {"plain": n * k * jnp.dtype(dtype).itemsize, "packed": form.num_bytes(n, k)}
    layers = {each: QUANTIZED_BYTES // size for each, size in sizes.items()}
    parts = {}
    for part in form.parts:
        shape, part_dtype = (
            (layers["packed"], n, form.width(part, k, packed=True)),
            form.device_dtype(part, packed=True),
        )
        one = rng.integers(0, 128, shape[1:], np.uint8).view(np.int8) if part == "codes" else np.full(shape[1:], 1 / 64)
        parts[part] = jnp.broadcast_to(jnp.asarray(one.astype(part_dtype)), shape)
    some = jnp.asarray(rng.standard_normal((n, k), np.float32) * 0.02, dtype)
    weights = {
        "plain": jnp.broadcast_to(some, (layers["plain"], n, k)),
        "packed": Quantized(parts, form, is_packed=True),
    }
    x = jnp.asarray(rng.standard_normal((num_rows, k)), dtype)

    def multiply(x: jax.Array, weight: Any) -> list[jax.Array]:
        return [Linear("cpu")(x, weight, layer)[:, 0] for layer in range(weight.shape[0])]

    program = jax.jit(multiply)

    def run(dtype_name: str) -> None:
        jax.block_until_ready(program(x, weights[dtype_name]))

    figures = in_turns(run, tuple(sizes), rounds)
    figures = {f"{each} ms": figures[f"{each} ms"] / layers[each] for each in sizes}
    return {
        "what": f"{name}, {num_rows} rows, {jnp.dtype(dtype).name}",
        **{key: round(ms, 3) for key, ms in figures.items()},
        "times": round(figures["plain ms"] / figures["packed ms"], 2),
        **{f"{each} GB/s": round(size / figures[f"{each} ms"] / 1e6, 1) for each, size in sizes.items()},
    }


def states_row(name: str, step: str, rounds: int, hf_python: str | None) -> dict[str, Any]:
    """Return the milliseconds of one layer, in bfloat16, and how fast its states are read and written."""
    plain, sizes = STATE_OPS[name], STATE_STEPS[step]
    spec = plain.pool_spec(1, 1)
    state_bytes = spec.size * spec.dtype.itemsize
    most = MOST_STATE_LAYERS if max(sizes) == 1 else LAYERS
    num_layers = max(2, min(most, MOST_STATE_BYTES // (len(sizes) * state_bytes)))
    made, num_rows = state_batch([Chunk(size, 9, slot, slot) for slot, size in enumerate(sizes, 1)])
    batch = jax.tree.map(jnp.asarray, made)
    inputs = state_inputs(plain.shape, num_rows)
    programs, pools = {}, {}
    for implementation in ("xla", "cpu"):
        op = replace(plain, implementation=implementation)
        spec = op.pool_spec(num_layers, len(sizes) + 1)
        pools[implementation] = jnp.full(spec.shape, 0.5, spec.dtype)
        run = jax.jit(
            partial(pass_layers, op, num_layers),
            donate_argnums=1,
            compiler_options=compiler_options("cpu", jnp.bfloat16, True),
        )
        programs[implementation] = partial(run, inputs, batch=batch)

    def go(implementation: str) -> None:
        if implementation in others:
            others[implementation]()
        else:
            out, pools[implementation] = programs[implementation](pools[implementation])
            jax.block_until_ready(out)

    of_hf = {"layers": num_layers, "sequences": len(sizes), "tokens": max(sizes)}
    with hf_layers(
        hf_python if isinstance(plain, GatedDelta) else None, "delta", **of_hf, **delta_sizes(plain)
    ) as others:
        figures = in_turns(go, ("xla", "cpu", *others), rounds, 1 / num_layers)
    gigabytes = 2 * len(sizes) * state_bytes / 1e9
    speeds = {f"{each} GB/s": round(gigabytes / figures[f"{each} ms"] * 1e3, 1) for each in programs}
    return {"what": f"{name}, {step}", **{key: round(ms, 3) for key, ms in figures.items()}, **speeds}


def delta_sizes(op: Any) -> dict[str, Any]:
    """Return the sizes of a delta rule as the worker with HF's takes them."""
    if not isinstance(op, GatedDelta):
        return {}
    shape = op.shape
    return {"heads": (shape.num_key_heads, shape.num_value_heads), "dims": (shape.key_dim, shape.value_dim)}


def state_inputs(shape: Any, num_rows: int) -> list[jax.Array]:
    """Return the arguments of an op of recurrent state that come before its pool."""
    rng = np.random.default_rng(0)

    def some(*size: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.uniform(0.1, 0.5, size), dtype)

    t, single = num_rows, jnp.float32
    if isinstance(shape, GatedDeltaShape):
        keys, values = (t, shape.num_key_heads, shape.key_dim), (t, shape.num_value_heads, shape.value_dim)
        log_decay = -some(t, shape.num_value_heads, shape.decay_dim, dtype=single)
        return [some(*keys), some(*keys), some(*values), log_decay, some(t, shape.num_value_heads, dtype=single)]
    if isinstance(shape, ConvShape):
        return [some(t, shape.num_channels), some(shape.kernel_size, shape.num_channels)]
    heads, group = shape.num_heads, (t, shape.num_groups, shape.state_dim)
    x, dt, a = some(t, heads, shape.head_dim), some(t, heads, dtype=single), -some(heads, dtype=single)
    return [x, dt, a, some(*group), some(*group), some(heads, dtype=single)]


def pass_layers(
    op: Any, num_layers: int, inputs: Sequence[jax.Array], pool: jax.Array, batch: StateBatch
) -> tuple[list[jax.Array], jax.Array]:
    """Take the states of one layer after the other past a step's tokens."""
    settings = {"activation": "silu"} if isinstance(op.shape, ConvShape) else {}
    outs = []
    for layer in range(num_layers):
        out, pool = op(*inputs, pool, batch, layer=jnp.int32(layer), num_layers=num_layers, **settings)
        outs.append(out[:1])  # the memory of all of them would be new each time
    return outs, pool


def in_turns(run: Callable[[str], Any], names: Sequence[str], rounds: int, factor: float = 1) -> dict[str, float]:
    """Return the median milliseconds of each, times a factor, and the ratio of the first two."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name in names:
            start = time.perf_counter()
            run(name)
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[name][1:]) * 1e3 * factor for name in names}
    first, second, *_ = medians.values()
    return {f"{name} ms": round(median, 2) for name, median in medians.items()} | {"times": round(first / second, 1)}


if __name__ == "__main__":
    sys.exit(main())
