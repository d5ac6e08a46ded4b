"""vLLM's import path for loading plugins: functions that packages name in the entry-point group `jaxllm.plugins`."""

from jaxllm.config.plugins import load_plugins

load_general_plugins = load_plugins

__all__ = ["load_general_plugins", "load_plugins"]
