"""Architectures are found by name, built in or added from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxllm.models import Family, get_family, register_model, registry, supported_architectures
from jaxllm.models.llama import LLAMA


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'GPT2LMHeadModel' is not supported.*LlamaForCausalLM.*register_model"):
        get_family("GPT2LMHeadModel")


@pytest.mark.parametrize("architecture", supported_architectures())
def test_every_registered_name_loads(architecture: str) -> None:
    assert isinstance(get_family(architecture), Family)


def test_register_model_adds_and_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.REGISTRY, "_added", {})
    family = replace(LLAMA)
    register_model("MyForCausalLM", family)
    register_model("LlamaForCausalLM", family)
    assert get_family("MyForCausalLM") is get_family("LlamaForCausalLM") is family
    assert "MyForCausalLM" in supported_architectures()


def test_register_model_checks_the_names() -> None:
    with pytest.raises(ValueError, match=r"embed\.table"):
        register_model("MyForCausalLM", replace(LLAMA, names={}))


def test_register_model_takes_families_only() -> None:
    with pytest.raises(TypeError, match=r"MyForCausalLM.*expected a Family, got str"):
        register_model("MyForCausalLM", "my_package.my_module:MyModel")  # type: ignore[arg-type]
