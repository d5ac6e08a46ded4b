"""Make an engine's model of the ops that are chosen, and check it against the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.load import check_names
from jaxllm.models.config import FeatureSpec
from jaxllm.models.model import Model
from jaxllm.models.params import ParamSpec
from jaxllm.models.specs import ModelSpecs
from jaxllm.resolve.engine_config import EngineConfig
from jaxllm.resolve.resolve_speculation import refused_draft

_TABLES = ("embed.table", "lm_head.table")
"""The parameters that a draft head may share with the model whose tokens it guesses."""


def make_model(config: EngineConfig) -> Model:
    """Return the model of an engine."""
    return _make_model(config, config.ops.specs)


def checked_model(config: EngineConfig) -> tuple[Model, Mapping[str, ParamSpec]]:
    """Return the model of an engine and the specs of its parameters, checked against the checkpoint's tensors.

    Raises VLLMValidationError for a checkpoint that does not fit its architecture.
    """
    model = make_model(config)
    return model, _checked(config, model.specs)


def checked_draft(
    config: EngineConfig, draft: EngineConfig, specs: Mapping[str, ParamSpec]
) -> tuple[Model, Mapping[str, ParamSpec]]:
    """Return an engine's draft model and the specs of its own parameters; `specs` are the other model's.

    Raises VLLMValidationError as `checked_model` does.
    """
    try:
        alone = draft.ops.specs
        model = _make_model(draft, alone.borrowing(_lent_to(alone, config, draft, specs)))
        return model, _checked(draft, model.specs)
    except VLLMValidationError as error:
        raise refused_draft(draft.args.model, error) from error


def lent_arrays(model: Model, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that a draft model shares with the other model, as a nested dict."""
    owners = [path.partition(".")[0] for path in model.specs.lent]
    # One table may serve as both.
    return {owner: params[owner if owner in params else "embed"] for owner in owners}


def _lent_to(
    head: ModelSpecs, config: EngineConfig, draft: EngineConfig, specs: Mapping[str, ParamSpec]
) -> Mapping[str, ParamSpec]:
    """Return the specs of the model's tables that a draft head borrows."""
    if draft.model_config.draft_head is None:
        return {}
    tensors, lent = draft.checkpoint.tensors, {}
    for path, spec in head.param_specs(tensors).items():
        if path not in _TABLES:
            continue
        table = specs.get(path, specs["embed.table"])
        is_own = draft.checkpoint is not config.checkpoint and spec.sources[0] in tensors
        if not is_own and table.shape == spec.shape:
            lent[path] = table
    return lent


def _make_model(config: EngineConfig, specs: ModelSpecs) -> Model:
    ops, head = config.ops, None if config.draft is None else config.draft.model_config.draft_head
    features = None if head is None else head.features
    if config.hidden_layers:
        taps = tuple(layer + 1 for layer in config.hidden_layers)  # a layer's output goes into the next one
        features = FeatureSpec(taps, len(taps) * config.model_config.hidden_size, is_returned=True)
    return Model(
        specs,
        ops=ops.layers,
        adapter_shape=config.adapter_shape,
        features=features,
        towers=ops.towers,
        encoder=ops.encoder,
    )


def _checked(config: EngineConfig, specs: ModelSpecs) -> Mapping[str, ParamSpec]:
    """Return the specs of a model's own parameters, checked against the checkpoint's tensors."""
    params = specs.all_param_specs(config.checkpoint.tensors)
    params = {path: spec for path, spec in params.items() if path not in specs.lent}
    if config.args.load_format != "dummy":
        check_names(params, config.checkpoint, ignored=specs.ignored_tensors)
    return params
