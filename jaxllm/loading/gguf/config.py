"""Translate GGUF metadata into a config in the form of HF's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.names import ATTENTION, MLP, has_biases
from jaxllm.loading.gguf.settings.dense import dense_config
from jaxllm.loading.gguf.settings.encoders import bert_config
from jaxllm.loading.gguf.settings.gemma4 import gemma4_config
from jaxllm.loading.gguf.settings.latents import deepseek_config
from jaxllm.loading.gguf.settings.moe import expert_config
from jaxllm.loading.gguf.settings.numbers import Numbers
from jaxllm.loading.gguf.settings.recurrent import mamba_config, recurrent_config
from jaxllm.loading.gguf.settings.rope import rope_scaling
from jaxllm.loading.gguf.special_tokens import SpecialTokens, read_special_tokens

_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "llama4": ("llama4_text", "Llama4ForCausalLM"),
    "mistral3": ("ministral3", "Ministral3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3vl": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3vlmoe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "minimax-m2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "phi2": ("phi", "PhiForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "arcee": ("arcee", "ArceeForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5-moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "hunyuan-dense": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
    "mamba2": ("mamba2", "Mamba2ForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    "nemotron_h_moe": ("nemotron_h", "NemotronHForCausalLM"),
    "deepseek2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "bert": ("bert", "BertModel"),
    "nomic-bert": ("nomic_bert", "NomicBertModel"),
    "jina-bert-v3": ("jina_embeddings_v3", "JinaEmbeddingsV3Model"),
    "hunyuan-moe": ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
}
"""HF's model type and class for each GGUF architecture. "llama" with experts is Mixtral. A vision tower is in another
file, and makes a Qwen-VL or a Gemma 3 another model.
"""

_POOLING_MODES: Mapping[int, str] = {1: "mean", 2: "cls", 3: "lasttoken"}
"""sentence-transformers' name of each of llama.cpp's types of pooling."""
_VARYING_ARCHITECTURES = ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures whose files hold the widths and heads of each layer, 0 in layers without."""


def architecture(file: GGUFFile) -> str:
    """Return the GGUF architecture. Raises ValueError for an unsupported one, naming the supported ones."""
    name = file.value("general.architecture", str, "")
    if name == "clip":
        raise ValueError("it holds a vision tower alone: give the file of its text model, beside which it is found")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(f"the GGUF architecture {name!r} is not supported; supported: {known}")
    return name


