"""Settings of pooling models for tests."""

from __future__ import annotations

from typing import Any

from jaxllm.resolve.pooling_settings import PoolingSettings


def make_settings(**fields: Any) -> PoolingSettings:
    """Return settings with neutral values for the fields that are not given."""
    neutral: dict[str, Any] = dict.fromkeys(PoolingSettings.__struct_fields__)
    neutral |= {"model": "tiny", "use_activation": True, "is_step": False, "logit_mean": 0.0, "logit_sigma": 1.0}
    neutral |= {"id2label": {}, "is_matryoshka": False, "prompts": {}, "similarity": "cosine"}
    neutral |= {"has_token_types": False, "runs_whole_tasks": (), "lowercases": False, "has_linear_head": True}
    neutral |= {"token_outputs": {}, "adapter_names": ()}
    return PoolingSettings(**(neutral | fields))
