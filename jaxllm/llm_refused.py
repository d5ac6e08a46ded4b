"""Methods of vLLM's `LLM` that have no meaning here yet: each refuses, saying what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from jaxllm.exceptions import VLLMValidationError


def _refuse(method: str, message: str) -> NoReturn:
    raise VLLMValidationError(message, parameter=method)


def _not_yet(method: str, instead: str) -> NoReturn:
    _refuse(method, f"LLM.{method}() is not supported yet; {instead}.")


def _only_pooling(method: str) -> NoReturn:
    # vLLM's words, then ours.
    _refuse(
        method,
        f"LLM.{method}() is only supported for pooling models. Try passing `--runner pooling` to use the model as a "
        "pooling model. jaxllm runs models that generate so far; pooling models are yet to come.",
    )


class RefusedMethods:
    """The part of `LLM` that refuses by name."""

    def encode(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: this model generates text."""
        _only_pooling("encode")

    def embed(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: this model generates text."""
        _only_pooling("embed")

    def classify(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: this model generates text."""
        _only_pooling("classify")

    def reward(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: this model generates text."""
        _only_pooling("reward")

    def score(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: this model generates text."""
        _only_pooling("score")

    def start_profile(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: there is no profiler_config."""
        _not_yet("start_profile", "wrap the call in `with jax.profiler.trace(directory):`")

    def stop_profile(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: there is no profiler_config."""
        _not_yet("stop_profile", "wrap the call in `with jax.profiler.trace(directory):`")

    def sleep(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("sleep", "call shutdown() and make a new LLM when it is needed again")

    def wake_up(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("wake_up", "an LLM is always awake until shutdown()")

    def collective_rpc(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: there are no worker processes."""
        _not_yet("collective_rpc", "there are no worker processes: the engine is llm.llm_engine")

    def apply_model(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: a model is a pure function here, not a torch module."""
        _not_yet("apply_model", "a model is a pure function of its parameters here, not a torch module")

    def init_weight_transfer_engine(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("init_weight_transfer_engine", _NEW_WEIGHTS)

    def start_weight_update(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("start_weight_update", _NEW_WEIGHTS)

    def start_draft_weight_update(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("start_draft_weight_update", _NEW_WEIGHTS)

    def update_weights(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("update_weights", _NEW_WEIGHTS)

    def finish_weight_update(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("finish_weight_update", _NEW_WEIGHTS)

    def update_weight_version(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("update_weight_version", _NEW_WEIGHTS)

    def get_weight_version(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse."""
        _not_yet("get_weight_version", _NEW_WEIGHTS)


_NEW_WEIGHTS = "to run other weights, save a checkpoint and make a new LLM from it"
