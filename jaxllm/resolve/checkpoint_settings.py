"""Read settings from a checkpoint's files: overrides, architecture, quantization, default sampling."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config.formats import QUANTIZATIONS
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_ints, shown
from jaxllm.sampling_params import SamplingParams
from jaxllm.utils.files import read_text
from jaxllm.utils.names import import_name

if TYPE_CHECKING:
    from jaxllm.loading.checkpoint import Checkpoint
    from jaxllm.models.config import ModelConfig
    from jaxllm.models.family import Family

logger = logging.getLogger(__name__)

_MAX_NAME = 256
_MAX_ENDS = 4096
_GENERATION_KEYS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The sampling parameter for each key of an HF generation config; vLLM reads the same ones."""


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the HF config with `overrides` in place; nested "..._config" dicts are merged, other values replaced."""
    merged = dict(config)
    for key, value in overrides.items():
        inner = merged.get(key)
        nested = key.endswith("_config") and isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = apply_overrides(inner, value) if nested and inner is not None else value
    return merged


def read_model_config(
    model: str, checkpoint: Checkpoint, config: Mapping[str, Any], *, sees: bool = True, hears: bool = True
) -> ModelConfig:
    """Find the model's family and let it read the HF config; a model that cannot run is refused by name.

    Without `sees` or `hears` the config has no such tower.
    """
    architecture, family = find_family(model, config)
    try:
        stated = family.read_config(config, sees=sees, hears=hears)
        model_config = family.read_config(config, checkpoint.tensors, sees=sees, hears=hears)
    except ValueError as error:
        reads_text = (sees or hears) and _reads_text(family, config)
        hint = " Or set language_model_only=True: text alone can be read." if reads_text else ""
        raise VLLMValidationError(f"model={model!r}: {error}.{hint}", parameter="model", value=model) from error
    is_draft = model_config.draft_head is not None  # it has the target's output head
    if model_config.tie_word_embeddings and not (stated.tie_word_embeddings or family.is_wrapper or is_draft):
        logger.warning(
            "config.json does not tie the output head to the embedding, but %s has no lm_head.weight: "
            "the embedding is the head too.",
            checkpoint.source,
        )
    # A registered family may read its config with a built-in family's function, and would be mistaken for it later.
    return dataclasses.replace(model_config, architecture=architecture)


def _reads_text(family: Family, config: Mapping[str, Any]) -> bool:
    """Return whether a model could be read if it were neither to see nor to hear."""
    try:
        family.read_config(config, sees=False, hears=False)
    except ValueError:
        return False
    return True


def find_family(model: str, config: Mapping[str, Any]) -> tuple[str, Family]:
    """Return the first architecture of the HF config that is supported, and its family.

    Raises VLLMValidationError if there is none, or if the weights are quantized in a way that cannot be read.
    """
    from jaxllm.models.registry import get_family, supported_architectures

    _refuse_quantized(model, config)
    names = _architectures(model, config)
    architecture = next((name for name in names if name in supported_architectures()), names[0])
    try:
        return architecture, get_family(architecture)
    except ValueError as error:
        remote = " Its own code is never run: add the architecture with jaxllm.register_model(...)."
        hint = remote if "auto_map" in config else ""
        raise VLLMValidationError(f"model={model!r}: {error}.{hint}", parameter="model", value=model) from error


def _refuse_quantized(model: str, config: Mapping[str, Any]) -> None:
    from jaxllm.loading.quantized import read_scheme

    quantization = config.get("quantization_config")
    if not quantization:
        return
    try:
        read_scheme(quantization)
    except ValueError as error:
        message = f"model={model!r}: config.json: {error}."
        raise VLLMValidationError(message, parameter="model", value=model) from error


def _architectures(model: str, config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures") or ["none"]
    if not isinstance(names, list) or not all(isinstance(name, str) and len(name) <= _MAX_NAME for name in names):
        message = f"model={model!r}: config.json: architectures is {shown(names)}, expected a list with a class's name."
        raise VLLMValidationError(message, parameter="model", value=model)
    return names


def resolve_quantization(name: str | None, checkpoint: Checkpoint) -> str | None:
    """Return how weights are rounded when they are loaded, by jaxllm's name; None if they are not.

    Raises VLLMValidationError if the checkpoint is quantized by another method than `name`.
    """
    stored = checkpoint_quantization(checkpoint)
    if name is None or _method(name) == stored:
        return None
    if name in QUANTIZATIONS and stored in (None, "gguf"):
        return QUANTIZATIONS[name]
    if stored is None:
        message = f"quantization={name!r}: the weights of {checkpoint.source} are not quantized"
    else:
        message = (
            f"Quantization method specified in the model config ({stored}) does not match the quantization method "
            f"specified in the `quantization` argument ({name})"
        )
    raise VLLMValidationError(
        f"{message}; leave it out, or round plain weights to {', '.join(dict.fromkeys(QUANTIZATIONS.values()))}.",
        parameter="quantization",
        value=name,
    )


def checkpoint_quantization(checkpoint: Checkpoint) -> str | None:
    """Return the method that a checkpoint's weights are quantized by, by vLLM's name; None for plain weights."""
    if checkpoint.is_gguf:
        return "gguf"
    quantization = checkpoint.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return None if method is None else _method(method)


def _method(name: str) -> str:
    """Return the quantization method of a name, which may be that of a variant."""
    from jaxllm.loading.quantized.methods import ALIASES

    return "fp8" if name == "fbgemm_fp8" else ALIASES.get(name, name)


def read_generation_config(choice: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the HF generation config: the checkpoint's for "auto" and "vllm", else that of the folder `choice`."""
    config = _read_generation_config(choice, checkpoint)
    ends = config.get("eos_token_id")
    if ends is not None:
        check_ints(
            "eos_token_id of generation_config", ends if isinstance(ends, list) else [ends], 0, INT32_MAX, _MAX_ENDS
        )
    return config


