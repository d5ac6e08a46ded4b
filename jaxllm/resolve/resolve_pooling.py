"""Settle whether an engine generates or pools, and how hidden states become outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxllm.config.pooler import PoolerConfig
from jaxllm.core_messages import TokenOutput
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.pooling_params import CLASSIFY_TASKS, EMBED_TASKS, TOKEN_TASKS
from jaxllm.resolve import checkpoint_settings
from jaxllm.resolve.head_settings import class_activation, class_names, read_matryoshka
from jaxllm.resolve.late_interaction import TextForms, find_forms
from jaxllm.resolve.pooling_settings import (
    STEP_FIELDS,
    PoolingSettings,
    check_dimensions,
    check_returned,
)

if TYPE_CHECKING:
    from jaxllm.config.arguments import EngineArguments
    from jaxllm.loading.checkpoint import Checkpoint
    from jaxllm.loading.sentence_transformers import Embedding, SentenceFiles, Settings
    from jaxllm.models.config import HeadLayer, ModelConfig, Pooling


class Resolved(NamedTuple):
    """The settled tasks of an engine."""

    model_config: ModelConfig
    pooling: PoolingSettings | None
    """None for an engine that only generates."""
    runner_type: str
    convert_type: str
    pooler_config: PoolerConfig | None
    """The user's config with settled values; None for an engine that only generates."""
    max_length: int | None = None
    """The longest sequence to pool by the checkpoint's files; None if they set none."""


def resolve_pooling(
    args: EngineArguments, checkpoint: Checkpoint, hf_config: Mapping[str, Any], model_config: ModelConfig
) -> Resolved:
    """Settle the tasks of the model, which its family has read from `hf_config`.

    Raises VLLMValidationError, in vLLM's words where possible, for a task that the model does not have.
    """
    from jaxllm.loading.sentence_transformers import SentenceFiles, read_settings

    files = checkpoint.sentence_files or SentenceFiles(checkpoint.source)
    runner, convert = _resolve_runner(args, files, pools=model_config.pooling is not None)
    if runner == "generate" and convert == "none":
        if args.pooler_config is not None:
            message = "pooler_config is for models that pool: pass runner='pooling', or leave it out."
            raise VLLMValidationError(message, parameter="pooler_config", value=args.pooler_config)
        return Resolved(model_config, None, runner, convert, None)
    user_config, from_files = args.pooler_config or PoolerConfig(), read_settings(files)
    converted = model_config if convert == "none" else _convert(args.model, files, hf_config, model_config, convert)
    pooling, embedding = _pooling_of(converted), _find_embedding(files, converted)
    forms = TextForms()
    if not args.skip_tokenizer_init:
        forms = find_forms(files, hf_config, checkpoint, model_config)
    pooling = _with_files(pooling, embedding, converted.hidden_size, user_config, checkpoint.source)
    pooling = dataclasses.replace(pooling, filler_id=forms.unseen_id)
    # A model that generates too keeps its output head.
    body = model_config if runner == "generate" else converted
    body = dataclasses.replace(body, pooling=pooling)
    _check_types(user_config, pooling.tasks)
    settled = _settle(user_config, pooling, embedding)
    settings = _make_settings(args, settled, from_files, forms, hf_config, body)
    max_length = from_files.max_length if runner == "pooling" else None
    return Resolved(body, settings, runner, convert, settled, max_length)


def _resolve_runner(args: EngineArguments, files: SentenceFiles, *, pools: bool) -> tuple[str, str]:
    """Settle runner and convert as vLLM does; `pools` is True if the architecture is a pooling model."""
    runner, convert = args.runner, args.convert
    if runner == "auto":
        is_sentence_transformer = files.has("Pooling") or files.has("LogitScore") or files.is_multi_vector
        runner = "pooling" if convert in ("embed", "classify") or pools or is_sentence_transformer else "generate"
    if pools and runner == "generate":
        raise VLLMValidationError(
            "Embedding models do not support `--runner generate`. Use `--runner pooling` or `--runner auto` for "
            "embedding models.",
            parameter="runner",
            value=runner,
        )
    if convert == "auto":
        kind = "classify" if files.has("LogitScore") else "embed"
        convert = "none" if pools or runner == "generate" else kind
    elif convert == "none" and runner == "pooling" and not pools:
        raise VLLMValidationError(
            "This model does not support `--runner pooling`. You can pass `--convert <embed|classify> to adapt it into "
            "a pooling model.",
            parameter="convert",
            value=convert,
        )
    return runner, convert