def hf_config(file: GGUFFile, special: SpecialTokens) -> dict[str, Any]:
    """Return the config. Raises ValueError for a missing key or an architecture that is not supported."""
    arch = architecture(file)
    model_type, class_name = _ARCHITECTURES[arch]
    numbers = Numbers(file, arch)
    hidden_size, num_layers = numbers.count("embedding_length"), _num_layers(file, numbers)
    shared: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{f"{role}_token_id": special.roles.get(role) for role in ("bos", "eos", "pad")},
    }
    if arch in ("mamba", "mamba2"):
        return shared | mamba_config(file, arch, numbers)
    num_heads = numbers.count("attention.head_count")
    # Gemma 4's layers differ; its own config code handles them.
    count = numbers.largest if arch in _VARYING_ARCHITECTURES else numbers.count
    count = count if arch != "gemma4" else lambda key, *_: numbers.per_layer(key, num_layers)[0]
    config: dict[str, Any] = shared | {
        "intermediate_size": count(_width_key(numbers)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": count("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(numbers, hidden_size, num_heads),
        "max_position_embeddings": numbers.count("context_length"),
        "rms_norm_eps": numbers.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": numbers.number("rope.freq_base", 10000.0),
        "rope_scaling": None if arch == "gemma4" else rope_scaling(file, arch),
    }
    family = _family_config(file, arch, numbers, config)
    family |= expert_config(file, arch, numbers, config) | recurrent_config(file, arch, numbers, config)
    return config | family


def pooling_mode(file: GGUFFile) -> str | None:
    """Return sentence-transformers' name of how states become an embedding; None for a model that does not embed."""
    return _POOLING_MODES.get(Numbers(file, architecture(file)).whole("pooling_type", 0))


def generation_config(special: SpecialTokens) -> dict[str, Any]:
    """Return the ids that begin and end a text, in the form of HF's generation_config.json."""
    config: dict[str, Any] = {}
    if "bos" in special.roles:
        config["bos_token_id"] = special.roles["bos"]
    ends = list(special.ends)
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return config


def special_tokens(file: GGUFFile) -> SpecialTokens:
    """Return the tokens that begin and end a text. Raises ValueError for keys that hold no ids."""
    key = "tokenizer.ggml.tokens"
    tokens = file.strings(key) if file.is_array(key) else []
    return read_special_tokens(file, tokens, len(tokens) or _vocab_size(file))


def _vocab_size(file: GGUFFile) -> int:
    """Return the embedding's rows: a vocabulary may be padded beyond its tokens."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("the file has no token_embd.weight of two dimensions")
    return embedding.shape[0]


def _num_layers(file: GGUFFile, numbers: Numbers) -> int:
    """Return the number of layers. Raises ValueError if it exceeds the number of tensors, since lists grow with it."""
    num_layers = numbers.count("block_count") - num_draft_layers(file)
    if num_layers < 1:
        raise ValueError("nextn_predict_layers leaves no layer of block_count")
    if num_layers > len(file.tensors):
        raise ValueError(f"the file claims {num_layers} layers and has {len(file.tensors)} tensors")
    return num_layers


def num_draft_layers(file: GGUFFile) -> int:
    """Return the number of last layers that predict draft tokens; they are not part of the decoder."""
    return Numbers(file, architecture(file)).whole("nextn_predict_layers", 0)


def _width_key(numbers: Numbers) -> str:
    """Return the key of an MLP's width; a file with experts in every layer may have only theirs."""
    return "feed_forward_length" if "feed_forward_length" in numbers else "expert_feed_forward_length"


def _head_dim(numbers: Numbers, hidden_size: int, num_heads: int) -> int:
    default = numbers.count("rope.dimension_count", max(1, hidden_size // num_heads))
    return numbers.count("attention.key_length", default)


def _family_config(file: GGUFFile, arch: str, numbers: Numbers, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of one family besides the common ones."""
    if arch == "gemma2":
        return _gemma_config(config, large_layers=46, pattern=2) | {
            "sliding_window": numbers.count("attention.sliding_window", 4096),
            "attn_logit_softcapping": numbers.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": numbers.number("final_logit_softcapping", 30.0),
        }
    if arch == "gemma3":
        return _gemma_config(config, large_layers=62, pattern=6) | {
            "sliding_window": numbers.count("attention.sliding_window"),
            "rope_local_base_freq": numbers.number("rope.freq_base_swa", 10000.0),
            "final_logit_softcapping": numbers.number("final_logit_softcapping", None),
            "attn_logit_softcapping": None,
        }
    if arch == "gemma4":
        return gemma4_config(file, numbers, config)
    if arch == "deepseek2":
        return deepseek_config(file, numbers, config)
    if arch in ("bert", "nomic-bert", "jina-bert-v3"):
        return bert_config(file, numbers) | ({"hidden_act": "silu"} if arch == "nomic-bert" else {})
    if arch == "gpt2":
        epsilon = numbers.number("attention.layer_norm_epsilon", 1e-5)
        return {"n_inner": config["intermediate_size"], "layer_norm_epsilon": epsilon}
    family: dict[str, Any] = {"hidden_act": "silu"}
    if arch == "phi3":
        return family | _phi3_config(file, numbers, config)
    if arch == "mistral3":
        return family | _mistral3_config(numbers, config)
    if arch == "olmo2":
        return family | _olmo_config(file, numbers, config)
    if arch in ("llama", "qwen3", "qwen3vl", "smollm3"):
        family["attention_bias"] = has_biases(file.tensors, ATTENTION)
    if arch in ("llama", "smollm3"):
        family["mlp_bias"] = has_biases(file.tensors, MLP)
        if arch == "llama" and "attention.sliding_window" in numbers:
            window = numbers.count("attention.sliding_window")
            family |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return family | dense_config(file, arch, numbers, config)


def _phi3_config(file: GGUFFile, numbers: Numbers, config: dict[str, Any]) -> dict[str, Any]:
    """Return Phi-3's own keys. The head size is the width over the number of heads; a window of 0 means none."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    window = file.value("phi3.attention.sliding_window", int, 0)
    rotated = numbers.count("rope.dimension_count", head_dim) / max(1, head_dim)
    trained = numbers.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "head_dim": head_dim,
        "sliding_window": window or None,
        "partial_rotary_factor": rotated,
        "original_max_position_embeddings": trained,
    }


def _mistral3_config(numbers: Numbers, config: dict[str, Any]) -> dict[str, Any]:
    """Return Ministral 3's own keys. A file without query scaling is another Mistral."""
    beta, mscale = (
        numbers.number(key, 0.0) for key in ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
    )
    scaling = config["rope_scaling"]
    if scaling and mscale:
        scaling |= {"mscale": 1.0, "mscale_all_dim": mscale}
    if not beta:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    scaling = scaling or {"rope_type": "default"}
    return {"rope_scaling": scaling | {"llama_4_scaling_beta": beta}, "sliding_window": None}


def _olmo_config(file: GGUFFile, numbers: Numbers, config: dict[str, Any]) -> dict[str, Any]:
    """Return OLMo 2's own keys. A file with windows is an OLMo 3."""
    family = {"attention_bias": has_biases(file.tensors, ATTENTION)}
    if "attention.sliding_window" not in numbers:
        return family
    num_layers, key = config["num_hidden_layers"], "olmo2.attention.sliding_window_pattern"
    slides = [bool((layer + 1) % 4) for layer in range(num_layers)]
    if file.is_array(key):
        slides = [bool(each) for each in file.array(key)]
    return family | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": numbers.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
    }


def _gemma_config(config: dict[str, Any], *, large_layers: int, pattern: int) -> dict[str, Any]:
    """Return the keys shared by Gemma 2 and 3: every `pattern`-th layer is global, the others slide."""
    num_layers = config["num_hidden_layers"]
    # The file does not hold the score scale: only the largest model has hidden size / heads, not the head size.
    largest = num_layers == large_layers
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window_pattern": pattern,
        "layer_types": [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(num_layers)
        ],
    }
