"""Stream a checkpoint's tensors, one by one, into parameters of final dtype, layout and sharding."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from tqdm import tqdm

from jaxllm.loading.checkpoint import Checkpoint, held_format
from jaxllm.loading.layout import Index, parse_layout, write_tensor
from jaxllm.loading.names import check_names
from jaxllm.models.params import HEAD_DIM, KV_HEADS, array_specs, split_axes, stored, unflatten
from jaxllm.models.quantization import METHODS, quantize
from pallas_kernels.weights import pack

if TYPE_CHECKING:
    from jaxllm.models.params import ArraySpec, ParamSpec
    from pallas_kernels.weights.held import Quantized

__all__ = ["check_names", "init_dummy", "load_params"]

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "embed.table", "lm_head.table"
COMPARED_BYTES = 1 << 20
"""How much of two tables is compared at once."""
ALIGNMENT = 64
"""JAX on a CPU wants a buffer aligned to so many bytes, or it copies it."""

FormatFor = Callable[[str], jax.sharding.Sharding | Format | None]
Bounds = tuple[tuple[int, int], ...]
Fill = Callable[[int, "Sequence[Piece]"], None]
"""A function that writes layer `int` of an array's parameters into pieces of it; or expert `int` of all layers."""


class Piece(NamedTuple):
    """The part of an array, or of a layer of it, that some devices hold: the elements within `bounds`."""

    array: np.ndarray
    bounds: Bounds
    devices: tuple[Any, ...] = ()


