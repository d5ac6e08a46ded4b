"""Read params.json, Mistral's own config, as the config.json that HF would have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.loading.json_file import model_error, read_json
from jaxllm.params.checks import shown

PARAMS_NAME = "params.json"
_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""HF's names of the sizes that every params.json has."""
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_WAY_OUT = "use the model's form with config.json, if it has one"
_MODALITIES = ("vision_encoder", "multimodal")


def read_params(folder: Path, source: str) -> dict[str, Any]:
    """Read a folder's params.json in the form of config.json. Raises VLLMValidationError if it cannot be read so."""
    params = read_json(folder / PARAMS_NAME, source)
    try:
        return _as_config(params)
    except ValueError as error:
        raise model_error(f"{PARAMS_NAME} {error}; {_WAY_OUT}", source) from None


def sees(config: Mapping[str, Any]) -> bool:
    """Return whether a config made of params.json is the text part of a model that sees."""
    return bool(config.get("has_vision_encoder"))


def _as_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model. Raises ValueError, naming the key, if it is not supported."""
    missing = [name for name in _NAMES if name not in params]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    multimodal = _mapping(params, "multimodal")
    if params.get("whisper_model_args") or multimodal.get("whisper_model_args"):
        raise ValueError("is that of a model that hears (whisper_model_args), which is not supported in this form")
    for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"):
        if params.get(key):
            raise ValueError(f"is that of a model with latents ({key}), which is not supported in this form")
    if params.get("model_type", "transformer") != "transformer":
        raise ValueError(f"has model_type {shown(params['model_type'])}, which is not supported in this form")
    config = {theirs: params[ours] for ours, theirs in _NAMES.items()}
    config |= {
        "hidden_act": params.get("activation", "silu"),
        "tie_word_embeddings": params.get("tied_embeddings", False),
        "max_position_embeddings": params.get("max_position_embeddings", params.get("max_seq_len", 128_000)),
        "sliding_window": _window(params.get("sliding_window")),
        "rope_parameters": _rope(params),
        "has_vision_encoder": any(params.get(key) for key in _MODALITIES),
    }
    return config | _experts(params) | _quantization(params)


def _window(window: Any) -> Any:
    """Return the sliding window of all layers; None for full attention."""
    if isinstance(window, list):
        if len(windows := {str(each): each for each in window}) > 1:
            raise ValueError(f"has sliding_window {shown(window)}: layers of several kinds are not supported here")
        return next(iter(windows.values()), None)
    return window


def _rope(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return HF's rope_parameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.get("rope_theta") or 10_000.0}
    yarn, scaling = dict(_mapping(params, "yarn")), _mapping(params, "llama_4_scaling")
    if yarn:
        rope |= {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}
        if not yarn.pop("apply_scale", True):
            rope["attention_factor"] = 1.0
        if unknown := yarn.keys() - _YARN.keys():
            raise ValueError(f"has yarn with {', '.join(sorted(unknown))}, which is not supported")
        rope |= {_YARN[key]: value for key, value in yarn.items()}
    if scaling:
        if scaling.get("original_max_position_embeddings") != rope.get("original_max_position_embeddings"):
            raise ValueError("has llama_4_scaling from another length than yarn, which is not supported")
        rope["llama_4_scaling_beta"] = scaling.get("beta")
    return rope


def _experts(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture, and the settings of experts if there are any."""
    moe = _mapping(params, "moe")
    if not moe:
        is_scaled = bool(params.get("llama_4_scaling"))
        name, kind = ("Ministral3", "ministral3") if is_scaled else ("Mistral", "mistral")
        return {"architectures": [f"{name}ForCausalLM"], "model_type": kind}
    if unknown := moe.keys() - {"num_experts", "num_experts_per_tok"}:
        raise ValueError(f"has moe with {', '.join(sorted(unknown))}, which is not supported in this form")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": moe.get("num_experts"),
        "num_experts_per_tok": moe.get("num_experts_per_tok"),
    }


def _quantization(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return HF's quantization_config, if the weights are quantized."""
    quantization = _mapping(params, "quantization")
    if not quantization:
        return {}
    if quantization.get("qformat_weight") != "fp8_e4m3":
        raise ValueError(f"has quantization {shown(dict(quantization))}; only fp8_e4m3 is supported")
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}


def _mapping(params: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = params.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"has {key} {shown(value)}, expected an object")
    return value
