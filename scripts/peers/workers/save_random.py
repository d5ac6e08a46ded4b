"""save_random.py CONFIG.json FOLDER: write a bfloat16 checkpoint of random weights, which HF and jaxllm can both read.

Runs in the environment of `scripts/peers.sh DIR hf`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(config: Path, folder: Path) -> None:
    """Make the model as HF initializes it, and save it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
