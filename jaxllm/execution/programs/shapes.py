"""List the programs of an engine: the shapes that its steps are padded to, and what runs between steps."""

from __future__ import annotations

import enum
from functools import cached_property
from typing import Any

from jaxllm.execution.batch import num_token_rows
from jaxllm.execution.encoders.alignment import AlignShape, align_shapes
from jaxllm.execution.encoders.clips import ClipShape
from jaxllm.execution.encoders.patches import EncoderShape, encoder_shapes
from jaxllm.execution.options import min_rows, single_row_pays
from jaxllm.execution.packing import BatchShape, Bucket, CrossShape, make_buckets, pick_bucket
from jaxllm.execution.pooled_step import PoolShape
from jaxllm.execution.step import StepShape
from jaxllm.execution.step_config import StepConfig
from jaxllm.execution.tiers.move_shape import MoveShape, move_shapes
from jaxllm.models.model import Model
from jaxllm.sampling.inputs import Sampling
from jaxllm.sampling.processors import extra_args
from jaxllm.scheduling.plan import StepPlan

_STAND_IN_TOKENS = 128
"""The bucket of this many tokens is compiled first, where its program can stand in for smaller buckets'."""


class Upkeep(enum.Enum):
    """Small programs that run between steps."""

    MAKE_STATE = "make state"
    """It takes nothing and returns (pools, the previous step's tokens, its hidden states), all zeros; the last are None
    except for a draft head."""
    COPY_BLOCKS = "copy blocks"
    """It takes (pools, for each of them (sources [COPIES], targets [COPIES])) and returns the pools."""
    MAKE_COUNTS = "make counts"
    """It takes nothing and returns the token counts, all zeros."""
    SET_COUNTS = "set counts"
    """It takes (token counts, row index, row [v]) and returns the token counts."""
    MAKE_ADAPTERS = "make adapters"
    """It takes nothing and returns the adapters of all slots, all zeros."""
    SET_ADAPTER = "set adapter"
    """It takes (adapters, slot, the arrays of one adapter) and returns the adapters."""
    MAKE_MEDIA = "make media"
    """It takes nothing and returns the feature cache of images and videos, all zeros."""
    WRITE_MEDIA = "write media"
    """It takes (feature cache, rows [WRITTEN_ROWS, w], slots [WRITTEN_ROWS]) and returns the feature cache."""

    @property
    def is_of_adapters(self) -> bool:
        """Return whether only an engine with adapters has it."""
        return self in (Upkeep.MAKE_ADAPTERS, Upkeep.SET_ADAPTER)


type ProgramKey = StepShape | PoolShape | EncoderShape | ClipShape | AlignShape | MoveShape | Upkeep


