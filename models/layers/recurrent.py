"""Choose the module of a layer with recurrent state, by its spec."""

from __future__ import annotations

from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..mixer_specs import ConvSpec, DeltaSpec, ScanSpec, SelectiveSpec
from .gated_delta import DeltaInputs, GatedDeltaNet, KimiDelta, KimiDeltaInputs
from .mamba import Mamba2, ScanInputs
from .selective import Mamba, SelectiveInputs
from .short_conv import ConvInputs, ShortConv

type StateInputs = DeltaInputs | KimiDeltaInputs | ConvInputs | ScanInputs | SelectiveInputs


def make_recurrent(
    spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike
) -> GatedDeltaNet | KimiDelta | ShortConv | Mamba2 | Mamba:
    """Return the projections around a layer's recurrent state."""
    match spec.state:
        case DeltaSpec(decays_by_key=False):
            return GatedDeltaNet(spec, cfg, dtype)
        case DeltaSpec():
            return KimiDelta(spec, cfg, dtype)
        case ConvSpec():
            return ShortConv(spec, cfg, dtype)
        case ScanSpec():
            return Mamba2(spec, cfg, dtype)
        case SelectiveSpec():
            return Mamba(spec, cfg, dtype)
        case None:
            raise ValueError("a layer of attention has no recurrent state")
