"""Choose the dtype that the model computes in, from the argument, the checkpoint and the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_DTYPE_ALIASES: Mapping[str, str] = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}


def resolve_dtype(requested: str, checkpoint: Checkpoint, platform: str) -> str:
    """Return "float32", "bfloat16" or "float16" for `requested` on `platform` ("cpu", "gpu" or "tpu").

    "auto" is the checkpoint's dtype. Kernels do not support float16, so "auto" replaces it, with a warning, by float32
    on a CPU and by bfloat16 on a GPU or TPU. For GGUF, "auto" is bfloat16 if the device multiplies it fast, else
    float32. An explicit "float16" is float32 on a CPU too; a GPU or TPU computes it in plain XLA.
    """
    dtype = _asked_for(requested, checkpoint, platform)
    if (platform, dtype) != ("cpu", "float16"):
        return dtype
    logger.warning(
        "float16 is computed as float32 on a CPU: weights stay float16 in memory where its own kernels run, keys and "
        "values take twice as much as with dtype='bfloat16'"
    )
    return "float32"


def _asked_for(requested: str, checkpoint: Checkpoint, platform: str) -> str:
    """Return the dtype that argument and checkpoint ask for."""
    if requested != "auto":
        if requested not in _DTYPE_ALIASES:
            raise VLLMValidationError(
                f"dtype={requested!r} is not supported. Choose one of auto, {', '.join(_DTYPE_ALIASES)}.",
                parameter="dtype",
                value=requested,
            )
        return _DTYPE_ALIASES[requested]
    if checkpoint.is_gguf:
        return "bfloat16" if multiplies_bfloat16_fast(platform) else "float32"
    if checkpoint.dtype not in _DTYPE_ALIASES:
        raise VLLMValidationError(
            f'the checkpoint states dtype {checkpoint.dtype!r}; set dtype="bfloat16" or "float32".',
            parameter="dtype",
            value=requested,
        )
    dtype = _DTYPE_ALIASES[checkpoint.dtype]
    if dtype != "float16" or platform == "cpu":
        return dtype
    logger.warning(
        "the checkpoint's float16 is computed as bfloat16, as no kernels for a %s have float16; "
        "dtype='float32' keeps its precision",
        platform.upper(),
    )
    return "bfloat16"


def multiplies_bfloat16_fast(platform: str) -> bool:
    """Return whether the device has bfloat16 matmul hardware.

    Every GPU and TPU has; CPUs need AVX512-BF16 or Arm's BF16.
    """
    if platform != "cpu":
        return True
    from pallas_kernels.native import processor

    return processor.current().has_bfloat16_dot
