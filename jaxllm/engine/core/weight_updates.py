"""Replace the weights of a model, or of its draft model, while the engine stays: an update of one part or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxllm.engine.transport.core_client import FIRST_VERSION
from jaxllm.engine.transport.handed import HANDOVER
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.launcher import Launcher
from jaxllm.execution.mesh import param_format
from jaxllm.execution.options import tracing
from jaxllm.execution.weights.target import WeightTarget
from jaxllm.execution.weights.update import WeightUpdate
from jaxllm.loading.checkpoint import held_format
from jaxllm.loading.load import check_names, load_params
from jaxllm.loading.open import open_checkpoint
from jaxllm.loading.read_ahead import ReadAhead
from jaxllm.models.model import Model
from jaxllm.models.params import ParamSpec, array_specs, unflatten
from jaxllm.models.quantization import METHODS
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.model import lent_arrays

_NO_WEIGHTS = "The engine has no weights: those of the last update are gone. Call update_weights() with all of them."


class Updated(NamedTuple):
    """A model whose weights can be replaced: the engine's own, or its draft model."""

    config: EngineConfig
    model: Model
    specs: Mapping[str, ParamSpec]
    launcher: Launcher


class WeightUpdates:
    """Takes new weights in and puts them in place. `add` may be called in any thread; the others between steps."""

    def __init__(self, main: Updated, draft: Updated | None = None) -> None:
        self._main, self._draft = main, draft
        self._targets: dict[int, WeightTarget] = {}
        self._begun: tuple[Updated, WeightUpdate] | None = None
        self.version: str | int = FIRST_VERSION
        self.are_lost = False
        """Whether there are no weights to run."""

    def start(self, *, of_draft: bool) -> None:
        """Begin an update; one that was begun before is dropped. Raises VLLMValidationError where none is possible."""
        if jax.process_count() > 1:
            message = "the weights of a model over several hosts are not replaced: make a new engine from a checkpoint."
            raise VLLMValidationError(message, parameter="nnodes", value=jax.process_count())
        chosen = self._draft if of_draft else self._main
        if chosen is None:
            message = "there is no draft model: speculative_config names one."
            raise VLLMValidationError(message, parameter="speculative_config")
        self._begun = chosen, WeightUpdate(self._target(chosen), chosen.model.specs.ignored_tensors)

    def add(self, weights: Any) -> None:
        """Take in arrays, or the weights in the folder that a string names. Nothing changes if they are refused."""
        chosen, update = self._current()
        with tracing():
            if isinstance(weights, str):
                update.add_loaded(_load(chosen, self._target(chosen), weights))
            else:
                update.add(weights)

    def check(self) -> None:
        """Raise VLLMValidationError if the update is not complete."""
        chosen, update = self._current()
        update.check(needs_all=not chosen.launcher.weights())

    def finish(self, version: str | int | None = None) -> None:
        """Put the new weights in place of the old ones, once no step is in flight; None leaves the version.

        If this fails, as for lack of memory, the weights may be lost: `are_lost` says so.
        """
        chosen, update = self._current()
        try:
            self._replace(chosen, update)
        finally:
            self.look()
        self._begun = None
        if version is not None:
            self.version = version

    def _replace(self, chosen: Updated, update: WeightUpdate) -> None:
        launcher, target = chosen.launcher, self._target(chosen)
        held = launcher.weights()
        values = target.flat(held) if held else {}
        counts = Counter(id(leaf) for each in self._launchers() for leaf in jax.tree.leaves(each.weights()))
        shared = [leaf for leaf in jax.tree.leaves(values) if launcher.is_shared(leaf)]
        with tracing():
            for path in sorted(update.paths):
                old = values.get(path)
                leaves = jax.tree.leaves(old)
                is_own = all(counts[id(leaf)] == 1 and not launcher.is_shared(leaf) for leaf in leaves)
                values[path], is_shared = update.make(path, old if is_own else None)
                if is_shared:
                    shared += jax.tree.leaves(values[path])
        jax.block_until_ready(values)
        lent = lent_arrays(chosen.model, self._main.launcher.params) if chosen is self._draft else {}
        launcher.put_weights(unflatten(values) | lent, shared)
        if chosen is self._main and self._draft is not None:
            draft = self._draft
            draft.launcher.bring_weights()
            draft.launcher.lend_weights(lent_arrays(draft.model, launcher.params))

    @property
    def has_begun(self) -> bool:
        """Return whether an update has begun."""
        return self._begun is not None

    def drop(self) -> None:
        """Forget an update that was begun."""
        self._begun = None

    def get(self) -> dict[str, Any]:
        """Return the model's weights, as the pytree that `add` takes. Raises VLLMValidationError if there are none."""
        weights = self._main.launcher.weights()
        if not weights:
            raise VLLMValidationError("the weights are not on the device now.", parameter="weights")
        return self._main.launcher.share_weights()

    def look(self) -> None:
        """Note in `are_lost` whether a model's arrays are gone, as after a sleep or an update that failed."""
        weights = [launcher.weights() for launcher in self._launchers()]
        self.are_lost = not all(weights) or any(array.is_deleted() for array in jax.tree.leaves(weights))

    def _launchers(self) -> list[Launcher]:
        return [each.launcher for each in (self._main, self._draft) if each is not None]

    def _current(self) -> tuple[Updated, WeightUpdate]:
        if self._begun is None:
            raise VLLMValidationError("no update has begun: call start_weight_update() first.", parameter="weights")
        return self._begun

    def _target(self, chosen: Updated) -> WeightTarget:
        key = id(chosen)
        if key not in self._targets:
            self._targets[key] = WeightTarget(chosen.specs, chosen.config.mesh)
        return self._targets[key]


