"""Run a step through a model's layers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.rope import Rope, rotate
from pallas_kernels.weights.held import Quantized

from .plan import LayerPlan, Segment
from .weights import Stacked


class Heads(NamedTuple):
    """The input of attention: a step's tokens, projected."""

    q_tnh: Array
    k_tkh: Array | None
    v_tkh: Array | None
    """Keys and values; None in a layer that borrows them."""
    sinks_n: Array | None = None
    """The attention sink of each query head, if the layer has them."""
    gate_tnh: Array | None = None
    """The gate, if the layer has one: the output is multiplied by its sigmoids. Its last axis may have one entry."""
    scales_2h: tuple[Array, Array] | None = None
    """The scales of the norms of queries and of keys, if the norms come after the rotation."""


class RelativeHeads(NamedTuple):
    """The input of attention whose scores depend on distances too."""

    q_tnh: Array
    k_tnh: Array
    v_tnh: Array
    q_rnh: Array
    k_rnh: Array
    """The queries and keys of distances, by `bucket_rows`; rows of distances that no sequence has are undefined."""


class IndexerHeads(NamedTuple):
    """The input of an indexer; the parts that RoPE rotates are separate."""

    q_tnr: Array
    q_tnp: Array
    k_tr: Array
    k_tp: Array
    """Keys, which all heads share."""
    weights_tn: Array
    """The heads' weights, float32."""
    scaling_2n: tuple[Array, Array] | None = None
    """The numbers that scale each head's queries by the logarithm of the position, if the layer has them."""

    def joined(self, rope: Rope | None, log_positions_t: Array | None) -> tuple[Array, Array, Array]:
        """Return queries [t, n, h], keys [t, h] and weights, with the first parts rotated."""
        q_tnr, k_t1r = self.q_tnr, self.k_tr[:, None]
        if rope is not None:
            q_tnr, k_t1r = rotate(q_tnr, rope), rotate(k_t1r, rope)
        q_tnh = _scaled_by_log(jnp.concatenate((q_tnr, self.q_tnp), -1), self.scaling_2n, log_positions_t)
        return q_tnh, jnp.concatenate((k_t1r[:, 0], self.k_tp), -1), self.weights_tn


class LatentHeads(NamedTuple):
    """The input of attention over latents; the parts that RoPE rotates are separate."""

    q_tnl: Array
    """Absorbed queries, which are multiplied by the latents themselves."""
    q_tnr: Array
    latents_tl: Array | None
    """None in a layer that borrows latents."""
    k_tr: Array | None
    """The part of keys that is rotated, the same for all heads; None with the latents."""
    indexer: IndexerHeads | None = None
    """The input of the layer's indexer, if it has one."""
    gate_tnh: Array | None = None
    """As in `Heads`."""
    scaling_2n: tuple[Array, Array] | None = None
    """As in `IndexerHeads`."""

    def queries(self, rope: Rope | None, log_positions_t: Array | None) -> Array:
        """Return attention's queries [t, n, h], with their last parts rotated."""
        q_tnr = self.q_tnr if rope is None else rotate(self.q_tnr, rope)
        return _scaled_by_log(jnp.concatenate((self.q_tnl, q_tnr), -1), self.scaling_2n, log_positions_t)

    def latents(self, rope: Rope | None) -> Array:
        """Return latents [t, h] with their last parts rotated, in a layer that does not borrow them."""
        assert self.latents_tl is not None
        assert self.k_tr is not None
        k_tr = self.k_tr if rope is None else rotate(self.k_tr[:, None], rope)[:, 0]
        return jnp.concatenate((self.latents_tl, k_tr), -1)


def _scaled_by_log(q_tnh: Array, scaling_2n: tuple[Array, Array] | None, log_positions_t: Array | None) -> Array:
    if scaling_2n is None:
        return q_tnh
    assert log_positions_t is not None
    scale_n, bias_n = (each.astype(jnp.float32) for each in scaling_2n)
    factors_tn = scale_n * log_positions_t[:, None] + bias_n
    return (q_tnh * factors_tn[..., None]).astype(q_tnh.dtype)


