"""Read the settings of a head's outputs from config.json: class names, activation and dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown

if TYPE_CHECKING:
    from jaxllm.loading.checkpoint import Checkpoint


def class_activation(model: str, hf_config: Mapping[str, Any], name: Any, num_labels: int) -> str:
    """Return the activation of the classes' scores: by the problem type in config.json, or by name.

    `name` is the activation from the files beside config.json; older versions had it in config.json.
    """
    by_classes = "softmax" if num_labels > 1 else "sigmoid"
    match hf_config.get("problem_type"):
        case "regression":
            return "none"
        case "single_label_classification":
            return by_classes
        case "multi_label_classification":
            return "sigmoid"
    inner = hf_config.get("sentence_transformers")
    name = name or (inner.get("activation_fn") if isinstance(inner, Mapping) else None)
    name = name or hf_config.get("sbert_ce_default_activation_function")
    if name is None:
        return by_classes
    known = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": by_classes}
    is_torch = isinstance(name, str) and name.startswith("torch.nn.modules.")
    activation = known.get(name.rpartition(".")[2]) if is_torch else None
    if activation is None:
        message = f"model={model!r}: its activation_fn is {shown(name)}, which is not supported; PyTorch's"
        raise VLLMValidationError(f"{message} {', '.join(known)} are.", parameter="model", value=model)
    return activation


def class_names(model: str, hf_config: Mapping[str, Any], num_labels: int) -> dict[str, str]:
    """Return the names of the classes; classes without a name get HF's default one."""
    labels = hf_config.get("id2label") or {}
    if not isinstance(labels, Mapping) or not all(isinstance(name, str | int) for name in labels.values()):
        message = f"model={model!r}: config.json: id2label is {shown(labels)}, expected the names of classes."
        raise VLLMValidationError(message, parameter="model", value=model)
    return {str(i): str(labels.get(str(i), f"LABEL_{i}")) for i in range(num_labels)}


def read_matryoshka(model: str, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether embeddings may be cut, and to which numbers of dimensions."""
    known, may = hf_config.get("matryoshka_dimensions"), hf_config.get("is_matryoshka", False)
    is_list = isinstance(known, list) and all(type(each) is int and each > 0 for each in known)
    if not (known is None or is_list) or not isinstance(may, bool):
        name, value = ("is_matryoshka", may) if known is None or is_list else ("matryoshka_dimensions", known)
        message = f"model={model!r}: config.json: {name} is {shown(value)}, which it cannot be."
        raise VLLMValidationError(message, parameter="model", value=model)
    return {"is_matryoshka": bool(known) or may, "matryoshka_dimensions": known or None}


def with_token_ids(hf_config: Mapping[str, Any], checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the HF config with the tokens of `classifier_from_token` as ids."""
    tokens = hf_config.get("classifier_from_token")
    if tokens is None:
        return hf_config
    if not isinstance(tokens, list) or not all(type(token) in (str, int) for token in tokens):
        message = f"classifier_from_token is {shown(tokens)}, expected a list of tokens."
        raise VLLMValidationError(message, parameter="hf_overrides", value=tokens)
    if not any(isinstance(token, str) for token in tokens):
        return hf_config
    known = checkpoint.tokenizer().get_vocab()
    for token in tokens:
        if isinstance(token, str) and token not in known:
            message = f"classifier_from_token: {shown(token)} is no token of {checkpoint.source}."
            raise VLLMValidationError(message, parameter="hf_overrides", value=token)
    return {**hf_config, "classifier_from_token": [known.get(token, token) for token in tokens]}
