"""Launch steps on the devices, from records of plain arrays.

A launch holds all that the programs read besides what the devices have already. The host that schedules sends the same
launches to every host of a mesh in the same order, so that all stay alike. msgspec encodes them, and an array as its
dtype, its shape and its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import msgspec
import numpy as np
from jax import Array

from jaxllm.execution.caches import Pools
from jaxllm.execution.encoders.alignment import AlignInputs, AlignShape
from jaxllm.execution.encoders.clips import ClipShape
from jaxllm.execution.encoders.patches import EncoderShape, batch_spec
from jaxllm.execution.mesh import place_replicated
from jaxllm.execution.options import running, tracing
from jaxllm.execution.packing import rare_specs
from jaxllm.execution.pooled_step import PoolShape
from jaxllm.execution.programs.background import Programs
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import ProgramKey, Upkeep
from jaxllm.execution.step import DeviceState, StepOutput, StepShape
from jaxllm.execution.tiers.host_array import HostArrays
from jaxllm.execution.tiers.move_shape import MoveShape
from jaxllm.execution.weights.target import named_leaves
from jaxllm.sampling.inputs import RareRules


class StepLaunch(msgspec.Struct, frozen=True, tag=True):
    """The launch of a step."""

    program: int
    """The index of the step's program among the model's."""
    ints: np.ndarray
    floats: np.ndarray
    rare: list[np.ndarray | None] | None
    """The fields of RareRules, each None if no row uses it; None instead of a list if the program reads none."""
    copies: list[np.ndarray]
    """Blocks to copy first, as int32 [group, 2, COPIES]: sources and targets."""
    counts: list[tuple[int, np.ndarray]]
    """Rows of the token counts to write first, uint16 [v], each with its index."""
    is_draft: bool = False
    """True for a step of the draft model."""


class AdapterLaunch(msgspec.Struct, frozen=True, tag=True):
    """The launch that writes an adapter into a slot; steps before it read the slot's old content."""

    slot: int
    arrays: list[np.ndarray]
    """The leaves of the arrays of one slot."""


class EncodeLaunch(msgspec.Struct, frozen=True, tag=True):
    """The launch that writes rows of an image or a video into the feature cache, or a clip's keys and values."""

    program: int
    """The index of the tower's program among the model's, or of the one that writes rows as they are."""
    arrays: list[np.ndarray]
    """The leaves of the tower's inputs, or rows, and the slots of the rows; a clip's spectrogram, and its blocks."""


_BESIDE = ("media", "steering")
"""The feature cache and the steering vectors, among what steps read besides weights and adapters."""

Launch = StepLaunch | AdapterLaunch | EncodeLaunch


def encode_array(value: Any) -> Any:
    """Return an array in a form that msgspec encodes."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} is not part of a launch")
    return value.dtype.name, value.shape, memoryview(np.ascontiguousarray(value).view(np.uint8).reshape(-1))


def decode_array(kind: type, value: Any) -> Any:
    """Return the array that `encode_array` encoded; it shares the message's memory."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} is not part of a launch")
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


