"""The model runner owns parameters, KV pool, token counts and compiled programs, and runs plans on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxllm.constraints.bits import RowMask
from jaxllm.sampling.inputs import RareRules
from jaxllm.sampling.token_counts import count_tokens
from jaxllm.scheduling.plan import Chunk, StepKind, StepPlan, StepResult

from .batch import StepInputs, build
from .caches import Pools
from .compiler import COPIES, ProgramKey, StepCompiler, Upkeep
from .host_logprobs import read_logprobs
from .host_processors import HostProcessors
from .jax_settings import running, tracing
from .mesh import replicated
from .packing import BatchShape, rare_specs
from .pooled import NO_ACTIVATION, Activation, read_pooled
from .pooled_step import PoolShape
from .programs import Programs
from .rows import find_extra
from .step import DeviceState, StepOutput, StepShape


class RunningStep:
    """A step on the device. `result` waits for it."""

    def __init__(self, plan: StepPlan, output: StepOutput, host_processors: HostProcessors | None = None) -> None:
        self.plan = plan
        self._host_processors = host_processors
        self._output = output
        arrays = output.logprobs
        # The whole vocabulary's values are fetched only if some row asks.
        for array in jax.tree.leaves((output.tokens_s, None if arrays is None else arrays._replace(all_sv=None))):
            array.copy_to_host_async()

    def is_done(self) -> bool:
        """Say whether `result` would return at once."""
        return self._output.tokens_s.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @running()
    def result(self) -> StepResult:
        """Wait for the tokens and return them as plain Python values."""
        chunks = self.plan.chunks
        rows = np.asarray(self._output.tokens_s)[: self.plan.num_rows].tolist()
        if self._host_processors is not None:
            self._host_processors.after_step()
        token_ids = _by_chunk(chunks, rows)
        if self._output.logprobs is None:
            return StepResult(token_ids, [None] * len(chunks), [[]] * len(chunks))
        return StepResult(token_ids, *read_logprobs(chunks, rows, self._output.logprobs))


def _by_chunk(chunks: Sequence[Chunk], rows: Sequence[int]) -> list[list[int]]:
    """Return the tokens that each chunk's rows sampled; `rows` has those of all rows."""
    tokens = [[token_id] for token_id in rows[: len(chunks)]]
    for index, first, num_rows in find_extra(chunks):
        if chunks[index].num_drafts:
            tokens[index][:0] = rows[first : first + num_rows]
    return tokens


class RunningPool:
    """A step that pools on the device. `result` waits for it."""

    def __init__(self, plan: StepPlan, outputs: Array, activation: Activation, row_alignment: int) -> None:
        self.plan = plan
        self._outputs, self._activation, self._row_alignment = outputs, activation, row_alignment
        outputs.copy_to_host_async()

    def is_done(self) -> bool:
        """Say whether `result` would return at once."""
        return self._outputs.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @running()
    def result(self) -> StepResult:
        """Wait for the outputs and return them as requests want them."""
        pooled = read_pooled(self.plan, np.asarray(self._outputs), self._activation, self._row_alignment)
        return StepResult([], [], [], pooled)


type Running = RunningStep | RunningPool


