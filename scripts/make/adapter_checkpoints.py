"""Write tests/data/adapters: LoRA adapters for tiny checkpoints as PEFT saves them, with goldens of merged weights.

Needs an environment of its own with torch, transformers 5.23 and peft 0.21: `python scripts/make.py adapter_checkpoints
[CASE ...]`, after scripts/make.py tiny_checkpoints. Same versions, same bytes.

Each case is a folder with a folder per adapter, and golden.npz: the prompt that all adapters continue, and each
adapter's greedy tokens with log-probabilities, computed in float32 with the adapter merged into the weights.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model

from make.tiny_checkpoints import MIN_GAP, VOCAB, decode, run

PROMPT_LEN = 20
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
CASES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "llama3_tied": {
        "all": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP},
        "attention": {"r": 2, "lora_alpha": 8, "target_modules": ATTENTION},
        "mlp": {"r": 2, "lora_alpha": 2, "target_modules": MLP},
        "rank-8": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        "rslora": {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
        "patterns": {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ATTENTION,
            "rank_pattern": {"k_proj": 3, "layers.1.self_attn.v_proj": 1},
            "alpha_pattern": {"q_proj": 16},
        },
        "one-layer": {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION + MLP, "layers_to_transform": [1]},
        "rank-1": {"r": 1, "lora_alpha": 3, "target_modules": ["k_proj", "gate_proj"]},
    },
    "gpt2": {"all": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}},
    "phi3": {"all": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}},
    "qwen3_next": {
        "all": {
            "r": 2,
            "lora_alpha": 8,
            "target_modules": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
        }
    },
    "deepseek_v2_lite": {
        "all": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]}
    },
}
TYPES = {"gpt2": "GPT2LMHeadModel", "phi3": "Phi3ForCausalLM", "deepseek_v2_lite": "DeepseekV2ForCausalLM"}
TYPES |= {"llama3_tied": "LlamaForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}


def make(name: str, adapters: Mapping[str, dict[str, Any]], folder: Path) -> None:
    """Write one case, each adapter with the first seed that leaves no greedy choice in doubt."""
    shutil.rmtree(folder, ignore_errors=True)
    prompt = np.random.default_rng(0).integers(6, VOCAB, PROMPT_LEN)
    arrays: dict[str, Any] = {"prompt": prompt.astype(np.int32)}
    for adapter, settings in adapters.items():
        for seed in range(20):
            logprobs, tokens = write(name, settings, folder / adapter, seed, prompt)
            best = np.sort(logprobs, axis=-1)[:, -2:]
            if (best[:, 1] - best[:, 0]).min() > MIN_GAP:
                break
        else:
            raise RuntimeError(f"{name}, {adapter}: no seed in 20 keeps greedy choices apart by {MIN_GAP}")
        arrays |= {f"tokens_{adapter}": tokens, f"logprobs_{adapter}": logprobs}
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024
    print(f"{name}: {len(adapters)} adapters, {size} KB")


def write(
    name: str, settings: dict[str, Any], folder: Path, seed: int, prompt: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Save an adapter of random weights, and return the merged model's outputs."""
    torch.manual_seed(seed)
    base = Path(__file__).parents[2] / "tests/data/tiny" / name
    model_class = getattr(transformers, TYPES[name])
    model = model_class.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            noise = torch.randn_like(parameter)
            parameter.data.copy_(0.5 * noise / parameter.shape[1] ** 0.5)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    settled = config | {"base_model_name_or_path": name, "target_modules": sorted(config["target_modules"])}
    (folder / "adapter_config.json").write_text(json.dumps(settled, indent=1) + "\n")
    _, logprobs, tokens = decode(adapted.merge_and_unload().eval(), prompt)
    return logprobs, tokens


if __name__ == "__main__":
    run(__doc__, CASES, make, "adapters")
