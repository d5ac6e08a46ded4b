"""Write tests/data/media/tensors.json: files that torch.save makes of tensors and of other objects, in base64.

pip install torch        # the environment of scripts/peers.sh hf
python scripts/make.py tensor_goldens
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import base64
import io
import json
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).resolve().parents[2] / "tests" / "data" / "media" / "tensors.json"


def make_read() -> dict[str, torch.Tensor]:
    """Return tensors that are read."""
    rows_rw = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7 - 1
    return {
        "float32": rows_rw,
        "float16": rows_rw.half(),
        "bfloat16": rows_rw.bfloat16(),
        "float64": rows_rw.double(),
        "int64": torch.tensor([[1, 4, 6]]),
        "int32": torch.tensor([1, 4, 6], dtype=torch.int32),
        "part": rows_rw[1:],
        "stack": rows_rw[None],
        "with_gradient": rows_rw.clone().requires_grad_(),
    }


def make_refused() -> dict[str, Any]:
    """Return objects that are refused."""
    rows_rw = torch.eye(3)
    return {
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "coo": rows_rw.to_sparse_coo(),
        "coo_outside": torch.sparse_coo_tensor(
            torch.tensor([[100], [100]]), torch.ones(1), (3, 3), check_invariants=False
        ),
        "csr": rows_rw.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(rows_rw, 0.1, 0, torch.qint8),
        "bool": rows_rw > 0,
        "parameter": torch.nn.Parameter(rows_rw),
        "dict": {"rows": rows_rw},
        "list": [1, 2],
        "number": 3,
    }


def save(value: Any, **options: Any) -> str:
    """Return what torch.save makes of a value, in base64."""
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return base64.b64encode(stream.getvalue()).decode()


def main(arguments: list[str] | None = None) -> None:
    """Write the file."""
    argparse.ArgumentParser(prog="make.py tensor_goldens", description=__doc__).parse_args(arguments)
    read = {
        name: {"file": save(tensor), "values": tensor.detach().double().tolist()}
        for name, tensor in make_read().items()
    }
    refused = {name: save(value) for name, value in make_refused().items()}
    refused["old_format"] = save(torch.eye(2), _use_new_zipfile_serialization=False)
    PATH.write_text(json.dumps({"read": read, "refused": refused}, indent=1) + "\n")


if __name__ == "__main__":
    main()