class Launcher:
    """The state of one model on this process's devices: parameters, pools, token counts and the last step's tokens.

    No launch waits for the device: it begins there when the one before has ended.
    """

    def __init__(
        self,
        compiler: StepCompiler,
        programs: Programs[ProgramKey],
        load_params: Callable[[], Any],
        features_of: Launcher | None = None,
        early: Callable[[], Any] | None = None,
        vectors_lvd: np.ndarray | None = None,
    ) -> None:
        """Make the pools and load the parameters at the same time; they take about as long.

        `early`, if it is not None, returns the parameters the first time in place of `load_params`. A draft head reads
        the features in the pools of `features_of`, the launcher of the model it guesses for. `vectors_lvd` are steering
        vectors, number 0 all zeros.
        """
        self.compiler, self.programs = compiler, programs
        self._turn = threading.Lock()
        """The lock is held by the thread that launches: all devices of a mesh must have the same order."""
        self._features_of = features_of if compiler.config.reads is not None else None
        self._load_params = load_params
        with ThreadPoolExecutor(1) as executor:
            state = executor.submit(running()(self._make_state))
            if jax.process_count() > 1:  # all hosts launch in one order
                state.result()
            with tracing():
                self.params, self._encoders = self._split((early or load_params)())
        if vectors_lvd is not None:
            self.params["steering"] = place_replicated(compiler.mesh, vectors_lvd)
        # _encoders has the parameters of towers, or of an encoder, which no step reads.
        self._on_host: dict[str, Any] | None = None
        """The weights in the host's memory while they are not on the devices, if they are kept there."""
        self.has_new_weights = False
        """Whether the weights are others than `load_params` returns."""
        self._shared: set[int] = set()
        """The ids of the weights' arrays whose memory others have too: it is neither freed nor used again."""
        self._make_media()
        self.pools, self._previous_tokens, self._hidden = state.result()
        self._counts: Array | None = None
        """The token counts are made by the first step that needs them."""
        self._neutral: dict[int, RareRules] = {}
        """Rare inputs that nobody uses, by the number of rows: the same arrays each step, so that nothing is sent."""

    @running()
    def launch(self, launch: Launch) -> StepOutput | Array | None:
        """Run a launch and return at once, unless its program must be compiled first.

        A step returns its output, a pooling step its pooled rows, and others None.
        """
        with self._turn:
            try:
                if isinstance(launch, StepLaunch):
                    return self._step(launch)
                if isinstance(launch, EncodeLaunch):
                    self._encode(launch)
                else:
                    self._set_adapter(launch)
            except Exception as error:
                self._check_weights_alive(error)
                raise
            return None

    @running()
    def align(self, shape: AlignShape, inputs: AlignInputs) -> tuple[np.ndarray, np.ndarray]:
        """Return the outputs of a program that aligns a transcript, and wait for it. For any thread.

        It reads parameters alone, so that it may run between any steps, which go on while it is compiled.
        """
        program = self.programs.get(shape)
        with self._turn:
            outputs = program(self._encoders["encoder"], self.params, inputs)
        heard_tf, logprobs_t = map(np.asarray, outputs)
        return heard_tf, logprobs_t

    @running()
    def read_blocks(self, holder: int, block_ids: np.ndarray) -> tuple[Array, ...]:
        """Return the content of blocks, int32 [MOVED_BLOCKS], as steps so far leave it; -1 stands for none."""
        with self._turn:
            return self.programs.get(MoveShape(holder, fills=False))(self.pools, block_ids)

    @running()
    def fill_blocks(self, holder: int, block_ids: np.ndarray, content: tuple[Array, ...]) -> None:
        """Write to blocks what `read_blocks` returned, before any later step."""
        with self._turn:
            self.pools = self.programs.get(MoveShape(holder, fills=True))(self.pools, block_ids, content)

    def _step(self, launch: StepLaunch) -> StepOutput | Array:
        for pairs in launch.copies:
            groups = tuple((sources, targets) for sources, targets in pairs)
            self.pools = self.programs.get(Upkeep.COPY_BLOCKS)(self.pools, groups)
        for row, row_v in launch.counts:
            self._counts = self.programs.get(Upkeep.SET_COUNTS)(self._get_counts(), np.int32(row), row_v)
        key = self.programs.keys[launch.program]
        program = self.programs.get(key)
        if isinstance(key, PoolShape):
            self.pools, outputs = program(self.params, self.pools, launch.ints, launch.floats)
            return outputs
        assert isinstance(key, StepShape)
        rare = None if launch.rare is None else self._rare(launch.rare, key.batch.bucket.num_seqs)
        state = DeviceState(self.pools, None if rare is None else self._get_counts(), self._hidden)
        features = [] if self._features_of is None else [self._features_of.pools[-1]]
        state, output = program(self.params, state, self._previous_tokens, launch.ints, launch.floats, rare, *features)
        self.pools, self._hidden = state.pools, state.hidden_sd
        if rare is not None:
            self._counts = state.counts_cv
        self._previous_tokens = output.tokens_s
        return output

    def _set_adapter(self, launch: AdapterLaunch) -> None:
        assert self.compiler.model.adapter_shape is not None
        adapter = jax.tree.unflatten(jax.tree.structure(self.params["adapters"]), launch.arrays)
        program = self.programs.get(Upkeep.SET_ADAPTER)
        adapters = program(self.params["adapters"], np.int32(launch.slot), adapter)
        self.params = {**self.params, "adapters": adapters}

    def _encode(self, launch: EncodeLaunch) -> None:
        key = self.programs.keys[launch.program]
        if isinstance(key, ClipShape):
            self.pools = self.programs.get(key)(self._encoders["encoder"], self.params, self.pools, *launch.arrays)
            return
        program, media = self.programs.get(key), self.params["media"]
        *leaves, slots = launch.arrays
        if isinstance(key, EncoderShape):
            spec = batch_spec(self.compiler.model.towers[key.part], key)
            media = program(
                self._encoders[key.part], media, jax.tree.unflatten(jax.tree.structure(spec), leaves), slots
            )
        else:
            media = program(media, *leaves, slots)
        self.params = {**self.params, "media": media}

    def _make_media(self) -> None:
        """Make the feature cache, if the model has one."""
        if self.compiler.shapes.media_width:
            self.params = {**self.params, "media": self.programs.get(Upkeep.MAKE_MEDIA)()}

    @running()
    def reset(self) -> None:
        """Make the device's state anew: a step that failed or was cut off may have lost its donated arrays."""
        for array in jax.tree.leaves(self.pools):
            array.delete()  # there may be no room for two
        self.pools, self._previous_tokens, self._hidden = self._make_state()
        self._counts = None
        if "media" in self.params:
            self.params["media"].delete()
            self._make_media()

    @running()
    def copy_weights(self, host: HostArrays) -> None:
        """Copy the weights to the host's memory, for `drop_weights` and `bring_weights`."""
        self._on_host = jax.tree.map(host.of, self.weights())

    @running()
    def drop_weights(self) -> None:
        """Free the weights, and the adapters in their slots; nothing can be launched until `bring_weights`."""
        with self._turn:
            unshared = [array for array in jax.tree.leaves(self.weights()) if id(array) not in self._shared]
            _delete([unshared, self.params.get("adapters")])
            self._encoders, self._shared = {}, set()
            self.params = self._beside_weights()

    @running()
    def bring_weights(self) -> bool:
        """Put the weights on the devices again, from `copy_weights` or as at first; adapters' slots are empty.

        Weights that are there stay. Returns False, and does nothing, if there are none to bring: those that have been
        replaced and then dropped.
        """
        if self.weights():
            return True
        if self.has_new_weights and self._on_host is None:
            return False
        with tracing():
            kept = self._on_host
            weights = self._load_params() if kept is None else jax.tree.map(lambda array: array.put(), kept)
        params, self._encoders = self._split(weights)
        self.params, self._on_host = self.params | params, None
        return True

    @running()
    def put_weights(self, weights: dict[str, Any], shared: Iterable[Array]) -> None:
        """Take other weights for all later launches; adapters stay in their slots.

        The arrays in `shared` have memory that is others' too; the old ones that are not in use any more are freed as
        soon as nobody holds them.
        """
        with self._turn:
            adapters = self.params.get("adapters")
            params, self._encoders = self._split(weights, adapters)
            self.params = params | self._beside_weights()
            self._shared = {id(array) for array in shared}
            self._on_host, self.has_new_weights = None, True

    def lend_weights(self, lent: dict[str, Any]) -> None:
        """Take other arrays of the model that this one, a draft head, borrows."""
        with self._turn:
            self.params = self.params | lent

    def share_weights(self) -> dict[str, Any]:
        """Return the weights, whose memory belongs to the caller too from now on."""
        weights = self.weights()
        self._shared |= {id(array) for array in jax.tree.leaves(weights)}
        return weights

    def is_shared(self, array: Array) -> bool:
        """Return whether the memory of one of the weights' arrays is others' too."""
        return id(array) in self._shared

    @running()
    def drop_caches(self) -> None:
        """Free all that requests leave on the devices; nothing can be launched until `make_caches`."""
        with self._turn:
            _delete([self.pools, self._previous_tokens, self._hidden, self._counts, self._neutral])
            _delete(self.params.pop("media", None))
            no_pools: Pools = ()
            self.pools, self._hidden, self._counts = no_pools, None, None
            self._neutral.clear()

    @running()
    def make_caches(self) -> None:
        """Make empty caches after `drop_caches`."""
        self.pools, self._previous_tokens, self._hidden = self._make_state()
        self._make_media()

    def _split(self, weights: dict[str, Any], adapters: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what steps read of loaded weights, and what encoders read; without `adapters` slots are empty."""
        encoders = {part: weights[part] for part in self.compiler.model.specs.encoders}
        params = {part: value for part, value in weights.items() if part not in encoders}
        if self.compiler.model.adapter_shape is not None:
            params["adapters"] = self.programs.get(Upkeep.MAKE_ADAPTERS)() if adapters is None else adapters
        return params, encoders

    def _check_weights_alive(self, error: Exception) -> None:
        """Raise RuntimeError if a step has failed because someone has deleted an array of the weights."""
        for name, array in named_leaves(self.weights()).items():
            if array.is_deleted():
                message = f"the array {name!r} of the weights was deleted or donated: what update_weights() "
                raise RuntimeError(message + "has taken must be kept until the next update. Pass all again.") from error

    def weights(self) -> dict[str, Any]:
        """Return the weights on the devices, without the adapters; empty while there are none."""
        loaded = {part: value for part, value in self.params.items() if part not in ("adapters", *_BESIDE)}
        return loaded | self._encoders

    def _beside_weights(self) -> dict[str, Any]:
        """Return what steps read that stays when the weights go."""
        return {name: value for name, value in self.params.items() if name in _BESIDE}

    def _make_state(self) -> tuple[Pools, Array, Array | None]:
        """Return new pools, and tokens and hidden states in place of the previous step's."""
        pools, tokens, hidden = self.programs.get(Upkeep.MAKE_STATE)()
        self.compiler.caches.settle(pools)
        return pools, tokens, hidden

    def _get_counts(self) -> Array:
        counts = self._counts
        if counts is None:
            counts = self._counts = self.programs.get(Upkeep.MAKE_COUNTS)()
        return counts

    def _rare(self, arrays: list[np.ndarray | None], num_rows: int) -> RareRules:
        if num_rows not in self._neutral:
            compiler = self.compiler
            specs = rare_specs(num_rows, compiler.model.config.vocab_size, compiler.config.max_drafts)
            self._neutral[num_rows] = RareRules(*(place_replicated(compiler.mesh, spec.neutral()) for spec in specs))
        pairs = zip(arrays, self._neutral[num_rows], strict=True)
        return RareRules(*(unused if used is None else used for used, unused in pairs))


def _delete(tree: Any) -> None:
    """Free the memory of arrays on the devices, whoever holds them."""
    for array in jax.tree.leaves(tree):
        array.delete()
