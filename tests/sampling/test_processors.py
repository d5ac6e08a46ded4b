"""Custom logits processors are named and checked here. What they do is in test_features."""

from typing import Any, ClassVar

import jax.numpy as jnp
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling.processors import check_traceable, extra_args, load_processors
from tests.sampling import oracle

NAME = "tests.sampling.test_processors"


def double(logits_sv, state):
    return logits_sv * 2


class Callable:
    """An instance is a processor, the class is not."""

    extra_args: ClassVar = {"strength": 0.5, "count": 3}

    def __call__(self, logits_sv, state):
        return logits_sv + state.extra_args["strength"][:, None]


INSTANCE = Callable()


def with_args(**names: Any):
    def processor(logits_sv, state):
        return logits_sv

    processor.extra_args = names  # pyright: ignore[reportFunctionMemberAccess]
    return processor


@pytest.mark.parametrize("processors", [None, [], ()])
def test_none_is_none(processors: Any) -> None:
    assert load_processors(processors) == ()


def test_functions_and_names() -> None:
    processors = [double, f"{NAME}:double", f"{NAME}.double", f"{NAME}:INSTANCE", f"{NAME}:INSTANCE.__call__"]
    assert load_processors(processors) == (double, double, double, INSTANCE, INSTANCE.__call__)


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        (double, "must be a list"),
        (f"{NAME}:double", "must be a list"),
        ([double] * 65, "at most 64"),
        ([3], "3 is neither a class of logits processors nor a function in jnp"),
        (["double"], "'double' is not 'module:name'"),
        ([f"{NAME}:"], "is not 'module:name'"),
        (["no_such_module:f"], "cannot import 'no_such_module'.*ModuleNotFoundError"),
        ([f"{NAME}:missing"], "has no 'missing'"),
        ([f"{NAME}:Callable"], "Callable is a class without apply, is_argmax_invariant, update_state; give one like"),
        ([f"{NAME}:NAME"], "is neither a class"),
        ([lambda logits_sv: logits_sv], r"must take \(logits_sv, state\)"),
        ([with_args(a=1), with_args(a=2)], r"extra_args\['a'\] the defaults 1 and 2"),
        ([with_args(a=1), with_args(a=1.0)], r"extra_args\['a'\]"),
        ([with_args(a="1")], r"extra_args\['a'\] of .* must be a number"),
        ([with_args(a=True)], "must be an integer"),
        ([with_args(a=2**31)], "must be at most"),
        ([with_args(a=float("nan"))], "finite"),
        ([with_args(**{f"a{i}": 0 for i in range(65)})], "at most 64 extra_args"),
    ],
)
def test_what_is_refused(processors: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        load_processors(processors)
    assert "logits_processors" in str(caught.value) or "extra_args" in str(caught.value)


def test_extra_args_are_merged_with_their_types() -> None:
    merged = extra_args((INSTANCE, with_args(strength=0.5, other=1.0), double))
    assert merged == {"strength": 0.5, "count": 3, "other": 1.0}
    assert isinstance(merged["count"], int)
    assert isinstance(merged["other"], float)


def test_good_processors_can_be_traced() -> None:
    check_traceable((double, INSTANCE, oracle.steer), 77)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda logits_sv, state: logits_sv[:, :5], r"must return float32 \[3, 77\].*returned float32 \[3, 5\]"),
        (lambda logits_sv, state: logits_sv.astype(jnp.float16), "returned float16"),
        (lambda logits_sv, state: None, "returned NoneType"),
        (lambda logits_sv, state: logits_sv + state.extra_args["unknown"], "cannot be traced by JAX: KeyError"),
        (lambda logits_sv, state: logits_sv if logits_sv[0, 0] > 0 else 0, "cannot be traced by JAX: Tracer"),
    ],
)
def test_bad_processors_are_refused_before_anything_runs(processor: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        check_traceable((processor,), 77)
    assert caught.value.parameter == "logits_processors"
