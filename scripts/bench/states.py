"""Check and measure the ops of recurrent state on this machine's GPU or TPU, at the shapes of real models' layers.

`check` compares ragged steps of decodes and chunks, and steps of decodes alone, over pools whose unused slots are NaN,
with the float32 reference. `decode` measures the bandwidth at which states are read and written, beside that of a plain
copy. `prefill` measures how many tokens go through a layer in a second. Data are random; times are the device's own, by
the profiler, with plain XLA's beside them. --dry-run IMPLEMENTATION runs toy sizes on a CPU in the kernels'
interpreter; its figures mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from lib.device_time import Timing, measure_peaks, time_calls
from lib.evidence import Evidence, make_parser
from lib.machine import describe_device, jax_platform
from lib.workloads import ALLOWED, LAYER, NUM_LAYERS

from bench.kernels import figures
from jaxllm.execution.options import compiler_options
from jaxllm.resolve.resolve_ops import detect_architecture
from pallas_kernels.recurrent_state import causal_conv, gated_delta, state_space
from pallas_kernels.recurrent_state.batches import Chunk, state_batch
from pallas_kernels.recurrent_state.causal_conv.cases import CASES as CONV_CASES
from pallas_kernels.recurrent_state.causal_conv.cases import Case as ConvCase
from pallas_kernels.recurrent_state.causal_conv.reference import reference_causal_conv
from pallas_kernels.recurrent_state.gated_delta.cases import CASES as DELTA_CASES
from pallas_kernels.recurrent_state.gated_delta.cases import Case as DeltaCase
from pallas_kernels.recurrent_state.gated_delta.reference import reference_gated_delta
from pallas_kernels.recurrent_state.state_space.cases import CASES as SPACE_CASES
from pallas_kernels.recurrent_state.state_space.cases import Case as SpaceCase
from pallas_kernels.recurrent_state.state_space.reference import reference_state_space
from tests.pallas_kernels import states, test_causal_conv, test_gated_delta, test_state_space

KINDS = ("check", "decode", "prefill")
DECODES, PREFILLS = (64, 256, 1), ((4096,), (512,) * 8)
"""The numbers of sequences in a step of decodes, and the lengths of the prompts in a step."""
STATE_ERROR = 5e-5
"""The largest `relative_error` of states: tiles multiply float32 numbers in two halves."""
type Row = dict[str, Any]


class Kind(NamedTuple):
    """One of the ops."""

    pick: Callable[..., tuple[Any, str | None]]
    cases: dict[str, Any]
    """Shapes of real models' layers by the models' names."""
    dry: Any
    """A shape that the interpreters run quickly."""
    reference: Callable[..., tuple[np.ndarray, np.ndarray]]
    tests: Any
    """The module of the op's tests, which makes and runs steps."""


OPS = {
    "gated_delta": Kind(
        gated_delta.pick,
        {name: DELTA_CASES[name] for name in ("qwen3.5-27b", "qwen3.5-0.8b", "kimi-linear-48b-a3b")},
        DeltaCase(1, 2, 128, 128),
        reference_gated_delta,
        test_gated_delta,
    ),
    "state_space": Kind(
        state_space.pick,
        {name: SPACE_CASES[name] for name in ("nemotron-h-8b", "granite-4-h-tiny", "falcon-h1-7b")},
        SpaceCase(2, 64, 1, 128),
        reference_state_space,
        test_state_space,
    ),
    "causal_conv": Kind(
        causal_conv.pick,
        {name: CONV_CASES[name] for name in ("qwen3.5-27b", "nemotron-h-8b", "lfm2-1.2b")},
        ConvCase(256),
        reference_causal_conv,
        test_causal_conv,
    ),
}


