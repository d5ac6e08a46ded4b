"""New weights of one model, in one part or several, until they take the place of the old ones."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.weights.conversion import can_convert
from jaxllm.execution.weights.target import WeightTarget, check_alive, named_leaves, sources_of_array

logger = logging.getLogger(__name__)

_HEAD = "lm_head.weight"
_SHOWN = 3
"""The most names that an error lists."""


class WeightUpdate:
    """Collects new weights and checks them; nothing changes before `make`.

    Weights are HF's tensors by name, a pytree like the model's own, or arrays that the loader has made. Those that are
    not there stay as they are; but of the tensors of one array all are needed.
    """

    def __init__(self, target: WeightTarget, ignored: Collection[str] = ()) -> None:
        """Collect weights like `target`; HF names that match the globs `ignored` are of nothing that the model has."""
        self._target, self._ignored = target, ignored
        self._tensors: dict[str, Any] = {}
        self._leaves: dict[str, Any] = {}
        self._numbers: dict[str, Any] = {}
        """Arrays of plain numbers, by path, for those that are held in a quantized form."""
        self._loaded: dict[str, Any] = {}

    def add(self, weights: Mapping[str, Any]) -> None:
        """Add HF's tensors by name, or some of the model's pytree, whose nodes tell it apart.

        Raises VLLMValidationError, and adds nothing, for names, shapes, kinds of numbers and arrays that do not fit.
        """
        if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
            message = "weights must be a mapping of HF's names, or a pytree as get_weights() returns it, got "
            raise VLLMValidationError(message + f"{type(weights).__name__}.", parameter="weights")
        is_flat = all(_is_array(value) for value in weights.values())
        (self._add_tensors if is_flat else self._add_tree)(weights)

    def add_loaded(self, arrays: Mapping[str, Any]) -> None:
        """Add arrays that the loader has made, by path."""
        self._loaded.update(arrays)

    def check(self, *, needs_all: bool = False) -> None:
        """Raise VLLMValidationError if an array lacks some of its tensors or parts, or has been deleted meanwhile.

        With `needs_all` every array of the model must be there.
        """
        for path, array in self._target.arrays.items():
            sources = sources_of_array(array)
            self._check_together(path, sources, self._tensors, "tensor")
            self._check_together(path, self._names_of(path), self._leaves, "array")
        for name, value in (self._tensors | self._leaves | self._numbers).items():
            check_alive(name, value)
        missing = [path for path in self._target.arrays if path not in self.paths] if needs_all else []
        if missing:
            message = f"{len(missing)} arrays are missing, {missing[0]!r} the first: the old weights are not on the "
            raise VLLMValidationError(message + "device, so that an update must bring all.", parameter="weights")

    @property
    def paths(self) -> set[str]:
        """Return the paths of the arrays that change."""
        of_tensors = {path for name in self._tensors for path in self._target.owners[name]}
        of_leaves = {self._target.leaves[name].path for name in self._leaves}
        return of_tensors | of_leaves | self._numbers.keys() | self._loaded.keys()

    def make(self, path: str, old: Any = None) -> tuple[Any, bool]:
        """Return the new value of an array, and whether its memory is that of an array that was passed.

        `old`, if it is not None, is a value whose memory may be used for the new one.
        """
        target, array, where = self._target, self._target.arrays[path], self._target.where[path]
        if path in self._loaded:
            return self._loaded[path], False
        if path in self._numbers:
            numbers = target.bring(self._numbers[path])
            return target.conversions.hold(array, numbers, where), False
        names = [name for name in self._names_of(path) if name in self._leaves]
        if names:
            made = [target.adopt(target.leaves[name], self._leaves[name]) for name in names]
            structure = jax.tree.structure(where)
            return jax.tree.unflatten(structure, [value for value, _ in made]), any(same for _, same in made)
        tensors = {name: target.bring(self._tensors[name]) for name in sources_of_array(array)}
        return target.conversions.run(array, where, tensors, old), False

    def _names_of(self, path: str) -> list[str]:
        """Return the names of an array's leaves, in the order of its stored form."""
        return [name for name, leaf in self._target.leaves.items() if leaf.path == path]

    def _add_tensors(self, tensors: Mapping[str, Any]) -> None:
        known = {name: value for name, value in tensors.items() if name in self._target.specs}
        others = [name for name in tensors if name not in known]
        unknown = [name for name in others if not any(fnmatchcase(name, each) for each in self._ignored)]
        if unknown:
            hint = f"it has {_listed(self._target.specs)}"
            if unknown[0] == _HEAD and "lm_head.table" not in self._target.arrays:
                hint = "its embedding is its output head too (tie_word_embeddings)"
            raise _refusal("the model has no tensor", unknown, hint)
        for name, value in known.items():
            spec = self._target.specs[name]
            _check_array(name, value, spec.hf_shape, spec.dtype)
            for path in self._target.owners[name]:
                if not can_convert(self._target.arrays[path]):
                    form = self._target.arrays[path].format
                    assert form is not None
                    reason = f"is held in the checkpoint's own format, {form.name}, which is not made of plain numbers"
                    hint = "pass it as get_weights() returns it, or weights_path with such a checkpoint"
                    raise VLLMValidationError(f"{name!r} {reason}: {hint}.", parameter="weights", value=name)
                self._note_rounding(path, name, value)
        self._tensors.update({name: _kept(value) for name, value in known.items()})

    def _add_tree(self, tree: Mapping[str, Any]) -> None:
        leaves = named_leaves(tree)
        numbers = {name: value for name, value in leaves.items() if self._is_numbers(name)}
        unknown = [name for name in leaves if name not in self._target.leaves and name not in numbers]
        if unknown:
            raise _refusal("the model has no array", unknown, f"it has {_listed(self._target.leaves)}")
        for name, value in leaves.items():
            spec = self._target.arrays[name] if name in numbers else self._target.leaves[name].spec
            _check_array(name, value, spec.shape, spec.dtype)
            if name in numbers:
                self._note_rounding(name, name, value)
        self._numbers.update({name: _kept(value) for name, value in numbers.items()})
        self._leaves.update({name: _kept(value) for name, value in leaves.items() if name not in numbers})

    def _note_rounding(self, path: str, name: str, value: Any) -> None:
        """Log once that numbers are rounded to the checkpoint's format, though steps compute with more digits."""
        array, target = self._target.arrays[path], self._target
        if array.format is None or not array.format.is_half or target.is_rounding_noted:
            return
        held = jnp.dtype(array.format.device_dtype("codes", packed=array.is_packed))
        if min(jnp.dtype(array.dtype).itemsize, value.dtype.itemsize) > held.itemsize:
            target.is_rounding_noted = True
            message = "%r is rounded to %s, as the checkpoint holds it: so are all such matrices, in each update"
            logger.warning(message, name, held.name)

    def _is_numbers(self, name: str) -> bool:
        """Return whether this is the path of an array that is rounded to a quantized form."""
        array = self._target.arrays.get(name)
        return array is not None and array.format is not None and can_convert(array)

    def _check_together(self, path: str, names: Iterable[str], present: Mapping[str, Any], kind: str) -> None:
        names = list(names)
        missing = [name for name in names if name not in present]
        if missing and len(missing) < len(names):
            passed = next(name for name in names if name in present)
            message = f"{missing[0]!r} is missing: with {passed!r} it is a part of {path!r}, which is one array"
            more = f", as are {len(missing) - 1} more" if len(missing) > 1 else ""
            raise VLLMValidationError(f"{message}{more}. Pass every {kind} of it.", parameter="weights")


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _kept(value: Any) -> Any:
    """Return the array itself, or a copy of one in the host's memory, whose owner may change it."""
    return value if isinstance(value, jax.Array) else np.array(value)


def _check_array(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise VLLMValidationError for what is no array, or one of another shape or kind of numbers."""
    if not _is_array(value):
        message = f"{name!r} is a {type(value).__name__}, not an array of JAX or numpy."
        raise VLLMValidationError(message, parameter="weights", value=name)
    check_alive(name, value)
    if tuple(value.shape) != tuple(shape):
        message = f"{name!r} has shape {list(value.shape)}, the model needs {list(shape)}."
        raise VLLMValidationError(message, parameter="weights", value=name)
    kinds = jnp.floating, jnp.integer
    is_alike = value.dtype == dtype or any(
        jnp.issubdtype(value.dtype, kind) and jnp.issubdtype(dtype, kind) for kind in kinds
    )
    if not is_alike:
        message = f"{name!r} has dtype {value.dtype}, the model needs {jnp.dtype(dtype).name}."
        raise VLLMValidationError(message, parameter="weights", value=name)


def _refusal(label: str, names: list[str], hint: str) -> VLLMValidationError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    message = f"{label} {names[0]!r}{more}; {hint}."
    return VLLMValidationError(message, parameter="weights", value=names[0])


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
