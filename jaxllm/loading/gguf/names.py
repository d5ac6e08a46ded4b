"""Map GGUF tensor names to HF names. A file stores all experts of a layer in one tensor; HF may store them apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from jaxllm.loading.gguf.file import GGUFTensor
from jaxllm.loading.gguf.rope import LONGROPE_NAMES, ROPE_FACTORS_NAME

_IGNORED_NAMES = (ROPE_FACTORS_NAME, *LONGROPE_NAMES.values())
OFFSET_NORM_ARCHITECTURES = ("gemma", "gemma2", "gemma3")
"""Architectures whose norm weights the converter stores plus one."""
ATTENTION, MLP = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
"""The matrices of a layer that can have a bias."""
_ALWAYS_BIASED = ("qwen2", "qwen2vl")
_NO_OUTPUT_BIAS = (*_ALWAYS_BIASED, "qwen2moe", "glm4moe", "seed_oss", "stablelm", "glm4")
"""Architectures for which HF has query, key and value biases (always, or if the file has any) but no output bias."""
_MAX_EXPERTS = 4096
"""Far above any model: a larger number of experts in a file is corrupt, and would cost memory for their names."""

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
_EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj.weight",
    "ffn_up_exps": "mlp.experts.{e}.up_proj.weight",
    "ffn_down_exps": "mlp.experts.{e}.down_proj.weight",
}
_MIXTRAL_EXPERT_NAMES = {
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1.weight",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3.weight",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2.weight",
}


class _Names(NamedTuple):
    """HF's names for the tensors of one architecture."""

    layer: Mapping[str, str] = _LAYER_NAMES
    """Names within a layer that end in ".weight" or ".bias" in HF as in the file."""
    bare: Mapping[str, str] = {}
    """Names within a layer with another ending in HF."""
    experts: Mapping[str, str] = _EXPERT_NAMES
    """Names within a layer of a single expert's slice of a tensor of all experts."""
    fused_experts: str | None = None
    """The name within a layer of the experts, if HF has their gates and ups in one tensor, inputs first."""
    alternates: bool = False
    """Whether gate and up columns alternate in that tensor, instead of all gates before all ups."""
    top: Mapping[str, str] = _TOP_NAMES
    layers: str = "model.layers."
    transposed: Collection[str] = ()
    """The layer's matrices that HF stores with inputs before outputs."""


