"""HF's names for the tensors of each GGUF architecture."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_MIXTRAL_LAYER_NAMES = _LAYER_NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"}
EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj.weight",
    "ffn_up_exps": "mlp.experts.{e}.up_proj.weight",
    "ffn_down_exps": "mlp.experts.{e}.down_proj.weight",
}
_MIXTRAL_EXPERT_NAMES = {
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1.weight",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3.weight",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2.weight",
}


_SHARED_EXPERT_NAMES = {f"ffn_{kind}_shexp": f"mlp.shared_experts.{kind}_proj" for kind in ("gate", "up", "down")}
_QWEN_SHARED_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_ROUTER_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


def _scan_names(mixer: str) -> dict[str, str]:
    """Return the names of Mamba-2's matrices and norm within a layer; `mixer` is HF's prefix."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {stem: f"{mixer}.{name}" for stem, name in names.items()}


def _bare_scan_names(mixer: str) -> dict[str, str]:
    return {"ssm_a": f"{mixer}.A_log", "ssm_d": f"{mixer}.D", "ssm_dt.bias": f"{mixer}.dt_bias"}


class Joined(NamedTuple):
    """A tensor of HF's that consists of several tensors of the file; names are within a layer."""

    name: str
    parts: tuple[str, ...]
    folded: bool = False
    """Whether the parts are joined by head, and HF's rows are the rows of all heads."""


class Names(NamedTuple):
    """HF's names for the tensors of one architecture."""

    layer: Mapping[str, str] = _LAYER_NAMES
    """Names within a layer that end in ".weight" or ".bias" in HF as in the file."""
    bare: Mapping[str, str] = {}
    """Names within a layer with another ending in HF."""
    experts: Mapping[str, str] = EXPERT_NAMES
    """Names within a layer of a single expert's slice of a tensor of all experts."""
    fused_experts: str | None = None
    """The name within a layer of the experts, if HF has their gates and ups in one tensor, inputs first."""
    alternates: bool = False
    """Whether gate and up columns alternate in that tensor, instead of all gates before all ups."""
    joined: tuple[Joined, ...] = ()
    top: Mapping[str, str] = _TOP_NAMES
    layers: str = "model.layers."
    transposed: Collection[str] = ()
    """The layer's matrices that HF stores with inputs before outputs."""


def _rotary_encoder_names(attention: str, mlp: Mapping[str, str]) -> Names:
    """Return the names of an encoder with one tensor for queries, keys and values; `attention` is HF's prefix."""
    return Names(
        {
            "attn_qkv": f"{attention}.Wqkv",
            "attn_output": f"{attention}.out_proj",
            "attn_output_norm": "norm1",
            **mlp,
            "layer_output_norm": "norm2",
        },
        top={
            "token_embd.weight": "embeddings.word_embeddings.weight",
            "token_types.weight": "embeddings.token_type_embeddings.weight",
            **{f"token_embd_norm.{kind}": f"emb_ln.{kind}" for kind in ("weight", "bias")},
        },
        layers="encoder.layers.",
    )


