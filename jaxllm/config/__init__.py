"""Settings: `EngineArgs` as the user gives them, `EngineConfig` as the engine runs by them."""

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.engine_config import EngineConfig
from jaxllm.config.groups import AttentionConfig, ReasoningConfig, StructuredOutputsConfig

__all__ = ["AttentionConfig", "EngineArgs", "EngineConfig", "ReasoningConfig", "StructuredOutputsConfig"]
