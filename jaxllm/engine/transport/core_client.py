"""The protocols of an engine core and of its clients, and the table of the core's calls.

A call is a core's method with an answer. `Core` declares it, with its types and its rule, and `EngineCore` implements
it; every client inherits it, and `CoreLoop` looks it up.
"""

# ruff: noqa: ARG002 - the bodies of declared calls never run

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, get_type_hints

from jaxllm.core_messages import Alignment, Clip, EngineCoreOutputs, EngineCoreRequest, RequestError
from jaxllm.lora.request import LoRARequest
from jaxllm.sampling_params import SamplingParams


class Programs(NamedTuple):
    """How far a core has compiled its programs."""

    num_compiled: int
    """The number compiled since its start, those found on disk not counted."""
    is_warm: bool
    """True once all are compiled; before, a step may have to wait for one."""


SLEEPING_PARTS = ("weights", "kv_cache")
"""The parts that a core frees when it sleeps, in the order in which they come back; vLLM's tags."""

FIRST_VERSION = "default"
"""The version of weights before one is set, as in vLLM."""

_DECLARED: Any = None
"""The body of a declared call, which never runs; type checkers take `...` for a method that clients lack."""


class _CallRule(NamedTuple):
    """How a call crosses to its core, and back from several."""

    arguments: Any
    """The type of all its arguments, as one tuple; plain values are Any, because the core checks them."""
    gather: Callable[[list[Any]], Any]
    """Make one answer from those of all replicas."""
    asks_one: bool
    """Whether one replica answers for all."""
    takes_long: bool
    """Whether the call waits in a thread, while steps go on."""


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _union(answers: list[list[int]]) -> list[int]:
    return sorted({item for answer in answers for item in answer})


