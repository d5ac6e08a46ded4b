"""Build the inputs of each step, launch it on every host, and read its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxllm.constraints.bits import RowMask
from jaxllm.core_messages import PROMPT_EMBEDS, Clip, MediaItem, PromptMedia
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.batch import StepInputs, build, build_next, is_next
from jaxllm.execution.encoders.alignment import align_inputs
from jaxllm.execution.encoders.clips import check_clip, clip_inputs
from jaxllm.execution.encoders.patches import check_item, check_rows, encoder_inputs, written_inputs
from jaxllm.execution.host_logprobs import read_hidden_states, read_logprobs
from jaxllm.execution.host_processors import HostProcessors
from jaxllm.execution.kept_rows import KeptRows, RowSettings
from jaxllm.execution.launcher import AdapterLaunch, EncodeLaunch, Launch, Launcher, StepLaunch
from jaxllm.execution.options import running
from jaxllm.execution.packing import BatchShape, BufferPool
from jaxllm.execution.pooled_step import NO_ACTIVATION, Activation, PoolShape, read_pooled
from jaxllm.execution.programs.background import Programs
from jaxllm.execution.programs.compiler import COPIES
from jaxllm.execution.programs.shapes import ProgramKey, Upkeep
from jaxllm.execution.rows import least_sampling
from jaxllm.execution.step import StepOutput, StepShape
from jaxllm.execution.tiers.host_array import HostArrays
from jaxllm.sampling.token_counts import count_tokens
from jaxllm.scheduling.clips import ClipEncode
from jaxllm.scheduling.media import Encode
from jaxllm.scheduling.plan import StepKind, StepPlan, StepResult


class RunningStep:
    """A step on the device. `result` waits for it."""

    def __init__(
        self,
        plan: StepPlan,
        output: StepOutput,
        host_processors: HostProcessors | None = None,
        ended: Callable[[], None] = lambda: None,
        row_alignment: int = 1,
    ) -> None:
        """Fetch the output in the background; call `ended` when it is there."""
        self.plan, self._ended, self._row_alignment = plan, ended, row_alignment
        self._host_processors = host_processors
        self._output = output
        arrays = output.logprobs
        # The whole vocabulary's values are fetched only if some row asks.
        for array in jax.tree.leaves((output.tokens_s, None if arrays is None else arrays._replace(all_sv=None))):
            array.copy_to_host_async()

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        return self._output.tokens_s.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @running()
    def result(self) -> StepResult:
        """Wait for the tokens and return them as plain Python values."""
        num_chunks = self.plan.num_chunks
        rows = np.asarray(self._output.tokens_s)[: self.plan.num_rows].tolist()
        self._ended()
        if self._host_processors is not None:
            self._host_processors.after_step()
        drafts = {
            index: rows[first : first + num_rows]
            for index, first, num_rows, chunk in self.plan.extra_rows
            if chunk.num_drafts
        }
        scores = [None] * num_chunks, [[]] * num_chunks
        if self._output.logprobs is not None:
            scores = read_logprobs(self.plan, rows, self._output.logprobs)
        states, features_tf = {}, self._output.features_tf
        if features_tf is not None:
            states = read_hidden_states(self.plan, features_tf, self._row_alignment)
        return StepResult(rows[:num_chunks], *scores, before_drafts=drafts, hidden_states=states)


class _RunningPool:
    """A pooling step on the device. `result` waits for it."""

    def __init__(
        self, plan: StepPlan, outputs: Array, activation: Activation, row_alignment: int, ended: Callable[[], None]
    ) -> None:
        """Fetch the output in the background; call `ended` when it is there."""
        self.plan, self._ended = plan, ended
        self._outputs, self._activation, self._row_alignment = outputs, activation, row_alignment
        outputs.copy_to_host_async()

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        return self._outputs.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @running()
    def result(self) -> StepResult:
        """Wait for the outputs and return them as requests want them."""
        outputs = np.asarray(self._outputs)
        self._ended()
        pooled = read_pooled(self.plan, outputs, self._activation, self._row_alignment)
        return StepResult([], [], [], pooled)


type Running = RunningStep | _RunningPool


class ModelRunner:
    """Run steps in order; each waits for the one before on the device, not on the host."""

    def __init__(
        self,
        launcher: Launcher,
        activation: Activation = NO_ACTIVATION,
        draft: ModelRunner | None = None,
        broadcast: Callable[[Launch], None] = lambda _: None,
        *,
        is_draft: bool = False,
    ) -> None:
        """Run the steps of the launcher's model; `draft` runs those of its draft model.

        `activation` is applied to pooled outputs. `broadcast` sends each launch to the model's other hosts, before this
        host runs it; `is_draft` marks launches as the draft model's.
        """
        self.launcher, self._activation, self._draft = launcher, activation, draft
        self.compiler = launcher.compiler
        self._shapes = launcher.compiler.shapes
        self._broadcast, self._is_draft = broadcast, is_draft
        widest = self._shapes.batch_shapes[-1]
        self._kept = KeptRows(
            self._shapes.max_rows,
            len(widest.query_tiles),
            widest.max_blocks,
            widest.cross.max_blocks if widest.cross else 0,
        )
        self._buffers = BufferPool()
        self._last: tuple[StepShape, StepInputs] | None = None
        """The program that the last step should have had, and its inputs, if the next may be made from them."""
        self._places = {key: place for place, key in enumerate(self.programs.keys)}

    @property
    def programs(self) -> Programs[ProgramKey]:
        """Return the model's programs."""
        return self.launcher.programs

    @property
    def is_compiling(self) -> bool:
        """Return whether a step waits for its program to be compiled; any thread may ask."""
        return self.programs.is_awaited or (self._draft is not None and self._draft.is_compiling)

    @property
    def num_awaited(self) -> int:
        """Return the number of times that a step has waited for its program."""
        return self.programs.num_awaited + (0 if self._draft is None else self._draft.num_awaited)

    @property
    def is_warm(self) -> bool:
        """Return whether every program is compiled."""
        return self.programs.is_warm and (self._draft is None or self._draft.is_warm)

    @property
    def num_compiled(self) -> int:
        """Return the number of programs compiled since the start, without those found on disk."""
        return self.programs.num_compiled + (0 if self._draft is None else self._draft.num_compiled)

    def check_media(self, media: PromptMedia) -> None:
        """Raise VLLMValidationError for media that the model's towers cannot take, and for unfit embeddings."""
        for item in media.items:
            if item.modality == PROMPT_EMBEDS:
                self._check_embeds(item)
                continue
            with_part = self.compiler.model.find_tower(item.modality)
            if with_part is None:
                message = f"the model takes no {item.modality} here."
                raise VLLMValidationError(message, parameter="multi_modal_data", value=item.modality)
            part, tower = with_part
            if item.is_encoded and not self.compiler.config.takes_embeds:
                raise VLLMValidationError("embeddings need enable_mm_embeds.", parameter="multi_modal_data")
            check_item(tower.settings, item, self._shapes.encoder_shapes[part])

    def _check_embeds(self, item: MediaItem) -> None:
        """Raise VLLMValidationError for part of a prompt of embeddings, unless the engine takes such."""
        if self.compiler.model.towers or not (item.is_encoded and self.compiler.config.takes_embeds):
            raise VLLMValidationError("prompt_embeds need enable_prompt_embeds.", parameter=PROMPT_EMBEDS)
        check_rows(item, self._shapes.media_width, PROMPT_EMBEDS)

    def check_clip(self, clip: Clip | None) -> None:
        """Raise VLLMValidationError for a clip that the model's encoder cannot take, and where it needs one."""
        encoder = self.compiler.model.encoder
        if encoder is None:
            if clip is not None:
                raise VLLMValidationError("the model takes no sound.", parameter="multi_modal_data")
            return
        if clip is None:
            message = "an encoder-decoder needs something to attend to: send its 'audio' in multi_modal_data."
            raise VLLMValidationError(message, parameter="multi_modal_data")
        check_clip(encoder.settings, clip)

    def align(self, clip: Clip, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return how much each token of a transcript attends to a clip's frames with sound, and log-probabilities.

        They are float32 [tokens, clip.num_heard] and [tokens]. For any thread: steps go on meanwhile. Raises
        VLLMValidationError for what the model cannot align.
        """
        if self.compiler.model.encoder is None:
            raise VLLMValidationError("the model takes no sound.", parameter="prompt")
        self.check_clip(clip)
        if jax.process_count() > 1:
            message = "transcripts are not aligned by a model that spans several hosts: take one host."
            raise VLLMValidationError(message, parameter="nnodes")
        heads = self.compiler.config.alignment_heads
        shape, inputs = align_inputs(self.compiler.model, heads, clip, prompt_ids, token_ids)
        heard_tf, logprobs_t = self.launcher.align(shape, inputs)
        rows = slice(len(prompt_ids), len(prompt_ids) + len(token_ids))
        return heard_tf[rows, : clip.num_heard], logprobs_t[rows]

    def set_adapter(self, slot: int, arrays: Any) -> None:
        """Write an adapter's arrays into a slot; steps that were launched before read the old ones."""
        self._launch(AdapterLaunch(slot, jax.tree.leaves(arrays)))

    @running()
    def run(self, plan: StepPlan, masks: Sequence[RowMask | None]) -> Running:
        """Start a step and return at once, unless its program must be compiled first.

        `masks` has the ids that each row may sample; None stands for all.
        """
        for encode in plan.encodes:
            for launch in self._encode(encode):
                self._launch(launch)
        for encode in plan.clips:
            self._launch(self._encode_clip(encode))
        if plan.kind is not StepKind.SAMPLE:
            return self._run_pool(plan, masks)
        shape, inputs = self._inputs(plan, masks)
        host = self.compiler.config.host_processors
        if host is not None:
            host.before_step(plan)
        output = self._launch(self._step(plan, inputs, shape, list(inputs.rare) if shape.is_full else None))
        assert isinstance(output, StepOutput)
        ended = partial(self._buffers.end, inputs.buffers)
        return RunningStep(plan, output, host, ended, self.compiler.config.row_alignment)

    def _inputs(self, plan: StepPlan, masks: Sequence[RowMask | None]) -> tuple[StepShape, StepInputs]:
        """Return the program of a step that samples, and its inputs."""
        if self._last is not None and is_next(plan, self._last[1], masks):
            wanted, last = self._last
            shape = self._nearest(wanted)
            if shape.batch == last.buffers.shape:
                self._last = wanted, build_next(plan, last, self.compiler.config.block_size, self._buffers)
                return shape, self._last[1]
        settings = self._kept.take(plan)
        bucket, sampling = self._shapes.batch_shape(plan).bucket, least_sampling(plan, settings, masks)
        wanted = self._shapes.step_shape(bucket, sampling, has_chunks=not plan.decodes_only)
        shape = self._nearest(wanted)
        inputs = self._build(plan, masks, shape.batch, settings)
        self._last = None if inputs.owners is None else (wanted, inputs)
        return shape, inputs

    def guess(self, steps: Sequence[StepPlan]) -> list[Sequence[int]]:
        """Run steps of the draft model and wait for them; return the tokens that the chunks of each step sampled."""
        assert self._draft is not None
        running = [self._draft.run(plan, [None] * plan.num_rows) for plan in steps]
        return [step.result().token_ids for step in running]

    def _run_pool(self, plan: StepPlan, masks: Sequence[RowMask | None]) -> _RunningPool:
        by_token = plan.kind is StepKind.POOL_TOKENS
        shape = self._nearest(self._shapes.pool_shape(self._shapes.batch_shape(plan).bucket, by_token=by_token))
        self._last = None
        inputs = self._build(plan, masks, shape.batch, self._kept.take(plan))
        outputs = self._launch(self._step(plan, inputs, shape))
        assert isinstance(outputs, Array)
        ended = partial(self._buffers.end, inputs.buffers)
        return _RunningPool(plan, outputs, self._activation, self.compiler.config.row_alignment, ended)

    def reset(self) -> None:
        """Make the device's state anew: a step that failed or was cut off may have lost its donated arrays."""
        self.launcher.reset()
        self._buffers, self._last = BufferPool(), None
        if self._draft is not None:
            self._draft.reset()

    def release_device(self, *, keeps_weights: bool) -> None:
        """Free weights and caches, the draft model's too; nothing can run until both are back.

        With `keeps_weights` the host keeps the weights. On a CPU, where the host's memory is the device's, it does not,
        but weights that have been replaced, which no checkpoint has, stay.
        """
        launchers = self._launchers()
        on_cpu = self.compiler.mesh.devices.flat[0].platform == "cpu"
        if keeps_weights and not on_cpu:
            host = HostArrays()
            for launcher in launchers:  # all, before any is dropped: there may be no room
                launcher.copy_weights(host)
        stay = keeps_weights and on_cpu and any(launcher.has_new_weights for launcher in launchers)
        for launcher in launchers:
            launcher.drop_caches()
            if not stay:
                launcher.drop_weights()
        self._buffers, self._last = BufferPool(), None

    def bring_weights(self) -> bool:
        """Put the weights back: from the host if it has kept them, else from the checkpoint.

        Returns False if some have been replaced and dropped since, so that nobody has them but whoever replaced them.
        """
        # A draft model may borrow arrays of the model, which is first.
        return all(launcher.bring_weights() for launcher in self._launchers())

    def make_caches(self) -> None:
        """Make empty caches."""
        for launcher in self._launchers():
            launcher.make_caches()

    @property
    def draft_launcher(self) -> Launcher | None:
        """Return the launcher of the draft model, if there is one."""
        return None if self._draft is None else self._draft.launcher

    def _launchers(self) -> list[Launcher]:
        return [self.launcher, *([] if self._draft is None else self._draft._launchers())]

    def warm_up(self) -> None:
        """Wait until every program is compiled. A rare program on disk is loaded by the step that needs it."""
        self.programs.wait()
        if self._draft is not None:
            self._draft.warm_up()

    def begin_shutdown(self) -> None:
        """Stop compiling ahead, without waiting for the program that is being compiled."""
        self.programs.begin_stop()
        if self._draft is not None:
            self._draft.begin_shutdown()

    def shutdown(self) -> None:
        """Stop compiling ahead, and wait for the program that is being compiled."""
        self.programs.stop()
        if self._draft is not None:
            self._draft.shutdown()

    def _launch(self, launch: Launch) -> StepOutput | Array | None:
        self._broadcast(launch)
        return self.launcher.launch(launch)

    def _build(
        self, plan: StepPlan, masks: Sequence[RowMask | None], shape: BatchShape, settings: RowSettings
    ) -> StepInputs:
        block_size, vocab_size = self.compiler.config.block_size, self.compiler.model.config.vocab_size
        return build(plan, self._buffers.take(shape), block_size, vocab_size, masks, settings)

    def _step(
        self, plan: StepPlan, inputs: StepInputs, shape: ProgramKey, rare: list[np.ndarray | None] | None = None
    ) -> StepLaunch:
        return StepLaunch(
            self._places[shape],
            inputs.buffers.ints,
            inputs.buffers.floats,
            rare,
            _pairs(plan.copies),
            self._counts(plan),
            self._is_draft,
        )

    def _encode(self, encode: Encode) -> list[EncodeLaunch]:
        compiler, num_media_rows = self.compiler, self.compiler.config.num_media_rows
        if encode.item.is_encoded:
            config = compiler.model.config
            is_scaled = encode.item.modality == PROMPT_EMBEDS and config.scales_inputs
            scale = np.asarray(config.embed_scale, compiler.model.dtype) if is_scaled else None
            written = written_inputs(encode, num_media_rows, compiler.shapes.media_width, scale)
            return [EncodeLaunch(self._places[Upkeep.WRITE_MEDIA], arrays) for arrays in written]
        with_part = compiler.model.find_tower(encode.item.modality)
        assert with_part is not None
        part, tower = with_part
        settings, shapes = tower.settings, compiler.shapes.encoder_shapes[part]
        launches = []
        for shape, batch, slots in encoder_inputs(settings, encode, shapes, num_media_rows):
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]  # hosts are sent arrays, no numbers
            launches.append(EncodeLaunch(self._places[shape], [*arrays, slots]))
        return launches

    def _encode_clip(self, encode: ClipEncode) -> EncodeLaunch:
        [shape], encoder = self._shapes.clip_shapes, self.compiler.model.encoder
        assert encoder is not None
        return EncodeLaunch(self._places[shape], clip_inputs(encoder.settings, encode))

    def _nearest[Shape: (StepShape, PoolShape)](self, shape: Shape) -> Shape:
        """Return the program to use: the right one, or one that can do the same and is compiled while it is not."""
        if not self._shapes.has_stand_ins or shape in self.programs:
            return shape
        # Of a draft model only plain programs are compiled.
        others = [other for other in self._shapes.larger(shape) if other in self._places]
        return self.programs.nearest([shape, *others])

    def _counts(self, plan: StepPlan) -> list[tuple[int, np.ndarray]]:
        """Return the new rows of the token counts, filled, for requests that have just got one."""
        vocab_size = self.compiler.model.config.vocab_size
        return [
            (chunk.owner.count_row, count_tokens(chunk.history, chunk.owner.num_prompt_tokens, vocab_size))
            for chunk in plan.others
            if chunk.history is not None and chunk.owner.count_row is not None
        ]


def _pairs(copies: Sequence[Sequence[tuple[int, int]]]) -> list[np.ndarray]:
    """Return the blocks to copy in each cache group, for each run of the copy program."""
    runs = []
    for start in range(0, max(map(len, copies), default=0), COPIES):
        pairs = np.zeros((len(copies), 2, COPIES), np.int32)
        for of_group, group_copies in zip(pairs, copies, strict=True):
            some = group_copies[start : start + COPIES]
            of_group[:, : len(some)] = np.array(some, np.int32).reshape(-1, 2).T
        runs.append(pairs)
    return runs
