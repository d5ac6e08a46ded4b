"""Read the parts of HF's config.json that families share. Unsupported values raise ValueError with the key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .config import HIDDEN_ACTS, LayerSpec, ModelConfig, RopeConfig
from .fields import (
    read_bool,
    read_choice,
    read_float,
    read_floats,
    read_int,
    read_mapping,
    read_optional_float,
    require,
)

LAYER_TYPES = ("full_attention", "sliding_attention")
# Far above any model; a config.json with more would only cost memory.
MAX_LAYERS = 1000


_LAYER_FIELDS = frozenset(field.name for field in dataclasses.fields(LayerSpec))


def read_decoder(
    hf: Mapping[str, Any],
    *,
    architecture: str,
    act_key: str = "hidden_act",
    rotates_part: bool = False,
    layers: Mapping[str, Sequence[Any]] | None = None,
    **family: Any,
) -> ModelConfig:
    """Read the fields that all models share; see `read_rope` for `rotates_part`.

    `layers` has the fields in which layers differ, with a value for each layer. `family` has further fields of
    `ModelConfig`, and of `LayerSpec` for all layers, which override those from `hf`.
    """
    if hf.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported, only causal attention")
    num_layers, num_heads = read_num_layers(hf), read_int(hf, "num_attention_heads")
    hidden_size = read_int(hf, "hidden_size")
    head_dim = read_int(hf, "head_dim", hidden_size // num_heads)
    layer: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": read_int(hf, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "hidden_act": read_choice(hf, act_key, HIDDEN_ACTS, "silu"),
        "scale": head_dim**-0.5,
    } | {name: value for name, value in family.items() if name in _LAYER_FIELDS}
    if "intermediate_size" not in layer:
        layer["intermediate_size"] = read_int(hf, "intermediate_size")
    model: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": read_int(hf, "vocab_size"),
        "hidden_size": hidden_size,
        "max_position_embeddings": read_int(hf, "max_position_embeddings", 2048),
        "norm_eps": read_float(hf, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": read_bool(hf, "tie_word_embeddings"),
    } | {name: value for name, value in family.items() if name not in _LAYER_FIELDS}
    if "ropes" not in model:
        model["ropes"] = (read_rope(hf, read_rope_settings(hf), rotates_part=rotates_part),)
    layers = layers or {}
    for name, values in layers.items():
        if len(values) != num_layers:
            raise ValueError(f"num_hidden_layers is {num_layers}, but there are {len(values)} layer_types ({name})")
    specs = tuple(
        LayerSpec(**(layer | {name: values[number] for name, values in layers.items()})) for number in range(num_layers)
    )
    return ModelConfig(**model, layers=specs)


def read_num_layers(hf: Mapping[str, Any]) -> int:
    """Return the number of layers."""
    return read_int(hf, "num_hidden_layers", maximum=MAX_LAYERS)


def read_layer_types(
    hf: Mapping[str, Any], default: tuple[str, ...], known: tuple[str, ...] = LAYER_TYPES
) -> tuple[str, ...]:
    """Return the kind of attention of each layer, one of `known`."""
    layer_types = default if hf.get("layer_types") is None else hf["layer_types"]
    if not isinstance(layer_types, list | tuple):
        raise ValueError(f"layer_types is {layer_types!r}, expected a list")
    unknown = sorted({str(kind) for kind in layer_types} - set(known))
    if unknown:
        raise ValueError(f"layer_types {', '.join(unknown)} are not supported, only {', '.join(known)}")
    return tuple(layer_types)


def read_sparse_layers(hf: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it has experts: `mlp_layer_types` tells, or all but the first dense ones do."""
    kinds, num_layers = hf.get("mlp_layer_types"), read_num_layers(hf)
    if kinds is None:
        first = read_int(hf, "first_k_dense_replace", 0, minimum=0)
        return tuple(layer >= first for layer in range(num_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise ValueError(f"mlp_layer_types is {kinds!r}, expected dense or sparse for each of {num_layers} layers")
    return tuple(kind == "sparse" for kind in kinds)


def every_nth_global(num_layers: int, interval: int) -> tuple[str, ...]:
    """Return layer types: each `interval`-th layer is global, and all others have a window."""
    return tuple("sliding_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers))


def read_rotated_layers(hf: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it rotates queries and keys: it does if `no_rope_layers` has a 1, not a 0."""
    num_layers, flags = read_num_layers(hf), hf.get("no_rope_layers")
    if flags is None:
        interval = read_int(hf, "no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(flags, list | tuple) or len(flags) < num_layers or any(each not in (0, 1) for each in flags):
        raise ValueError(f"no_rope_layers is {flags!r}, expected {num_layers} numbers, each 0 or 1")
    return tuple(each == 1 for each in flags[:num_layers])


def windows_of(layer_types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's window in tokens, the token itself counted; None where attention is global."""
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def read_rope(hf: Mapping[str, Any], settings: Mapping[str, Any], *, rotates_part: bool = False) -> RopeConfig:
    """Build one RoPE table from its settings; `hf` supplies the context lengths.

    `rotates_part` says that the architecture can rotate a part of each head. In HF all others ignore
    `partial_rotary_factor` with plain RoPE, and fail with scaled RoPE.
    """
    rope_type = read_rope_type(settings)
    if settings.get("mrope_section") is not None:
        raise ValueError("mrope_section (multimodal RoPE) does not fit this architecture")
    positions = read_int(hf, "max_position_embeddings", 2048)
    rotated = read_float(settings, "partial_rotary_factor", read_float(hf, "partial_rotary_factor", 1.0))
    if not rotates_part and rope_type == "default":
        rotated = 1.0
    elif not rotates_part and rope_type != "proportional" and rotated != 1:
        raise ValueError(f"partial_rotary_factor is {rotated}, which does not fit this architecture")
    fields: dict[str, Any] = {
        "rope_type": rope_type,
        "theta": read_float(settings, "rope_theta", 10_000.0),
        "rotated": rotated,
    }
    match rope_type:
        case "linear" | "ntk":
            require(settings, mixed_b=None)
            fields["factor"] = read_float(settings, "factor")
        case "proportional":
            fields["factor"] = read_float(settings, "factor", 1.0)
        case "dynamic":
            fields |= {"factor": read_float(settings, "factor"), "max_position_embeddings": positions}
        case "llama3":
            fields |= {name: read_float(settings, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
            fields["original_max_position_embeddings"] = read_trained_positions(hf, settings, positions)
        case "yarn":
            fields |= _yarn_fields(settings, positions, read_trained_positions(hf, settings, positions))
        case "longrope":
            fields |= _longrope_fields(settings, positions, read_trained_positions(hf, settings, positions))
    return RopeConfig(**fields)


def read_rope_type(settings: Mapping[str, Any]) -> Any:
    """Return the type of a RoPE table, which old configs call `type`; `RopeConfig` checks it."""
    return settings.get("rope_type") or settings.get("type") or "default"


def read_ropes_by_type(
    hf: Mapping[str, Any], layer_types: tuple[str, ...], full_theta: Any, sliding_theta: Any
) -> tuple[tuple[RopeConfig, ...], tuple[int | None, ...]]:
    """Return a RoPE table for each layer type in use, and each layer's index; the thetas stand in for missing ones.

    The index is None for layers of other types than those of attention.

    Scaling under the old key, rope_scaling, applies to full attention only.
    """
    parameters = read_mapping(hf, "rope_parameters")
    flat = sorted(set(parameters) - set(LAYER_TYPES))
    if flat:
        raise ValueError(f"rope_parameters are per layer type in this architecture, but there is {', '.join(flat)}")
    settings = {kind: read_mapping(parameters, kind) for kind in LAYER_TYPES}
    settings["full_attention"].update(read_mapping(hf, "rope_scaling"))
    settings["full_attention"].setdefault("rope_theta", full_theta)
    settings["sliding_attention"].setdefault("rope_theta", sliding_theta)
    kinds = [kind for kind in LAYER_TYPES if kind in layer_types]
    ropes = tuple(read_typed_rope(hf, settings[kind]) for kind in kinds)
    return ropes, tuple(kinds.index(kind) if kind in kinds else None for kind in layer_types)


def read_typed_rope(hf: Mapping[str, Any], settings: Mapping[str, Any]) -> RopeConfig:
    """Build the RoPE table of one layer type, in a config with settings for several."""
    if not read_bool(settings, "truncate", True):
        raise ValueError("truncate is false for a layer type, where HF ignores it; leave it out")
    return read_rope(hf, settings)


def is_tied_wrapper(hf: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Return whether a multimodal config.json ties embeddings, in its own keys or in its text part's."""
    return read_bool(hf, "tie_word_embeddings", read_bool(text, "tie_word_embeddings"))


def read_text_config(hf: Mapping[str, Any], *model_types: str) -> Mapping[str, Any]:
    """Return the text part of a multimodal config.json, which must be of these types; the first if it has none."""
    text = read_mapping(hf, "text_config")
    if not text:
        raise ValueError("text_config is missing")
    if text.get("model_type", model_types[0]) not in model_types:
        raise ValueError(f"text_config's model_type is {text['model_type']!r}; only {model_types[0]} is supported")
    return text


def read_rope_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings of a config that has one table, from the old keys or from `rope_parameters`."""
    parameters = read_mapping(hf, "rope_parameters")
    settings = read_mapping(hf, "rope_scaling") or dict(parameters)
    nested = sorted(key for key, value in settings.items() if isinstance(value, Mapping))
    if nested:
        raise ValueError(f"rope_parameters per layer type ({', '.join(nested)}) do not fit this architecture")
    settings.setdefault("rope_theta", parameters.get("rope_theta", hf.get("rope_theta")))
    return settings


def read_trained_positions(hf: Mapping[str, Any], settings: Mapping[str, Any], positions: int) -> int:
    """Return the length that a model was trained for before its RoPE was scaled; by default `positions`."""
    name = "original_max_position_embeddings"
    return read_int(hf, name, read_int(settings, name, positions))


def _yarn_fields(settings: Mapping[str, Any], positions: int, trained: int) -> dict[str, Any]:
    factor = read_float(settings, "factor", positions / trained)
    return {
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": read_float(settings, "beta_fast", 32.0),
        "beta_slow": read_float(settings, "beta_slow", 1.0),
        "truncate": read_bool(settings, "truncate", True),
        "attention_factor": _yarn_attention_factor(settings, factor),
    }


def _longrope_fields(settings: Mapping[str, Any], positions: int, trained: int) -> dict[str, Any]:
    factor = read_float(settings, "factor", positions / trained)
    grown = 1.0 if factor <= 1 or trained == 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return {
        "factor": factor,
        "original_max_position_embeddings": trained,
        "short_factors": read_floats(settings, "short_factor"),
        "long_factors": read_floats(settings, "long_factor"),
        "attention_factor": read_float(settings, "attention_factor", grown),
    }


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    """Return the factor on cos and sin, from its key or inferred from the scaling factor."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = read_optional_float(settings, "attention_factor")
    if attention_factor is not None:
        return attention_factor
    # 0 means that it is not set, as in HF.
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return mscale(read_float(settings, "mscale")) / mscale(read_float(settings, "mscale_all_dim"))
    return mscale(1.0)
