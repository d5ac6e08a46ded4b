"""Make the `PoolingParams` that the engine runs by of a user's: checked against the model, and complete."""

from __future__ import annotations

from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.pooling_params import CLASSIFY_TASKS, EMBED_TASKS, TOKEN_TASKS, PoolingParams
from jaxllm.resolve.pooling_settings import (
    STEP_FIELDS,
    PoolingSettings,
    check_dimensions,
    check_returned,
)

_NEEDS_TASK = """pooling_task required for `LLM.encode`.
Please use one of the more specific methods or set the pooling_task when using `LLM.encode`:
  - For embeddings, use `LLM.embed(...)` or `pooling_task="embed"`.
  - For classification logits, use `LLM.classify(...)` or `pooling_task="classify"`.
  - For similarity scores, use `LLM.score(...)`.
  - For rewards, `pooling_task="classify"` or `pooling_task="token_classify"`.
  - For token classification, use `pooling_task="token_classify"`.
  - For multi-vector retrieval, use `pooling_task="token_embed"`."""


def verify_pooling_task(task: str | None, settings: PoolingSettings | None, runner: str) -> None:
    """Refuse a task that the engine does not do, in vLLM's words; "generate" is one too.

    `settings` are None for an engine that does not pool, and `runner` is what it was started for: one for "generate"
    may pool besides.
    """
    if task == "generate":
        if runner != "generate":
            raise _task_error(
                "LLM.generate() is only supported for generative models. Try passing `--runner generate` to use the "
                "model as a generative model.",
                task,
            )
        return
    if settings is None:
        raise _task_error(
            "LLM.encode() is only supported for pooling models. Try passing `--runner pooling` to use the model as a "
            "pooling model.",
            task,
        )
    if task is None:
        raise _task_error(_NEEDS_TASK, task)
    if task in settings.tasks:
        return
    for kind, tasks, name in (("embed", EMBED_TASKS, "Embedding"), ("classify", CLASSIFY_TASKS, "Classification")):
        if task in tasks:
            # The model has the other task of this kind, and with a head for both pooler_config left this one out.
            if set(tasks) & set(settings.tasks) and not settings.token_outputs:
                message = f'Try switching the model\'s pooling_task via `PoolerConfig(task="{task}")`'
                raise _task_error(message, task)
            raise _task_error(
                f"{name} API is not supported by this model. Try converting the model using `--convert {kind}`.", task
            )
    raise _task_error(f"Unsupported task: {task!r} Supported tasks: {settings.tasks}", task)


def resolve_pooling_params(source: Any, task: str | None, settings: PoolingSettings) -> PoolingParams:
    """Return a private, complete copy of a request's params; None means the defaults.

    `task` is the caller's task, if it has one. In the result, `task`, `use_activation` and
    `skip_reading_prefix_cache` are never None, and the rest is None where it does nothing. Raises VLLMValidationError,
    in vLLM's words where it has some.
    """
    if not (source is None or isinstance(source, PoolingParams)):
        message = f"pooling_params must be PoolingParams, got {shown(source)} ({type(source).__name__})."
        raise VLLMValidationError(message, parameter="pooling_params", value=source)
    params = PoolingParams() if source is None else source.clone()
    params.task = _resolve_task(params.task, task, settings)
    if params.use_activation is None:
        params.use_activation = settings.use_activation
    _check_fields(params, settings)
    if params.task in EMBED_TASKS:
        params.dimensions = params.dimensions or settings.dimensions
        if params.dimensions is not None:
            check_dimensions(params.dimensions, settings, "dimensions")
    if settings.is_step and params.task in TOKEN_TASKS:
        for name in STEP_FIELDS:
            if getattr(params, name) is None:
                setattr(params, name, getattr(settings, name))
        check_returned(params.returned_token_ids, settings, "returned_token_ids")
    if params.late_chunking_params is not None:
        _check_late_chunking(params, settings)
    _resolve_caching(params, settings)
    return params


def _resolve_task(params_task: str | None, task: str | None, settings: PoolingSettings) -> str:
    """Return the task of params or caller; by default one with outputs for all tokens, as in vLLM."""
    if params_task is not None and task is not None and params_task != task:
        raise _task_error(f"You cannot overwrite param.task={params_task!r} with pooling_task={task!r}!", params_task)
    wanted = task or params_task or next((each for each in TOKEN_TASKS if each in settings.tasks), settings.tasks[0])
    if wanted not in settings.tasks:
        raise _task_error(f"Unsupported task: {wanted!r} Supported tasks: {list(settings.tasks)}", wanted)
    return wanted


def _check_fields(params: PoolingParams, settings: PoolingSettings) -> None:
    """Refuse fields that do nothing in this task."""
    taken = ["dimensions", "use_activation"] if params.task in EMBED_TASKS else ["use_activation"]
    if settings.is_step and params.task in TOKEN_TASKS:
        taken += STEP_FIELDS
    set_names = [name for name in ("dimensions", *STEP_FIELDS) if getattr(params, name) is not None]
    wrong = [name for name in set_names if name not in taken]
    if wrong:
        message = f"Task {params.task!r} only supports {taken} parameters, does not support {wrong} parameters"
        raise VLLMValidationError(message, parameter=wrong[0], value=getattr(params, wrong[0]))


def _check_late_chunking(params: PoolingParams, settings: PoolingSettings) -> None:
    reason = None
    if params.task != "token_embed":
        reason = 'it needs the task "token_embed"'
    elif not settings.has_linear_head:
        reason = "the model's vectors of tokens do not average to its embedding, by the layers that make them"
    if reason is not None:
        message = f"late_chunking_params is not supported here: {reason}. Leave it out."
        raise VLLMValidationError(message, parameter="late_chunking_params", value=params.late_chunking_params)


def _resolve_caching(params: PoolingParams, settings: PoolingSettings) -> None:
    """Let the cache stand in for tokens only where no output is made of them."""
    needs_all = params.task in TOKEN_TASKS or params.task in settings.runs_whole_tasks
    if needs_all and params.skip_reading_prefix_cache is False:
        message = f"skip_reading_prefix_cache=False is not supported in task {params.task!r}, whose output is made of "
        message += "all tokens. Leave it out."
        raise VLLMValidationError(message, parameter="skip_reading_prefix_cache", value=False)
    params.skip_reading_prefix_cache = needs_all or bool(params.skip_reading_prefix_cache)


def _task_error(message: str, task: str | None) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="pooling_task", value=task)