def _read_generation_config(choice: str, checkpoint: Checkpoint) -> dict[str, Any]:
    if choice in ("auto", "vllm"):
        return dict(checkpoint.generation_config)
    path = Path(choice)
    try:
        path = path.expanduser()
        path = path / "generation_config.json" if path.is_dir() else path
        config = json.loads(read_text(path))
    except (OSError, ValueError, RuntimeError) as error:  # also for nesting too deep, and an unknown user's home folder
        raise VLLMValidationError(
            f"generation_config={choice!r} is neither 'auto', 'vllm' nor a folder with a readable "
            f"generation_config.json ({error}).",
            parameter="generation_config",
            value=choice,
        ) from error
    if not isinstance(config, dict):
        raise VLLMValidationError(
            f"generation_config={choice!r}: {path} holds no JSON object.", parameter="generation_config", value=choice
        )
    return config


def default_sampling_params(
    choice: str, generation_config: Mapping[str, Any], override: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sampling parameters that differ from vLLM's defaults: the model's, then the user's."""
    unknown = sorted(set(override) - set(_GENERATION_KEYS))
    if unknown:
        raise VLLMValidationError(
            f"override_generation_config has no effect on {', '.join(map(repr, unknown))}; it takes "
            f"{', '.join(_GENERATION_KEYS)}.",
            parameter="override_generation_config",
            value=override,
        )
    from_model = {} if choice == "vllm" else _sampling_fields(generation_config)
    _check_defaults(from_model, "generation_config", "pass generation_config='vllm' to leave the checkpoint's out")
    from_user = _sampling_fields(override)
    _check_defaults(from_user, "override_generation_config", "change it")
    return from_model | from_user


def max_output_tokens(choice: str, generation_config: Mapping[str, Any], override: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a server lets a request ask for, as in vLLM: the user's max_new_tokens.

    A checkpoint's own value is only the default of requests. None sets no limit.
    """
    fields = override if choice in ("auto", "vllm") else {**generation_config, **override}
    return fields.get("max_new_tokens")


def _sampling_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    pairs = ((name, config.get(key)) for key, name in _GENERATION_KEYS.items())
    return {name: value for name, value in pairs if value is not None}


def _check_defaults(fields: Mapping[str, Any], parameter: str, way_out: str) -> None:
    try:
        SamplingParams(**fields)
    except VLLMValidationError as error:
        raise VLLMValidationError(
            f"{parameter}: {error} Or {way_out}.", parameter=parameter, value=dict(fields)
        ) from error


def resolve_batch_invariant(
    requested: bool | None,
    platform: str,
    dtype: str,
    jax_version: tuple[int, ...],
    *,
    is_free: bool,
    is_assured: bool = True,
) -> bool:
    """Return whether steps are compiled so that a row never depends on the others; refuse it where it is unproven.

    By default it is on where it costs nothing; `is_free` is True if it costs nothing in float32. `is_assured` is True
    if attention and recurrent states guarantee it.
    """
    if requested is None:
        return (
            is_assured
            and platform == "cpu"
            and (dtype == "bfloat16" or (is_free and dtype == "float32" and jax_version >= (0, 12)))
        )
    reason = None
    if platform != "cpu":
        reason = f"it is only assured on CPU so far, and this is a {platform}"
    elif dtype == "float32" and jax_version < (0, 12):
        reason = "in float32 it needs jax 0.12 or newer; use that, or dtype='bfloat16'"
    elif not is_assured:
        reason = "attention over latents and recurrent states assure it only in the CPU's own kernels, not in plain XLA"
    if requested and reason is not None:
        message = f"batch_invariant=True is not supported here: {reason}. Or leave it out."
        raise VLLMValidationError(message, parameter="batch_invariant", value=requested)
    return requested


def read_chat_template(template: str | None) -> str | None:
    """Return the template's text: `template` itself, or the content of the file that it names."""
    if template is None or "{" in template or "\n" in template:
        return template
    try:
        return read_text(Path(template).expanduser())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the home folder of an unknown user
        raise VLLMValidationError(
            f"chat_template={shown(template)} is neither a Jinja template nor a readable file ({error}).",
            parameter="chat_template",
            value=template,
        ) from error


def load_class(name: str, value: type | str | None) -> type | None:
    """Import a class by its name, "module.Class" or "module:Class"; a class and None pass through."""
    if not isinstance(value, str):
        return value
    try:
        loaded = import_name(value)
    except ImportError as error:
        raise VLLMValidationError(
            f"{name}={value!r} cannot be imported: {error}.", parameter=name, value=value
        ) from error
    if not isinstance(loaded, type):
        raise VLLMValidationError(f"{name}={value!r} is not a class.", parameter=name, value=value)
    return loaded
