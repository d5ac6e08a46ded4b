"""Measure the sampler: alone at 64 rows of a wide vocabulary, and within a real model's decode step.

The cases of a table run in turns, so that a drift of the machine's speed affects them alike; ratios are taken within
a turn. With --step MODEL the rows of a step decode from one position each; "bare argmax" is the plain program
compiled with `jnp.argmax` for a sampler, that is, without any feature code.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from lib.results import make_parser, save

from bench.host import describe
from jaxllm import SamplingParams
from jaxllm.execution import step as step_module
from jaxllm.execution.batch import build
from jaxllm.execution.kept_rows import KeptRows
from jaxllm.execution.options import compiler_options
from jaxllm.execution.packing import allocate, rare_specs
from jaxllm.execution.rows import least_sampling
from jaxllm.execution.step import DeviceState
from jaxllm.sampling.inputs import RareRules, Rules, SamplingBatch, Uses
from jaxllm.sampling.sampler import sample_full, sample_plain, sample_truncated
from jaxllm.scheduling.plan import Chunk, Owner, StepPlan

ROWS = 64
NUM_LOGPROBS = 20
BIASES = 8
CONTEXT = 192
SAMPLED = {"temperature_s": 0.8}
NUCLEUS = SAMPLED | {"top_p_s": 0.9}
Table = dict[str, dict[str, float]]
AllRules = tuple[Rules, RareRules]


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__, "sampler_cpu.json")
    parser.add_argument("--vocab", type=int, default=128_256, help="ids (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="turns to measure (default: %(default)s)")
    parser.add_argument("--step", metavar="MODEL", help="also measure the decode step of a .gguf, folder or hub id")
    parser.add_argument("--step-rows", type=int, default=ROWS, help="rows of that step (default: %(default)s)")
    args = parser.parse_args()
    figures = {f"sampler, {ROWS} rows of {args.vocab} ids": measure_sampler(args.vocab, args.repeats)}
    if args.step:
        title = f"decode step of {Path(args.step).name}, {args.step_rows} rows"
        figures[title] = measure_steps(args.step, args.step_rows, args.repeats)
    for title, table in figures.items():
        show(title, table)
    settings = {"model": args.step and Path(args.step).name, "rows": ROWS, "repeats": args.repeats}
    settings |= {"step_rows": args.step_rows} if args.step else {}
    settings |= {"num_logprobs": NUM_LOGPROBS, "biases": BIASES}
    settings |= {"model": Path(args.step or "").name, "repeats": args.repeats}
    save(args.json, describe() | {"settings": settings, "figures": figures})
    return 0


def measure_sampler(v: int, repeats: int) -> Table:
    """Time all programs under several settings."""
    rng = np.random.default_rng(0)
    # A few likely ids and a long tail, as models have.
    logits_sv = jnp.asarray(rng.gumbel(size=(ROWS, v)) * 2.0, jnp.float32)
    neutral, busy = make_rules(v, rng)
    counts_cv = jnp.asarray(rng.integers(0, 3, (ROWS + 1, v)), jnp.uint16)
    full = partial(sample_full, num_logprobs=NUM_LOGPROBS, logprobs_mode="raw_logprobs", processors=())

    def plain_case(**settings: float) -> Callable[[], Any]:
        batch = make_batch(**settings)
        return partial(compiled_plain, logits_sv, batch)

    def truncated_case(**settings: float) -> Callable[[], Any]:
        return partial(compiled_truncated, logits_sv, make_batch(**settings))

    def full_case(
        rules: tuple[Rules, RareRules], uses: tuple[int, int, int, int], **settings: float
    ) -> Callable[[], Any]:
        scalars = Uses(*(jnp.asarray(use, jnp.int32) for use in uses))
        return partial(compiled_full, logits_sv, make_batch(**settings), *rules, scalars, counts_cv)

    nothing = Uses(*[jnp.asarray(0, jnp.int32)] * 4)
    compiled_argmax = compile_for_cpu(lambda logits_sv: jnp.argmax(logits_sv, axis=1), logits_sv)
    compiled_plain = compile_for_cpu(sample_plain, logits_sv, make_batch())
    compiled_truncated = compile_for_cpu(sample_truncated, logits_sv, make_batch())
    compiled_full = compile_for_cpu(full, logits_sv, make_batch(), *neutral, nothing, counts_cv)
    cases = {
        "jnp.argmax": partial(compiled_argmax, logits_sv),
        "plain: greedy": plain_case(),
        "plain: temperature": plain_case(**SAMPLED),
        "truncated: top_p": truncated_case(**NUCLEUS),
        "truncated: top_k": truncated_case(**SAMPLED, top_k_s=50),
        "full: nothing in use": full_case(neutral, (0, 0, 0, 0)),
        "full: temperature": full_case(neutral, (0, 0, 0, 0), **SAMPLED),
        "full: top_p": full_case(neutral, (0, 0, 1, 0), **NUCLEUS),
        "full: top_k": full_case(neutral, (0, 0, 1, 0), **SAMPLED, top_k_s=50),
        "full: logprobs": full_case(neutral, (0, 0, 0, 1)),
        "full: penalties": full_case((busy[0], neutral[1]), (0, 1, 0, 0)),
        "full: mask": full_case(busy, (0, 0, 0, 0)),
        "full: everything": full_case(busy, (BIASES, 1, 1, 1), **NUCLEUS, top_k_s=50, min_p_s=0.01),
    }
    return measure(cases, "plain: greedy", repeats)


def make_batch(**settings: float) -> SamplingBatch:
    """Return the same settings for all rows, greedy by default."""
    values = {"temperature_s": 0.0, "top_k_s": 0, "top_p_s": 1.0, "min_p_s": 0.0} | settings
    dtypes = {"top_k_s": jnp.int32}
    columns = {name: jnp.full(ROWS, value, dtypes.get(name, jnp.float32)) for name, value in values.items()}
    seeds = np.stack([np.zeros(ROWS), np.arange(ROWS)], axis=1)
    return SamplingBatch(seeds_s2=jnp.asarray(seeds, jnp.int32), positions_s=jnp.arange(ROWS), **columns)


def make_rules(v: int, rng: np.random.Generator) -> tuple[AllRules, AllRules]:
    """Return neutral rules, and rules that use every feature, as the host sends them to the program."""
    zeros = jnp.zeros(ROWS, jnp.int32)
    neutral = Rules(
        is_scored_s=zeros,
        scored_ids_s=zeros,
        count_rows_s=zeros,
        presence_s=jnp.zeros(ROWS),
        frequency_s=jnp.zeros(ROWS),
        repetition_s=jnp.ones(ROWS),
        num_outputs_s=zeros,
        extra_args={},
    )
    busy = neutral._replace(
        count_rows_s=jnp.arange(1, ROWS + 1),
        presence_s=jnp.full(ROWS, 0.5),
        frequency_s=jnp.full(ROWS, 0.5),
        repetition_s=jnp.full(ROWS, 1.2),
    )
    rare = RareRules(*(jnp.asarray(spec.neutral()) for spec in rare_specs(ROWS, v)))
    busy_rare = rare._replace(
        bias_ids_sb=jnp.asarray(rng.integers(0, v, rare.bias_ids_sb.shape), jnp.int32),
        bias_sb=jnp.asarray(rng.standard_normal(rare.bias_sb.shape), jnp.float32),
        allowed_bits_sw=jnp.asarray(rng.integers(-(2**31), 2**31, rare.allowed_bits_sw.shape), jnp.int32),
    )
    return (neutral, rare), (busy, busy_rare)


def compile_for_cpu(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Compile as the engine does."""
    options = compiler_options(jax.default_backend(), jnp.float32, False)
    return jax.jit(function).lower(*args).compile(compiler_options=options)


