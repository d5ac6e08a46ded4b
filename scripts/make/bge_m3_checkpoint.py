"""Write tests/data/bge_m3: a tiny random BGE-M3 in the layout of BAAI/bge-m3, with goldens.

Needs the environment of `late_interaction_checkpoints`: `python scripts/make.py bge_m3_checkpoint`. Same versions,
same bytes.

Beside the folder's files golden.npz has texts and, of each alone, tokens and what Hugging Face's XLMRobertaModel and
the heads give in float32: the dense embedding, a vector of every token but the first, and the weights of the tokens
between the first and the last one. The scores [query, document] of weights are computed as FlagEmbedding does: words
are token ids, the largest weight of a word counts, and special tokens and weights of zero do not.
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
from torch.nn.functional import normalize

from make.late_interaction_checkpoints import SIZES, TEXTS, byte_pairs, drawn
from make.tiny_checkpoints import fill

FOLDER = Path(__file__).resolve().parents[2] / "tests/data/bge_m3"
SPECIALS = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
MODULES = (
    ("", "sentence_transformers.models.Transformer"),
    ("1_Pooling", "sentence_transformers.models.Pooling"),
    ("2_Normalize", "sentence_transformers.models.Normalize"),
)


def write_json(name: str, value: Any) -> None:
    """Write one file of the folder."""
    (FOLDER / name).parent.mkdir(exist_ok=True)
    (FOLDER / name).write_text(json.dumps(value, indent=2))


def lexical_weights(ids: list[int], weights_t: np.ndarray, specials: set[int]) -> dict[int, float]:
    """Return the weight of each word of a text; `weights_t` are of all its tokens."""
    words: dict[int, float] = {}
    for word, weight in zip(ids, weights_t.tolist(), strict=True):
        if word not in specials and weight > words.get(word, 0.0):
            words[word] = weight
    return words


def lexical_score(query: dict[int, float], document: dict[int, float]) -> float:
    """Return the sum, over the words of both texts, of the products of their weights."""
    return sum(weight * document.get(word, 0.0) for word, weight in query.items())


@torch.no_grad()
def main() -> None:
    """Write the files, and run all texts."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    tokenizer = byte_pairs(FOLDER, **SPECIALS)
    ids: dict[str, Any] = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    config = transformers.XLMRobertaConfig(vocab_size=len(tokenizer), type_vocab_size=1, **SIZES, **ids)
    model = transformers.XLMRobertaModel(config)
    fill(model, 0, norm_offset=0.0, scales_embeddings=False)
    write_json("config.json", config.to_dict() | {"architectures": ["XLMRobertaModel"]})
    torch.save(model.state_dict(), FOLDER / "pytorch_model.bin")
    heads = {"colbert": {"weight": drawn(32, 32, seed=1), "bias": drawn(32, seed=2)}}
    heads["sparse"] = {"weight": drawn(1, 32, seed=3), "bias": torch.full((1,), 0.3)}
    heads = {name: {key: tensor.half() for key, tensor in head.items()} for name, head in heads.items()}
    for name, head in heads.items():
        torch.save(head, FOLDER / f"{name}_linear.pt")
    write_json("modules.json", [{"idx": i, "name": str(i), "path": p, "type": t} for i, (p, t) in enumerate(MODULES)])
    write_json("1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode_cls_token": True})
    write_json("sentence_bert_config.json", {"max_seq_length": 120, "do_lower_case": False})

    model.eval()
    arrays: dict[str, Any] = {"texts": np.frombuffer(json.dumps(TEXTS).encode(), np.uint8)}
    specials = {tokenizer.convert_tokens_to_ids(name) for key, name in SPECIALS.items() if key != "mask_token"}
    words: list[dict[int, float]] = []
    for index, text in enumerate(TEXTS):
        tokens = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        hidden_td = model(**tokens).last_hidden_state[0]
        colbert, sparse = (
            hidden_td @ head["weight"].float().T + head["bias"].float() for head in (heads["colbert"], heads["sparse"])
        )
        weights_t = torch.relu(sparse)[:, 0].numpy()
        token_ids = tokens["input_ids"][0].tolist()
        words.append(lexical_weights(token_ids, weights_t, specials))
        arrays |= {
            f"ids_{index}": np.asarray(token_ids, np.int32),
            f"dense_{index}": normalize(hidden_td[0], dim=0).numpy(),
            f"colbert_{index}": normalize(colbert[1:], dim=1).numpy(),
            f"sparse_{index}": weights_t[1:-1],
        }
    arrays["lexical_scores"] = np.asarray([[lexical_score(query, each) for each in words] for query in words])
    np.savez_compressed(FOLDER / "golden.npz", **arrays)
    print(f"{sum(path.stat().st_size for path in FOLDER.rglob('*') if path.is_file()) // 1024} KB")


if __name__ == "__main__":
    main()