class ProgramShapes:
    """The programs of one model under one configuration, by what each is compiled for."""

    def __init__(self, config: StepConfig, model: Model) -> None:
        self._config, self._model = config, model
        self.least_rows = max(min_rows(config.platform, model.dtype), config.row_alignment)
        most, halves = config.max_num_batched_tokens, config.platform == "gpu"
        self.buckets = make_buckets(most, config.max_num_seqs, self.least_rows, config.sizes, halves=halves)
        if config.sizes is None and config.generates and single_row_pays(config.platform, model):
            self.buckets = (Bucket(1, 1), *self.buckets)
        # Made once: every step needs one.
        self._batch_shapes = {bucket: self._batch_shape(bucket) for bucket in self.buckets}
        self._has_decode_programs = all(
            group.attention.takes_decodes_alone for group in (*config.groups, *config.cross_groups)
        )

    @property
    def has_stand_ins(self) -> bool:
        """Return whether a larger program that is compiled may run a step instead of the right one that is not.

        It may if rows do not depend on the shape of their batch, or if that is not promised, and nobody should wait: a
        program for an accelerator takes seconds to compile, and all streams would wait for it.
        """
        return self._config.batch_invariant or self._config.platform != "cpu"

    @property
    def max_rows(self) -> int:
        """Return the number of rows of a step's tokens, which is the same in every bucket."""
        return self.buckets[-1].num_seqs

    def programs(self) -> list[ProgramKey]:
        """Return all programs, in the order in which a new engine needs them."""
        upkeep = [Upkeep.MAKE_STATE, Upkeep.COPY_BLOCKS]
        upkeep += [Upkeep.MAKE_COUNTS, Upkeep.SET_COUNTS] if self._config.generates else []
        upkeep += [each for each in Upkeep if each.is_of_adapters and self._model.adapter_shape]
        upkeep += [Upkeep.MAKE_MEDIA] if self.media_width else []
        upkeep += [Upkeep.WRITE_MEDIA] if self.media_width and self._config.takes_embeds else []
        upkeep += move_shapes(self._config)
        of_towers = [shape for shapes in self.encoder_shapes.values() for shape in shapes]
        others = [*of_towers, *self._pool_shapes(by_token=False), *upkeep]
        plain, truncated, full = map(self._shapes, Sampling)
        pooled = self._pool_shapes(by_token=True)
        clips = self.clip_shapes  # which every request of an encoder-decoder begins with
        if self._config.platform == "cpu":
            return [*clips, *plain, *others, *truncated, *full, *pooled]
        # Each compiles for seconds, and ordinary chat truncates: the largest of all kinds come first, which stand in.
        steps = [shape for pair in zip(plain, truncated, strict=True) for shape in pair]
        return [*clips, *steps[:4], *full[:1], *others, *steps[4:], *full[1:], *pooled]

    @cached_property
    def encoder_shapes(self) -> dict[str, list[EncoderShape]]:
        """Return the programs of each tower, smallest first, by the part of the parameters that holds its."""
        most = self._config.num_media_rows, self._config.num_video_frames
        return {part: encoder_shapes(tower.settings, *most, part) for part, tower in self._model.towers.items()}

    @property
    def clip_shapes(self) -> list[ClipShape]:
        """Return the program that encodes clips, in an encoder-decoder; none in other models."""
        return [ClipShape(self._config.num_frames)] if self._model.encoder else []

    @property
    def align_shapes(self) -> list[AlignShape]:
        """Return the programs that align transcripts, smallest first; none in a model that hears no clips.

        Each is compiled once it is first asked for.
        """
        return align_shapes(self._model, self._config.alignment_heads) if self._model.encoder else []

    def draft_programs(self) -> list[ProgramKey]:
        """Return the programs of a draft model, in the order in which it needs them; all its steps are plain."""
        return [*self._shapes(Sampling.PLAIN), Upkeep.MAKE_STATE]

    def steps(self) -> list[StepShape]:
        """Return the programs of steps that sample, in the same order."""
        return [shape for sampling in Sampling for shape in self._shapes(sampling)]

    def rare_programs(self) -> list[ProgramKey]:
        """Return the programs that many engines never need, and that are not held until then.

        On an accelerator a step would wait for the load, and the host has memory for all.
        """
        if self._config.platform != "cpu":
            return []
        pooled = self._pool_shapes(by_token=True) if self._config.pools_sequences else ()
        return [*self._shapes(Sampling.TRUNCATED), *self._shapes(Sampling.FULL), *pooled]

    def _shapes(self, sampling: Sampling) -> list[StepShape]:
        if not self._config.generates:
            return []
        shapes = (
            self.step_shape(x, sampling, has_chunks=has_chunks)
            for x in self._ordered_buckets()
            for has_chunks in (False, True)
        )
        return list(dict.fromkeys(shapes))

    def _pool_shapes(self, *, by_token: bool) -> list[PoolShape]:
        if not (self._config.pools_tokens if by_token else self._config.pools_sequences):
            return []
        return [self.pool_shape(bucket, by_token=by_token) for bucket in dict.fromkeys(self._ordered_buckets())]

    def _ordered_buckets(self) -> list[Bucket]:
        # The first steps are the largest, then come the decodes.
        order = [self.buckets[-1], *self.buckets]
        if self._config.batch_invariant:
            # The first is one that fits most first prompts, and runs quickly.
            stand_in = pick_bucket(self.buckets, min(_STAND_IN_TOKENS, self.buckets[-1].num_tokens), 1)
            order = [stand_in, self.buckets[0], *order]
        elif self.has_stand_ins:
            # The largest stands in for all, and the largest step of decodes for all of those.
            decodes = pick_bucket(self.buckets, self.max_rows, self.max_rows)
            order = [self.buckets[-1], decodes, *self.buckets]
        return order

    @property
    def batch_shapes(self) -> list[BatchShape]:
        """Return the shape of each bucket's steps, the smallest first."""
        return list(self._batch_shapes.values())

    def batch_shape(self, plan: StepPlan) -> BatchShape:
        """Return the smallest shape that holds a step."""
        num_tokens = num_token_rows(plan, self._config.row_alignment)
        return self._batch_shapes[pick_bucket(self.buckets, num_tokens, plan.num_rows)]

    def step_shape(self, bucket: Bucket, sampling: Sampling, *, has_chunks: bool = True) -> StepShape:
        """Return the program of a bucket, for steps with chunks of several tokens or without."""
        is_full = sampling is Sampling.FULL
        return StepShape(
            self._batch_shapes[bucket],
            sampling=sampling,
            # Full steps are rare, and not worth two programs.
            decodes_only=self._has_decode_programs
            and bucket.num_tokens == bucket.num_seqs
            and not (is_full or has_chunks),
            num_logprobs=max(1, self._config.max_logprobs) if is_full else 0,
            logprobs_mode=self._config.logprobs_mode,
            max_rows=self.max_rows,
        )

    def pool_shape(self, bucket: Bucket, *, by_token: bool) -> PoolShape:
        """Return the program of a bucket for steps that pool."""
        return PoolShape(self._batch_shapes[bucket], by_token)

    def larger[Shape: (StepShape, PoolShape)](self, shape: Shape) -> list[Shape]:
        """Return the programs that can run a program's steps too, by bucket, the smallest first.

        In a bucket those that sample more come last: they cost less than the rows of a larger bucket.
        """
        buckets = self.buckets[self.buckets.index(shape.batch.bucket) :]
        shapes: list[Any]
        if isinstance(shape, PoolShape):
            shapes = [self.pool_shape(bucket, by_token=shape.by_token) for bucket in buckets]
        else:
            kinds = list(Sampling)
            shapes = [
                self.step_shape(bucket, sampling, has_chunks=has_chunks)
                for bucket in buckets
                for sampling in kinds[kinds.index(shape.sampling) :]
                for has_chunks in ((False, True) if shape.decodes_only else (True,))
            ]
        return [each for each in dict.fromkeys(shapes) if each != shape]

    @property
    def largest_step(self) -> ProgramKey:
        """Return the step that takes the most memory."""
        bucket = self.buckets[-1]
        if self._config.generates:
            return self.step_shape(bucket, Sampling.PLAIN if self._config.reads is not None else Sampling.FULL)
        return self.pool_shape(bucket, by_token=self._config.pools_tokens)

    @property
    def media_width(self) -> int:
        """Return the numbers of a row of the feature cache, without towers those of an embedding; 0 for no cache."""
        if not self._model.towers:
            return self._model.config.hidden_size if self._config.takes_embeds else 0
        tower = next(iter(self._model.towers.values()))  # the rows of all have one width
        return tower.settings.output_size

    def _batch_shape(self, bucket: Bucket) -> BatchShape:
        max_blocks = -(-self._config.max_model_len // self._config.block_size)
        tiles = tuple(group.attention.tiles.query for group in self._config.groups)
        cross = [
            CrossShape(self._config.num_frames, self._config.kv_layout.clip_blocks, group.attention.tiles.query)
            for group in self._config.cross_groups[:1]
        ]
        arguments = tuple(extra_args(self._config.processors).items())
        attention_chunks = tuple(group.attention_chunk for group in self._config.groups)
        return BatchShape(
            bucket,
            max_blocks,
            tiles,
            attention_chunks,
            self._config.row_alignment,
            arguments,
            has_states=bool(self._config.states),
            max_drafts=self._config.max_drafts,
            has_media=self.media_width > 0,
            has_vectors=self._config.vectors_shape is not None,
            cross=cross[0] if cross else None,
            first_timestamp=rules.first_timestamp if (rules := self._config.transcript_rules) else None,
        )


def describe(key: ProgramKey) -> str:
    """Return a readable name of a program."""
    if isinstance(key, Upkeep):
        return key.value
    if isinstance(key, MoveShape):
        return key.describe()
    if isinstance(key, EncoderShape):
        return f"{key.num_slots} patches{' of sound' * (key.part == 'audio')}"
    if isinstance(key, ClipShape):
        return f"{key.num_frames} frames"
    if isinstance(key, AlignShape):
        return f"{key.num_tokens} tokens aligned"
    bucket = key.batch.bucket
    if isinstance(key, PoolShape):
        return f"{bucket.num_tokens} tokens of {bucket.num_seqs} sequences, pooled{' by token' * key.by_token}"
    kind = f"{key.sampling.value}{', decodes alone' * key.decodes_only}"
    return f"{bucket.num_tokens} tokens of {bucket.num_seqs} sequences, {kind}"