def main() -> int:
    """Check and measure the ops, print and write the rows, and return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="only layers of these")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    evidence = Evidence(args.json, describe_device())
    peaks = measure_peaks(is_dry=bool(args.dry_run))
    evidence.note(peaks=peaks)
    architecture = detect_architecture(jax.devices())
    for name in args.ops:
        kind = OPS[name]
        cases = {model: case for model, case in kind.cases.items() if model in (args.models or kind.cases)}
        for model, case in ({"dry": kind.dry} if args.dry_run else cases).items():
            op, reason = kind.pick(case.shape(), jax_platform(), args.dry_run, architecture=architecture)
            if op.implementation == "xla":
                evidence.add({"op": name, "model": model, "missed": [f"plain XLA: {reason}"]})
                continue
            settings = kind.tests.settings_of(case, op.shape.dtype) if name == "causal_conv" else {}
            bench = Bench(kind, op, settings, args.repeats, peaks, is_dry=bool(args.dry_run))
            for what in args.only:
                for row in getattr(bench, what)():
                    evidence.add({"op": name, "model": model, "kind": what} | row)
    return evidence.finish()


class Bench:
    """Checks and times one model's layer."""

    def __init__(self, kind: Kind, op: Any, settings: Row, repeats: int, peaks: Row, *, is_dry: bool) -> None:
        self._kind = kind
        self._op = op
        self._settings = settings
        self._repeats = 1 if is_dry else repeats
        self._peaks = peaks
        self._is_dry = is_dry

    def check(self) -> Iterator[Row]:
        """Yield the relative errors of outputs and of states for several steps; see `compare`."""
        decodes, tests = states.MIXED[:5], self._kind.tests
        steps = {"mixed": states.MIXED, "decodes": decodes}
        if not self._is_dry:
            others = [Chunk(1, 3, 2, 0) for _ in range(59)]
            steps |= {"long": states.LONG, "many decodes": [*decodes, *others]}
        for title, chunks in steps.items():
            step = tests.make(len(chunks), self._op.shape, chunks)
            if all(chunk.size == 1 for chunk in chunks):
                step = states.alone(step)
            settings = {"pool": step.pool, "batch": step.batch, "layer": LAYER, "num_layers": NUM_LAYERS}
            want = self._kind.reference(*step.inputs, **settings, **self._settings)
            yield {"step": title} | compare(tests.run_op(self._op, step, **self._settings), want, step.rows)

    def decode(self) -> Iterator[Row]:
        """Yield the bandwidth, in bytes of states that are read and written, for several numbers of decodes."""
        spec = self._op.pool_spec(1, 1)
        for num_seqs in (2,) if self._is_dry else DECODES:
            timing, checked = self._measure([1] * num_seqs)
            gigabytes = 2 * num_seqs * spec.size * spec.dtype.itemsize / 1e9
            rate = figures(timing, "gb_per_s", gigabytes, self._peaks["copy_gb_per_s"])
            yield {"seqs": num_seqs} | rate | checked

    def prefill(self) -> Iterator[Row]:
        """Yield the millions of tokens per second through the layer, for several steps of prompts."""
        for sizes in ((40,),) if self._is_dry else PREFILLS:
            timing, checked = self._measure(sizes)
            rate = figures(timing, "mtokens_per_s", sum(sizes) / 1e6, 1)
            del rate["of_peak"]
            yield {"prompts": len(sizes), "tokens": sum(sizes)} | rate | checked

    def _measure(self, sizes: Sequence[int]) -> tuple[Timing, Row]:
        """Time a step of continued sequences in the kernels and in plain XLA, and compare their outputs."""
        batch, num_rows = state_batch([Chunk(size, 9, slot, slot) for slot, size in enumerate(sizes, 1)])
        if max(sizes) == 1:
            batch = batch.without_chunks()
        inputs = self._kind.tests.make_inputs(self._op.shape, np.random.default_rng(0), num_rows)
        arrays = jax.tree.map(jnp.asarray, (inputs, batch))
        xla = replace(self._op, implementation="xla", interpret=False)
        (timing, got), (plain, want) = (self._time(op, len(sizes) + 1, *arrays) for op in (self._op, xla))
        row: Row = {"xla_us": round(plain.seconds * 1e6, 1), "missed": []}
        if self._op.pool_spec(1, 1) != xla.pool_spec(1, 1):
            return timing, row  # in another form the random pool holds other states
        error = relative_error(np.asarray(got), np.asarray(want))
        if not error <= ALLOWED:
            row["missed"].append(f"error {error:.1e}, allowed {ALLOWED:.1e}")
        return timing, row | {"error": round(error, 5)}

    def _time(self, op: Any, num_slots: int, inputs: Any, batch: Any) -> tuple[Timing, Array]:
        """Return the time of a step, and its first output."""
        spec, layer = op.pool_spec(NUM_LAYERS, num_slots), {"layer": LAYER, "num_layers": NUM_LAYERS}
        pool = jax.jit(partial(jax.random.normal, shape=spec.shape, dtype=spec.dtype))(jax.random.key(1))
        options = None if self._is_dry else compiler_options(jax_platform(), jnp.bfloat16, batch_invariant=False)
        run = jax.jit(partial(op, **layer, **self._settings), donate_argnums=len(inputs), compiler_options=options)
        first, *state = run(*inputs, pool, batch)

        def once() -> Array:
            out, state[0] = run(*inputs, state[0], batch)
            return out

        return time_calls(once, repeats=self._repeats), first


def compare(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], rows: np.ndarray) -> Row:
    """Return the relative errors of an op's output and pool against the reference's, and what is wrong with them.

    `rows` excludes padding. Slots that are NaN in the reference's pool are unused.
    """
    error = relative_error(got[0][rows], want[0][rows])
    size = len(got[1]) // NUM_LAYERS
    pool, wanted = (np.delete(x, np.arange(NUM_LAYERS) * size, axis=0).astype(np.float32) for x in (got[1], want[1]))
    is_state = np.isfinite(wanted).all(axis=tuple(range(1, wanted.ndim)))
    state_error = relative_error(pool[is_state], wanted[is_state])
    wrong = {
        f"error {error:.1e}, allowed {ALLOWED:.1e}": not error <= ALLOWED,
        f"a state's error {state_error:.1e}, allowed {STATE_ERROR:.1e}": not state_error <= STATE_ERROR,
        "a slot was written that is nobody's": not np.isnan(pool[~is_state]).all(),
        "padding is not finite": not np.isfinite(got[0].astype(np.float32)).all(),
    }
    missed = [what for what, is_wrong in wrong.items() if is_wrong]
    return {"error": round(error, 5), "state_error": float(f"{state_error:.2g}"), "missed": missed}


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest error of an item of the first axis, as root mean squares relative to the expected item."""
    got, want = (x.astype(np.float32).reshape(len(x), -1) for x in (got, want))
    return float(np.max(np.sqrt(np.mean((got - want) ** 2, axis=1) / np.mean(want**2, axis=1))))


if __name__ == "__main__":
    sys.exit(main())
