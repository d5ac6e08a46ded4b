"""What a decoder is, as frozen values, and the reading of HF's config.json that all families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh")
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One RoPE table; fields that a type does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int = 2048
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the forward pass depends on; hashable, so it can be static under jit.

    `context_len` is how many tokens the model is good for, RoPE scaling counted; `layer_windows` are in tokens, the
    token itself counted, None where attention is global; `ropes` are the distinct tables, `layer_ropes` indices in it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    context_len: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    hidden_act: str
    scale: float
    layer_windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embed_scale: float = 1.0
    norm_offset: float = 0.0

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together with ValueError."""
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) <= 0:
                raise ValueError(f"config.json: {name} is {getattr(self, name)}, expected a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: {self.num_heads} query heads are not a multiple of {self.num_kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"config.json: head_dim is {self.head_dim}; rotary embeddings need an even one")
        if self.hidden_act not in HIDDEN_ACTS:
            raise ValueError(
                f"config.json: activation {self.hidden_act!r} is not supported, only {', '.join(HIDDEN_ACTS)}"
            )
        if not len(self.layer_windows) == len(self.layer_ropes) == self.num_layers:
            raise ValueError(f"config.json: layer_types does not name exactly {self.num_layers} layers")


def read_decoder(
    hf: Mapping[str, Any], *, architecture: str, act_key: str = "hidden_act", **family: Any
) -> ModelConfig:
    """Read the fields that all decoders share from a config.json; `family` holds the rest, or overrides them.

    Raises:
      ValueError: for a missing or malformed field, and for a feature that no family supports.
    """
    _refuse_unsupported(hf)
    num_layers = read_int(hf, "num_hidden_layers")
    num_heads = read_int(hf, "num_attention_heads")
    hidden_size = read_int(hf, "hidden_size")
    head_dim = read_int(hf, "head_dim", hidden_size // max(num_heads, 1))
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": read_int(hf, "vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": read_int(hf, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "intermediate_size": read_int(hf, "intermediate_size"),
        "max_position_embeddings": read_int(hf, "max_position_embeddings", 2048),
        "context_len": read_int(hf, "max_position_embeddings", 2048),
        "rms_norm_eps": read_float(hf, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "hidden_act": str(hf.get(act_key, "silu")),
        "scale": head_dim**-0.5 if head_dim > 0 else 1.0,
        "layer_windows": (None,) * num_layers,
        "layer_ropes": (0,) * num_layers,
    }
    if "ropes" not in family:
        fields["ropes"] = (read_rope(hf, flat_rope_settings(hf)),)
        fields["context_len"] = _scaled_context_len(fields["max_position_embeddings"], fields["ropes"][0])
    return ModelConfig(**(fields | family))


def read_layer_types(hf: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kind of attention of each layer; a kind other than full or sliding raises ValueError."""
    layer_types = tuple(hf.get("layer_types") or default)
    unknown = sorted({str(kind) for kind in layer_types} - set(LAYER_TYPES))
    if unknown:
        raise ValueError(f"config.json: layer_types {unknown} are not supported, only {', '.join(LAYER_TYPES)}")
    return layer_types


def windows_of(layer_types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window in tokens, the token itself counted; None where attention is global."""
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def flat_rope_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings of a config that has one table, from the old keys or from `rope_parameters`."""
    settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    nested = sorted(key for key, value in settings.items() if isinstance(value, Mapping))
    if nested:
        raise ValueError(
            f"config.json: rope_parameters per layer type ({', '.join(nested)}) do not fit this architecture"
        )
    parameters = hf.get("rope_parameters") or {}
    settings.setdefault("rope_theta", parameters.get("rope_theta", hf.get("rope_theta", 10_000.0)))
    return settings


def read_rope(hf: Mapping[str, Any], settings: Mapping[str, Any]) -> RopeConfig:
    """Build one RoPE table from its settings; `hf` supplies the context lengths.

    Raises:
      ValueError: for a RoPE type or a setting that is not supported, or one that is missing.
    """
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"config.json: RoPE type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")
    for source in (hf, settings):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError("config.json: partial_rotary_factor other than 1 is not supported")
    if settings.get("mrope_section") is not None:
        raise ValueError("config.json: mrope_section (multimodal RoPE) is not supported")
    max_positions = read_int(hf, "max_position_embeddings", 2048)
    original = hf.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    fields: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": read_float(settings, "rope_theta", 10_000.0),
    }
    if rope_type == "dynamic":
        fields["max_position_embeddings"] = max_positions
    if rope_type in ("linear", "dynamic", "llama3"):
        fields["factor"] = read_float(settings, "factor")
    if rope_type in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = int(original or max_positions)
    if rope_type == "llama3":
        fields["low_freq_factor"] = read_float(settings, "low_freq_factor")
        fields["high_freq_factor"] = read_float(settings, "high_freq_factor")
    if rope_type == "yarn":
        fields["factor"] = read_float(settings, "factor", max_positions / fields["original_max_position_embeddings"])
        fields["beta_fast"] = float(settings.get("beta_fast") or 32.0)
        fields["beta_slow"] = float(settings.get("beta_slow") or 1.0)
        fields["truncate"] = bool(settings.get("truncate", True))
        fields["attention_factor"] = _yarn_attention_factor(settings, fields["factor"])
    return RopeConfig(**fields)


def is_tied_wrapper(hf: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Return what a multimodal config.json says about tied embeddings, in its own keys or in its text part's."""
    return bool(hf.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def read_text_config(hf: Mapping[str, Any], model_types: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the text part of a multimodal config.json; a text model of another type raises ValueError."""
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError("config.json: text_config is missing")
    if text.get("model_type", model_types[0]) not in model_types:
        raise ValueError(
            f"config.json: text_config is a {text['model_type']!r}, only {', '.join(model_types)} is supported"
        )
    return text


def _scaled_context_len(max_positions: int, rope: RopeConfig) -> int:
    # Linear and dynamic scaling leave max_position_embeddings at what was trained, the other types raise it or not.
    match rope.rope_type:
        case "linear" | "dynamic":
            return int(max_positions * rope.factor)
        case "yarn":
            return max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
        case _:
            return max_positions


def read_int(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return an integer field; a missing one without default, or one that is no integer, raises ValueError."""
    value = _required(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"config.json: {name} is {value!r}, expected an integer")
    return value


def read_float(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a number field as float; a missing one without default, or one that is no number, raises ValueError."""
    value = _required(values, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {name} is {value!r}, expected a number")
    return float(value)


def read_optional_float(values: Mapping[str, Any], name: str, default: float | None = None) -> float | None:
    """Return a number field that may be null."""
    return None if values.get(name, default) is None else read_float(values, name, default)


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """Return what cos and sin are multiplied with, given or inferred from the scaling factor."""

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return mscale(settings["mscale"]) / mscale(settings["mscale_all_dim"])
    return mscale()


def _required(values: Mapping[str, Any], name: str, default: Any) -> Any:
    value = values.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json: {name} is missing")
    return value


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    quantization = hf.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"config.json: checkpoints quantized with {method!r} are not supported; use an unquantized one or GGUF"
        )
    if hf.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention is not supported, only causal attention")
