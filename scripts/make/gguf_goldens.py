"""Make the goldens of tests/data/gguf with independent code: the gguf package, and transformers with torch.

Run it in an environment that has gguf, torch and transformers, which jaxllm itself never needs:

    python scripts/make.py gguf_goldens SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

TYPES = (
    *("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),
    *("IQ4_NL", "IQ4_XS"),
)
ROWS, ROW_SIZE = 3, 512
# The positions of float16 scales in a block, for types that the package cannot write.
SCALE_OFFSETS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALE_OFFSETS |= {"IQ4_NL": (0,), "IQ4_XS": (0,)}

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "Hello, world!",
    " leading and trailing ",
    "  two  spaces   three    four",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "The year 2024 has 366 days; 3.14159 and 1,000,000.",
    "don't can't I'll we've IT'S",
    "na\u00efve caf\u00e9 r\u00e9sum\u00e9 e\u0301",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u4e2d\u56fd\u8bdd\u3002\ud55c\uad6d\uc5b4",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3f3\ufe0f\u200d\U0001f308",
    "\u00a0nbsp\u200bzero width\ufeff",
    "x" * 100,
    "a\r\nb\rc",
    "https://example.com/a?b=c&d=%20#e",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<bos>text<eos>",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "<|endoftext|>",
    "<h1>Title</h1><br>",
    "\u2581already\u2581marked \u2581\u2581 mixed",
    " " * 40 + "x",
    "\x00\x01\x7f",
    "\u2260 \u2211 \u2202 \u00b5 \u00a3 \u00a7 \u00b6",
    '{"key": [1, 2, {"a": null}]}',
    "tab\tand  \n  newline \n\n  ",
    "<0x0A> <unk> <pad> [multimodal] <unused3>",
    "1 2  3   4",
    "a1b22c333",
    "\u0663\u0664\u0665 \u2167 \u00bd \u00b2",
    "\n \n  \n   \n",
    "end" + "\n" * 7,
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 2024!"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "x"},
]


def quantized_blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """Return ROWS rows of stored bytes of one type."""
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    if name not in SCALE_OFFSETS:
        values = rng.standard_normal((ROWS, ROW_SIZE)).astype(np.float32)
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8).reshape(ROWS, -1)
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (ROWS * ROW_SIZE // block_size, num_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[name]:
        scales = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


def write_quants(folder: Path) -> None:
    """Write stored bytes and their dequantized numbers, for every type."""
    import gguf

    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name in TYPES:
        data = quantized_blocks(name, rng)
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
        arrays |= {f"{name}_data": data, f"{name}_values": values.astype(np.float32).reshape(ROWS, ROW_SIZE)}
    np.savez_compressed(folder / "quants.npz", **arrays)


def tokenizer_goldens(path: Path) -> dict[str, Any]:
    """Return the ids and decoded texts of transformers' own reading of the file."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if "smollm" in path.name.lower():
        # The model's own tokenizer.json splits single digits off first; transformers' reading of GGUF forgets it.
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    return {
        "texts": TEXTS,
        "ids": ids,
        "bare_ids": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
        "decoded": [tokenizer.decode(each) for each in ids],
        "decoded_without_special": [tokenizer.decode(each, skip_special_tokens=True) for each in ids],
        "chat": CHAT,
        "chat_ids": tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        if tokenizer.chat_template
        else None,
    }


def weight_digests(path: Path) -> dict[str, str]:
    """Return the start of the SHA-256 of each of HF's tensors in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files, for goldens of tokenizers and weights")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "tests" / "data" / "gguf")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_quants(args.out)
    for path in args.models:
        goldens = {"tokenizer": tokenizer_goldens(path), "weights": weight_digests(path)}
        text = json.dumps(goldens, separators=(",", ":"))
        (args.out / f"{path.stem}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
