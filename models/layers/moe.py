"""A mixture of experts: each token goes through the few experts that a router chooses for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul import ACTIVATIONS as KERNEL_ACTIVATIONS
from pallas_kernels.grouped_matmul import (
    GroupedMatmul,
    Grouping,
    Groups,
    MatmulShape,
    group_rows,
    top_experts,
    within_groups,
)
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

from ..config import LayerSpec, ModelConfig, MoESpec
from ..params import EXPERT_AXIS, MESH_AXES, MODEL_AXIS
from ..weights import LayerOf, Ops, held_by
from .linear import ACTIVATIONS, linear
from .mlp import GatedMLP, PlainMLP, gate_by
from .params import Part, declare, declare_merged

SWIGLU_GAIN = 1.702
"""The factor on a gate inside the sigmoid of the clamped SwiGLU."""


class Choices(NamedTuple):
    """The experts of each token, and the weights of their outputs, [t, j] each."""

    experts_tj: Array
    weights_tj: Array


class Router(nnx.Module):
    """The router, which scores experts in float32 for every dtype: rounding could change which are chosen."""

    def __init__(self, spec: MoESpec, cfg: ModelConfig) -> None:
        self.spec = spec
        self.weight = declare((spec.num_experts, cfg.hidden_size), ("router", "embed"), jnp.float32)
        if spec.router_bias:
            self.bias = declare((spec.num_experts,), ("router",), jnp.float32)
        if spec.correction_bias:
            self.correction = declare((spec.num_experts,), ("router",), jnp.float32)

    def __call__(self, x_td: Array) -> Choices:
        """Choose experts for each token of [t, d]."""
        spec = self.spec
        logits_te = linear(x_td, self.weight, jnp.float32)
        if spec.router_bias:
            logits_te = logits_te + self.bias[...][None]
        scores_te = jax.nn.sigmoid(logits_te) if spec.sigmoid else jax.nn.softmax(logits_te, axis=-1)
        ranked_te = scores_te + self.correction[...][None] if spec.correction_bias else scores_te
        ranked_te = within_groups(ranked_te, spec.num_groups, spec.top_groups, spec.group_best)
        experts_tj, weights_tj = top_experts(ranked_te, scores_te, spec.top_k)
        if spec.normalizes:
            weights_tj = weights_tj / (jnp.sum(weights_tj, axis=1, keepdims=True) + spec.normalizer_eps)
        return Choices(experts_tj, weights_tj * spec.routed_scale)


class Experts(nnx.Module):
    """The weights of all experts, each an MLP, with a gate or without."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert spec.moe is not None
        self.spec, self.act, self.fused_act = spec.moe, spec.hidden_act, _fused_activation(spec)
        d, f, num_experts = _stream_size(spec.moe, cfg), spec.moe.intermediate_size, spec.moe.num_experts
        self.is_gated = spec.gated
        self.parts = (*(Part("gate", "mlp", f),) * spec.gated, Part("up", "mlp", f))
        num_shards = cfg.num_shards // cfg.num_expert_shards
        self.gate_up = declare_merged(self.parts, (d,), ("embed",), num_shards, dtype, 1, num_experts=num_experts)
        self.down = declare((num_experts, d, f), ("experts", "embed", "mlp"), dtype, 1)
        if spec.moe.expert_bias:
            biases = [part._replace(name=f"{part.name}_bias") for part in self.parts]
            self.gate_up_bias = declare_merged(biases, (), (), num_shards, dtype, num_experts=num_experts)
            self.down_bias = declare((num_experts, d), ("experts", "embed"), dtype)

    def __call__(self, x_td: Array, choices: Choices) -> Array:
        """Return float32 [t, d]: the weighted sum of each token's experts' outputs, in the order of the choices."""
        spec = self.spec
        held: LayerOf = held_by(self.gate_up)
        names = ["gate_up", "down", *["gate_up_bias"] * spec.expert_bias]
        stacks = {name: held_by(getattr(self, name)).stack for name in names}
        total_td = self._spread(held.ops, x_td, choices, held.num_rows, held.layer, stacks)
        if spec.expert_bias:
            bias_tjd = self.down_bias[...].astype(jnp.float32)[choices.experts_tj]
            total_td = total_td + _weighted_sum(self._output_weights(choices), bias_tjd)
        return total_td

    def _output_weights(self, choices: Choices) -> Array:
        """Return the factors on the experts' outputs, [t, j], which are ones if the inputs were scaled."""
        return jnp.ones_like(choices.weights_tj) if self.spec.scales_inputs else choices.weights_tj

    def _spread(
        self, ops: Ops, x_td: Array, choices: Choices, num_rows: Array | int, layer: Array | int, stacks: Any
    ) -> Array:
        """Return float32 [t, d]; on a mesh, the sum over devices, which share out experts, their width, or both.

        Devices exchange the sums of tokens, which are fewer than the rows of experts.
        """
        if ops.mesh is None or ops.mesh.size == 1:
            return self._give(ops.grouped_matmul, self.spec.num_experts, x_td, choices, num_rows, layer, stacks)
        num_experts, everywhere = self.spec.num_experts // ops.mesh.shape[EXPERT_AXIS], PartitionSpec()

        def give(x_td: Array, choices: Choices, *arguments: Any) -> Array:
            first = jax.lax.axis_index(EXPERT_AXIS) * num_experts
            shifted = choices._replace(experts_tj=choices.experts_tj - first)
            total_td = self._give(ops.grouped_matmul, num_experts, x_td, shifted, *arguments)
            # In x's dtype, as the other layers exchange their sums: in bfloat16 they are half as many bytes.
            return jax.lax.psum(total_td.astype(x_td.dtype), MESH_AXES).astype(jnp.float32)

        def spec(path: Any, array: Array) -> PartitionSpec:
            """Shard experts and widths; a quantized `down` may have one scale for a whole width."""
            width = 3 if path[0].key == "down" else 2
            is_whole = array.ndim <= width or array.shape[width] == 1
            return PartitionSpec(None, EXPERT_AXIS, *([] if is_whole else [*[None] * (width - 2), MODEL_AXIS]))

        specs = jax.tree_util.tree_map_with_path(spec, stacks)
        # The kernels' outputs do not declare over which mesh axes they vary, which check_vma would need.
        sharded = jax.shard_map(
            give,
            mesh=ops.mesh,
            in_specs=(everywhere, everywhere, everywhere, everywhere, specs),
            out_specs=everywhere,
            check_vma=False,
        )
        return sharded(x_td, choices, *(jnp.asarray(each, jnp.int32) for each in (num_rows, layer)), stacks)

    def _give(
        self,
        matmul: GroupedMatmul,
        num_experts: int,
        x_td: Array,
        choices: Choices,
        num_rows: Array | int,
        layer: Array | int,
        stacks: Mapping[str, Any],
    ) -> Array:
        """Return float32 [t, d], the sum over experts 0 to `num_experts` - 1; the stacks hold their weights."""
        grouping = group_rows(choices.experts_tj, num_experts, matmul.row_alignment, num_rows)
        x_rd = jnp.take(x_td, grouping.tokens_r, axis=0, mode="clip")
        if self.spec.scales_inputs:
            x_rd = x_rd * choices.weights_tj[grouping.tokens_r].astype(x_rd.dtype)
        y_tjd = self._multiply(matmul, x_rd, grouping, layer, stacks)[grouping.rows_tj]
        if num_experts < self.spec.num_experts:
            is_own_tj = (choices.experts_tj >= 0) & (choices.experts_tj < num_experts)
            y_tjd = jnp.where(is_own_tj[:, :, None], y_tjd, 0.0)
        return _weighted_sum(self._output_weights(choices), y_tjd)

    def _multiply(
        self, matmul: GroupedMatmul, x_rd: Array, grouping: Grouping, layer: Array | int, stacks: Mapping[str, Any]
    ) -> Array:
        """Return float32 [r, d], computed with the stacks' share of the experts."""
        multiply = partial(_multiply_groups, matmul, groups=grouping.groups, layer=layer)
        h_rf = multiply(x_rd, stacks["gate_up"], activation=self.fused_act)
        if self.fused_act is None:
            if self.spec.expert_bias:
                bias_esf = stacks["gate_up_bias"][layer]
                h_rf = h_rf + bias_esf.reshape(len(bias_esf), -1)[grouping.experts_r]
            h_rf = self._gated(*jnp.split(h_rf, 2, axis=1)) if self.is_gated else ACTIVATIONS[self.act](h_rf)
        return multiply(h_rf, stacks["down"], out_dtype=jnp.float32)

    def _gated(self, gate_rf: Array, up_rf: Array) -> Array:
        limit = self.spec.swiglu_limit
        if limit is None:
            return gate_by(ACTIVATIONS[self.act], gate_rf, up_rf, self.spec.act_limit)
        gate_rf, up_rf = jnp.minimum(gate_rf, limit), jnp.clip(up_rf, -limit, limit)
        return gate_rf * jax.nn.sigmoid(gate_rf * SWIGLU_GAIN) * (up_rf + 1)


