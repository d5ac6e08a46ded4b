"""The registry says which family serves which HF architecture. A new family is one file and one line here.

A decoder's line is also that of the models that pool around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from importlib import import_module
from types import MappingProxyType

from .family import Family
from .pooling import as_classifier, as_embedder, as_token_classifier

# "module:attribute", imported on first use; modules of users go by their full names.
BUILT_IN = MappingProxyType(
    {
        "LlamaForCausalLM": "llama:LLAMA",
        "Llama4ForCausalLM": "llama4:LLAMA4",
        "Llama4ForConditionalGeneration": "llama4:LLAMA4_MULTIMODAL",
        "MistralForCausalLM": "mistral:MISTRAL",
        "Mistral3ForConditionalGeneration": "mistral:MISTRAL3",
        "MixtralForCausalLM": "mixtral:MIXTRAL",
        "MiniMaxM2ForCausalLM": "minimax_m2:MINIMAX_M2",
        "GptOssForCausalLM": "gpt_oss:GPT_OSS",
        "Glm4MoeForCausalLM": "glm4_moe:GLM4_MOE",
        "Glm4MoeLiteForCausalLM": "glm4_moe_lite:GLM4_MOE_LITE",
        "DeepseekV2ForCausalLM": "deepseek:DEEPSEEK_V2",
        "DeepseekV3ForCausalLM": "deepseek:DEEPSEEK_V3",
        "Mistral4ForCausalLM": "mistral4:MISTRAL4",
        "Qwen2MoeForCausalLM": "qwen_moe:QWEN2_MOE",
        "Qwen3MoeForCausalLM": "qwen_moe:QWEN3_MOE",
        "OPTForCausalLM": "opt:OPT",
        "GPT2LMHeadModel": "gpt2:GPT2",
        "GPT2ForTokenClassification": "gpt2:GPT2_TOKEN_CLASSIFIER",
        "Ministral3ForCausalLM": "mistral:MINISTRAL3",
        "Qwen3NextForCausalLM": "qwen3_next:QWEN3_NEXT",
        "Qwen3_5ForCausalLM": "qwen3_5:QWEN3_5",
        "Qwen3_5MoeForCausalLM": "qwen3_5:QWEN3_5_MOE",
        "Qwen3_5ForConditionalGeneration": "qwen3_5:QWEN3_5_MULTIMODAL",
        "Qwen3_5MoeForConditionalGeneration": "qwen3_5:QWEN3_5_MOE_MULTIMODAL",
        "Lfm2ForCausalLM": "lfm2:LFM2",
        "Lfm2MoeForCausalLM": "lfm2:LFM2_MOE",
        "NemotronHForCausalLM": "nemotron_h:NEMOTRON_H",
        "GraniteMoeHybridForCausalLM": "granite:GRANITE_HYBRID",
        "Qwen2ForCausalLM": "qwen2:QWEN2",
        "Qwen3ForCausalLM": "qwen3:QWEN3",
        "Qwen2VLForConditionalGeneration": "qwen_vl:QWEN2_VL",
        "Qwen2_5_VLForConditionalGeneration": "qwen_vl:QWEN2_5_VL",
        "Qwen3VLForConditionalGeneration": "qwen_vl:QWEN3_VL",
        "SmolLM3ForCausalLM": "smollm3:SMOLLM3",
        "Phi3ForCausalLM": "phi3:PHI3",
        "Olmo2ForCausalLM": "olmo:OLMO2",
        "Olmo3ForCausalLM": "olmo:OLMO3",
        "Gemma2ForCausalLM": "gemma2:GEMMA2",
        "Gemma3ForCausalLM": "gemma3:GEMMA3",
        "Gemma3ForConditionalGeneration": "gemma3:GEMMA3_MULTIMODAL",
        "Gemma4ForCausalLM": "gemma4:GEMMA4",
        "Gemma4ForConditionalGeneration": "gemma4:GEMMA4_MULTIMODAL",
        "Gemma3TextModel": "gemma3:GEMMA3_EMBEDDER",
        "Qwen2ForRewardModel": "qwen2:QWEN2_REWARD",
        "Qwen2ForProcessRewardModel": "qwen2:QWEN2_PROCESS_REWARD",
        "DeepSeekMTPModel": "mtp:DEEPSEEK_MTP",
        "Glm4MoeMTPModel": "mtp:GLM4_MOE_MTP",
        "Glm4MoeLiteMTPModel": "mtp:GLM4_MOE_LITE_MTP",
        "LlamaForCausalLMEagle3": "eagle3:EAGLE3",
        "BertModel": "bert:BERT",
        "BertForMaskedLM": "bert:BERT",
        "BertForSequenceClassification": "bert:BERT_CLASSIFIER",
        "BertForTokenClassification": "bert:BERT_TOKEN_CLASSIFIER",
        **{
            f"{model}{head}": f"roberta:{family}"
            for model in ("Roberta", "XLMRoberta", "Camembert")
            for head, family in (
                ("Model", "ROBERTA"),
                ("ForMaskedLM", "ROBERTA"),
                ("ForSequenceClassification", "ROBERTA_CLASSIFIER"),
                ("ForTokenClassification", "ROBERTA_TOKEN_CLASSIFIER"),
            )
        },
        "ModernBertModel": "modernbert:MODERNBERT",
        "ModernBertForMaskedLM": "modernbert:MODERNBERT",
        "ModernBertForSequenceClassification": "modernbert:MODERNBERT_CLASSIFIER",
        "ModernBertForTokenClassification": "modernbert:MODERNBERT_TOKEN_CLASSIFIER",
    }
)

POOLED = MappingProxyType(
    {
        "Model": as_embedder,
        "ForSequenceClassification": as_classifier,
        "ForTokenClassification": as_token_classifier,
    }
)
"""How to make a family of models that pool of a family of decoders, by the end of the architecture's name."""
MTP_HEADS = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": "DeepSeekMTPModel",
        "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
        "Glm4MoeLiteForCausalLM": "Glm4MoeLiteMTPModel",
    }
)
"""The draft head that checkpoints of an architecture may have after their last layer."""
EAGLE3_HEAD = "LlamaForCausalLMEagle3"
DECODER = re.compile(r"(.+)(ForCausalLM|LMHeadModel)")
OTHER_STEMS = MappingProxyType({name: f"{name}Text" for name in ("Llama4", "Gemma3", "Gemma4")})
"""What comes before the end of the names of what is made of a decoder, if it is not as in the decoder's own."""

