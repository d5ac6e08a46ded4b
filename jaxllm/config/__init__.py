"""The settings that a user may give: engine arguments, their kinds and groups, and environment variables."""

from jaxllm.config.groups import AttentionConfig, ReasoningConfig, StructuredOutputsConfig
from jaxllm.config.pooler import PoolerConfig
from jaxllm.config.profiler import ProfilerConfig

__all__ = ["AttentionConfig", "PoolerConfig", "ProfilerConfig", "ReasoningConfig", "StructuredOutputsConfig"]
