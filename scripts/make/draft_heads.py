"""Write tests/data/heads: tiny random draft heads, MTP layers and EAGLE-3 heads, with goldens from HF's layers.

Needs the environment of `tiny_checkpoints`: `python scripts/make.py draft_heads [CASE ...]`. Same versions,
same bytes.

HF Transformers runs no draft heads, but it has all their parts. An MTP case is a checkpoint of tests/data/tiny with one
layer more, after its last one or apart; an EAGLE-3 case is a head alone, for one of those checkpoints. Each has
golden.npz, computed in float32 over the goldens of that checkpoint: the head's outputs at all positions, and its greedy
guesses after the last.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from make.tiny_checkpoints import VOCAB, fill, run

DATA = Path(__file__).parents[2] / "tests/data"
NUM_GUESSES = 4
NUM_GUESSED_IDS = 64
# Rounding could change a guess as close as this; such a seed is not taken.
MIN_GAP = 5e-3

Head = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function of the tokens after positions [t] and the positions' hidden states [t, d]; it returns the head's hidden
states [t, d] and logits [t, v]."""


class Case(NamedTuple):
    """A draft head for a tiny checkpoint."""

    base: str
    make: Callable[[Path, Path, int], tuple[Any, Callable[[torch.Tensor], torch.Tensor], Head]]
    """Writes the head for the checkpoint in a folder to another, given a seed. Returns the model, the function of token
    ids [t] that gives the first hidden states [t, d], and the head."""