ALIKE = 0.6
"""The least similarity of two names, from 0 to 1, at which one is suggested for the other."""


class Registry:
    """The families by architecture: the built-in ones, and those that users add."""

    def __init__(self, built_in: Mapping[str, str]) -> None:
        self._built_in = built_in
        self._added: dict[str, Family | str] = {}

    def get_family(self, architecture: str) -> Family:
        """Return the family of an HF architecture name; an unknown one raises ValueError with the nearest known.

        `*Model`, `*ForSequenceClassification` and `*ForTokenClassification` are made of the decoder of that name.

        A family that was registered by name is imported now: ValueError if that fails, or finds no family.
        """
        if architecture in self._added:
            family = self._added[architecture]
            return _import_family(architecture, family) if isinstance(family, str) else family
        if architecture in (derived := self._derived()):
            decoder, make = derived[architecture]
            return make(self.get_family(decoder))
        if architecture not in self._built_in:
            nearest, known = _nearest(architecture, (*self._built_in, *self._added)), self.supported_architectures()
            raise ValueError(
                f"architecture {architecture!r} is not supported{f'; nearest to it is {nearest}' if nearest else ''} "
                f"(jaxllm.models.supported_architectures() lists all {len(known)}, jaxllm.register_model adds one)"
            )
        module, attribute = self._built_in[architecture].split(":")
        return getattr(import_module(f".families.{module}", __package__), attribute)

    def is_built_in(self, architecture: str) -> bool:
        """Say whether an architecture's family is ours, and no other was registered in its place."""
        decoder, _ = self._derived().get(architecture, (architecture, None))
        return decoder in self._built_in and not {architecture, decoder} & self._added.keys()

    def register_model(self, architecture: str, family: Family | str) -> None:
        """Add an architecture, or replace one; TypeError or ValueError if it is no Family, or names no embedding.

        `architecture` is what a config.json says; the family's own config function may name another one. A family may
        be given by name, "module:FAMILY", which is imported when a model of that architecture is loaded.
        """
        if isinstance(family, str):
            _split(architecture, family)
        else:
            _check(architecture, family)
        self._added[architecture] = family

    def supported_architectures(self) -> tuple[str, ...]:
        """Return all architecture names that `get_family` knows, sorted."""
        return tuple(sorted({*self._built_in, *self._added, *self._derived()}))

    def get_supported_archs(self) -> frozenset[str]:
        """Return the same under vLLM's name, and as a set."""
        return frozenset(self.supported_architectures())

    def _derived(self) -> dict[str, tuple[str, Callable[[Family], Family]]]:
        """Return the decoder, and what to make of it, for each architecture that is nowhere but made of one."""
        known = {**self._built_in, **self._added}
        derived: dict[str, tuple[str, Callable[[Family], Family]]] = {}
        for decoder in known:
            if match := DECODER.fullmatch(decoder):
                stem = OTHER_STEMS.get(match[1], match[1])
                derived |= {stem + end: (decoder, make) for end, make in POOLED.items() if stem + end not in known}
        return derived


def _nearest(architecture: str, known: tuple[str, ...]) -> str | None:
    """Return the known architecture whose model's name is most like this one's, None if none is like it."""

    def likeness(other: str) -> tuple[float, float]:
        return _ratio(_model_name(architecture), _model_name(other)), _ratio(architecture, other)

    best = max(known, key=likeness)
    return best if likeness(best)[0] >= ALIKE else None


def _model_name(architecture: str) -> str:
    """Return what comes before the kind of head, which many architectures share."""
    return re.split("For|LMHead|Model", architecture, maxsplit=1)[0].lower()


def _ratio(name: str, other: str) -> float:
    return SequenceMatcher(None, name, other).ratio()


def _split(architecture: str, name: str) -> tuple[str, str]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"register_model({architecture!r}): {name!r} is not 'module:FAMILY'")
    return module, attribute


def _import_family(architecture: str, name: str) -> Family:
    module, attribute = _split(architecture, name)
    try:
        family = getattr(import_module(module), attribute)
        _check(architecture, family)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{name!r} gives no family: {type(error).__name__}: {error}") from error
    return family


def _check(architecture: str, family: object) -> None:
    if not isinstance(family, Family):
        raise TypeError(f"register_model({architecture!r}): expected a Family, got {type(family).__name__}")
    if "embed.table" not in family.names:
        raise ValueError(f"register_model({architecture!r}): the family's names lack 'embed.table'")


REGISTRY = Registry(BUILT_IN)
"""The process's: users add a family before they make an engine, so no engine can own it."""

ModelRegistry = REGISTRY
"""This is vLLM's name for it."""
get_family = REGISTRY.get_family
is_built_in = REGISTRY.is_built_in
register_model = REGISTRY.register_model
supported_architectures = REGISTRY.supported_architectures