class HoldsWeights:
    """The base of cores, with the calls about weights."""

    _weights: WeightUpdates | None
    """None once the core is shut down, or if its weights stay."""

    def start_weight_update(self, of_draft: bool = False) -> None:
        """Begin to take in new weights, of the draft model if so; an update that was begun before is dropped.

        Raises VLLMValidationError where there is no such model, and for several hosts.
        """
        self._get_weights().start(of_draft=of_draft)

    def update_weights(self, weights: Any) -> None:
        """Take in a part of the new weights: arrays, or those in the folder that a string names. For any thread.

        A number stands for arrays that are handed over. Steps read the old weights. Raises VLLMValidationError, and
        takes nothing in, for what does not fit.
        """
        self._get_weights().add(HANDOVER.value(weights) if isinstance(weights, int) else weights)

    def is_updating_weights(self) -> bool:
        """Return whether an update has begun that is neither finished nor dropped."""
        return self._get_weights().has_begun

    def drop_weight_update(self) -> None:
        """Forget the weights that have been taken in and not put in place."""
        self._get_weights().drop()

    def get_weights(self) -> Any:
        """Return the weights, which the caller owns too from now on; for callers in the core's process."""
        return self._get_weights().get()

    def set_weight_version(self, version: str | int) -> None:
        """Set the version of the weights."""
        self._get_weights().version = version

    def get_weight_version(self) -> str | int:
        """Return the version of the weights, "default" before one is set."""
        return self._get_weights().version

    def _check_weights(self) -> None:
        """Raise VLLMValidationError if there are no weights to run."""
        if self._weights is not None and self._weights.are_lost:
            raise VLLMValidationError(_NO_WEIGHTS, parameter="weights")

    def _look_at_weights(self) -> None:
        """Find out whether there are weights to run, after a change of what the devices hold."""
        if self._weights is not None:
            self._weights.look()

    def _get_weights(self) -> WeightUpdates:
        if self._weights is None:
            raise RuntimeError("This engine was shut down: make a new one.")
        return self._weights


def _load(chosen: Updated, target: WeightTarget, path: str) -> dict[str, Any]:
    """Return the arrays of a folder's weights by path. Raises VLLMValidationError for those of another model."""
    args = chosen.config.args
    load_format = "auto" if args.load_format == "dummy" else args.load_format
    checkpoint = open_checkpoint(path, load_format=load_format)
    model_specs = chosen.model.specs
    specs = model_specs.all_param_specs(checkpoint.tensors)
    specs = {name: spec for name, spec in specs.items() if name not in model_specs.lent}
    check_names(specs, checkpoint, ignored=model_specs.ignored_tensors)
    arrays = array_specs(specs)
    for name in sorted({*arrays, *target.arrays}):
        new, old = arrays.get(name), target.arrays.get(name)
        if new is None or old is None or (new.shape, new.format) != (old.shape, old.format):
            message = f"{path}: its array {name!r} is not as the engine's, so that another engine is needed for it."
            raise VLLMValidationError(message, parameter="weights_path", value=path)
        first = next(iter(new.params.values())).sources[0]
        if new.format not in (None, *METHODS.values(), held_format(checkpoint, first)):
            message = f"{path}: {first!r} is not held as {new.format.name if new.format else ''}, as the engine's is."
            raise VLLMValidationError(message, parameter="weights_path", value=path)
    checkpoint.fetch()
    mesh = chosen.config.mesh
    params = load_params(
        specs,
        checkpoint,
        format_for=lambda name: param_format(mesh, arrays[name]),
        progress=args.use_tqdm_on_load,
        read_ahead=ReadAhead(args.num_reading_threads, args.safetensors_prefetch_block_size),
    )
    return target.flat(params)