class Beside(NamedTuple):
    """The inputs of attention and of a recurrent state that are side by side in a layer; or the outputs of the two."""

    attention: Any
    state: Any


type Lent = dict[int, tuple[Array, ...]]
"""The keys and values, or latents, that later layers borrow, by cache group: those of the last layer that computed its
own."""


class Cached(NamedTuple):
    """The state that one layer's attention passes on to the next one's."""

    pools: tuple[Any, ...]
    """The KV pools of the cache groups."""
    lent: Lent
    chosen_tw: Array | None = None
    """The positions that indexers chose for each token, as bits; None in a model without indexers."""


type Stream = tuple[Array, Cached]
"""The state between two layers: the hidden states [t, d], and the state of attention."""


class LayerLoop(enum.Enum):
    """The way that a step goes through the layers; all ways give the same result."""

    SCAN = "scan"
    """A loop with one body per kind, over weights stacked along a leading axis: the quickest to compile."""
    UNROLL = "unroll"
    """One body per layer, without a loop: a GPU runs it as one CUDA graph."""
    SWITCH = "switch"
    """A loop with one body per kind, which switches between the layers' matmuls, because XLA:CPU would copy a layer's
    weights out of a stack in each step. Attention, the largest part to compile, is still compiled once."""
    IN_PLACE = "in place"
    """SCAN with the CPU's own matmul, which reads a layer's weights in place in the stack."""

    @property
    def stacked(self) -> bool:
        """Return whether weights have a leading axis of layers."""
        return self in (LayerLoop.SCAN, LayerLoop.IN_PLACE)


class LayerBody(NamedTuple):
    """The computation of a layer, the same for all layers of one kind."""

    project: Callable[[Any, Array], Any]
    """It takes the layer's weights, arrays or `Stacked`, and the hidden states [t, d], and returns the input of
    `attend`:
    `Heads`, `RelativeHeads`, `LatentHeads`, or the inputs of a layer with recurrent state; `Beside` if it has both."""
    attend: Callable[[Any, Cached, Array | int], tuple[Array | None, Cached]]
    """It takes the layer's index among those of its kind, and returns [t, n, h] and the new state of attention. In a
    layer
    with an MLP alone `project` returns None, and so does this in place of [t, n, h]."""
    finish: Callable[[Any, Array, Any, Array | int], Array]
    """It takes the layer's weights, the hidden states before it, attention's output, and the layer's index."""

    def run(self, weights: Any, stream: Stream, index: Array | int) -> Stream:
        """Run one layer."""
        x_td, cached = stream
        attended_tnh, cached = self.attend(self.project(weights, x_td), cached, index)
        return self.finish(weights, x_td, attended_tnh, index), cached

    def run_one_of(self, layers: Sequence[Any], stream: Stream, index: Array | int) -> Stream:
        """Run the layer at an index, with the weights of all layers of its kind."""
        x_td, cached = stream
        heads = jax.lax.switch(index, [partial(self.project, weights) for weights in layers], x_td)
        attended_tnh, cached = self.attend(heads, cached, index)
        finishes = [partial(self.finish, weights) for weights in layers]
        return jax.lax.switch(index, finishes, x_td, attended_tnh, index), cached


