"""LoRA adapters in a model's own checkpoint, beside its weights: one for each task, as in Jina Embeddings v3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.lora.adapter_weights import load_adapter
from jaxllm.lora.peft import Matrices
from jaxllm.models.adapters import Adapters
from jaxllm.models.config import TaskAdapters
from jaxllm.models.params import ArraySpec, ParamSpec

_WEIGHT, _DOWN, _UP = ".original", ".0.lora_A", ".0.lora_B"
_EMBEDDING, _TYPES = "embed.table", "types"


class TaskAdapter:
    """The adapter of one task; its tensors [tasks, ...] are read on request."""

    def __init__(self, checkpoint: Checkpoint, specs: Mapping[str, ParamSpec], tasks: TaskAdapters, task: str) -> None:
        """Find a task's matrices. `specs` are those of the model's parameters, by path.

        Raises VLLMValidationError for a checkpoint that lacks them.
        """
        self._checkpoint, self._specs, self._tasks, self._task = checkpoint, specs, tasks, task
        sources = (source for path, spec in specs.items() if path.startswith("layers.") for source in spec.sources)
        self.modules = tuple(dict.fromkeys(source for source in sources if self._beside(source) is not None))
        """The names of the adapted tensors in layers."""
        if not self.modules or any(self._beside(specs[path].sources[0]) is None for path in (_EMBEDDING, _TYPES)):
            raise self.error("its weights have no matrices beside them")

    def read(self, module: str) -> Matrices:
        """Return the matrices of a tensor in layers, `up` scaled."""
        down, up = self._pair(module)
        return Matrices(down, up * np.float32(self._tasks.scale))

    def read_embedding(self) -> Matrices:
        """Return the matrices of the embedding, `down` [rank + 1, v] and `up` [rank + 1, d], scaled.

        The last row adds to all tokens what the adapter adds to the first token type.
        """
        down, up = self._pair(self._specs[_EMBEDDING].sources[0])
        types_down, types_up = self._pair(self._specs[_TYPES].sources[0])
        added = types_down[:1] @ types_up
        rows = np.concatenate([down.T, np.ones((1, len(down)), np.float32)])
        return Matrices(rows, np.concatenate([up, added]) * np.float32(self._tasks.scale))

    def error(self, message: str) -> VLLMValidationError:
        """Return the error for this adapter."""
        text = f"{self._checkpoint.source}: the adapter of {self._task!r}: {message}."
        return VLLMValidationError(text, parameter="prompt_name", value=self._task)

    def _beside(self, source: str) -> tuple[str, str] | None:
        """Return the names of the matrices beside a weight; None if there are none."""
        stem = source.removesuffix(_WEIGHT)
        names = stem + _DOWN, stem + _UP
        return names if stem != source and all(name in self._checkpoint.tensors for name in names) else None

    def _pair(self, source: str) -> tuple[np.ndarray, np.ndarray]:
        names = self._beside(source)
        assert names is not None
        index = self._tasks.names.index(self._task)
        pair = [np.asarray(self._checkpoint.read(name), np.float32) for name in names]
        for name, tensor in zip(names, pair, strict=True):
            if tensor.ndim != 3 or len(tensor) != len(self._tasks.names) or self._tasks.rank not in tensor.shape[1:]:
                raise self.error(f"{name} is {list(tensor.shape)}, for {len(self._tasks.names)} tasks")
            if not np.isfinite(tensor[index]).all():
                raise self.error(f"{name} has numbers that are not finite")
        return pair[0][index], pair[1][index]


def load_task_adapter(
    adapter: TaskAdapter, arrays: Mapping[str, ArraySpec], slot: Mapping[str, Adapters]
) -> dict[str, Any]:
    """Return the arrays of one slot, as `load_adapter` does, with those of the embedding."""
    arrays_of_slot, matrices = load_adapter(adapter, arrays, slot), adapter.read_embedding()
    table, rows = arrays_of_slot["embed"]["table"], len(matrices.down)
    table.down[:rows], table.up[:rows] = matrices.down, matrices.up
    return arrays_of_slot
