"""Architectures are found by name, built in or added from outside."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from jaxllm.models import Family, families, get_family, register_model, registry, supported_architectures
from jaxllm.models.families.llama import LLAMA


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Qwen3_6NextForCausalLM", "Qwen3NextForCausalLM"),
        ("Qwen2_5_OmniForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        ("Gemma3_2ForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("MllamaForConditionalGeneration", "LlamaForCausalLM"),
        ("AlbertModel", "BertModel"),
        ("Phi4Model", "PhiForCausalLM"),
    ],
)
def test_unknown_architecture_names_the_nearest(architecture: str, nearest: str) -> None:
    hint = rf"supported_architectures\(\) lists all {len(supported_architectures())}, jaxllm.register_model adds one"
    with pytest.raises(ValueError, match=f"'{architecture}' is not supported; nearest to it is {nearest} .*{hint}"):
        get_family(architecture)


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "RwkvForCausalLM", ""])
def test_what_is_like_none_is_near_none(architecture: str) -> None:
    with pytest.raises(ValueError, match=rf"^architecture '{architecture}' is not supported \(jaxllm"):
        get_family(architecture)


def test_what_a_well_known_architecture_needs_is_named() -> None:
    with pytest.raises(ValueError, match=r"^architecture 'Gemma3nForCausalLM' is not supported: it needs alternating"):
        get_family("Gemma3nForCausalLM")


def test_a_registered_family_can_be_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.REGISTRY, "_added", {"BloomForCausalLM": LLAMA})
    with pytest.raises(ValueError, match="nearest to it is BloomForCausalLM"):
        get_family("BloomzModel")


@pytest.mark.parametrize("architecture", supported_architectures())
def test_every_registered_name_loads(architecture: str) -> None:
    assert isinstance(get_family(architecture), Family)


def test_an_architecture_is_declared_once() -> None:
    modules = [import_module(f"{families.__name__}.{name}") for _, name, _ in pkgutil.iter_modules(families.__path__)]
    names = [name for module in modules for name in getattr(module, "FAMILIES", ())]
    assert len(names) == len(set(names)) > 50


def test_register_model_adds_and_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.REGISTRY, "_added", {})
    family = replace(LLAMA)
    register_model("MyForCausalLM", family)
    register_model("LlamaForCausalLM", family)
    assert get_family("MyForCausalLM") is get_family("LlamaForCausalLM") is family
    assert "MyForCausalLM" in supported_architectures()


def test_what_pools_is_made_of_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.REGISTRY, "_added", {})
    known = supported_architectures()
    assert {"Qwen3Model", "Gemma2ForSequenceClassification", "LlamaForTokenClassification", "GPT2Model"} <= set(known)
    # HF's name of the text model; the name without "Text" has other modalities.
    assert "Llama4TextModel" in known
    assert "Llama4Model" not in known
    assert get_family("Qwen3Model").layer is get_family("Qwen3ForCausalLM").layer
    assert registry.is_built_in("Qwen3Model")
    assert "MyModel" not in known
    register_model("MyForCausalLM", LLAMA)
    register_model("Qwen3ForCausalLM", LLAMA)
    assert get_family("MyModel").names is get_family("Qwen3Model").names is LLAMA.names
    assert "MyModel" in supported_architectures()
    assert not registry.is_built_in("MyModel")
    assert not registry.is_built_in("Qwen3Model")


def test_a_family_in_place_of_a_built_in_one_gives_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.REGISTRY, "_added", {})
    known = supported_architectures()
    register_model("Gemma3ForCausalLM", LLAMA)
    register_model("Llama4ForCausalLM", "families_of_mine:MINE")
    assert supported_architectures() == known
    assert get_family("Gemma3TextForSequenceClassification").names is LLAMA.names


def test_register_model_checks_the_names() -> None:
    with pytest.raises(ValueError, match=r"embed\.table"):
        register_model("MyForCausalLM", replace(LLAMA, names={}))


def test_register_model_takes_families_only() -> None:
    with pytest.raises(TypeError, match=r"MyForCausalLM.*expected a Family, got int"):
        register_model("MyForCausalLM", 3)  # type: ignore[arg-type]


def test_a_family_by_name_is_imported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry.REGISTRY, "_added", {})
    monkeypatch.syspath_prepend(tmp_path)
    register_model("MyForCausalLM", "families_of_mine:MINE")
    register_model("LlamaForCausalLM", "families_of_mine:MINE")
    assert "MyForCausalLM" in supported_architectures()
    assert not registry.is_built_in("LlamaForCausalLM")
    (tmp_path / "families_of_mine.py").write_text("from jaxllm.models.families.llama import LLAMA as MINE\nNONE = 3\n")
    assert get_family("MyForCausalLM") is get_family("LlamaForCausalLM") is LLAMA
    for name, reason in (
        ("families_of_mine:NONE", "TypeError: .*expected a Family, got int"),
        ("families_of_mine:MISSING", "AttributeError"),
        ("no_such_module:MINE", "ModuleNotFoundError"),
    ):
        register_model("MyForCausalLM", name)
        with pytest.raises(ValueError, match=f"'{name}' gives no family: {reason}"):
            get_family("MyForCausalLM")


@pytest.mark.parametrize("name", ["", ":", "module", "module:", ":MINE"])
def test_a_family_by_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="is not 'module:FAMILY'"):
        register_model("MyForCausalLM", name)