_HUNYUAN_LAYER_NAMES = _LAYER_NAMES | {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_BARE_DELTA_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_LFM2_LAYER_NAMES = _LAYER_NAMES | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
_LFM2_TOP_NAMES = _TOP_NAMES | {"token_embd_norm.weight": "model.embedding_norm.weight"}
_LFM2_EXPERT_NAMES = {
    stem: name.replace("block_sparse_moe", "feed_forward") for stem, name in _MIXTRAL_EXPERT_NAMES.items()
}
_SHARED_GRANITE = "shared_mlp.input_linear.weight"
_GRANITE_NAMES = Names(
    _LAYER_NAMES
    | {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down": "shared_mlp.output_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
        **_scan_names("mamba"),
    },
    bare={"ffn_down_exps.weight": "block_sparse_moe.output_linear.weight", **_bare_scan_names("mamba")},
    joined=(
        Joined("block_sparse_moe.input_linear.weight", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
        Joined(_SHARED_GRANITE, ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
        Joined(_SHARED_GRANITE, ("ffn_gate.weight", "ffn_up.weight")),
    ),
)
_BACKBONE_TOP_NAMES = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_NEMOTRON_NAMES = Names(
    {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
        **_scan_names("mixer"),
    },
    bare={"exp_probs_b.bias": "mixer.gate.e_score_correction_bias", **_bare_scan_names("mixer")},
    experts={f"ffn_{kind}_exps": f"mixer.experts.{{e}}.{kind}_proj.weight" for kind in ("up", "down")},
    top=_BACKBONE_TOP_NAMES,
    layers="backbone.layers.",
)
_MAMBA_NAMES = Names(
    {
        "attn_norm": "norm",
        "ssm_x": "mixer.x_proj",
        "ssm_dt": "mixer.dt_proj",
        **{stem: name for stem, name in _scan_names("mixer").items() if stem != "ssm_norm"},
    },
    bare={name: hf for name, hf in _bare_scan_names("mixer").items() if name != "ssm_dt.bias"},
    top=_BACKBONE_TOP_NAMES,
    layers="backbone.layers.",
)
_MAMBA2_NAMES = Names(
    {"attn_norm": "norm", **_scan_names("mixer")},
    bare=_bare_scan_names("mixer"),
    top=_BACKBONE_TOP_NAMES,
    layers="backbone.layers.",
)

NAMES: Mapping[str, Names] = {
    **dict.fromkeys(("gemma2", "gemma3"), Names(_GEMMA_LAYER_NAMES)),
    "gemma4": Names(
        _GEMMA_LAYER_NAMES
        | {
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        bare={
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
            "layer_output_scale.weight": "layer_scalar",
        },
        top=_TOP_NAMES
        | {
            "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
            "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
            "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
        },
    ),
    "olmo2": Names(_LAYER_NAMES | _POST_NORMS),
    "exaone4": Names(_LAYER_NAMES | _POST_NORMS),
    "seed_oss": Names(_LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"}),
    "starcoder2": Names(_LAYER_NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "glm4": Names(
        _LAYER_NAMES
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        }
    ),
    "hunyuan-dense": Names(_HUNYUAN_LAYER_NAMES),
    "phi2": Names(
        _LAYER_NAMES | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top=_TOP_NAMES | {f"output_norm.{kind}": f"model.final_layernorm.{kind}" for kind in ("weight", "bias")},
    ),
    "phi3": Names(_LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "llama": Names(_MIXTRAL_LAYER_NAMES, experts=_MIXTRAL_EXPERT_NAMES),
    "minimax-m2": Names(
        _MIXTRAL_LAYER_NAMES,
        bare={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        experts=_MIXTRAL_EXPERT_NAMES,
    ),
    "qwen2moe": Names(_LAYER_NAMES | _QWEN_SHARED_NAMES),
    "glm4moe": Names(
        _LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"} | _SHARED_EXPERT_NAMES, bare=_ROUTER_BIAS
    ),
    "ernie4_5-moe": Names(
        _LAYER_NAMES | _SHARED_EXPERT_NAMES,
        bare={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "qwen35": Names(_LAYER_NAMES | _DELTA_NAMES, bare=_BARE_DELTA_NAMES),
    **dict.fromkeys(
        ("qwen35moe", "qwen3next"), Names(_LAYER_NAMES | _QWEN_SHARED_NAMES | _DELTA_NAMES, bare=_BARE_DELTA_NAMES)
    ),
    "lfm2": Names(_LFM2_LAYER_NAMES, top=_LFM2_TOP_NAMES),
    "lfm2moe": Names(
        _LFM2_LAYER_NAMES,
        bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
        experts=_LFM2_EXPERT_NAMES,
        top=_LFM2_TOP_NAMES,
    ),
    **dict.fromkeys(("granitehybrid", "granitemoe"), _GRANITE_NAMES),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_NAMES),
    "mamba": _MAMBA_NAMES,
    "mamba2": _MAMBA2_NAMES,
    "deepseek2": Names(
        _LAYER_NAMES
        | _SHARED_EXPERT_NAMES
        | {
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
        bare=_ROUTER_BIAS,
        joined=(Joined("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), folded=True),),
    ),
    "hunyuan-moe": Names(
        _HUNYUAN_LAYER_NAMES
        | {
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{kind}_shexp": f"mlp.shared_mlp.{kind}_proj" for kind in ("gate", "up", "down")},
        }
    ),
    "bert": Names(
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        top={
            "token_embd.weight": "embeddings.word_embeddings.weight",
            "position_embd.weight": "embeddings.position_embeddings.weight",
            "token_types.weight": "embeddings.token_type_embeddings.weight",
            **{f"token_embd_norm.{kind}": f"embeddings.LayerNorm.{kind}" for kind in ("weight", "bias")},
        },
        layers="encoder.layer.",
    ),
    "nomic-bert": _rotary_encoder_names("attn", {"ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2"}),
    "jina-bert-v3": _rotary_encoder_names("mixer", {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    "gpt-oss": Names(
        _LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        bare={"attn_sinks.weight": "self_attn.sinks"},
        fused_experts="mlp.experts",
        alternates=True,
    ),
    "llama4": Names(
        _LAYER_NAMES
        | {
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        fused_experts="feed_forward.experts",
    ),
    "gpt2": Names(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        top={
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
            "output.weight": "lm_head.weight",
        },
        layers="transformer.h.",
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
}
"""The names of architectures whose tensors are not named like Llama's."""
