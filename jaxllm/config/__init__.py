"""Settings are `EngineArgs` when the user gives them, and `EngineConfig` when the engine runs by them."""

from jaxllm.config.async_engine_args import AsyncEngineArgs
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.engine_config import EngineConfig
from jaxllm.config.groups import AttentionConfig, ReasoningConfig, StructuredOutputsConfig
from jaxllm.config.pooler import PoolerConfig
from jaxllm.config.profiler import ProfilerConfig

__all__ = [
    "AsyncEngineArgs",
    "AttentionConfig",
    "EngineArgs",
    "EngineConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "ReasoningConfig",
    "StructuredOutputsConfig",
]