def run_layers(
    loop: LayerLoop,
    plan: LayerPlan,
    weights: Any,
    bodies: Sequence[LayerBody],
    stream: Stream,
    tapped: Sequence[int] = (),
) -> tuple[Stream, Array | None]:
    """Run the stream through all layers; return it, and the hidden states before the `tapped` layers, [n, t, d].

    The tapped layers are all different; the number of layers stands for the end.

    `weights` is a tuple, with an entry for each kind if they are stacked, else for each layer; `bodies` has one for
    each kind.
    """
    if not loop.stacked:
        # Layers of a kind have the same shapes, so each part is traced and lowered once.
        bodies = [LayerBody(*map(jax.jit, body)) for body in bodies]
        weights = [[weights[layer] for layer in layers] for layers in plan.layers_of]

    def run(stream: Stream, kind: int, index: Array | int) -> Stream:
        body, of_kind = bodies[kind], weights[kind]
        match loop:
            case LayerLoop.SCAN:
                return body.run(_cut_layer(of_kind, index), stream, index)
            case LayerLoop.IN_PLACE:
                return body.run(
                    jax.tree.map(lambda x: Stacked(x, index), of_kind, is_leaf=_is_quantized), stream, index
                )
            case LayerLoop.SWITCH:
                return body.run_one_of(of_kind, stream, index)
            case LayerLoop.UNROLL:
                return body.run(of_kind[index], stream, index)

    loops = loop is not LayerLoop.UNROLL
    if not tapped:
        return walk(plan, stream, run, loops=loops), None
    # Layers that are not tapped write to one more row, so that all layers do the same.
    index_of = {layer: index for index, layer in enumerate(tapped)}
    targets = [[index_of.get(layer, len(tapped)) for layer in layers] for layers in plan.layers_of]

    def run_tapped(carry: tuple[Stream, Array], kind: int, index: Array | int) -> tuple[Stream, Array]:
        stream, taps = carry
        taps = jax.lax.dynamic_update_index_in_dim(taps, stream[0], pick(targets[kind], index), 0)
        return run(stream, kind, index), taps

    taps = jnp.zeros((len(tapped) + 1, *stream[0].shape), stream[0].dtype)
    stream, taps = walk(plan, (stream, taps), run_tapped, loops=loops)
    return stream, taps.at[index_of.get(len(plan.layers), len(tapped))].set(stream[0])[:-1]


def pick(numbers: Sequence[int], index: Array | int) -> Array | int:
    """Return numbers[index], where `index` may be traced."""
    if isinstance(index, int):
        return numbers[index]
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return numbers[0] + index
    return jnp.asarray(numbers, jnp.int32)[index]


def _cut_layer(weights: Any, index: Array | int) -> Any:
    """Return one layer's weights of a stack; experts and quantized matrices, which kernels read in place, as `Stacked`.

    Plain XLA fuses the cut into a matmul; a kernel would get a copy of weights that are cut first.
    """

    def one(path: Any, held: Any) -> Any:
        if _is_quantized(held) or any(getattr(key, "key", None) == "experts" for key in path):
            return Stacked(held, index)
        return jax.lax.dynamic_index_in_dim(held, index, keepdims=False)

    return jax.tree_util.tree_map_with_path(one, weights, is_leaf=_is_quantized)


def _is_quantized(held: Any) -> bool:
    return isinstance(held, Quantized)


def walk(plan: LayerPlan, stream: Any, run: Callable[[Any, int, Any], Any], *, loops: bool) -> Any:
    """Call `run` with the kind and the index of each layer, in order; with `loops`, repeated layers are one `scan`."""

    def times(count: int, step: Callable[[Any, Any], Any], stream: Any) -> Any:
        if loops and count > 1:
            return jax.lax.scan(lambda carry, i: (step(carry, i), None), stream, jnp.arange(count, dtype=jnp.int32))[0]
        for i in range(count):
            stream = step(stream, i)
        return stream

    def run_pattern(segment: Segment, firsts: list[int], stream: Any, repeat: Any) -> Any:
        counts = segment.counts(len(firsts))
        places = [first + repeat * count for first, count in zip(firsts, counts, strict=True)]
        for kind, length in segment.pattern:
            first = places[kind]
            stream = times(length, lambda carry, i, kind=kind, first=first: run(carry, kind, first + i), stream)
            places[kind] = first + length
        return stream

    firsts = [0] * len(plan.kinds)
    for segment in plan.segments:
        stream = times(segment.repeats, partial(run_pattern, segment, list(firsts)), stream)
        counts = segment.counts(len(firsts))
        firsts = [first + segment.repeats * count for first, count in zip(firsts, counts, strict=True)]
    return stream
