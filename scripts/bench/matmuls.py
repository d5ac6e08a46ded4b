"""Measure and check matmuls by quantized weights and by experts' weights on this machine's GPU or TPU.

Each row also has the time of its bytes at the bandwidth of a plain copy, and plain XLA's time and result for the same
matmul. Codes and rows are random. Times are the device's own, by the profiler, of matmuls by the layers in turn, which
together are larger than a cache. --dry-run IMPLEMENTATION runs toy sizes on a CPU in the kernels' interpreters; its
figures mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from lib.device_time import measure_peaks, time_calls
from lib.evidence import Evidence, make_parser
from lib.machine import describe_device, jax_platform

from jaxllm.resolve.resolve_ops import device_facts
from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.linear import Linear, LinearShape, pick
from pallas_kernels.linear.cases import FORMATS, RARE
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

NUM_LAYERS = 4
OUTPUTS, INPUTS = 14_336, 4096
"""One half of Llama-3-8B's gate and up."""
ROWS = (1, 16, 64, 256, 2048)
TOKENS = (16, 64, 2048)
EXPERTS = {"qwen3-30b-a3b": (None, "awq"), "gpt-oss-20b": (None, "mxfp4"), "mixtral-8x7b": (None,)}
"""Models' experts, and their format besides bfloat16."""
ALLOWED = 2**-7
"""The error of a row, as a part of its root mean square: a few roundings to bfloat16 of 2**-9 each."""
type Row = dict[str, Any]
type Weights = Array | Quantized


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=("linear", "grouped"), default=("linear", "grouped"))
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS, *RARE], default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=list(EXPERTS), metavar="MODEL")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="N")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    evidence = Evidence(args.json, describe_device())
    peaks = measure_peaks(is_dry=bool(args.dry_run))
    evidence.note(peaks=peaks)
    bench = Bench(args.dry_run, 1 if args.dry_run else args.repeats, peaks["copy_gb_per_s"] * 1e9)
    if "linear" in args.only:
        for name in args.formats[: 1 if args.dry_run else None]:
            for row in bench.linear((FORMATS | RARE)[name], [3] if args.dry_run else args.rows):
                evidence.add({"kind": "linear", "format": name} | row)
    if "grouped" in args.only:
        for name in ["small"] if args.dry_run else args.experts:
            for row in bench.grouped(name):
                evidence.add({"kind": "grouped", "model": name} | row)
    return evidence.finish()


