"""The calls about weights of cores that have none: mock cores, and those of tests."""

from __future__ import annotations

from typing import Any

from jaxllm.exceptions import VLLMValidationError


class WithoutWeights:
    """The base of cores without weights, which refuse new ones. They keep a version, as other cores do."""

    weight_version: str | int = "default"

    def start_weight_update(self, of_draft: bool = False) -> None:
        """Raise VLLMValidationError: there are no weights."""
        del of_draft
        raise VLLMValidationError("there are no weights to update.", parameter="weights")

    def update_weights(self, weights: Any) -> None:
        """Raise VLLMValidationError: there are no weights."""
        del weights
        self.start_weight_update()

    def finish_weight_update(self, version: str | int | None = None) -> None:
        """Raise VLLMValidationError: there are no weights."""
        del version
        self.start_weight_update()

    def is_updating_weights(self) -> bool:
        """Return False: no update can have begun."""
        return False

    def drop_weight_update(self) -> None:
        """Do nothing: no update can have begun."""

    def get_weights(self) -> Any:
        """Raise VLLMValidationError: there are no weights."""
        self.start_weight_update()

    def set_weight_version(self, version: str | int) -> None:
        """Set the version that `get_weight_version` returns."""
        self.weight_version = version

    def get_weight_version(self) -> str | int:
        """Return the version of weights that are not there."""
        return self.weight_version