def load_params(
    specs: Mapping[str, ParamSpec],
    checkpoint: Checkpoint,
    *,
    dtype: Any = None,
    format_for: FormatFor | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Read every parameter; the checkpoint has to be fetched, and its names checked. Returns the arrays' nested dict.

    Host memory peaks at the parameters plus one tensor; on other devices than CPU at a layer of one array plus a
    tensor. What is to be quantized is so where it will be, a layer at a time. `dtype` replaces the specs' own;
    `format_for` gives the sharding of an array's path, which may come with a layout; None is the default device. Of
    each tensor this reads what the process's devices hold, once. An output head is compared with the embedding first,
    and is the same array if it holds the same numbers.
    """
    started = time.perf_counter()
    sources = {source for spec in specs.values() for source in spec.sources}
    total = sum(checkpoint.tensors[source].num_bytes for source in sources)
    with _progress_bar(total, shown=progress and sys.stderr.isatty()) as advance:
        placed = {}
        for path, array in array_specs(specs).items():
            where = format_for(path) if format_for else None
            if path == HEAD and repeats_embedding(specs, checkpoint):
                placed[path] = placed[EMBEDDING]
                advance(checkpoint.tensors[specs[path].sources[0]].num_bytes)
                continue

            def place(spec: ArraySpec, part_dtype: Any, where: Any = where) -> Any:
                return _place(spec, part_dtype, where, _reader(spec, checkpoint, advance))

            first = next(iter(array.params.values())).sources[0]
            if array.format is not None and held_format(checkpoint, first) == array.format:
                placed[path] = jax.tree.map(lambda part: place(part, part.dtype), stored(array))
            else:
                placed[path] = place(array, dtype or array.dtype)
    params = unflatten(placed)
    jax.block_until_ready(params)
    logger.info("Loaded %.2f GB of weights in %.1f s", total / 1e9, time.perf_counter() - started)
    return params


def repeats_embedding(specs: Mapping[str, ParamSpec], checkpoint: Checkpoint) -> bool:
    """Say whether the checkpoint stores the embedding a second time, as the output head of a model that has one."""
    if not {EMBEDDING, HEAD} <= specs.keys():
        return False
    names = [specs[path].sources[0] for path in (EMBEDDING, HEAD)]
    first, second = (checkpoint.tensors[name] for name in names)
    is_alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    if not is_alike or any(checkpoint.format_of(name) is not None for name in names):
        return False
    # Most heads that differ do so from the first rows on.
    rows, others = (checkpoint.read(name).view(np.uint8) for name in names)
    step = max(1, COMPARED_BYTES // max(1, rows.shape[-1]))
    return all(np.array_equal(rows[i : i + step], others[i : i + step]) for i in range(0, len(rows), step))


def init_dummy(
    specs: Mapping[str, ParamSpec], seed: int, *, dtype: Any = None, format_for: FormatFor | None = None
) -> dict[str, Any]:
    """Return small random parameters, the same for the same seed: N(0, 0.02), around 1 for norms."""
    # A table of prime length, repeated: fast, and no two rows of a weight are alike.
    table = np.random.default_rng(seed).standard_normal(1_048_573, np.float32) * np.float32(0.02)
    placed = {}
    for path, array in array_specs(specs).items():
        where = format_for(path) if format_for else None
        center = 1 if path.endswith("norm.scale") else 0

        def place(spec: ArraySpec, dtype: Any, center: float = center, where: Any = where) -> Any:
            is_code = spec.part == "codes" and spec.format is not None and not spec.format.is_half
            numbers = np.abs(table * 99).astype(dtype) if is_code else np.asarray(table + center, dtype)
            return _place(spec, dtype, where, partial(_fill_random, numbers, spec))

        if array.format is None or array.format in METHODS.values():
            placed[path] = place(array, dtype or array.dtype)
        else:
            placed[path] = jax.tree.map(lambda part: place(part, part.dtype), stored(array))
    return unflatten(placed)


@contextmanager
def _progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show how many bytes are loaded; yield the function that counts them.

    tqdm's own lock is all threads', and a Ctrl-C in another bar may have left it locked for ever: no bar, or one with a
    lock of its own, waits for that.
    """
    if not shown:
        yield lambda _num_bytes: None
        return

    class Bar(tqdm):
        """A bar that shares no lock."""

    Bar.set_lock(threading.RLock())
    with Bar(total=total, desc="Loading weights", unit="B", unit_scale=True) as bar:
        yield bar.update


def _reader(array: ArraySpec, checkpoint: Checkpoint, advance: Callable[[int], object]) -> Fill:
    """Return the function that fills one layer from the checkpoint, or one expert of it."""

    def fill(place: int, pieces: Sequence[Piece]) -> None:
        for (source, index), specs in itertools.groupby(array.params.values(), lambda spec: _source(spec, place)):
            tensor, taken = _read(array, checkpoint, source, index), 0
            for spec in specs:
                part = tensor[spec.hf_index]
                taken += part.size
                for piece in own_pieces(spec, pieces):
                    within = stored_index(spec, piece.bounds)
                    write_tensor(part, parse_layout(spec.layout), stored_shape(spec), piece.array, within)
            checkpoint.release(source)
            if array.part in (None, "codes"):  # the codes stand for all parts
                info = checkpoint.tensors[source]
                num_places = 1 if index is None else info.shape[0]
                advance(info.num_bytes * taken // (tensor.size * num_places))

    return fill


def _read(array: ArraySpec, checkpoint: Checkpoint, source: str, index: int | None) -> np.ndarray:
    """Return a tensor, or what the array holds of it if that is one of its parts."""
    if array.part is None:
        return checkpoint.read(source, index)
    assert array.format is not None
    if array.format.is_half:
        return checkpoint.read(source, index)
    part = checkpoint.read_part(source, array.part, index)
    return pack(part, array.format.bits) if array.part == "codes" and array.is_packed else part


def _source(spec: ParamSpec, place: int) -> tuple[str, int | None]:
    """Return the tensor of a layer, or of one of its experts, counted through all layers; and the expert, if it is a
    tensor of all.
    """
    num_places = (spec.shape[0] if spec.stacked else 1) * (spec.num_experts or 1)
    # A tensor of all experts has an axis for them, even if there is one.
    has_axis = spec.num_experts is not None and len(spec.hf_shape) > len(split_axes(spec.layout.partition("->")[0]))
    if len(spec.sources) == num_places and not has_axis:
        return spec.sources[place], None
    layer, expert = divmod(place, spec.num_experts or 1)
    return spec.sources[layer], expert


def _by_expert(fill: Fill, num_experts: int) -> Fill:
    """Return the function that fills one layer, of one that fills one expert."""

    def fill_layer(layer: int, pieces: Sequence[Piece]) -> None:
        for expert in range(num_experts):
            own = [_part_of(piece, expert) for piece in pieces if expert in range(*piece.bounds[0])]
            if own:  # another host may have it
                fill(layer * num_experts + expert, own)

    return fill_layer


def _fill_random(table: np.ndarray, array: ArraySpec, place: int, pieces: Sequence[Piece]) -> None:
    """Fill each parameter of a layer, or expert, with consecutive numbers of the table, from a place of its own on."""
    for path, spec in array.params.items():
        shape, own = stored_shape(spec), list(own_pieces(spec, pieces))
        size = math.prod(shape)
        start = (zlib.crc32(path.encode()) + place * size) % len(table)
        if all(piece.array.shape == shape for piece in own):
            for piece in own:
                _tile(table, start, piece.array.reshape(-1))
            continue
        whole = np.empty(size, table.dtype)
        _tile(table, start, whole)
        for piece in own:
            piece.array[...] = whole.reshape(shape)[stored_index(spec, piece.bounds)]


def own_pieces(spec: ParamSpec, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Return what pieces of an array's layer have of one of its parameters, as pieces of that."""
    if spec.segment is None:
        yield from pieces
        return
    start, rows = spec.segment.start, spec.rows
    for piece in pieces:
        for view, shard in zip(piece.array, range(*piece.bounds[0]), strict=True):
            yield Piece(view[start : start + rows], ((shard * rows, (shard + 1) * rows), *piece.bounds[2:]))


def _tile(table: np.ndarray, start: int, out: np.ndarray) -> None:
    position = 0
    while position < len(out):
        piece = table[start : start + len(out) - position]
        out[position : position + len(piece)] = piece
        position, start = position + len(piece), 0


def stored_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of one layer's or expert's part as the checkpoint has it, in our order: no head is repeated."""
    shape, axes = spec.shape[spec.num_lead :], spec.axes[spec.num_lead :]
    return tuple(size // spec.repeats if axis == KV_HEADS else size for axis, size in zip(axes, shape, strict=True))


def stored_index(spec: ParamSpec, bounds: Bounds) -> Index:
    """Return where the checkpoint has what lies within `bounds` of one layer's or expert's part of ours."""

    def index(axis: str | None, bound: tuple[int, int]) -> slice | np.ndarray:
        if axis == KV_HEADS and spec.repeats > 1:
            return np.arange(*bound) // spec.repeats
        if axis == HEAD_DIM and spec.head_order is not None:
            return np.asarray(spec.head_order)[slice(*bound)]
        return slice(*bound)

    return tuple(itertools.starmap(index, zip(spec.axes[spec.num_lead :], bounds, strict=True)))


def _place(array: ArraySpec, dtype: Any, where: jax.sharding.Sharding | Format | None, fill: Fill) -> Any:
    """Make one array, or what is held of it, on the devices that `where` names or on the default device."""
    dtype = np.dtype(dtype)
    layout, sharding = (where.layout, where.sharding) if isinstance(where, Format) else (None, where)
    assert layout is None or isinstance(layout, Layout)  # not left to the compiler
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if array.part is not None:
        layout, sharding = _part_placing(array, sharding, layout)
    if array.num_experts is not None:
        fill = _by_expert(fill, array.num_experts)
    stacked = array.stacked
    if stacked and (array.is_rounded or not shares_host_memory(sharding)):
        return _place_by_layer(array, dtype, sharding, fill)
    pieces = _make_pieces(array.shape, dtype, sharding)
    for layer in range(array.shape[0] if stacked else 1):
        fill(layer, [_part_of(piece, layer) for piece in pieces] if stacked else pieces)
    placed = _assemble(array.shape, sharding, pieces, layout)
    if not array.is_rounded:
        return placed
    formats = _shardings(stored(array), sharding, layout)
    return jax.jit(_round(array), out_shardings=formats)(placed)


def _round(array: ArraySpec) -> Callable[[jax.Array], Quantized]:
    """Return the function that rounds an array's numbers to its format."""
    assert array.format is not None
    return partial(quantize, num_inputs=array.num_inputs, form=array.format, is_packed=array.is_packed)


def _place_by_layer(array: ArraySpec, dtype: np.dtype, sharding: jax.sharding.Sharding, fill: Fill) -> Any:
    """Allocate what is held of the array on the devices, and bring its layers there one by one."""
    layer_shape, layer_sharding = array.shape[1:], _of_axes(sharding, 1, None)
    specs = stored(replace(array, dtype=dtype))
    shardings = _shardings(specs, sharding)

    def read(layer: int) -> jax.Array:
        pieces = _make_pieces(layer_shape, dtype, layer_sharding)
        fill(layer, pieces)
        return _assemble(layer_shape, layer_sharding, pieces)

    def set_layer(whole: Any, weight: jax.Array, layer: int) -> Any:
        some = _round(array)(weight) if array.is_rounded else weight
        return jax.tree.map(lambda stack, part: jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0), whole, some)

    params = jax.tree.map(lambda spec, where: jnp.zeros(spec.shape, spec.dtype, device=where), specs, shardings)
    program = jax.jit(set_layer, donate_argnums=0, out_shardings=shardings)
    for layer in range(array.shape[0]):
        params = program(params, read(layer), layer)
        # Otherwise the host would run ahead, holding every layer.
        jax.block_until_ready(params)
    return params


def shares_host_memory(sharding: jax.sharding.Sharding) -> bool:
    """Say whether an array on these devices can be a host's array as it is."""
    return all(device.platform == "cpu" for device in sharding.device_set)


def _shardings(specs: Any, sharding: jax.sharding.Sharding, layout: Layout | None = None) -> Any:
    """Return how what is held of an array is placed, from how the array is; only matrices have the layout."""

    def placed(spec: ArraySpec) -> jax.sharding.Sharding | Format:
        own_layout, own = _part_placing(spec, sharding, layout)
        return own if own_layout is None else Format(own_layout, own)

    return jax.tree.map(placed, specs)


def _part_placing(
    spec: ArraySpec, sharding: jax.sharding.Sharding, layout: Layout | None
) -> tuple[Layout | None, jax.sharding.Sharding]:
    """Return how a part is placed, from how the whole array is; a part that is no matrix as that has no layout."""
    count = len(spec.shape)
    own = _of_axes(sharding, 0, count if spec.axes[-1] is not None else count - 1)
    return layout if layout is not None and count == len(layout.major_to_minor) else None, own


def _of_axes(sharding: jax.sharding.Sharding, start: int, stop: int | None) -> jax.sharding.Sharding:
    """Return how what has only some of an array's axes is placed."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[start:stop]))


def _part_of(piece: Piece, place: int) -> Piece:
    """Return what a piece has at one place of its first axis."""
    return Piece(piece.array[place - piece.bounds[0][0]], piece.bounds[1:])


def _make_pieces(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> list[Piece]:
    """Allocate what this process's devices hold; devices that hold the same share it."""
    owners: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        owners.setdefault(bounds, []).append(device)
    return [
        Piece(aligned_empty(tuple(stop - start for start, stop in bounds), dtype), bounds, tuple(devices))
        for bounds, devices in owners.items()
    ]


def _assemble(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, pieces: Sequence[Piece], layout: Layout | None = None
) -> jax.Array:
    """Put the pieces on their devices; aligned, so that a CPU device takes them as they are and keeps them alive."""
    arrays = []
    for piece in pieces:
        piece.array.flags.writeable = False
        for device in piece.devices:
            where = device if layout is None else Format(layout, jax.sharding.SingleDeviceSharding(device))
            arrays.append(jax.device_put(piece.array, where))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose data start at a multiple of ALIGNMENT."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
