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
from contextlib import ExitStack, contextmanager
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
from jaxllm.loading.read_ahead import ReadAhead
from jaxllm.models.params import HEAD_DIM, KV_HEADS, array_specs, split_axes, stored, unflatten
from jaxllm.models.quantization import METHODS, quantize
from pallas_kernels.weights import pack

if TYPE_CHECKING:
    from jaxllm.models.params import ArraySpec, ParamSpec
    from pallas_kernels.weights.held import Quantized

__all__ = ["check_names", "init_dummy", "load_params"]

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "embed.table", "lm_head.table"
_COMPARED_BYTES = 1 << 20
"""The number of bytes of two tables that are compared at once."""
_ALIGNMENT = 64
"""JAX on a CPU copies a buffer that is not aligned to this many bytes."""

_NO_THREADS = ReadAhead()

_FormatFor = Callable[[str], jax.sharding.Sharding | Format | None]
_Bounds = tuple[tuple[int, int], ...]
_Fill = Callable[[int, "Sequence[Piece]"], None]
"""A function that writes layer `int` of an array's parameters into pieces of it, or expert `int` of all layers."""


class Piece(NamedTuple):
    """The part of an array, or of one of its layers, on some devices: the elements within `bounds`."""

    array: np.ndarray
    bounds: _Bounds
    devices: tuple[Any, ...] = ()


def load_params(
    specs: Mapping[str, ParamSpec],
    checkpoint: Checkpoint,
    *,
    dtype: Any = None,
    format_for: _FormatFor | None = None,
    progress: bool = True,
    read_ahead: ReadAhead = _NO_THREADS,
) -> dict[str, Any]:
    """Read every parameter of a fetched checkpoint with checked names. Returns the arrays' nested dict.

    Host memory peaks at the parameters plus one tensor; on devices other than the CPU at one layer of one array plus a
    tensor. Arrays to be quantized are quantized on the device, one layer at a time. `dtype` replaces the specs' own;
    `format_for` returns the sharding for an array's path, with or without a layout; None is the default device. Each
    tensor is read once, and only the parts that this process's devices hold. An output head with the same numbers as
    the embedding becomes the same array. `read_ahead` reads files ahead, in other threads, except GGUF's.
    """
    started = time.perf_counter()
    sources = {source for spec in specs.values() for source in spec.sources}
    total = sum(checkpoint.tensors[source].num_bytes for source in sources)
    with ExitStack() as stack:
        show = stack.enter_context(_progress_bar(total, shown=progress and sys.stderr.isatty()))
        spans = (span for source in _in_order(specs) for span in checkpoint.spans(source))
        note = stack.enter_context(read_ahead.running(spans))

        def advance(num_bytes: int) -> None:
            show(num_bytes)
            note(num_bytes)

        placed = {}
        for path, array in array_specs(specs).items():
            where = format_for(path) if format_for else None
            if path == HEAD and _repeats_embedding(specs, checkpoint):
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


def _in_order(specs: Mapping[str, ParamSpec]) -> Iterator[str]:
    """Yield the tensors in the order that they are read in."""
    for array in array_specs(specs).values():
        for names in itertools.zip_longest(*(spec.sources for spec in array.params.values())):
            yield from dict.fromkeys(name for name in names if name is not None)


