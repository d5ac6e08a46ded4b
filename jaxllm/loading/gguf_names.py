"""GGUF tensor names become HF names. A file holds all experts of a layer in one tensor, which HF's may be parts of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxllm.loading.gguf import GGUFTensor
from jaxllm.loading.gguf_rope import LONGROPE_NAMES, ROPE_FACTORS_NAME

IGNORED_NAMES = (ROPE_FACTORS_NAME, *LONGROPE_NAMES.values())
OFFSET_NORM_ARCHITECTURES = ("gemma2", "gemma3")
"""The architectures whose norm weights the converter stores plus one."""
MAX_EXPERTS = 4096
"""Far above any model; a file that claims more experts would only cost memory for their names."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
_OTHER_LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(OFFSET_NORM_ARCHITECTURES, _GEMMA_LAYER_NAMES),
    "olmo2": _LAYER_NAMES | _POST_NORMS,
    "phi3": _LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "llama": _LAYER_NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen2moe": _LAYER_NAMES
    | {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "glm4moe": _LAYER_NAMES
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "gpt-oss": _LAYER_NAMES | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
}
# HF has no ".weight" or ".bias" after these.
_BARE_NAMES = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}

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


class Source(NamedTuple):
    """What a tensor is made of in the file."""

    names: tuple[str, ...]
    """One tensor, or two whose rows take turns."""
    expert: int | None = None
    """The expert that it is, of a tensor of all experts."""
    transposed: bool = False
    """HF has a matrix's inputs before its outputs."""

    @property
    def has_experts(self) -> bool:
        """Say whether the first axis in the file counts experts."""
        return "_exps." in self.names[0]


def find_sources(tensors: Mapping[str, GGUFTensor], arch: str, ignored_layers: range) -> dict[str, Source]:
    """Return what each HF tensor is made of; what has no counterpart keeps its name, to be reported as unexpected."""
    found: dict[str, Source] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d{1,9})\.([a-z_]+)\.(weight|bias)", name)
        if name in IGNORED_NAMES or (ignored_layers and _layer_of(name) in ignored_layers):
            continue
        if match is None:
            found[_GLOBAL_NAMES.get(name, name)] = Source((name,))
            continue
        prefix = f"model.layers.{int(match[1])}."
        for ours, source in _layer_sources(match[2], match[3], name, tensor, tensors, arch):
            found[name if ours is None else prefix + ours] = source
    return found


def _layer_of(name: str) -> int:
    """Return the layer of a tensor, or -1."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


def _layer_sources(
    stem: str, kind: str, name: str, tensor: GGUFTensor, tensors: Mapping[str, GGUFTensor], arch: str
) -> Iterator[tuple[str | None, Source]]:
    """Yield the HF names within a layer that a tensor of the file takes part in; None for one without counterpart."""
    experts = _MIXTRAL_EXPERT_NAMES if arch == "llama" else _EXPERT_NAMES
    table = _OTHER_LAYER_NAMES.get(arch, _LAYER_NAMES)
    if arch == "gpt-oss" and stem in experts:
        yield from _gpt_oss_sources(stem, kind, name, tensor, tensors)
    elif stem in experts and kind == "weight" and len(tensor.shape) == 3 and 0 < tensor.shape[0] <= MAX_EXPERTS:
        for expert in range(tensor.shape[0]):
            yield experts[stem].format(e=expert), Source((name,), expert)
    elif f"{stem}.{kind}" in _BARE_NAMES:
        yield _BARE_NAMES[f"{stem}.{kind}"], Source((name,))
    else:
        yield (f"{table[stem]}.{kind}" if stem in table else None), Source((name,))


def _gpt_oss_sources(
    stem: str, kind: str, name: str, tensor: GGUFTensor, tensors: Mapping[str, GGUFTensor]
) -> Iterator[tuple[str | None, Source]]:
    """Yield HF's tensor of all experts: their gates and what these gate are one, in turns."""
    is_matrix = kind == "weight"
    suffix = "" if is_matrix else "_bias"
    gate, up = name.replace(stem, "ffn_gate_exps"), name.replace(stem, "ffn_up_exps")
    fits = len(tensor.shape) == (3 if is_matrix else 2)
    if stem == "ffn_down_exps" and fits:
        yield f"mlp.experts.down_proj{suffix}", Source((name,), transposed=is_matrix)
    elif fits and gate in tensors and up in tensors and tensors[gate].shape == tensors[up].shape:
        if stem == "ffn_gate_exps":
            yield f"mlp.experts.gate_up_proj{suffix}", Source((gate, up), transposed=is_matrix)
    else:
        yield None, Source((name,))
