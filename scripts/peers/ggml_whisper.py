"""Write a Whisper of Hugging Face's form as the file that whisper.cpp reads, in float16 or 8 bits (q8_0)."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors.numpy import load_file
from transformers.audio_utils import mel_filter_bank
from transformers.convert_slow_tokenizer import bytes_to_unicode

MAGIC = 0x67676D6C
FLOAT32, FLOAT16, Q8_0 = 0, 1, 8
"""Types of tensors."""
FILE_TYPES = {FLOAT16: 1, Q8_0: 7}
"""What the file's header calls each type of matrices."""
BLOCK = 32
"""The weights of q8_0 that share a scale."""
NAMES = (
    (r"^model\.", ""),
    (r"layers\.", "blocks."),
    (r"self_attn_layer_norm", "attn_ln"),
    (r"encoder_attn_layer_norm", "cross_attn_ln"),
    (r"final_layer_norm", "mlp_ln"),
    (r"encoder\.layer_norm", "encoder.ln_post"),
    (r"decoder\.layer_norm", "decoder.ln"),
    (r"self_attn\.", "attn."),
    (r"encoder_attn\.", "cross_attn."),
    (r"\.q_proj", ".query"),
    (r"\.k_proj", ".key"),
    (r"\.v_proj", ".value"),
    (r"\.out_proj", ".out"),
    (r"\.fc1", ".mlp.0"),
    (r"\.fc2", ".mlp.2"),
    (r"embed_tokens", "token_embedding"),
    (r"embed_positions\.weight", "positional_embedding"),
)
"""Parts of Hugging Face's names and those of OpenAI's, which whisper.cpp uses, in order."""
HEADER = (
    *("vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers"),
    *("max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers", "num_mel_bins"),
)
"""The fields of config.json in the order of the file's header."""


def write_ggml(folder: Path, path: Path, matrices: int = FLOAT16) -> None:
    """Write a checkpoint's folder as one file: matrices in a type, convolutions in float16, the rest in float32."""
    config = json.loads((folder / "config.json").read_text())
    with path.open("wb") as file:
        file.write(struct.pack("<I", MAGIC))
        file.write(struct.pack("<11i", *(config[name] for name in HEADER), FILE_TYPES[matrices]))
        _write_filters(file, config["num_mel_bins"])
        _write_vocabulary(file, json.loads((folder / "tokenizer.json").read_text()))
        for name, tensor in _tensors(load_file(folder / "model.safetensors")):
            _write_tensor(file, name, tensor, matrices)


def _write_filters(file: BinaryIO, num_mels: int) -> None:
    filters = mel_filter_bank(
        num_frequency_bins=201, num_mel_filters=num_mels, min_frequency=0.0, max_frequency=8000.0,
        sampling_rate=16000, norm="slaney", mel_scale="slaney",
    ).T.astype(np.float32)  # fmt: skip
    file.write(struct.pack("<2i", *filters.shape))
    file.write(filters.tobytes())


def _write_vocabulary(file: BinaryIO, tokenizer: Mapping[str, Any]) -> None:
    """Write the tokens of text; whisper.cpp knows the others by their numbers."""
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted((number, token) for token, number in tokenizer["model"]["vocab"].items() if number not in special)
    file.write(struct.pack("<i", len(tokens)))
    for _, token in tokens:
        text = bytes(of_character[character] for character in token)
        file.write(struct.pack("<i", len(text)))
        file.write(text)


def _tensors(weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors with whisper.cpp's names. Biases of convolutions are columns."""
    for name, tensor in weights.items():
        if name == "proj_out.weight":
            continue  # the embeddings
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        yield name, tensor.reshape(-1, 1) if re.fullmatch(r"encoder\.conv\d\.bias", name) else tensor


def _write_tensor(file: BinaryIO, name: str, tensor: np.ndarray, matrices: int) -> None:
    if tensor.ndim < 2 or tensor.shape[-1] == 1 or name.endswith("positional_embedding"):
        kind, data = FLOAT32, tensor.astype(np.float32).tobytes()
    elif tensor.ndim == 3 or matrices == FLOAT16:
        kind, data = FLOAT16, tensor.astype(np.float16).tobytes()
    else:
        kind, data = Q8_0, _quantized(tensor)
    text = name.encode()
    file.write(struct.pack(f"<3i{tensor.ndim}i", tensor.ndim, len(text), kind, *reversed(tensor.shape)))
    file.write(text)
    file.write(data)


def _quantized(tensor: np.ndarray) -> bytes:
    """Return blocks of a float16 scale and 32 int8 weights."""
    blocks = tensor.astype(np.float32).reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    values = np.round(blocks / np.where(scales, scales, 1)).astype(np.int8)
    return np.concatenate((scales.astype(np.float16).view(np.int8), values), axis=1).tobytes()
