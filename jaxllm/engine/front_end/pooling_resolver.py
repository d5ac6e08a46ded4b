"""A stand-in."""

from __future__ import annotations

import copy

from jaxllm.config.pooling import PoolingSettings
from jaxllm.pooling_params import PoolingParams


def with_task(params: PoolingParams, task: str) -> PoolingParams:
    """Return the params with a task."""
    params = copy.copy(params)
    params.task = task
    return params


def resolve_pooling_params(params: PoolingParams, task: str | None, settings: PoolingSettings | None) -> PoolingParams:
    """Return a private copy."""
    assert settings is not None
    params = copy.copy(params)
    params.task = task
    params.use_activation = settings.use_activation if params.use_activation is None else params.use_activation
    return params


def verify_pooling_task(method: str, task: str | None, settings: PoolingSettings | None) -> str:
    """Return the task."""
    assert task is not None
    return task
