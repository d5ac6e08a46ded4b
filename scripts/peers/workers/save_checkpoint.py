"""save_checkpoint.py MODEL.gguf FOLDER: write a GGUF model as a bfloat16 safetensors checkpoint with its tokenizer.

Runs in the environment of `scripts/peers.sh DIR hf`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(gguf: Path, folder: Path) -> None:
    """Dequantize, round to bfloat16, and save."""
    dense = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=dense, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
