"""Turn a LoRA adapter's tensors into the arrays of one slot, in the order and with the repeats of the weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.layout import parse_layout, write_tensor
from jaxllm.loading.load import Piece, own_pieces, stored_index, stored_shape
from jaxllm.lora.peft import Matrices
from jaxllm.models.adapters import Adapters
from jaxllm.models.family import OTHER_MODALITIES
from jaxllm.models.params import PART_AXIS, ArraySpec, ParamSpec, outputs_of, unflatten

_IN_LAYER = re.compile(r"(?:.*\.)?(\w+\.\d+\.\D+)")
"""Match a module's name. The last group is the part from the list of layers on; the part before it differs between
versions of HF.
"""
_MOST_NAMED = 3
"""The number of modules that an error names."""


class _Target(NamedTuple):
    """One parameter's part of a layer's arrays."""

    made: Adapters
    array: ArraySpec
    param: ParamSpec
    part: int
    """The parameter's index in the weight."""


class AdapterSource(Protocol):
    """An opened adapter: the names of its modules, and their matrices."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the adapted modules, or of their weights, as in the checkpoint."""
        ...

    def read(self, module: str) -> Matrices:
        """Return a module's matrices, `up` scaled."""
        ...

    def error(self, message: str) -> VLLMValidationError:
        """Return the error for this adapter."""
        ...


def load_adapter(adapter: AdapterSource, arrays: Mapping[str, ArraySpec], slot: Mapping[str, Adapters]) -> Any:
    """Return the arrays of one slot, nested like the engine's.

    `arrays` are the specs of the model's weights by path, and `slot` those of a single slot's adapters; the arrays of
    the embedding's are zeros. Raises
    VLLMValidationError for an adapter of other sizes, or for modules without a linear layer in the model.
    """
    adapters: dict[str, Adapters] = {}
    targets: defaultdict[str, list[_Target]] = defaultdict(list)
    for path, specs in slot.items():
        down, up = (np.zeros(spec.shape, spec.dtype) for spec in (specs.down, specs.up))
        made = adapters[path] = Adapters(down, up, specs.parts)
        if not path.startswith("layers."):
            continue
        array = arrays[path]
        for part, param in enumerate(array.params.values()):
            for layer, source in enumerate(param.sources):
                layer_factors = replace(made, down=made.down[layer], up=made.up[layer]) if array.stacked else made
                targets[_in_layer(source.removesuffix(".weight"))].append(_Target(layer_factors, array, param, part))
    # The encoder of another modality may name its layers like the model's own.
    own_modules = [each for each in adapter.modules if not any(fnmatch(each, other) for other in OTHER_MODALITIES)]
    modules = {_in_layer(module): module for module in own_modules}
    taken = {module for name, module in modules.items() if name in targets}
    if left := sorted(set(adapter.modules) - taken):
        names = ", ".join(left[:_MOST_NAMED]) + (f" and {len(left) - _MOST_NAMED} more" if left[_MOST_NAMED:] else "")
        raise adapter.error(
            f"it is for {names}, and this model has no linear layer of that name: embeddings, heads, routers and "
            "experts take no adapters, nor do DeBERTa's queries, keys and values, and encoders of other modalities"
        )
    for name, module in modules.items():
        matrices = adapter.read(module)
        for target in targets[name]:
            _write(matrices, target, adapter, module)
    return unflatten(adapters)


def _in_layer(module: str) -> str:
    match = _IN_LAYER.fullmatch(module)
    return match[1] if match else module


def _write(matrices: Matrices, target: _Target, adapter: AdapterSource, module: str) -> None:
    """Write one module's matrices, or a part of them, into the slot's arrays."""
    made, array, param, part = target
    outputs = outputs_of(param)
    if outputs is None:
        raise adapter.error(
            f"{module} is not taken whole by one of this model's matmuls, so nothing can be added to it"
        )
    (rank, num_inputs), (num_outputs, _) = matrices.down.shape, matrices.up.shape
    count = param.num_inputs
    rows = prod(param.hf_shape) // prod(param.shape[-count:])
    if (num_outputs, num_inputs) != (rows, prod(param.shape[-count:])):
        raise adapter.error(
            f"{module} is for {num_inputs} inputs and {num_outputs} outputs, and in this model it has "
            f"{prod(param.shape[-count:])} and {rows}"
        )
    first = part * (made.down.shape[0] // len(array.params))
    made.down[first : first + rank] = matrices.down
    ours = " ".join(param.layout.partition("->")[2].split()[:-count])
    factor = replace(param, shape=(*param.shape[:-count], rank), axes=(*param.axes[:-count], None))
    columns = np.moveaxis(made.up[first : first + rank], 0, -1)
    bounds = tuple((0, size) for size in columns.shape)
    for piece in own_pieces(factor, [Piece(columns, bounds)]):
        write_tensor(
            matrices.up[outputs.hf_index],
            parse_layout(f"{outputs.axes} {PART_AXIS} -> {ours} {PART_AXIS}"),
            stored_shape(factor),
            piece.array,
            stored_index(factor, piece.bounds),
        )