def _convert(
    model: str, files: SentenceFiles, hf_config: Mapping[str, Any], model_config: ModelConfig, convert: str
) -> ModelConfig:
    """Return the model with the head that `convert` asks for; a pooling model must have it already."""
    from jaxllm.loading.sentence_transformers import read_classifier_tokens
    from jaxllm.models.pooling import classification, embedding

    if model_config.pooling is not None:
        if not set(model_config.pooling.tasks) & set(EMBED_TASKS if convert == "embed" else CLASSIFY_TASKS):
            tasks = ", ".join(model_config.pooling.tasks)
            message = f"convert={convert!r} is for models that generate; {model_config.architecture} has {tasks}."
            raise VLLMValidationError(message, parameter="convert", value=convert)
        return model_config
    try:
        if convert == "embed":
            return embedding(model_config)
        tokens = read_classifier_tokens(files)
        if tokens is not None and hf_config.get("classifier_from_token") is None:
            method = "from_2_way_softmax" if len(tokens) == 2 else "no_post_processing"
            hf_config = {**hf_config, "classifier_from_token": tokens, "method": method}
        return classification(model_config, hf_config, checkpoint_settings.find_family(model, hf_config)[1])
    except VLLMValidationError:
        raise
    except ValueError as error:
        raise VLLMValidationError(f"convert={convert!r}: {error}.", parameter="convert", value=convert) from error


def _pooling_of(model_config: ModelConfig) -> Pooling:
    assert model_config.pooling is not None
    return model_config.pooling


def _find_embedding(files: SentenceFiles, model_config: ModelConfig) -> Embedding | None:
    """Return the embedding that the sentence-transformers modules make of hidden states; None if they make none."""
    from jaxllm.loading.sentence_transformers import read_embedding

    embeds = set(_pooling_of(model_config).tasks) & set(EMBED_TASKS)
    # A list of modules without layers after the model has no effect.
    return read_embedding(files) if embeds and len(files.modules) > 1 else None


def _with_files(
    pooling: Pooling, embedding: Embedding | None, hidden_size: int, user_config: PoolerConfig, source: str
) -> Pooling:
    """Return a family's pooling, overridden by files and arguments."""
    from jaxllm.models.config import POOLING_TYPES

    by_token = embedding is not None and embedding.by_token
    kind = user_config.seq_pooling_type or (embedding.kind if embedding and not by_token else pooling.kind)
    if kind not in POOLING_TYPES:
        message = f"{source}: its Pooling module has the mode {shown(kind)}, which is not supported"
        way_out = "pooler_config={'pooling_type': 'MEAN'}, CLS or LAST sets another."
        raise VLLMValidationError(f"{message}; {way_out}", parameter="model", value=source)
    tasks = tuple(task for task in pooling.tasks if task in TOKEN_TASKS) if by_token else pooling.tasks
    if user_config.task is not None:
        if user_config.task not in tasks:
            message = f"Unsupported task: {user_config.task!r} Supported tasks: {tasks}"
            raise VLLMValidationError(message, parameter="pooler_config", value=user_config.task)
        tasks = (user_config.task,)
    head = (*pooling.head, *_dense_layers(embedding, pooling.size(hidden_size), source)) if embedding else pooling.head
    return dataclasses.replace(pooling, kind=kind, tasks=tasks, head=head)


def _dense_layers(embedding: Embedding, size: int, source: str) -> list[HeadLayer]:
    from jaxllm.models.config import HeadLayer

    layers = []
    for dense in embedding.layers:
        if dense.in_features != size:
            message = f"{source}: {dense.folder}/config.json: in_features is {dense.in_features}, expected {size}."
            raise VLLMValidationError(message, parameter="model", value=source)
        size = dense.out_features
        fields: dict[str, Any] = {"size": size, "bias": dense.bias, "act": dense.act}
        if dense.adds_input:
            fields["residual"] = "" if dense.in_features == size else f"{dense.folder}/residual"
        layers.append(HeadLayer(source=f"{dense.folder}/linear", **fields))
    return layers


def _check_types(user_config: PoolerConfig, tasks: tuple[str, ...]) -> None:
    """Refuse a pooling type that no task of the model uses."""
    of_tokens = [task in TOKEN_TASKS for task in tasks]
    for name, has_effect in (("seq_pooling_type", not all(of_tokens)), ("tok_pooling_type", any(of_tokens))):
        if getattr(user_config, name) is not None and not has_effect:
            message = f"pooler_config: pooling_type={getattr(user_config, name)!r} has no effect in {', '.join(tasks)}."
            raise VLLMValidationError(message, parameter="pooler_config", value=getattr(user_config, name))


def _settle(user_config: PoolerConfig, pooling: Pooling, embedding: Embedding | None) -> PoolerConfig:
    """Return the user's config with defaults filled in."""
    use_activation = user_config.use_activation
    if use_activation is None:
        use_activation = embedding.normalizes if embedding else True
    return dataclasses.replace(
        user_config,
        seq_pooling_type=pooling.kind,
        tok_pooling_type=user_config.tok_pooling_type or "ALL",
        use_activation=use_activation,
        pooling_type=None,
    )


