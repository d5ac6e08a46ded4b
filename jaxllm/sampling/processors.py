"""Custom logits processors: pure jnp functions `(logits_sv, state) -> logits_sv` that are traced into the step, and
classes that run on the host (`jaxllm.logits_processors`).

A function gets some rows at a time, on a CPU often one, and must treat rows independently. It may carry `extra_args`, a
dict from names to default numbers, as an attribute: requests set them by `SamplingParams.extra_args`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_float, check_int, shown
from jaxllm.sampling_params import SamplingParams
from jaxllm.utils.names import import_name

PARAMETER = "logits_processors"
_MAX_PROCESSORS = 64
_MAX_EXTRA_ARGS = 64
_HOST_METHODS = ("apply", "is_argmax_invariant", "update_state")
"""The methods that a class needs to run on the host."""
JNP_FORM = "a function in jnp: `def process(logits_sv, state): return logits_sv` (docs/sampling.md)"


class LogitsState(NamedTuple):
    """The state that a processor may read, besides the logits."""

    num_outputs_s: Array
    """int32 number of output tokens so far."""
    positions_s: Array
    """int32 position of the token to be sampled, in prompt and output."""
    output_counts_sv: Array
    """int32 number of times each token is in the output."""
    in_prompt_sv: Array
    """bool, True for tokens in the prompt."""
    extra_args: dict[str, Array]
    """int32 or float32, one value per row, of the request's `extra_args` or the defaults."""


type LogitsProcessor = Callable[[Array, LogitsState], Array]


def load_processors(value: Any) -> tuple[LogitsProcessor | type, ...]:
    """Return the processors of `LLM(logits_processors=...)`: functions and classes, "module:name" or "module.name"."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise _error("must be a list of functions and classes, or of their names, 'module:name'", value)
    if len(value) > _MAX_PROCESSORS:
        raise _error(f"must have at most {_MAX_PROCESSORS} entries, got {len(value)}", value)
    processors = tuple(_import(item) if isinstance(item, str) else item for item in value)
    for processor in processors:
        _check(processor)
    extra_args(traced(processors))
    return processors


def traced(processors: Sequence[LogitsProcessor | type]) -> tuple[LogitsProcessor, ...]:
    """Return the processors that are traced into the step."""
    return tuple(each for each in processors if not isinstance(each, type))


def on_host(processors: Sequence[LogitsProcessor | type]) -> tuple[type, ...]:
    """Return the processors that run on the host."""
    return tuple(each for each in processors if isinstance(each, type))


def runs_last(processor: LogitsProcessor) -> bool:
    """Return whether a processor comes after the penalties."""
    return getattr(processor, "runs_last", False)


def extra_args(processors: tuple[LogitsProcessor, ...]) -> dict[str, int | float]:
    """Return the names that requests may set in `extra_args`, with their defaults; an int default makes an int32."""
    merged: dict[str, int | float] = {}
    for processor in processors:
        arguments = getattr(processor, "extra_args", {})
        if not isinstance(arguments, Mapping) or not all(isinstance(name, str) and name for name in arguments):
            raise _error(f": extra_args of {_name(processor)} must be a dict from names to numbers", arguments)
        for name, default in arguments.items():
            number = _check_default(f"extra_args[{name!r}] of {_name(processor)}", default)
            if name in merged and (merged[name], type(merged[name])) != (number, type(number)):
                message = f": two processors give extra_args[{name!r}] the defaults {merged[name]} and {number}"
                raise _error(message + "; rename one of them", number)
            merged[name] = number
    if len(merged) > _MAX_EXTRA_ARGS:
        raise _error(f" may take at most {_MAX_EXTRA_ARGS} extra_args, got {len(merged)}", sorted(merged))
    return merged


def check_traceable(processors: tuple[LogitsProcessor, ...], vocab_size: int) -> None:
    """Trace each processor without computing anything; refuse one that fails or does not return logits."""
    s = 3

    def trace(processor: LogitsProcessor) -> Array:
        counts_sv = jnp.zeros((s, vocab_size), jnp.int32)
        state = LogitsState(
            num_outputs_s=counts_sv[:, 0],
            positions_s=counts_sv[:, 0],
            output_counts_sv=counts_sv,
            in_prompt_sv=counts_sv > 0,
            extra_args={
                name: jnp.full(s, default, jnp.int32 if isinstance(default, int) else jnp.float32)
                for name, default in extra_args(processors).items()
            },
        )
        return process(jnp.zeros((s, vocab_size), jnp.float32), state, (processor,))

    for processor in processors:
        try:
            jax.eval_shape(partial(trace, processor))
        except VLLMValidationError:
            raise
        except Exception as error:  # a user's function may raise anything
            message = f": {_name(processor)} cannot be traced by JAX: {type(error).__name__}: {str(error)[:500]}"
            raise _error(message, processor) from error


def process(logits_sv: Array, state: LogitsState, processors: tuple[LogitsProcessor, ...]) -> Array:
    """Return the logits after each processor in turn."""
    for processor in processors:
        result = processor(logits_sv, state)
        shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
        if shape != logits_sv.shape or dtype != logits_sv.dtype:
            got = f"{dtype} {list(shape)}" if shape is not None else type(result).__name__
            message = (
                f": {_name(processor)} must return {logits_sv.dtype} {list(logits_sv.shape)}, as the logits it got"
            )
            raise _error(f"{message}; it returned {got}", processor)
        logits_sv = result
    return logits_sv


def validators(processors: Sequence[LogitsProcessor | type]) -> list[Callable[[SamplingParams], None]]:
    """Return a check for each class among logits processors that has `validate_params`.

    A check raises VLLMValidationError for params that the class refuses.
    """
    classes = [each for each in on_host(processors) if hasattr(each, "validate_params")]
    return [partial(_validate, each) for each in classes]


def _validate(processor_class: Any, params: SamplingParams) -> None:
    try:
        processor_class.validate_params(params)
    except Exception as error:  # a user's class may raise anything
        message = f"{processor_class.__name__} refuses them: {error}."
        raise VLLMValidationError(message, parameter=PARAMETER, value=params.extra_args) from error


def _import(name: str) -> Any:
    try:
        return import_name(name)
    except ImportError as error:
        raise _error(f": {error}", name) from error


def _check(processor: Any) -> None:
    if inspect.isclass(processor):
        missing = [name for name in _HOST_METHODS if not callable(getattr(processor, name, None))]
        if not missing:
            return
        message = f": {processor.__name__} is a class without {', '.join(missing)}; give one like those of"
        raise _error(f"{message} jaxllm.logits_processors.LogitsProcessor, or {JNP_FORM}", processor)
    if not callable(processor):
        raise _error(f": {shown(processor)} is neither a class of logits processors nor {JNP_FORM}", processor)
    try:
        inspect.signature(processor).bind(None, None)
    except TypeError as error:
        raise _error(f": {_name(processor)} must take (logits_sv, state): {error}", processor) from error
    except ValueError:
        pass  # some builtins have no signature: tracing finds errors later


def _check_default(name: str, default: Any) -> int | float:
    if isinstance(default, int):
        return check_int(name, default, -INT32_MAX - 1, INT32_MAX)
    return check_float(name, default, -3.0e38, 3.0e38)


def _name(processor: Any) -> str:
    return getattr(processor, "__qualname__", None) or type(processor).__name__


def _error(message: str, value: Any) -> VLLMValidationError:
    separator = "" if message.startswith((":", " ")) else " "
    return VLLMValidationError(f"{PARAMETER}{separator}{message}.", parameter=PARAMETER, value=value)