def _repeats_embedding(specs: Mapping[str, ParamSpec], checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint stores the embedding a second time, as the output head of a model that has one."""
    if not {EMBEDDING, HEAD} <= specs.keys():
        return False
    names = [specs[path].sources[0] for path in (EMBEDDING, HEAD)]
    first, second = (checkpoint.tensors[name] for name in names)
    is_alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    if not is_alike or any(checkpoint.format_of(name) is not None for name in names):
        return False
    # Most heads that differ do so in the first rows.
    rows, others = (checkpoint.read(name).view(np.uint8) for name in names)
    step = max(1, _COMPARED_BYTES // max(1, rows.shape[-1]))
    return all(np.array_equal(rows[i : i + step], others[i : i + step]) for i in range(0, len(rows), step))


def init_dummy(
    specs: Mapping[str, ParamSpec], seed: int, *, dtype: Any = None, format_for: _FormatFor | None = None
) -> dict[str, Any]:
    """Return small random parameters that depend only on the seed: N(0, 0.02), around 1 for norms."""
    # A repeated table of prime length: fast, and no two rows of a weight are alike.
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
    """Show the number of loaded bytes; yield the function that adds to it.

    tqdm's lock is shared by all threads, and a Ctrl-C in another bar may leave it locked for ever. This bar has its
    own.
    """
    if not shown:
        yield lambda _num_bytes: None
        return

    class Bar(tqdm):
        """A bar that shares no lock."""

    Bar.set_lock(threading.RLock())
    with Bar(total=total, desc="Loading weights", unit="B", unit_scale=True) as bar:
        yield bar.update


def _reader(array: ArraySpec, checkpoint: Checkpoint, advance: Callable[[int], object]) -> _Fill:
    """Return the function that fills one layer, or one expert, from the checkpoint."""

    def fill(number: int, pieces: Sequence[Piece]) -> None:
        for (source, index), specs in itertools.groupby(array.params.values(), lambda spec: _source(spec, number)):
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
    """Return a tensor, or the part of it (codes, scales) that the array holds."""
    if array.part is None:
        return checkpoint.read(source, index)
    assert array.format is not None
    if array.format.is_half:
        return checkpoint.read(source, index)
    part = checkpoint.read_part(source, array.part, index)
    return pack(part, array.format.bits) if array.part == "codes" and array.is_packed else part


def _source(spec: ParamSpec, number: int) -> tuple[str, int | None]:
    """Return the name of the tensor with a layer or expert, and the expert's index in it if it holds all experts.

    Experts are counted through all layers.
    """
    num_places = (spec.shape[0] if spec.stacked else 1) * (spec.num_experts or 1)
    # A tensor of all experts has an axis for them, even if there is only one expert.
    has_axis = spec.num_experts is not None and len(spec.hf_shape) > len(split_axes(spec.layout.partition("->")[0]))
    if len(spec.sources) == num_places and not has_axis:
        return spec.sources[number], None
    layer, expert = divmod(number, spec.num_experts or 1)
    return spec.sources[layer], expert


def _by_expert(fill: _Fill, num_experts: int) -> _Fill:
    """Return a function that fills one layer, from a function that fills one expert."""

    def fill_layer(layer: int, pieces: Sequence[Piece]) -> None:
        for expert in range(num_experts):
            held = [_part_of(piece, expert) for piece in pieces if expert in range(*piece.bounds[0])]
            if held:  # another host may hold it
                fill(layer * num_experts + expert, held)

    return fill_layer


def _fill_random(table: np.ndarray, array: ArraySpec, number: int, pieces: Sequence[Piece]) -> None:
    """Fill each parameter of a layer, or expert, with consecutive numbers of the table, from its own offset."""
    for path, spec in array.params.items():
        shape, parts = stored_shape(spec), list(own_pieces(spec, pieces))
        size = math.prod(shape)
        start = (zlib.crc32(path.encode()) + number * size) % len(table)
        if all(piece.array.shape == shape for piece in parts):
            for piece in parts:
                _tile(table, start, piece.array.reshape(-1))
            continue
        whole = np.empty(size, table.dtype)
        _tile(table, start, whole)
        for piece in parts:
            piece.array[...] = whole.reshape(shape)[stored_index(spec, piece.bounds)]


def own_pieces(spec: ParamSpec, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Return the parts of an array's pieces that belong to one of its parameters, as pieces of that parameter."""
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
    """Return the checkpoint's shape of one layer or expert, in our axis order: its KV heads are not repeated."""
    shape, axes = spec.shape[spec.num_lead :], spec.axes[spec.num_lead :]
    return tuple(size // spec.repeats if axis == KV_HEADS else size for axis, size in zip(axes, shape, strict=True))


def stored_index(spec: ParamSpec, bounds: _Bounds) -> Index:
    """Return the checkpoint's index of the elements within `bounds` of one layer or expert of ours."""

    def index(axis: str | None, bound: tuple[int, int]) -> slice | np.ndarray:
        if axis == KV_HEADS and spec.repeats > 1:
            return np.arange(*bound) // spec.repeats
        if axis == HEAD_DIM and spec.head_order is not None:
            return np.asarray(spec.head_order)[slice(*bound)]
        return slice(*bound)

    return tuple(itertools.starmap(index, zip(spec.axes[spec.num_lead :], bounds, strict=True)))


def _place(array: ArraySpec, dtype: Any, where: jax.sharding.Sharding | Format | None, fill: _Fill) -> Any:
    """Make one array, or its stored form, on the devices that `where` names or on the default device."""
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
    placed = assemble(array.shape, sharding, pieces, layout)
    if not array.is_rounded:
        return placed
    formats = _shardings(stored(array), sharding, layout)
    return jax.jit(_round(array), out_shardings=formats)(placed)


def _round(array: ArraySpec) -> Callable[[jax.Array], Quantized]:
    """Return the function that quantizes an array to its format."""
    assert array.format is not None
    return partial(quantize, num_inputs=array.num_inputs, form=array.format, is_packed=array.is_packed)


def _place_by_layer(array: ArraySpec, dtype: np.dtype, sharding: jax.sharding.Sharding, fill: _Fill) -> Any:
    """Allocate the array's stored form on the devices, and copy its layers there one by one."""
    layer_shape, layer_sharding = array.shape[1:], _of_axes(sharding, 1, None)
    specs = stored(replace(array, dtype=dtype))
    shardings = _shardings(specs, sharding)

    def read(layer: int) -> jax.Array:
        pieces = _make_pieces(layer_shape, dtype, layer_sharding)
        fill(layer, pieces)
        return assemble(layer_shape, layer_sharding, pieces)

    def set_layer(whole: Any, weight: jax.Array, layer: int) -> Any:
        some = _round(array)(weight) if array.is_rounded else weight
        return jax.tree.map(lambda stack, part: jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0), whole, some)

    params = jax.tree.map(lambda spec, where: jnp.zeros(spec.shape, spec.dtype, device=where), specs, shardings)
    program = jax.jit(set_layer, donate_argnums=0, out_shardings=shardings)
    for layer in range(array.shape[0]):
        params = program(params, read(layer), layer)
        # Without this the host would run ahead and hold every layer.
        jax.block_until_ready(params)
    return params


def shares_host_memory(sharding: jax.sharding.Sharding) -> bool:
    """Return whether an array on these devices can use the host array's memory."""
    return all(device.platform == "cpu" for device in sharding.device_set)


def placements(array: ArraySpec, where: jax.sharding.Sharding | Format) -> Any:
    """Return where an array lies that is placed as `where` says, or each of its stored parts, as `load_params` does."""
    layout, sharding = (where.layout, where.sharding) if isinstance(where, Format) else (None, where)
    assert layout is None or isinstance(layout, Layout)  # not left to the compiler
    assert sharding is not None
    return _shardings(stored(array), sharding, layout)


def _shardings(specs: Any, sharding: jax.sharding.Sharding, layout: Layout | None = None) -> Any:
    """Return the placements of an array's stored parts, from the array's own; only matrices have the layout."""

    def placed(spec: ArraySpec) -> jax.sharding.Sharding | Format:
        own_layout, part_sharding = _part_placing(spec, sharding, layout)
        return part_sharding if own_layout is None else Format(own_layout, part_sharding)

    return jax.tree.map(placed, specs)


def _part_placing(
    spec: ArraySpec, sharding: jax.sharding.Sharding, layout: Layout | None
) -> tuple[Layout | None, jax.sharding.Sharding]:
    """Return the placement of a part, from that of the whole array; a part of fewer axes has no layout."""
    count = len(spec.shape)
    part_sharding = _of_axes(sharding, 0, count if spec.axes[-1] is not None else count - 1)
    return layout if layout is not None and count == len(layout.major_to_minor) else None, part_sharding


def _of_axes(sharding: jax.sharding.Sharding, start: int, stop: int | None) -> jax.sharding.Sharding:
    """Return the sharding of some of an array's axes."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[start:stop]))


def _part_of(piece: Piece, index: int) -> Piece:
    """Return the entry of a piece at one index of its first axis."""
    # The ellipsis makes it a view even if no axis is left.
    return Piece(piece.array[index - piece.bounds[0][0], ...], piece.bounds[1:])


def _make_pieces(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> list[Piece]:
    """Allocate host memory for this process's devices; devices with the same part share it."""
    owners: dict[_Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        owners.setdefault(bounds, []).append(device)
    return [
        Piece(aligned_empty(tuple(stop - start for start, stop in bounds), dtype), bounds, tuple(devices))
        for bounds, devices in owners.items()
    ]


def assemble(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, pieces: Sequence[Piece], layout: Layout | None = None
) -> jax.Array:
    """Put the pieces on their devices. They are aligned, so a CPU device uses their memory and keeps them alive."""
    arrays = []
    for piece in pieces:
        piece.array.flags.writeable = False
        for device in piece.devices:
            where = device if layout is None else Format(layout, jax.sharding.SingleDeviceSharding(device))
            arrays.append(jax.device_put(piece.array, where))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose data start at a multiple of _ALIGNMENT."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
