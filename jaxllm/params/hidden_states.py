"""What a request asks of hidden states: which positions of its prompt."""

from __future__ import annotations

from typing import Any, Literal

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown

HIDDEN_STATES = "hidden_states"
"""The name in `SamplingParams.extra_args`."""

type Positions = Literal["last", "all"]
"""The last token of a prompt, or all of them."""


def read_positions(value: Any, label: str, *, has_layers: bool) -> Positions:
    """Return the positions that `extra_args["hidden_states"]` asks for; `label` begins errors.

    Raises VLLMValidationError, also for an engine that returns no layers.
    """
    what = f"{label}: extra_args[{HIDDEN_STATES!r}]"
    if not has_layers:
        message = f"{what} needs an engine with hidden_states_layers, the layers to return."
        raise VLLMValidationError(message, parameter="extra_args", value=value)
    if value not in ("last", "all"):
        message = f"{what} must be 'last' or 'all', the positions of the prompt, got {shown(value)}."
        raise VLLMValidationError(message, parameter="extra_args", value=value)
    return value