def _make_settings(
    args: EngineArguments,
    pooler: PoolerConfig,
    from_files: Settings,
    forms: TextForms,
    hf_config: Mapping[str, Any],
    model_config: ModelConfig,
) -> PoolingSettings:
    pooling = _pooling_of(model_config)
    size = pooling.size(model_config.hidden_size)
    classifies = any(task in CLASSIFY_TASKS for task in pooling.tasks) and not pooling.token_heads
    name = (args.served_model_name or [args.model])[0]
    settings = PoolingSettings(
        model=name,
        tasks=pooling.tasks,
        activation=class_activation(args.model, hf_config, from_files.activation, size) if classifies else "normalize",
        use_activation=bool(pooler.use_activation),
        dimensions=pooler.dimensions,
        step_tag_id=pooler.step_tag_id,
        returned_token_ids=pooler.returned_token_ids,
        is_step=pooler.tok_pooling_type == "STEP",
        logit_mean=0.0 if pooler.logit_mean is None else pooler.logit_mean,
        logit_sigma=1.0 if pooler.logit_sigma is None else pooler.logit_sigma,
        has_linear_head=not pooling.token_heads
        and all(layer.act is None and layer.norm is None for layer in pooling.head),
        output_size=size,
        num_labels=size if classifies else None,
        id2label=class_names(args.model, hf_config, size) if classifies else {},
        **read_matryoshka(args.model, hf_config),
        prompts=_instructions(hf_config, model_config) | dict(from_files.prompts),
        default_prompt_name=from_files.default_prompt_name,
        similarity=from_files.similarity,
        score_type=_score_type(pooling.tasks, size),
        has_token_types=model_config.num_token_types > 1,
        runs_whole_tasks=_whole_tasks(model_config),
        lowercases=from_files.lowercases,
        query_form=forms.query,
        document_form=forms.document,
        token_outputs=_token_outputs(pooling),
        adapter_names=model_config.task_adapters.names if model_config.task_adapters else (),
    )
    _check_pooler(pooler, settings)
    return settings


def _instructions(hf_config: Mapping[str, Any], model_config: ModelConfig) -> dict[str, str]:
    """Return the prompts of a model's adapters in config.json, "" where it has none."""
    if model_config.task_adapters is None:
        return {}
    known = hf_config.get("task_instructions") or {}
    texts = {name: known.get(name, "") for name in model_config.task_adapters.names if isinstance(known, Mapping)}
    if not texts or not all(isinstance(text, str) for text in texts.values()):
        message = f"config.json: task_instructions is {shown(known)}, expected a text for each task."
        raise VLLMValidationError(message, parameter="model", value=known)
    return texts


def _token_outputs(pooling: Pooling) -> dict[str, TokenOutput]:
    """Return where the outputs of each token head are among those of a step."""
    outputs: dict[str, TokenOutput] = {}
    for head in pooling.token_heads:
        outputs[head.task] = TokenOutput(
            start=sum(output.size for output in outputs.values()),
            size=head.size,
            activation=head.activation,
            first_id=head.first_id,
            last_id=head.last_id,
        )
    return outputs


def _check_pooler(pooler: PoolerConfig, settings: PoolingSettings) -> None:
    """Refuse settings that have no effect, or that no request can use."""
    classifies = settings.num_labels is not None
    if settings.is_step and settings.token_outputs:
        message = 'pooler_config: tok_pooling_type="STEP" is not supported where tasks have heads of their own.'
        raise VLLMValidationError(message, parameter="pooler_config", value="STEP")
    for name, has_effect in (
        ("dimensions", not classifies),
        *((name, classifies) for name in ("logit_mean", "logit_sigma")),
        *((name, settings.is_step) for name in STEP_FIELDS),
    ):
        if getattr(pooler, name) is not None and not has_effect:
            needs = (
                'tok_pooling_type="STEP"'
                if "_id" in name
                else f"a model that {'embeds' if classifies else 'classifies'}"
            )
            message = f"pooler_config: {name} needs {needs}."
            raise VLLMValidationError(message, parameter="pooler_config", value=getattr(pooler, name))
    if settings.dimensions is not None:
        check_dimensions(settings.dimensions, settings, "pooler_config")
    check_returned(pooler.returned_token_ids, settings, "pooler_config")


def _score_type(tasks: tuple[str, ...], size: int) -> str | None:
    if "embed" in tasks:
        return "bi-encoder"
    if "classify" in tasks:
        return "cross-encoder" if size == 1 else None
    return "late-interaction" if "token_embed" in tasks else None


def _whole_tasks(model_config: ModelConfig) -> tuple[str, ...]:
    """Return the tasks that need all tokens of a prompt in one step: tokens attend to later ones, or pool as one."""
    pooling = _pooling_of(model_config)
    if not is_causal(model_config) or pooling.filler_id is not None:
        return pooling.tasks
    return () if pooling.kind == "LAST" else tuple(task for task in pooling.tasks if task in ("embed", "classify"))


def is_causal(model_config: ModelConfig) -> bool:
    """Return whether no layer attends to later tokens."""
    return all(layer.causal for layer in model_config.layers)
