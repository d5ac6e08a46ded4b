"""Model definitions as pure functions: a config from HF's config.json, parameter specs, and a forward pass.

Each family of models is a file in `families`, composed of modules from `layers`; `registry` maps HF architecture names
to families.
"""

from .config import HeadLayer, LayerSpec, ModelConfig, MoESpec, Pooling, QueryScaling, RopeConfig
from .family import Family
from .inputs import TokenBatch
from .loop import LayerLoop
from .model import Model
from .names import Fused, Prefixes, TensorName
from .params import ParamSpec
from .registry import get_family, register_model, supported_architectures
from .specs import ModelSpecs

__all__ = [
    "Family",
    "Fused",
    "HeadLayer",
    "LayerLoop",
    "LayerSpec",
    "MoESpec",
    "Model",
    "ModelConfig",
    "ModelSpecs",
    "ParamSpec",
    "Pooling",
    "Prefixes",
    "QueryScaling",
    "RopeConfig",
    "TensorName",
    "TokenBatch",
    "get_family",
    "register_model",
    "supported_architectures",
]