def measure_steps(model: str, num_rows: int, repeats: int) -> Table:
    """Time decode steps of a real model, by the rows' settings and by the program that runs them."""
    from jaxllm.engine.offline.llm_engine import LLMEngine
    from jaxllm.resolve.engine_args import EngineArgs

    # enforce_eager: no thread compiles what is not needed while we measure.
    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(model=model, max_num_seqs=max(ROWS, num_rows), enforce_eager=True)
    )
    runner = engine._core._core._runner
    block_size, vocab_size = runner.compiler.config.block_size, runner.compiler.model.config.vocab_size

    def case(sampler: Callable[[Array, SamplingBatch], Array] | None = None, **params: Any) -> StepCase:
        plan = decode_plan(SamplingParams(**params), block_size, num_blocks(runner), vocab_size, num_rows)
        return StepCase(runner, plan, sampler=sampler)

    cases = {
        "bare argmax": case(lambda logits_sv, *_, **__: jnp.argmax(logits_sv, axis=1), temperature=0.0),
        "greedy": case(temperature=0.0),
        "temperature": case(temperature=0.8),
        "temperature, top_p": case(temperature=0.8, top_p=0.9),
        "temperature, top_p, logprobs": case(temperature=0.8, top_p=0.9, logprobs=1),
    }
    return measure({name: case.run for name, case in cases.items()}, "greedy", repeats)


