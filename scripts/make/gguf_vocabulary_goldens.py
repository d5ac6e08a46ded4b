"""Make tests/data/gguf/vocabulary.json with llama.cpp: words by pre-tokenizer, and the tokens that end texts.

Run it in an environment that has gguf and llama-cpp-python, which jaxllm itself never needs:

    python scripts/make.py gguf_vocabulary_goldens
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

NUM_MERGES = 500
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
ALPHABET = [chr(byte if byte in VISIBLE else 256 + HIDDEN.index(byte)) for byte in range(256)]
"""How byte-level vocabularies spell each byte."""

# llama.cpp's patterns of these ignore case in other alphabets, or in all, and marks.
CASED = "tekken gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m tiny_aya cohere2moe youtu kimi-k2"
NAMES = (
    "default gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum modern-bert roberta-bpe"
    " jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code smollm starcoder refact command-r codeshell"
    " minerva-7b exaone mellum2 falcon llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    " dbrx smaug-bpe chatglm-bpe glm4 glm5 jais-2 minicpm5 qwen2 deepseek-r1-qwen stablelm2 megrez f2llmv2 qwen35"
    " hunyuan solar-open grok-2 kormo laguna ufakzeka deepseek-llm deepseek-coder deepseek-v3 hunyuan-dense joyai-llm"
    " hy_v4 spark2_5 afmoe bailingmoe bailingmoe2 llada-moe seed-coder exaone-moe superbpe bloom gpt3-finnish poro-chat"
    " viking chameleon"
)
PLAIN = [
    "The year 2024 has 366 days; 3.14159 and 1,000,000.",
    "don't can't they'll we've 'table 'domates x'te",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u4e2d\u56fd\u8bdd\u3002 \ud55c\uad6d\uc5b4",
    "  two  spaces   three    four     ",
    "x = foo(bar)[1:2] + `baz` ~ 5^2 | y; #!$%&",
    "def f(x):\n    return x ** 2  # square\n\n\nclass a:\n\tpass\n",
    "1234567890 12 123 1234 12345 123456 1234567",
    "https://example.com/a_b?c=d&e=%20#f //\n//\n\n a/b\r\n",
    " \n \n  \n   \n  x\n\n\ny",
    "\u00bd \u2167 \u00b2 1\u00bd2",
    "\u201cquoted\u201d \u2026 \u2014 \uff01\uff1a\uff1b\uff0c",
    "<tag> </tag> ((a)) {b:c}",
    " " * 21 + "x",
]
OTHER = [
    "HelloWorld DON'T WE'LL aB",
    "na\u00efve caf\u00e9 r\u00e9sum\u00e9 e\u0301 \u00c9tat",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\uac00 \ub098\ub2e4 \u3131\u3134 A b C",
]
NORMAL = 1
END_CASES: list[dict[str, Any]] = [
    {"tokens": {"<|endoftext|>": 3, "<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, "eos_token_id": 1},
    {"tokens": {"<|endoftext|>": 3, "<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, "eos_token_id": 3},
    {"tokens": {"<|endoftext|>": 3, "<|flush|>": 3, "<|calls|>": 3, "<|end|>": 3}, "eos_token_id": 0},
    {"tokens": {"<|endoftext|>": 3, "<|end|>": 3, "<|call|>": 3}, "eos_token_id": 0},
    {"tokens": {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 1}, "eos_token_id": 0},
    {"tokens": {"<|fim_pad|>": 3, "<|repo_name|>": 3, "<|file_sep|>": 3, "<|fim_prefix|>": 3}, "eos_token_id": 3},
    {"tokens": {"<x>": 3, "<y>": 3, "<z>": 3, "<w>": 3}, "eos_token_id": 0, "eot_token_id": 1, "eom_token_id": 2},
    {"tokens": {"<eos>": 3, "</s>": 1, "<|tool_response>": 3, "<turn|>": 3}, "eos_token_id": 0},
    {"tokens": {"<x>": 3, "</s>": 3}, "eos_token_id": 0},
    {"tokens": {"<x>": 3, "<|eot_id|>": 4, "<|eom_id|>": 3, "<|end_of_text|>": 3}, "eos_token_id": 99},
]


def train(text: str) -> list[tuple[str, str]]:
    """Return merges of neighbours that are frequent in a text, across all borders of words."""
    pieces, merges, known = [ALPHABET[byte] for byte in text.encode()], [], set(ALPHABET)
    while len(merges) < NUM_MERGES:
        counts = Counter(pairwise(pieces))
        best = next(pair for pair, _ in counts.most_common() if "".join(pair) not in known)
        merges.append(best)
        known.add("".join(best))
        merged: list[str] = []
        for piece in pieces:
            if merged and (merged[-1], piece) == best:
                merged[-1] += piece
            else:
                merged.append(piece)
        pieces = merged
    return merges


def open_vocabulary(tokens: dict[str, int], merges: list[str], pre: str, **keys: int) -> llama_cpp.Llama:
    """Write a file without tensors, and have llama.cpp open it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vocabulary.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_block_count(1)
        writer.add_feed_forward_length(8)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(tokens.values()))
        writer.add_token_merges(merges)
        for key, value in keys.items():
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


def words(names: str, texts: list[str], tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """Return, for names that llama.cpp treats alike, the texts' ids, and whether it adds a beginning of sequence."""
    alike: dict[str, list[str]] = {}
    for name in names.split():
        types = dict.fromkeys(tokens, NORMAL)
        model = open_vocabulary(types, merges, name, bos_token_id=0, eos_token_id=0)
        ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
        begins = len(model.tokenize(b"!", add_bos=True, special=False)) == 2
        alike.setdefault(json.dumps({"ids": ids, "adds_bos": begins}), []).append(name)
    return {" ".join(found): json.loads(key) for key, found in alike.items()}


def ends(case: dict[str, Any]) -> list[int]:
    """Return the ids that end a text in a file with the tokens and keys of a case."""
    keys = {key: value for key, value in case.items() if key != "tokens"}
    model = open_vocabulary(case["tokens"] | {"a": NORMAL, "b": NORMAL, "ab": NORMAL}, ["a b"], "gpt-2", **keys)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    return [token for token in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, token)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    texts = PLAIN + OTHER
    pairs = train("".join(texts * 2 + texts[::-1] * 2 + texts[::2] * 2))
    merges, tokens = [" ".join(pair) for pair in pairs], ALPHABET + ["".join(pair) for pair in pairs]
    goldens = {
        "tokens": tokens,
        "merges": merges,
        "texts": texts,
        "words": words(NAMES, texts, tokens, merges) | words(CASED, PLAIN, tokens, merges),
        "ends": [case | {"ends": ends(case)} for case in END_CASES],
    }
    path = Path(__file__).parents[2] / "tests/data/gguf/vocabulary.json"
    path.write_text(json.dumps(goldens, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
