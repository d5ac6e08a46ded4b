"""Write tests/data/torch: small files of torch.save, for the reader that does without PyTorch.

Needs an environment of its own with torch: `pip install torch numpy`, then `python scripts/make.py torch_files`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import collections
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[2] / "tests/data/torch"


def main() -> None:
    """Write a state dict with all dtypes and shapes of storage, whole files that are refused, and an old file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).reshape(2, 3))
        layer.bias.copy_(torch.tensor([0.5, -2.0]))
    tensors = layer.state_dict()  # with the versions of modules as attributes
    tensors["parameter"] = torch.nn.Parameter(torch.arange(4.0).half())
    tensors["trained"] = torch.arange(3.0, requires_grad=True)
    tensors["part"] = torch.arange(12).reshape(3, 4).T[1:]
    tensors["again"] = tensors["weight"]
    tensors["scalar"] = torch.tensor(3.0)
    tensors["empty"] = torch.zeros(0, 3)
    for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        tensors[name] = torch.arange(5).to(getattr(torch, name))
    for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"):
        tensors[name] = torch.arange(5.0).to(getattr(torch, name))
    torch.save(tensors, FOLDER / "tensors.bin")
    torch.save({"a": torch.arange(3.0)}, FOLDER / "old.bin", _use_new_zipfile_serialization=False)
    torch.save(layer, FOLDER / "model.bin")
    torch.save(collections.OrderedDict(step=3, model=layer.state_dict()), FOLDER / "training.bin")


if __name__ == "__main__":
    main()
