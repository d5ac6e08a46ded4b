"""Methods of vLLM's `LLM` that have no meaning here yet: each raises, saying what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from jaxllm.exceptions import VLLMValidationError

# vLLM's words, then ours.
_POOLING = (
    "is only supported for pooling models. Try passing `--runner pooling` to use the model as a pooling model. "
    "jaxllm runs models that generate so far; pooling models are yet to come"
)
_NEW_WEIGHTS = "is not supported yet; to run other weights, save a checkpoint and make a new LLM from it"


class _RefusedMethod:
    """A method, declared by its name in the class, that takes anything and raises VLLMValidationError."""

    def __init__(self, reason: str) -> None:
        """Complete the sentence "LLM.method() ..." with `reason`."""
        self._reason = reason

    def __set_name__(self, owner: type, name: str) -> None:
        del owner
        self._name = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise."""
        raise VLLMValidationError(f"LLM.{self._name}() {self._reason}.", parameter=self._name)


class RefusedMethods:
    """The methods that `LLM` refuses by name."""

    encode = _RefusedMethod(_POOLING)
    embed = _RefusedMethod(_POOLING)
    classify = _RefusedMethod(_POOLING)
    reward = _RefusedMethod(_POOLING)
    score = _RefusedMethod(_POOLING)
    sleep = _RefusedMethod("is not supported yet; call shutdown() and make a new LLM when it is needed again")
    wake_up = _RefusedMethod("is not supported yet; an LLM is always awake until shutdown()")
    collective_rpc = _RefusedMethod("is not supported yet; there are no workers: the engine is llm.llm_engine")
    apply_model = _RefusedMethod("is not supported yet; a model is a pure function here, not a torch module")
    init_weight_transfer_engine = _RefusedMethod(_NEW_WEIGHTS)
    start_weight_update = _RefusedMethod(_NEW_WEIGHTS)
    start_draft_weight_update = _RefusedMethod(_NEW_WEIGHTS)
    update_weights = _RefusedMethod(_NEW_WEIGHTS)
    finish_weight_update = _RefusedMethod(_NEW_WEIGHTS)
    update_weight_version = _RefusedMethod(_NEW_WEIGHTS)
    get_weight_version = _RefusedMethod(_NEW_WEIGHTS)