class Bench:
    """Times and checks matmuls on this device."""

    def __init__(self, dry_run: str | None, repeats: int, bytes_per_second: float) -> None:
        self._dry_run = dry_run
        self._repeats = repeats
        self._bytes_per_second = bytes_per_second
        self._place: dict[str, Any] = {"platform": jax_platform()} | device_facts(jax.devices())

    def linear(self, form: WeightFormat, sizes: list[int]) -> Iterator[Row]:
        """Yield a result for each number of rows multiplied by weights of one format."""
        o, i = (192, 512) if self._dry_run else (OUTPUTS, INPUTS)
        op = Linear(self._dry_run, interpret=True) if self._dry_run else pick(**self._place)[0]
        shape = LinearShape(o, i, jnp.bfloat16, jnp.bfloat16, form)
        if reason := op.refusal(shape):
            yield {"implementation": "xla", "refusal": reason, "missed": []}
            return
        weight = random_weights(form, (NUM_LAYERS, o, i))
        for num_rows in sizes:
            x = jax.random.normal(jax.random.key(num_rows), (num_rows, i), jnp.bfloat16)
            calls = [lambda x, w, layer, op=each: op(x, w, layer) for each in (op, Linear())]
            yield {"rows": num_rows} | self._compare(calls, x, weight, np.arange(num_rows), num_bytes(weight))

    def grouped(self, name: str) -> Iterator[Row]:
        """Yield rows for the matmuls of a model's experts, without their activation."""
        case = CASES[name]
        for held in (None,) if self._dry_run else EXPERTS[name]:
            form = None if held is None else FORMATS[held]
            for shape in case.shapes(form=form):
                op, reason = grouped_matmul.pick([shape], name=self._dry_run, **self._place)
                if reason is not None:
                    yield {"weights": held or "bfloat16", "implementation": "xla", "refusal": reason, "missed": []}
                    continue
                weight = random_weights(form, (2, shape.num_experts, shape.num_outputs, shape.num_inputs))
                for num_tokens in (5,) if self._dry_run else TOKENS:
                    row = {"weights": held or "bfloat16", "outputs": shape.num_outputs, "tokens": num_tokens}
                    yield row | self._by_experts(op, weight, num_tokens, case.num_choices)

    def _by_experts(self, op: Any, weight: Weights, num_tokens: int, num_choices: int) -> Row:
        _, num_experts, _, num_inputs = weight.shape
        rng = np.random.default_rng(num_tokens)
        experts_tj = np.stack([rng.permutation(num_experts)[:num_choices] for _ in range(num_tokens)])
        grouping = grouped_matmul.group_rows(jnp.asarray(experts_tj), num_experts, op.row_alignment, num_tokens)
        rows = np.unique(np.asarray(grouping.rows_tj))
        x = jax.random.normal(jax.random.key(num_tokens), (len(grouping.tokens_r), num_inputs), jnp.bfloat16)
        plain = grouped_matmul.GroupedMatmul()
        calls = [lambda x, w, layer, op=each: op(x, w, layer, grouping.groups) for each in (op, plain)]
        chosen = len(np.unique(experts_tj)) / num_experts
        return self._compare(calls, x, weight, rows, num_bytes(weight) * chosen)

    def _compare(
        self, calls: list[Callable[..., Array]], x: Array, weight: Weights, rows: np.ndarray, weight_bytes: float
    ) -> Row:
        """Time the op and plain XLA, and compare their results in the last layer. `weight_bytes`: of all layers."""
        last = weight.shape[0] - 1
        results = [jax.jit(call)(x, weight, last)[rows].astype(jnp.float32) for call in calls]
        size = lambda y: jnp.sqrt(jnp.mean(y * y, axis=-1))  # noqa: E731
        error = float(jnp.max(size(results[0] - results[1]) / size(results[1])))
        timings = []
        for call in calls:
            run = jax.jit(partial(through_layers, call, weight.shape[0]))
            timings.append(time_calls(lambda run=run: run(x, weight), calls=weight.shape[0], repeats=self._repeats))
        kernel, plain = timings
        moved = weight_bytes / weight.shape[0] + 2 * len(rows) * sum(weight.shape[-2:])
        return {
            "us": round(kernel.seconds * 1e6, 1),
            "of_copy": round(moved / self._bytes_per_second / kernel.seconds, 3),
            "tflop_per_s": round(2 * len(rows) * weight.shape[-1] * weight.shape[-2] / kernel.seconds / 1e12, 1),
            "xla_us": round(plain.seconds * 1e6, 1),
            "clock": kernel.clock,
            "operations": kernel.operations,
            "error": round(error, 5),
            "missed": [] if error <= ALLOWED else [f"error {error:.1e}, allowed {ALLOWED:.1e}"],
        }


def through_layers(call: Callable[..., Array], num_layers: int, x: Array, weight: Weights) -> Array:
    """Multiply by each layer; each waits for the one before."""
    y = call(x, weight, 0)
    for layer in range(1, num_layers):
        y = call(x + 0 * y[:1, :1], weight, layer)
    return y


def random_weights(form: WeightFormat | None, shape: tuple[int, ...]) -> Weights:
    """Return weights made on the device, layer by layer."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    if form is None:
        layers = [jax.random.normal(key, shape[1:], jnp.bfloat16) for key in jax.random.split(next(keys), shape[0])]
        return jnp.stack(layers) / shape[-1] ** 0.5
    parts = {}
    for name in form.parts:
        dtype, part_shape = form.device_dtype(name, packed=False), (*shape[:-1], form.width(name, shape[-1]))
        if name == "codes" or jnp.issubdtype(dtype, jnp.integer):
            most = 2**form.bits if name == "codes" and jnp.issubdtype(dtype, jnp.unsignedinteger) else 16
            low = -most if jnp.issubdtype(dtype, jnp.signedinteger) else 0
            part = jax.random.randint(next(keys), part_shape, low, most, jnp.int8)
        else:
            part = jax.random.uniform(next(keys), part_shape, jnp.float32, 0.5, 2) / 16
        parts[name] = part.astype(dtype)
    return Quantized(parts, form)


def num_bytes(weight: Weights) -> float:
    """Return the bytes of weights; codes of 4 bits take half a byte each."""
    arrays = [weight] if isinstance(weight, Array) else list(weight.parts.values())
    return sum(x.size * (0.5 if x.dtype in (jnp.uint4, jnp.int4) else x.dtype.itemsize) for x in arrays)


if __name__ == "__main__":
    sys.exit(main())
