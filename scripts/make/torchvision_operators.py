"""Declare torchvision's own operators where it cannot load them, since they need the libraries of CUDA.

No processor calls them; declared, they let torchvision be imported. Import this module before transformers.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    """What declares the operators; they go with it."""
    for _name in ("nms", "qnms"):
        LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
