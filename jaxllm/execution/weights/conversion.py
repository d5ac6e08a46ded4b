"""Make a model's arrays of a checkpoint's tensors on the devices, with programs that are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.loading.layout import parse_layout
from jaxllm.loading.load import stored_shape
from jaxllm.models.params import HEAD_DIM, KV_HEADS, ArraySpec, ParamSpec, split_axes, stored
from jaxllm.models.quantization import METHODS, quantize
from pallas_kernels.weights.held import Quantized


def sources_of(spec: ParamSpec, layer: int) -> tuple[str, ...]:
    """Return the tensors of one layer of a parameter: one, or one for each expert."""
    count = len(spec.sources) // (spec.shape[0] if spec.stacked else 1)
    return spec.sources[layer * count : (layer + 1) * count]


def can_convert(array: ArraySpec) -> bool:
    """Return whether the array's form can be made of plain numbers: not the codes of a quantized checkpoint."""
    return array.format is None or array.format.is_half or array.format in METHODS.values()


class _Inputs(NamedTuple):
    """The tensors of one layer of an array, each one once, and the ones among them that each parameter is made of."""

    names: tuple[str, ...]
    positions: tuple[tuple[int, ...], ...]


class Conversions:
    """The programs that make arrays of tensors; arrays that are alike share one."""

    def __init__(self) -> None:
        self._programs: dict[Any, Callable[..., Any]] = {}

    def run(self, array: ArraySpec, where: Any, tensors: Mapping[str, Array], old: Any = None) -> Any:
        """Return an array, or its stored form, placed as the tree `where` says.

        `tensors` are HF's, on the array's devices. `old` is donated, if it is not None: an array of the same form.
        """
        inputs = [_inputs(array, layer) for layer in range(array.shape[0] if array.stacked else 1)]
        arguments = [[tensors[name] for name in each.names] for each in inputs]
        convert = partial(_convert, _alike(array), inputs[0].positions)
        if not array.stacked:
            return self._program((_key(array), "whole"), convert, out_shardings=where)(*arguments)

        def set_layer(whole: Any, layer: Array, some: list[Array]) -> Any:
            return jax.tree.map(
                lambda stack, part: jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0), whole, convert(some)
            )

        def make_zeros() -> Any:
            return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), stored(array))

        whole = self._program((_key(array), "zeros"), make_zeros, out_shardings=where)() if old is None else old
        program = self._program((_key(array), "layer"), set_layer, donate_argnums=0, out_shardings=where)
        for layer, some in enumerate(arguments):
            whole = program(whole, np.int32(layer), some)
        return whole

    def cast(self, array: Array, dtype: Any, where: Any) -> Array:
        """Return an array in another dtype, placed as `where` says, on the devices that it is on."""

        def cast(numbers: Array) -> Array:
            return numbers.astype(dtype)

        return self._program(("cast", str(dtype), where), cast, out_shardings=where)(array)

    def hold(self, spec: ArraySpec, numbers: Array, where: Any) -> Any:
        """Return the stored form of an array's numbers, which have its shape."""
        return self._program((_key(spec), "hold"), partial(_held, _alike(spec)), out_shardings=where)(numbers)

    def _program(self, key: Any, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if key not in self._programs:
            self._programs[key] = jax.jit(function, **options)
        return self._programs[key]


def _inputs(array: ArraySpec, layer: int) -> _Inputs:
    needed = [sources_of(spec, layer) for spec in _in_order(array)]
    names = tuple(dict.fromkeys(name for some in needed for name in some))
    places = {name: place for place, name in enumerate(names)}
    return _Inputs(names, tuple(tuple(places[name] for name in some) for some in needed))


def _in_order(array: ArraySpec) -> list[ParamSpec]:
    """Return the parameters of an array, in the order of their rows."""
    return sorted(array.params.values(), key=lambda spec: spec.segment.start if spec.segment else 0)


def _alike(array: ArraySpec) -> ArraySpec:
    """Return the spec without names, the same for all arrays that one program makes."""

    def nameless(spec: ParamSpec) -> ParamSpec:
        segment = None if spec.segment is None else spec.segment._replace(array="")
        return replace(spec, sources=(), segment=segment)

    return replace(array, params={str(place): nameless(spec) for place, spec in enumerate(_in_order(array))})


def _key(array: ArraySpec) -> Any:
    """Return what the programs of an array depend on, besides the tensors' shapes."""
    alike = _alike(array)
    return repr(replace(alike, params={})), repr(alike.params), tuple(each.positions for each in [_inputs(array, 0)])


def _convert(array: ArraySpec, positions: Sequence[Sequence[int]], tensors: Sequence[Array]) -> Any:
    """Return one layer of an array, or an array that has no layers, in its stored form."""
    lead = array.num_lead - array.stacked
    parts = []
    for spec, places in zip(array.params.values(), positions, strict=True):
        part = _parameter(spec, [tensors[place] for place in places])
        if spec.segment is not None:
            part = part.reshape(*part.shape[:lead], spec.segment.num_shards, spec.rows, *part.shape[lead + 1 :])
        parts.append(part.astype(array.dtype))
    return _held(array, parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=lead + 1))


def _parameter(spec: ParamSpec, tensors: Sequence[Array]) -> Array:
    """Return one layer of a parameter, with the axis of its experts if it has any."""
    if spec.num_experts is None:
        return _part(spec, tensors[0])
    has_axis = len(spec.hf_shape) > len(split_axes(spec.layout.partition("->")[0]))
    return jax.vmap(partial(_part, spec))(tensors[0] if has_axis else jnp.stack(tensors))


def _part(spec: ParamSpec, tensor: Array) -> Array:
    """Return the parameter, of one layer and expert, in a tensor."""
    index = tuple(np.asarray(each) if isinstance(each, tuple) else each for each in spec.hf_index)
    layout = parse_layout(spec.layout)
    sizes = dict(zip(layout.ours, stored_shape(spec), strict=True))
    split = tensor[index].reshape([sizes[letter] for letter in layout.theirs])
    part = split.transpose([layout.theirs.index(letter) for letter in layout.ours])
    for axis, name in enumerate(spec.axes[spec.num_lead :]):
        if name == KV_HEADS and spec.repeats > 1:
            part = jnp.repeat(part, spec.repeats, axis=axis)
        elif name == HEAD_DIM and spec.head_order is not None:
            part = jnp.take(part, np.asarray(spec.head_order), axis=axis)
    return part


def _held(array: ArraySpec, numbers: Array) -> Any:
    """Return the stored form of the numbers of an array, or of one of its layers."""
    form = array.format
    if form is None:
        return numbers.astype(array.dtype)
    if not form.is_half:
        return quantize(numbers.astype(array.dtype), array.num_inputs, form, is_packed=array.is_packed)
    rows = numbers.shape[: numbers.ndim - array.num_inputs]
    codes = numbers.astype(form.device_dtype("codes", packed=array.is_packed)).reshape(*rows, -1)
    return Quantized({"codes": codes}, form, array.is_packed)