def _multiply_groups(
    matmul: GroupedMatmul, x_ri: Array, stack: Any, *, groups: Groups, layer: Array | int, **options: Any
) -> Array:
    """Multiply rows by the weights of their experts."""

    def flat(array: Array) -> Array:
        return array.reshape(*array.shape[:2], -1, array.shape[-1])

    return matmul(x_ri, stack.map(flat) if isinstance(stack, Quantized) else flat(stack), layer, groups, **options)


class MoE(nnx.Module):
    """The routed experts, and the shared expert if the model has one."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert spec.moe is not None
        self.router, self.experts = Router(spec.moe, cfg), Experts(spec, cfg, dtype)
        self.has_shared, self.has_gate = spec.moe.shared_size is not None, spec.moe.shared_gate
        self.shared_scale = spec.moe.shared_scale
        if spec.moe.shared_size is not None:
            shared_spec = replace(spec, intermediate_size=spec.moe.shared_size)
            self.shared = (GatedMLP if spec.gated else PlainMLP)(shared_spec, cfg, dtype)
        self.has_latents = spec.moe.latent_size is not None
        if spec.moe.latent_size is not None:
            d, latent = cfg.hidden_size, spec.moe.latent_size
            self.into_latents = declare((latent, d), ("latent", "embed"), dtype, 1)
            self.out_of_latents = declare((d, latent), ("embed", "latent"), dtype, 1)
        if self.has_gate:
            self.shared_gate = declare((1, cfg.hidden_size), ("router", "embed"), dtype)

    def __call__(self, x_td: Array, plus_td: Array | None = None) -> Array:
        """Return [t, d], added to `plus_td`."""
        total_td = self._routed(x_td)
        if self.has_shared:
            shared_td = self.shared(x_td).astype(jnp.float32)
            if self.has_gate:
                gate_td = x_td.astype(jnp.float32) * self.shared_gate[...].astype(jnp.float32)
                shared_td = jax.nn.sigmoid(jnp.sum(gate_td, axis=1, keepdims=True)) * shared_td
            total_td = total_td + (shared_td if self.shared_scale == 1.0 else self.shared_scale * shared_td)
        out_td = total_td.astype(x_td.dtype)
        return out_td if plus_td is None else plus_td + out_td

    def _routed(self, x_td: Array) -> Array:
        """Return the routed experts' output, float32 [t, d]."""
        choices = self.router(x_td)
        if not self.has_latents:
            return self.experts(x_td, choices)
        total_tl = self.experts(linear(x_td, self.into_latents), choices)
        return linear(total_tl.astype(x_td.dtype), self.out_of_latents, jnp.float32)


