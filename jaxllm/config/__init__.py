"""Settings are `EngineArgs` when the user gives them, and `EngineConfig` when the engine runs by them."""

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.engine_config import EngineConfig
from jaxllm.config.groups import AttentionConfig, ReasoningConfig, StructuredOutputsConfig
from jaxllm.config.profiler import ProfilerConfig

__all__ = [
    "AttentionConfig",
    "EngineArgs",
    "EngineConfig",
    "ProfilerConfig",
    "ReasoningConfig",
    "StructuredOutputsConfig",
]
