"""Stream a checkpoint's tensors, one by one, into parameters of final dtype, layout and sharding."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.layout import Index, parse_layout, write_tensor
from jaxllm.loading.names import check_names
from jaxllm.models.model import unflatten

if TYPE_CHECKING:
    from jaxllm.models.model import ParamSpec

__all__ = ["check_names", "init_dummy", "load_params"]

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes to which JAX on CPU wants a buffer aligned, or it copies it."""

ShardingFor = Callable[[str], jax.sharding.Sharding | None]
Fill = Callable[[np.ndarray, int, Index], None]
"""Writes layer `int` of one parameter, or its part under `Index`, into an array."""


def load_params(
    specs: Mapping[str, ParamSpec],
    checkpoint: Checkpoint,
    *,
    dtype: Any = None,
    sharding_for: ShardingFor | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Read every parameter; the checkpoint has to be fetched, and its names checked. Returns the nested dict.

    Host memory peaks at the parameters (a single one of them, on other devices than CPU) plus one tensor.
    `dtype` replaces the specs' own; `sharding_for` gives a path's sharding, whose devices read their parts only.
    """
    started = time.perf_counter()
    total = sum(checkpoint.tensors[source].num_bytes for spec in specs.values() for source in spec.sources)
    hidden = None if progress else True  # None: shown on a terminal only
    with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=hidden) as bar:
        placed = {}
        for path, spec in specs.items():
            sharding = sharding_for(path) if sharding_for else None
            placed[path] = _place(spec, dtype or spec.dtype, sharding, _reader(spec, checkpoint, bar))
    params = unflatten(placed)
    jax.block_until_ready(params)
    logger.info("Loaded %.2f GB of weights in %.1f s", total / 1e9, time.perf_counter() - started)
    return params


def init_dummy(
    specs: Mapping[str, ParamSpec], seed: int, *, dtype: Any = None, sharding_for: ShardingFor | None = None
) -> dict[str, Any]:
    """Return small random parameters, the same for the same seed: N(0, 0.02), around 1 for norms."""
    # A table of prime length, repeated: fast, and no two rows of a weight are alike.
    table = np.random.default_rng(seed).standard_normal(1_048_573, np.float32) * np.float32(0.02)
    placed = {}
    for path, spec in specs.items():
        sharding = sharding_for(path) if sharding_for else None
        center = 1 if "norm" in path else 0
        fill = partial(_fill_random, np.asarray(table + center, dtype or spec.dtype), zlib.crc32(path.encode()), spec)
        placed[path] = _place(spec, dtype or spec.dtype, sharding, fill)
    return unflatten(placed)


def _reader(spec: ParamSpec, checkpoint: Checkpoint, bar: tqdm) -> Fill:
    """Return the function that fills one layer from the checkpoint."""
    layout = parse_layout(spec.layout)
    sizes = _layer_shape(spec)

    def fill(out: np.ndarray, layer: int, index: Index) -> None:
        source = spec.sources[layer]
        write_tensor(checkpoint.read(source), layout, sizes, out, index)
        checkpoint.release(source)
        bar.update(checkpoint.tensors[source].num_bytes)

    return fill


def _fill_random(table: np.ndarray, offset: int, spec: ParamSpec, out: np.ndarray, layer: int, index: Index) -> None:
    """Fill one layer with consecutive numbers of the table, starting at a place of its own."""
    size = math.prod(_layer_shape(spec))
    start = (offset + layer * size) % len(table)
    if not index:
        _tile(table, start, out.reshape(-1))
        return
    whole = np.empty(size, table.dtype)
    _tile(table, start, whole)
    out[...] = whole.reshape(_layer_shape(spec))[index]


def _tile(table: np.ndarray, start: int, out: np.ndarray) -> None:
    position = 0
    while position < len(out):
        piece = table[start : start + len(out) - position]
        out[position : position + len(piece)] = piece
        position, start = position + len(piece), 0


def _layer_shape(spec: ParamSpec) -> tuple[int, ...]:
    return spec.shape[1:] if spec.stacked else spec.shape


def _layers(out: np.ndarray, spec: ParamSpec) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number, array to fill) for each layer of a whole parameter."""
    yield from enumerate(out) if spec.stacked else [(0, out)]


def _place(spec: ParamSpec, dtype: Any, sharding: jax.sharding.Sharding | None, fill: Fill) -> jax.Array:
    """Make one parameter, on the devices of `sharding` or on the default device."""
    dtype = np.dtype(dtype)
    if sharding is not None:
        return _place_sharded(spec, dtype, sharding, fill)
    if jax.local_devices()[0].platform == "cpu":
        out = aligned_empty(spec.shape, dtype)
        for layer, part in _layers(out, spec):
            fill(part, layer, ())
        out.flags.writeable = False
        return jax.device_put(out)  # aligned, so that JAX takes it as it is and keeps it alive
    return _place_on_device(spec, dtype, fill)


def _place_on_device(spec: ParamSpec, dtype: np.dtype, fill: Fill) -> jax.Array:
    """Allocate the parameter on the default device and bring its layers there one by one."""
    if not spec.stacked:
        out = aligned_empty(spec.shape, dtype)
        fill(out, 0, ())
        return jax.device_put(out)
    params = jnp.zeros(spec.shape, dtype)
    for layer in range(spec.shape[0]):
        out = aligned_empty(spec.shape[1:], dtype)
        fill(out, layer, ())
        params = _set_layer(params, out, layer)
        # Otherwise the host would run ahead, holding every layer.
        params.block_until_ready()
    return params


@partial(jax.jit, donate_argnums=0)
def _set_layer(params: jax.Array, layer_values: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(params, layer_values, layer, 0)


def _place_sharded(spec: ParamSpec, dtype: np.dtype, sharding: jax.sharding.Sharding, fill: Fill) -> jax.Array:
    """Make the parts of this process's devices, each from its part of the tensors."""
    parts = _Parts(spec, dtype, fill, {})
    return jax.make_array_from_callback(spec.shape, sharding, parts.read)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Reads parts of one parameter; devices that hold the same part share one reading."""

    spec: ParamSpec
    dtype: np.dtype
    fill: Fill
    known: dict[tuple[tuple[int, int], ...], np.ndarray]

    def read(self, index: Index | None) -> np.ndarray:
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), self.spec.shape, strict=True))
        if bounds not in self.known:
            self.known[bounds] = self._read(bounds)
        return self.known[bounds]

    def _read(self, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        out = aligned_empty(tuple(stop - start for start, stop in bounds), self.dtype)
        if not self.spec.stacked:
            self.fill(out, 0, tuple(slice(*bound) for bound in bounds))
            return out
        inner = tuple(slice(*bound) for bound in bounds[1:])
        for place, layer in enumerate(range(*bounds[0])):
            self.fill(out[place], layer, inner)
        return out


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array whose data start at a multiple of ALIGNMENT."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
