"""The request for a LoRA adapter."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxllm.exceptions import VLLMValidationError

_TASK_PATH, _FIRST_TASK_ID = "checkpoint://", 2**62


class LoRARequest(msgspec.Struct, omit_defaults=True, array_like=True):
    """The name, number and path of an adapter.

    Requests are equal if their names are. Requests with the same number share the adapter loaded for the first of them,
    unless `load_inplace` asks for it to be read again.
    """

    lora_name: str
    lora_int_id: int
    """1 or more."""
    lora_path: str = ""
    """A folder that PEFT saved, or a repository of the hub with the same files."""
    base_model_name: str | None = None
    """Shown in listings alone, and not compared with the engine's model."""
    tensorizer_config_dict: dict | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        """Raise VLLMValidationError for a number below 1 or an empty path."""
        if self.lora_int_id < 1:
            message = f"lora_int_id must be 1 or more, got {self.lora_int_id}."
            raise VLLMValidationError(message, parameter="lora_int_id", value=self.lora_int_id)
        if not self.lora_path:
            raise VLLMValidationError("lora_path must name an adapter's folder, and is empty.", parameter="lora_path")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def task(self) -> str | None:
        """Return the task whose adapter in the model's own checkpoint it is; None for other adapters."""
        path = self.lora_path
        return path.removeprefix(_TASK_PATH) if path.startswith(_TASK_PATH) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


def task_request(names: Sequence[str], name: str | None) -> LoRARequest | None:
    """Return the request for the adapter of a task, one of a model's `names`; None if it is none of them."""
    if name is None or name not in names:
        return None
    return LoRARequest(name, _FIRST_TASK_ID + names.index(name), _TASK_PATH + name)