class ModelRunner:
    """A runner runs steps in the order given; each waits for the one before on the device, not on the host."""

    def __init__(
        self,
        compiler: StepCompiler,
        programs: Programs[ProgramKey],
        num_blocks: int,
        load_params: Callable[[], Any],
        activation: Activation = NO_ACTIVATION,
        make_draft: Callable[[Any], ModelRunner] | None = None,
    ) -> None:
        """Run `programs`, which are the compiler's for a pool of `num_blocks` blocks. Making the pool and loading the
        parameters take about as long, and go on at the same time. `activation` is for what is pooled;
        `make_draft` makes the runner of the model that guesses this one's tokens, given this one's parameters.
        """
        self._activation = activation
        self.compiler, self.programs, self.num_blocks = compiler, programs, num_blocks
        with ThreadPoolExecutor(1) as executor:
            state = executor.submit(running()(self._make_state))
            with tracing():
                self._params = load_params()
        self._draft = None if make_draft is None else make_draft(self._params)
        if compiler.model.adapter_shape is not None:
            self._params |= {"adapters": self.programs.get(Upkeep.MAKE_ADAPTERS)()}
        self._pools, self._previous_tokens, self._hidden = state.result()
        self._counts: Array | None = None
        """The token counts are made by the first step that needs them."""
        self._neutral: dict[int, RareRules] = {}
        """Rare inputs that nobody uses, by the number of rows: the same arrays each step, so that nothing is sent."""

    @property
    def is_compiling(self) -> bool:
        """Say, to any thread, whether a step waits for its program to be compiled."""
        return self.programs.is_awaited or (self._draft is not None and self._draft.is_compiling)

    @property
    def is_warm(self) -> bool:
        """Say whether every program is compiled."""
        return self.programs.is_warm and (self._draft is None or self._draft.is_warm)

    @property
    def num_compiled(self) -> int:
        """Return how many programs were compiled since the start, those found on disk not counted."""
        return self.programs.num_compiled + (0 if self._draft is None else self._draft.num_compiled)

    @running()
    def set_adapter(self, slot: int, arrays: Any) -> None:
        """Write an adapter's arrays, those of one slot, into a slot; steps that were sent before read the old ones."""
        program = self.programs.get(Upkeep.SET_ADAPTER)
        adapters = program(self._params["adapters"], np.int32(slot), arrays)
        self._params = {**self._params, "adapters": adapters}

    @running()
    def run(self, plan: StepPlan, masks: Sequence[RowMask | None], features: Array | None = None) -> Running:
        """Start a step and return at once, unless its program has yet to be compiled.

        `masks` say which ids each row may sample; None stands for all. A draft head's step reads `features`, a pool.
        """
        if plan.kind is not StepKind.SAMPLE:
            return self._run_pool(plan, masks)
        inputs = self._build(plan, masks, self.compiler.batch_shape(plan))
        shape = self.compiler.step_shape(inputs.shape.bucket, is_full=inputs.is_full, has_chunks=inputs.has_chunks)
        if (there := self._nearest(shape)) != shape:
            shape, inputs = there, self._build(plan, masks, there.batch)
        self._copy_blocks(plan.copies)
        self._set_counts(plan)
        program = self.programs.get(shape)
        host = self.compiler.config.host_processors
        if host is not None:
            host.before_step(plan.chunks)
        state = DeviceState(self._pools, self._get_counts() if inputs.is_full else None, self._hidden)
        rest = inputs.ints, inputs.floats, self._rare(inputs), *([] if features is None else [features])
        state, output = program(self._params, state, self._previous_tokens, *rest)
        self._pools, self._hidden = state.pools, state.hidden_sd
        if inputs.is_full:
            self._counts = state.counts_cv
        self._previous_tokens = output.tokens_s
        return RunningStep(plan, output, host)

    def guess(self, steps: Sequence[StepPlan]) -> list[Sequence[Sequence[int]]]:
        """Run steps of the draft model and wait for them; return the tokens that each one's chunks have sampled."""
        assert self._draft is not None
        features = self._pools[-1] if self.compiler.config.features else None
        running = [self._draft.run(plan, [None] * plan.num_rows, features) for plan in steps]
        return [step.result().token_ids for step in running]

    def _run_pool(self, plan: StepPlan, masks: Sequence[RowMask | None]) -> RunningPool:
        by_token = plan.kind is StepKind.POOL_TOKENS
        shape = self._nearest(self.compiler.pool_shape(self.compiler.batch_shape(plan).bucket, by_token=by_token))
        inputs = self._build(plan, masks, shape.batch)
        self._copy_blocks(plan.copies)
        program = self.programs.get(shape)
        self._pools, outputs = program(self._params, self._pools, inputs.ints, inputs.floats)
        return RunningPool(plan, outputs, self._activation, self.compiler.config.row_alignment)

    def _make_state(self) -> tuple[Pools, Array, Array | None]:
        """Return new pools, and tokens and hidden states in place of the previous step's."""
        pools, tokens, hidden = self.programs.get(Upkeep.MAKE_STATE)()
        self.compiler.caches.settle(pools)
        return pools, tokens, hidden

    @running()
    def reset(self) -> None:
        """Make the device's state anew: a step that failed or was cut off may have lost what was donated to it."""
        for array in jax.tree.leaves(self._pools):
            array.delete()  # there may be no room for two
        self._pools, self._previous_tokens, self._hidden = self._make_state()
        self._counts = None
        if self._draft is not None:
            self._draft.reset()

    def warm_up(self) -> None:
        """Wait until every program is compiled. Rare ones on disk are loaded by the step that wants one."""
        self.programs.wait()
        if self._draft is not None:
            self._draft.warm_up()

    def begin_shutdown(self) -> None:
        """Stop compiling ahead, without waiting for what is being compiled."""
        self.programs.begin_stop()
        if self._draft is not None:
            self._draft.begin_shutdown()

    def shutdown(self) -> None:
        """Stop compiling ahead, and wait for what is being compiled."""
        self.programs.stop()
        if self._draft is not None:
            self._draft.shutdown()

    def _build(self, plan: StepPlan, masks: Sequence[RowMask | None], shape: BatchShape) -> StepInputs:
        return build(plan, shape, self.compiler.config.block_size, self.compiler.model.config.vocab_size, masks)

    def _nearest[Shape: (StepShape, PoolShape)](self, shape: Shape) -> Shape:
        """Return the program to use: a larger one that is there, where rows do not depend on the shape of their batch,
        rather than wait for the right one to be compiled.
        """
        if not self.compiler.config.batch_invariant or shape in self.programs:
            return shape
        return self.programs.nearest([shape, *self.compiler.larger(shape)])

    def _copy_blocks(self, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copy the blocks of each cache group."""
        for start in range(0, max(map(len, copies), default=0), COPIES):
            pairs = np.zeros((len(copies), 2, COPIES), np.int32)
            for of_group, each in zip(pairs, copies, strict=True):
                some = each[start : start + COPIES]
                of_group[:, : len(some)] = np.array(some, np.int32).reshape(-1, 2).T
            self._pools = self.programs.get(Upkeep.COPY_BLOCKS)(self._pools, tuple((s, t) for s, t in pairs))

    def _set_counts(self, plan: StepPlan) -> None:
        """Fill the rows of the token counts that requests have just got."""
        vocab_size = self.compiler.model.config.vocab_size
        for chunk in plan.chunks:
            if chunk.history is None or chunk.count_row is None:
                continue
            row_v = count_tokens(chunk.history, chunk.num_prompt_tokens, vocab_size)
            row = np.int32(chunk.count_row)
            self._counts = self.programs.get(Upkeep.SET_COUNTS)(self._get_counts(), row, row_v)

    def _get_counts(self) -> Array:
        counts = self._counts
        if counts is None:
            counts = self._counts = self.programs.get(Upkeep.MAKE_COUNTS)()
        return counts

    def _rare(self, inputs: StepInputs) -> RareRules | None:
        if not inputs.is_full:
            return None
        num_rows = inputs.shape.bucket.num_seqs
        if num_rows not in self._neutral:
            config = self.compiler.config
            specs = rare_specs(num_rows, self.compiler.model.config.vocab_size, config.max_drafts)
            everywhere = replicated(self.compiler.mesh)
            self._neutral[num_rows] = RareRules(*(jax.device_put(spec.neutral(), everywhere) for spec in specs))
        neutral = self._neutral[num_rows]
        return RareRules(*(unused if used is None else used for used, unused in zip(inputs.rare, neutral, strict=True)))
