"""Read the file of an engine's steering vectors: safetensors with a tensor NAME.layers.LAYER [d] for each layer."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.safetensors import SafetensorsFile
from jaxllm.params.checks import shown

_TENSOR = re.compile(r"(?s)(.+)\.layers\.(0|[1-9][0-9]{0,4})")
_DTYPES = ("float32", "float16", "bfloat16")
_MAX_VECTORS, _MAX_VALUE = 1024, 1e6
_PARAMETER = "steering"


@dataclass(frozen=True, eq=False)
class SteeringVectors:
    """The vectors of a file, for a model of l layers and width d."""

    digests: dict[str, str]
    """A hash of each vector by its name, in hexadecimal, in the order of `values_lvd`."""
    values_lvd: np.ndarray
    """float32 [l, 1 + vectors, d]; the first of each layer is 0, as are layers that a vector leaves out."""

    @property
    def digest(self) -> str:
        """Return a hash of all vectors, in hexadecimal."""
        return hashlib.sha256("\n".join([*self.digests, *self.digests.values()]).encode()).hexdigest()


def read_vectors(path: str, num_layers: int, width: int) -> SteeringVectors:
    """Read a file of vectors for the outputs of a model's layers, counted from 0.

    Raises VLLMValidationError for a file that cannot be read, or does not fit the model.
    """
    try:
        file = SafetensorsFile(Path(path).expanduser())
    except (OSError, ValueError) as error:
        raise _refusal(path, f"cannot be read: {error}") from error
    layers_of: dict[str, dict[int, str]] = {}
    for tensor, entry in file.entries.items():
        named = _TENSOR.fullmatch(tensor)
        if named is None:
            raise _refusal(path, f"has a tensor {shown(tensor)}, and all must be called NAME.layers.LAYER")
        name, layer = named[1], int(named[2])
        if layer >= num_layers:
            raise _refusal(path, f"has a tensor {shown(tensor)}, and the model has layers 0 to {num_layers - 1}")
        if entry.shape != (width,) or entry.dtype.name not in _DTYPES:
            what = f"{entry.dtype.name} {list(entry.shape)}"
            wanted = f"[{width}], the model's width, of {', '.join(_DTYPES)}"
            raise _refusal(path, f"has a tensor {shown(tensor)} of {what}, which must be {wanted}")
        layers_of.setdefault(name, {})[layer] = tensor
    if not 1 <= len(layers_of) <= _MAX_VECTORS:
        raise _refusal(path, f"must have 1 to {_MAX_VECTORS} vectors, and has {len(layers_of)}")
    values_lvd, digests = np.zeros((num_layers, 1 + len(layers_of), width), np.float32), dict[str, str]()
    for index, name in enumerate(sorted(layers_of), start=1):
        for layer, tensor in layers_of[name].items():
            values_lvd[layer, index] = file.read(tensor).astype(np.float32)
            if not (np.abs(values_lvd[layer, index]) <= _MAX_VALUE).all():
                raise _refusal(path, f"has a tensor {shown(tensor)} with a value that is not within ±{_MAX_VALUE:g}")
        digests[name] = hashlib.sha256(values_lvd[:, index].tobytes()).hexdigest()
    return SteeringVectors(digests, values_lvd)


def _refusal(path: str, reason: str) -> VLLMValidationError:
    return VLLMValidationError(f"steering: {path} {reason}.", parameter=_PARAMETER, value=path)
