"""Refuse methods of vLLM's engines that do not exist; each error names an alternative."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from jaxllm.exceptions import VLLMValidationError

_BOTH = {
    "apply_model": "is not supported yet; a model is a pure function here, not a torch module",
    "collective_rpc": "is not supported yet; there are no workers, the engine runs in this process",
    "release_kv_cache_memory": "is not supported yet; sleep() frees it with the weights; see wake_up(['weights'])",
}

LLM_REFUSES: Mapping[str, str] = _BOTH | {
    "reward": "is gone, as in vLLM; call encode(..., pooling_task='token_classify'), or classify()",
}
"""The methods that `LLM` refuses; each reason completes the sentence "LLM.method() ..."."""
ENGINE_REFUSES: Mapping[str, str] = _BOTH | {
    "do_log_stats_with_interval": "is not needed: a line is logged every ten seconds; do_log_stats() logs one at once",
    "from_vllm_config": "is not supported; call from_engine_args(EngineArgs(...)), which makes the configuration",
    "has_unfinished_requests_dp": "is not supported: has_unfinished_requests() speaks for all replicas",
}
"""The methods that `LLMEngine` refuses; each reason completes the sentence "LLMEngine.method() ..."."""


_REPLICAS = "is not supported; replicas that fail are started again, and check_health() says how the engine is"
_CHECKPOINT = "is not supported yet; sleep() frees the device, wake_up() brings weights and caches back"
ASYNC_REFUSES: Mapping[str, str] = {
    "collective_rpc": "is not supported yet; there are no workers, the engine's core runs all devices",
    "checkpoint_prepare": _CHECKPOINT,
    "checkpoint_restore": _CHECKPOINT,
    "get_external_elastic_ep_phase": _REPLICAS,
    "get_status": _REPLICAS,
    "handle_fault": _REPLICAS,
    "notify_kv_transfer_request_rejected": "is not supported yet; KV caches are not exchanged between engines",
}
"""The methods that `AsyncLLM` refuses; each reason completes the sentence "AsyncLLM.method() ..."."""

_TEXT = "is not shared; generate() takes text and token ids, and get_tokenizer() returns the tokenizer"
ASYNC_LACKS: Mapping[str, str] = {
    "engine_core": "is not shared; the core is elsewhere, and the methods of the engine itself speak with it",
    "input_processor": _TEXT,
    "renderer": _TEXT,
    "logger_manager": "is not there; get_metrics() returns what is measured, do_log_stats() logs a line",
    "output_processor": "is not shared; abort() ends requests, pause_generation() all of them, and "
    "wait_for_requests_to_drain() waits until none is left",
}
"""The attributes of vLLM's `AsyncLLM` that do not exist; each reason completes the sentence "AsyncLLM.name ..."."""


class _RefusedMethod:
    """A method that takes anything and raises VLLMValidationError."""

    def __init__(self, owner: str, name: str, reason: str) -> None:
        """Complete the sentence "owner.name() ..." with `reason`."""
        self._message, self._name = f"{owner}.{name}() {reason}.", name

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise, whatever the arguments."""
        raise VLLMValidationError(self._message, parameter=self._name)


class _LackedAttribute:
    """An attribute that raises AttributeError with a message of its own."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __get__(self, owner: object, kind: type | None = None) -> NoReturn:
        raise AttributeError(self._message)


class RefusesMethods:
    """A base of classes that refuse methods by name, `class C(RefusesMethods, refused={name: reason})`, and say of
    attributes that they lack, `lacks={name: reason}`, what to use instead; hasattr is False for these.
    """

    def __init_subclass__(
        cls,
        *,
        refused: Mapping[str, str] = MappingProxyType({}),
        lacks: Mapping[str, str] = MappingProxyType({}),
        **others: Any,
    ) -> None:
        super().__init_subclass__(**others)
        for name, reason in lacks.items():
            setattr(cls, name, _LackedAttribute(f"{cls.__name__}.{name} {reason}."))
        for name, reason in refused.items():
            setattr(cls, name, _RefusedMethod(cls.__name__, name, reason))