class StepCase:
    """Repeats one step; all cases of a runner share its KV pool."""

    def __init__(
        self, runner: Any, plan: StepPlan, *, sampler: Callable[[Array, SamplingBatch], Array] | None = None
    ) -> None:
        compiler = runner.compiler
        shape = compiler.shapes.batch_shape(plan)
        masks = [None] * len(plan.chunks)
        self._runner = runner
        settings = KeptRows(len(masks), len(shape.query_tiles), shape.max_blocks).take(plan)
        vocab_size = compiler.model.config.vocab_size
        self._inputs = build(plan, allocate(shape), compiler.config.block_size, vocab_size, masks, settings)
        sampling = least_sampling(plan, settings, masks)
        self._key = key = compiler.shapes.step_shape(shape.bucket, sampling, has_chunks=not plan.decodes_only)
        self._program = runner.programs.get(key)
        if sampler is not None:
            original = step_module.sample_plain
            step_module.sample_plain = sampler
            try:
                self._program = compiler.compile(key, num_blocks(runner))
            finally:
                step_module.sample_plain = original

    def run(self) -> Array:
        """Start the step and return its tokens."""
        launcher, inputs = self._runner.launcher, self._inputs
        counts = rare = None
        if self._key.is_full:
            counts, rare = launcher._get_counts(), launcher._rare(list(inputs.rare), self._key.batch.bucket.num_seqs)
        state = DeviceState(launcher.pools, counts)
        state, output = self._program(
            launcher.params, state, launcher._previous_tokens, inputs.buffers.ints, inputs.buffers.floats, rare
        )
        launcher.pools = state.pools
        if self._key.is_full:
            launcher._counts = state.counts_cv
        return output.tokens_s


def num_blocks(runner: Any) -> int:
    """Return the number of blocks in the pool of a runner's first cache group."""
    pool, group = runner.launcher.pools[0], runner.compiler.config.groups[0]
    return jax.tree.leaves(pool)[0].shape[0] // group.num_layers


def decode_plan(
    params: SamplingParams, block_size: int, num_blocks: int, vocab_size: int, num_rows: int = ROWS
) -> StepPlan:
    """Return a plan in which every row decodes one token at the same position, each in blocks of its own."""
    per_row = -(-(CONTEXT + 1) // block_size)
    if 1 + num_rows * per_row > num_blocks:
        raise SystemExit(
            f"{num_rows} rows of {CONTEXT} tokens need {num_rows * per_row} blocks; the pool has {num_blocks - 1}"
        )
    return StepPlan(
        step_id=0,
        others=tuple(
            Chunk(
                owner=Owner(request_id=str(row), num_prompt_tokens=CONTEXT, params=params, seed=row),
                start=CONTEXT,
                token_ids=array("i", [(row * 37) % vocab_size]),
                previous_row=None,
                block_ids=(array("i", range(1 + row * per_row, 1 + (row + 1) * per_row)),),
                samples=True,
                num_output_tokens=1,
            )
            for row in range(num_rows)
        ),
        num_preempted=0,
    )


def measure(cases: Mapping[str, Callable[[], Any]], base: str, repeats: int) -> Table:
    """Run the cases in turns; return each one's median in ms and the median of its ratios to `base`."""
    for case in cases.values():
        jax.block_until_ready(case())
    seconds = {name: np.zeros(repeats) for name in cases}
    for turn in range(repeats):
        for name, case in cases.items():
            start = perf_counter()
            jax.block_until_ready(case())
            seconds[name][turn] = perf_counter() - start
    return {
        name: {
            "median_ms": round(float(np.median(times)) * 1e3, 3),
            "least_ms": round(float(times.min()) * 1e3, 3),
            f"times {base}": round(float(np.median(times / seconds[base])), 3),
        }
        for name, times in seconds.items()
    }


def show(title: str, table: Table) -> None:
    """Print one table."""
    columns = list(next(iter(table.values())))
    print(f"\n{title}\n{'':32}" + "".join(f"{column:>22}" for column in columns))
    for name, row in table.items():
        print(f"{name:32}" + "".join(f"{row[column]:22.3f}" for column in columns))


if __name__ == "__main__":
    sys.exit(main())