def _call[**P, R](
    gather: Callable[[list[Any]], Any] = _first, *, asks_one: bool = False, takes_long: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes the declaration of a call a client's method, which sends the call by `_call`."""

    def decorate(declaration: Callable[P, R]) -> Callable[P, R]:
        name, signature = declaration.__name__, inspect.signature(declaration)

        @functools.wraps(declaration)
        def send(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            client, *arguments = bound.args
            return client._call(name, *arguments)

        hints = [kind for argument, kind in get_type_hints(declaration).items() if argument != "return"]
        types = [kind if inspect.isclass(kind) and kind.__module__ != "builtins" else Any for kind in hints]
        vars(send)["rule"] = _CallRule(tuple[*types], gather, asks_one, takes_long)
        return send

    return decorate


class Core(Protocol):
    """What an engine core does, wherever it runs."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; if the core refuses it, it ends with an output that gives the reason."""
        ...

    @_call(asks_one=True)
    def check(self, params: SamplingParams, seconds: float | None = None) -> None:
        """Raise VLLMValidationError for params that the core would refuse.

        A grammar that has not compiled after `seconds` passes; None waits to its deadline.
        """
        return _DECLARED

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        """End sequences and free their blocks at once; unknown ids are ignored."""
        ...

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Give up the blocks that ended sequences have kept for forks; unknown ids are ignored."""
        ...

    @_call(max)
    def num_computed_tokens(self, sequence_id: str) -> int:
        """Return the number of a sequence's computed tokens; 0 unless it runs."""
        return _DECLARED

    @_call(asks_one=True, takes_long=True)
    def align(self, clip: Clip, prompt_ids: list[int], token_ids: list[int]) -> Alignment:
        """Return where the tokens after a decoder's prompt are in a clip, whose `num_heard` frames have sound.

        Raises VLLMValidationError if the model cannot have written them.
        """
        return _DECLARED

    @_call(all)
    def reset_encoder_cache(self) -> bool:
        """Forget all encoded images and videos; False, and nothing is forgotten, when requests need some."""
        return _DECLARED

    @_call(all)
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes; False when blocks are in use, unless running requests are to give theirs up."""
        return _DECLARED

    @_call(all, takes_long=True)
    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter, unless it is loaded, and wait for it; return True.

        Raises VLLMValidationError for a bad one, or for an engine without adapters.
        """
        return _DECLARED

    @_call(any)
    def remove_lora(self, adapter_id: int) -> bool:
        """Forget an adapter, with which running requests go on; return False for an unknown id."""
        return _DECLARED

    @_call(_union)
    def list_loras(self) -> list[int]:
        """Return the ids of the loaded adapters."""
        return _DECLARED

    @_call(any)
    def pin_lora(self, adapter_id: int) -> bool:
        """Keep an adapter until it is removed; return False for an unknown id."""
        return _DECLARED

    @_call()
    def sleep(self, level: int) -> None:
        """Free weights and caches until `wake_up`; at level 1 the host keeps the weights, unless it is the device.

        Raises VLLMValidationError while a request is unfinished.
        """
        return _DECLARED

    @_call(takes_long=True)
    def wake_up(self, tags: list[str]) -> None:
        """Put the parts of SLEEPING_PARTS that `tags` names on the device again, unless they are there."""
        return _DECLARED

    @_call()
    def set_paused(self, is_paused: bool) -> None:
        """Let requests stay as they are from now on, or go on; a core in this process does a step when it is called."""
        return _DECLARED

    @_call()
    def start_weight_update(self, of_draft: bool = False) -> None:
        """Begin to take in new weights, of the draft model if so; an update that was begun before is dropped."""
        return _DECLARED

    @_call(takes_long=True)
    def update_weights(self, weights: Any) -> None:
        """Take in a part of the new weights: arrays, if the core is in this process, or a folder's by its path. For a
        thread of this process a number stands for the arrays, see `Handover`.

        Raises VLLMValidationError, and takes nothing in, for what does not fit.
        """
        return _DECLARED

    @_call()
    def finish_weight_update(self, version: str | int | None = None) -> None:
        """Put new weights in place; running requests compute again what they have, and all caches are dropped."""
        return _DECLARED

    @_call(asks_one=True)
    def is_updating_weights(self) -> bool:
        """Return whether an update has begun that is neither finished nor dropped."""
        return _DECLARED

    @_call()
    def drop_weight_update(self) -> None:
        """Forget the weights that have been taken in and not put in place."""
        return _DECLARED

    @_call()
    def set_weight_version(self, version: str | int) -> None:
        """Set the version of the weights."""
        return _DECLARED

    @_call(asks_one=True)
    def get_weight_version(self) -> str | int:
        """Return the version of the weights, "default" before one is set."""
        return _DECLARED

    @_call(takes_long=True)
    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        return _DECLARED

    @_call()
    def start_profile(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Record what host and devices do until `stop_profile`; None takes profiler_config's value."""
        return _DECLARED

    @_call()
    def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        return _DECLARED

    def shutdown(self) -> None:
        """Release the device; may be called twice."""
        ...

    def drop(self) -> None:
        """Do as `shutdown` does, waiting for a limited time: garbage collection may call this in any thread."""
        ...


CALLS: Mapping[str, _CallRule] = MappingProxyType(
    {name: method.rule for name, method in vars(Core).items() if hasattr(method, "rule")}
)
"""The calls of a core, by name."""


class CoreClient(Core, Protocol):
    """A core, or several that are replicas of one another, as the front end sees them. Its classes define `_call`."""

    def _call(self, method: str, *arguments: Any) -> Any:
        """Make a call and return its answer."""
        ...

    def programs(self) -> list[Programs]:
        """Return how far each replica's programs are compiled; a core alone is one replica."""
        ...

    def step(self, *, wait: bool) -> EngineCoreOutputs | None:
        """Return the outcome of a step; None if there is nothing to do, or without `wait` if none has come."""
        ...


class RunnableCore(Core, Protocol):
    """A core with the methods that run it: `EngineCore`, or one without a model."""

    is_paused: bool
    """Whether no more steps are to be done for now."""

    def get_weights(self) -> Any:
        """Return the weights, which the caller owns too from now on."""
        ...

    @property
    def is_warm(self) -> bool:
        """Return, to any thread, whether every program is compiled."""
        ...

    @property
    def num_compiled(self) -> int:
        """Return, to any thread, the number of programs compiled since the start, without those found on disk."""
        ...

    @property
    def is_compiling(self) -> bool:
        """Return, to any thread, whether a step waits for its program to be compiled."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Return whether a step has something to do."""
        ...

    def fail(self, sequence_id: str, error: RequestError) -> None:
        """End a sequence with an error, whether or not the core has it; the next `step` reports it."""
        ...

    def step(self) -> EngineCoreOutputs:
        """Do one step and return its outcome."""
        ...

    def launch_ahead(self) -> None:
        """Send the next step, if it need not wait, before the caller handles the outcome of the last one."""
        ...
