"""Model definitions as pure functions: a config from HF's config.json, parameter specs, and a forward pass.

Families live one per file; `registry` maps HF architecture names to them.
"""

from .config import LayerSpec, ModelConfig, RopeConfig
from .family import Family, TensorName
from .loop import LayerLoop
from .model import Model, ParamSpec, TokenBatch
from .registry import get_family, register_model, supported_architectures

__all__ = [
    "Family",
    "LayerLoop",
    "LayerSpec",
    "Model",
    "ModelConfig",
    "ParamSpec",
    "RopeConfig",
    "TensorName",
    "TokenBatch",
    "get_family",
    "register_model",
    "supported_architectures",
]