_NAMES: Mapping[str, _Names] = {
    **dict.fromkeys(("gemma2", "gemma3"), _Names(_GEMMA_LAYER_NAMES)),
    "gemma4": _Names(
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
    "olmo2": _Names(_LAYER_NAMES | _POST_NORMS),
    "exaone4": _Names(_LAYER_NAMES | _POST_NORMS),
    "seed_oss": _Names(_LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm"}),
    "starcoder2": _Names(_LAYER_NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "glm4": _Names(
        _LAYER_NAMES
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        }
    ),
    "hunyuan-dense": _Names(
        _LAYER_NAMES | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    ),
    "phi2": _Names(
        _LAYER_NAMES | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        top=_TOP_NAMES | {f"output_norm.{kind}": f"model.final_layernorm.{kind}" for kind in ("weight", "bias")},
    ),
    "phi3": _Names(_LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "llama": _Names(_MIXTRAL_LAYER_NAMES, experts=_MIXTRAL_EXPERT_NAMES),
    "minimax-m2": _Names(
        _MIXTRAL_LAYER_NAMES,
        bare={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        experts=_MIXTRAL_EXPERT_NAMES,
    ),
    "qwen2moe": _Names(
        _LAYER_NAMES
        | {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        }
    ),
    "glm4moe": _Names(
        _LAYER_NAMES
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        bare={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
    "gpt-oss": _Names(
        _LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        bare={"attn_sinks.weight": "self_attn.sinks"},
        fused_experts="mlp.experts",
        alternates=True,
    ),
    "llama4": _Names(
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
    "gpt2": _Names(
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


class Source(NamedTuple):
    """Where one HF tensor is stored in the file."""

    names: tuple[str, ...]
    """One tensor, or two whose rows together form the HF tensor."""
    expert: int | None = None
    """The index of the expert in a tensor of all experts."""
    transposed: bool = False
    """Whether HF has a matrix's inputs before its outputs."""
    alternates: bool = False
    """Whether the rows of the two tensors alternate, instead of following one another."""

    @property
    def has_experts(self) -> bool:
        """Return whether the first axis in the file counts experts, and each has more than one number."""
        return "_exps." in self.names[0] and not self.names[0].endswith(".scale")


def find_sources(tensors: Mapping[str, GGUFTensor], arch: str, ignored_layers: range) -> dict[str, Source]:
    """Return the source of each HF tensor. A tensor without a counterpart keeps its name, and is reported later."""
    names = _NAMES.get(arch, _Names())
    sources: dict[str, Source] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d{1,9})\.([a-z_0-9]+)\.(weight|bias|scale)", name)
        if name in _IGNORED_NAMES or (ignored_layers and _layer_of(name) in ignored_layers):
            continue
        if match is None:
            sources[names.top.get(name, name)] = Source((name,))
            continue
        prefix = f"{names.layers}{int(match[1])}."
        for ours, source in _layer_sources(match[2], match[3], name, tensor, tensors, arch):
            sources[name if ours is None else prefix + ours] = source
    return sources


def has_biases(tensors: Collection[str], stems: Collection[str]) -> bool:
    """Return whether any layer of a file has a bias of one of the matrices `stems`."""
    return any(name.endswith(".bias") and name.split(".")[-2] in stems for name in tensors)


def find_zeros(tensors: Mapping[str, GGUFTensor], arch: str, ignored_layers: range) -> dict[str, int]:
    """Return the HF biases that a file omits although it has others of their kind, with their lengths.

    Omitted biases are zeros.
    """
    names, zeros = _NAMES.get(arch, _Names()), dict[str, int]()
    kinds = [stems for stems in (ATTENTION, MLP) if has_biases(tensors, stems)]
    wanted = {stem for stems in kinds for stem in stems} | set(ATTENTION if arch in _ALWAYS_BIASED else ())
    wanted -= {"attn_output"} if arch in _NO_OUTPUT_BIAS else set()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d{1,9})\.([a-z_]+)\.weight", name)
        if match is None or match[2] not in wanted & names.layer.keys() or int(match[1]) in ignored_layers:
            continue
        if f"blk.{match[1]}.{match[2]}.bias" not in tensors:
            zeros[f"{names.layers}{int(match[1])}.{names.layer[match[2]]}.bias"] = tensor.shape[0]
    return zeros


def _layer_of(name: str) -> int:
    """Return the layer of a tensor, or -1."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


def _layer_sources(
    stem: str, kind: str, name: str, tensor: GGUFTensor, tensors: Mapping[str, GGUFTensor], arch: str
) -> Iterator[tuple[str | None, Source]]:
    """Yield HF's names for a tensor of the file, within its layer, with their sources; None if HF has none."""
    names = _NAMES.get(arch, _Names())
    if names.fused_experts is not None and stem in _EXPERT_NAMES:
        for ours, source in _fused_sources(stem, kind, name, tensor, tensors):
            yield ours and f"{names.fused_experts}.{ours}", source._replace(alternates=names.alternates)
    elif f"{stem}.{kind}" in names.bare:
        yield names.bare[f"{stem}.{kind}"], Source((name,))
    elif stem in names.experts and kind == "weight" and len(tensor.shape) == 3 and 0 < tensor.shape[0] <= _MAX_EXPERTS:
        for expert in range(tensor.shape[0]):
            yield names.experts[stem].format(e=expert), Source((name,), expert)
    elif stem in names.layer and kind != "scale":
        transposed = stem in names.transposed and len(tensor.shape) == 2
        yield f"{names.layer[stem]}.{kind}", Source((name,), transposed=transposed)
    else:
        yield None, Source((name,))


def _fused_sources(
    stem: str, kind: str, name: str, tensor: GGUFTensor, tensors: Mapping[str, GGUFTensor]
) -> Iterator[tuple[str | None, Source]]:
    """Yield the names of HF's tensors of all experts, with their sources; gates and ups have two."""
    is_matrix = kind == "weight"
    suffix = "" if is_matrix else "_bias"
    gate, up = name.replace(stem, "ffn_gate_exps"), name.replace(stem, "ffn_up_exps")
    fits = len(tensor.shape) == (3 if is_matrix else 2)
    if stem == "ffn_down_exps" and fits:
        yield f"down_proj{suffix}", Source((name,), transposed=is_matrix)
    elif fits and gate in tensors and up in tensors and tensors[gate].shape == tensors[up].shape:
        if stem == "ffn_gate_exps":
            yield f"gate_up_proj{suffix}", Source((gate, up), transposed=is_matrix)
    else:
        yield None, Source((name,))
