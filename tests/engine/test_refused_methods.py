"""Every public method of vLLM's `LLM` and `LLMEngine` works here, or is refused by name with what to do instead."""

from __future__ import annotations

from types import FunctionType, MethodType

import pytest

from jaxllm.engine.front.refused_methods import ENGINE_REFUSES, LLM_REFUSES
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.exceptions import VLLMValidationError
from jaxllm.llm import LLM
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import make_llm
from tests.engine.vllm_methods import ENGINE_METHODS, LLM_METHODS

OWNERS = [(LLM, LLM_METHODS, LLM_REFUSES), (LLMEngine, ENGINE_METHODS, ENGINE_REFUSES)]


@pytest.mark.parametrize(("owner", "methods", "refused"), OWNERS)
def test_every_method_of_vllm_works_or_is_refused(owner: type, methods: list[str], refused: dict[str, str]) -> None:
    works = {name for name in methods if isinstance(getattr(owner, name, None), (FunctionType, MethodType))}
    assert works | set(refused) >= set(methods), "write it, or say in the table why not"
    assert not works & set(refused), "a row of the table hides a method"
    assert set(refused) - set(methods) <= {"reward"}, "only what older versions had besides"


@pytest.mark.parametrize(("owner", "methods", "refused"), OWNERS)
def test_a_refused_method_says_what_to_do(owner: type, methods: list[str], refused: dict[str, str]) -> None:
    for name in refused:
        with pytest.raises(VLLMValidationError, match=rf"^{owner.__name__}\.{name}\(\) is .{{40,}}\.$") as error:
            getattr(owner, name)("anything", at="all")
        assert error.value.parameter == name


def test_a_class_of_ones_own_may_have_them() -> None:
    class Applier(LLM):
        def apply_model(self, name: str) -> int:
            return len(name)

    assert Applier.apply_model(Applier.__new__(Applier), "abc") == 3
    with pytest.raises(VLLMValidationError, match=r"LLM\.reward\(\)"):
        Applier.reward()  # type: ignore[attr-defined]


def test_what_there_is_nothing_to_do_for() -> None:
    engine = make_llm(FakeCore(hashed_tokens), None).llm_engine
    assert engine.get_supported_tasks() == ("generate",)
    assert engine.is_sleeping() is False
    assert engine.reset_mm_cache() is engine.reset_encoder_cache() is None
