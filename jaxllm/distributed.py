"""vLLM's import path for the clean-up that programs call between two models."""

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the device memory of every `LLM` that nothing refers to any more, as after `del llm`."""
    del shutdown_ray  # there is no Ray
    gc.collect()
