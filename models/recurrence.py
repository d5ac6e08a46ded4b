"""The ops of layers with recurrent state, and the pools of their states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.recurrent_state import StateBatch, causal_conv, gated_delta, selective_scan, state_space
from pallas_kernels.recurrent_state.causal_conv import CausalConv, ConvShape
from pallas_kernels.recurrent_state.gated_delta import GatedDelta, GatedDeltaShape
from pallas_kernels.recurrent_state.selective_scan import SelectiveScan, SelectiveScanShape
from pallas_kernels.recurrent_state.state_space import StateSpace, StateSpaceShape

from .mixer_specs import ConvSpec, DeltaSpec, ScanSpec, SelectiveSpec, StateSpec


class StatePools(NamedTuple):
    """The states of a group of layers: in each slot, the last inputs of convolutions, and the scans' states.

    They are JAX arrays, or their specs; a device has its share of the channels and heads.
    """

    conv: Any
    """Its last axis is channels."""
    scan: Any
    """Its second axis is heads, or parts of the channels; None if a layer is a convolution alone."""


@dataclass(frozen=True)
class StateOps:
    """The ops of a group of layers with recurrent state, on one device."""

    conv: CausalConv
    scan: GatedDelta | StateSpace | SelectiveScan | None = None

    @property
    def _all(self) -> StatePools:
        return StatePools(self.conv, self.scan)

    def _map(self, function: Callable[..., Any], *pools: Any) -> StatePools:
        rows = zip(self._all, *pools, strict=True)
        return StatePools(*(None if op is None else function(op, *of_op) for op, *of_op in rows))

    @property
    def implementations(self) -> tuple[str, ...]:
        """Return the name of each op's implementation."""
        return tuple(op.implementation for op in self._all if op is not None)

    @property
    def is_invariant(self) -> bool:
        """Return whether on a CPU a row has the same bits in every batch, decoded or in a chunk."""
        return set(self.implementations) == {"cpu"}

    def missing_kernels(self, platform: str, architecture: str | None = None) -> dict[str, str]:
        """Return the reason why a platform's own kernels do not run an op, by the op's readable name."""
        reasons = {op.name: op.missing_kernels(platform, architecture) for op in self._all if op is not None}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def pool_spec(self, num_layers: int, num_slots: int) -> StatePools:
        """Return shape and dtype of pools of `num_slots` slots per layer, including the null slot."""
        return self._map(lambda op: op.pool_spec(num_layers, num_slots))

    def make_pool(self, spec: StatePools) -> StatePools:
        """Make pools of `pool_spec`; traced."""
        return self._map(lambda op, x: op.make_pool(x), spec)

    def settle_pool(self, pools: StatePools, num_layers: int) -> None:
        """Prepare the memory of new pools for its first use; not traced."""
        self._map(lambda op, x: op.settle_pool(x, num_layers), pools)

    def run(self, inputs: Any, pools: StatePools, batch: StateBatch, **layer: Any) -> tuple[Array, StatePools]:
        """Run a step's tokens through a layer's states; return the input of its `output`, and the pools.

        `inputs` are the result of the layer's `project`, and have the computation as their `run`. `layer` has the
        layer's index in the pools as `layer`, their `num_layers`, and its `spec` and `cfg`.
        """
        where = {"layer": layer.pop("layer"), "num_layers": layer.pop("num_layers")}
        out, recur = inputs.run(Recur(self, pools, batch, **where), **layer)
        return out, recur.pools

    def prepare(self, folder: Path | None = None) -> None:
        """Prepare a process to load a program with these ops that another process compiled."""
        self._map(lambda op: op.prepare(folder))


def pick_state_ops(
    spec: StateSpec, num_devices: int, dtype: DTypeLike, pick: Callable[[ModuleType, Any], Any]
) -> StateOps:
    """Return the ops for one device's share of a state; `pick` returns the op of a module, such as `causal_conv`, for a
    shape.
    """
    dtype = jnp.dtype(dtype)
    conv = pick(causal_conv, ConvShape(spec.num_channels // num_devices, spec.conv_size, dtype))
    match spec:
        case ConvSpec():
            return StateOps(conv)
        case DeltaSpec():
            heads = spec.num_key_heads // num_devices, spec.num_value_heads // num_devices
            delta = GatedDeltaShape(*heads, spec.key_dim, spec.value_dim, spec.decays_by_key, dtype)
            return StateOps(conv, pick(gated_delta, delta))
        case ScanSpec():
            heads, groups = spec.num_heads // num_devices, spec.num_groups // num_devices
            space = StateSpaceShape(heads, spec.head_dim, groups, spec.state_dim, dtype)
            return StateOps(conv, pick(state_space, space))
        case SelectiveSpec():
            scan = SelectiveScanShape(spec.num_channels // num_devices, spec.state_dim, dtype)
            return StateOps(conv, pick(selective_scan, scan))


class Recur(NamedTuple):
    """A layer's states in the pools, with the ops that run a step's tokens through them."""

    ops: StateOps
    pools: StatePools
    batch: StateBatch
    layer: Array | int
    """The layer's index in the pools."""
    num_layers: int

    def convolve(self, x_tc: Array, weight_kc: Array, **settings: Any) -> tuple[Array, Recur]:
        """Return the result of `CausalConv`, and this with the new pools."""
        out_tc, pool = self.ops.conv(x_tc, weight_kc, self.pools.conv, self.batch, **self._place, **settings)
        return out_tc, self._replace(pools=self.pools._replace(conv=pool))

    def scan(self, *inputs: Array) -> tuple[Array, Recur]:
        """Return the result of the layer's scan, and this with the new pools."""
        assert self.ops.scan is not None
        run: Any = self.ops.scan
        out, pool = run(*inputs, self.pools.scan, self.batch, **self._place)
        return out, self._replace(pools=self.pools._replace(scan=pool))

    @property
    def _place(self) -> dict[str, Any]:
        return {"layer": self.layer, "num_layers": self.num_layers}