def _stream_size(moe: MoESpec, cfg: ModelConfig) -> int:
    """Return the width of experts' inputs and outputs."""
    return moe.latent_size or cfg.hidden_size


def _weighted_sum(weights_tj: Array, y_tjd: Array) -> Array:
    """Add up experts' outputs one after the other: a compiler's order might depend on the number of rows."""
    total_td = weights_tj[:, :1] * y_tjd[:, 0]
    for j in range(1, weights_tj.shape[1]):
        total_td = total_td + weights_tj[:, j : j + 1] * y_tjd[:, j]
    return total_td


def _fused_activation(spec: LayerSpec) -> str | None:
    """Return the activation that the gate-and-up matmul applies; None if the experts apply theirs after it."""
    is_plain = spec.moe is not None and spec.moe.is_plain and spec.gated
    return spec.hidden_act if is_plain and spec.hidden_act in KERNEL_ACTIVATIONS else None


def matmul_shapes(
    spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike, formats: tuple[WeightFormat | None, WeightFormat | None]
) -> list[MatmulShape]:
    """Return one device's grouped matmuls of a layer with weights of these formats; none without experts."""
    if spec.moe is None:
        return []
    d, num_experts = _stream_size(spec.moe, cfg), spec.moe.num_experts // cfg.num_expert_shards
    f = spec.moe.intermediate_size * cfg.num_expert_shards // cfg.num_shards
    return [
        MatmulShape(num_experts, (1 + spec.gated) * f, d, dtype, formats[0], dtype, _fused_activation(spec)),
        MatmulShape(num_experts, d, f, dtype, formats[1], jnp.dtype(jnp.float32)),
    ]
