"""The ops of layers with recurrent state, and the pools that their states are in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.recurrent_state import StateBatch, causal_conv, gated_delta, state_space
from pallas_kernels.recurrent_state.causal_conv import CausalConv, ConvShape
from pallas_kernels.recurrent_state.gated_delta import GatedDelta, GatedDeltaShape
from pallas_kernels.recurrent_state.state_space import StateSpace, StateSpaceShape

from .state_specs import ConvSpec, DeltaSpec, ScanSpec, StateSpec


class StatePools(NamedTuple):
    """The states of a group of layers: in each slot, the inputs that convolutions look back on, and the scans' states.

    They are arrays of JAX, or their specs; a device has its share of the channels and heads.
    """

    conv: Any
    """The last axis is that of channels."""
    scan: Any
    """The second axis is that of heads; None where a layer is a convolution alone."""


@dataclass(frozen=True)
class StateOps:
    """What a group of layers with recurrent state computes with on one device."""

    conv: CausalConv
    scan: GatedDelta | StateSpace | None = None

    @property
    def _all(self) -> StatePools:
        return StatePools(self.conv, self.scan)

    def _map(self, function: Callable[..., Any], *pools: Any) -> StatePools:
        each = zip(self._all, *pools, strict=True)
        return StatePools(*(None if op is None else function(op, *of_op) for op, *of_op in each))

    @property
    def implementations(self) -> tuple[str, ...]:
        """Return the name of each op's implementation."""
        return tuple(op.implementation for op in self._all if op is not None)

    @property
    def is_invariant(self) -> bool:
        """Say whether on a CPU a row has the same bits whatever is beside it, decoded or in a chunk."""
        return set(self.implementations) == {"cpu"}

    def missing_kernels(self, platform: str, architecture: str | None = None) -> dict[str, str]:
        """Say of each op, by its name for people, why a platform's own kernels do not run it."""
        found = {op.name: op.missing_kernels(platform, architecture) for op in self._all if op is not None}
        return {name: reason for name, reason in found.items() if reason is not None}

    def pool_spec(self, num_layers: int, num_slots: int) -> StatePools:
        """Return shape and dtype of pools of `num_slots` slots per layer, the null slot counted."""
        return self._map(lambda op: op.pool_spec(num_layers, num_slots))

    def make_pool(self, spec: StatePools) -> StatePools:
        """Make pools of `pool_spec`; traced."""
        return self._map(lambda op, x: op.make_pool(x), spec)

    def settle_pool(self, pools: StatePools, num_layers: int) -> None:
        """Do what the memory of new pools needs before it is used; not traced."""
        self._map(lambda op, x: op.settle_pool(x, num_layers), pools)

    def run(self, inputs: Any, pools: StatePools, batch: StateBatch, **layer: Any) -> tuple[Array, StatePools]:
        """Take a step's tokens through a layer's states; return what its `output` takes, and the pools.

        `inputs` are what the layer's `project` gives; they know what is to be done. `layer` has the layer's place in
        the pools as `layer`, their `num_layers`, and its `spec` and `cfg`.
        """
        where = {"layer": layer.pop("layer"), "num_layers": layer.pop("num_layers")}
        out, recur = inputs.run(Recur(self, pools, batch, **where), **layer)
        return out, recur.pools

    def prepare(self, folder: Path | None = None) -> None:
        """Do what must be done in a process before it loads a program with these ops that another one compiled."""
        self._map(lambda op: op.prepare(folder))


def pick_state_ops(
    spec: StateSpec,
    num_devices: int,
    dtype: DTypeLike,
    platform: str,
    *,
    name: str | None = None,
    architecture: str | None = None,
) -> StateOps:
    """Return the ops for one device's share of a state.

    `name` is that of an implementation. Raises ValueError for one that does not exist or cannot run here.
    """
    dtype = jnp.dtype(dtype)
    where: dict[str, Any] = {"platform": platform, "name": name, "architecture": architecture}
    conv, _ = causal_conv.pick(ConvShape(spec.num_channels // num_devices, spec.conv_size, dtype), **where)
    match spec:
        case ConvSpec():
            return StateOps(conv)
        case DeltaSpec():
            heads = spec.num_key_heads // num_devices, spec.num_value_heads // num_devices
            shape = GatedDeltaShape(*heads, spec.key_dim, spec.value_dim, False, dtype)
            return StateOps(conv, gated_delta.pick(shape, **where)[0])
        case ScanSpec():
            heads, groups = spec.num_heads // num_devices, spec.num_groups // num_devices
            space = StateSpaceShape(heads, spec.head_dim, groups, spec.state_dim, dtype)
            return StateOps(conv, state_space.pick(space, **where)[0])


class Recur(NamedTuple):
    """Where a layer's states are, for the function of a layer that takes a step's tokens through them."""

    ops: StateOps
    pools: StatePools
    batch: StateBatch
    layer: Array | int
    """The layer's place in the pools."""
    num_layers: int

    def convolve(self, x_tc: Array, weight_kc: Array, **settings: Any) -> tuple[Array, Recur]:
        """Return what `CausalConv` gives, and what is to follow."""
        out_tc, pool = self.ops.conv(x_tc, weight_kc, self.pools.conv, self.batch, **self._place, **settings)
        return out_tc, self._replace(pools=self.pools._replace(conv=pool))

    def scan(self, *inputs: Array) -> tuple[Array, Recur]:
        """Return what the scan of the layer's kind gives, and what is to follow."""
        assert self.ops.scan is not None
        run: Any = self.ops.scan
        out, pool = run(*inputs, self.pools.scan, self.batch, **self._place)
        return out, self._replace(pools=self.pools._replace(scan=pool))

    @property
    def _place(self) -> dict[str, Any]:
        return {"layer": self.layer, "num_layers": self.num_layers}
