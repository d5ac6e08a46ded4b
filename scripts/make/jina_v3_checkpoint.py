"""Write tests/data/jina_v3_tasks: a tiny random Jina Embeddings v3 with the adapters of two tasks, and goldens.

Needs the environment of `late_interaction_checkpoints`: `python scripts/make.py jina_v3_checkpoint`. Same versions,
same bytes.

The tensors have the published names, the adapters' matrices beside the weights. golden.npz has texts and, for each task
and for none, the embeddings that Hugging Face's JinaEmbeddingsV3Model gives in float32 with the task's matrices added
to its weights, of the texts behind the task's instruction.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from make.late_interaction_checkpoints import SIZES, TEXTS, byte_pairs, drawn
from make.tiny_checkpoints import fill

FOLDER = Path(__file__).resolve().parents[2] / "tests/data/jina_v3_tasks"
INSTRUCTIONS = {"retrieval.query": "the query: ", "text-matching": ""}
RANK, ALPHA = 3, 2
BESIDE = ".parametrizations.weight"


def adapters_of(name: str, weight: Any, seed: int) -> dict[str, Any]:
    """Return the matrices [tasks, ...] beside a weight: for an embedding [v, rank] and [rank, d], else B A."""
    rows, columns = weight.shape
    down = (rows, RANK) if "embeddings" in name else (RANK, columns)
    up = (RANK, columns) if "embeddings" in name else (rows, RANK)
    shapes = {"lora_A": down, "lora_B": up}
    return {key: drawn(len(INSTRUCTIONS), *shape, seed=seed + i) for i, (key, shape) in enumerate(shapes.items())}


def added(name: str, matrices: dict[str, Any], task: int) -> Any:
    """Return what a task adds to a weight."""
    down, up = matrices["lora_A"][task], matrices["lora_B"][task]
    return (down @ up if "embeddings" in name else up @ down) * (ALPHA / RANK)


@torch.no_grad()
def main() -> None:
    """Write the files, and run all texts for each task."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    names = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>"}
    tokenizer = byte_pairs(FOLDER, **names)
    config = transformers.JinaEmbeddingsV3Config(vocab_size=len(tokenizer), type_vocab_size=1, pad_token_id=1, **SIZES)
    model = transformers.JinaEmbeddingsV3Model(config)
    fill(model, 0, norm_offset=0.0, scales_embeddings=False)
    model.save_pretrained(FOLDER, save_original_format=True)
    plain = load_file(FOLDER / "model.safetensors")
    matrices = {
        name: adapters_of(name, tensor, 10 * number)
        for number, (name, tensor) in enumerate(sorted(plain.items()))
        if name.endswith(".weight") and tensor.ndim == 2
    }
    arrays: dict[str, Any] = {"texts": np.frombuffer(json.dumps(TEXTS).encode(), np.uint8)}
    for task, (name, instruction) in enumerate([*INSTRUCTIONS.items(), ("none", "")]):
        merged = dict(plain)
        if name in INSTRUCTIONS:
            merged |= {each: plain[each] + added(each, pair, task) for each, pair in matrices.items()}
        save_file(merged, FOLDER / "model.safetensors", {"format": "pt"})
        adapted = transformers.JinaEmbeddingsV3Model.from_pretrained(FOLDER, attn_implementation="eager").eval()
        vectors = []
        for text in TEXTS:
            ids = tokenizer(instruction + text, return_tensors="pt")["input_ids"]
            mean_d = adapted(input_ids=ids).last_hidden_state[0].mean(dim=0)
            vectors.append(torch.nn.functional.normalize(mean_d, dim=0).numpy())
        arrays[name] = np.stack(vectors)
    stored: dict[str, Any] = {}
    for name, tensor in plain.items():
        stem = f"roberta.{name.removesuffix('.weight')}{BESIDE}"
        if name in matrices:
            stored[f"{stem}.original"] = tensor
            stored |= {f"{stem}.0.{key}": matrix for key, matrix in matrices[name].items()}
        else:
            stored[f"roberta.{name}"] = tensor
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, FOLDER / "model.safetensors")
    written = json.loads((FOLDER / "config.json").read_text())
    theta = written.pop("rope_parameters")["rope_theta"]
    written |= {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}
    written |= {"position_embedding_type": "rotary", "rotary_emb_base": theta, "load_trained_adapters": True}
    written |= {"lora_adaptations": list(INSTRUCTIONS), "lora_rank": RANK, "lora_alpha": ALPHA}
    (FOLDER / "config.json").write_text(json.dumps(written | {"task_instructions": INSTRUCTIONS}, indent=2))
    np.savez_compressed(FOLDER / "golden.npz", **arrays)
    print(f"{sum(path.stat().st_size for path in FOLDER.rglob('*') if path.is_file()) // 1024} KB")


if __name__ == "__main__":
    main()