def linear(outputs: int, inputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def normed(size: int, eps: float) -> LlamaRMSNorm:
    return LlamaRMSNorm(size, eps=eps)


def rounded(module: nn.Module, seed: int, *, norm_offset: float = 0.0) -> Any:
    """Return a module with weights drawn anew that bfloat16 holds exactly."""
    fill(module, seed, norm_offset=norm_offset, scales_embeddings=False)
    return module.to(torch.bfloat16).float().eval()


def named(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor.to(torch.bfloat16) for name, tensor in module.state_dict().items()}


def split(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with those of experts divided, one for each expert and matrix."""
    divided: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, dot, matrix = name.rpartition("experts.")
        if matrix not in ("gate_up_proj", "down_proj"):
            divided[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            matrices = expert.chunk(2) if matrix == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
            for part, values in zip(names, matrices, strict=True):
                divided[f"{module}{dot}{number}.{part}.weight"] = values.contiguous()
    return divided


def save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def make_mtp(base: Path, folder: Path, seed: int) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor], Head]:
    config = json.loads((base / "config.json").read_text())
    last, d, eps = config["num_hidden_layers"], config["hidden_size"], config["rms_norm_eps"]
    model_class = getattr(transformers, config["architectures"][0])
    changes: dict[str, Any] = {"num_hidden_layers": last + 1}
    if "mlp_layer_types" in config:
        changes["mlp_layer_types"] = [*config["mlp_layer_types"], "sparse"]
    model = model_class.from_pretrained(base, dtype=torch.float32, **changes).eval()
    layer = rounded(model.model.layers[last], seed)
    parts = rounded(
        nn.ModuleDict(
            {
                "enorm": normed(d, eps),
                "hnorm": normed(d, eps),
                "eh_proj": linear(d, 2 * d),
                "shared_head": nn.ModuleDict({"norm": normed(d, eps), "head": linear(VOCAB, d)}),
            }
        ),
        seed + 100,
    )
    parts["shared_head"]["head"].weight.data.copy_(model.lm_head.weight)
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | named(parts, f"model.layers.{last}.")
    tensors[f"model.layers.{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save(tensors, folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2) + "\n")
    model = model_class.from_pretrained(base, dtype=torch.float32).eval()

    def first(ids: torch.Tensor) -> torch.Tensor:
        return model.model(input_ids=ids[None]).last_hidden_state[0]

    def head(ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = parts["enorm"](model.model.embed_tokens(ids)), parts["hnorm"](hidden)
        x = parts["eh_proj"](torch.cat(both, dim=-1))[None]
        positions = torch.arange(len(ids))[None]
        rope = model.model.rotary_emb(x, position_ids=positions)
        x = layer.float()(x, position_ids=positions, position_embeddings=rope)[0]
        hidden = parts["shared_head"]["norm"](x)
        return hidden, parts["shared_head"]["head"](hidden)

    return model, first, head


def make_apart_mtp(base: Path, folder: Path, seed: int) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor], Head]:
    """Write an MTP head as Qwen3-Next and Qwen3.5 have it: a layer of attention, apart from the model's layers."""
    config = json.loads((base / "config.json").read_text())
    text = config.get("text_config", config)
    d, eps = text["hidden_size"], text["rms_norm_eps"]
    model = getattr(transformers, config["architectures"][0]).from_pretrained(base, dtype=torch.float32).eval()
    decoder = getattr(model.model, "language_model", model.model)
    last = next(layer for layer in reversed(decoder.layers) if hasattr(layer, "self_attn"))
    norm = type(decoder.norm)
    parts = nn.ModuleDict(
        {
            "fc": linear(d, 2 * d),
            "pre_fc_norm_embedding": norm(d, eps=eps),
            "pre_fc_norm_hidden": norm(d, eps=eps),
            "layers": nn.ModuleList([copy.deepcopy(last)]),
            "norm": norm(d, eps=eps),
        }
    )
    parts = rounded(parts, seed, norm_offset=1.0)
    folder.mkdir(parents=True)
    tensors = named(parts, "mtp.")
    save(load_file(base / "model.safetensors") | (tensors if base.name == "qwen3_5_moe" else split(tensors)), folder)
    text["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def first(ids: torch.Tensor) -> torch.Tensor:
        return model.model(input_ids=ids[None]).last_hidden_state[0]

    def head(ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = parts["pre_fc_norm_embedding"](decoder.embed_tokens(ids)), parts["pre_fc_norm_hidden"](hidden)
        x = parts["fc"](torch.cat(both, dim=-1))[None]
        positions = torch.arange(len(ids))[None]
        rope = decoder.rotary_emb(x, position_ids=positions)
        x = parts["layers"][0](x, position_ids=positions, position_embeddings=rope)[0]
        hidden = parts["norm"](x)
        return hidden, model.lm_head(hidden)

    return model, first, head


def eagle3(depths: tuple[int, ...], *, is_speculators: bool) -> Callable[..., Any]:
    """Return a maker of an EAGLE-3 head in its authors' format, or in that of the speculators library."""

    def make(base: Path, folder: Path, seed: int) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor], Head]:
        folder.mkdir(parents=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        d, num_ids = model.config.hidden_size, VOCAB if is_speculators else NUM_GUESSED_IDS
        sizes = {"hidden_size": d, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"num_hidden_layers": 1, "vocab_size": VOCAB, "head_dim": 16, "max_position_embeddings": 256}
        config = transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=False)
        config._attn_implementation = "sdpa"  # without a mask it is causal
        layer = LlamaDecoderLayer(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, linear(getattr(layer.self_attn, name).out_features, 2 * d))
        layer.hidden_norm = normed(d, 1e-5)
        layer = rounded(layer, seed)
        parts = {"fc": linear(d, len(depths) * d), "norm": normed(d, 1e-5), "lm_head": linear(num_ids, d)}
        parts = rounded(nn.ModuleDict(parts), seed + 100)
        ids = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(VOCAB)[:num_ids]))
        tensors = named(layer, "layers.0." if is_speculators else "midlayer.") | named(parts, "")
        tensors["d2t"] = ids - torch.arange(num_ids)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        if is_speculators:
            tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.data.to(torch.bfloat16)
        save(tensors, folder)
        settings = config.to_diff_dict() | sizes | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        settings |= {"draft_vocab_size": num_ids}
        if not is_speculators:
            settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": depths}
        else:
            settings = {
                "architectures": ["Eagle3Speculator"],
                "draft_vocab_size": num_ids,
                "dtype": "bfloat16",
                "eagle_aux_hidden_state_layer_ids": depths,
                "norm_before_residual": True,
                "speculators_config": {"algorithm": "eagle3"},
                "target_hidden_size": None,
                "transformer_layer_config": settings | {"rms_norm_eps": 1e-5},
            }
        (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        rotary = LlamaRotaryEmbedding(config)

        def first(ids: torch.Tensor) -> torch.Tensor:
            streams: list[torch.Tensor] = [model.get_input_embeddings()(ids)]
            hooks = [
                each.register_forward_hook(lambda _module, _args, out: streams.append(out[0]))
                for each in model.model.layers
            ]
            model(input_ids=ids[None])
            for hook in hooks:
                hook.remove()
            return parts["fc"](torch.cat([streams[depth] for depth in depths], dim=-1))

        def head(ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = layer.input_layernorm(model.get_input_embeddings()(ids))
            features = layer.hidden_norm(hidden)
            positions = torch.arange(len(ids))[None]
            both = torch.cat((tokens, features), dim=-1)[None]
            rope = rotary(both, position_ids=positions)
            attended, _ = layer.self_attn(both, attention_mask=None, position_ids=positions, position_embeddings=rope)
            x = (features if is_speculators else hidden) + attended[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits = torch.full((len(x), VOCAB), -torch.inf)
            logits[:, tensors["d2t"] + torch.arange(num_ids)] = parts["lm_head"](parts["norm"](x))
            return x, logits

        return model, first, head

    return make


CASES = {
    "mtp_deepseek_v3": Case("deepseek_v3", make_mtp),
    "mtp_glm4_moe": Case("glm4_moe", make_mtp),
    "mtp_glm4_moe_lite": Case("glm4_moe_lite", make_mtp),
    "mtp_qwen3_next": Case("qwen3_next", make_apart_mtp),
    "mtp_qwen3_5": Case("qwen3_5", make_apart_mtp),
    "mtp_qwen3_5_moe": Case("qwen3_5_moe", make_apart_mtp),
    "eagle3": Case("llama2", eagle3((0, 1, 2), is_speculators=False)),
    "eagle3_speculators": Case("qwen3", eagle3((2, 1), is_speculators=True)),
}


@torch.no_grad()
def golden(base: Path, first: Callable[[torch.Tensor], torch.Tensor], head: Head) -> dict[str, Any]:
    """Return a head's outputs for the goldens of its model."""
    arrays: dict[str, Any] = {}
    with np.load(base / "golden.npz") as goldens:
        sequences = [
            np.concatenate((goldens[f"prompt_{index}"], goldens[f"tokens_{index}"]))
            for index in range(sum(name.startswith("tokens_") for name in goldens))
        ]
    for index, sequence in enumerate(sequences):
        ids = torch.from_numpy(sequence.astype(np.int64))
        hidden, next_ids, steps, guesses = first(ids[:-1]), ids[1:], [], []
        for _ in range(NUM_GUESSES):
            head_states, logits = head(next_ids, hidden)
            steps.append(torch.log_softmax(logits, dim=-1).numpy())
            guesses.append(int(logits[-1].argmax()))
            next_ids, hidden = torch.cat((next_ids, torch.tensor(guesses[-1:]))), torch.cat((hidden, head_states[-1:]))
        arrays[f"sequence_{index}"], arrays[f"guesses_{index}"] = sequence.astype(np.int32), np.array(guesses, np.int32)
        arrays[f"guess_logprobs_{index}"] = np.stack([step[-1] for step in steps])
        if index < len(sequences) - 1:
            arrays[f"logprobs_{index}"] = steps[0]
    return arrays


def make(name: str, case: Case, folder: Path) -> None:
    """Write one case, with the first seed that leaves no guess in doubt."""
    base = DATA / "tiny" / case.base
    for seed in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        _, first, head = case.make(base, folder, seed)
        arrays = golden(base, first, head)
        best = [np.sort(each)[:, -2:] for key, each in arrays.items() if key.startswith("guess_logprobs")]
        gap = min(float((pair[:, 1] - pair[:, 0]).min()) for pair in best)
        if gap > MIN_GAP:
            np.savez_compressed(folder / "golden.npz", **arrays)
            size = sum(path.stat().st_size for path in folder.iterdir()) // 1024
            print(f"{name}: seed {seed}, smallest gap {gap:.4f}, {size} KB")
            return
    raise RuntimeError(f"{name}: no seed in 20 keeps guesses apart by {MIN_GAP}")


if __name__ == "__main__":
    run(__doc__, CASES, make, "heads")
