"""Some methods of vLLM's `LLM` and `LLMEngine` are refused by name; each error says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from jaxllm.exceptions import VLLMValidationError

# vLLM's words, then ours.
_POOLING = (
    "is only supported for pooling models. Try passing `--runner pooling` to use the model as a pooling model. "
    "jaxllm runs models that generate so far; pooling models are yet to come"
)
_NEW_WEIGHTS = "is not supported yet; to run other weights, save a checkpoint and make a new LLM from it"
_LORA = "is not supported yet; merge the adapter into a checkpoint and make a new LLM from it"
_BOTH = {
    "apply_model": "is not supported yet; a model is a pure function here, not a torch module",
    "collective_rpc": "is not supported yet; there are no workers, the engine runs in this process",
    "get_weight_version": _NEW_WEIGHTS,
    "release_kv_cache_memory": "is not supported yet; shutdown() releases the KV cache with all the rest",
    "sleep": "is not supported yet; call shutdown() and make a new LLM when it is needed again",
    "wake_up": "is not supported yet; an engine is always awake until shutdown()",
}

LLM_REFUSES: Mapping[str, str] = _BOTH | {
    "classify": _POOLING,
    "embed": _POOLING,
    "encode": _POOLING,
    "reward": _POOLING,
    "score": _POOLING,
    "finish_weight_update": _NEW_WEIGHTS,
    "init_weight_transfer_engine": _NEW_WEIGHTS,
    "shutdown_weight_transfer_engine": _NEW_WEIGHTS,
    "start_draft_weight_update": _NEW_WEIGHTS,
    "start_weight_update": _NEW_WEIGHTS,
    "update_weight_version": _NEW_WEIGHTS,
    "update_weights": _NEW_WEIGHTS,
}
"""The methods that `LLM` refuses; each reason completes the sentence "LLM.method() ..."."""
ENGINE_REFUSES: Mapping[str, str] = _BOTH | {
    "add_lora": _LORA,
    "list_loras": _LORA,
    "pin_lora": _LORA,
    "remove_lora": _LORA,
    "do_log_stats_with_interval": "is not needed: a line is logged every ten seconds; do_log_stats() logs one at once",
    "from_vllm_config": "is not supported; call from_engine_args(EngineArgs(...)), which makes the configuration",
    "has_unfinished_requests_dp": "is not supported yet; there are no replicas, has_unfinished_requests() says it all",
    "set_weight_version": _NEW_WEIGHTS,
}
"""The methods that `LLMEngine` refuses; each reason completes the sentence "LLMEngine.method() ..."."""


ASYNC_REFUSES: Mapping[str, str] = {
    name: reason for name, reason in _BOTH.items() if name not in ("sleep", "wake_up")
} | {
    "add_lora": _LORA,
    "encode": _POOLING,
    "list_loras": _LORA,
    "pin_lora": _LORA,
    "remove_lora": _LORA,
    "finish_weight_update": _NEW_WEIGHTS,
    "init_weight_transfer_engine": _NEW_WEIGHTS,
    "start_weight_update": _NEW_WEIGHTS,
    "update_weights": _NEW_WEIGHTS,
    "scale_elastic_ep": "is not supported yet; there are no replicas",
}
"""The methods that `AsyncLLM` refuses; each reason completes the sentence "AsyncLLM.method() ..."."""


class _RefusedMethod:
    """A method that takes anything and raises VLLMValidationError."""

    def __init__(self, owner: str, name: str, reason: str) -> None:
        """Complete the sentence "owner.name() ..." with `reason`."""
        self._message, self._name = f"{owner}.{name}() {reason}.", name

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise, whatever the arguments."""
        raise VLLMValidationError(self._message, parameter=self._name)


class RefusesMethods:
    """A base of classes that refuse methods by name: `class C(RefusesMethods, refused={name: reason})`."""

    def __init_subclass__(cls, *, refused: Mapping[str, str] = MappingProxyType({}), **others: Any) -> None:
        super().__init_subclass__(**others)
        for name, reason in refused.items():
            setattr(cls, name, _RefusedMethod(cls.__name__, name, reason))
