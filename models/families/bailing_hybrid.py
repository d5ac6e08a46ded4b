"""Ling 3.0: five layers of Kimi's delta attention to each of attention over latents; experts as in DeepSeek V3.

The decays of the delta rule have a bound, and the output of attention has a gate for each head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_int
from ..mixer_specs import DeltaSpec
from ..names import TensorName
from ..reading import read_layer_types, read_num_layers
from .deepseek import DEEPSEEK_NAMES, read_latent_decoder, read_sigmoid_experts
from .kimi_linear import KIMI_NAMES, RENAMED

_ATTENTION = "{body}layers.{l}.attention."


def _of_attention(tensor: TensorName) -> TensorName:
    name = tensor.name.replace(".self_attn.", ".attention.").replace("attention.o_proj.", "attention.dense.")
    return tensor._replace(name=name)


_OF_KIMI = {path: tensor for path, tensor in KIMI_NAMES.items() if path.startswith("layers.recurrent.")}
_BAILING_NAMES = MappingProxyType(
    {
        **{path: _of_attention(tensor) for path, tensor in (DEEPSEEK_NAMES | _OF_KIMI).items()},
        "embed.table": TensorName("{body}word_embeddings.weight", "v d -> v d"),
        "layers.attn.gate": TensorName(_ATTENTION + "g_proj.weight", "n d -> n d"),
        "layers.recurrent.decay": TensorName(_ATTENTION + "f_proj.weight", "(v k) d -> v k d"),
        "layers.recurrent.gate": TensorName(_ATTENTION + "g_proj.weight", "(v h) d -> v h d"),
        "layers.recurrent.log_decay": TensorName(_ATTENTION + "A_log", "v -> v"),
        "layers.mlp.router.correction": TensorName("{body}layers.{l}.mlp.gate.expert_bias", "e -> e"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 157_184,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 42,
    "num_attention_heads": 32,
    "model_max_length": 262_144,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 6_000_000.0,
    "num_experts": 512,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 8,
    "topk_group": 4,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
    "layer_group_size": 6,
    "short_conv_kernel_size": 4,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
}


def _bailing_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Ling 3.0 config.json; HF's has the width of heads with states beside that of rotated parts, `head_dim`."""
    hf = DEFAULTS | dict(hf)
    hf |= {name: hf[ours] for name, ours in RENAMED.items()} | {"q_lora_rank": None}
    num_heads = read_int(hf, "num_attention_heads")
    head_dim = read_int(hf, "linear_head_dim", read_int(hf, "head_dim", 128))
    delta = DeltaSpec(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_size=read_int(hf, "short_conv_kernel_size"),
        decays_by_key=True,
        least_log_decay=_read_bound(hf),
    )
    return read_latent_decoder(
        hf,
        "BailingHybridForCausalLM",
        read_sigmoid_experts(hf),
        layers={"state": [delta if kind == "linear_attention" else None for kind in _read_layers(hf)]},
        output_gate=True,
        gate_by_head=True,
    )


def _read_bound(hf: Mapping[str, Any]) -> float | None:
    """Return the bound of a decay's logarithm, None if it has none."""
    bound = hf["kda_lower_bound"]
    if not read_bool(hf, "kda_safe_gate"):
        return None
    if type(bound) not in (int, float) or not -math.inf < bound < 0:
        raise ValueError(f"kda_lower_bound is {bound!r}, expected a negative number")
    return float(bound)


def _read_layers(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer; by default the last layer of each group attends."""
    num_layers, group = read_num_layers(hf), read_int(hf, "layer_group_size")
    default = ("full_attention" if (layer + 1) % group == 0 else "linear_attention" for layer in range(num_layers))
    return read_layer_types(hf, tuple(default), ("linear_attention", "full_attention"))


_BAILING = Family(
    config_from_hf=_bailing_config,
    names=_BAILING_NAMES,
    # The multi-token-prediction layer, which comes last.
    leaves_out=("model.layers.{after}.*",),
)
FAMILIES = {"BailingHybridForCausalLM": _BAILING, "BailingMoeV3ForCausalLM": _BAILING}
