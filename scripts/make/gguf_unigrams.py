"""Write tests/data/gguf/unigrams: a tiny XLM-RoBERTa with a vocabulary of unigrams, as llama.cpp's converter writes it.

Run it in an environment that has gguf, sentencepiece, torch and transformers, which jaxllm itself never needs:

    python scripts/make.py gguf_unigrams

The vocabulary is trained on a few texts, with a table of characters that stand for others. golden.json has HF's ids of
texts and pairs, and HF's last hidden states of the first text.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import torch
import transformers

from make.tiny_checkpoints import fill

FOLDER = Path(__file__).parents[2] / "tests/data/gguf/unigrams"
SIZE = 200
STANDS_FOR = {
    "\ufb01": "fi",
    "\uff21": "A",
    "\u00bd": "1\u20442",
    "e\u0301": "\u00e9",
    "\u3000": " ",
    "\t": " ",
    "\n": " ",
}
TRAINED = [
    "The year 2024 has 366 days; 3.14159 and 1,000,000.",
    "don't can't they'll we've a table of domates",
    "na\u00efve caf\u00e9 r\u00e9sum\u00e9 office Hello World, hello, world!",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "Bees dance to tell other bees where flowers are, and how far away they are.",
    "A house, a garden, and a dog that barks at every stranger who walks by.",
]
TEXTS = [
    "Hello, World!",
    " caf\u00e9 cafe\u0301  na\u00efve\tof\ufb01ce \uff21\u3000b ",
    "a <mask> b<mask> c</s> <s>d",
    "\U0001f642 \u6211\u60f3 \u0420\u043e\u0441\u0441\u0438\u044f unknown\u2603snow",
    "x" * 50,
    "",
    "The year 2024 has 366 days; 3.14159 and 1,000,000.",
]


def train() -> tuple[list[tuple[str, float]], bytes]:
    """Return the pieces and scores of a model that SentencePiece trains, and its table of characters."""
    with tempfile.TemporaryDirectory() as folder:
        rules, path = Path(folder, "rules.tsv"), Path(folder, "model.model")
        lines = [f"{spell(a)}\t{spell(b)}" for a, b in STANDS_FOR.items()]
        rules.write_text("\n".join(lines) + "\n")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINED * 20),
            model_prefix=str(path.with_suffix("")),
            vocab_size=SIZE,
            hard_vocab_limit=False,
            character_coverage=0.98,
            normalization_rule_tsv=str(rules),
            num_threads=1,
        )
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(3, model.get_piece_size())]
        # ModelProto.normalizer_spec.precompiled_charsmap
        return pieces, field(field(path.read_bytes(), 3), 2)


def spell(text: str) -> str:
    """Return the numbers of a text's characters, as in a table of rules."""
    return " ".join(f"{ord(character):X}" for character in text)


def field(message: bytes, number: int) -> bytes:
    """Return the first field of that number in a message of protobuf."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value

    while True:
        tag, kind = divmod(varint(), 8)
        if kind == 0:
            varint()
            continue
        size = varint() if kind == 2 else 8 if kind == 1 else 4
        if tag == number:
            return message[at : at + size]
        at += size


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    pieces, charsmap = train()
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces, ("<mask>", 0.0)]
    mask = transformers.AddedToken("<mask>", lstrip=True, special=True)
    parts: dict[str, Any] = {"vocab": vocab, "mask_token": mask, "_spm_precompiled_charsmap": charsmap}
    tokenizer = transformers.XLMRobertaTokenizer(**parts)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ids: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = transformers.XLMRobertaConfig(
        vocab_size=len(vocab) + 3, max_position_embeddings=66, type_vocab_size=1, layer_norm_eps=1e-5, **sizes, **ids
    )
    model = transformers.XLMRobertaModel(config, add_pooling_layer=False)
    fill(model, 0, norm_offset=0.0, scales_embeddings=False)
    model.to(torch.bfloat16).to(torch.float32).eval()
    FOLDER.mkdir(exist_ok=True)
    write(FOLDER / "model.gguf", model, vocab, charsmap)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([tokenizer(TEXTS[0])["input_ids"]])).last_hidden_state[0]
    golden = {
        "texts": TEXTS,
        "ids": [tokenizer(text)["input_ids"] for text in TEXTS],
        "pairs": [tokenizer(text, TEXTS[0])["input_ids"] for text in TEXTS],
        "decoded": [tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) for text in TEXTS],
        "states": states.tolist(),
    }
    (FOLDER / "golden.json").write_text(json.dumps(golden) + "\n")


def write(path: Path, model: Any, vocab: list[tuple[str, float]], charsmap: bytes) -> None:
    """Write the file with gguf, as llama.cpp's converter does."""
    config, kinds = model.config, gguf.TokenType
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(config.max_position_embeddings - 2)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    num_fillers = config.vocab_size - len(vocab)
    special = {"<s>": kinds.CONTROL, "<pad>": kinds.CONTROL, "</s>": kinds.CONTROL, "<unk>": kinds.UNKNOWN}
    special["<mask>"] = kinds.CONTROL
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocab] + [f"[PAD{len(vocab) + i}]" for i in range(num_fillers)])
    writer.add_token_scores([score for _, score in vocab] + [-10000.0] * num_fillers)
    writer.add_token_types([special.get(token, kinds.NORMAL) for token, _ in vocab] + [kinds.UNUSED] * num_fillers)
    writer.add_add_space_prefix(True)
    writer.add_token_type_count(config.type_vocab_size)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(charsmap)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_sep_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_mask_token_id(len(vocab) - 1)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.endswith("position_embeddings.weight"):
            tensor = tensor[2:]  # positions begin after that of padding
        values = tensor.numpy().astype(np.float32)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
