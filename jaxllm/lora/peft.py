"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.json_file import read_json
from jaxllm.loading.open import looks_like_path
from jaxllm.loading.weight_files import WeightFile, open_weights

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
_MATRIX_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA, which scales the columns of the sum",
    "use_qalora": "pooled inputs (QA-LoRA)",
    "use_bdlora": "blocks along a diagonal (BD-LoRA)",
    "layer_replication": "repeated layers",
    "lora_bias": "a bias on B",
    "modules_to_save": "whole modules that were trained beside it",
    "target_parameters": "parameters of experts",
    "trainable_token_indices": "trained rows of the embedding",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
}
"""The parts of an adapter that are not applied, by their keys in the config."""


@dataclass(frozen=True)
class Matrices:
    """An adapter's addition to one module's weight, the float32 product `up` [out, rank] times `down` [rank, in]."""

    down: np.ndarray
    up: np.ndarray


def find_adapter(path: str, *, token: str | bool | None = None, download_dir: str | None = None) -> Path:
    """Return the folder of an adapter: a local one, or one downloaded from the hub.

    Raises VLLMValidationError, naming lora_path, if there is none.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or looks_like_path(path):
        raise VLLMValidationError(f"LoRA adapter {path}: there is no such folder.", parameter="lora_path")
    from jaxllm.loading.hub import Repository

    try:
        return Repository(path, None, token, download_dir).download((CONFIG_NAME, *WEIGHTS_NAMES))
    except VLLMValidationError as error:
        raise VLLMValidationError(f"LoRA adapter {path}: {error}", parameter="lora_path", value=path) from error


class PeftAdapter:
    """One adapter; its tensors are read on request."""

    def __init__(self, folder: Path, max_rank: int) -> None:
        """Open a folder. Raises VLLMValidationError if it is no LoRA adapter, is malformed or is not supported."""
        self._source = str(folder)
        if not (folder / CONFIG_NAME).exists():
            message = f"LoRA adapter {folder}: there is no {CONFIG_NAME}."
            raise VLLMValidationError(message, parameter="lora_path")
        self._config = read_json(folder / CONFIG_NAME, self._source)
        self._check_config()
        name = next((name for name in WEIGHTS_NAMES if (folder / name).exists()), None)
        if name is None:
            raise self.error(f"there is no {' or '.join(WEIGHTS_NAMES)}; other formats are not read")
        self._file: WeightFile = open_weights(folder / name, self._source)
        self._names = self._pair_names()
        for module in self._names:
            self._check_rank(module, max_rank)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the adapted modules, as in HF's base model."""
        return tuple(self._names)

    def read(self, module: str) -> Matrices:
        """Return a module's matrices, `up` scaled; raise VLLMValidationError if a number is not finite."""
        down, up = (np.asarray(self._file.read(name), np.float32) for name in self._names[module])
        for matrix in (down, up):
            if not np.isfinite(matrix).all():
                raise self.error(f"{module} has numbers that are not finite")
        return Matrices(down, up * np.float32(self._scale(module, down.shape[0])))

    def error(self, message: str) -> VLLMValidationError:
        """Return the error for this adapter."""
        return VLLMValidationError(f"LoRA adapter {self._source}: {message}.", parameter="lora_request")

    def _check_config(self) -> None:
        config = self._config
        if config.get("peft_type") != "LORA":
            raise self.error(f"{CONFIG_NAME} has peft_type={config.get('peft_type')!r}, and only LORA is known")
        if config.get("bias", "none") not in (None, "none"):
            raise self.error(f"it trains biases (bias={config['bias']!r}), which are not applied")
        for key, what in REFUSED.items():
            if config.get(key):
                raise self.error(f"it has {what} ({key}), which is not applied")
        for key in ("r", "lora_alpha"):
            value = config.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or value != value:
                raise self.error(f"{CONFIG_NAME} has {key}={value!r}, not a number above 0")

    def _pair_names(self) -> dict[str, tuple[str, str]]:
        """Return the tensors' names by module, and check that they fit together."""
        sides: dict[str, dict[str, str]] = {}
        for name in self._file.entries:
            match = _MATRIX_NAME.fullmatch(name)
            if match is None:
                raise self.error(f"it has {name}, which is not applied: only lora_A and lora_B of linear layers are")
            sides.setdefault(match["module"], {})[match["side"]] = name
        pairs = {}
        for module, names in sides.items():
            if len(names) < 2:
                raise self.error(f"{module} has only lora_{next(iter(names))}")
            down, up = (self._file.entries[names[side]].shape for side in "AB")
            if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
                raise self.error(f"{module} has lora_A {list(down)} and lora_B {list(up)}, which do not fit each other")
            pairs[module] = names["A"], names["B"]
        if not pairs:
            raise self.error("it has no tensors, so it would change nothing")
        return pairs

    def _check_rank(self, module: str, max_rank: int) -> None:
        rank = self._file.entries[self._names[module][0]].shape[0]
        declared = self._pattern("rank_pattern", module, self._config["r"])
        if rank != declared:
            raise self.error(f"{module} has rank {rank}, and {CONFIG_NAME} says {declared}")
        if rank > max_rank:
            raise self.error(f"{module} has rank {rank}, more than max_lora_rank={max_rank}")

    def _scale(self, module: str, rank: int) -> float:
        alpha = self._pattern("alpha_pattern", module, self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        """Return the value for a module in a pattern dict, with regular expressions for ends of names as keys."""
        patterns = self._config.get(key) or {}
        if not isinstance(patterns, dict) or not all(isinstance(value, (int, float)) for value in patterns.values()):
            raise self.error(f"{key} of {CONFIG_NAME} must have a number for each pattern")
        for pattern, value in patterns.items():
            try:
                match = re.fullmatch(rf"(.*\.)?({pattern})", module)
            except (re.error, OverflowError, RecursionError) as error:
                raise self.error(f"{key} of {CONFIG_NAME} has {pattern!r}, no regular expression: {error}") from error
            if match:
                return value
        return default
